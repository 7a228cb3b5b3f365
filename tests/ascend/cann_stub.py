"""Libraries by CANN's names, with which the real torch_npu can be imported, and has one device that computes nothing.

Every function answers 0, ACL_SUCCESS. Those that torch_npu asks for a value give one. Nothing is ever launched.
"""

import re
import subprocess

LIBRARIES = ("ascendcl", "acl_op_compiler", "acl_tdt_channel", "ge_runner", "graph", "hccl")

# What torch_npu 2.13 looks up by name when the device is first asked for, beyond what its libraries link to.
LOOKED_UP = (
    "aclSetCompileopt",
    "aclrtDestroyStreamForce",
    "aclrtSetDeviceSatMode",
    "aclrtSetOpExecuteTimeOut",
)

ANSWERS = """
#include <stdint.h>
#include <stdlib.h>
int aclrtGetDeviceCount(uint32_t *count) { *count = 1; return 0; }
int aclrtGetDevice(int32_t *device) { *device = 0; return 0; }
const char *aclrtGetSocName(void) { return "Ascend910B3"; }
const char *aclGetRecentErrMsg(void) { return "a stub of CANN"; }
int aclrtGetSysParamOpt(int option, int64_t *value) { *value = 0; return 0; }
int aclrtGetMemInfo(int kind, size_t *left, size_t *total) { *left = *total = (size_t)1 << 36; return 0; }
static int a_stream;
int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flags) { *stream = &a_stream; return 0; }
int aclrtMalloc(void **memory, size_t size, int policy) {
    *memory = aligned_alloc(512, (size + 511) / 512 * 512);
    return *memory == NULL;
}
int aclrtMallocAlign32(void **memory, size_t size, int policy) { return aclrtMalloc(memory, size, policy); }
int aclrtFree(void *memory) { free(memory); return 0; }
"""


def build(folder, torch_npu):
    """Build the libraries in a folder for LD_LIBRARY_PATH, for the torch_npu of this path."""
    names = set(LOOKED_UP)
    for library in [*torch_npu.glob("_C*.so"), *torch_npu.glob("lib/*.so")]:
        listed = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True)
        names |= set(re.findall(r" U ((?:acl|Hccl|Msprof|rt[A-Z])\w+)$", listed.stdout, re.MULTILINE))
    names -= set(re.findall(r"(\w+)\(", ANSWERS))
    source = folder / "stub.c"
    source.write_text(ANSWERS + "".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted(names)))
    first, *others = (folder / f"lib{name}.so" for name in LIBRARIES)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", first, source], check=True)
    for library in others:
        library.symlink_to(first.name)
