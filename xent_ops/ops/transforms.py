"""The row operator below functorch transforms: torch.func.grad, vmap, vmap(grad), jacrev and their nestings.

``torch.library.register_autograd`` has no ``setup_context`` that functorch could use (torch 2.13), so the Python face
comes through here while a transform is active. The kernels are the same operators; vmap only adds rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..kernels import reference
from . import checks
from .second_order import differentiate

_functorch_active = torch._C._are_functorch_transforms_active


def active() -> bool:
    """Is a functorch transform, or a level of forward-mode AD, around this call? Dynamo sees to them itself."""
    return not torch.compiler.is_compiling() and active_in_eager()


def active_in_eager() -> bool:
    """The same for those who know that nobody compiles."""
    return _functorch_active() or forward_ad._current_level >= 0


def refuse(name: str) -> None:
    """Raise for a function that has no rule for transforms: below one, autograd would drop its outputs' derivatives."""
    if active():
        raise NotImplementedError(
            f"{name} below a functorch transform (torch.func) or forward-mode AD is not supported; "
            "xent_ops.cross_entropy is"
        )


def forward_mode() -> bool:
    if torch.compiler.is_compiling():
        return False
    if forward_ad._current_level >= 0:
        return True
    stack = torch._C._functorch.get_interpreter_stack() or []
    return any(level.key() == torch._C._functorch.TransformType.Jvp for level in stack)


def forward_rows(logits: Tensor, target: Tensor, weight: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    """(loss, lse) as ``cross_entropy_forward`` returns them; forward-mode AD runs through plain torch."""
    checks.index_forward(logits, target, weight, **options)
    if forward_mode():
        return reference.cross_entropy_forward(logits, target, weight, **options)
    return _Forward.apply(logits, target, weight, options)


def _to_front(tensor: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    if tensor is None:
        return None
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(logits: Tensor, target: Tensor, weight: Tensor | None, options: dict[str, Any]) -> tuple[Tensor, ...]:
        return torch.ops.xent.cross_entropy_forward(logits, target, weight, **options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        logits, target, weight, options = inputs
        ctx.save_for_backward(logits, target, output[1], weight)
        ctx.options = options

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, lse, weight = ctx.saved_tensors
        return _Backward.apply(grad_loss, grad_lse, logits, target, lse, weight, ctx.options), None, None, None

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None,
        options: dict[str, Any],
    ) -> tuple[Any, ...]:
        if weight is not None and in_dims[2] is not None:
            raise NotImplementedError("vmap over the class weight of xent_ops.cross_entropy is not supported")
        size = info.batch_size
        outputs = _Forward.apply(
            _to_front(logits, in_dims[0], size), _to_front(target, in_dims[1], size), weight, options
        )
        return outputs, (0, 0)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(*inputs: Any) -> Tensor:
        return torch.ops.xent.cross_entropy_backward(*inputs[:-1], **inputs[-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:-1])
        ctx.options = inputs[-1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[:-1]
        return *differentiate(reference.cross_entropy_backward, ctx.saved_tensors, needs, ctx.options, grad), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, int]:
        size = info.batch_size
        *rows, weight, options = inputs
        batched = [_to_front(tensor, dim, size) for tensor, dim in zip(rows, in_dims, strict=False)]
        return _Backward.apply(*batched, weight, options), 0
