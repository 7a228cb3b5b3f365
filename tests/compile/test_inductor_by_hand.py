"""Log-probabilities that a model gathers by itself, as DPO, GRPO and contrastive losses read them, become a row loss."""

import pytest
import torch
import torch.nn.functional as F
from finding_heads import HEAD
from rewriting import Rewriting, V, assert_left_alone, assert_same, wide

from xent_ops import inductor
from xent_ops.inductor.rewriting.by_hand import NEVER
from xent_ops.kernels import reference
from xent_ops.kernels.options import RowOptions

LOSS = torch.ops.xent.cross_entropy.default
B, S, H = 2, 3, 8


def rows(dtype=torch.float64):
    """(logits (6, V), targets (6,))"""
    return torch.randn(6, V, dtype=dtype, requires_grad=True), torch.randint(0, V, (6,))


def batch(dtype=torch.float64):
    """(logits (B, S, V), targets (B, S))"""
    x, t = rows(dtype)
    return x.detach().view(B, S, V).requires_grad_(), t.view(B, S)


OF_ROWS = {
    "gather": lambda x, t: F.log_softmax(x, -1).gather(-1, t[:, None]).squeeze(-1),
    "torch.gather": lambda x, t: -torch.gather(x.log_softmax(1), 1, t.unsqueeze(1)),
    "keywords": lambda x, t: torch.gather(input=torch.log_softmax(input=x, dim=1), dim=1, index=t.view(-1, 1)),
    "take_along_dim": lambda x, t: -torch.take_along_dim(x.log_softmax(-1), t[:, None], 1).mean(),
    "take_along_dim, keywords": lambda x, t: torch.take_along_dim(x.log_softmax(-1), indices=t[:, None], dim=-1),
    "views behind": lambda x, t: x.view(B, S, V).log_softmax(-1)[:, :-1].gather(2, t.view(B, S, 1)[:, 1:]).flatten(),
    "one row": lambda x, t: x[0].log_softmax(0).gather(0, t[:1]),
    "logsumexp": lambda x, t: (x.logsumexp(-1) - x.gather(-1, t[:, None]).squeeze(-1)).mean(),
    "logsumexp, keepdim": lambda x, t: x.gather(-1, t[:, None]) - torch.logsumexp(x, 1, keepdim=True),
    "logsumexp, indexed": lambda x, t: torch.subtract(x.gather(1, t[:, None])[:, 0], torch.logsumexp(x, dim=(1,))),
    "logsumexp, unsqueezed": lambda x, t: x.logsumexp(-1)[:, None] - x.gather(-1, t[:, None]),
    "logsumexp, viewed": lambda x, t: x.gather(1, t[:, None]).view(B, S) - x.logsumexp(-1).reshape(B, S),
    "brackets": lambda x, t: -x.log_softmax(-1)[torch.arange(6), t].mean(),
    "brackets, any rows": lambda x, t: x.log_softmax(1)[torch.arange(x.size(0)), t - V],
    "brackets, logsumexp": lambda x, t: x[torch.arange(0, len(x)), t] - x.logsumexp(1),
    "brackets, two aranges": lambda x, t: x.logsumexp(1) - x[torch.arange(6), torch.arange(3, 9)],
    "brackets, end=": lambda x, t: x.log_softmax(1)[torch.arange(6), torch.arange(-3, end=3)],
    "cat of one": lambda x, t: x.gather(1, t[:, None])[:, 0] - torch.cat([x], dim=1).logsumexp(1),
    "scaled": lambda x, t: (x / 0.7).log_softmax(-1).gather(-1, t[:, None]),
    "softcap": lambda x, t: (lambda y: y.gather(-1, t[:, None]) - y.logsumexp(-1, keepdim=True))(5 * torch.tanh(x / 5)),
}
OF_BATCHES = {
    "shifted, masked": lambda x, t: x[:, :-1].log_softmax(-1).gather(2, t[:, 1:, None]).squeeze(2) * (t[:, 1:] != 3),
    "classes in dimension 1": lambda x, t: x.mT.contiguous().log_softmax(1).gather(1, t[:, None]),
}


def _names(graph):
    return {str(getattr(node.target, "__name__", node.target)) for node in graph.nodes}


