"""From tensors to kernels: allocate, take strides, pick a block, launch. One function an operator, with its name.

Each is called with the operator's arguments and returns its outputs. Arguments have passed the operators' checks and
none is float64. Nothing here reads a tensor's values or synchronises, so that every launch can be captured in an NPU
graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton import JITFunction

from .. import reductions
from ..options import DEFAULTS, Options
from ..reference import grad_lse_of_square, infinite_where_ignored, row_grads
from ..rows import class_weight, dense, per_row, rows
from ..triton.configs import softcap as softcap_kind
from . import configs
from .backward import backward_kernel, light_backward_kernel
from .forward import forward_kernel


def _on_host(tensor: Tensor) -> bool:
    """Do the kernels run on the host: in Triton's interpreter, or on CPU tensors in the tests of their lowering?"""
    return tensor.device.type == "cpu" or not isinstance(forward_kernel, JITFunction)


def _cores(tensor: Tensor) -> int:
    """Vector cores of the tensor's device; 3 on the host, so that programs have several rows there."""
    return 3 if _on_host(tensor) else configs.vector_cores(tensor.device)


def _on(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensors'."""
    if not _on_host(tensor):
        module = torch.get_device_module(tensor.device)
        if tensor.device.index != module.current_device():
            return module.device(tensor.device)
    return contextlib.nullcontext()


def _indices(target: Tensor) -> Tensor:
    """Class indices, one a row, of a dtype that a scalar load of the vector cores takes."""
    target = dense(target)
    return target.to(torch.int32) if target.dtype == torch.uint8 else target


def _forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: Options,
    with_argmax: bool = False,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    classes, itemsize = logits.shape[-1], logits.element_size()
    loss = logits.new_empty(logits.shape[:-1], dtype=torch.float32)
    lse = torch.empty_like(loss)
    argmax = torch.empty_like(loss, dtype=torch.int64) if with_argmax else lse
    entropy = torch.empty_like(loss) if with_entropy else lse
    view = rows(logits)
    if view.number == 0:
        return loss, lse, argmax, entropy
    flags: dict[str, Any] = {
        "HAS_WEIGHT": weight is not None,
        "HAS_SMOOTHING": options.label_smoothing > 0.0,
        "SOFTCAP": softcap_kind(options.softcap, itemsize),
        "HAS_ARGMAX": with_argmax,
        "HAS_ENTROPY": with_entropy,
    }
    programs, chunk = configs.programs(view.number, _cores(logits))
    with _on(logits):
        forward_kernel[(programs,)](
            view.tensor,
            _indices(target),
            class_weight(weight, lse),
            loss,
            lse,
            argmax,
            entropy,
            view.number,
            chunk,
            classes,
            *view[2:],
            *options.numbers(),
            **flags,
            BLOCK=configs.block(classes, configs.forward_bytes(itemsize, **flags)),
        )
    return loss, lse, argmax, entropy


def cross_entropy_forward(
    logits: Tensor, target: Tensor, weight: Tensor | None = None, *, options: Options = DEFAULTS
) -> tuple[Tensor, Tensor]:
    return _forward(logits, target, weight, options)[:2]


def cross_entropy_forward_argmax(
    logits: Tensor, target: Tensor, weight: Tensor | None = None, *, options: Options = DEFAULTS
) -> tuple[Tensor, Tensor, Tensor]:
    return _forward(logits, target, weight, options, with_argmax=True)[:3]


def cross_entropy_forward_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None = None, *, options: Options = DEFAULTS
) -> tuple[Tensor, Tensor, Tensor]:
    loss, lse, _, entropy = _forward(logits, target, weight, options, with_entropy=True)
    return loss, lse, entropy


