"""The Ascend kernels by dispatch, in Triton's interpreter: run by test_npu.py in a process of its own.

The device is host memory (npu_host.py). The unified buffer is made small, so that short rows have several tiles.
"""

import os
import re
import sys
import types
from pathlib import Path

os.environ["XENT_OPS_ASCEND_UB_BYTES"] = str(24 * 1024)

import npu_host  # noqa: F401 (makes the device)
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from helpers.dispatch_log import Log
from helpers.graphs import AotEagerAndRecordGraphs, graph_text, operator_names
from npu_cases import OPTIONS, check_join, check_shards, check_soft, check_values, inputs, kernels, names, why_no_device
from torch.library import opcheck
from triton.runtime import interpreter

import xent_ops
from xent_ops import testing
from xent_ops.kernels import devices

with pytest.warns(UserWarning, match="TRITON_INTERPRET is set"):
    launch = types.SimpleNamespace(**devices.ascend_launchers())
from xent_ops.kernels.ascend import configs
from xent_ops.kernels.options import RowOptions

ops = torch.ops.xent
PINNED = torch.__version__.startswith("2.13")  # the version whose graphs are pinned


@pytest.fixture
def launches(monkeypatch):
    """The names of the kernels that run."""
    found = []

    class Spy:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            assert 0 < grid[0] <= configs.MAX_PROGRAMS and len(grid) == 1
            found.append(self.kernel.fn.__name__)
            return self.kernel[grid]

    for module, name in kernels():
        monkeypatch.setattr(module, name, Spy(getattr(module, name)))
    return found


# float32 with all options, bfloat16 with none and with many: what the kernels do with them is written once.
PLAIN, FULL = OPTIONS[0], OPTIONS[-1]
CASES = [*((torch.float32, options) for options in OPTIONS), (torch.bfloat16, PLAIN), (torch.bfloat16, FULL)]


def _id(value):
    return names(value) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(
    "classes, dtype, options",
    [(1003 if dtype == torch.float32 else 500, dtype, options) for dtype, options in CASES]
    + [(9, torch.bfloat16, options) for options in OPTIONS],
    ids=_id,
)
def test_values_and_gradients(launches, classes, dtype, options):
    check_values(classes, dtype, options)
    assert launches == ["forward_kernel", "backward_kernel"] * 2


def test_the_loss_that_users_call(launches):
    logits, target = inputs(300, torch.float32)
    for options in ({}, {"reduction": "none"}, {"reduction": "sum", "lse_square_scale": 1e-3}):
        results = []
        for device in ("npu", "cpu"):
            x = logits.clone().to(device).requires_grad_()
            loss = xent_ops.cross_entropy(x, target.to(device), **options)
            loss.sum().backward()
            results.append((loss.detach().cpu(), x.grad.cpu()))
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(
        xent_ops.cross_entropy(logits.to("npu"), target.to("npu")).cpu(), F.cross_entropy(logits, target)
    )
    assert set(launches) == {"forward_kernel", "backward_kernel"}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8], ids=str)
def test_bad_and_ignored_targets(dtype):
    """No IndexError, which would have to read the values: NaN. Rows that pass nothing back are not read."""
    logits, _ = inputs(200, torch.float32, rows=4)
    logits[0] = float("nan")
    target = torch.tensor([7, 1, 250, 0], dtype=torch.int64).to(dtype).to("npu")
    x = logits.to("npu").requires_grad_()
    loss = xent_ops.cross_entropy(x, target, ignore_index=7, reduction="none")
    loss.sum().backward()
    assert loss[0].cpu() == 0 and loss[2].isnan().cpu() and loss[[1, 3]].isfinite().all().cpu()
    assert (x.grad[0] == 0).all().cpu() and x.grad[2].isnan().all().cpu() and x.grad[3].isfinite().all().cpu()


def test_rows_of_any_stride():
    whole = testing.realistic_logits(3, 6, 150, dtype=torch.bfloat16).to("npu")
    target = torch.arange(15, device="npu").view(3, 5)
    for logits in (whole[:, :-1], whole[:, :-1, ::2], whole.transpose(0, 1)[:5].transpose(0, 1), whole[:, :5, 1:]):
        x = logits.detach().requires_grad_()
        loss = xent_ops.cross_entropy(x, target, reduction="none", dim=-1)
        (grad,) = torch.autograd.grad(loss.sum(), x)
        expected = testing.oracle(logits.cpu(), target.cpu())
        testing.assert_loss(loss, expected)
        testing.assert_grad(grad, expected)
    assert xent_ops.cross_entropy(whole[:0], target.new_empty(0, 6), reduction="none", dim=-1).shape == (0, 6)


