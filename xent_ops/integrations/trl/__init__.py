"""``use_xent(trainer)``: a trainer of TRL computes its loss and its metrics by operators of xent_ops.

TRL still computes its losses and metrics, but from our values for each token. docs/integrations.md lists the methods of
TRL that are replaced, and the test that detects a change in one of them.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import trl
from torch import nn
from transformers import PreTrainedModel

from ...kernels.options import HeadProducts
from ...ops import arguments
from .. import heads
from ..transformers import _base
from .distillation import Divergence, GkdLoss
from .fused_head import FusedHead

VERSIONS = ("1.16",)  # the versions of TRL that are tested

# The supported classes of TRL. A trainer's class is one of them, or a subclass outside TRL.
_FUSED = ("SFTTrainer", "DPOTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer")
_DISTILLING = ("GKDTrainer", "DistillationTrainer")


class Report(NamedTuple):
    """The parts that ``use_xent`` replaced. ``str`` of it has one line for each."""

    trainer: str
    replaced: list[str]
    head_products: int

    def __str__(self) -> str:
        first = f"{self.trainer}: its loss takes {self.head_products} matrix multiplications of the head, by xent_ops"
        last = "not replaced: generation, and what asks for logits (compute_metrics, label smoothing)"
        return "\n  ".join([first, *self.replaced, last])


def use_xent(
    trainer: Any,
    *,
    any_version: bool = False,
    accumulate_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    skip_ignored: bool = True,
    logits_dtype: torch.dtype | None = None,
    products: HeadProducts | None = None,
    batch_invariant: bool = False,
) -> Report:
    """Make a trainer of TRL compute its loss and metrics by xent_ops, eager and compiled.

    The values of losses, metrics and gradients equal TRL's. ``remove_xent(trainer)`` undoes it. Call it before
    ``trainer.train()``. It runs each model twice on four tokens to find the operations on its logits.

    With SFTTrainer's own "nll", the log-probabilities that the model returns have only the gradient of their sum. This
    takes three matrix multiplications instead of four. A ``compute_loss`` of a subclass gets the gradient of each
    log-probability.

    Args:
        trainer: an SFTTrainer, DPOTrainer, KTOTrainer, GRPOTrainer, RLOOTrainer, DistillationTrainer or GKDTrainer, or
            your subclass of one. It is changed in place, and so are its model and its reference.
        any_version: accept versions of TRL that are not tested.
        accumulate_dtype, chunk_rows: as for ``linear_cross_entropy``.
        logits_dtype: as for ``linear_cross_entropy``; for the two distillation trainers as for
            ``linear_distillation_loss``.
        products, batch_invariant: as for ``linear_cross_entropy``; not for the two distillation trainers.
        skip_ignored: as for ``linear_cross_entropy``: tokens without a label, such as prompts, take no time in the head
            (except with batch_invariant).

    Returns:
        A ``Report`` of the replaced parts.

    Raises:
        TypeError: another trainer; a head that is not nn.Linear, or whose weight is quantised or split over ranks. With
            DeepSpeed's ZeRO-3 also a head with adapters, GKDTrainer and DistillationTrainer.
        ValueError: a model that changes its logits in another way than by a softcap or a scale.
        RuntimeError: another version of TRL; a forward that is no longer TRL's; use_xent is on already, for the
            trainer or for its model.
        TypeError, ValueError: options that ``linear_cross_entropy`` refuses.

    Examples:
        >>> report = use_xent(trainer)  # an SFTTrainer, for example
        >>> "3 matrix multiplications of the head" in str(report)
        True
    """
    arguments.boolean("any_version", any_version)
    if not any_version and ".".join(trl.__version__.split(".")[:2]) not in VERSIONS:
        raise RuntimeError(
            f"use_xent has not seen TRL {trl.__version__}, whose methods it replaces, but {', '.join(VERSIONS)}: "
            "any_version=True tries it, and then compare a few losses with those of the trainer without it"
        )
    kind = _kind_of(trainer)
    if "_xent" in vars(trainer):
        raise RuntimeError("use_xent is on already: call remove_xent(trainer) first")
    chunks = (accumulate_dtype, chunk_rows, skip_ignored, logits_dtype, products, batch_invariant)
    accumulate_dtype, chunking = arguments.chunks(*chunks)
    options: dict[str, Any] = {"accumulate_dtype": accumulate_dtype, **chunking._asdict()}
    if kind.__name__ in _DISTILLING:
        options = _of_distillation(options)
    models = _models(trainer, kind)
    replaced: list[FusedHead | Divergence | GkdLoss] = []
    loss_is_sum = _loss_is_sum(trainer, kind)
    try:
        if kind.__name__ == "DistillationTrainer":
            replaced.append(Divergence(trainer, options))
        else:
            for model in (models[name] for name in ("model", "ref_model") if name in models):
                replaced.append(FusedHead(model, options, loss_is_sum, trainer.accelerator.autocast))
        if kind.__name__ == "GKDTrainer":
            replaced.append(GkdLoss(trainer, models["teacher_model"]))
    except Exception:
        for one in replaced:
            one.remove()
        raise
    vars(trainer)["_xent"] = replaced
    return Report(type(trainer).__name__, [one.what for one in replaced], 3 if loss_is_sum else 4)


def remove_xent(trainer: Any) -> None:
    """Undo ``use_xent(trainer)``. Raises RuntimeError if it is not on.

    Examples:
        >>> report = use_xent(trainer)
        >>> remove_xent(trainer)
    """
    _kind_of(trainer)
    replaced = vars(trainer).pop("_xent", None)
    if replaced is None:
        raise RuntimeError("use_xent is not on for this trainer")
    for one in replaced:
        one.remove()


def _kind_of(trainer: Any) -> type:
    """The class of TRL that a trainer is an instance of."""
    for kind in type(trainer).__mro__:
        if kind.__module__.split(".")[0] == "trl":
            if kind.__name__ in _FUSED + _DISTILLING:
                return kind
            break
    found = f"{type(trainer).__module__}.{type(trainer).__qualname__}"
    hint = (
        "; for a model there is xent_ops.integrations.transformers.use_xent" if isinstance(trainer, nn.Module) else ""
    )
    raise TypeError(
        f"got a {found}; expected a trainer of TRL, or of a subclass of one: {', '.join(_FUSED + _DISTILLING)}{hint}"
    )


def _models(trainer: Any, kind: type) -> dict[str, PreTrainedModel]:
    """The models of transformers whose heads the loss uses, by their names in the trainer.

    Accelerate has wrapped and compiled references and teachers already. Raises if a head is not supported.
    """
    second = "teacher_model" if kind.__name__ in _DISTILLING else "ref_model"
    found = {name: getattr(trainer, name, None) for name in ("model", second)}
    unwrap = functools.partial(trainer.accelerator.unwrap_model, keep_torch_compile=False)
    models = {name: _base(unwrap(model)) for name, model in found.items() if model is not None}
    for model in models.values():
        if "_xent" in vars(model):
            raise RuntimeError(
                f"use_xent(model) of xent_ops.integrations.transformers is on for {type(model).__name__}, and gives "
                "no log-probabilities: call its remove_xent(model) first"
            )
        head = model.get_output_embeddings()
        heads.refuse_sharded(head)
        if kind.__name__ in _DISTILLING and (trainer.is_fsdp_enabled or heads.is_partitioned(head)):
            raise TypeError(
                f"{kind.__name__}: FSDP or DeepSpeed's ZeRO-3 splits the heads' weights over ranks and gathers one at "
                "a time, and the divergence needs both: use DDP"
            )
    return models


def _of_distillation(options: dict[str, Any]) -> dict[str, Any]:
    for name, default in (("products", None), ("batch_invariant", False)):
        if options.pop(name) is not default:
            raise ValueError(f"{name} is not of linear_distillation_loss, which this trainer takes")
    return options


def _loss_is_sum(trainer: Any, kind: type) -> bool:
    """Is the loss a number times the sum of the log-probabilities?"""
    if kind.__name__ != "SFTTrainer" or trainer.args.loss_type != "nll":
        return False
    return "compute_loss" not in vars(trainer) and type(trainer).compute_loss is trl.SFTTrainer.compute_loss
