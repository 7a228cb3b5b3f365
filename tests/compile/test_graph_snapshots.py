"""The graphs that AOTAutograd hands to a backend, pinned: what of the loss is an operator and what plain torch."""

import pytest
import torch
from expecttest import assert_expected_inline
from helpers.graphs import AotEagerAndRecordGraphs, graph_text
from helpers.public_api import inputs

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
        cross_entropy_reduced = torch.ops.xent.cross_entropy_reduced.default(primals_1, primals_2)
        getitem: "f32[]" = cross_entropy_reduced[0]
        getitem_1: "f32[2]" = cross_entropy_reduced[1]
        getitem_2: "f32[8]" = cross_entropy_reduced[2]
        getitem_3: "f32[8]" = cross_entropy_reduced[3]
        return (getitem, primals_1, primals_2, getitem_1, getitem_2, getitem_3)
""",
    )
    assert_expected_inline(
        backward,
        """\
class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[8, 33]", primals_2: "i64[8]", getitem_1: "f32[2]", getitem_2: "f32[8]", getitem_3: "f32[8]", tangents_1: "f32[]"):
        cross_entropy_backward: "f32[8, 33]" = torch.ops.xent.cross_entropy_backward.default(tangents_1, None, primals_1, primals_2, getitem_2, None, getitem_1, None, None, None, 0, None, None, getitem_3);  
        return (cross_entropy_backward, None)
""",
    )


@PINNED
def test_graphs_with_options():
    weight = torch.rand(33)
    options = {"label_smoothing": 0.1, "lse_square_scale": 0.5}
    forward, backward = graphs_of(lambda x, t: xent_ops.cross_entropy(x, t, weight, **options))
    assert_expected_inline(
        forward,
        """\
class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[8, 33]", primals_2: "i64[8]", primals_3: "f32[33]"):
        cross_entropy_reduced = torch.ops.xent.cross_entropy_reduced.default(primals_1, primals_2, primals_3, label_smoothing = 0.1, lse_square_scale = 0.5)
        getitem: "f32[]" = cross_entropy_reduced[0]
        getitem_1: "f32[2]" = cross_entropy_reduced[1]
        getitem_2: "f32[8]" = cross_entropy_reduced[2]
        getitem_3: "f32[8]" = cross_entropy_reduced[3]
        return (getitem, primals_1, primals_2, primals_3, getitem_1, getitem_2, getitem_3)
""",
    )
    assert_expected_inline(
        backward,
        """\
class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[8, 33]", primals_2: "i64[8]", primals_3: "f32[33]", getitem_1: "f32[2]", getitem_2: "f32[8]", getitem_3: "f32[8]", tangents_1: "f32[]"):
        cross_entropy_backward: "f32[8, 33]" = torch.ops.xent.cross_entropy_backward.default(tangents_1, None, primals_1, primals_2, getitem_2, primals_3, getitem_1, None, None, None, 0, None, None, getitem_3, label_smoothing = 0.1, lse_square_scale = 0.5);  
        return (cross_entropy_backward, None, None)
""",
    )
