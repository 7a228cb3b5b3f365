"""The k largest classes of each row; of a head with their x, whose gradient is that of several classes a row."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..head import top_k
from ..kernels import reference_top_k
from ..kernels.options import DEFAULTS
from . import checks, rules
from .contract import Call
from .formulas import GradientsByName, autograd, run_backward, save_for, saved
from .library import operator
from .linear.operators import by_name, mask_of
from .rules import check_targets


def _classes(call: Call) -> tuple[int, ...]:
    with_target = hasattr(call, "input") and call.target is not None
    return *call.primary.shape[:-1], call.k + with_target


def _rank(call: Call) -> tuple[int, ...]:
    return (0,) if call.target is None else call.primary.shape[:-1]


_RESULTS = {"at_ids": ("acc", _classes, ""), "ids": ("int64", _classes, ""), "rank": ("int64", _rank, "")}


def _rule(call: Call) -> None:
    checks.top_k(call.k, rules.width(call), least=int(hasattr(call, "input")))  # without any: the rank alone
    if getattr(call, "target_logit", None) is not None and call.target is None:
        raise ValueError("target_logit is the logit of a target: pass target too")
    rules.several_classes(call)


def _check_columns(call: Call) -> None:
    if call.target_logit is None:
        check_targets(call)


def _save(ctx: Any, call: Call, output: tuple[Tensor, ...]) -> None:
    at_ids, ids, lse, entropy, rank, low = output
    ctx.mark_non_differentiable(ids, rank, low)
    values = {"at_ids": at_ids, "ids": ids, "lse": lse, "entropy": entropy, "lse_low": low}
    save_for(ctx, "linear_cross_entropy_backward", call, **values)


def _backward(ctx: Any, grad_at_ids: Any, _ids: None, grad_lse: Any, grad_entropy: Any, *_: None) -> GradientsByName:
    kept, mask = saved(ctx), mask_of(ctx)
    updates = {"grad_ids": grad_at_ids, "grad_lse": grad_lse, "grad_entropy": grad_entropy, "output_mask": mask}
    updates |= {"target": kept["ids"][..., 0], "ignore_index": DEFAULTS.ignore_index}
    return by_name(mask, run_backward(ctx, None, kept, **updates))


_shared: dict[str, Any] = {"results": _RESULTS, "rules": (_rule,)}
operator("top_k", reference_top_k.top_k, check_values=_check_columns, **_shared)
operator("linear_top_k", top_k.linear_top_k, check_values=check_targets, calls_operators=True, **_shared)
autograd("linear_top_k", _backward, _save)
