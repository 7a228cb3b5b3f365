"""What no kernel can take, refused before any kernel runs, eager and while tracing.

Only ``target_values`` reads the values of a tensor on a GPU, which synchronises it: for ``xent_ops.check_targets`` and
``check=True``. Sizes may be symbolic, so they are compared through ``check_value``, which guards them and keeps
the text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, get_args

import torch
from torch import Tensor

from .._private import private
from ..kernels.options import DEFAULTS, HEAD_PRODUCTS, Options, Reduction
from ..kernels.sizes import known
from .shown import shown


def _raise_value(condition: Any, message: Callable[[], str]) -> None:
    if not condition:
        raise ValueError(message())


check_value = private("torch._check_value", _raise_value, "a size that depends on data cannot be compiled")
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INDICES = (torch.int64, torch.int32, torch.uint8)
DIVISORS = (*FLOATS, torch.int64)
REDUCTIONS = get_args(Reduction)
FLOAT32_MAX = torch.finfo(torch.float32).max


def names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _static(sizes: Iterable[int]) -> bool:
    """Plain integers? check_value takes symbols too, but costs microseconds for each size."""
    for size in sizes:  # noqa: SIM110 (all() of a generator takes three times as long)
        if type(size) is not int:
            return False
    return True


def same_shape(
    name: str, shape: torch.Size, expected: torch.Size, meaning: str, hint: Callable[[], str] | None = None
) -> None:
    """``hint`` is asked for once there is an error."""
    if _static(shape) and _static(expected) and shape == expected:
        return

    def message() -> str:
        return f"{name} has shape {tuple(shape)}; expected {tuple(expected)}, {meaning}{hint() if hint else ''}"

    check_value(len(shape) == len(expected), message)
    for size, wanted in zip(shape, expected, strict=True):
        check_value(size == wanted, message)


def same_device(name: str, tensor: Tensor, other: Tensor, owner: str = "logits are") -> None:
    if tensor.device != other.device:
        raise RuntimeError(f"{name} is on {tensor.device} but {owner} on {other.device}; both must be on one device")


def dtype(name: str, tensor: Tensor, valid: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in valid:
        raise TypeError(f"{name} has dtype {tensor.dtype}; expected one of {names(valid)}")


def floating_logits(logits: Tensor, may_be_empty: bool = False) -> None:
    if logits.dim() < 1:
        raise ValueError("logits have no dimension; expected shape (..., V) with the classes last")
    dtype("logits", logits, FLOATS)
    classes = logits.shape[-1]
    if may_be_empty or (type(classes) is int and classes > 0):
        return
    check_value(classes > 0, lambda: f"logits of shape {tuple(logits.shape)} have 0 classes; expected at least 1")


def row_options(weight: Tensor | None, logits: Tensor, options: Options) -> None:
    if weight is not None:
        dtype("weight", weight, FLOATS)
        same_shape("weight", weight.shape, logits.shape[-1:], "one weight a class")
        same_device("weight", weight, logits)
    _ignore_index, label_smoothing, softcap, logit_scale = options
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be between 0.0 and 1.0, got {label_smoothing}")
    if softcap is not None:
        if not (softcap >= 2.0**-126 and math.isfinite(softcap)):
            raise ValueError(
                f"softcap must be a finite number above 0, or None for no cap, got {softcap} (the least is 2**-126, "
                "the smallest normal float32)"
            )
        _fits("softcap", softcap, logits.dtype)
    if not math.isfinite(logit_scale):
        raise ValueError(f"logit_scale must be finite, got {logit_scale}")
    if logit_scale == 0.0:
        raise ValueError(f"logit_scale must not be 0, which makes all classes equally likely, got {logit_scale}")
    _fits("logit_scale", logit_scale, logits.dtype)


def _fits(name: str, value: float, logits_dtype: torch.dtype) -> None:
    """Beyond float32 a kernel would compute with infinity, and return NaN."""
    if not -FLOAT32_MAX <= value <= FLOAT32_MAX and logits_dtype != torch.float64:
        raise ValueError(
            f"{name} must be at most {FLOAT32_MAX} in magnitude for logits of dtype {logits_dtype}, which are computed "
            f"in float32, got {value}"
        )


def reduction(value: str, valid: tuple[str, ...] = REDUCTIONS) -> None:
    if value not in valid:
        raise ValueError(f"{shown(value)} is not a valid value for reduction; valid are {', '.join(map(repr, valid))}")


def lse_square_scale(value: float, logits_dtype: torch.dtype) -> None:
    # No math.isfinite: this is traced, and under dynamic=True Dynamo takes a float for a symbol, which it refuses.
    if not 0.0 <= value <= FLOAT32_MAX:
        if not -math.inf < value < math.inf:
            raise ValueError(f"lse_square_scale must be finite, got {value}")
        if value < 0.0:
            raise ValueError(f"lse_square_scale must be at least 0, got {value}: below 0 it would reward a large lse")
        _fits("lse_square_scale", value, logits_dtype)


def weight_without_grad(weight: Tensor | None) -> None:
    if weight is not None and weight.requires_grad and torch.is_grad_enabled():
        weight_needs_grad()


def weight_needs_grad() -> NoReturn:
    raise RuntimeError(
        "weight requires grad, and cross entropy with class indices has no derivative for it (nor has "
        "F.cross_entropy): detach the weight, or pass class probabilities as the target"
    )


def target_values(target: Tensor, num_classes: int, ignore_index: int) -> None:
    """Raise IndexError for a target outside [0, num_classes) that is not ignore_index."""
    dtype("target", target, INDICES)
    indices = target.to(torch.int64)  # uint8 compared with -100 would wrap around
    bad = ((indices < 0) | (indices >= num_classes)) & (indices != ignore_index)
    if bool(bad.any()):
        first = int(indices[bad][0])
        hint = "a part of a sharded head, as weight.to_local(), has a part of the classes"
        if first < 0:
            hint = f"to ignore targets of {first}, pass ignore_index={first}"
        raise IndexError(
            f"target {first} is out of bounds: valid are 0 to {num_classes - 1} and ignore_index={ignore_index} "
            f"({int(bad.sum())} of {target.numel()} targets are out of bounds); {hint}"
        )


def index_forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    options: Options = DEFAULTS,
) -> None:
    floating_logits(logits)
    dtype("target", target, INDICES)
    same_shape("target", target.shape, logits.shape[:-1], "one class index for each row of the logits")
    same_device("target", target, logits)
    row_options(weight, logits, options)


def index_statistics(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    with_argmax: bool = False,
    with_entropy: bool = False,
    *,
    options: Options = DEFAULTS,
) -> None:
    index_forward(logits, target, weight, options=options)


def shard(
    logits: Tensor,
    target: Tensor,
    class_start: int,
    num_classes: int,
    weight: Tensor | None = None,
    *,
    options: Options = DEFAULTS,
) -> None:
    """A rank's shard of the vocabulary; it may hold no class, and columns of padding beyond the last class."""
    floating_logits(logits, may_be_empty=True)
    dtype("target", target, INDICES)
    same_shape("target", target.shape, logits.shape[:-1], "one class index for each row of the logits")
    same_device("target", target, logits)
    row_options(weight, logits, options)
    shard_range(logits.shape[-1], class_start, num_classes)


