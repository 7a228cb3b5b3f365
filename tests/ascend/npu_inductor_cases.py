"""What Inductor-Ascend writes for a training step: run by test_ascend_inductor.py in a process of its own.

torch_npu is the real one, with its device, its decompositions, lowerings, scheduler and wrapper. CANN is a stub
(cann_stub.py), so is Triton's driver, and tensors are fake. Inductor gets as far as the code of both wrappers and of
the kernels that it generates. Nothing loads that code or runs it.
"""

import importlib.metadata
import re
import types

import pytest
import torch
import torch.nn.functional as F
import torch_npu
from torch._functorch import config
from torch._inductor.codegen.common import get_scheduling_for_device, get_wrapper_codegen_for_device
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import xent_ops

driver.set_active(types.SimpleNamespace(get_current_target=lambda: GPUTarget("npu", "Ascend910B3", 0)))

ops = torch.ops.xent
ROWS, CLASSES, WIDTH = 512, 4096, 64


class NotRunError(Exception):
    pass


def inputs():
    with FakeTensorMode():
        x = torch.empty(ROWS, WIDTH, device="npu", dtype=torch.bfloat16, requires_grad=True)
        head = torch.empty(CLASSES, WIDTH, device="npu", dtype=torch.bfloat16, requires_grad=True)
        return x, head, torch.empty(ROWS, device="npu", dtype=torch.int64)


def code_of(monkeypatch, step, *arguments, **options):
    """The code of (forward, backward) that Inductor-Ascend writes for a step."""
    written = {}

    def write(graph):
        written[graph.is_backward] = graph.codegen()[0].value
        return types.SimpleNamespace(call=stop, __file__="not written")

    def stop(*_):
        raise NotRunError

    monkeypatch.setattr(GraphLowering, "compile_to_module", write)
    torch.compiler.reset()
    with config.patch(force_non_lazy_backward_lowering=True), pytest.raises(NotRunError):
        torch.compile(step, fullgraph=True, **options)(*arguments)
    return written[False], written[True]


def calls(code):
    """Names and arguments of our operators, in order."""
    found = re.findall(r"torch\.ops\.xent\.(\w+)\.default\((.*)\)$", code, re.MULTILINE)
    return [(name, arguments.split(", ")) for name, arguments in found]


def body(code):
    """The lines of the wrapper's function, without comments."""
    lines = code.partition("def call(")[2].partition("runner = ")[0].splitlines()
    return [line.strip() for line in lines if not line.strip().startswith("#")]


def buffers(code, shape):
    return [line for line in body(code) if re.search(rf"= empty_strided\w*\(\({shape}\)", line)]


def check_in_place(forward, backward):
    """One backward, over the logits that the forward hands over, before any other reader; no other buffer like them."""
    logits = calls(forward)[0][1][0]
    (shape,) = re.findall(rf"^{logits} = empty_strided\w*\(\((.*?)\)", "\n".join(body(forward)), re.MULTILINE)
    assert len(buffers(forward, shape)) == 1 and not buffers(backward, shape)
    ((called, arguments),) = calls(backward)
    assert called == "cross_entropy_backward_"
    logits = arguments[2]
    named = [line for line in body(backward) if re.search(rf"[( ]{logits}[,)]", line)]
    unpacked, written, *read = named
    assert unpacked.endswith(" = args") and ".cross_entropy_backward_.default(" in written
    assert read, "nothing computes with the gradient"
    for line in read:
        assert re.match(r"extern_kernels\.mm\(|buf\d+ = torch\.ops\.aten\.matmul_backward\.default\(", line), line


def test_torch_npu_is_the_real_one(monkeypatch):
    assert isinstance(torch_npu._C, types.ModuleType) and torch_npu._C.__file__.endswith(".so")
    code_of(monkeypatch, lambda x, head, target: xent_ops.cross_entropy(x @ head.T, target), *inputs())
    for made_by in (get_scheduling_for_device("npu"), get_wrapper_codegen_for_device("npu")):
        assert made_by.__module__.startswith("torch_npu._inductor.")


OPTIONS = [{}, {"label_smoothing": 0.1, "softcap": 30.0, "lse_square_scale": 1e-4}]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
def test_the_backward_is_in_place(monkeypatch, options, dynamic):
    def step(x, head, target):
        return xent_ops.cross_entropy(x @ head.T, target, **options)

    forward, backward = code_of(monkeypatch, step, *inputs(), dynamic=dynamic)
    assert [name for name, _ in calls(forward)] == ["cross_entropy_reduced"]
    check_in_place(forward, backward)


def test_beside_generated_kernels(monkeypatch):
    def step(x, head, target):
        return xent_ops.cross_entropy(F.rms_norm(F.silu(x), (WIDTH,)) @ head.T, target)

    forward, backward = code_of(monkeypatch, step, *inputs())
    for code in (forward, backward):
        assert "async_compile.triton(" in code and "device_str='npu'" in code
    check_in_place(forward, backward)


def test_with_the_pass(monkeypatch):
    def step(x, head, target):
        return F.cross_entropy(x @ head.T, target)

    options = xent_ops.inductor.options(linear=False)
    forward, backward = code_of(monkeypatch, step, *inputs(), options=options)
    assert [name for name, _ in calls(forward)] == ["cross_entropy_reduced"]
    check_in_place(forward, backward)


def test_a_split_vocabulary(monkeypatch):
    """Another rank's numbers are an argument, in the place of the all-gather."""

    def step(x, head, target, other):
        logits = x @ head.T
        part = ops.cross_entropy_shard(logits.detach(), target, 0, 2 * CLASSES)
        return ops.cross_entropy_shard_reduced(logits, target, torch.cat([part, other]), 0, 2 * CLASSES)[0]

    x, head, target = inputs()
    with x.fake_mode:
        other = torch.empty(1, 3 * ROWS + 5, device="npu")
    forward, backward = code_of(monkeypatch, step, x, head, target, other)
    assert [name for name, _ in calls(forward)] == ["cross_entropy_shard", "cross_entropy_shard_reduced"]
    check_in_place(forward, backward)


def test_logits_that_live_on_are_left_alone(monkeypatch):
    def step(x, head, target):
        logits = x @ head.T
        return xent_ops.cross_entropy(logits, target), logits.detach()

    _, backward = code_of(monkeypatch, step, *inputs())
    ((name, _),) = calls(backward)
    assert name == "cross_entropy_backward"


def test_a_generated_kernel_cannot_be_imported_with_triton_ascend_3_2_0(monkeypatch):
    """As docs/npu.md says."""
    assert importlib.metadata.version("triton-ascend") == "3.2.0"

    def step(x, head, target):
        return xent_ops.cross_entropy(F.silu(x) @ head.T, target)

    forward, _ = code_of(monkeypatch, step, *inputs())
    (kernel,) = re.findall(r"async_compile\.triton\('\w+', '''\n(.*?)'''", forward, re.DOTALL)
    with pytest.raises(
        ImportError, match=r"cannot import name 'extension'|No module named 'triton\.language\.extra\.cann'"
    ):
        exec(kernel, {})
