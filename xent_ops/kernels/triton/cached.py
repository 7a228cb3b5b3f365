"""A launch that skips Triton's work on the arguments where a launch with such arguments has done it before.

``kernel[grid](...)`` binds and specialises some thirty arguments in Python: 13 to 16 us, where launching what comes of
it takes 2 (one core of a Xeon, triton 3.7, 2026-11-21). Triton compiles a kernel anew for another dtype, for a pointer
on or off a 16-byte boundary, for integers that are 1, multiples of 16 or beyond 32 bits, and for other constants. The
key here holds those, integers by value; the compiled kernel is launched as Triton's tutorials launch theirs,
``compiled[grid](*arguments)``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import triton

# Before 3.3 a compiled kernel took its arguments without the constants; beyond 3.7 nobody has looked at what Triton
# specialises on (tests/test_cached_launch.py does, for the version that is installed).
_KNOWN = (3, 3) <= tuple(int(part) for part in triton.__version__.split(".")[:2]) <= (3, 7)
_MAX_ENTRIES = 1024  # a kernel's; one for each shape and set of strides


def launch(kernel: Any, grid: int) -> Callable[..., Any]:
    """``kernel[(grid,)]``; constants and compiler options are passed by keyword, all other arguments by position."""
    if not _KNOWN or not isinstance(kernel, triton.JITFunction):  # the interpreter's, or a test's
        return kernel[(grid,)]
    return functools.partial(_cached(kernel), grid)


@functools.cache
def _cached(kernel: Any) -> Cached:
    return Cached(kernel)


class Cached:
    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[tuple[Any, ...], Any] = {}  # False: let Triton look
        parameters = [parameter for parameter in kernel.params if not parameter.is_constexpr]
        self._constants = kernel.arg_names[len(parameters) :]
        pointers = [parameter.name.endswith("_ptr") for parameter in parameters]
        self._pointers = sum(pointers)
        assert all(pointers[: self._pointers]), "pointers come first"
        integers = parameters[self._pointers :]
        # An annotated type is the argument's whatever its value, if that is not specialised on either.
        self._by_value = [p.num for p in integers if not p.do_not_specialize]
        self._by_width = [p.num for p in integers if p.do_not_specialize and not p.annotation_type]

    def key(self, args: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, ...]:
        """Two calls for which Triton would launch different binaries differ in this."""
        pointers = args[: self._pointers]
        return (
            pointers[0].get_device(),
            *[tensor.dtype for tensor in pointers],
            *[tensor.data_ptr() % 16 for tensor in pointers],
            *[args[number] for number in self._by_value],
            *[-(2**31) <= args[number] < 2**31 for number in self._by_width],
            *constants,
            *constants.values(),
        )

    def __call__(self, grid: int, *args: Any, **constants: Any) -> None:
        key = self.key(args, constants)
        compiled = self._compiled.get(key)
        if compiled and not self.kernel.pre_run_hooks:
            compiled[(grid, 1, 1)](*args, *[constants[name] for name in self._constants])
            return
        launched = self.kernel[(grid,)](*args, **constants)
        if compiled is None and launched is not None:
            if len(self._compiled) >= _MAX_ENTRIES:
                self._compiled.clear()
            # HIP specialises pointers on the size of what they point to as well.
            self._compiled[key] = launched if launched.metadata.target.backend == "cuda" else False
