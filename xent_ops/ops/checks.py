"""What no kernel can take, refused before any kernel runs, eager and while tracing.

A public function calls ``arguments`` first: types of tensors and options. The operators check what depends on the
tensors: shapes, dtypes, devices and the ranges of options.

Only ``check_targets`` reads the values of a tensor on a GPU, which synchronises it. Sizes may be symbolic, so they are
compared through ``torch._check_value``, which guards them and keeps the text.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INDICES = (torch.int64, torch.int32, torch.uint8)
DIVISORS = (*FLOATS, torch.int64)
REDUCTIONS = ("none", "mean", "sum")
FLOAT32_MAX = torch.finfo(torch.float32).max


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _static(sizes: Iterable[int]) -> bool:
    """Plain integers? torch._check_value takes symbols too, but costs microseconds for each size."""
    for size in sizes:  # noqa: SIM110 (all() of a generator takes three times as long)
        if type(size) is not int:
            return False
    return True


def same_shape(name: str, shape: torch.Size, expected: torch.Size, meaning: str) -> None:
    if _static(shape) and _static(expected) and shape == expected:
        return

    def message() -> str:
        return f"{name} has shape {tuple(shape)}; expected {tuple(expected)}, {meaning}"

    torch._check_value(len(shape) == len(expected), message)
    for size, wanted in zip(shape, expected, strict=True):
        torch._check_value(size == wanted, message)


def same_device(name: str, tensor: Tensor, other: Tensor, owner: str = "logits are") -> None:
    if tensor.device != other.device:
        raise RuntimeError(f"{name} is on {tensor.device} but {owner} on {other.device}; both must be on one device")


def _dtype(name: str, tensor: Tensor, valid: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in valid:
        raise TypeError(f"{name} has dtype {tensor.dtype}; expected one of {_names(valid)}")


def _logits(logits: Tensor, may_be_empty: bool = False) -> None:
    if logits.dim() < 1:
        raise ValueError("logits have no dimension; expected shape (..., V) with the classes last")
    _dtype("logits", logits, FLOATS)
    classes = logits.shape[-1]
    if may_be_empty or (type(classes) is int and classes > 0):
        return
    torch._check_value(
        classes > 0, lambda: f"logits of shape {tuple(logits.shape)} have 0 classes; expected at least 1"
    )


def class_dimension(name: str, tensor: Tensor, dim: int) -> int:
    """``dim`` as a number from 0 on."""
    if tensor.dim() == 0:
        raise ValueError(f"{name} has no dimension; expected (C,), (N, C) or (N, C, d1, ...)")
    if tensor.dim() == 1 and dim == 1:
        return 0  # unbatched
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(
            f"dim={dim} is not a dimension of {name} with shape {tuple(tensor.shape)}; "
            f"valid are {-tensor.dim()} to {tensor.dim() - 1}"
        )
    return dim % tensor.dim()


def suggest_dim(input: torch.Size, target: torch.Size, dim: int) -> None:
    """The slip of those who come from language models: (B, S, V) and (B, S), with torch's default dim=1."""
    if len(input) < 3 or torch.compiler.is_compiling() or target != input[:-1]:
        return
    rows = torch.Size(size for i, size in enumerate(input) if i != dim % len(input))
    if target != rows:
        raise ValueError(
            f"target has shape {tuple(target)}; expected {tuple(rows)}, one class index for each row of the logits, "
            f"with the classes in dim={dim}. Logits {tuple(input)} with the classes last want dim=-1"
        )


def _options(
    weight: Tensor | None, logits: Tensor, label_smoothing: float, softcap: float | None, scale: float
) -> None:
    if weight is not None:
        _dtype("weight", weight, FLOATS)
        same_shape("weight", weight.shape, logits.shape[-1:], "one weight a class")
        same_device("weight", weight, logits)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be between 0.0 and 1.0, got {label_smoothing}")
    if softcap is not None:
        if not (softcap >= 2.0**-126 and math.isfinite(softcap)):
            raise ValueError(
                f"softcap must be a finite number above 0, or None for no cap, got {softcap} (the least is 2**-126, "
                "the smallest normal float32)"
            )
        _fits("softcap", softcap, logits.dtype)
    if not math.isfinite(scale):
        raise ValueError(f"logit_scale must be finite, got {scale}")
    _fits("logit_scale", scale, logits.dtype)