def shard_range(columns: int, class_start: int, num_classes: int) -> None:
    if (
        _static((class_start, num_classes, columns))
        and class_start >= 0
        and num_classes > 0
        and class_start + (columns > 0) <= num_classes
    ):
        return
    check_value(num_classes > 0, lambda: f"num_classes must be at least 1, got {num_classes}")
    check_value(
        class_start >= 0 and class_start + (columns > 0) <= num_classes,
        lambda: (
            f"class_start={class_start} with {columns} columns lies beyond num_classes={num_classes}: a "
            "shard starts at one of the classes (only an empty one may start behind the last)"
        ),
    )


def index_values(logits: Tensor, target: Tensor, *_: Any, options: Options = DEFAULTS, **_others: Any) -> None:
    target_values(target, logits.shape[-1], options.ignore_index)


def shard_values(
    logits: Tensor, target: Tensor, class_start: int, num_classes: int, *_: Any, options: Options = DEFAULTS
) -> None:
    target_values(target, num_classes, options.ignore_index)


def reduced_options(logits: Tensor, z_loss_scale: float, value: str) -> None:
    lse_square_scale(z_loss_scale, logits.dtype)
    reduction(value, ("mean", "sum"))


def index_reduced(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    options: Options = DEFAULTS,
    lse_square_scale: float = 0.0,
    reduction: str = "mean",
) -> None:
    index_forward(logits, target, weight, options=options)
    reduced_options(logits, lse_square_scale, reduction)


