"""Checks of public functions' arguments: tensors are tensors, options are numbers, the class dimension exists.

checks.py checks the properties that depend on the tensors: shapes, dtypes, devices, ranges of options. Nothing here
reads a tensor on a GPU.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from ..kernels.options import Chunking, LossOptions, RowOptions
from ..kernels.reference import accumulator
from ..kernels.rows import dense_classes, reads_apart
from . import checks
from .foreign_names import refuse_argument
from .message_values import repr_for_message, type_name
from .scalars import integer, is_int64, number

_DENSE, _FLOATS = torch.strided, checks.FLOATS  # globals are found faster than attributes


_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def named(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """The function, with an error that names its parameters for a call with an unknown one or too many by position.

    An eager call takes .2 us longer (19 us in total, on a CPU, 2026-11-27).
    """
    known = {name: parameter.kind for name, parameter in inspect.signature(function).parameters.items()}
    most = sum(kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for kind in known.values())

    @functools.wraps(function)
    def call(*args: _Parameters.args, **keywords: _Parameters.kwargs) -> _Result:
        for name in keywords:
            if name not in known:
                refuse_argument(function.__qualname__, name, known)
        if len(args) > most:
            names, own = list(known), int("self" in known)
            raise TypeError(
                f"{function.__qualname__}() takes {most - own} arguments by position ({', '.join(names[own:most])}), "
                f"got {len(args) - own}; by name: {', '.join(names[most:])}"
            )
        return function(*args, **keywords)

    return call


def tensors(input: Any, target: Any, weight: Any = None, input_name: str = "input") -> None:
    """Refuse values other than dense tensors, and inputs without a kernel. Every public function calls this first."""
    if not (
        isinstance(input, Tensor)
        and isinstance(target, Tensor)
        and input.layout is _DENSE
        and target.layout is _DENSE
        and not (input.is_nested or target.is_nested)  # nested tensors may be strided too
        and input.dtype in _FLOATS
        and (weight is None or (isinstance(weight, Tensor) and weight.layout is _DENSE and not weight.is_nested))
    ):
        required(input_name, input)
        required("target", target)
        optional("weight", weight)
        _refuse_integers(input_name, input, target)


def loss_options(
    ignore_index: Any,
    label_smoothing: Any,
    softcap: Any,
    logit_scale: Any,
    lse_square_scale: Any = 0.0,
    reduction: str = "mean",
    dtype: torch.dtype = torch.float64,
) -> LossOptions:
    """The options in the types that kernels take. ``dtype``: the logits' dtype, if known."""
    if not (
        type(label_smoothing) is type(logit_scale) is type(lse_square_scale) is float
        and (softcap is None or type(softcap) is float)
        and is_int64(ignore_index)
    ):
        ignore_index = integer("ignore_index", ignore_index)
        label_smoothing, logit_scale = number("label_smoothing", label_smoothing), number("logit_scale", logit_scale)
        softcap = None if softcap is None else number("softcap", softcap)
        lse_square_scale = number("lse_square_scale", lse_square_scale)
    checks.reduction(reduction)
    checks.lse_square_scale(lse_square_scale, dtype)
    return LossOptions(RowOptions(ignore_index, label_smoothing, softcap, logit_scale), lse_square_scale, reduction)


def class_dimension(name: str, tensor: Tensor, dim: Any) -> int:
    """``dim`` as a number that is not negative."""
    dim, dims = dim if type(dim) is int else integer("dim", dim), tensor.dim()
    if dims == 0:
        raise ValueError(f"{name} has no dimension; expected (C,), (N, C) or (N, C, d1, ...)")
    if dims == 1 and dim == 1:
        return 0  # unbatched
    if not -dims <= dim < dims:
        raise ValueError(
            f"dim={dim} is not a dimension of {name} with shape {tuple(tensor.shape)}; valid are {-dims} to {dims - 1}"
        )
    return dim % dims


def classes_last(tensor: Tensor, dim: int, name: str = "input", *, apart: bool = False) -> Tensor:
    """(..., C), dense in the classes. ``apart``: leave tensors as they are if the class-index kernels can read them."""
    dim = class_dimension(name, tensor, dim)
    moved = tensor if dim == tensor.dim() - 1 else tensor.movedim(dim, -1)
    return moved if apart and reads_apart(moved) else dense_classes(moved)


def suggest_dim(input: Tensor, target: Tensor, dim: int) -> None:
    """Detect a common mistake with language models: (B, S, V) and (B, S), with torch's default dim=1."""
    if input.dim() < 3:
        return
    if torch.compiler.is_compiling():
        if not _has_rows_of(target, input, dim % input.dim()) and _has_rows_of(target, input, input.dim() - 1):
            raise ValueError(  # no sizes in the text: Dynamo cannot format symbols
                "target has one class index for each row of logits with the classes last, but dim is another: such "
                "logits want dim=-1"
            )
        return
    if target.shape != input.shape[:-1]:
        return
    rows = torch.Size([size for i, size in enumerate(input.shape) if i != dim % input.dim()])
    if target.shape != rows:
        raise ValueError(
            f"target has shape {tuple(target.shape)}; expected {tuple(rows)}, one class index for each row of the "
            f"logits, with the classes in dim={dim}. Logits {tuple(input.shape)} with the classes last want dim=-1"
        )


def _has_rows_of(target: Tensor, input: Tensor, dim: int) -> bool:
    """Does the target have the input's sizes without ``dim``? Yes for sizes that are not known before the code runs."""
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    rows = [*input.shape[:dim], *input.shape[dim + 1 :]]
    return target.dim() == len(rows) and all([guard_or_true(a == b) for a, b in zip(target.shape, rows, strict=True)])


