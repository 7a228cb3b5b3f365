"""Checks that run before any kernel, in eager mode and while tracing.

Only ``target_values`` reads a tensor's values on a GPU, and so synchronises it: for ``xent_ops.check_targets`` and
``check=True``. Sizes may be symbolic, so they are compared with ``check_value``, which adds a guard and keeps the text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, get_args

import torch
from torch import Tensor

from .._private import private
from ..head import fp8
from ..kernels.options import HEAD_PRODUCTS, Reduction, RowOptions
from ..kernels.sizes import statically_true
from .message_values import repr_for_message


def _raise_value(condition: Any, message: Callable[[], str]) -> None:
    if not condition:
        raise ValueError(message())


_check_value = private("torch._check_value", _raise_value, "a size that depends on data cannot be compiled")


def check_value(condition: Any, message: Callable[..., str]) -> None:
    """Raise ValueError(message()) unless the condition holds."""
    if condition is True:
        return
    if not torch.compiler.is_dynamo_compiling():
        return _check_value(condition, message)
    # Dynamo's _check_value takes messages of constants alone. A size that depends on data is checked by the operators.
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    if not guard_or_true(condition):
        raise ValueError(message())


FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INDICES = (torch.int64, torch.int32, torch.uint8)
IGNORED_UINT8 = 255  # the usual mark of ignored pixels
DIVISORS = (*FLOATS, torch.int64)
REDUCTIONS = get_args(Reduction)
FLOAT32_MAX = torch.finfo(torch.float32).max


def names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def static(sizes: Iterable[int]) -> bool:
    """Are all sizes plain integers? check_value takes symbols too, but costs microseconds for each size."""
    for size in sizes:  # noqa: SIM110 (all() of a generator takes three times as long)
        if type(size) is not int:
            return False
    return True


def same_shape(name: str, shape: torch.Size, expected: torch.Size, meaning: str) -> None:
    if static(shape) and static(expected) and shape == expected:
        return

    def message() -> str:
        return f"{name} has shape {tuple(shape)}; expected {tuple(expected)}, {meaning}"

    check_value(len(shape) == len(expected), message)
    for size, wanted in zip(shape, expected, strict=True):
        check_value(size == wanted, message)


def same_device(name: str, tensor: Tensor, other: Tensor, other_is: str = "logits are") -> None:
    if tensor.device != other.device:
        raise RuntimeError(f"{name} is on {tensor.device} but {other_is} on {other.device}; both must be on one device")


def dtype(name: str, tensor: Tensor, valid: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in valid:
        raise TypeError(f"{name} has dtype {tensor.dtype}; expected one of {names(valid)}")


def option_values(options: RowOptions, logits_dtype: torch.dtype) -> None:
    label_smoothing(options.label_smoothing)
    softcap(options.softcap, logits_dtype)
    logit_scale(options.logit_scale, logits_dtype)


def label_smoothing(value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"label_smoothing must be between 0.0 and 1.0, got {value}")


def softcap(value: float | None, logits_dtype: torch.dtype) -> None:
    if value is None:
        return
    if not 2.0**-126 <= value < math.inf:
        raise ValueError(
            f"softcap must be a finite number above 0, or None for no cap, got {value} (the least is 2**-126, "
            "the smallest normal float32)"
        )
    _fits("softcap", value, logits_dtype)


def logit_scale(value: float, logits_dtype: torch.dtype) -> None:
    if not abs(value) < math.inf:
        raise ValueError(f"logit_scale must be finite, got {value}")
    if -(2.0**-126) < value < 2.0**-126:  # to a kernel it is 0
        raise ValueError(
            f"logit_scale must not be 0, which makes all classes equally likely, got {value} (the least is 2**-126 in "
            "magnitude, the smallest normal float32)"
        )
    _fits("logit_scale", value, logits_dtype)


def _fits(name: str, value: float, logits_dtype: torch.dtype) -> None:
    """Refuse a value beyond float32: a kernel would compute with infinity, and return NaN."""
    if not -FLOAT32_MAX <= value <= FLOAT32_MAX and logits_dtype != torch.float64:
        raise ValueError(
            f"{name} must be at most {FLOAT32_MAX} in magnitude for logits of dtype {logits_dtype}, which are computed "
            f"in float32, got {value}"
        )


_REDUCTIONS_OF_OTHERS = {
    "batchmean": 'of rows (N, V) it is "mean" here, one number a row; of (B, S, V) divide the loss of "sum" by B',
    "token_mean": '"mean" divides by the number of counted tokens',
    "token-mean": '"mean" divides by the number of counted tokens',
    "elementwise_mean": '"mean" divides by the number of counted rows',
}


def reduction(value: str, valid: tuple[str, ...] = REDUCTIONS) -> None:
    if value not in valid:
        hint = _REDUCTIONS_OF_OTHERS.get(value, "") if isinstance(value, str) else ""
        raise ValueError(
            f"{repr_for_message(value)} is not a valid value for reduction; valid are {', '.join(map(repr, valid))}"
            f"{hint and f': {hint}'}"
        )


def lse_square_scale(value: float, logits_dtype: torch.dtype) -> None:
    # Not math.isfinite: this is traced, and with dynamic=True a float is a symbol, which math.isfinite refuses.
    if not 0.0 <= value <= FLOAT32_MAX:
        if not -math.inf < value < math.inf:
            raise ValueError(f"lse_square_scale must be finite, got {value}")
        if value < 0.0:
            raise ValueError(f"lse_square_scale must be at least 0, got {value}: below 0 it would reward a large lse")
        _fits("lse_square_scale", value, logits_dtype)


_NO_DERIVATIVE = {
    "weight": (
        "cross entropy with class indices has no derivative for it (nor has F.cross_entropy): detach the weight, or "
        "pass class probabilities as the target"
    ),
    "divisor": "linear cross entropy has no derivative for it: detach it",
    "probs": "the loss has no derivative for it: detach it",
}
_OF_TEACHER = "distillation has no derivative for its teacher: compute it under torch.no_grad(), or detach it"


def constant(name: str, tensor: Tensor | None) -> None:
    if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
        constant_needs_grad(name)


def constant_needs_grad(name: str) -> NoReturn:
    raise RuntimeError(f"{name} requires grad, and {_NO_DERIVATIVE.get(name, _OF_TEACHER)}")


def top_k(k: int, classes: int, least: int = 1) -> None:
    check_value(least <= k <= classes, lambda: f"k must be from {least} to {classes} classes, got {k}")


def refuse_products_of_ids(products: str | None) -> None:
    if products is not None:
        raise NotImplementedError(f"several classes a row take no products={products!r}: leave it at None")


def refuse_log_probabilities(name: str, values: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Refuse log-probabilities and logits. A row of log-probabilities adds up to less than 0."""
    negative = values.sum(-1) < 0
    if bool(negative.any()):
        least, variable = values[negative].min().to(dtype), name.split()[0]
        raise ValueError(
            f"{name} has {float(least)} in a row that adds up to less than 0: "
            f"pass {variable}.exp() of log-probabilities, {variable}.softmax(dim) of logits"
        )


