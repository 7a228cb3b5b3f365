"""Run a Gluon kernel on the CPU: its own Python, with torch in the place of Gluon's language.

For what a kernel reads, writes and waits for. Arithmetic is in float64, so nothing is said of rounding. What has not been
copied to shared memory, or was masked, is NaN there; a read or write outside of its tensor raises; copies happen as
late as they may; each program is a thread, of which no more run at once than are asked for.
"""

import random
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch


class Value(torch.Tensor):
    def __iadd__(self, other):  # values are not changed, variables are
        return self + other

    def to(self, dtype, bitcast=False):
        if not bitcast:
            return super().to(dtype)
        return self.float().view(dtype) if self.is_floating_point() else self.view(torch.float32).to(dtype)


def value(x):
    return torch.as_tensor(x).as_subclass(Value)


class Pointer:
    def __init__(self, tensor, offset=0):
        self.storage = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
        self.start, self.offset = tensor.storage_offset(), offset
        self.dtype = types.SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, other):
        result = object.__new__(Pointer)
        result.__dict__ = self.__dict__ | {"offset": self.offset + other}
        return result

    def places(self, mask):
        offset, mask = torch.broadcast_tensors(value(self.offset).long() + self.start, value(mask))
        wild = mask & ((offset < 0) | (offset >= len(self.storage)))
        assert not wild.any(), "outside of the tensor"
        return torch.where(mask, offset, 0), mask


class Shared:
    def __init__(self, dtype, shape):
        self.tensor = torch.full(shape, float("nan"), dtype=dtype)

    def index(self, i):
        slot = object.__new__(Shared)
        slot.tensor = self.tensor[i]
        return slot

    def load(self, layout):
        return value(self.tensor.clone())


class Language:
    """What kernels of this project ask of ``gl`` and ``async_copy``, for one program."""

    int32, int64, float32 = torch.int32, torch.int64, torch.float64
    BlockedLayout = SliceLayout = SwizzledSharedLayout = staticmethod(lambda *args, **kwargs: None)
    static_range = range
    exp2, log2, where = torch.exp2, torch.log2, torch.where
    sum = staticmethod(lambda x, axis: x.sum(axis))
    min = staticmethod(lambda x, axis: x.amin(axis))
    max = staticmethod(lambda x, axis: torch.where(x.isnan(), float("-inf"), x).amax(axis))  # as maxnum has it
    fma = staticmethod(lambda x, y, z: x * y + z)
    cast = staticmethod(lambda x, dtype: value(x).to(dtype))
    full = staticmethod(lambda shape, x, dtype, layout: value(torch.full(shape, x, dtype=dtype)))
    allocate_shared_memory = staticmethod(lambda dtype, shape, layout: Shared(dtype, shape))
    lock = threading.Lock()

    def __init__(self, program, stop):
        self.program, self.stop, self.copies = program, stop, []

    def program_id(self, axis):
        return value(torch.tensor(self.program, dtype=torch.int32))

    def arange(self, start, end, layout):
        return value(torch.arange(start, end, dtype=torch.int32))

    def maximum(self, x, y):
        return torch.fmax(value(x), value(y))

    def minimum(self, x, y):
        return torch.minimum(value(x), value(y).to(x.dtype))

    def load(self, pointer, mask=True, other=None, eviction_policy="", volatile=False):
        time.sleep(0)  # another program's turn
        assert not self.stop.is_set(), "another program failed, or waits for ever"
        places, mask = pointer.places(mask)
        read = pointer.storage[places]
        if other is None:
            other = float("nan") if read.is_floating_point() else 0
        return value(torch.where(mask, read, other))

    def store(self, pointer, x, mask=True, eviction_policy=""):
        places, mask = pointer.places(mask)
        pointer.storage[places[mask]] = (
            value(x).to(pointer.dtype.element_ty).expand(mask.shape)[mask].as_subclass(torch.Tensor)
        )

    def atomic_add(self, pointer, x, sem):
        with self.lock:
            before = self.load(pointer)
            self.store(pointer, before + x)
        return before

    def atomic_xchg(self, pointer, x, sem):
        self.store(pointer, x)

    def copy_to_shared(self, slot, pointer, mask, eviction_policy):
        self.copies.append(lambda: slot.tensor.copy_(self.load(pointer, mask)))

    def commit_group(self):
        pass

    def wait_group(self, pending):
        while len(self.copies) > pending:
            self.copies.pop(0)()


def run(kernel, grid, arguments, at_once=8, seed=0, seconds=30):
    """All programs of a launch, started in any order; ``arguments`` by name, tensors for pointers."""
    stop = threading.Event()
    arguments = {name: Pointer(x) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}

    def program(number):
        language = Language(number, stop)
        names = dict(kernel.fn.__globals__, gl=language, async_copy=language, barrier=lambda: None)
        names["copy_to_shared"] = language.copy_to_shared
        for name, found in kernel.fn.__globals__.items():
            if isinstance(found, type(kernel)):
                names[name] = types.FunctionType(found.fn.__code__, names)
            elif type(found).__name__ == "constexpr":
                names[name] = found.value
        types.FunctionType(kernel.fn.__code__, names)(**arguments)

    numbers = list(range(grid))
    random.Random(seed).shuffle(numbers)
    with ThreadPoolExecutor(at_once) as pool:
        try:
            for done in as_completed([pool.submit(program, number) for number in numbers], timeout=seconds):
                done.result()
        finally:
            stop.set()