@pytest.mark.parametrize("case", [*OF_ROWS, *OF_BATCHES])
def test_replaced(case):
    """Value and gradients in float64, and nothing of what was written out stays."""
    function, tensors = (OF_ROWS[case], rows()) if case in OF_ROWS else (OF_BATCHES[case], batch())
    backend, report = assert_same(function, *tensors, stays=None, rtol=1e-12, atol=1e-12)
    (call,) = report.calls
    counted_from_the_end = ("brackets", "brackets, any rows", "brackets, logsumexp", "brackets, end=")
    assert ("where" in _names(backend.graph)) == (case in counted_from_the_end)
    assert "gather" in call.what and "float64" in call.what and "test_inductor_by_hand.py" in call.where
    assert call.logit_scale == pytest.approx(1 / 0.7 if case == "scaled" else 1.0) and call.softcap == (
        5.0 if case == "softcap" else None
    )
    written_out = {"gather", "take_along_dim", "log_softmax", "logsumexp", "tanh"}
    assert not _names(backend.graph) & written_out
    (node,) = [node for node in backend.graph.nodes if node.target is LOSS]
    assert node.kwargs["ignore_index"] == NEVER and node.kwargs["reduction"] == "none"


@pytest.mark.parametrize("case", ["gather", "logsumexp"])
def test_any_number_of_rows(case):
    """Sizes that are symbols, from the first call on or from the second; one compilation more is no price."""
    x, t = rows()
    for dynamic in (True, None):
        torch.compiler.reset()
        compiled = torch.compile(OF_ROWS[case], backend=Rewriting(), dynamic=dynamic, fullgraph=True)
        for n in (6, 4, 5):
            given = x[:n].detach(), t[:n].clone()
            torch.testing.assert_close(compiled(*given), OF_ROWS[case](*given))
        report = inductor.last_report()
        assert len(report.replaced) == report.graphs == (1 if dynamic else 2)


def test_fewer_targets_than_rows_after_a_compilation():
    """gather takes them, the operator does not. From the second call on there is a symbol for each, with a guard."""
    x, t = rows()
    compiled = torch.compile(OF_ROWS["gather"], backend=Rewriting(), fullgraph=True)
    for n, m in ((6, 6), (5, 5), (4, 4), (5, 3)):
        given = x[:n].detach(), t[:m].clone()
        torch.testing.assert_close(compiled(*given), OF_ROWS["gather"](*given))
    assert [call.replaced for call in inductor.last_report().calls] == [True, True, False]


WIDER = {
    "before": lambda x, t: x.float().log_softmax(-1).gather(-1, t[..., None]),
    "as dtype": lambda x, t: F.log_softmax(x, -1, dtype=torch.float32).gather(-1, t[..., None]),
    "of the sum": lambda x, t: x.gather(-1, t[..., None]) - x.float().logsumexp(-1, keepdim=True),
    "of both": lambda x, t: (lambda y: y.gather(-1, t[..., None]) - y.logsumexp(-1, keepdim=True))(x.float()),
    "in 16 bits": lambda x, t: x.log_softmax(-1).gather(-1, t[..., None]),
}


@pytest.mark.parametrize("case", WIDER)
def test_bfloat16_is_as_exact_as_float64_allows(case):
    x, t = batch(torch.bfloat16)
    exact = x.detach().double().requires_grad_()
    want = exact.log_softmax(-1).gather(-1, t[..., None])
    want.sum().backward()
    backend = Rewriting()
    got = torch.compile(WIDER[case], backend=backend, fullgraph=True)(x, t)
    got.sum().backward()
    assert got.dtype == WIDER[case](x, t).dtype
    (call,) = inductor.last_report().calls
    assert call.replaced and call.upcast_removed == (case != "in 16 bits")
    torch.testing.assert_close(
        got.view(-1).double(), want.view(-1), rtol=1e-6 if call.upcast_removed else 1 / 256, atol=1e-6
    )
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1 / 128, atol=1e-6)
    assert not wide(backend, B * S)