def cross_entropy_reduced(*args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The rows by the kernel, their sums by plain torch."""
    return reductions.cross_entropy_reduced(*args, **options, forward=cross_entropy_forward)


def _backward(
    gradient: Tensor,  # written; may be the logits
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    weight: Tensor | None = None,
    divisor: Tensor | None = None,
    *,
    options: Options = DEFAULTS,
    lse_square_scale: float = 0.0,
    grad_entropy: Tensor | None = None,
    entropy: Tensor | None = None,
) -> None:
    classes, itemsize = logits.shape[-1], logits.element_size()
    view, out = rows(logits), rows(gradient)
    if view.number == 0:
        return
    grad_loss, grad_lse = row_grads(
        grad_loss, grad_lse, target, lse, divisor, options.ignore_index, lse_square_scale, torch.float32
    )
    lse = dense(lse)
    grad_loss, grad_loss_stride = per_row(grad_loss, lse)
    programs, chunk = configs.programs(view.number, _cores(logits))
    layout = (view.number, chunk, classes, *view[2:], *out[2:])
    flags: dict[str, Any] = {
        "HAS_GRAD_LSE": grad_lse is not None,
        "HAS_ENTROPY": grad_entropy is not None,
        "HAS_WEIGHT": weight is not None,
        "HAS_SMOOTHING": options.label_smoothing > 0.0,
        "SOFTCAP": softcap_kind(options.softcap, itemsize),
    }
    with _on(logits):
        if not any(flags.values()):
            light_backward_kernel[(programs,)](
                grad_loss,
                view.tensor,
                _indices(target),
                lse,
                out.tensor,
                *layout,
                grad_loss_stride,
                options.ignore_index,
                options.logit_scale,
                BLOCK=configs.block(classes, configs.light_backward_bytes(itemsize)),
            )
            return
        grad_lse_row, grad_lse_stride = per_row(grad_lse, lse)
        grad_entropy_row, grad_entropy_stride = per_row(grad_entropy, lse)
        weights = class_weight(weight, lse)
        backward_kernel[(programs,)](
            grad_loss,
            grad_lse_row,
            grad_entropy_row,
            view.tensor,
            _indices(target),
            lse,
            lse if entropy is None else dense(entropy),
            weights,
            weights.sum() if weight is not None and options.label_smoothing > 0.0 else weights,
            out.tensor,
            *layout,
            grad_loss_stride,
            grad_lse_stride,
            grad_entropy_stride,
            *options.numbers(),
            **flags,
            BLOCK=configs.block(classes, configs.backward_bytes(itemsize, **flags)),
        )


def cross_entropy_backward(
    grad_loss: Tensor, grad_lse: Tensor | None, logits: Tensor, *rest: Any, **options: Any
) -> Tensor:
    gradient = logits.new_empty(logits.shape)
    _backward(gradient, grad_loss, grad_lse, logits, *rest, **options)
    return gradient


def cross_entropy_backward_(
    grad_loss: Tensor, grad_lse: Tensor | None, logits: Tensor, *rest: Any, **options: Any
) -> None:
    if rows(logits).tensor is logits:
        _backward(logits, grad_loss, grad_lse, logits, *rest, **options)
        torch.autograd.graph.increment_version(logits)  # autograd does not see a launch
    else:  # rows that no two strides describe: through a dense gradient
        logits.copy_(cross_entropy_backward(grad_loss, grad_lse, logits, *rest, **options))


def cross_entropy_backward_entropy(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    grad_entropy: Tensor | None,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    entropy: Tensor,
    weight: Tensor | None = None,
    *,
    options: Options = DEFAULTS,
) -> Tensor:
    gradient, tensors = logits.new_empty(logits.shape), (logits, target, lse, weight)
    _backward(gradient, grad_loss, grad_lse, *tensors, options=options, grad_entropy=grad_entropy, entropy=entropy)
    return gradient


def cross_entropy_with_grad(
    logits: Tensor,
    target: Tensor,
    grad_scale: Tensor,
    grad_lse_square: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    options: Options = DEFAULTS,
    backward: Callable[..., Tensor | None] = cross_entropy_backward,
) -> tuple[Tensor, ...]:
    """By two kernels: a row does not fit into a vector core's memory, so the logits are read twice anyway."""
    loss, lse = cross_entropy_forward(logits, target, weight, options=options)
    lse = infinite_where_ignored(lse, target, options.ignore_index)
    grad_lse = grad_lse_of_square(grad_lse_square, lse, target, options.ignore_index)
    gradient = backward(grad_scale, grad_lse, logits, target, lse, weight, options=options)
    return (loss, lse) if gradient is None else (loss, lse, gradient)


def cross_entropy_with_grad_(*args: Any, **options: Any) -> tuple[Tensor, ...]:
    return cross_entropy_with_grad(*args, **options, backward=cross_entropy_backward_)
