"""The operands of a language model's head: the weight of an nn.Linear, also with the LoRA adapters of peft on it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import transforms
from ..ops.checks import FLOATS
from ..ops.message_values import repr_for_message

_OF_PEFT = (
    ": name the head in modules_to_save, which trains all of it, or leave it out of target_modules, target_parameters "
    "and trainable_token_indices (also those of an embedding that it is tied to)"
)
# Modules of hooks that gather weights, or act only while their own model runs: those of another model's use_xent.
_HARMLESS = ("torch.distributed.", "deepspeed.", "xent_ops.")


def product(head: Any, hidden: Tensor, upcast: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """(input, weight, bias) whose product is ``head(hidden)``. Raises TypeError if the head is not supported.

    Call it inside the head's forward, because there FSDP has gathered the weight and the caller's autocast is on.

    Args:
        upcast: the result of ``upcasts(head)``; if True, the product is that of the operands in float32.
    """
    if _of_peft(head, "ModulesToSaveWrapper"):
        return product(_active_copy(head), hidden)
    if not _of_peft(head, "lora.layer.Linear"):
        _check_linear(head, upcast)
        return hidden, head.weight, head.bias
    base = head.get_base_layer()
    _check_linear(base)
    inputs, weights, bias = [hidden], [base.weight], base.bias
    for name in _active_adapters(head):
        if name in head.lora_variant:
            variant = type(head.lora_variant[name]).__name__
            raise TypeError(
                f"the head's adapter {name!r} is a {variant}; expected plain LoRA on the head, or none{_OF_PEFT}"
            )
        down, up = head.lora_A[name], head.lora_B[name]
        dropped = head.lora_dropout[name](hidden.to(down.weight.dtype))
        scaling = head.scaling[name]
        inputs.append((down(dropped) * scaling).to(hidden.dtype))
        weights.append(up.weight.to(base.weight.dtype))
        if up.bias is not None:
            up_bias = (up.bias * scaling).to(base.weight.dtype)
            bias = up_bias if bias is None else bias + up_bias
    if len(inputs) == 1:
        return hidden, base.weight, bias
    # W + s B A, as further columns of W. A sum in bfloat16 would round the delta to W's last bit, and lose a small one.
    return torch.cat(inputs, -1), torch.cat(weights, 1), bias


def upcasts(head: Any) -> bool:
    """Does the head's own forward multiply 16-bit operands in float32, F.linear(x.float(), weight.float())?

    A call with four random rows decides: logits that were rounded to 16 bits differ.
    """
    if not isinstance(head, nn.Linear) or type(head).forward is nn.Linear.forward:
        return False
    if type(head.weight) not in (Tensor, nn.Parameter) or head.weight.dtype not in (torch.bfloat16, torch.float16):
        return False
    with torch.no_grad():
        generator = torch.Generator("cpu").manual_seed(0)
        x = torch.randn(4, head.in_features, generator=generator, device="cpu").to(head.weight)
        logits = type(head).forward(head, x)
        exact = F.linear(x.float(), head.weight.float(), None if head.bias is None else head.bias.float())
    return logits.dtype == torch.float32 and bool((logits - exact).norm() <= 1e-5 * exact.norm())


def is_partitioned(module: nn.Module) -> bool:
    """Does DeepSpeed's ZeRO-3 hold its weights in parts? It marks its parameters."""
    return any(hasattr(parameter, "ds_id") for parameter in module.parameters())


def inside(module: Any) -> Any:
    """The module in a wrapper of FSDP1, else the module."""
    return module.module if type(module).__name__ == "FullyShardedDataParallel" else module  # importing it takes 1 s


def refuse_sharded(head: Any, wrapped: bool = False) -> None:
    """Raise TypeError for a head whose weight cannot be gathered. ``wrapped``: the caller has FSDP1's wrapper."""
    kind = type(head)
    if wrapped or is_partitioned(head):  # in a forward, a look at head.weight would gather it for the whole model
        if kind is not nn.Linear:
            raise TypeError(
                f"the head is a {kind.__module__}.{kind.__qualname__} whose weight is partitioned over ranks (ZeRO-3, "
                "FSDP1); expected a torch.nn.Linear there, without adapters"
            )
        _refuse_replaced_forward(head)
        return
    weight: Any = head.weight if kind is nn.Linear else None
    is_plain = type(weight) in (Tensor, nn.Parameter)
    if is_plain and (weight.dim() != 2 or weight.untyped_storage().size() == 0):
        raise TypeError("the head's weight is in FSDP1's flat parameter: pass the model's FullyShardedDataParallel")