def test_brackets_count_from_the_end():
    """As far as there are classes."""
    x, t = rows()
    for least in (-V, -1):
        t[1] = least
        for case in ("brackets", "brackets, logsumexp"):
            assert_same(OF_ROWS[case], x, t, stays=None, rtol=1e-12, atol=1e-12)
    for bad in (-V - 1, V):
        t[1] = bad
        with pytest.raises(IndexError, match="out of bounds"):
            torch.compile(OF_ROWS["brackets"], backend=Rewriting())(x, t)


@pytest.mark.parametrize("bad", [V, -1, -100, 2**40, -(2**63)])
def test_a_target_out_of_range_is_an_error(bad):
    """As gather has it, on a CPU; no target is ignored. Where nothing checks it, it gives NaN."""
    x, t = rows(torch.float32)
    t[1] = bad
    for function in (OF_ROWS["gather"], OF_ROWS["logsumexp, keepdim"]):
        with pytest.raises((IndexError, RuntimeError)):
            function(x, t)
        with pytest.raises(IndexError, match="out of bounds"):
            torch.compile(function, backend=Rewriting())(x, t)
        assert inductor.last_report().calls[0].replaced
    loss, *_ = reference.cross_entropy_forward(x, t, options=RowOptions(ignore_index=NEVER))
    assert loss.isnan().tolist() == [False, True, False, False, False, False]


HEADS = {
    "gather": lambda h, w, t: (h @ w.T).log_softmax(-1).gather(-1, t[..., None]).squeeze(-1),
    "shifted": lambda h, w, t: F.linear(h, w)[:, :-1].float().log_softmax(-1).gather(-1, t[:, 1:, None]),
    "logsumexp": lambda h, w, t: (lambda x: x.gather(-1, t[..., None]) - x.logsumexp(-1, keepdim=True))(h @ w.T / 0.7),
    "brackets": lambda h, w, t: (h[0] @ w.T).to_dense().log_softmax(-1)[torch.arange(S), t[0]],
}


