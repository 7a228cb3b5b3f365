"""A launch that is prepared once: later calls pass little more than pointers.

``kernel[grid](...)`` binds and specialises 20 to 30 arguments in Python: 13 to 16 us, where to launch the compiled
kernel takes 2 (one core of a Xeon, triton 3.7, 2026-11-21). Triton compiles a kernel anew for another dtype, for a
pointer on or off a 16-byte boundary, for integers that are 1, multiples of 16 or beyond 32 bits, and for other
constants. A ``Launch`` is made for tensors of one device and fixed dtypes, and its numbers are fixed: only the
alignment of pointers can differ between two of its calls.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import triton
from torch import Tensor
from triton.runtime import driver

# Before 3.3 a compiled kernel took its arguments without the constants. Beyond 3.7 the rule of specialisation is
# untested (a test compares it with that of the installed version).
_KNOWN = (3, 3) <= tuple(int(part) for part in triton.__version__.split(".")[:2]) <= (3, 7)

_data_ptr = Tensor.data_ptr

_RUNTIME: Any = getattr(getattr(triton, "knobs", None), "runtime", None)
_HOOKS_ARE_CHAINS = hasattr(getattr(_RUNTIME, "launch_enter_hook", None), "calls")  # from 3.6 on


def _hooked() -> bool:
    """Has a profiler set hooks for launches? True if that cannot be told."""
    if not _HOOKS_ARE_CHAINS:
        return True
    return bool(_RUNTIME.launch_enter_hook.calls or _RUNTIME.launch_exit_hook.calls)


class Launch:
    """A kernel, how many programs of it, its numbers and its constants (compiler options among them).

    Called with the tensors, on the device that is current.
    """

    def __init__(self, kernel: Any, grid: int, *numbers: Any, **constants: Any) -> None:
        self.kernel, self.grid, self.numbers, self.constants = kernel, grid, numbers, constants
        self._compiled: dict[Any, Any] = {}  # by alignment; False: let Triton launch
        # What Triton's interpreter, or a test, puts in a kernel's place launches by itself.
        self._direct = _KNOWN and isinstance(kernel, triton.JITFunction)
        if self._direct:
            names = [parameter.name for parameter in kernel.params if parameter.is_constexpr]
            self._rest = (*numbers, *[constants[name] for name in names])

    def __call__(self, *tensors: Tensor) -> None:
        if not self._direct or self.kernel.pre_run_hooks:
            self.by_triton(*tensors)
            return
        pointers = (*map(_data_ptr, tensors),)
        alignment = self.alignment(pointers)
        compiled = self._compiled.get(alignment)
        if compiled:
            self._run(tensors[0].get_device(), compiled, pointers)
            return
        launched = self.by_triton(*tensors)
        if compiled is None and launched is not None:
            # HIP specialises pointers on the size of what they point to as well.
            self._compiled[alignment] = launched if launched.metadata.target.backend == "cuda" else False

    @staticmethod
    def alignment(pointers: tuple[int, ...]) -> tuple[bool, ...] | None:
        """Two calls of a Launch for which Triton would take different binaries differ in this."""
        if functools.reduce(operator.or_, pointers) % 16 == 0:
            return None  # all on a boundary
        return tuple(pointer % 16 == 0 for pointer in pointers)

    def _run(self, device: int, compiled: Any, pointers: tuple[int, ...]) -> None:
        """Pointers as integers spare Triton's launcher a question to the driver for each."""
        if _hooked():
            compiled[(self.grid, 1, 1)](*pointers, *self._rest)
        else:  # what that comes to without hooks, for which it makes a closure and a dictionary
            stream = driver.active.get_current_stream(device)
            launcher, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
            launcher(self.grid, 1, 1, stream, function, metadata, None, None, None, *pointers, *self._rest)

    def by_triton(self, *tensors: Tensor) -> Any:
        return self.kernel[(self.grid,)](*tensors, *self.numbers, **self.constants)
