"""Where operators meet the dispatcher: definition, kernels by device, lowerings for Inductor.

An operator family calls, in this order, ``define`` -> ``fake`` -> ``kernels`` -> ``autograd`` (-> ``LOWERINGS``).
Everything here needs torch alone; Triton is imported when a tensor first arrives on its device.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..kernels import cpu
from .schemas import SCHEMAS

try:
    LIBRARY = torch.library.Library("xent", "DEF")
except RuntimeError as error:
    raise ImportError(
        "xent_ops cannot be imported: this process has operators of the namespace xent already, as it does once it has "
        f"loaded libxent_ops.so. Import xent_ops first; to load the library afterwards does no harm. ({error})"
    ) from None

# Plain-torch decompositions that Inductor gets in place of an operator (inductor/decomposition.py).
LOWERINGS: dict[Any, Callable[..., Any]] = {}

# needs_fixed_stride_order: our kernels take any row stride but want the classes dense, so Inductor may pad
# the rows of a matrix product (odd vocabularies) but not transpose it.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)

# The dispatcher's kernels by device and operator, for those who may skip the dispatcher: ops/eager.py, and the code
# that Inductor makes (inductor/calls.py), which finds them beside the operators. The tests put CUDA's in the CPU's
# place, to run them through Triton's interpreter.
KERNELS: dict[str, dict[str, Callable[..., Any]]] = {"cpu": {}, "cuda": {}}
torch.ops.xent.kernels = KERNELS  # type: ignore[attr-defined]

# Where eager training has a path of its own (kernels/triton/prepared.py, launch_mean.py, launch_shard.py).
PREPARED_DEVICES = {"cuda"}

# Devices that plain torch serves; any other gets the dispatcher's error, which names operator and device.
_REFERENCE_DEVICES = ("MPS", "XPU")


def define(name: str) -> Any:
    """Define ``xent::name`` from its schema and return the overload."""
    LIBRARY.define(name + SCHEMAS[name], tags=_TAGS)
    return getattr(torch.ops.xent, name).default


def fake(name: str, function: Callable[..., Any]) -> None:
    """Shapes and dtypes of the outputs, for tracing; serves the meta device too."""

    def traced(*args: Any, **kwargs: Any) -> Any:
        install_lowerings()
        tag_caches()
        return function(*args, **kwargs)

    torch.library.register_fake(f"xent::{name}", traced, lib=LIBRARY)


def kernels(
    name: str,
    check: Callable[..., Any],
    reference: Callable[..., Any],
    check_values: Callable[..., Any] | None = None,
    module: str = "launch",
    ascend: bool = False,
) -> None:
    """Register the C++ kernel, or else ``reference`` (plain torch), for the CPU, ``<module>.<name>`` (Triton) for CUDA
    and ROCm.

    On Ascend NPUs the operators with ``ascend`` run their Triton kernels of that name, the others ``reference``.
    ``check`` sees the same arguments first and raises on what no kernel can take; ``check_values`` likewise, on the
    CPU alone, where reading values does not synchronise. The C++ kernel does the latter itself.
    """

    def on_reference(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return reference(*args, **kwargs)

    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        kernel = cpu.kernel(name)
        if kernel is not None:
            return kernel(*args, **kwargs)
        if check_values is not None:
            check_values(*args, **kwargs)
        return reference(*args, **kwargs)

    kept = Kept()

    def on_cuda(*args: Any, **kwargs: Any) -> Any:
        facts = facts_of_call(args, kwargs)
        run = kept.get(facts)
        if run is None:
            check(*args, **kwargs)
            launcher = getattr(_triton_launchers(module), name)
            # One that is not in two steps looks at its tensors at every call: the check alone is spared.
            run = launcher.prepare(*args, **kwargs) if hasattr(launcher, "prepare") else launcher
            if not any(isinstance(value, Tensor) for value in kwargs.values()):  # no number, as an option should be
                kept.keep(facts, run)
        return run(*args, **kwargs)

    def on_npu(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        if any(isinstance(arg, Tensor) and arg.dtype == torch.float64 for arg in args):
            return reference(*args, **kwargs)  # the vector cores have no float64
        return getattr(_ascend_launchers(), name)(*args, **kwargs)

    LIBRARY.impl(name, on_cpu, "CPU")
    for key in _REFERENCE_DEVICES:
        LIBRARY.impl(name, on_reference, key)
    LIBRARY.impl(name, on_cuda, "CUDA")
    KERNELS["cpu"][name], KERNELS["cuda"][name] = on_cpu, on_cuda
    # By key, not by the name "npu": that works without torch_npu, before it is imported and after.
    LIBRARY.impl(name, on_npu if ascend else on_reference, "PrivateUse1")


def facts_of_call(args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """All that an operator's checks and launches depend on, but for the numbers in its tensors.

    Options that are equal are one: no kernel tells 1 from 1.0.
    """
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *[
            (arg.shape, arg.stride(), arg.dtype, arg.device, arg.requires_grad, arg.is_inference())
            if isinstance(arg, Tensor)
            else arg
            for arg in (*args, *options.values())
        ],
        *options,
    )


class Kept(dict[tuple[Any, ...], Callable[..., Any]]):
    """What serves calls of an operator, by ``facts_of_call``; of many kinds the latest."""

    MOST, SEEN = 1024, 4096

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()
        self.lock = threading.Lock()

    def keep(self, facts: tuple[Any, ...], run: Callable[..., Any]) -> None:
        """From the second time on: numbers of rows that never come again would leave work to the garbage collector."""
        key = hash(facts)
        with self.lock:
            if key in self.seen:
                if len(self) >= self.MOST:
                    del self[next(iter(self))]
                self[facts] = run
            else:
                if len(self.seen) >= self.SEEN:
                    self.seen.clear()
                self.seen.add(key)


def prepared_launcher(target: Tensor, module: str = "prepared") -> Any:
    """The module that serves eager losses of such targets, where there is one, else None."""
    if target.device.type in PREPARED_DEVICES and target.numel() > 0:
        return _triton_launchers(module)
    return None


def autograd(name: str, backward: Callable[..., Any], setup_context: Callable[..., Any]) -> None:
    torch.library.register_autograd(f"xent::{name}", backward, setup_context=setup_context, lib=LIBRARY)


def save_nothing(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    """The ``setup_context`` of a formula that does nothing but say why there is none."""


def tag_caches() -> None:
    """At every trace, because the tag set on import is not there in another thread, or after the user set one."""
    from ..inductor import cache_tag

    cache_tag.install()


@functools.cache
def install_lowerings() -> None:
    """Hand LOWERINGS to Inductor, at the first trace: importing its tables costs over a second."""
    from ..inductor import decomposition

    decomposition.install()


_launchers: dict[str, Any] = {}


def _triton_launchers(module: str) -> Any:
    if module not in _launchers:
        try:
            import triton  # noqa: F401
        except ImportError as error:
            raise ImportError(
                "xent_ops runs on CUDA and ROCm tensors through Triton, which could not be imported: install the "
                "triton that belongs to this build of torch"
            ) from error
        _warn_of_interpreter()
        _launchers[module] = importlib.import_module(f"xent_ops.kernels.triton.{module}")
    return _launchers[module]


@functools.cache
def _ascend_launchers() -> Any:
    try:
        from triton.backends import backends
    except ImportError as error:
        raise ImportError(
            f"xent_ops runs on Ascend NPUs through triton-ascend, and no triton could be imported: {_INSTALL_ASCEND}"
        ) from error
    if "ascend" not in backends and not interpreter_is_set():
        raise ImportError(
            "xent_ops runs on Ascend NPUs through triton-ascend, and the triton that is installed has no ascend "
            f"backend (it has: {', '.join(sorted(backends)) or 'none'}): {_INSTALL_ASCEND}"
        )
    _warn_of_interpreter()
    return importlib.import_module("xent_ops.kernels.ascend.launch")


_INSTALL_ASCEND = (
    "run `pip uninstall triton` and `pip install triton-ascend`, which owns the same import name, beside the torch_npu "
    "that belongs to this torch (docs/npu.md)"
)


def interpreter_is_set() -> bool:
    """Will Triton run its kernels in an interpreter? It reads the variable when it is imported, by this rule."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def _warn_of_interpreter() -> None:
    if interpreter_is_set():
        warnings.warn(
            "TRITON_INTERPRET is set: every Triton kernel of this process, those of xent_ops among them, runs in "
            "an interpreter, a thousand times slower than compiled. Unset it unless you are debugging a kernel.",
            stacklevel=3,
        )