def _fits(name: str, value: float, logits_dtype: torch.dtype) -> None:
    """Beyond float32 a kernel would compute with infinity, and return NaN."""
    if not -FLOAT32_MAX <= value <= FLOAT32_MAX and logits_dtype != torch.float64:
        raise ValueError(
            f"{name} must be at most {FLOAT32_MAX} in magnitude for logits of dtype {logits_dtype}, which are computed "
            f"in float32, got {value}"
        )


def arguments(
    input: Any,
    target: Any,
    weight: Any,
    ignore_index: Any,
    label_smoothing: Any,
    lse_square_scale: Any,
    softcap: Any,
    logit_scale: Any,
    reduction: Any = "none",
    dim: Any = -1,
    input_name: str = "input",
) -> tuple[int, float, float, float | None, float, int]:
    """Refuse arguments of wrong types; (ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale, dim) in
    the types that kernels take.

    The first line of every public function. It reads no tensor on a GPU.
    """
    if not (
        isinstance(input, Tensor)
        and isinstance(target, Tensor)
        and input.layout == torch.strided
        and target.layout == torch.strided
        and (weight is None or (isinstance(weight, Tensor) and weight.layout == torch.strided))
    ):
        _refuse_tensors(((input_name, input), ("target", target), ("weight", weight)))
    if type(dim) is not int:
        dim = integer("dim", dim)
    return *options(ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale, reduction, input.dtype), dim


def options(
    ignore_index: Any,
    label_smoothing: Any,
    lse_square_scale: Any,
    softcap: Any,
    logit_scale: Any,
    reduction: Any = "none",
    dtype: torch.dtype = torch.float64,
) -> tuple[int, float, float, float | None, float]:
    """The same of the options alone; ``dtype`` is that of the logits, where they are known."""
    if not (
        type(label_smoothing) is float
        and type(lse_square_scale) is float
        and type(logit_scale) is float
        and (softcap is None or type(softcap) is float)
        and is_int64(ignore_index)
    ):
        ignore_index = integer("ignore_index", ignore_index)
        label_smoothing = number("label_smoothing", label_smoothing)
        lse_square_scale = number("lse_square_scale", lse_square_scale)
        softcap = None if softcap is None else number("softcap", softcap)
        logit_scale = number("logit_scale", logit_scale)
    if reduction not in REDUCTIONS:
        raise ValueError(
            f"{reduction!r} is not a valid value for reduction; valid are {', '.join(map(repr, REDUCTIONS))}"
        )
    # No math.isfinite: this is traced, and under dynamic=True Dynamo takes a float for a symbol, which it refuses.
    if not -FLOAT32_MAX <= lse_square_scale <= FLOAT32_MAX:
        if not -math.inf < lse_square_scale < math.inf:
            raise ValueError(f"lse_square_scale must be finite, got {lse_square_scale}")
        _fits("lse_square_scale", lse_square_scale, dtype)
    return ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale


def _refuse_tensors(values: Iterable[tuple[str, Any]]) -> None:
    for name, value in values:
        if value is None and name == "weight":
            continue
        if not isinstance(value, Tensor):
            found = "None" if value is None else f"{type(value).__module__}.{type(value).__qualname__}"
            hint = "" if value is None else f"; torch.as_tensor({name}) makes one"
            raise TypeError(f"{name} must be a torch.Tensor, got {found.removeprefix('builtins.')}{hint}")
        if value.layout != torch.strided:
            raise TypeError(
                f"{name} has layout {value.layout}; expected torch.strided, a dense tensor: pass {name}.to_dense()"
            )


