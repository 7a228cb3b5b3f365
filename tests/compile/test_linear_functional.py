"""F.linear_cross_entropy in a compiled model: without ``options`` it is a head and a loss as any other."""

import pytest
import torch
import torch.nn.functional as F
from rewriting import Rewriting, V, assert_same, targets
from torch import nn

from xent_ops import inductor

if not hasattr(F, "linear_cross_entropy"):
    pytest.skip("F.linear_cross_entropy came with torch 2.13", allow_module_level=True)

H = 16
OURS = torch.ops.xent.linear_cross_entropy.default
pytestmark = pytest.mark.filterwarnings("ignore:linear_cross_entropy")
# With allow_retain_graph, or torch warns in the middle of a graph, where Dynamo breaks it.
OPTIONS = nn.LinearCrossEntropyOptions(allow_retain_graph=True, batch_chunk_size=4, chunking_method=None)


def tensors(dtype=torch.float32, rows=6):
    shapes = (((rows, H) if rows else (H,)), (V, H), (V,))
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def lce(x, w, t, **options):
    return F.linear_cross_entropy(x, w, t, **options)


CALLS = {
    "plain": lambda x, w, b, t, c: lce(x, w, t),
    "plain, all": lambda x, w, b, t, c: lce(
        x, w, t, linear_bias=b, weight=c, reduction="sum", ignore_index=5, label_smoothing=0.1
    ),
    "plain, rows": lambda x, w, b, t, c: lce(x, w, t, reduction="none"),
    "frozen head": lambda x, w, b, t, c: lce(x, w.detach(), t) + w.sum() + b.sum(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("rows", [6, 0], ids=["batch", "one row"])
def test_it_is_replaced_with_its_head(call, rows):
    x, w, b = tensors(rows=rows)
    if "all" not in call:
        b = b.detach()
    t = targets(6, ignored=5 if "all" in call else -100) if rows else torch.tensor(7)
    if call == "frozen head":
        b.requires_grad_()
    backend, report = assert_same(CALLS[call], x, w, b, t, torch.rand(V), linear=True, rtol=1e-5, atol=1e-5)
    (made,) = [node for node in backend.graph.nodes if node.target is OURS]
    assert made.args[3] is None or made.args[3].op == "placeholder"
    assert F.linear not in backend.targets()
    (replaced,) = report.replaced
    assert replaced.head and "test_linear_functional.py" in replaced.where
    assert "replaced with the head" in str(replaced)


def test_the_module():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.loss = nn.LinearCrossEntropyLoss(H, V, bias=True)

        def forward(self, x, t):
            return self.loss(x, t)

    _, report = assert_same(Model(), tensors()[0], targets(6), linear=True, rtol=1e-5, atol=1e-5)
    assert report.replaced[0].head and "in forward" in report.replaced[0].where


def test_with_options_it_is_as_torch_has_it():
    """An operator of torch that computes by chunks itself."""
    x, w, _ = tensors()
    t = targets(6)
    backend, report = assert_same(lambda x, w: lce(x, w, t, options=OPTIONS), x, w, replaced=0, stays=None)
    assert not report.calls and OURS not in backend.targets()


def test_where_torch_breaks_the_graph():
    """Without allow_retain_graph torch warns, which ends the graph: nothing of the loss is compiled, as docs/compile.md
    says."""
    x, w, _ = tensors()
    t, backend = targets(6), Rewriting()

    def function(x, w):
        return lce(x, w, t, options=nn.LinearCrossEntropyOptions())

    with pytest.raises(torch._dynamo.exc.Unsupported, match="warn"):
        torch.compile(function, backend=backend, fullgraph=True)(x, w)
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(function, backend=backend)(x, w), function(x, w))
    assert not inductor.last_report().calls


def _other_view(x, w, t):
    return lce(x, w.view(V, 1, H), t[:, None])


def test_a_loss_of_more_dimensions():
    x, w, _ = tensors()
    _, report = assert_same(_other_view, x, w, torch.randint(0, V, (6,)), linear=True, rtol=1e-5, atol=1e-5)
    assert report.replaced[0].head


def _probabilities(x, w, t):
    return lce(x, w, F.one_hot(t, V).to(x.dtype))


@pytest.mark.parametrize(
    "function, linear, why", [(_probabilities, True, "its target is class probabilities"), (lce, "auto", "too small")]
)
def test_the_loss_alone_is_replaced(function, linear, why):
    x, w, _ = tensors()
    _, report = assert_same(function, x, w, torch.randint(0, V, (6,)), linear=linear)
    assert not report.replaced[0].head and why in report.replaced[0].head_left
