"""The float32 upcast that feeds the loss alone is removed, and stays where it must."""

import pytest
import torch
import torch.nn.functional as F
from rewriting import Rewriting, V, assert_same, logits, targets

from xent_ops import inductor


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


UPCASTS = {
    "float": lambda x, t: F.cross_entropy(x.float(), t),
    "to": lambda x, t: F.cross_entropy(x.to(torch.float32), t),
    "to keyword": lambda x, t: F.cross_entropy(x.to(dtype=torch.float32), t),
    "type": lambda x, t: F.cross_entropy(x.type(torch.float32), t),
    "twice": lambda x, t: F.cross_entropy(x.float().contiguous().float(), t),
    "view": lambda x, t: F.cross_entropy(x.view(2, 3, V).float().view(-1, V), t),
    "slice": lambda x, t: F.cross_entropy(x.view(2, 3, V).float()[..., :-1, :].contiguous().view(-1, V), t[:4]),
    "slice then upcast": lambda x, t: F.cross_entropy(x.view(2, 3, V)[:, :-1].float().view(-1, V), t[:4]),
    "functions": lambda x, t: F.cross_entropy(torch.flatten(torch.reshape(x.float(), (2, 3, V)), 0, 1), t),
    "transpose": lambda x, t: F.cross_entropy(x.float().view(2, 3, V).transpose(1, 2), t.view(2, 3)),
    "labels written": lambda x, t: _labels_written(x.float(), t),
}


def _labels_written(x, t):
    t = t.clone()
    t[t == 3] = -100
    return F.cross_entropy(x, t.masked_fill_(t == 4, -100))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", UPCASTS)
def test_an_upcast_for_the_loss_alone_is_removed(case, dtype):
    """The same numbers: the upcast is exact, and the gradient is rounded to the logits' dtype once either way."""
    backend, report = assert_same(UPCASTS[case], logits(6, V, dtype=dtype), targets(6), rtol=1e-6, atol=1e-6)
    assert report.replaced[0].upcast_removed, str(report)
    values = [node.meta.get("example_value") for node in backend.graph.nodes]
    wide = [v for v in values if isinstance(v, torch.Tensor) and v.dtype == torch.float32 and v.numel() > 6]
    assert not wide, "no float32 tensor of the logits' size is left"
    loss = next(n for n in backend.graph.nodes if n.target is torch.ops.xent.cross_entropy.default)
    assert loss.args[0].meta["example_value"].dtype == dtype
    assert loss.meta["example_value"].dtype == torch.float32


def _written_after_upcast(x, t):
    y = x * 1
    z = y.float()
    y.mul_(2)
    return F.cross_entropy(z, t) + y.sum()


def _written_by_index(x, t):
    y = x * 1
    z = y.float()
    y[0] = 0
    return F.cross_entropy(z, t) + y.sum()


def _written_by_a_flag(x, t):
    y = x * 1
    z = y.float()
    F.relu(y, True)
    return F.cross_entropy(z, t)


def _two_uses(x, t):
    y = x.float()
    return F.cross_entropy(y, t) + y.square().mean()


def _view_with_two_uses(x, t):
    y = x.float().view(-1, V)
    return F.cross_entropy(y, t) + y.logsumexp(-1).mean()


def _expanded(x, t):
    return F.cross_entropy(x[:1].float().expand(6, V), t)


def _without_grad(x, t):
    y = x * 1
    with torch.no_grad():
        z = y.float()
    return F.cross_entropy(z, t) + y.float().square().mean()


STAYING = {
    "two uses": (_two_uses, "has 2 uses"),
    "a view with two uses": (_view_with_two_uses, "has 2 uses"),
    "mul_": (_written_after_upcast, "mul_ may write"),
    "setitem": (_written_by_index, "setitem may write"),
    "inplace=True": (_written_by_a_flag, "relu may write"),
    "no_grad": (_without_grad, "made without gradients"),
    "expand": (_expanded, ""),  # its backward sums, better in float32
    "not half": (lambda x, t: F.cross_entropy(x.double(), t), ""),
    "bits": (lambda x, t: F.cross_entropy(x.view(torch.int16).view(torch.float16), t) + x.sum().float(), ""),
}


