"""Shared by all launchers: the two stages, the device, outputs, class weights, layouts of rows."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._private import private
from .. import accelerators
from ..reference import accumulator
from ..rows import class_weight, dense_rows, front_of, is_narrower, padded_classes, rows, rows_like
from ..sizes import statically_true
from . import configs
from .recording import RECORDING

_GUARDS = private("torch._C._dynamo.guards", None, "a microsecond a launch")

Strides = tuple[int, int, int]  # the last three of RowView
Run = Callable[..., Any]  # the second stage of a launcher

LAUNCHERS: dict[str, Callable[..., Run]] = {}  # by the name of the operator and of the function


def launcher(first_stage: Callable[..., Run]) -> Callable[..., Run]:
    """Register a launcher. It has two stages, because the host takes longer for the first than a small kernel runs.

    The first stage is called with an operator's arguments. It reads shapes, strides, dtypes, devices and options, but
    no numbers in tensors, and keeps no tensor. It returns the second stage. The second stage takes the operator's
    positional arguments, or others with the same shapes, strides and so on. It allocates the outputs, launches, and
    returns the outputs.
    """
    return _register(first_stage.__name__, first_stage)


def launcher_with_in_place_form(first_stage: Callable[..., Run]) -> Callable[..., Run]:
    """Register the launchers of an operator whose last output is a gradient of its logits, and of its in-place form.

    The first stage takes the strides of the rows that the gradient is written to, and the operator's arguments. It
    returns ``write(gradient, *args)``, which returns the other outputs, or None if there are none. The in-place
    form may write a gradient that is narrower than the logits, to the front of each row: the first stage then gets
    ``narrow=True``.
    """
    names = [name for name in inspect.signature(first_stage).parameters if name != "out_strides"]
    position = names.index("logits")
    dtype_position = names.index("grad_dtype") if "grad_dtype" in names else sys.maxsize

    def grad_dtype_of(args: Sequence[Any]) -> torch.dtype | None:
        return args[dtype_position] if dtype_position < len(args) else None

    def operator(*args: Any, **options: Any) -> Run:
        logits = args[position]
        write = first_stage(dense_rows(logits.shape), *args, **options)
        new_grad = new_gradient(logits, grad_dtype_of(args))

        def run(*args: Any) -> Any:
            gradient = new_grad()
            other_outputs = write(gradient, *args)
            return gradient if other_outputs is None else (*other_outputs, gradient)

        return run

    def in_place_form(*args: Any, **options: Any) -> Run:
        logits, dtype = args[position], grad_dtype_of(args)
        layout = row_layout(logits)
        if is_narrower(dtype, logits):
            options["narrow"] = True
        write, as_rows = first_stage(front_strides(layout.strides, logits, dtype), *args, **options), layout.as_rows

        def run(*args: Any) -> Any:
            logits = args[position]
            written = as_rows(logits)
            other_outputs = write(front_of(written, dtype), *args[:position], written, *args[position + 1 :])
            mark_written(written, logits)
            return other_outputs[0] if other_outputs is not None and len(other_outputs) == 1 else other_outputs

        return run

    name = first_stage.__name__
    _register(name, operator)
    _register(f"{name}_", in_place_form)
    return first_stage


def _register(name: str, first_stage: Callable[..., Run]) -> Callable[..., Run]:
    @functools.wraps(first_stage)
    def prepare(*args: Any, **options: Any) -> Run:
        run = first_stage(*args, **options)
        accelerator, index = accelerators.of(args[0].device), args[0].get_device()
        if accelerator is None:  # in the interpreter
            return run
        current, on = accelerator.current, accelerator.on

        def run_on_device(*args: Any) -> Any:
            if index != current():  # Triton launches on the current device
                with on(index):
                    return run(*args)
            return run(*args)

        return run_on_device

    LAUNCHERS[name] = prepare
    return prepare


def new_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """Allocates a dense tensor on the current device, as Inductor's code does: torch.empty takes the host 1 us more."""
    if RECORDING.get():
        # At least one dimension: Inductor launches a kernel to fill a tensor of no dimension.
        return lambda: torch.empty(tuple(shape) or (1,), dtype=dtype, device=device).view(tuple(shape))
    empty = getattr(_GUARDS, f"_empty_strided_{device.type}", None)
    if empty is None:
        return functools.partial(torch.empty, tuple(shape), dtype=dtype, device=device)
    return functools.partial(empty, tuple(shape), torch.empty(shape, device="meta").stride(), dtype)


