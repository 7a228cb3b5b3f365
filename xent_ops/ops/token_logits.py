"""Several classes a row, ``ids`` (..., K): x of each, of given logits, whose backward is one visit of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..head import ids as of_ids
from ..kernels import reference_ids
from ..kernels.options import DEFAULTS, Options
from ..kernels.reference import accumulator
from ..kernels.reference_ids import first_counted
from . import backward_checks, checks, transforms
from .library import Outputs, autograd, needs_grad, operator
from .second_order import no_second_derivative

_ops = torch.ops.xent


def target_and_ids(target: Tensor, rows: int, ignore_index: int) -> tuple[Tensor, Tensor | None]:
    """(a target for each row, ids): several classes a row, where the target has one dimension more than ``rows``."""
    if target.dim() != rows + 1:
        return target, None
    checks.dtype("target", target, checks.INDICES)
    at_least_one_class(target)
    return first_counted(target, ignore_index), target


def at_least_one_class(target: Tensor) -> None:
    if target.shape[-1] == 0:
        raise ValueError(f"target has shape {tuple(target.shape)}: no class a row; expected (..., K), at least one")


def check_ids(ids: Tensor, owner: str, rows: torch.Size, device_of: Tensor, classes: Tensor, options: Options) -> None:
    """``classes``: a tensor with one number for each class in its last dimension."""
    checks.dtype("ids", ids, checks.INDICES)
    if ids.dim() < 1:
        raise ValueError("ids has no dimension; expected (..., K), K classes of each row")
    expected = torch.Size((*rows, ids.shape[-1]))
    checks.same_shape("ids", ids.shape, expected, f"K classes of each row of the {owner}")
    if not transforms.is_jit_traced():
        checks.check_value(ids.shape[-1] > 0, lambda: f"ids has shape {tuple(ids.shape)}; expected at least one a row")
    checks.same_device("ids", ids, device_of, f"{owner} is" if owner == "input" else "logits are")
    checks.row_options(None, classes, options)
    if options.label_smoothing != 0.0:
        raise ValueError(f"label_smoothing is for one target a row: expected 0.0, got {options.label_smoothing}")


def refuse_products(products: str | None) -> None:
    if products is not None:
        raise NotImplementedError(f"several classes a row take no products={products!r}: leave it at None")


def check_upstream(
    ids: Tensor,
    like: Tensor,
    owner: str,
    at_ids: Tensor,
    grad_ids: Tensor,
    grad_lse: Tensor | None,
    grad_entropy: Tensor | None,
    lse: Tensor,
    entropy: Tensor | None,
) -> None:
    check_places(ids, at_ids=at_ids, grad_ids=grad_ids)
    checks.rows_of(like, owner, grad_lse=grad_lse, lse=lse)
    backward_checks.with_entropy(owner, like, grad_entropy, entropy)


def check_places(ids: Tensor, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        checks.dtype(name, tensor, checks.FLOATS)
        checks.same_shape(name, tensor.shape, ids.shape, "one number for each of the ids")
        checks.same_device(name, tensor, ids, "ids is")


def check_values(ids: Tensor, classes: int, options: Options) -> None:
    """On a CPU, where that does not synchronise; elsewhere an id out of range gives NaN."""
    if ids.device.type == "cpu":
        checks.target_values(ids, classes, options.ignore_index)


def outputs_of(like: Tensor, ids: Tensor, with_entropy: bool) -> Outputs:
    """x of the ids, lse, entropy."""
    dtype, rows = accumulator(like), ids.shape[:-1]
    return (ids.shape, dtype), (rows, dtype), (rows if with_entropy else (0,), dtype)


def _check(logits: Tensor, ids: Tensor, with_entropy: bool = False, *, options: Options = DEFAULTS) -> None:
    checks.floating_logits(logits)
    check_ids(ids, "logits", logits.shape[:-1], logits, logits, options)


def _check_backward(
    grad_ids: Tensor,
    grad_lse: Tensor | None,
    grad_entropy: Tensor | None,
    logits: Tensor,
    ids: Tensor,
    at_ids: Tensor,
    lse: Tensor,
    entropy: Tensor | None = None,
    *,
    options: Options = DEFAULTS,
) -> None:
    _check(logits, ids, options=options)
    check_upstream(ids, logits, "logits", at_ids, grad_ids, grad_lse, grad_entropy, lse, entropy)


def _statistics(
    logits: Tensor, ids: Tensor, with_entropy: bool = False, *, options: Options = DEFAULTS
) -> tuple[Tensor, Tensor, Tensor]:
    check_values(ids, logits.shape[-1], options)
    return of_ids.statistics_of_rows(logits, ids, with_entropy, options=options)


def _save(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    logits, ids, with_entropy = inputs
    at_ids, lse, entropy = output
    ctx.set_materialize_grads(False)
    if not with_entropy:
        ctx.mark_non_differentiable(entropy)
    ctx.save_for_backward(logits, ids, at_ids, lse, entropy if with_entropy else None)
    ctx.options = keyword_only_inputs


def _backward(
    ctx: Any, grad_ids: Tensor | None, grad_lse: Tensor | None, grad_entropy: Tensor | None
) -> tuple[Tensor | None, None, None]:
    if grad_ids is None and grad_lse is None and grad_entropy is None:
        return None, None, None
    logits, ids, at_ids, lse, entropy = ctx.saved_tensors
    if grad_ids is None:
        grad_ids = lse.new_zeros(ids.shape)
    entropy = None if grad_entropy is None else entropy
    saved = (logits, ids, at_ids, lse, entropy)
    return _ops.token_logits_backward(grad_ids, grad_lse, grad_entropy, *saved, **ctx.options), None, None


def save_for_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any, **keywords: Any) -> None:
    ctx.number = len(inputs)


def refuse_derivatives(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
    if any(needs_grad(ctx, position) for position in range(ctx.number)):
        no_second_derivative()
    return (None,) * ctx.number


def _check_ids_grad(
    grad_logits: Tensor,
    ids: Tensor,
    at_ids: Tensor,
    grad_ids: Tensor,
    grad_lse: Tensor,
    lse: Tensor,
    grad_entropy: Tensor | None = None,
    entropy: Tensor | None = None,
    class_start: int = 0,
    num_classes: int | None = None,
    *,
    options: Options = DEFAULTS,
) -> None:
    checks.floating_logits(grad_logits, may_be_empty=True)
    check_ids(ids, "logits", grad_logits.shape[:-1], grad_logits, grad_logits, options)
    check_upstream(ids, grad_logits, "logits", at_ids, grad_ids, grad_lse, grad_entropy, lse, entropy)


operator(
    "ids_grad_",
    check=_check_ids_grad,
    outputs=lambda *_: (),
    reference=reference_ids.ids_grad_,
    overwrites="grad_logits",
)

operator(
    "token_logits",
    check=_check,
    outputs=lambda logits, ids, with_entropy=False: outputs_of(logits, ids, with_entropy),
    reference=_statistics,
    composed=True,
)
autograd("token_logits", _backward, _save)

operator(
    "token_logits_backward",
    check=_check_backward,
    outputs=lambda grad_ids, grad_lse, grad_entropy, logits, *_: ((logits.shape, logits.dtype),),
    reference=of_ids.gradient,
    composed=True,
)
autograd("token_logits_backward", refuse_derivatives, save_for_nothing)
