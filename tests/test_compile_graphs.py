"""The graphs that AOTAutograd hands to a backend, pinned: what of the loss is an operator and what plain torch."""

import pytest
import torch
from expecttest import assert_expected_inline
from faces import inputs
from graphs import AotEagerAndRecordGraphs, graph_text

import xent_ops

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
pytestmark = pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")  # torch's own recording backend
PINNED = pytest.mark.skipif(TORCH != (2, 13), reason="graphs are pinned to what torch 2.13 traces")


def graphs_of(function):
    backend = AotEagerAndRecordGraphs()
    x, target, _ = inputs("cross_entropy")
    torch.compile(function, backend=backend, fullgraph=True)(x, target).backward()
    return graph_text(backend.fw_graphs[0]), graph_text(backend.bw_graphs[0])


@PINNED
def test_graphs_of_the_plain_loss():
    forward, backward = graphs_of(lambda x, t: xent_ops.cross_entropy(x, t))
    assert_expected_inline(
        forward,
        """\
class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[8, 33]", primals_2: "i64[8]"):
        cross_entropy_forward = torch.ops.xent.cross_entropy_forward.default(primals_1, primals_2)
        getitem: "f32[8]" = cross_entropy_forward[0]
        getitem_1: "f32[8]" = cross_entropy_forward[1]
        detach: "f32[8]" = torch.ops.aten.detach.default(getitem_1)
        ne: "b8[8]" = torch.ops.aten.ne.Scalar(primals_2, -100)
        sum_1: "i64[]" = torch.ops.aten.sum.default(ne)
        sum_2: "f32[]" = torch.ops.aten.sum.default(getitem)
        div: "f32[]" = torch.ops.aten.div.Tensor(sum_2, sum_1)
        detach_1: "f32[8]" = torch.ops.aten.detach.default(detach)
        return (div, primals_1, primals_2, sum_1, detach_1)
""",
    )
    assert_expected_inline(
        backward,
        """\
class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[8, 33]", primals_2: "i64[8]", sum_1: "i64[]", detach_1: "f32[8]", tangents_1: "f32[]"):
        div_1: "f32[]" = torch.ops.aten.div.Tensor(tangents_1, sum_1);  
        expand: "f32[8]" = torch.ops.aten.expand.default(div_1, [8])
        cross_entropy_backward: "f32[8, 33]" = torch.ops.xent.cross_entropy_backward.default(expand, None, primals_1, primals_2, detach_1);  
        return (cross_entropy_backward, None)
""",
    )


@PINNED
def test_graphs_with_weight_and_smoothing():
    weight = torch.rand(33)
    forward, backward = graphs_of(lambda x, t: xent_ops.cross_entropy(x, t, weight, label_smoothing=0.1))
    assert_expected_inline(
        forward,
        """\
class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[8, 33]", primals_2: "i64[8]", primals_3: "f32[33]"):
        cross_entropy_forward = torch.ops.xent.cross_entropy_forward.default(primals_1, primals_2, primals_3, label_smoothing = 0.1)
        getitem: "f32[8]" = cross_entropy_forward[0]
        getitem_1: "f32[8]" = cross_entropy_forward[1]
        detach: "f32[8]" = torch.ops.aten.detach.default(getitem_1)
        ne: "b8[8]" = torch.ops.aten.ne.Scalar(primals_2, -100)
        ge: "b8[8]" = torch.ops.aten.ge.Scalar(primals_2, 0)
        lt: "b8[8]" = torch.ops.aten.lt.Scalar(primals_2, 33)
        bitwise_and: "b8[8]" = torch.ops.aten.bitwise_and.Tensor(ge, lt);  
        bitwise_and_1: "b8[8]" = torch.ops.aten.bitwise_and.Tensor(ne, bitwise_and)
        scalar_tensor: "i64[]" = torch.ops.aten.scalar_tensor.default(0, dtype = torch.int64, layout = torch.strided, device = device(type='cpu'))
        where: "i64[8]" = torch.ops.aten.where.self(bitwise_and_1, primals_2, scalar_tensor);  
        bitwise_not: "b8[8]" = torch.ops.aten.bitwise_not.default(bitwise_and)
        bitwise_and_2: "b8[8]" = torch.ops.aten.bitwise_and.Tensor(ne, bitwise_not)
        bitwise_not_1: "b8[8]" = torch.ops.aten.bitwise_not.default(bitwise_and_2)
        bitwise_and_3: "b8[8]" = torch.ops.aten.bitwise_and.Tensor(ne, bitwise_not_1);  
        index: "f32[8]" = torch.ops.aten.index.Tensor(primals_3, [where])
        scalar_tensor_1: "f32[]" = torch.ops.aten.scalar_tensor.default(0.0, dtype = torch.float32, layout = torch.strided, device = device(type='cpu'))
        where_1: "f32[8]" = torch.ops.aten.where.self(bitwise_and_3, index, scalar_tensor_1);  
        sum_2: "f32[]" = torch.ops.aten.sum.default(where_1)
        sum_3: "f32[]" = torch.ops.aten.sum.default(getitem)
        div: "f32[]" = torch.ops.aten.div.Tensor(sum_3, sum_2)
        detach_1: "f32[8]" = torch.ops.aten.detach.default(detach)
        return (div, primals_1, primals_2, primals_3, sum_2, detach_1)
""",
    )
    assert_expected_inline(
        backward,
        """\
class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[8, 33]", primals_2: "i64[8]", primals_3: "f32[33]", sum_2: "f32[]", detach_1: "f32[8]", tangents_1: "f32[]"):
        div_1: "f32[]" = torch.ops.aten.div.Tensor(tangents_1, sum_2);  
        expand: "f32[8]" = torch.ops.aten.expand.default(div_1, [8])
        cross_entropy_backward: "f32[8, 33]" = torch.ops.xent.cross_entropy_backward.default(expand, None, primals_1, primals_2, detach_1, primals_3, label_smoothing = 0.1);  
        return (cross_entropy_backward, None, None)
""",
    )