_OF_PART = "a part of a sharded head, as weight.to_local(), has a part of the classes"
_OF_IDS = "ids are classes of this head (of a student, not of its teacher): a place without one gets ignore_index"
_OF_STUDENT = "beside classes= a target is an id of the student (the draft's), a place in classes, not the teacher's id"


def target_values(
    target: Tensor, num_classes: int, ignore_index: int, noun: str = "target", hint: str = _OF_PART
) -> None:
    """Raise IndexError for a target outside [0, num_classes) that is not ignore_index."""
    indices = target.to(torch.int64)  # uint8 would wrap around when compared with -100
    bad = ((indices < 0) | (indices >= num_classes)) & (indices != ignore_index)
    if bool(bad.any()):
        outside = indices[bad]
        first, is_mark = int(outside[0]), bool((outside == outside[0]).all())
        if first < 0 or (hint is _OF_PART and is_mark and (len(outside) > 1 or first == IGNORED_UINT8)):
            hint = f"to ignore {noun}s of {first}, pass ignore_index={first}"
        raise IndexError(
            f"{noun} {first} is out of bounds: valid are 0 to {num_classes - 1} and ignore_index={ignore_index} "
            f"({int(bad.sum())} of {target.numel()} {noun}s are out of bounds); {hint}"
        )


def index_values(
    target: Tensor | None, ids: Tensor | None, classes: Tensor | None, num_classes: int, ignore_index: int
) -> None:
    """``target_values`` of what a call has: a target, several classes a row, or a target beside a draft vocabulary."""
    if ids is not None:
        target_values(ids, num_classes, ignore_index, "id", _OF_IDS)
    elif target is not None:
        target_values(target, num_classes, ignore_index, hint=_OF_PART if classes is None else _OF_STUDENT)


