"""The context of a call: a tracer, transforms of torch.func, a level of forward-mode AD, saved-tensor hooks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

functorch_is_active = torch._C._are_functorch_transforms_active  # Dynamo answers it too


def in_saved_tensors_hooks() -> bool:
    """Inside a non-reentrant checkpoint, ``save_on_cpu`` or other hooks?"""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None  # also while tracing


def is_traced() -> bool:
    """Is Dynamo or torch.jit.trace recording this call? Modes and subclasses see the operators anyway."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def active() -> bool:
    """Is a functorch transform, or a level of forward-mode AD, around this call in eager?"""
    return not torch.compiler.is_compiling() and (functorch_is_active() or forward_ad._current_level >= 0)


def forward_mode() -> bool:
    """Does this eager call have to propagate tangents? Operators of torch.library cannot."""
    if torch.compiler.is_compiling():
        return False
    if forward_ad._current_level >= 0 or not functorch_is_active():
        return forward_ad._current_level >= 0
    stack = torch._C._functorch.get_interpreter_stack() or []
    return any(level.key() == torch._C._functorch.TransformType.Jvp for level in stack)


def is_batch(grad: Tensor) -> bool:
    """Is this upstream gradient a batch of them: vmap over a backward, or is_grads_batched=True?"""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.is_legacy_batchedtensor(grad) or functorch_is_active()


def refuse(name: str) -> None:
    """Raise inside a transform. For functions without a rule, whose derivatives would be dropped silently."""
    if active():
        raise NotImplementedError(
            f"{name} below a functorch transform (torch.func) or forward-mode AD is not supported; "
            "xent_ops.cross_entropy is"
        )