def in_call_of(module: Any, head: Any, function: Callable[[Tensor], Any], hidden: Tensor) -> Any:
    """``function(hidden)`` as the head's forward. ``module`` is the head, or a wrapper of it, and is called.

    Hooks of ZeRO-3 and FSDP1 gather the weight, in the backward too, for what the call of a module returns.
    """

    def forward(hidden: Tensor) -> Any:
        del head.forward
        return function(hidden)

    refuse_sharded(head, wrapped=module is not head)
    head.forward = forward
    try:
        return module(hidden)
    finally:  # a hook that runs before the forward may raise
        vars(head).pop("forward", None)


def autocast_dtype(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def autocast(device: str, dtype: torch.dtype | None) -> Any:
    """A context in which ``autocast_dtype(device)`` is ``dtype``."""
    is_on = dtype == autocast_dtype(device)
    return contextlib.nullcontext() if is_on else torch.autocast(device, dtype, enabled=dtype is not None)


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Gather each module's partitioned parameters while it runs, before DeepSpeed's engine has hooks that do so."""
    handles: list[Any] = []
    contexts: dict[nn.Module, Any] = {}

    def gather(module: nn.Module, args: Any) -> None:
        contexts[module] = deepspeed.zero.GatheredParameters(list(module.parameters(recurse=False)))
        contexts[module].__enter__()

    def release(module: nn.Module, args: Any, output: Any) -> None:
        contexts.pop(module).__exit__(None, None, None)

    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    if is_partitioned(model) and not any(_module_of(hook).startswith("deepspeed.") for hook in hooks):
        import deepspeed

        for module in model.modules():
            handles.append(module.register_forward_pre_hook(gather, prepend=True))
            handles.append(module.register_forward_hook(release, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _module_of(hook: Any) -> str:
    return getattr(hook, "__module__", None) or ""


def adapters(head: Any) -> list[str]:
    """The names of the active LoRA adapters."""
    return _active_adapters(head) if _of_peft(head, "lora.layer.Linear") else []


def hooks_after(head: nn.Module, before: int, behind: int) -> str | None:
    """The name of a hook registered on the head after our two hooks. That hook would get an empty input.

    Those of ``_HARMLESS`` modules do not count.
    """
    for hooks, ours in ((head._forward_pre_hooks, before), (head._forward_hooks, behind)):
        for number, hook in hooks.items():
            if number > ours and not _module_of(hook).startswith(_HARMLESS):
                return repr_for_message(hook)
    return None


def _active_adapters(head: Any) -> list[str]:
    if head.disable_adapters or head.merged:
        return []
    return [name for name in head.active_adapters if name in head.lora_A]


def _active_copy(head: Any) -> Any:
    """The copy of a head that peft trains as a whole (modules_to_save), or the head itself."""
    if head.disable_adapters or not head.active_adapters:
        return head.original_module
    return head.modules_to_save[head.active_adapters[0]]


def _of_peft(head: Any, name: str) -> bool:
    kind = type(head)  # by name, because peft may not be installed
    return kind.__module__.startswith("peft.") and f"{kind.__module__}.{kind.__qualname__}".endswith(f".{name}")


def _check_linear(head: Any, upcast: bool = False) -> None:
    kind = f"{type(head).__module__}.{type(head).__qualname__}"
    # FSDP2's subclass of nn.Linear keeps this forward.
    if getattr(type(head), "forward", None) is not nn.Linear.forward and not upcast:
        raise TypeError(
            f"the head is a {kind}; expected torch.nn.Linear, plain or with peft's LoRA on it, or a subclass that "
            f"multiplies 16-bit operands in float32{_OF_PEFT if kind.startswith('peft.') else ''}"
        )
    _refuse_replaced_forward(head)
    weight = head.weight
    if type(weight) not in (Tensor, nn.Parameter, transforms.FakeTensor) or weight.dtype not in FLOATS:
        raise TypeError(
            f"the head's weight is a {type(weight).__name__} of {weight.dtype}; expected a plain tensor of one of "
            f"{', '.join(map(str, FLOATS))}: heads that are quantised, or split over ranks, cannot be taken"
        )


def _refuse_replaced_forward(head: Any) -> None:
    if "forward" in vars(head):
        raise TypeError(
            "the forward of the head is replaced (accelerate does so where a model is dispatched over devices): its "
            "weight may be elsewhere"
        )