def new_rows(logits: Tensor) -> Callable[[], Tensor]:
    """Allocates one value a row, in the accumulator's dtype."""
    return new_tensor(logits.shape[:-1], accumulator(logits), logits.device)


def new_gradient(logits: Tensor, dtype: torch.dtype | None = None) -> Callable[[], Tensor]:
    return new_tensor(logits.shape, dtype or logits.dtype, logits.device)


class RowLayout(NamedTuple):
    """The layout of the rows of a tensor (..., V), and of all tensors like it; see ``rows``."""

    number: int
    strides: Strides
    as_rows: Callable[[Tensor], Tensor]  # copies if the rows need more than two strides


def row_layout(tensor: Tensor) -> RowLayout:
    # On the meta device: the first stage makes no copy.
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    view = rows(like)
    return RowLayout(view.number, view[2:], rows_like(like, view))


def front_strides(strides: Strides, logits: Tensor, grad_dtype: torch.dtype | None) -> Strides:
    """The strides of ``front_of`` logits that have these strides."""
    wider = 1 if grad_dtype is None else logits.element_size() // grad_dtype.itemsize
    return strides[0], wider * strides[1], wider * strides[2]


def edges(classes: int, itemsize: int, *layouts: Strides) -> int:
    """0 if every row starts and ends on a 16-byte boundary, relative to the first row; else see configs.edges."""
    vector = configs.vector(itemsize)
    if classes % vector == 0 and all(
        statically_true(stride % vector == 0) for layout in layouts for stride in layout[1:]
    ):
        return 0
    return configs.edges(classes, itemsize)


def realigned(logits: Tensor) -> Tensor | None:
    """For batch_invariant: a copy, unless loads of 16 bytes, or configs.edges, cut all rows at the same columns."""
    classes, itemsize = logits.shape[-1], logits.element_size()
    multiple = 16 if classes * itemsize % 16 == 0 else 128
    strides = [stride for size, stride in zip(logits.shape[:-1], logits.stride()[:-1], strict=True) if size > 1]
    address = 0 if RECORDING.get() else logits.data_ptr()  # a package allocates at this multiple
    alike = address % multiple == 0 and all(stride * itemsize % multiple == 0 for stride in strides)
    if alike and rows(logits).tensor is logits:  # else the launcher copies them densely
        return None
    padding = padded_classes(classes, logits.dtype) - classes
    if padding == 0:
        return logits.clone(memory_format=torch.contiguous_format)  # which F.pad does not make of transposed logits
    dense = logits if logits.stride(-1) == 1 else logits.contiguous()
    return torch.nn.functional.pad(dense, (0, padding))[..., :classes]


def class_weights(weight: Tensor | None, absent: Tensor, shifted: bool) -> Tensor:
    """The class weights in the dtype of ``absent``; ``absent`` itself if there are none.

    ``shifted``: the kernel reads them tile by tile beside rows with ``edges``. Their tiles start in any column, and
    16-byte loads need boundaries in the weights too. So there are four copies, without the first 0, 1, 2 or 3 columns
    (numerics.weights_from).
    """
    if weight is None:
        return absent
    weights = class_weight(weight, absent)
    if not shifted:
        return weights
    pitch = -(-weights.numel() // 4) * 4
    padded = torch.nn.functional.pad(weights, (0, pitch + 3 - weights.numel()))
    return padded.as_strided((4, pitch), (1, 1)).contiguous()


def mark_written(view: Tensor, tensor: Tensor) -> None:
    """Call it after a kernel has written to the tensor, or to a copy of its rows."""
    if view is tensor:
        torch.autograd.graph.increment_version(tensor)  # autograd does not see a launch
    else:
        tensor.copy_(view.view(tensor.shape))