def test_in_place_backward():
    hidden = testing.realistic_logits(5, 600, dtype=torch.float32).to("npu").requires_grad_()
    logits = hidden * 1.0
    target = torch.arange(5, device="npu")
    version = logits._version
    xent_ops.cross_entropy(logits, target, inplace_backward=True).backward()
    assert logits._version > version
    expected = testing.oracle(hidden.cpu(), target.cpu(), grad_loss=0.2)
    testing.assert_grad(hidden.grad, expected)
    testing.assert_grad(logits, expected)


@pytest.mark.parametrize("dtype, options", CASES, ids=_id)
def test_a_split_vocabulary(launches, dtype, options):
    check_shards(dtype, options)
    both = ["join_shards_kernel", "backward_kernel"]
    assert launches == ["shard_kernel"] * 4 + both + both[:1] + both * 2  # no backward of a shard without classes


@pytest.mark.parametrize("weighted", [False, True])
def test_the_join(launches, weighted):
    check_join(weighted)
    assert set(launches) == {"join_shards_kernel"}


@pytest.mark.parametrize("dtype, options", CASES, ids=_id)
def test_class_probabilities(launches, dtype, options):
    check_soft(dtype, options, target_dtype=dtype)
    assert launches == ["soft_forward_kernel", "soft_backward_kernel"]


def test_float64_is_plain_torch(launches):
    x, target = inputs(40, torch.float64)
    row = torch.linspace(0, 1, 7)
    calls = [
        (ops.cross_entropy_forward, (x, target)),
        (ops.cross_entropy_backward, (row, row, x, target, row.double())),
        (ops.soft_cross_entropy_forward, (x.float(), torch.softmax(x, -1))),
        (ops.cross_entropy_shard, (x, target, 0, 80)),
        (ops.cross_entropy_shard_join, (x, target, ops.cross_entropy_shard(x, target, 0, 40), 0, 40)),
    ]
    for operator, arguments in calls:
        moved = [a.to("npu") if isinstance(a, torch.Tensor) else a for a in arguments]
        actual, expected = operator(*moved), operator(*arguments)
        torch.testing.assert_close(torch.utils._pytree.tree_map(lambda t: t.cpu(), actual), expected)
    assert launches == []


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "lse_square_scale": 0.1}], ids=str)
def test_with_grad(launches, options):
    """Two kernels, forward and backward, with the gradient in place."""
    logits, target = inputs(300, torch.bfloat16)
    x, y = logits.to("npu").requires_grad_(), logits.float().requires_grad_()
    xent_ops.cross_entropy(x, target.to("npu"), grad_in_forward=True, **options).backward()
    xent_ops.cross_entropy(y, target, **options).backward()
    torch.testing.assert_close(x.grad.cpu().float(), y.grad, atol=1e-4, rtol=1e-2)
    assert launches == ["forward_kernel", "backward_kernel"]


