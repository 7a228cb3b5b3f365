"""``use_xent(trainer)``: a trainer of TRL computes its loss and its metrics by operators of xent_ops.

The losses and metrics stay TRL's; the numbers of tokens that they are made of come from us. docs/integrations.md lists
the methods of TRL that are replaced, and the test that notices where one changes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import trl  # type: ignore[import-not-found, import-untyped, unused-ignore]

from ...kernels.options import Activation, HeadProducts
from ...ops import arguments
from ...ops.linear import checks as linear_checks
from ..transformers import _base
from .fused_head import FusedHead

VERSIONS = ("1.16",)  # of TRL, that tests have run with

# The classes of TRL that are known, of which a trainer may be a subclass of the user's own.
_FUSED = ("SFTTrainer", "DPOTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer")


class Report(NamedTuple):
    """What ``use_xent`` replaced; ``str`` of it is one line each."""

    trainer: str
    models: list[str]
    tails: list[Activation]
    head_products: int

    def __str__(self) -> str:
        lines = [f"{self.trainer}: its loss takes {self.head_products} products of the head, by xent_ops"]
        for model, tail in zip(self.models, self.tails, strict=True):
            lines.append(f"  {model}: softcap {tail.softcap}, logit_scale {tail.logit_scale:g}")
        lines.append("  not replaced: generation, and what asks for logits (compute_metrics, label smoothing)")
        return "\n".join(lines)


def use_xent(
    trainer: Any,
    *,
    any_version: bool = False,
    accumulate_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    skip_ignored: bool = True,
    logits_dtype: torch.dtype | None = None,
    products: HeadProducts | None = None,
) -> Report:
    """Make a trainer of TRL compute its loss and metrics by xent_ops, eager and compiled.

    The values of losses, metrics and gradients are TRL's. ``remove_xent(trainer)`` undoes it. Call it between the
    trainer and ``trainer.train()``. Each model is run twice on four tokens to see what it does to its logits.

    Args:
        trainer: an SFTTrainer, DPOTrainer, KTOTrainer, GRPOTrainer or RLOOTrainer, or of a subclass. Its model, and its
            reference where it has one, are changed in place.
        any_version: also with a version of TRL that has not been seen.
        accumulate_dtype, chunk_rows, logits_dtype, products: as for ``linear_cross_entropy``.
        skip_ignored: as for ``linear_cross_entropy``: tokens without a label, as prompts, take no time in the head.

    Returns:
        A ``Report`` of what was replaced.

    Raises:
        TypeError: another trainer; a head that is not nn.Linear, or whose weight is quantised, split over ranks or
            partitioned by DeepSpeed's ZeRO-3.
        ValueError: a model that changes its logits otherwise than by a softcap or a scale.
        RuntimeError: another version of TRL; a forward that is not TRL's any more; use_xent is on already.
        TypeError, ValueError: options that ``linear_cross_entropy`` refuses.

    Examples:
        >>> report = use_xent(trainer)  # an SFTTrainer, for example
        >>> "3 products of the head" in str(report)
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
    accumulate_dtype, how = arguments.chunks(accumulate_dtype, chunk_rows, skip_ignored, logits_dtype, products)
    linear_checks.sizes_of(how)
    options: dict[str, Any] = {"accumulate_dtype": accumulate_dtype, **how._asdict()}
    loss_is_sum = _loss_is_sum(trainer, kind)
    autocast = trainer.accelerator.autocast
    given = [trainer.model, getattr(trainer, "ref_model", None)]  # the reference is wrapped and compiled already
    unwrap = trainer.accelerator.unwrap_model
    models = [_base(unwrap(one, keep_torch_compile=False)) for one in given if one is not None]
    fused: list[FusedHead] = []
    try:
        for model in models:
            fused.append(FusedHead(model, options, loss_is_sum, autocast))
    except Exception:
        for one in fused:
            one.remove()
        raise
    vars(trainer)["_xent"] = fused
    return Report(
        trainer=type(trainer).__name__,
        models=[type(one.model).__name__ for one in fused],
        tails=[one.tail for one in fused],
        head_products=3 if loss_is_sum else 4,
    )


def remove_xent(trainer: Any) -> None:
    """Undo ``use_xent(trainer)``. Raises RuntimeError where it is not on.

    Examples:
        >>> report = use_xent(trainer)
        >>> remove_xent(trainer)
    """
    replaced = vars(trainer).pop("_xent", None)
    if replaced is None:
        raise RuntimeError("use_xent is not on for this trainer")
    for one in replaced:
        one.remove()


def _kind_of(trainer: Any) -> type:
    """The class of TRL that a trainer is of."""
    for kind in type(trainer).__mro__:
        if kind.__module__.split(".")[0] == "trl":
            if kind.__name__ in _FUSED:
                return kind
            break
    found = f"{type(trainer).__module__}.{type(trainer).__qualname__}"
    raise TypeError(f"got a {found}; expected a trainer of TRL, or of a subclass of one: {', '.join(_FUSED)}")


def _loss_is_sum(trainer: Any, kind: type) -> bool:
    """Is the loss the sum of the log-probabilities times a number?"""
    if kind.__name__ != "SFTTrainer" or trainer.args.loss_type != "nll":
        return False
    return "compute_loss" not in vars(trainer) and type(trainer).compute_loss is trl.SFTTrainer.compute_loss