@pytest.mark.parametrize("case", HEADS)
def test_the_head_is_taken_too(case, monkeypatch):
    """Where it is asked for, or without gradients, as of a reference model, where it pays."""
    h, w = torch.randn(B, S, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    t = torch.randint(0, V, (B, S))
    backend, report = assert_same(HEADS[case], h, w, t, stays=None, linear=True, rtol=1e-4, atol=1e-5)
    assert report.calls[0].head and HEAD in backend.targets() and LOSS not in backend.targets()
    monkeypatch.setattr(inductor.rewriting.head, "WORTHWHILE", {"cpu": 0})
    _, report = assert_same(HEADS[case], h, w, t, stays=None, rtol=1e-4, atol=1e-5)
    assert "would take a fourth product for gradients; linear=True takes it" in report.calls[0].head_left
    with torch.no_grad():
        torch.compile(HEADS[case], backend=Rewriting())(h, w, t)
    assert inductor.last_report().calls[0].head


def _rows_written(x, t):
    numbers = torch.arange(6)
    numbers[0] = 5
    return x.log_softmax(-1)[numbers, t]


LEFT = {
    "brackets, fewer rows": (lambda x, t: x.log_softmax(-1)[torch.arange(4), t[:4]], "are not [torch.arange(rows), targets]"),
    "brackets, other rows": (lambda x, t: x.log_softmax(-1)[torch.arange(6).flip(0), t], "are not [torch.arange(rows)"),
    "brackets, from 1": (lambda x, t: x[:5].log_softmax(-1)[torch.arange(1, 5), t[:4]], "are not [torch.arange(rows)"),
    "brackets, every second": (lambda x, t: x[:3].log_softmax(-1)[torch.arange(0, 3, 2), t[:2]], "are not [torch.arange(rows)"),
    "brackets, one class": (lambda x, t: x.log_softmax(-1)[torch.arange(6), t[:1]], "are not [torch.arange(rows), targets]"),
    "brackets, written": (_rows_written, "are not [torch.arange(rows), targets]"),
    "several classes": (lambda x, t: x.log_softmax(-1).gather(-1, t.view(2, 3).repeat(3, 1)), "several classes of a row"),
    "fewer rows": (lambda x, t: x.log_softmax(-1).gather(-1, t[:4, None]), "or not of each row"),
    "no dim": (lambda x, t: torch.take_along_dim(x.log_softmax(-1), t), "no dim"),
    "another dim": (lambda x, t: x.log_softmax(0).gather(-1, t[:, None]), "is not the one of its classes"),
    "other dims": (lambda x, t: (lambda y: y.gather(0, t[None, :] % 6) - y.logsumexp(1))(x[:, :6]), "not those of the other"),
    "broadcast": (lambda x, t: x.gather(-1, t[:, None]) - x.logsumexp(-1), "are not those of the other operand"),
    "two views": (lambda x, t: x[1:].gather(-1, t[1:, None]) - x[:-1].logsumexp(-1, keepdim=True), "two views of the logits"),
    "a shift": (lambda x, t: (x + 1).log_softmax(-1).gather(-1, t[:, None]), "add stands before it"),
    "rounded before": (lambda x, t: (lambda y: y.logsumexp(-1) - y.gather(-1, t[:, None])[:, 0])(x.float()), "stands before it"),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT)
def test_left_alone_with_the_reason(case):
    """Other readers and writers: test_region.py."""
    function, why = LEFT[case]
    assert "xent_ops.token_log_probs" in assert_left_alone(function, rows(), why).why


def test_several_sizes_that_change():
    """Their loss is viewed as what no symbol can say: left alone, and compiled as without the pass."""

    def loss(x, t):
        y, u = x[:, 1:].reshape(-1, V), t[:, 1:].reshape(-1)
        return y.gather(1, u[:, None]).view(x.shape[0], -1) - y.logsumexp(-1).view(x.shape[0], -1)

    x, t = batch()
    torch.testing.assert_close(torch.compile(loss, options=inductor.options(), dynamic=True)(x, t), loss(x, t))
    assert "has several sizes that change" in inductor.last_report().left_alone[0].why
    torch.compiler.reset()
    assert_same(loss, x, t, stays=None)


def test_one_number_has_no_classes():
    numbers = torch.randn(7), torch.tensor([0])
    assert_left_alone(lambda x, t: x.log_softmax(0)[1].gather(0, t), numbers, "does not keep the classes")
    assert_left_alone(lambda x, t: x[1].log_softmax(0).gather(0, t), numbers, "")


OTHERS = {
    "softmax": lambda x, t: x.softmax(-1).gather(-1, t[:, None]) - x.sum(-1, keepdim=True),
    "a sum of log-probabilities": lambda x, t: x.log_softmax(-1)[1:3].sum() + x.logsumexp(-1).mean(),
    "of other logits": lambda x, t: x.gather(-1, t[:, None]) - x.sin().logsumexp(-1, keepdim=True),
    "a diagonal": lambda x, t: x.diagonal() - x.logsumexp(1),
    "an entropy": lambda x, t: (x.softmax(-1) * x.log_softmax(-1)).sum(-1),
    "soft targets": lambda x, t: (x.detach().exp() * x.log_softmax(-1)).sum(-1),
    "transposed": lambda x, t: x.gather(-1, t.view(2, 3).repeat(3, 1)).T - x.logsumexp(-1),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_something_else(case):
    """Not in the report, and not touched."""
    x, t = rows()
    _, report = assert_same(OTHERS[case], x, t, replaced=0)
    assert report.calls == ()


def _dpo(policy, reference_logits, t):
    mask, t = t[:, 1:] != -100, t[:, 1:].clamp(min=0)
    sums = [
        (x[:, :-1].log_softmax(-1).gather(2, t.unsqueeze(2)).squeeze(2) * mask).sum(-1)
        for x in (policy, reference_logits)
    ]
    ratio = sums[0] - sums[1].detach()
    return -F.logsigmoid(0.1 * (ratio[0::2] - ratio[1::2])).mean()


def _grpo(x, old, advantage, t):
    y = x / 0.9
    ratio = ((y.gather(-1, t.unsqueeze(-1)) - y.logsumexp(-1, keepdim=True)).squeeze(-1) - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()


def _sentences(a, b):
    """As MultipleNegativesRankingLoss of sentence-transformers 5 has it, for one direction."""
    numbers = torch.arange(a.size(0))
    scores = torch.mm(F.normalize(a[numbers], dim=-1), F.normalize(b, dim=-1).transpose(0, 1)).to_dense()  # cos_sim
    matrices = {"query_to_doc": scores * 20}
    positive = matrices["query_to_doc"][numbers, torch.arange(0, a.size(0))]
    return -(positive - torch.logsumexp(torch.cat(list(matrices.values()), dim=1), dim=1)).mean()


@pytest.mark.parametrize("loss, found", [(_dpo, 2), (_grpo, 1), (_sentences, 1)])
def test_through_inductor(loss, found):
    """Whole losses, compiled with what stands behind the log-probabilities: masks, ratios, means."""
    x, t = batch(torch.float32)
    t[0, 2] = -100 if loss is _dpo else 3
    inputs = {
        _dpo: (x, torch.randn(B, S, V), t),
        _grpo: (x, torch.randn(B, S), torch.randn(B, S), t),
    }.get(loss, (torch.randn(6, H, requires_grad=True), torch.randn(9, H, requires_grad=True)))
    leaves = [one for one in inputs if one.requires_grad]
    want = loss(*inputs)
    want_grads = torch.autograd.grad(want, leaves)
    got = torch.compile(loss, options=inductor.options(), fullgraph=True)(*inputs)
    assert [call.replaced for call in inductor.last_report().calls] == [True] * found, str(inductor.last_report())
    torch.testing.assert_close(got, want)
    if loss is _sentences and torch.__version__ < "2.12":
        pytest.skip("torch 2.11's AOTAutograd drops the gradient of to_dense")
    torch.testing.assert_close(torch.autograd.grad(got, leaves), want_grads, rtol=1e-4, atol=1e-6)


def _label_smoother(x, t):
    """transformers' LabelSmoother."""
    log_probs = -F.log_softmax(x, -1)
    return log_probs.gather(-1, t[:, None]).mean() + 0.1 * log_probs.sum(-1).mean()


UNKNOWN = {
    "log_softmax of float32 (2, 1024)": _label_smoother,
    "logsumexp of float32 (1024)": lambda x, t: torch.stack([y.logsumexp(-1) for y in x]) - x[:, 0],
    "logsumexp of float32 (2, 1024)": lambda x, t: torch.distributions.Categorical(logits=x).log_prob(t),
    "log of a softmax of float32 (2, 1024)": lambda x, t: x.softmax(-1).gather(1, t[:, None]).squeeze(1).log(),
    "log of a softmax of float32 (2, 1024) ": lambda x, t: (x.float().softmax(-1)[torch.arange(2), t] + 1e-9).log(),
    "log of a sum of exps of float32 (2, 1024)": lambda x, t: x.exp().sum(-1, keepdim=True).log() - x[:, :1],
    "log_softmax of float32 (2, 1024) ": lambda x, t: (F.one_hot(t, x.shape[1]) * x.log_softmax(-1)).sum(-1),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_a_log_softmax_that_stays_is_named(what):
    """The graph stays as it is, and the report says where and why; of few classes, as routers have them, nothing."""
    function, t = UNKNOWN[what], torch.tensor([3, 5])
    for classes in (1024, 64):
        x = torch.randn(2, classes, requires_grad=True)
        torch.compiler.reset()
        torch.testing.assert_close(torch.compile(function, backend=Rewriting(), fullgraph=True)(x, t), function(x, t))
        report = inductor.last_report()
        assert [call.what for call in report.calls] == ([what.strip()] if classes == 1024 else [])
        assert all("test_inductor_by_hand.py" in call.where or "categorical.py" in call.where for call in report.calls)
        assert all("reads it" in call.why and "token_log_probs" in call.why for call in report.left_alone)


def test_a_loss_and_its_log_softmax_are_one_line():
    """Where the pass knows the loss and leaves it alone, the log-softmax has no line of its own."""
    x, t = torch.randn(2, 1024, requires_grad=True), torch.tensor([3, 5])

    def left(x, t):
        log_probs = x.log_softmax(-1)
        return log_probs.gather(-1, t[:, None]).mean() + log_probs.exp().sum(), F.nll_loss(x.exp().log_softmax(-1), t)

    torch.compile(left, backend=Rewriting(), fullgraph=True)(x, t)
    assert [call.what.split(" of ")[0] for call in inductor.last_report().calls] == ["nll_loss", "log_softmax, gather"]