def test_ignored_rows_are_not_read(monkeypatch):
    """Forward, where the lse is not asked for; every address that a kernel loads from is looked at."""
    loaded, original = [], interpreter.InterpreterBuilder.create_masked_load

    def record(self, ptrs, mask, *rest):
        loaded.append(ptrs.data[mask.data])
        return original(self, ptrs, mask, *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", record)
    logits, target = inputs(300, torch.bfloat16)  # row 2 is ignored; on the CPU, where the interpreter copies nothing
    begin, length = logits.data_ptr(), 300 * 2

    def rows_read(operator, *arguments):
        loaded.clear()
        operator(*arguments)
        addresses = np.unique(np.concatenate([each.ravel() for each in loaded])).astype(np.int64) - begin
        inside = addresses[(addresses >= 0) & (addresses < 7 * length)]
        return {int(row): int((inside // length == row).sum()) for row in np.unique(inside // length)}

    others = {row: 300 for row in range(7) if row != 2}
    assert rows_read(launch.cross_entropy_reduced, logits, target) == others
    assert rows_read(launch.cross_entropy_with_grad, logits, target, torch.ones(7)) == others
    assert rows_read(launch.cross_entropy_forward, logits, target) == {**others, 2: 300}


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_head_and_the_loss(launches, reduction):
    _, target = inputs(300, torch.float32)
    head = torch.randn(300, 8, generator=torch.Generator().manual_seed(1))
    hidden = torch.randn(7, 8, generator=torch.Generator().manual_seed(2))
    for device in ("npu", "cpu"):
        x, w = hidden.to(device).requires_grad_(), head.to(device).requires_grad_()
        loss = xent_ops.linear_cross_entropy(x, w, target.to(device), reduction=reduction, chunk_rows=4)
        gradients = torch.autograd.grad(loss.sum(), (x, w))
        made = [tensor.detach().cpu() for tensor in (loss, *gradients)]
        if device == "npu":
            on_npu = made
    torch.testing.assert_close(on_npu, made)
    assert launches.count("forward_kernel") == 2 and launches.count("backward_kernel") == 2  # two chunks


TESTS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


def test_opcheck():
    """test_autograd_registration knows CPU, CUDA and XPU alone; the graphs of the fake device show the formulas."""
    classes = 40
    logits, target = inputs(classes, torch.float16)
    x, target, row = logits.to("npu"), target.to("npu"), torch.rand(7).to("npu")
    weight = torch.rand(classes).to("npu")
    options = {"label_smoothing": 0.1, "softcap": 20.0}
    for wanted in ((False, False), (True, False), (False, True)):
        arguments = (x.clone().requires_grad_(), target, weight, *wanted)
        opcheck(ops.cross_entropy_forward.default, arguments, options, test_utils=TESTS)
    opcheck(ops.cross_entropy_backward.default, (row, None, x, target, row), test_utils=TESTS)
    opcheck(ops.cross_entropy_backward.default, (row, row, x, target, row, weight), options, test_utils=TESTS)
    opcheck(ops.cross_entropy_backward_.default, (row, None, x, target, row), test_utils=TESTS)
    of_entropy = (row, row, x, target, row, None, None, row, row)
    opcheck(ops.cross_entropy_backward.default, of_entropy, test_utils=TESTS)
    opcheck(ops.cross_entropy_backward.default, (*of_entropy, None, 0, 2 * classes), test_utils=TESTS)
    shard = (0, classes, weight)
    gathered = ops.cross_entropy_shard(x, target, *shard, **options)
    for name in ("cross_entropy_shard_join", "cross_entropy_shard_reduced"):
        arguments = (x.clone().requires_grad_(), target, gathered, *shard)
        opcheck(getattr(ops, name).default, arguments, options, test_utils=TESTS)


@torch._dynamo.config.patch(error_on_recompile=True)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(launches, dynamic):
    torch.compiler.reset()
    backend = AotEagerAndRecordGraphs()
    compiled = torch.compile(xent_ops.cross_entropy, backend=backend, fullgraph=True, dynamic=dynamic)
    for rows in (7, 7, 9) if dynamic else (7, 7):  # other targets, other rows
        logits, target = inputs(300, torch.float32, rows=rows)
        target = target.roll(rows)
        x = logits.to("npu").requires_grad_()
        loss = compiled(x, target.to("npu"), label_smoothing=0.1)
        loss.backward()
        y = logits.requires_grad_()
        wanted = F.cross_entropy(y, target, label_smoothing=0.1)
        wanted.backward()
        torch.testing.assert_close(loss.cpu(), wanted)
        torch.testing.assert_close(x.grad.cpu(), y.grad)
    assert operator_names(backend.fw_graphs[-1]).count("xent.cross_entropy_reduced.default") == 1
    assert set(launches) == {"forward_kernel", "backward_kernel"}
    if PINNED and not dynamic:
        assert_expected_inline(
            graph_text(backend.bw_graphs[0]),
            """\
class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[7, 300]", primals_2: "i64[7]", getitem_1: "f32[2]", getitem_2: "f32[7]", getitem_3: "f32[7]", tangents_1: "f32[]"):
        cross_entropy_backward: "f32[7, 300]" = torch.ops.xent.cross_entropy_backward.default(tangents_1, None, primals_1, primals_2, getitem_2, None, getitem_1, None, None, None, 0, None, None, getitem_3, label_smoothing = 0.1);  
        return (cross_entropy_backward, None)
""",
        )


def test_a_launch_reads_and_synchronises_nothing(monkeypatch):
    """What graph capture asks of an operator: memory from torch.empty, views, launches. The class weights' sum is one
    more kernel; a copy is made only of rows that have no two strides."""

    class NotRun:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: None

    for module, name in kernels():
        monkeypatch.setattr(module, name, NotRun())
    logits, target = inputs(300, torch.bfloat16)
    x, target, row, weight = (t.to("npu") for t in (logits, target, torch.rand(7), torch.rand(300)))
    scalar = torch.rand(()).to("npu").expand(7)
    with Log() as log:
        for w, options in ((None, RowOptions()), (weight, RowOptions(label_smoothing=0.1, softcap=20.0))):
            launch.cross_entropy_forward(x, target, w, options=options)
            launch.cross_entropy_forward(x, target, w, True, True, options=options)
            launch.cross_entropy_backward(scalar, row, x, target, row, w, options=options)
            launch.cross_entropy_backward_(row, None, x, target, row, w, options=options)
            of_entropy = (w, None, row, row)
            launch.cross_entropy_backward(row, None, x, target, row, *of_entropy, options=options)
            gathered = launch.cross_entropy_shard(x, target, 300, 900, w, options=options)
            launch.cross_entropy_shard_join(x, target, gathered, 300, 900, w, options=options)
            of_slice = (row, 300, 900)
            launch.cross_entropy_backward(scalar, row, x, target, row, *of_entropy, *of_slice, options=options)
            launch.soft_cross_entropy_forward(x, x, w, options=options)
            launch.soft_cross_entropy_backward(scalar, row, x, x, row, w, options=options)
    expected = {"aten.new_empty", "aten.empty_like", "aten.expand", "aten.view", "aten.sum"}
    called = {name.rpartition(".")[0] for name in log.seen}
    assert called and called <= expected, called


def test_an_emulation_is_never_taken_for_a_device(monkeypatch):
    """Neither this one nor one that calls itself torch_npu."""
    assert torch.npu.is_available() and why_no_device() == "torch_npu is not installed"
    impostor = types.ModuleType("torch_npu")
    impostor.npu = torch.npu
    monkeypatch.setitem(sys.modules, "torch_npu", impostor)
    assert why_no_device() == "this torch_npu is not the real one"
    impostor._C = types.ModuleType("torch_npu._C")
    impostor._C.__file__ = "torch_npu/_C.so"
    torch.npu.get_device_name = lambda device: "host"
    assert why_no_device() == "host is no Ascend NPU"
    torch.npu.get_device_name = lambda device: "Ascend910B3"
    assert why_no_device() == "Triton would not compile for the NPU"
    with monkeypatch.context() as patch:
        patch.setattr(torch, "ones", lambda *_, device: torch.full((1,), 2.0, device=device))
        assert why_no_device() == "the NPU computes 1 + 1 = 3.0"
        patch.delattr(torch, "ones")
        assert why_no_device().startswith("the NPU does not compute: ")


def test_documentation():
    """The first block of docs/npu.md runs; the others need what this device has not."""
    text = (Path(__file__).parents[2] / "docs" / "npu.md").read_text()
    first, *others = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for block in others:
        compile(block, "npu.md", "exec")
    namespace = {}
    exec(first, namespace)
    assert namespace["logits"].grad.device.type == "npu"


def test_configs(monkeypatch):
    assert configs.ub_bytes() == 24 * 1024
    assert [configs.programs(*case) for case in [(1, 40), (40, 40), (41, 40), (100_000, 40), (3, 40)]] == [
        (1, 1), (40, 1), (21, 2), (40, 2500), (3, 1),
    ]  # fmt: skip
    assert configs.programs(10**6, 10**6)[0] <= 65535
    for bad in ("0", "big", "-1", "1e6"):
        monkeypatch.setenv(configs.UB_VARIABLE, bad)
        with pytest.raises(ValueError, match=f"{configs.UB_VARIABLE}='{bad}' is not a number of bytes"):
            configs.ub_bytes()
    monkeypatch.delenv(configs.UB_VARIABLE)
    assert configs.ub_bytes() == configs.UB_BYTES
    assert configs.block(100_000, 40) == 4096 and configs.block(5, 40) == 8
    monkeypatch.setenv(configs.BLOCK_VARIABLE, "256")
    assert configs.block(100_000, 40) == 256 and configs.block(5, 40) == 8
    for bad in ("0", "300", "-1", "all"):
        monkeypatch.setenv(configs.BLOCK_VARIABLE, bad)
        with pytest.raises(ValueError, match=f"{configs.BLOCK_VARIABLE}='{bad}' is not a power of two"):
            configs.block(5, 40)
