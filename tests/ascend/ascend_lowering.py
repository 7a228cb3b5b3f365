"""Kernels as triton-ascend lowers them, without CANN and without a device: their linalg IR, checked, and run on x86.

Needs an environment with triton-ascend (`make test-ascend`); to run the IR also Debian's mlir-19-tools and clang-19.
"""

import collections
import ctypes
import functools
import hashlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from triton._C.libtriton import ir
from triton.backends.ascend.compiler import make_ttir, ttir_to_linalg
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

TARGET = GPUTarget("npu", "Ascend910B3", 0)
TOOLS = ("mlir-opt-19", "mlir-translate-19", "clang-19")
TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
}


def missing_tools():
    return [tool for tool in TOOLS if shutil.which(tool) is None]


def specialise(kernel, args, kwargs):
    """(signature, constants) of a launch, as Triton 3.2 makes them: a 1 is a constant unless the kernel says no."""
    signature, constants = {}, {}
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    for parameter in kernel.params:
        value = values[parameter.name]
        if parameter.is_constexpr or (type(value) is int and value == 1 and not parameter.do_not_specialize):
            constants[parameter.name] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + TYPES[value.dtype]
        elif isinstance(value, int):
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
        else:
            signature[parameter.name] = "fp32"
    return signature, constants


_lowered = {}


def lower(kernel, signature, constants):
    """The linalg that triton-ascend would hand to bishengir."""
    key = (kernel, *sorted(signature.items()), *sorted(constants.items()))
    if key not in _lowered:
        backend = make_backend(TARGET)
        options = backend.parse_options({})
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        source = ASTSource(kernel, signature, constants)
        module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
        metadata = {"target": TARGET, **vars(options)}
        try:
            module = make_ttir(module, metadata, options)
            _lowered[key] = ttir_to_linalg(module, metadata, options, named_ops=True)
        except subprocess.CalledProcessError as error:
            raise AssertionError(f"{kernel.__name__} does not lower: {error.stderr.decode()[:3000]}") from error
    return _lowered[key]


def vector_integer_compares(text):
    """Comparisons that the vector cores would do element by element on the scalar unit."""
    return [line.strip() for line in text.splitlines() if re.search(r"arith\.cmpi .*(?:tensor|vector)<\d", line)]


# --- how much of the unified buffer is alive at once ---------------------------------------------------------------

_BITS = {"bf16": 16, "f16": 16, "f32": 32, "i64": 64, "i32": 32, "i16": 16, "i8": 8, "i1": 1}
_SHAPED = re.compile(r"(?:tensor|memref)<((?:\d+x)*)(bf16|f16|f32|i64|i32|i16|i8|i1)[,>]")
_VIEWS = ("tensor.empty", "memref.reinterpret_cast", "memref.subview", "memref.load")  # no memory of their own


def _size(line):
    """Bytes of the last shaped type of a line, which is that of its result."""
    found = _SHAPED.findall(line)
    if not found:
        return 0
    dimensions, element = found[-1]
    if "arith.cmp" in line:
        element = "i1"
    elements = functools.reduce(lambda a, b: a * int(b), dimensions.split("x")[:-1], 1)
    return elements * _BITS[element] // 8


class _Value:
    def __init__(self, text, size, position, loops):
        self.text, self.size, self.loops = text, size, loops
        self.first = self.last = position
        self.double = False

    def double_buffer(self):
        if self.loops and not self.double:
            self.double, self.size = True, 2 * self.size
            self.first, self.last = self.loops[-1]


