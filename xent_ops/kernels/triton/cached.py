"""Launches that are prepared once: a call with like arguments hands over its pointers, and next to nothing else.

``kernel[grid](...)`` binds and specialises 20 to 30 arguments in Python: 13 to 16 us, where launching what comes of
it takes 2 (one core of a Xeon, triton 3.7, 2026-11-21). So launchers make a ``Launch`` from strides and options, and
keep it by these (``plan``). Triton compiles a kernel anew for another dtype, for a pointer on or off a 16-byte
boundary, for integers that are 1, multiples of 16 or beyond 32 bits, and for other constants; of these only the
pointers' can differ between two calls of a ``Launch``.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import triton
from torch import Tensor
from triton.runtime import driver

# Before 3.3 a compiled kernel took its arguments without the constants; beyond 3.7 nobody has looked at what Triton
# specialises on (tests/test_cached_launch.py does, for the version that is installed).
_KNOWN = (3, 3) <= tuple(int(part) for part in triton.__version__.split(".")[:2]) <= (3, 7)

_data_ptr = Tensor.data_ptr
_dtype = operator.attrgetter("dtype")

_RUNTIME: Any = getattr(getattr(triton, "knobs", None), "runtime", None)
_HOOKS_ARE_CHAINS = hasattr(getattr(_RUNTIME, "launch_enter_hook", None), "calls")  # from 3.6 on


def _hooked() -> bool:
    """Does a profiler want to hear of launches? Where that cannot be told it does."""
    if not _HOOKS_ARE_CHAINS:
        return True
    return bool(_RUNTIME.launch_enter_hook.calls or _RUNTIME.launch_exit_hook.calls)


def _off_boundary(pointers: tuple[int, ...]) -> int:
    return functools.reduce(operator.or_, pointers) % 16


def _key_on_boundary(tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
    return tensors[0].get_device(), *map(_dtype, tensors)


# Of a function from hashable facts to the launches that they ask for.
plan = functools.lru_cache(1024)


class Launch:
    """A kernel, its numbers and its constants (compiler options among them): all but grid and pointers.

    ``varying``: how many numbers come before ``numbers`` that each call brings along. Triton must not specialise on
    them: parameters with a type, named in ``do_not_specialize``.
    """

    def __init__(self, kernel: Any, *numbers: Any, varying: int = 0, **constants: Any) -> None:
        self.kernel, self.numbers, self.constants = kernel, numbers, constants
        self._compiled: dict[tuple[Any, ...], Any] = {}  # False: let Triton look
        # What Triton's interpreter, or a test, puts in a kernel's place launches by itself.
        self._cached = _KNOWN and isinstance(kernel, triton.JITFunction)
        if self._cached:
            parameters = [parameter for parameter in kernel.params if not parameter.is_constexpr]
            first = len(parameters) - len(numbers) - varying
            assert all(p.do_not_specialize and p.annotation_type for p in parameters[first : first + varying])
            self._rest = (*numbers, *[constants[name] for name in kernel.arg_names[len(parameters) :]])

    def __call__(self, grid: int, *tensors: Tensor, varying: tuple[int, ...] = ()) -> None:
        if not self._cached or self.kernel.pre_run_hooks:
            self.by_triton(grid, *tensors, varying=varying)
            return
        pointers = (*map(_data_ptr, tensors),)
        key = self.key(tensors, pointers) if _off_boundary(pointers) else _key_on_boundary(tensors)
        compiled = self._compiled.get(key)
        if compiled:
            self.run(key[0], compiled, grid, pointers, varying)
            return
        launched = self.by_triton(grid, *tensors, varying=varying)
        if compiled is None and launched is not None:
            # HIP specialises pointers on the size of what they point to as well.
            self._compiled[key] = launched if launched.metadata.target.backend == "cuda" else False

    def run(self, device: int, compiled: Any, grid: int, pointers: tuple[int, ...], varying: tuple[int, ...]) -> None:
        """What Triton compiled for such arguments. Integers spare its launcher a question to the driver for each."""
        if _hooked():
            compiled[(grid, 1, 1)](*pointers, *varying, *self._rest)
        else:  # what that comes to without hooks, for which it makes a closure and a dictionary
            stream = driver.active.get_current_stream(device)
            launcher, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
            launcher(grid, 1, 1, stream, function, metadata, None, None, None, *pointers, *varying, *self._rest)

    @staticmethod
    def key(tensors: tuple[Tensor, ...], pointers: tuple[int, ...]) -> tuple[Any, ...]:
        """Two calls for which Triton would take different binaries differ in this."""
        return tensors[0].get_device(), *map(_dtype, tensors), *[pointer % 16 == 0 for pointer in pointers]

    def by_triton(self, grid: int, *tensors: Tensor, varying: tuple[int, ...] = ()) -> Any:
        return self.kernel[(grid,)](*tensors, *varying, *self.numbers, **self.constants)


class Bound(Launch):
    """The same launch, on tensors of one device and the same dtypes at every call: it looks at their pointers alone."""

    def __init__(self, launch: Launch) -> None:
        self.__dict__.update(launch.__dict__)  # what was compiled for one is there for the other
        # Of pointers on 16-byte boundaries: what tells the stream, the device, Triton's launcher, its first arguments.
        self._fixed: tuple[Any, int, Any, tuple[Any, ...]] | None = None

    def __call__(self, grid: int, *tensors: Tensor, varying: tuple[int, ...] = ()) -> None:
        fixed = self._fixed
        if fixed is not None and not self.kernel.pre_run_hooks and not _hooked():
            pointers = (*map(_data_ptr, tensors),)
            if not _off_boundary(pointers):  # what run() does, without a call in between
                stream_of, device, launcher, first = fixed
                launcher(grid, 1, 1, stream_of(device), *first, *pointers, *varying, *self._rest)
                return
        super().__call__(grid, *tensors, varying=varying)
        key = _key_on_boundary(tensors)
        compiled = self._compiled.get(key)
        if compiled:
            first = (compiled.function, compiled.packed_metadata, None, None, None)
            self._fixed = driver.active.get_current_stream, key[0], compiled.run, first