def token_weight(tensor: Tensor | None, target: Tensor) -> None:
    if tensor is None:
        return
    if tensor.is_complex():
        raise TypeError("token_weight is complex; expected real numbers")
    same_shape("token_weight", tensor.shape, target.shape, "one number for each target")
    same_device("token_weight", tensor, target, "target is")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "token_weight requires grad, and cross entropy has no derivative for it: detach it, or multiply the losses "
            'of reduction="none" by it'
        )


def divisor(tensor: Tensor | None, logits: Tensor) -> None:
    if tensor is not None:
        dtype("divisor", tensor, DIVISORS)
        meaning = "the sum of the weights and the number of counted rows"
        same_shape("divisor", tensor.shape, torch.Size((2,)), meaning)
        same_device("divisor", tensor, logits)


def index_with_grad(
    logits: Tensor,
    target: Tensor,
    grad_scale: Tensor,
    grad_lse_square: Tensor | None = None,
    weight: Tensor | None = None,
    with_argmax: bool = False,
    with_entropy: bool = False,
    grad_dtype: torch.dtype | None = None,
    *,
    options: Options = DEFAULTS,
) -> None:
    narrower(grad_dtype, logits)
    index_forward(logits, target, weight, options=options)
    scalar_or_rows_of("logits", logits, grad_scale=grad_scale, grad_lse_square=grad_lse_square)


def head_products(value: Any) -> None:
    if value is not None and value not in HEAD_PRODUCTS:
        expected = ", ".join(map(repr, HEAD_PRODUCTS))
        raise ValueError(f"products must be one of {expected}, or None for those of the operands, got {shown(value)}")


def narrower(grad_dtype: torch.dtype | None, logits: Tensor) -> None:
    """In place such a gradient is written to the front of each row, whose elements must lie side by side."""
    if grad_dtype in (None, logits.dtype):
        return
    if logits.dtype != torch.float32 or grad_dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(
            f"grad_dtype must be None, the logits' {logits.dtype} or, for float32 logits, torch.bfloat16 or "
            f"torch.float16; got {grad_dtype}"
        )
    if logits.dim() > 0 and not known(logits.stride(-1) == 1):
        raise ValueError(f"a gradient in {grad_dtype} needs logits with the classes side by side, stride 1")


def scale_grad(grad: Tensor, factor: Tensor) -> None:
    if grad.dim() < 1:
        raise ValueError("grad has no dimension; expected shape (..., V)")
    dtype("grad", grad, FLOATS)
    scalar_or_rows_of("grad", grad, factor=factor)


def rows_of(logits: Tensor, owner: str = "logits", **tensors: Tensor | None) -> None:
    """Each tensor holds one floating-point value a row of the logits, or of another owner."""
    for name, tensor in tensors.items():
        if tensor is not None:
            dtype(name, tensor, FLOATS)
            same_shape(name, tensor.shape, logits.shape[:-1], f"one value for each row of the {owner}")
            same_device(name, tensor, logits, _are(owner))


def scalar_or_rows_of(owner: str, matrix: Tensor, **tensors: Tensor | None) -> None:
    """Each tensor holds one floating-point value, of shape (), or one a row of the matrix."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        dtype(name, tensor, FLOATS)
        if tensor.dim() > 0:
            same_shape(name, tensor.shape, matrix.shape[:-1], f"one value for each row of the {owner}, or ()")
        same_device(name, tensor, matrix, _are(owner))


def _are(owner: str) -> str:
    return "logits are" if owner == "logits" else f"{owner} is"
