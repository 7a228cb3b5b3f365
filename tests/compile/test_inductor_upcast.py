"""The float32 upcast that feeds the loss alone is removed; where it must stay, the call stays with Inductor too."""

import pytest
import torch
import torch.nn.functional as F
from rewriting import Rewriting, V, assert_left_alone, assert_same, logits, targets, wide

from xent_ops import inductor

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


@pytest.mark.parametrize("case, dtype", [*((case, torch.bfloat16) for case in UPCASTS), ("float", torch.float16)])
def test_an_upcast_for_the_loss_alone_is_removed(case, dtype):
    """The same numbers: the upcast is exact, and the gradient is rounded to the logits' dtype once either way."""
    backend, report = assert_same(UPCASTS[case], logits(6, V, dtype=dtype), targets(6), rtol=1e-6, atol=1e-6)
    assert report.replaced[0].upcast_removed, str(report)
    assert not wide(backend, 6), "no float32 tensor of the logits' size is left"
    loss = next(n for n in backend.graph.nodes if n.target is torch.ops.xent.cross_entropy.default)
    assert loss.args[0].meta["example_value"].dtype == dtype
    assert loss.meta["example_value"].dtype == torch.float32


STAYING = {
    "its own target": (lambda x, t: F.cross_entropy(y := x.float(), y), "y is its target or weight as well"),
    "expand": (
        lambda x, t: F.cross_entropy(x[:1].float().expand(6, V), t),
        "float_1 stands before it",
    ),  # its backward sums
    "not half": (lambda x, t: F.cross_entropy(x.double(), t), "double stands before it"),
    "narrower": (lambda x, t: F.cross_entropy(x.float().bfloat16(), t), "bfloat16 stands before it"),
}


@pytest.mark.parametrize("case", STAYING)
def test_an_upcast_that_must_stay(case):
    """Our operator would have it written to memory, which Inductor's own code does not. test_region.py has the rest."""
    function, why = STAYING[case]
    assert_left_alone(function, (logits(6, V, dtype=torch.bfloat16), targets(6)), why)


def test_bits_are_logits_of_their_own():
    function = lambda x, t: F.cross_entropy(x.view(torch.int16).view(torch.float16), t) + x.sum().float()  # noqa: E731
    assert_same(function, logits(6, V, dtype=torch.bfloat16), targets(6))


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
