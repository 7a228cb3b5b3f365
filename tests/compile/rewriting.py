"""Helpers for the tests of the pass that replaces F.cross_entropy (test_inductor_*.py).

Most of them run the rewritten graph without Inductor: the pass is a transformation of Dynamo's graph, and a C++
compiler behind it would only make the tests slow.
"""

import torch
import torch.nn.functional as F

from xent_ops import inductor

V = 37


class Rewriting:
    """A backend for torch.compile: our pass alone, then eager. Keeps the last graph."""

    def __init__(self, previous=None, linear="auto", products=None):
        from xent_ops.inductor.rewriting.graph_pass import Heads, ReplaceCrossEntropy

        self.run = ReplaceCrossEntropy(previous, Heads(linear, products))
        inductor.rewriting.report.clear()

    def __call__(self, gm, example_inputs):
        self.run(gm.graph)
        gm.graph.lint()
        gm.recompile()
        self.graph = gm.graph
        return gm

    def targets(self):
        return [node.target for node in self.graph.nodes]


def gradients(function, inputs):
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    loss = function(*leaves)
    loss.sum().backward()
    return loss.detach(), [x.grad for x in leaves if x.requires_grad]


def assert_same(
    function, *inputs, replaced=1, left=0, stays=F.cross_entropy, linear="auto", in_norm=None, **tolerances
):
    """The rewritten function against the function itself, with its gradients; returns (backend, report).

    ``in_norm``: what share of its norm a gradient may be off, where an element of it is a sum of roundings to 16 bits.
    """
    backend = Rewriting(linear=linear)
    want, want_grads = gradients(function, inputs)
    got, got_grads = gradients(torch.compile(function, backend=backend, fullgraph=True), inputs)
    report = inductor.last_report()
    assert (len(report.replaced), len(report.left_alone)) == (replaced, left), str(report)
    assert got.dtype == want.dtype and got.shape == want.shape
    torch.testing.assert_close(got, want, equal_nan=True, **tolerances)
    for got_grad, want_grad in zip(got_grads, want_grads, strict=True):
        assert got_grad.dtype == want_grad.dtype
        if in_norm is None:
            torch.testing.assert_close(got_grad, want_grad, equal_nan=True, **tolerances)
        else:
            assert (got_grad - want_grad).norm() <= in_norm * want_grad.norm()
    assert stays is None or (stays in backend.targets()) == (left > 0)
    return backend, report


def as_text(graph):
    return [str(node.format_node()) for node in graph.nodes]


def assert_left_alone(function, tensors, why):
    """The loss stays for this reason, in a graph of which nothing changes: the report's record."""
    before = []
    backend = Rewriting(lambda graph: before.extend(as_text(graph)))
    found = torch.compile(function, backend=backend, fullgraph=True)(*tensors)
    torch.testing.assert_close(found, function(*tensors), equal_nan=True)
    (call,) = inductor.last_report().calls
    assert not call.replaced and why in call.why, str(call)
    assert as_text(backend.graph) == before
    return call


def wide(backend, least):
    """The float32 tensors of more elements than this that the graph makes."""
    values = [node.meta.get("example_value") for node in backend.graph.nodes]
    return [v for v in values if isinstance(v, torch.Tensor) and v.dtype == torch.float32 and v.numel() > least]


def logits(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype).requires_grad_()


def targets(*shape, ignored=-100):
    target = torch.randint(0, V, shape)
    target.view(-1)[0] = ignored
    return target
