"""Launches that are recorded instead of run, and compiled for GPUs that this machine need not have. Needs triton."""

import re
import subprocess
from pathlib import Path

import torch
import triton
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from xent_ops.kernels.triton import cached
from xent_ops.kernels.triton.launch import LAUNCHERS
from xent_ops.ops.library import OPERATORS

TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
    torch.int64: "i64",
    torch.int32: "i32",
}
OPTIONS = ("num_warps", "num_stages")


def launch(name, args, options):
    """Both stages of an operator's launcher."""
    return LAUNCHERS[name](*args, **OPERATORS[name].keywords(options))(*args)


def recorded(monkeypatch, run):
    """(launch, arguments) of each launch of a call; nothing is launched."""
    found = []
    with monkeypatch.context() as patch:
        note = lambda self, *tensors: found.append((self, (*tensors, *self.numbers)))  # noqa: E731
        patch.setattr(cached.Launch, "__call__", note)
        run()
    return found


def _specialise(kernel, args, kwargs):
    """(signature, constants, attributes) of a launch, as Triton makes them."""
    signature, constants, attributes = {}, {}, {}
    values = dict(zip(kernel.arg_names, args, strict=False)) | {k: v for k, v in kwargs.items() if k not in OPTIONS}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1 and not parameter.do_not_specialize):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif isinstance(value, TensorDescriptor):
            signature[parameter.name] = f"tensordesc<{TYPES[value.base.dtype]}{value.block_shape}>"
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = parameter.annotation_type or ("i32" if isinstance(value, int) else "fp32")
            aligned = isinstance(value, int) and value % 16 == 0
            if aligned and not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment):
                attributes[(index,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def constants_of(kernel, args, kwargs) -> set:
    """(kernel, name, value) of each constant, of each flag by itself, and of each argument's type."""
    signature, constants, _ = _specialise(kernel, args, kwargs)
    values = {**signature, **constants, **{name: kwargs.get(name) for name in OPTIONS}}
    for name in [name for name, value in values.items() if hasattr(value, "_asdict")]:
        values |= values.pop(name)._asdict()
    return {(kernel, name, str(value)) for name, value in values.items()}


def specialised(kernel, args, kwargs) -> tuple:
    """Equal for launches of one compiled kernel."""
    return kernel, str(_specialise(kernel, args, kwargs)), str([kwargs.get(name) for name in OPTIONS])


def compile_call(kernel, args, kwargs, target):
    """Compile a kernel for what it would be launched with."""
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, *_specialise(kernel, args, kwargs))
    return triton.compile(source, target=target, options={k: kwargs[k] for k in OPTIONS if k in kwargs})


def spills(compiled, target, folder: Path) -> int:
    """Bytes of registers that were put into memory."""
    if target.backend == "hip":  # scalar registers spill into lanes of vector registers, which costs no memory
        found = re.findall(r"\.(?:vgpr_spill_count|private_segment_fixed_size):\s*(\d+)", compiled.asm["amdgcn"])
        assert found, "no metadata"
        return sum(map(int, found))
    binary = folder / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    report = subprocess.run([tool, "--dump-resource-usage", binary], capture_output=True, text=True, check=True).stdout
    usage = [(int(stack), int(local)) for stack, local in re.findall(r"STACK:(\d+).*?LOCAL:(\d+)", report)]
    assert usage, f"no resource usage in: {report}"
    return sum(stack + local for stack, local in usage)
