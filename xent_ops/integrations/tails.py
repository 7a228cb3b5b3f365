"""Finds the operations on logits between the head and the loss of a model of transformers, by running the model."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.options import Activation
from . import heads

# The fields in configurations of transformers 5.23 for a cap, a factor or a divisor of the logits.
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_FACTORS = ("logit_scale", "logits_scaling", "lm_head_multiplier")
_DIVISORS = ("logits_scaling",)


def candidates(config: Any) -> list[Activation]:
    """The tails that the configuration may mean. ``find`` checks which of them is right."""
    config = config.get_text_config()

    def values(names: tuple[str, ...]) -> list[float]:
        found = (getattr(config, name, None) for name in names)
        return [float(value) for value in found if isinstance(value, (int, float)) and value]

    scales = [1.0, *values(_FACTORS), *(1 / value for value in values(_DIVISORS))]
    return [Activation(cap, scale) for cap in (None, *values(_SOFTCAPS)) for scale in dict.fromkeys(scales)]


def find(model: Any, head: nn.Module, upcast: bool = False, wrapper: Any = None) -> tuple[Activation, type]:
    """The tail of a model and its head, and the class of its output. ``upcast`` is as for ``heads.product``.

    ``wrapper`` is called in place of the model.

    It runs two forwards of four tokens in evaluation mode. The first replaces the head's output by a ramp, the second
    by an empty tensor, as in training. If the two losses differ, the model reads its logits beside the loss.
    """
    name = type(model).__name__
    with heads.gathered(model):
        ramped, output = _run(model, head, upcast, wrapper, ramp=True)
        _, without_logits = _run(model, head, upcast, wrapper, ramp=False)
    if not torch.equal(output.loss, without_logits.loss):
        raise ValueError(
            f"{name} reads its logits beside the loss (its loss is {output.loss:g}, and {without_logits.loss:g} "
            "without them), so they cannot be left out"
        )
    ramp = _ramp(ramped)
    for tail in candidates(model.config):
        cap, scale = tail
        expected = ramp * scale if cap is None else cap * torch.tanh(ramp * (scale / cap))
        rtol = max(1e-5, 4 * torch.finfo(ramped.dtype).eps)
        if torch.allclose(ramped.float(), expected.expand(ramped.shape), rtol=rtol, atol=10 * rtol):
            return tail, type(output)
    raise ValueError(
        f"{name} changes its logits before the loss in a way that is neither a softcap nor a scale of its "
        f"configuration ({', '.join(dict.fromkeys(_SOFTCAPS + _FACTORS))}): from {ramp[0]:g} ... {ramp[-1]:g} it makes "
        f"{ramped[0, 0, 0]:g} ... {ramped[0, 0, -1]:g}"
    )


def with_temperature(tail: Activation, temperature: float) -> Activation:
    """The tail, then a division by the temperature: cap tanh(s z / cap) / T."""
    cap, scale = tail
    return Activation(None if cap is None else cap / temperature, scale / temperature)


def replace_loss_function(model: Any, function: Any) -> Any:
    """The ``loss_function`` that was set on the model, to put it back later. None: that of its ``loss_type``."""
    own = vars(model).pop("_loss_function", None)
    if function is not None:
        model.loss_function = function
    return own


def _ramp(logits: Tensor) -> Tensor:
    """(V,), far beyond any softcap. The logits of an untrained model are too small to show a softcap."""
    return torch.linspace(-200.0, 200.0, logits.shape[-1], device=logits.device)


def _run(model: Any, head: nn.Module, upcast: bool, wrapper: Any, *, ramp: bool) -> tuple[Tensor, Any]:
    """(the logits that loss_function gets, the model's output), while loss_function returns 0."""
    name = type(model).__name__
    ids = torch.arange(4, device=model.get_input_embeddings().weight.device)[None]
    if ids.is_meta:
        raise ValueError(f"{name} is on the meta device, where weights have no values: load them before use_xent")
    heads_seen: list[Tensor] = []
    losses_seen: list[tuple[Any, ...]] = []

    def head_hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        classes = heads.product(module, args[0], upcast)[1].shape[0]
        if output.dim() != 3 or output.shape[-1] != classes:
            raise ValueError(f"the head's output has shape {tuple(output.shape)}; expected (1, 4, {classes})")
        heads_seen.append(output)
        return _ramp(output).expand(output.shape) if ramp else output[:, :0]

    def loss_function(logits: Tensor, labels: Tensor, vocab_size: int, shift_labels: Any = None, **_: Any) -> Tensor:
        losses_seen.append((logits, labels, vocab_size, shift_labels))
        return torch.zeros((), device=logits.device)

    accepted = inspect.signature(model.forward).parameters
    options = {key: value for key, value in (("use_cache", False), ("return_dict", True)) if key in accepted}
    training = {module: module.training for module in model.modules()}
    handle = head.register_forward_hook(head_hook, prepend=True)
    own_loss_function = replace_loss_function(model, loss_function)
    model.eval()
    try:
        with torch.no_grad():
            output = (model if wrapper is None else wrapper)(input_ids=ids, labels=ids.clone(), **options)
    finally:
        handle.remove()
        replace_loss_function(model, own_loss_function)
        for module, mode in training.items():
            module.training = mode
    if not losses_seen and hasattr(model, "criterion"):  # models of flash-linear-attention
        raise ValueError(
            f"{name} computes its loss by model.criterion: instead of use_xent, put a criterion there that calls "
            "xent_ops.linear_cross_entropy (docs/migrate.md, flash-linear-attention)"
        )
    if len(heads_seen) != 1:
        raise ValueError(f"{name} calls its head {len(heads_seen)} times; expected once")
    if len(losses_seen) != 1:
        raise ValueError(f"{name} computes its loss by itself: it calls loss_function {len(losses_seen)} times")
    logits, labels, vocab_size, shift_labels = losses_seen[0]
    classes = heads_seen[0].shape[-1]
    if labels is None or shift_labels is not None or not torch.equal(labels, ids):
        raise ValueError(f"{name} changes its labels before the loss")
    if tuple(logits.shape) != (1, 4 if ramp else 0, classes) or vocab_size != classes:
        raise ValueError(
            f"{name} gives its loss logits of shape {tuple(logits.shape)} for a vocabulary of {vocab_size}; expected "
            f"those of the head, {classes} a token"
        )
    return logits, output
