"""What all launchers share: where rows lie, empty outputs, the device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo import guards

from ..reference import accumulator
from ..rows import class_weight
from . import configs

Strides = tuple[int, int, int]  # the last three of Rows


def edges(classes: int, itemsize: int, *places: Strides) -> int:
    """0 where every row starts and ends on a 16-byte boundary, counted from the first; else see configs.edges."""
    vector = configs.vector(itemsize)
    if not (classes % vector or any(stride % vector for place in places for stride in place[1:])):
        return 0
    return configs.edges(classes, itemsize)


Place = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


def place(shape: tuple[int, ...], dtype: torch.dtype) -> Place:
    """Size, strides and dtype of a dense tensor, as ``empty_like`` wants them."""
    if len(shape) == 1:
        return tuple(shape), (1,), dtype
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(shape), (*reversed(strides),), dtype


def empty_rows(logits: Tensor) -> Tensor:
    """One value a row. A tuple, for torch.empty takes the host twice as long with a torch.Size."""
    return torch.empty(tuple(logits.shape[:-1]), dtype=accumulator(logits), device=logits.device)


def empty_grad(logits: Tensor) -> Tensor:
    return torch.empty(tuple(logits.shape), dtype=logits.dtype, device=logits.device)


def class_weights(
    weight: Tensor | None, absent: Tensor, label_smoothing: float, itemsize: int, *places: Strides
) -> Tensor:
    """The class weights in the dtype of ``absent``, for kernels that read them tile by tile beside rows at ``places``.

    Rows with a border (``edges``) start their tiles in any column, and 16-byte loads need boundaries in the weights
    too. So these come four times, less none, one, two or three columns at the start (numerics.weights_from).
    """
    weights = class_weight(weight, absent)
    if weight is None or label_smoothing == 0.0 or not edges(weight.numel(), itemsize, *places):
        return weights
    pitch = -(-weights.numel() // 4) * 4
    padded = torch.nn.functional.pad(weights, (0, pitch + 3 - weights.numel()))
    return padded.as_strided((4, pitch), (1, 1)).contiguous()


# (size, strides, dtype) -> a tensor on the current device. Inductor's code allocates so: without the dispatcher, in a
# third of the time that torch.empty takes the host.
EMPTY_STRIDED: dict[str, Callable[..., Tensor]] = {
    "cuda": guards._empty_strided_cuda,  # type: ignore[attr-defined]
    "cpu": guards._empty_strided_cpu,  # type: ignore[attr-defined]
}


def empty_like(tensor: Tensor) -> Callable[..., Tensor]:
    """Of (size, strides, dtype), on the device of the tensor, which must be the current one."""
    return EMPTY_STRIDED[tensor.device.type]


@functools.cache
def _processors_of(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def processors(tensor: Tensor) -> int:
    """Streaming multiprocessors of the tensor's device; 2 in the interpreter, so that both ways are run there."""
    return _processors_of(tensor.device) if tensor.is_cuda else 2


# torch.cuda.current_device first asks whether CUDA is there, and so it is where a tensor is.
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def elsewhere(device: int) -> bool:
    """Is another one than this the current device, on which Triton launches? Of a CPU (-1) none is."""
    return device >= 0 and device != _current_device()


_HERE = contextlib.nullcontext()


def on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensors'."""
    if elsewhere(tensor.get_device()):
        return torch.cuda.device(tensor.device)
    return _HERE


class InTwoSteps:
    """An operator whose function looks at all but the numbers in its tensors, and returns what computes these.

    ``prepare`` calls that function: its result takes the operator's arguments, these or others of the same shapes,
    strides, dtypes, devices and options, with no look at any of that (ops/library.py keeps it for them). Called, both.
    """

    def __init__(self, function: Callable[..., Callable[..., Any]]) -> None:
        self.function = function
        functools.update_wrapper(self, function)

    def prepare(self, *args: Any, **options: Any) -> Callable[..., Any]:
        run = self.function(*args, **options)
        device = next(arg.get_device() for arg in (*args, *options.values()) if isinstance(arg, Tensor))

        def on_the_device(*args: Any, **options: Any) -> Any:
            if elsewhere(device):
                with torch.cuda.device(device):
                    return run(*args, **options)
            return run(*args, **options)

        return on_the_device

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.prepare(*args, **options)(*args, **options)


# Backward operators, of a function that writes the gradient to its first argument and returns it.


def into_empty(logits: Tensor, write: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The operator whose gradient is a dense tensor of its own."""
    empty, gradient = empty_like(logits), place(logits.shape, logits.dtype)

    def backward(*args: Any, **options: Any) -> Tensor:
        return write(empty(*gradient), *args, **options)

    return backward


def over_logits(write: Callable[..., Tensor]) -> Callable[..., None]:
    """The one that writes over its logits."""

    def backward(grad_loss: Tensor, grad_lse: Tensor | None, logits: Tensor, *rest: Any, **options: Any) -> None:
        write(logits, grad_loss, grad_lse, logits, *rest, **options)
        torch.autograd.graph.increment_version(logits)  # a launch is not seen by autograd

    return backward


def copied_to_logits(operator: Callable[..., Tensor]) -> Callable[..., None]:
    """The same for rows that no two strides describe: through the dense gradient of ``operator``."""

    def backward(grad_loss: Tensor, grad_lse: Tensor | None, logits: Tensor, *rest: Any, **options: Any) -> None:
        logits.copy_(operator(grad_loss, grad_lse, logits, *rest, **options))

    return backward
