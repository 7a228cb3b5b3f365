"""One function for all integrations: the type of its argument selects the integration."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from .integrations import heads
from .ops.message_values import type_name

_INTEGRATIONS = {"trl": "trl", "peft": "transformers", "transformers": "transformers", "megatron": "megatron"}


def use_xent(model_or_trainer: Any, **options: Any) -> Any:
    """Make a model of transformers or Megatron-Core, or a trainer of TRL, compute its loss with xent_ops.

    ``remove_xent`` undoes it.

    Args:
        model_or_trainer: a language model of transformers, a PeftModel or FSDP1's wrapper around one, a GPTModel or
            HybridModel of Megatron-Core, or a trainer of TRL, and also instances of your subclasses. It is changed in
            place.
        options: those of ``use_xent`` in ``xent_ops.integrations.transformers``, ``xent_ops.integrations.megatron`` or
            ``xent_ops.integrations.trl``. Their pages have the details.

    Returns:
        The ``Report`` of that function, which lists the replaced parts.

    Raises:
        TypeError: for any other object. Also the errors of that function.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2)).train()
        >>> report = xent_ops.use_xent(model, skip_ignored=True)
        >>> ids = torch.randint(64, (2, 9))
        >>> model(input_ids=ids, labels=ids).loss.backward()
    """
    return _integration(model_or_trainer).use_xent(model_or_trainer, **options)


def remove_xent(model_or_trainer: Any) -> None:
    """Undo ``use_xent``.

    Args:
        model_or_trainer: the argument of ``use_xent``.

    Raises:
        RuntimeError: use_xent is not on.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2))
        >>> report = xent_ops.use_xent(model)
        >>> xent_ops.remove_xent(model)
    """
    _integration(model_or_trainer).remove_xent(model_or_trainer)


def _integration(model_or_trainer: Any) -> Any:
    integration = _integration_of(model_or_trainer)
    if integration is not None:
        return importlib.import_module(f".integrations.{integration}", __package__)
    hint = (
        "a model of your own calls xent_ops.LinearCrossEntropyLoss, or is compiled with "
        "xent_ops.inductor.options(linear=True)"
    )
    if isinstance(model_or_trainer, (list, tuple)):  # Megatron's get_model
        hint = "call it on each model in it"
    inner = model_or_trainer
    while (wrapped := getattr(inner, "_orig_mod", getattr(inner, "module", None))) is not None:
        inner = wrapped
        if _integration_of(inner) is not None:
            hint = f"call it on the {type_name(inner)} inside, before the model is compiled or wrapped"
            if isinstance(model_or_trainer, torch.nn.DataParallel):
                hint += ". DataParallel is not supported, since its threads share hooks: use DistributedDataParallel"
    raise TypeError(
        "use_xent takes a GPTModel or HybridModel of Megatron-Core, a language model of transformers, a PeftModel, "
        f"FSDP1's wrapper of one, or a trainer of TRL, got {type_name(model_or_trainer)}: {hint}"
    )


def _integration_of(model_or_trainer: Any) -> str | None:
    packages = [kind.__module__.partition(".")[0] for kind in type(heads.inside(model_or_trainer)).__mro__]
    return next((integration for package, integration in _INTEGRATIONS.items() if package in packages), None)
