"""F.linear_cross_entropy in a compiled model: the pass puts ours there, head and loss as one."""

import pytest
import torch
import torch.nn.functional as F
from linear_cases import ONE_PASS, code_of, counts
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
    backend, report = assert_same(CALLS[call], x, w, b, t, torch.rand(V), rtol=1e-5, atol=1e-5)
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

    _, report = assert_same(Model(), tensors()[0], targets(6), rtol=1e-5, atol=1e-5)
    assert report.replaced[0].head and "in forward" in report.replaced[0].where


def test_bfloat16():
    """The result keeps its dtype."""
    x, w, _ = tensors(torch.bfloat16)
    t = targets(6)
    # torch's own gradients of bfloat16 differ by more from those of its chunks
    backend, _ = assert_same(lambda x, w: lce(x, w, t), x, w, rtol=0.03, atol=3e-3)
    (made,) = [node for node in backend.graph.nodes if node.target is OURS]
    assert "accumulate_dtype" not in made.kwargs and "to" in backend.targets()


def test_compiled_by_inductor():
    x, w, b = tensors(rows=24)
    t = targets(24)
    with inductor.replace_cross_entropy():
        code, _ = code_of(lambda x, w, b: lce(x, w, t, linear_bias=b), x, w, b)
    assert counts(code, ONE_PASS) == (1,) and "mm(" not in code
    (call,) = inductor.last_report().calls
    assert call.head


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


def _probabilities(x, w, t):
    return lce(x, w, F.one_hot(t, V).to(x.dtype))


def _own_product(x, w, t):
    return F.cross_entropy(F.linear(x, w), t)


def test_a_loss_of_more_dimensions():
    x, w, _ = tensors()
    _, report = assert_same(_other_view, x, w, torch.randint(0, V, (6,)), rtol=1e-5, atol=1e-5)
    assert report.replaced[0].head


@pytest.mark.parametrize(
    "function, why", [(_probabilities, "its target is class probabilities"), (_own_product, "too small")]
)
def test_the_loss_alone_is_replaced(function, why):
    x, w, _ = tensors()
    _, report = assert_same(function, x, w, torch.randint(0, V, (6,)))
    assert not report.replaced[0].head and why in report.replaced[0].head_left


def _transform(x, w, t):
    return torch.func.grad(lambda x: lce(x, w, t))(x)


def test_autocast_around_it():
    x, w, _ = tensors()
    t = targets(6)
    with torch.autocast("cpu", torch.bfloat16):
        _, report = assert_same(lambda x, w: lce(x, w, t), x, w, rtol=0.03, atol=1e-3)
    assert report.replaced[0].head


def test_a_transform_is_left_alone():
    x, w, _ = tensors()
    t, backend = targets(6), Rewriting()
    made = torch.compile(_transform, backend=backend, fullgraph=True)(x.detach(), w.detach(), t)
    torch.testing.assert_close(made, _transform(x.detach(), w.detach(), t))
    (call,) = inductor.last_report().calls
    assert not call.replaced and "torch.func transform" in call.why


def test_dynamic_sizes():
    backend = Rewriting()
    compiled = torch.compile(lambda x, w, t: lce(x, w, t), backend=backend, fullgraph=True)
    w = tensors()[1]
    for rows in (6, 9, 13):
        x, t = tensors(rows=rows)[0], targets(rows)
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(t, 0)
        torch.testing.assert_close(compiled(x, w, t), lce(x, w, t))
    (call,) = inductor.last_report().calls
    assert call.head


def test_a_head_that_was_written_to_before():

    def function(x, w, t):
        head = w * 1.0
        head.mul_(2.0)
        return lce(x, head, t) + head.sum()

    x, w, _ = tensors()
    _, report = assert_same(function, x, w, targets(6), rtol=1e-5, atol=1e-5)
    assert report.replaced[0].head
