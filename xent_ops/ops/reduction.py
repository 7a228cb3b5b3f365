"""Operators that reduce rows: what a mean or a sum is divided by, and its value.

In eager each is one kernel, where plain torch launches about ten. Traced code gets plain torch, which compilers fuse,
and so do losses of rows that autograd records.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels import reductions
from ..kernels.options import LossOptions, RowOptions
from ..kernels.reference import is_counted
from . import transforms
from .contract import Call
from .library import operator
from .second_order import without_derivative

_ops = torch.ops.xent


def _is_recorded(*tensors: Tensor | None) -> bool:
    """By a tracer, or by autograd?"""
    if transforms.any_tracer():
        return True
    return torch.is_grad_enabled() and any([tensor is not None and tensor.requires_grad for tensor in tensors])


def divisors_of(
    target: Tensor,
    weight: Tensor | None,
    token_weight: Tensor | None,
    divisor: Tensor | None,
    loss: LossOptions,
    dtype: torch.dtype,
) -> Tensor:
    """(2,): as ``reductions.divisors_of``."""
    if loss.reduction == "sum" or _is_recorded():
        return reductions.divisors_of(target, weight, token_weight, divisor, loss, dtype)
    keywords = loss._replace(lse_square_scale=0.0).reduction_keywords()
    return _ops.row_divisors(target, weight, token_weight, dtype=dtype, **keywords)[0]


def summary(
    row_loss: Tensor,
    lse: Tensor,
    target: Tensor,
    weight: Tensor | None,
    token_weight: Tensor | None,
    divisor: Tensor | None,
    loss: LossOptions,
    argmax: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(value, z-loss, share of hits) of the losses of rows. Without argmax only the value is meant."""
    if loss.reduction == "none" or _is_recorded(row_loss, lse, divisor):
        divisors = None
        if loss.reduction != "none":
            divisors = reductions.divisors_of(target, weight, token_weight, divisor, loss, row_loss.dtype)
            loss = loss._replace(reduction="mean")
        value, z_loss = reductions.reduce_rows(row_loss, lse, target, divisors, loss, token_weight)
        if argmax is None:
            return value, z_loss, None
        z_loss = torch.zeros_like(value) if z_loss is None else z_loss
        return value, z_loss, reductions.share_of_hits(argmax, target, loss.row_options.ignore_index, row_loss.dtype)
    divisors = None
    if divisor is not None:
        divisors, loss = divisor.expand(2), loss._replace(reduction="mean")
    row_args = (row_loss, lse, target, weight, token_weight, divisors, argmax)
    value, _, z_loss, accuracy = _ops.row_summary(*row_args, **loss.reduction_keywords())
    return value, z_loss, accuracy


def counted_sum(values: Tensor, target: Tensor, divisor: Tensor | None, ignore_index: int) -> Tensor:
    """The sum of numbers of rows over a divisor (). Numbers of ignored rows, even NaN, do not count."""
    if _is_recorded(values, divisor):
        total = torch.where(is_counted(target, ignore_index), values, 0.0).sum()
        return total if divisor is None else total / divisor.to(total.dtype)
    divisors, reduction = (None, "sum") if divisor is None else (divisor.expand(2), "mean")
    keywords = LossOptions(RowOptions(ignore_index), reduction=reduction).reduction_keywords()
    return _ops.row_summary(values, values, target, None, None, divisors, **keywords)[0]


def _factor_shape(call: Call) -> tuple[int, ...]:
    return () if call.token_weight is None else tuple(call.target.shape)


def _with_argmax(call: Call) -> tuple[int, ...]:
    return (0,) if call.argmax is None else ()


operator(
    "row_divisors",
    reductions.row_divisors,
    rows_of=lambda call: call.target.unsqueeze(-1),
    results={
        "divisors": ("dtype", "2", ""),
        "grad_scale": ("dtype", _factor_shape, ""),
        "grad_lse_square": ("dtype", lambda call: _factor_shape(call) if call.lse_square_scale != 0.0 else (0,), ""),
    },
)

operator(
    "row_summary",
    reductions.row_summary,
    rows_of=lambda call: call.loss.unsqueeze(-1),
    results={
        "divisors": ("acc", lambda call: (2,) if call.divisors is None else (0,), ""),
        "z_loss": ("acc", _with_argmax, ""),
        "accuracy": ("acc", _with_argmax, ""),
    },
)
for _name in ("row_divisors", "row_summary"):
    without_derivative(
        _name,
        ": call xent_ops.cross_entropy or xent_ops.linear_cross_entropy, or reduce the losses of rows in torch",
    )
