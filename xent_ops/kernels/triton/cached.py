"""A launch that is prepared once: later calls pass little more than pointers.

``kernel[grid](...)`` binds and specialises 20 to 30 arguments in Python. That takes 13 to 16 us; launching the compiled
kernel takes 2 us (one core of a Xeon, triton 3.7, 2026-11-21). Triton compiles a kernel again for another dtype, for a
pointer on or off a 16-byte boundary, for integers that are 1, multiples of 16 or beyond 32 bits, and for other
constants. A ``Launch`` serves one call signature (ops/launch_cache.py): the numbers are fixed. Dtypes and alignments
are fixed too, because every tensor is an argument of the operator, starts where one starts, or was just allocated.
"""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor
from triton.runtime import driver

from .recording import RECORDING, record

# The versions of Triton that the tests of launches have passed with (tests/operators/test_launches.py). Other versions
# launch every kernel themselves. The test fails if a version that is missing here would pass.
VERSIONS = ((3, 6), (3, 7), (3, 8), (3, 9))
_KNOWN = tuple(int(part) for part in triton.__version__.split(".")[:2]) in VERSIONS
_RUNTIME: Any = triton.knobs.runtime if hasattr(triton, "knobs") else None

_data_ptr = Tensor.data_ptr


class Launch:
    """A kernel, its number of programs, its numbers and its constants.

    Call it with the tensors, on the current device. The kernel takes the tensors, then ``numbers``, then ``constants``:
    its constexprs by name, with num_warps and num_stages, which an AOTInductor package needs.
    """

    def __init__(self, kernel: Any, grid: int, *numbers: Any, **constants: Any) -> None:
        self.kernel, self.grid, self.numbers, self.constants = kernel, grid, numbers, constants
        self._compiled: Any = None
        # A replacement of the kernel, by Triton's interpreter or a test, launches itself.
        self._direct = _KNOWN and isinstance(kernel, triton.JITFunction)
        if self._direct:
            names = [parameter.name for parameter in kernel.params if parameter.is_constexpr]
            self._fixed_args = (*numbers, *[constants[name] for name in names])

    def __call__(self, *tensors: Tensor) -> None:
        compiled = self._compiled
        if (
            compiled is None
            or self.kernel.pre_run_hooks
            or _RUNTIME.launch_enter_hook.calls  # a profiler has installed one
            or _RUNTIME.launch_exit_hook.calls
        ):
            launched = self.by_triton(*tensors)
            # HIP also specialises pointers by the size of their memory.
            if self._direct and launched is not None and launched.metadata.target.backend == "cuda":
                self._compiled = launched
            return
        # With integers as pointers, Triton's launcher does not ask the driver about each.
        stream, pointers = driver.active.get_current_stream(tensors[0].get_device()), map(_data_ptr, tensors)
        function, metadata = compiled.function, compiled.packed_metadata
        compiled.run(self.grid, 1, 1, stream, function, metadata, None, None, None, *pointers, *self._fixed_args)

    def by_triton(self, *tensors: Tensor) -> Any:
        if RECORDING.get():
            return record(self.kernel, self.grid, *tensors, *self.numbers, **self.constants)
        # Triton 3.9 warns that 3.10 will not contract a * b + c by default.
        return self.kernel[(self.grid,)](*tensors, *self.numbers, **self.constants, enable_fp_fusion=True)