def live_bytes(text):
    """(most bytes of tiles alive at one operation, what they are).

    Nothing is shared: an operation's operands and its result count apart, and a scalar that is spread over a vector
    counts as a vector. What is copied in or out within a loop is a double buffer, alive throughout the innermost loop.
    """
    lines = text.splitlines()
    ends, opened = {}, []
    for position, line in enumerate(lines):
        bare = re.sub(r"\{[^{}]*\}", "", line)
        for brace in re.findall(r"[{}]", bare):
            if brace == "{":
                opened.append(position)
            else:
                ends[opened.pop()] = position
    values, scopes, loops = [], [{}], []  # scopes: names of regions, inner last; loops: (begin, end) around a line
    for position, line in enumerate(lines):
        bare = re.sub(r"\{[^{}]*\}", "", line).strip()
        while loops and loops[-1][1] < position:
            loops.pop()
        if bare.startswith("}"):
            scopes.pop()
        definition = re.match(r"(%\w+)(?::\d+)? = (.*)", bare)
        for name in re.findall(r"%\w+", definition.group(2) if definition else bare):
            value = next((scope[name] for scope in reversed(scopes) if name in scope), None)
            if value is not None:
                outside = [loop for loop in loops if loop not in value.loops]
                value.last = max(value.last, outside[0][1] if outside else position)  # alive in every round
                if "materialize_in_destination" in bare:
                    value.double_buffer()
        if definition:
            name, operation = definition.groups()
            source = re.match(r"bufferization\.to_tensor (%\w+)", operation)
            if source:
                scopes[-1][name] = next(
                    scope[source.group(1)] for scope in reversed(scopes) if source.group(1) in scope
                )
            else:
                assert not (operation.startswith("scf.") and _size(operation)), f"a tile leaves a region: {line}"
                size = 0 if operation.startswith(_VIEWS) or operation.startswith("tensor.extract") else _size(operation)
                value = scopes[-1][name] = _Value(operation[:100], size, position, list(loops))
                if operation.startswith("memref.alloc"):
                    value.double_buffer()
                values.append(value)
        if bare.endswith("{"):
            scopes.append({})
            if "scf.for" in bare:
                loops.append((position, ends[position]))
    best, alive = 0, []
    for position in range(len(lines)):
        now = [value for value in values if value.size and value.first <= position <= value.last]
        if sum(value.size for value in now) > best:
            best, alive = sum(value.size for value in now), now
    return best, [f"{value.size:7} {'double ' * value.double}{value.text}" for value in alive]


def loop_operations(text, block):
    """What each innermost loop does to a whole tile: a list of operations, in order, for each loop that does anything.

    A scalar spread over a tile (linalg.fill) is no operation of its own: the vector unit takes scalar operands.
    """
    found, regions = [], []  # of each open region: the operations of the innermost loop around it
    for line in text.splitlines():
        bare = re.sub(r"\{[^{}]*\}", "", line).strip()
        if bare.startswith("}"):
            done = regions.pop()
            if regions and done is not regions[-1]:  # a loop ends
                found += [done] if done else []
                regions = [None if region is regions[-1] else region for region in regions]  # it was in another one
        operation = re.search(r"= ((?:arith|math)\.\w+|linalg\.(?:reduce|generic|map)) ", bare)
        if operation and f"tensor<{block}x" in bare and regions[-1] is not None:
            regions[-1].append(operation.group(1))
        if bare.endswith("{"):
            regions.append([] if "scf.for" in bare else regions[-1] if regions else None)
    return found


# --- the IR on x86 ----------------------------------------------------------------------------------------------------

PASSES = [
    "--convert-elementwise-to-linalg",
    "--eliminate-empty-tensors",
    "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true",
    "--convert-linalg-to-loops",
    "--lower-affine",
    "--arith-expand=include-bf16=true",
    "--expand-strided-metadata",
    "--lower-affine",
    "--convert-scf-to-cf",
    "--convert-cf-to-llvm",
    "--convert-math-to-llvm",
    "--convert-math-to-libm",
    "--convert-arith-to-llvm",
    "--finalize-memref-to-llvm",
    "--convert-func-to-llvm",
    "--convert-arith-to-llvm",
    "--convert-index-to-llvm",
    "--reconcile-unrealized-casts",
]