def is_int64(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


def integer(name: str, value: Any) -> int:
    """A plain int of anything that is an integer, as torch has it: True is none. Symbols stay what they are."""
    if is_int64(value) or isinstance(value, torch.SymInt):
        return value
    if isinstance(value, Tensor):
        kind = value.dtype
        if kind.is_floating_point or kind.is_complex or kind == torch.bool or value.numel() != 1:
            raise TypeError(f"{name} must be an integer, got a tensor of shape {tuple(value.shape)} and dtype {kind}")
        _readable(name, value, "an integer")
    elif isinstance(value, (bool, float)):  # operator.index takes the one, and Dynamo may not know the other's value
        found = type(value).__name__ if torch.compiler.is_compiling() else repr(value)
        raise TypeError(f"{name} must be an integer, got {found}")
    try:
        plain = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if not is_int64(plain):
        raise ValueError(f"{name} must fit into 64 bits, got {plain}")
    return plain


_LEARNED = ". For a learned scale, multiply the logits by it instead"
_LEARNED_TOO = {
    "softcap": "; for a learned cap, compute softcap * torch.tanh(logits / softcap) in torch",
    "lse_square_scale": "; for a learned z-loss, take lse of xent_ops.cross_entropy_outputs",
    "label_smoothing": "; for learned targets, pass class probabilities",
}


def number(name: str, value: Any) -> float:
    """A plain float of anything that is a number. Symbols stay what they are, and integers while tracing."""
    if type(value) is float:
        return value
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        symbol: Any = value
        return symbol
    if isinstance(value, Tensor):
        instead = _LEARNED + _LEARNED_TOO.get(name, "")
        # Before its value is read: as a number it would lose its gradient, or its tangent, without a word.
        if value.requires_grad or _transformed(value):
            raise RuntimeError(
                f"{name} is a tensor that requires grad or that torch.func transforms, but the loss has no derivative "
                f"for its options{instead}"
            )
        if value.numel() != 1 or value.dtype.is_complex:
            raise TypeError(
                f"{name} must be a number, got a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
            )
        _readable(name, value, "a number", instead)
    elif type(value) is int:
        if is_int64(value) and torch.compiler.is_compiling():
            return value  # may be a symbol; the operator's schema makes a float of it
    elif not (hasattr(value, "__float__") or hasattr(value, "__index__")):  # float() would read a string
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, got {value!r}") from None
    except OverflowError:
        raise ValueError(f"{name} must be at most {FLOAT32_MAX}, got an integer beyond float64") from None


def _transformed(tensor: Tensor) -> bool:
    """Is this a tensor of torch.func, or one with a tangent? Dynamo has no tensors with hidden levels."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return True
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def _readable(name: str, tensor: Tensor, what: str, instead: str = "") -> None:
    if torch.compiler.is_compiling():
        raise TypeError(f"{name} must be {what}, got a tensor, whose value a compiled graph cannot read{instead}")
    if tensor.device.type != "cpu":
        raise TypeError(
            f"{name} must be {what}, got a tensor on {tensor.device}: to read it, the host would wait for the device. "
            f"Pass {name}.item() where that may be{instead}"
        )


def weight_without_grad(weight: Tensor | None) -> None:
    if weight is not None and weight.requires_grad and torch.is_grad_enabled():
        weight_needs_grad()


def weight_needs_grad() -> NoReturn:
    raise RuntimeError(
        "weight requires grad, and cross entropy with class indices has no derivative for it (nor has "
        "F.cross_entropy): detach the weight, or pass class probabilities as the target"
    )


def check_targets(target: Tensor, num_classes: int, ignore_index: int = -100) -> None:
    """Raise IndexError for a target outside [0, num_classes) that is not ignore_index.

    Reads the values, so it synchronises a GPU: call it while debugging. Without it, such a target is an IndexError
    on the CPU, and NaN in its row's loss and gradient elsewhere.

    Args:
        target: class indices of any shape; int64, int32 or uint8.
        num_classes: V, the number of classes.
        ignore_index: the target that marks a row as not counted.
    """
    _dtype("target", target, INDICES)
    indices = target.to(torch.int64)  # uint8 compared with -100 would wrap around
    bad = ((indices < 0) | (indices >= num_classes)) & (indices != ignore_index)
    if bool(bad.any()):
        raise IndexError(
            f"target {int(indices[bad][0])} is out of bounds: valid are 0 to {num_classes - 1} and "
            f"ignore_index={ignore_index} ({int(bad.sum())} of {target.numel()} targets are out of bounds)"
        )


def index_forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> None:
    _logits(logits)
    _dtype("target", target, INDICES)
    same_shape("target", target.shape, logits.shape[:-1], "one class index for each row of the logits")
    same_device("target", target, logits)
    _options(weight, logits, label_smoothing, softcap, logit_scale)


def shard(
    logits: Tensor,
    target: Tensor,
    class_start: int,
    num_classes: int,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> None:
    """A rank's shard of the vocabulary; it may hold no class, and columns of padding beyond the last class."""
    _logits(logits, may_be_empty=True)
    _dtype("target", target, INDICES)
    same_shape("target", target.shape, logits.shape[:-1], "one class index for each row of the logits")
    same_device("target", target, logits)
    _options(weight, logits, label_smoothing, softcap, logit_scale)
    columns = logits.shape[-1]
    if (
        _static((class_start, num_classes, columns))
        and class_start >= 0
        and num_classes > 0
        and class_start + (columns > 0) <= num_classes
    ):
        return
    torch._check_value(num_classes > 0, lambda: f"num_classes must be at least 1, got {num_classes}")
    torch._check_value(
        class_start >= 0 and class_start + (columns > 0) <= num_classes,
        lambda: (
            f"class_start={class_start} with {columns} columns lies beyond num_classes={num_classes}: a "
            "shard starts at one of the classes (only an empty one may start behind the last)"
        ),
    )


def index_values(
    logits: Tensor, target: Tensor, weight: Tensor | None = None, *, ignore_index: int = -100, **options: float | None
) -> None:
    check_targets(target, logits.shape[-1], ignore_index)


def index_backward(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    weight: Tensor | None = None,
    divisor: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> None:
    index_forward(logits, target, weight, label_smoothing=label_smoothing, softcap=softcap, logit_scale=logit_scale)
    rows_of(logits, grad_loss=grad_loss, grad_lse=grad_lse, lse=lse)
    if divisor is not None:
        _dtype("divisor", divisor, DIVISORS)
        same_shape("divisor", divisor.shape, torch.Size(()), "one number for all rows")
        same_device("divisor", divisor, logits)


def index_with_grad(
    logits: Tensor,
    target: Tensor,
    grad_scale: Tensor,
    grad_lse_square: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> None:
    index_forward(logits, target, weight, label_smoothing=label_smoothing, softcap=softcap, logit_scale=logit_scale)
    scalar_or_rows_of("logits", logits, grad_scale=grad_scale, grad_lse_square=grad_lse_square)


def scale_grad(grad: Tensor, factor: Tensor) -> None:
    if grad.dim() < 1:
        raise ValueError("grad has no dimension; expected shape (..., V)")
    _dtype("grad", grad, FLOATS)
    scalar_or_rows_of("grad", grad, factor=factor)


def without_grad(name: str, tensor: Tensor) -> None:
    """For a tensor that an operator overwrites with something that has no derivative."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} must not require grad, for an operator that has no derivative writes over it: call the operator "
            "below torch.no_grad(), or use xent_ops.cross_entropy(..., inplace_backward=True)"
        )


def writable(name: str, tensor: Tensor) -> None:
    """Refuse elements that share memory, and what torch itself does not write to."""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{name} was made in inference mode, and outside it no tensor of inference mode is written to: call the "
            f"operator below torch.inference_mode(), or pass {name}.clone()"
        )
    if may_overlap(tensor.shape, tensor.stride()):
        raise RuntimeError(
            f"{name} of shape {tuple(tensor.shape)} and strides {tensor.stride()} share memory between their "
            "rows, so that no gradient can be written over them: pass a copy"
        )


def may_overlap(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Do elements share memory, or are the strides so odd that it takes more to tell?"""
    if 0 in sizes:
        return False
    behind = 0  # the last element of the dimensions with smaller strides
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1:
            if stride <= behind:
                return True
            behind += (size - 1) * stride
    return False


def soft_forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> None:
    _logits(logits)
    _dtype("target of class probabilities", target, FLOATS)
    same_shape("target", target.shape, logits.shape, "one probability for each logit")
    same_device("target", target, logits)
    _options(weight, logits, label_smoothing, softcap, logit_scale)


def soft_backward(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    weight: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> None:
    soft_forward(logits, target, weight, label_smoothing=label_smoothing, softcap=softcap, logit_scale=logit_scale)
    rows_of(logits, grad_loss=grad_loss, grad_lse=grad_lse, lse=lse)


def rows_of(logits: Tensor, **tensors: Tensor | None) -> None:
    """Each tensor holds one floating-point value a row of the logits."""
    for name, tensor in tensors.items():
        if tensor is not None:
            _dtype(name, tensor, FLOATS)
            same_shape(name, tensor.shape, logits.shape[:-1], "one value for each row of the logits")
            same_device(name, tensor, logits)


def scalar_or_rows_of(owner: str, matrix: Tensor, **tensors: Tensor | None) -> None:
    """Each tensor holds one floating-point value, of shape (), or one a row of the matrix."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        _dtype(name, tensor, FLOATS)
        if tensor.dim() > 0:
            same_shape(name, tensor.shape, matrix.shape[:-1], f"one value for each row of the {owner}, or ()")
        same_device(name, tensor, matrix, "logits are" if owner == "logits" else f"{owner} is")
