"""The context of a call: tracers, transforms of torch.func, levels of forward-mode AD, saved-tensor hooks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from .._private import left_out, private

_ANSWERS_ALWAYS = torch.__version__ < "2.13"
_UNSEEN = "transforms of torch.func around a loss are not seen"
functorch_is_active = private(  # Dynamo supports it too
    "torch._C._are_functorch_transforms_active", lambda: False, _UNSEEN
)
_interpreters = private("torch._C._functorch.get_interpreter_stack", lambda: None, _UNSEEN)
_jvp = private("torch._C._functorch.TransformType.Jvp", None, _UNSEEN)
is_wrapped = private(
    "torch._C._functorch.is_functorch_wrapped_tensor",
    lambda tensor: False,
    "an option that is a tensor of torch.func, or a DTensor inside of one, is not refused in words",
)
_unwrapped = private("torch._C._functorch.get_unwrapped", lambda tensor: None, "DTensors in torch.func are not seen")
_is_legacy_batch = private(
    "torch._C._functorch.is_legacy_batchedtensor", lambda tensor: False, "no is_grads_batched=True"
)
_tracing_state = private("torch._C._get_tracing_state", lambda: torch.jit.is_tracing() or None, "nothing")
_saved_tensors_hooks = private(
    "torch._C._autograd._top_saved_tensors_default_hooks",
    lambda ignore_is_tracing: (),
    "a loss of hidden states takes four products, as in a checkpoint, and no gradient is written in place",
)
keep_graph = private(
    "torch._C._autograd._get_current_graph_task_keep_graph",
    lambda: True,
    "gradients that the forward has made are copied in the backward",
)
FakeTensor = private("torch._subclasses.fake_tensor.FakeTensor", (), "values of fake tensors are read")
if not hasattr(forward_ad, "_current_level"):
    left_out("torch.autograd.forward_ad._current_level", "a microsecond a call", "it is not there")


def in_saved_tensors_hooks() -> bool:
    """Inside a non-reentrant checkpoint, ``save_on_cpu`` or other hooks?"""
    return _saved_tensors_hooks(True) is not None  # while tracing too


def dual_level() -> bool:
    """Inside a level of forward-mode AD, in eager?"""
    level = getattr(forward_ad, "_current_level", None)
    if level is not None:
        return bool(level >= 0)
    try:
        with forward_ad.dual_level():
            return False
    except RuntimeError:  # levels do not nest
        return True


def is_traced() -> bool:
    """Is Dynamo or torch.jit.trace recording this call? Modes and subclasses see the operators in any case."""
    return torch.compiler.is_compiling() or is_jit_traced()


def is_jit_traced() -> bool:
    """Is torch.jit.trace recording? Its sizes are tensors, and it cannot record an operator with a list of bools."""
    return not torch.compiler.is_compiling() and _tracing_state() is not None


def is_recorded() -> bool:
    """Does a tracer record operators: Dynamo, AOTAutograd, torch.export, make_fx?"""
    return torch.compiler.is_compiling() or get_proxy_mode() is not None


def any_tracer() -> bool:
    """``is_recorded``, or is torch.jit.trace recording?"""
    return is_recorded() or is_jit_traced()


def can_read(*tensors: Tensor) -> bool:
    """True if Python may read the values: of tensors on a CPU that are not fake, and no tracer records."""
    return not any_tracer() and all(x.device.type == "cpu" and not isinstance(x, FakeTensor) for x in tensors)


def is_exported() -> bool:
    """Is torch.export tracing? In torch 2.11 Dynamo always says yes, so a strict export counts as a compilation."""
    return torch.compiler.is_exporting() and not (_ANSWERS_ALWAYS and torch.compiler.is_dynamo_compiling())


def active() -> bool:
    """Is this call inside a functorch transform, or in eager inside a level of forward-mode AD?"""
    return functorch_is_active() or (not torch.compiler.is_compiling() and dual_level())


def forward_mode() -> bool:
    """Does this eager call have to propagate tangents? Operators of torch.library cannot."""
    if torch.compiler.is_compiling():
        return False
    if not functorch_is_active():
        return dual_level()
    return dual_level() or any(level.key() == _jvp for level in _interpreters() or [])


def is_batch(grad: Tensor) -> bool:
    """Is this upstream gradient a batch of gradients, from vmap over a backward or is_grads_batched=True?"""
    if torch.compiler.is_compiling():
        return False
    return _is_legacy_batch(grad) or functorch_is_active()


def innermost(tensor: Tensor) -> Tensor:
    """The tensor that transforms of torch.func have wrapped. Dynamo has no tensors with hidden levels."""
    if not torch.compiler.is_compiling():
        while tensor is not None and is_wrapped(tensor):
            tensor = _unwrapped(tensor)
    return tensor


def refuse(name: str) -> None:
    """Raise inside a transform, for functions without a rule. Their derivatives would silently be lost."""
    if active():
        raise NotImplementedError(
            f"{name} inside a functorch transform (torch.func) or forward-mode AD is not supported; "
            "xent_ops.cross_entropy is, and F.linear makes its logits from hidden states"
        )