def linear(
    input: Any,
    linear_weight: Any,
    target: Any,
    linear_bias: Any,
    weight: Any = None,
    divisor: Any = None,
) -> None:
    """``tensors`` for a head and its loss."""
    tensors(input, target, weight)
    required("linear_weight", linear_weight)
    optional("linear_bias", linear_bias)
    optional("divisor", divisor)
    if linear_weight.dtype in checks.INDICES and target.dtype in _FLOATS:
        _refuse_integers("linear_weight", linear_weight, target)


def optional(name: str, value: Any) -> None:
    if value is not None:
        required(name, value)


def required(name: str, value: Any) -> None:
    """Refuse a value other than a dense tensor."""
    if isinstance(value, Tensor) and value.layout is _DENSE and not value.is_nested:
        return
    if not isinstance(value, Tensor):
        refuse_proxy(value)
        found = "None" if value is None else type_name(value)
        raise TypeError(f"{name} must be a torch.Tensor, got {found}{way_to_tensor(name, value)}")
    if value.is_nested:
        raise TypeError(
            f"{name} is a nested tensor; expected a dense one: for the rows of all its components, one after the "
            f"other, pass torch.cat({name}.unbind())"
        )
    raise TypeError(f"{name} has layout {value.layout}; expected torch.strided, a dense tensor: pass {name}.to_dense()")


def divisor(value: Any, input: Tensor, reduction: str) -> Tensor | None:
    """The divisor of a sum, as a tensor () on the input's device. Raises for one that does not fit."""
    if value is None:
        return None
    if not isinstance(value, Tensor):
        value = _divisor_of_number(number("divisor", value), input)
    if value.dim() > 0 and value.numel() == 1:
        raise ValueError(f"divisor has shape {tuple(value.shape)}; expected (), one number: pass divisor.squeeze()")
    if value.dim() > 0 and not value.is_floating_point():
        raise ValueError(
            f"divisor has shape {tuple(value.shape)} and integers, as a target has: the order is input, "
            "linear_weight, target, of LinearCrossEntropyLoss input, target (Liger-Kernel's is weight, input, target)"
        )
    if reduction != "sum":
        raise ValueError(f'divisor is what a sum is divided by: expected reduction="sum", got {reduction!r}')
    checks.dtype("divisor", value, checks.DIVISORS)
    checks.same_shape("divisor", value.shape, torch.Size(()), "one number")
    checks.same_device("divisor", value, input, "input is")
    return value


def _divisor_of_number(value: float, input: Tensor) -> Tensor:
    if not _is_true(value > 0) or not _is_true(value < math.inf):
        found = "" if torch.compiler.is_compiling() else f", got {value}"  # Dynamo cannot format symbols
        raise ValueError(
            f"divisor must be a finite number above 0{found} (num_items_in_batch is 0 where all labels of a step are "
            "ignored: leave that step out)"
        )
    dtype = accumulator(input)
    if torch.compiler.is_compiling():  # AOTAutograd would compile again for each constant value
        return torch.ones((), dtype=dtype, device=input.device) * value
    return torch.full((), value, dtype=dtype, device=input.device)


def _is_true(condition: bool) -> bool:
    if torch.compiler.is_compiling():  # it may depend on data
        from torch.fx.experimental.symbolic_shapes import guard_or_true

        return guard_or_true(condition)
    return condition


def chunks(
    accumulate_dtype: Any,
    chunk_rows: Any,
    skip_ignored: Any,
    logits_dtype: Any = None,
    products: Any = None,
    batch_invariant: Any = False,
) -> tuple[torch.dtype | None, Chunking]:
    """The accumulator's dtype and the chunk options of a linear cross entropy."""
    for name, dtype in (("accumulate_dtype", accumulate_dtype), ("logits_dtype", logits_dtype)):
        if not (dtype is None or isinstance(dtype, torch.dtype)):
            raise TypeError(f"{name} must be a torch.dtype or None, got {repr_for_message(dtype)}")
    boolean("skip_ignored", skip_ignored)
    checks.head_products(products)
    chunk_rows = None if chunk_rows is None else integer("chunk_rows", chunk_rows)
    checks.chunk_rows(chunk_rows)
    boolean("batch_invariant", batch_invariant)
    skip_ignored = skip_ignored and not batch_invariant
    return accumulate_dtype, Chunking(chunk_rows, skip_ignored, logits_dtype, products, batch_invariant)


def refuse_proxy(value: Any) -> None:
    """Raise if torch.fx.symbolic_trace calls a public function."""
    if isinstance(value, torch.fx.Proxy):
        raise TypeError(
            "torch.fx.symbolic_trace calls with proxies, which have no shape or dtype that a loss could check: use "
            "torch.export, make_fx or torch.compile, or wrap the loss by torch.fx.wrap"
        )


def _refuse_integers(name: str, tensor: Tensor, target: Tensor) -> None:
    """For an argument that must hold numbers: a tensor of another dtype is refused, with the likely mistake."""
    swapped = tensor.dtype in checks.INDICES and target.dtype in _FLOATS
    hint = f": {name} and target seem to be swapped" if swapped else ""
    raise TypeError(f"{name} has dtype {tensor.dtype}; expected one of {checks.names(_FLOATS)}{hint}")


def way_to_tensor(name: str, value: Any) -> str:
    """Advice for a value that is not a tensor: the way to get the intended tensor."""
    if isinstance(getattr(value, "weight", None), Tensor):  # an nn.Linear or nn.Embedding
        return f"; pass {name}.weight"
    if isinstance(value, (int, float, complex, list, tuple)) or hasattr(value, "__array__"):
        return f"; torch.as_tensor({name}) makes one"
    return ""


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {repr_for_message(value)}")
    return value