@pytest.mark.parametrize("case", STAYING)
def test_an_upcast_that_must_stay(case):
    function, why = STAYING[case]
    _, report = assert_same(function, logits(6, V, dtype=torch.bfloat16), targets(6))
    assert not report.replaced[0].upcast_removed
    assert why in report.replaced[0].why


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_write_through_out_keeps_the_upcast(dtype):
    def function(x, t):
        y = x * 1
        z = y.float()
        torch.add(torch.zeros_like(y, dtype=dtype), 1, out=y)
        return F.cross_entropy(z, t)

    x, t = torch.randn(6, V).bfloat16(), targets(6)
    torch.testing.assert_close(torch.compile(function, backend=Rewriting())(x, t), function(x, t))
    (call,) = inductor.last_report().calls
    assert "add may write" in call.why and not call.upcast_removed


def test_logits_written_after_the_loss():
    """F.cross_entropy saves its log-softmax for backward, we the logits: autograd would refuse what was fine before."""

    def upcast(x, t):
        y = x * 1
        loss = F.cross_entropy(y.float(), t)
        y.zero_()
        return loss + y.sum()

    def plain(x, t):
        y = x * 1
        loss = F.cross_entropy(y.view(-1, V), t)
        with torch.no_grad():
            y[0].mul_(2)
        return loss

    x, t = logits(6, V, dtype=torch.bfloat16), targets(6)
    _, report = assert_same(upcast, x, t)
    assert "zero_ writes to the logits after the loss" in report.calls[0].why and not report.calls[0].upcast_removed
    _, report = assert_same(plain, x.float().detach().requires_grad_(), t, replaced=0, left=1)
    assert "mul_ writes to the logits after the loss" in report.calls[0].why
    # Nothing is saved where nothing requires grad; other memory may be written.
    torch.compile(upcast, backend=Rewriting())(x.detach(), t)
    assert inductor.last_report().calls[0].upcast_removed

    def elsewhere(x, t):
        loss = F.cross_entropy((x * 1).float(), t)
        with torch.no_grad():
            x.mul_(0.5)
        return loss

    inner = x * 1
    torch.compile(elsewhere, backend=Rewriting())(inner, t).backward()
    assert inductor.last_report().calls[0].upcast_removed


@pytest.mark.parametrize("what", ["logits", "target", "weight"])
def test_written_after_the_loss_of_probabilities(what):
    """There each of the three is read by our backward, whichever asks for a gradient."""

    def function(x, q, w):
        p = q.softmax(-1)
        loss = F.cross_entropy(x, p, w.exp(), label_smoothing=0.1)
        {"logits": x, "target": p.detach(), "weight": w.detach()}[what].mul_(2.0)
        return loss

    def run(function):
        x, q, w = torch.randn(6, V), torch.randn(6, V, requires_grad=what != "target"), torch.randn(V)
        x.requires_grad_(what == "target")
        function(x, q, w).backward()
        return (x if what == "target" else q).grad

    torch.manual_seed(1)
    got = run(torch.compile(function, backend=Rewriting()))
    (call,) = inductor.last_report().calls
    assert call.replaced == (what == "weight")  # of which a copy, exp(), is saved
    assert call.replaced or "mul_ writes to the logits, the target or the weight" in call.why
    torch.manual_seed(1)
    torch.testing.assert_close(got, run(function))


def test_two_inputs_that_share_memory():
    """The fake tensors of x and y do not know that they are one tensor; the pass must not count on it."""

    def function(x, y, t):
        z = x.float()
        y.zero_()
        return F.cross_entropy(z, t)

    target = targets(6)
    x = torch.randn(6, V).bfloat16()
    want = F.cross_entropy(x.float(), target)
    compiled = torch.compile(function, backend=Rewriting())
    torch.testing.assert_close(compiled(x, x.view(-1), target), want)