@PINNED
def test_graphs_with_z_loss():
    forward, backward = graphs_of(lambda x, t: xent_ops.cross_entropy(x, t, lse_square_scale=0.5))
    assert_expected_inline(
        forward,
        """\
class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[8, 33]", primals_2: "i64[8]"):
        cross_entropy_forward = torch.ops.xent.cross_entropy_forward.default(primals_1, primals_2)
        getitem: "f32[8]" = cross_entropy_forward[0]
        getitem_1: "f32[8]" = cross_entropy_forward[1]
        ne: "b8[8]" = torch.ops.aten.ne.Scalar(primals_2, -100)
        sum_1: "i64[]" = torch.ops.aten.sum.default(ne)
        scalar_tensor: "f32[]" = torch.ops.aten.scalar_tensor.default(0.0, dtype = torch.float32, layout = torch.strided, device = device(type='cpu'))
        where: "f32[8]" = torch.ops.aten.where.self(ne, getitem_1, scalar_tensor)
        pow_1: "f32[8]" = torch.ops.aten.pow.Tensor_Scalar(where, 2)
        mul: "f32[8]" = torch.ops.aten.mul.Tensor(pow_1, 0.5)
        sum_2: "f32[]" = torch.ops.aten.sum.default(getitem)
        sum_3: "f32[]" = torch.ops.aten.sum.default(mul)
        div: "f32[]" = torch.ops.aten.div.Tensor(sum_2, sum_1)
        div_1: "f32[]" = torch.ops.aten.div.Tensor(sum_3, sum_1);  
        add: "f32[]" = torch.ops.aten.add.Tensor(div, div_1);  
        return (add, primals_1, primals_2, getitem_1, ne)
""",
    )
    assert_expected_inline(
        backward,
        """\
class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[8, 33]", primals_2: "i64[8]", getitem_1: "f32[8]", ne: "b8[8]", tangents_1: "f32[]"):
        sum_1: "i64[]" = torch.ops.aten.sum.default(ne)
        div_2: "f32[]" = torch.ops.aten.div.Tensor(tangents_1, sum_1);  
        expand: "f32[8]" = torch.ops.aten.expand.default(div_2, [8])
        mul_1: "f32[8]" = torch.ops.aten.mul.Tensor(expand, 0.5)
        scalar_tensor: "f32[]" = torch.ops.aten.scalar_tensor.default(0.0, dtype = torch.float32, layout = torch.strided, device = device(type='cpu'))
        where: "f32[8]" = torch.ops.aten.where.self(ne, getitem_1, scalar_tensor)
        pow_2: "f32[8]" = torch.ops.aten.pow.Tensor_Scalar(where, 1.0)
        mul_2: "f32[8]" = torch.ops.aten.mul.Scalar(pow_2, 2.0)
        mul_3: "f32[8]" = torch.ops.aten.mul.Tensor(mul_1, mul_2);  
        scalar_tensor_1: "f32[]" = torch.ops.aten.scalar_tensor.default(0, dtype = torch.float32, layout = torch.strided, device = device(type='cpu'))
        where_1: "f32[8]" = torch.ops.aten.where.self(ne, mul_3, scalar_tensor_1);  
        detach: "f32[8]" = torch.ops.aten.detach.default(getitem_1)
        detach_1: "f32[8]" = torch.ops.aten.detach.default(detach)
        cross_entropy_backward: "f32[8, 33]" = torch.ops.xent.cross_entropy_backward.default(expand, where_1, primals_1, primals_2, detach_1);  
        return (cross_entropy_backward, None)
""",
    )