def shard_range(columns: int, class_start: int, num_classes: int) -> None:
    if (
        static((class_start, num_classes, columns))
        and class_start >= 0
        and num_classes > 0
        and class_start + (columns > 0) <= num_classes
    ):
        return
    check_value(num_classes > 0, lambda: f"num_classes must be at least 1, got {num_classes}")
    check_value(  # torch 2.11 cannot add a bool to a symbol, such as columns > 0
        class_start >= 0 and class_start + torch.sym_min(columns, 1) <= num_classes,
        lambda: (
            f"class_start={class_start} with {columns} columns lies beyond num_classes={num_classes}: a "
            "shard starts at one of the classes (only an empty one may start behind the last)"
        ),
    )


def head_products(value: Any) -> None:
    if value is not None and value not in HEAD_PRODUCTS:
        expected = ", ".join(map(repr, HEAD_PRODUCTS))
        raise ValueError(
            f"products must be one of {expected}, or None for those of the operands, got {repr_for_message(value)}"
        )


def narrower(grad_dtype: torch.dtype | None, logits: Tensor) -> None:
    """A narrower gradient is written in place to the start of each row, so a row's elements must be dense."""
    if grad_dtype in (None, logits.dtype):
        return
    if logits.dtype != torch.float32 or grad_dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(
            f"grad_dtype must be None, the logits' {logits.dtype} or, for float32 logits, torch.bfloat16 or "
            f"torch.float16; got {grad_dtype}"
        )
    if logits.dim() > 0 and not statically_true(logits.stride(-1) == 1):
        raise ValueError(f"a gradient in {grad_dtype} needs logits with the classes side by side, stride 1")


def real_without_grad(token_weight: Tensor | None) -> None:
    if token_weight is None:
        return
    if token_weight.is_complex():
        raise TypeError("token_weight is complex; expected real numbers")
    if token_weight.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "token_weight requires grad, and cross entropy has no derivative for it: detach it, or multiply the losses "
            'of reduction="none" by it'
        )


def token_weight(tensor: Tensor | None, target: Tensor) -> None:
    if tensor is not None:
        same_shape("token_weight", tensor.shape, target.shape, "one number for each target")
        same_device("token_weight", tensor, target, "target is")
        real_without_grad(tensor)


# For heads


def gradient_mask(mask: Sequence[bool]) -> None:
    if len(mask) != 3:
        raise ValueError(f"output_mask has {len(mask)} entries; expected 3, for input, linear_weight and linear_bias")


def wider(name: str, dtype: torch.dtype | None, input: Tensor) -> None:
    """Check the dtype of sums or of logits, which may be wider than the input's."""
    if dtype in (None, input.dtype) or (dtype == torch.float32 and input.dtype in (torch.bfloat16, torch.float16)):
        return
    raise TypeError(f"{name} must be None, the input's {input.dtype} or, for 16-bit inputs, torch.float32; got {dtype}")


def accumulator(name: str, dtype: torch.dtype | None) -> None:
    """Check the dtype of results that are computed in it."""
    if dtype not in (None, torch.float32, torch.float64):
        raise TypeError(f"{name} must be None, torch.float32 or torch.float64, got {dtype}")


def multiplied(products: str | None, input: Tensor, linear_weight: Tensor) -> None:
    """Check ``products``, and that these operands support it."""
    if products is None:
        return
    head_products(products)
    what = f"products={products!r}"
    if input.dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"{what} makes 8-bit numbers of torch.bfloat16 and torch.float16, got {input.dtype}")
    features = linear_weight.shape[1]
    if features % fp8.MULTIPLE or features == 0:
        raise ValueError(
            f"{what} needs a number of features that is a multiple of {fp8.MULTIPLE}, because 8-bit matrix "
            f"multiplications do; got {features}"
        )
    reason = fp8.why_not(input.device)
    if reason is not None:
        raise RuntimeError(f"{what} is not available on this device: {reason}")


def batch_invariant(products: str | None) -> None:
    """Check ``batch_invariant=True`` of a head."""
    if products is not None:
        raise ValueError(
            f"batch_invariant=True takes 16-bit products, got products={products!r}: 8-bit numbers are "
            "scaled by the largest number of all rows"
        )


def chunk_rows(number: int | None) -> None:
    if number is not None:
        check_value(number >= 1, lambda: f"chunk_rows must be at least 1, or None for the default, got {number}")
