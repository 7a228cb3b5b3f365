"""Helpers for the tests of the heads that the pass finds (test_find_head*.py)."""

import torch
import torch.nn.functional as F
from helpers.heads import random_head
from rewriting import assert_same

B, S, H, V = 2, 5, 16, 37
HEAD = torch.ops.xent.linear_cross_entropy.default
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
IN_BFLOAT16 = {"in_norm": 0.01, "rtol": 0.01, "atol": 0.0}  # of products in bfloat16: gradients, and the loss


def inputs(dtype=torch.float32):
    """(hidden states, weight, bias, target); some targets are ignored."""
    return random_head("cpu", dtype, (B, S), V, H, ignored=[1, S + 2])


def ce(logits, t, **options):
    return F.cross_entropy(logits.view(-1, V), t.flatten(), **options)


def heads_of(graph):
    return [node for node in graph.nodes if node.target is HEAD]


def has_logits(graph):
    """Does a node make a tensor of floats with the classes among its dimensions, other than the weight?"""
    values = [node.meta.get("example_value") for node in graph.nodes if node.op.startswith("call")]
    made = [value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]
    return any(V in value.shape and H not in value.shape and value.dim() > 1 for value in made)


def assert_taken(function, *tensors, linear=True, **tolerances):
    """Its head is taken, and value and gradients are those of eager: (its record in the report, the operator's node)."""
    backend, report = assert_same(function, *tensors, linear=linear, **(tolerances or CLOSE))
    (call,) = report.calls
    assert call.head and "replaced with the head" in str(call) and not call.head_left, str(report)
    assert not has_logits(backend.graph)
    (node,) = heads_of(backend.graph)
    return call, node


def assert_left(function, *tensors, why, linear=True, replaced=1, left=0, **tolerances):
    """Its head is left alone for this reason, and value and gradients are those of eager."""
    options = {"replaced": replaced, "left": left, "stays": None, "linear": linear}
    backend, report = assert_same(function, *tensors, **options, **(tolerances or CLOSE))
    assert not heads_of(backend.graph) and not any(call.head for call in report.calls)
    reasons = [call.head_left for call in report.calls]
    assert any(why in reason for reason in reasons), str(report)
    return report
