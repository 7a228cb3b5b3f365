"""Tracing for an "npu" that has no kernels at all, only fake tensors: run by test_npu.py in a process of its own.

Any operator that ran for real would fail here, and so would anything that reads a tensor's values.
"""

import sys

import pytest
import torch
from expecttest import assert_expected_inline
from helpers.graphs import AotEagerAndRecordGraphs, graph_text, operator_names
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import xent_ops

_setup_privateuseone_for_python_backend("npu")

FAKE = FakeTensorMode()
PINNED = torch.__version__.startswith("2.13")  # the version whose graphs are pinned
FORWARD, BACKWARD = "xent.cross_entropy_reduced.default", "xent.cross_entropy_backward.default"
# Reads of values, and copies between devices, which are conversions of dtype where the device stays.
SYNCHRONISES = {
    "item",
    "_local_scalar_dense",
    "nonzero",
    "_assert_async",
    "_assert_scalar",
    "_to_copy",
    "masked_select",
}
OPTIONS = [
    {},
    {"reduction": "none"},
    {"label_smoothing": 0.1, "softcap": 30.0, "logit_scale": 0.5, "lse_square_scale": 1e-4, "ignore_index": 3},
]


@pytest.fixture(autouse=True)
def _no_kernel_is_called():
    yield
    assert "xent_ops.kernels.ascend.launch" not in sys.modules, "a kernel was asked for while tracing"
    torch.compiler.reset()


def inputs(rows=8, classes=33, dtype=torch.bfloat16):
    with FAKE:
        x = torch.empty(rows, classes, device="npu", dtype=dtype, requires_grad=True)
        return x, torch.empty(rows, dtype=torch.int64, device="npu"), torch.empty(classes, device="npu")


def forward_of(options):
    return "xent.cross_entropy_forward.default" if options.get("reduction") == "none" else FORWARD


def check(names, *wanted):
    for operator in wanted:
        assert names.count(operator) == 1, names
    bad = [name for name in names if name.startswith("aten.") and name.split(".")[1] in SYNCHRONISES]
    assert not bad, f"these synchronise: {bad}"


def test_the_graphs():
    x, target, _ = inputs()
    backend = AotEagerAndRecordGraphs()
    with FAKE:
        torch.compile(xent_ops.cross_entropy, backend=backend, fullgraph=True)(x, target).backward()
    assert x.grad.device.type == "npu" and x.grad.dtype == torch.bfloat16
    check(operator_names(backend.fw_graphs[0]), FORWARD)
    if PINNED:
        assert_expected_inline(
            graph_text(backend.bw_graphs[0]),
            """\
class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "bf16[8, 33]", primals_2: "i64[8]", getitem_1: "f32[2]", getitem_2: "f32[8]", getitem_3: "f32[8]", tangents_1: "f32[]"):
        cross_entropy_backward: "bf16[8, 33]" = torch.ops.xent.cross_entropy_backward.default(tangents_1, None, primals_1, primals_2, getitem_2, None, getitem_1, None, None, None, 0, None, None, getitem_3);  
        return (cross_entropy_backward, None)
""",
        )


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
@pytest.mark.parametrize("dynamic", [False, True])
def test_fullgraph_forward_and_backward(options, dynamic):
    x, target, weight = inputs()
    backend = AotEagerAndRecordGraphs()

    def step(x, target, weight):
        return xent_ops.cross_entropy(x, target, weight, **options).sum()

    with FAKE:
        torch.compile(step, backend=backend, fullgraph=True, dynamic=dynamic)(x, target, weight).backward()
    check(operator_names(backend.fw_graphs[-1]), forward_of(options))
    check(operator_names(backend.bw_graphs[-1]), BACKWARD)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
def test_make_fx(options):
    x, target, weight = inputs()

    def step(x, target, weight):
        return torch.autograd.grad(xent_ops.cross_entropy(x, target, weight, **options).sum(), x)

    with FAKE:
        graph = make_fx(step)(x, target, weight)
    check(operator_names(graph), forward_of(options), BACKWARD)


def test_inductors_table_leaves_the_nodes_alone():
    """On a CPU without the C++ extension the backward becomes pointwise aten in it; an NPU gets the kernel."""
    from torch._inductor.decomposition import select_decomp_table

    from xent_ops.inductor.lowerings import reuse

    def step(x, target):
        return torch.autograd.grad(xent_ops.cross_entropy(x, target), x)

    x, target, _ = inputs()
    with FAKE:
        make_fx(step)(x, target)  # the first fake installs what we have for Inductor
        check(operator_names(make_fx(step, decomposition_table=select_decomp_table())(x, target)), FORWARD, BACKWARD)
        x, target = torch.empty(8, 33, requires_grad=True), torch.empty(8, dtype=torch.int64)
        names = operator_names(make_fx(step, decomposition_table=select_decomp_table())(x, target))
        assert (BACKWARD in names) == reuse.writes_over("cpu")


def test_export():
    class Model(torch.nn.Module):
        def forward(self, x, target):
            return xent_ops.cross_entropy(x, target, label_smoothing=0.1)

    x, target, _ = inputs()
    with FAKE:
        program = torch.export.export(Model(), (x.detach(), target), strict=True)
    assert operator_names(program.graph_module) == ["xent.cross_entropy.default"]


def test_every_operator_traces():
    """What plain torch serves on an NPU, too."""
    ops = torch.ops.xent
    x, target, weight = inputs()
    with FAKE:
        row, soft = torch.empty(8, device="npu"), torch.empty(8, 33, device="npu")
        shard = (0, 66, weight)
        results = [
            *ops.cross_entropy_forward(x, target, weight),
            *ops.cross_entropy_forward(x, target, weight, True, True),
            ops.cross_entropy_backward(row, None, x, target, row, weight, None, row, row),
            ops.soft_cross_entropy_forward(x, soft, weight)[0],
            ops.soft_cross_entropy_backward(row, None, x, soft, row, weight),
            ops.cross_entropy_shard_join(x, target, ops.cross_entropy_shard(x, target, *shard), *shard)[0],
            ops.cross_entropy_backward(row, None, x, target, row, weight, None, row, row, row, 0, 66),
        ]
        assert ops.cross_entropy_backward_(row, None, x.detach(), target, row) is None
    assert {result.device.type for result in results} == {"npu"}
