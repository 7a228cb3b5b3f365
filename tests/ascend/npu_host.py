"""A device "npu" on host memory, for tests: tensors, copies and views of its own, every other operator on the CPU.

Importing this builds tests/ascend/host_backend.cpp and takes PrivateUse1 for the whole process. It is an emulation of the
dispatcher's side of an NPU: no test may take it for one.
"""

import gc
import time
import types
from pathlib import Path

import torch
from torch.utils.cpp_extension import load_inline

load_inline(
    "xent_ops_host_backend",
    cpp_sources=(Path(__file__).parent / "host_backend.cpp").read_text(),
    extra_cflags=["-O0"],  # it copies a few kilobytes
    is_python_module=False,
    no_implicit_headers=True,
)

module = types.ModuleType("torch.npu")
module.is_available = lambda: True
module.device_count = lambda: 1
module.current_device = lambda: 0
module.is_initialized = lambda: True
module._is_in_bad_fork = lambda: False
module.get_rng_state = lambda *args: torch.get_rng_state()
module.set_rng_state = lambda *args: None
module.manual_seed_all = lambda seed: None
module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]

torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", module)
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def _in_use():
    """Bytes, once autograd's threads have let go of what they held."""
    gc.collect()
    before = None
    while before != (now := torch.ops.xent_host.peak()[0]):
        before = now
        time.sleep(0.05)
    return now


def peak(call, *arguments):
    """The most bytes in use during a call beyond those before it."""
    before = _in_use()
    call(*arguments)
    return torch.ops.xent_host.peak()[1] - before
