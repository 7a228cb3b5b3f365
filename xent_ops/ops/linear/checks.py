"""What no chunk of a linear cross entropy can take: see checks.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ...head import fp8
from ...kernels.options import DEFAULT_CHUNKING, DEFAULTS, Chunking, Options
from ...kernels.sizes import known_equal
from .. import backward_checks, checks

_WIDER = ((torch.float32, torch.bfloat16), (torch.float32, torch.float16))  # (of sums or logits, of the input)

NAMES = ("linear_weight", "linear_bias")  # of the operators' arguments


def head(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None = None,
    accumulate_dtype: torch.dtype | None = None,
    chunking: Chunking = DEFAULT_CHUNKING,
    may_be_empty: bool = False,
    names: tuple[str, str] = NAMES,
    input_name: str = "input",
) -> None:
    """``names``: what the caller calls weight and bias."""
    weight_name, bias_name = names
    checks.dtype(input_name, input, checks.FLOATS)
    if input.dim() < 1:
        raise ValueError(f"{input_name} has no dimension; expected shape (..., H), the features last")
    if linear_weight.dim() != 2:
        raise ValueError(
            f"{weight_name} has shape {tuple(linear_weight.shape)}; expected (V, H), as nn.Linear has it"
            f"{_swapped(weight_name, input, linear_weight, linear_weight.shape[:-1])}"
        )
    _as_input(weight_name, linear_weight, input, input_name)
    (classes, width), features = linear_weight.shape, input.shape[-1]
    if not (type(width) is type(features) is int and width == features):
        checks.check_value(width == features, lambda: _other_features(weight_name, linear_weight, features))
    # Dynamo runs this before the logits of a transform are made, and that of torch 2.11 refuses _check_value there.
    if not (may_be_empty or (type(classes) is int and classes > 0)):
        checks.check_value(
            classes > 0,
            lambda: f"{weight_name} of shape {tuple(linear_weight.shape)} has 0 classes; expected at least 1",
        )
    if linear_bias is not None:
        _as_input(bias_name, linear_bias, input, input_name)
        checks.same_shape(bias_name, linear_bias.shape, linear_weight.shape[:1], "one number a class")
    if accumulate_dtype not in (None, input.dtype) and (accumulate_dtype, input.dtype) not in _WIDER:
        raise TypeError(
            f"accumulate_dtype must be None, the input's {input.dtype} or, for 16-bit inputs, torch.float32; got "
            f"{accumulate_dtype}"
        )
    wider(chunking.logits_dtype, input)
    multiplied(chunking, input, linear_weight)
    sizes_of(chunking)


def two_dimensions(input: Tensor) -> None:
    if input.dim() != 2:
        raise ValueError(f"input has shape {tuple(input.shape)}; expected (rows, H), the rows of one chunk")


def wider(logits_dtype: torch.dtype | None, input: Tensor) -> None:
    if logits_dtype in (None, input.dtype) or (logits_dtype, input.dtype) in _WIDER:
        return
    raise TypeError(
        f"logits_dtype must be None, the input's {input.dtype} or, for 16-bit inputs, torch.float32; got {logits_dtype}"
    )


def multiplied(chunking: Chunking, input: Tensor, linear_weight: Tensor) -> None:
    """By which products, and whether these operands have such."""
    products = chunking.products
    if products is None:
        return
    checks.head_products(products)
    what = f"products={products!r}"
    if input.dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"{what} makes 8-bit numbers of torch.bfloat16 and torch.float16, got {input.dtype}")
    features = linear_weight.shape[1]
    if features % fp8.MULTIPLE or features == 0:
        raise ValueError(
            f"{what} needs a number of features that is a multiple of {fp8.MULTIPLE}, as products of 8-bit numbers do; "
            f"got {features}"
        )
    reason = fp8.why_not(input.device)
    if reason is not None:
        raise RuntimeError(f"{what} is not to be had on this device: {reason}")


def sizes_of(chunking: Chunking) -> None:
    number = chunking.chunk_rows
    if number is None or (type(number) is int and number >= 1):
        return
    checks.check_value(number >= 1, lambda: f"chunk_rows must be at least 1, or None for the default, got {number}")


def _other_features(name: str, linear_weight: Tensor, features: int) -> str:
    rows, columns = linear_weight.shape
    transposed = known_equal((rows,), (features,))
    hint = f": it is transposed, pass {name}.t(); LinearCrossEntropyLoss takes (H, V)" if transposed else ""
    return (
        f"{name} has shape {(rows, columns)}; expected {(columns if transposed else rows, features)}, one row "
        f"of the input's features for each class{hint}"
    )


def _swapped(name: str, input: Tensor, linear_weight: Tensor, rows: Sequence[int]) -> str:
    """A hint where linear_weight has the rows that the input should have."""
    if input.dim() != 2 or not known_equal(linear_weight.shape, (*rows, input.shape[-1])):
        return ""
    return (
        f": input and {name} seem to be swapped, the order is input, {name}, target (Liger-Kernel's has the weight "
        "first)"
    )


def rows(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    options: Options = DEFAULTS,
    accumulate_dtype: torch.dtype | None = None,
    may_be_empty: bool = False,
    **chunking: Any,
) -> None:
    head(input, linear_weight, linear_bias, accumulate_dtype, Chunking(**chunking), may_be_empty)
    checks.dtype("target", target, checks.INDICES)
    meaning = "one class index for each row of the input"
    checks.same_shape(
        "target",
        target.shape,
        input.shape[:-1],
        meaning,
        lambda: _swapped(NAMES[0], input, linear_weight, target.shape),
    )
    checks.same_device("target", target, input, "input is")
    checks.row_options(weight, linear_weight.t(), options)


def _as_input(name: str, tensor: Tensor, input: Tensor, input_name: str) -> None:
    checks.same_device(name, tensor, input, f"{input_name} is")
    if tensor.dtype != input.dtype:
        raise TypeError(
            f"{name} has dtype {tensor.dtype} but {input_name} {input.dtype}; both must be the same, as for nn.Linear "
            "(torch.autocast casts both)"
        )


def gradient_mask(mask: Sequence[bool]) -> None:
    if len(mask) != 3:
        raise ValueError(f"output_mask has {len(mask)} entries; expected 3, for input, linear_weight and linear_bias")


def statistics(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    with_argmax: bool = False,
    with_entropy: bool = False,
    **options: Any,
) -> None:
    rows(input, linear_weight, target, linear_bias, weight, **options)


def shard(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    class_start: int,
    num_classes: int,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    entropy: bool = False,
    *,
    options: Options = DEFAULTS,
    **others: Any,
) -> None:
    rows(input, linear_weight, target, linear_bias, weight, options=options, may_be_empty=True, **others)
    checks.shard_range(linear_weight.shape[0], class_start, num_classes)
    if entropy and (weight is not None or options.label_smoothing != 0.0):
        raise ValueError("entropies go with the plain loss: without class weights and label_smoothing")


def backward(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    lse: Tensor,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    divisor: Tensor | None = None,
    grad_entropy: Tensor | None = None,
    entropy: Tensor | None = None,
    coefficient: Tensor | None = None,
    class_start: int = 0,
    num_classes: int | None = None,
    output_mask: Sequence[bool] = (True, True, True),
    *,
    lse_square_scale: float = 0.0,
    **options: Any,
) -> None:
    if num_classes is None:
        rows(input, linear_weight, target, linear_bias, weight, **options)
    else:
        of_slice = (class_start, num_classes, linear_bias, weight)
        shard(input, linear_weight, target, *of_slice, entropy is not None, **options)
    backward_checks.slice_of(class_start, num_classes, weight, coefficient)
    gradient_mask(output_mask)
    checks.rows_of(input, "input", grad_lse=grad_lse, lse=lse, coefficient=coefficient)
    checks.scalar_or_rows_of("input", input, grad_loss=grad_loss)
    checks.divisor(divisor, input)
    backward_checks.with_entropy("input", input, grad_entropy, entropy)


def with_grad(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    divisor: Tensor | None = None,
    token_weight: Tensor | None = None,
    output_mask: Sequence[bool] = (True, True, True),
    accumulate_dtype: torch.dtype | None = None,
    with_argmax: bool = False,
    with_entropy: bool = False,
    *,
    options: Options = DEFAULTS,
    lse_square_scale: float = 0.0,
    reduction: str = "mean",
    **chunking: Any,
) -> None:
    head = (input, linear_weight, target, linear_bias, weight)
    rows(*head, options=options, accumulate_dtype=accumulate_dtype, **chunking)
    gradient_mask(output_mask)
    checks.token_weight(token_weight, target)
    checks.reduced_options(input, lse_square_scale, reduction)
    reduced_by(divisor, input, reduction)


def reduced_by(divisor: Tensor | None, input: Tensor, reduction: str) -> None:
    if divisor is None:
        return
    if divisor.dim() > 0 and not divisor.is_floating_point():
        raise ValueError(
            f"divisor has shape {tuple(divisor.shape)} and integers, as a target has: the order is input, "
            "linear_weight, target, of LinearCrossEntropyLoss input, target (Liger-Kernel's is weight, input, target)"
        )
    if reduction != "sum":
        raise ValueError(f'divisor is what a sum is divided by: expected reduction="sum", got {reduction!r}')
    checks.dtype("divisor", divisor, checks.DIVISORS)
    checks.same_shape("divisor", divisor.shape, torch.Size(()), "one number")
    checks.same_device("divisor", divisor, input, "input is")


def divisor_needs_grad() -> NoReturn:
    raise RuntimeError("divisor requires grad, and linear cross entropy has no derivative for it: detach it")
