"""The float32 upcast that feeds the loss alone is removed; where it must stay, the call stays with Inductor too."""

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
    y = x.cumsum(0)
    z = y.float()
    y.mul_(2)
    return F.cross_entropy(z, t) + y.sum()


def _written_by_index(x, t):
    y = x.cumsum(0)
    z = y.float()
    y[0] = 0
    return F.cross_entropy(z, t) + y.sum()


def _written_by_a_flag(x, t):
    y = x.cumsum(0)
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
    y = x.cumsum(0)
    with torch.no_grad():
        z = y.float()
    return F.cross_entropy(z, t) + y.float().square().mean()


def _its_own_target(x, t):
    y = x.float()
    return F.cross_entropy(y, y)


STAYING = {
    "two uses": (_two_uses, "y is read by square as well"),
    "a view with two uses": (_view_with_two_uses, "y is read by logsumexp as well"),
    "its own target": (_its_own_target, "y is its target or weight as well"),
    "mul_": (_written_after_upcast, "mul_ writes to the logits"),
    "setitem": (_written_by_index, "setitem writes to the logits"),
    "inplace=True": (_written_by_a_flag, "relu writes to the logits"),
    "no_grad": (_without_grad, "made without gradients"),
    "expand": (_expanded, "float_1 stands before it"),  # its backward sums, better in float32
    "not half": (lambda x, t: F.cross_entropy(x.double(), t), "double stands before it"),
    "narrower": (lambda x, t: F.cross_entropy(x.float().bfloat16(), t), "bfloat16 stands before it"),
}


@pytest.mark.parametrize("case", STAYING)
def test_an_upcast_that_must_stay(case):
    """Our operator would have it written to memory, which Inductor's own code does not: the call is left alone."""
    function, why = STAYING[case]
    tolerances = {"rtol": 0.02, "atol": 1e-3} if case == "narrower" else {}
    backend, report = assert_same(
        function, logits(6, V, dtype=torch.bfloat16), targets(6), replaced=0, left=1, **tolerances
    )
    assert why in report.left_alone[0].why
    assert not any("xent" in str(target) for target in backend.targets())


def test_bits_are_logits_of_their_own():
    function = lambda x, t: F.cross_entropy(x.view(torch.int16).view(torch.float16), t) + x.sum().float()  # noqa: E731
    assert_same(function, logits(6, V, dtype=torch.bfloat16), targets(6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_write_through_out(dtype):
    def function(x, t):
        y = x.cumsum(0)
        z = y.float()
        torch.add(torch.zeros_like(y, dtype=dtype), 1, out=y)
        return F.cross_entropy(z, t)

    x, t = torch.randn(6, V).bfloat16(), targets(6)
    torch.testing.assert_close(torch.compile(function, backend=Rewriting())(x, t), function(x, t))
    (call,) = inductor.last_report().calls
    assert "add writes to the logits" in call.why and not call.replaced


def test_logits_written_after_the_loss():
    """F.cross_entropy saves its log-softmax for backward, we the logits: autograd would refuse what was fine before."""
    w = torch.randn(V, V).bfloat16()

    def upcast(x, t):
        y = x @ w
        loss = F.cross_entropy(y.float(), t)
        y.zero_()
        return loss + y.sum()

    def plain(x, t):
        y = x @ w.float()
        loss = F.cross_entropy(y.view(-1, V), t)
        with torch.no_grad():
            y[0].mul_(2)
        return loss

    x, t = logits(6, V, dtype=torch.bfloat16), targets(6)
    _, report = assert_same(upcast, x, t, replaced=0, left=1)
    assert "zero_ may write to the logits after it, whose backward needs it" in report.calls[0].why
    _, report = assert_same(plain, x.float().detach().requires_grad_(), t, replaced=0, left=1)
    assert "mul_ may write to the logits after it, whose backward needs it" in report.calls[0].why
    # Nothing is saved where nothing requires grad; other memory may be written.
    torch.compile(upcast, backend=Rewriting())(x.detach(), t)
    assert inductor.last_report().calls[0].upcast_removed

    def elsewhere(x, t):
        loss = F.cross_entropy((x @ w).float(), t)
        with torch.no_grad():
            x.sign_()
        return loss

    torch.compile(elsewhere, backend=Rewriting())(x.detach(), t)
    assert inductor.last_report().calls[0].upcast_removed


def run_probabilities(function, grad_of):
    """The gradient of logits ("logits"), or of what the probabilities are made of ("target")."""
    torch.manual_seed(1)
    x, q, w = torch.randn(6, V), torch.randn(6, V), torch.rand(V)
    leaf = (x if grad_of == "logits" else q).requires_grad_()
    function(x, q, w).backward()
    return leaf.grad


@pytest.mark.parametrize("what, grad_of", [("logits", "target"), ("target", "logits")])
def test_written_after_the_loss_of_probabilities(what, grad_of):
    """There both are read by our backward, whichever asks for a gradient; with label smoothing torch saves a copy."""

    def function(x, q, w):
        p = q.softmax(-1)
        loss = F.cross_entropy(x, p, w, label_smoothing=0.1)
        {"logits": x, "target": p.detach()}[what].mul_(2.0)
        return loss

    got = run_probabilities(torch.compile(function, backend=Rewriting()), grad_of)
    (call,) = inductor.last_report().calls
    assert not call.replaced and "mul_ may write to the " in call.why
    torch.testing.assert_close(got, run_probabilities(function, grad_of))


@pytest.mark.parametrize("grad_of", ["logits", "target"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_weights_written_after_the_loss(smoothing, grad_of):
    """torch saves and protects the class weights of probabilities itself, so that the pass need not; copies may be
    written."""

    def function(x, q, w, *, written):
        used = w * 1.0
        loss = F.cross_entropy(x, q.softmax(-1), used, label_smoothing=smoothing)
        (used if written else w).mul_(2.0)
        return loss

    for run in (function, torch.compile(function, backend=Rewriting())):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run_probabilities(lambda *args, run=run: run(*args, written=True), grad_of)
        run_probabilities(lambda *args, run=run: run(*args, written=False), grad_of)
    assert len(inductor.last_report().replaced) == 2


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
    torch.testing.assert_close(compiled(x, torch.from_dlpack(x), target), want)  # with a storage of its own