# MLIR's runtime function for copies between strided buffers, for the one dimension that tiles have.
COPY = """
#include <stdint.h>
#include <string.h>
typedef struct { char *allocated, *aligned; int64_t offset, size, stride; } Tile;
typedef struct { int64_t rank; Tile *tile; } Unranked;
void memrefCopy(int64_t width, Unranked *from, Unranked *to) {
    if (from->rank != 1) __builtin_trap();
    for (int64_t i = 0; i < from->tile->size; i++)
        memcpy(to->tile->aligned + width * (to->tile->offset + i * to->tile->stride),
               from->tile->aligned + width * (from->tile->offset + i * from->tile->stride), width);
}
"""


class _MemRef(ctypes.Structure):
    """A 1-D memref, as MLIR's C interface passes it."""

    _fields_ = [(name, ctypes.c_int64) for name in ("allocated", "aligned", "offset", "size", "stride")]

    @classmethod
    def of(cls, address):
        return cls(address, address, 0, 0, 1)  # of unknown size: the kernels compute addresses


def _tool(*command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, f"{command[0]} failed: {done.stderr[:3000]}"


@functools.cache
def _folder():
    folder = tempfile.TemporaryDirectory()
    (Path(folder.name) / "copy.c").write_text(COPY)
    _tool("clang-19", "-O2", "-fPIC", "-c", f"{folder.name}/copy.c", "-o", f"{folder.name}/copy.o")
    return folder


@functools.cache
def build(text):
    """A shared library's function that runs one program."""
    name = re.search(r"func\.func @(\w+)", text).group(1)
    # Attributes for bishengir: none says anything about the arithmetic. Here everything happens in its order.
    text = re.sub(r" \{(?:tt|hivm)\.[^}]*\}", "", text).replace("gpu.barrier\n", "\n")
    text, count = re.subn(r"attributes \{SyncBlockLockArgIdx[^}]*\}", "attributes {llvm.emit_c_interface}", text)
    assert count == 1
    base = Path(_folder().name) / hashlib.sha256(text.encode()).hexdigest()[:16]
    base.with_suffix(".mlir").write_text(text)
    _tool("mlir-opt-19", base.with_suffix(".mlir"), *PASSES, "-o", base.with_suffix(".llvm"))
    _tool("mlir-translate-19", "--mlir-to-llvmir", base.with_suffix(".llvm"), "-o", base.with_suffix(".ll"))
    flags = ("-O1", "-shared", "-fPIC", "-Wno-override-module")
    _tool("clang-19", *flags, base.with_suffix(".ll"), base.parent / "copy.o", "-o", base.with_suffix(".so"), "-lm")
    return getattr(ctypes.CDLL(str(base.with_suffix(".so"))), f"_mlir_ciface_{name}")


Launch = collections.namedtuple("Launch", "kernel grid args kwargs")


class Kernel:
    """Takes a kernel's place in a launcher's module: records what is launched, and runs it on x86 if it shall."""

    def __init__(self, kernel, launches, run):
        self.kernel, self.launches, self.run = kernel, launches, run

    def __getitem__(self, grid):
        return functools.partial(self._launch, grid)

    def _launch(self, grid, *args, **kwargs):
        self.launches.append(Launch(self.kernel, grid, args, kwargs))
        if self.run:
            execute(self.launches[-1])


def execute(launch):
    signature, constants = specialise(launch.kernel, launch.args, launch.kwargs)
    function = build(lower(launch.kernel, signature, constants))
    values = dict(zip(launch.kernel.arg_names, launch.args, strict=False))
    arguments = [ctypes.byref(_MemRef.of(0))] * 2  # a lock and a workspace, which a vector kernel has no use for
    for name, kind in signature.items():
        if kind.startswith("*"):
            arguments.append(ctypes.byref(_MemRef.of(values[name].data_ptr())))
        elif kind == "fp32":
            arguments.append(ctypes.c_float(values[name]))
        else:
            arguments.append((ctypes.c_int32 if kind == "i32" else ctypes.c_int64)(values[name]))
    for program in range(launch.grid[0]):
        function(*arguments, *(ctypes.c_int32(i) for i in (launch.grid[0], 1, 1, program, 0, 0)))
