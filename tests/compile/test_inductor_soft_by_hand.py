"""The cross entropy of soft targets that a model writes out, as timm does, becomes the operator of probabilities."""

import pytest
import torch
import torch.nn.functional as F
from finding_heads import HEAD
from rewriting import Rewriting, V, assert_left_alone, assert_same

from xent_ops import inductor

LOSS = torch.ops.xent.soft_cross_entropy_forward.default


def inputs(dtype=torch.float64):
    """(logits (6, V), probabilities). These need not add up to 1."""
    return torch.randn(6, V, dtype=dtype, requires_grad=True), torch.rand(6, V, dtype=dtype) / V


SAME = {
    "timm": lambda x, p: torch.sum(-p * F.log_softmax(x, dim=-1), dim=-1).mean(),
    "minus outside": lambda x, p: -(p * x.log_softmax(1)).sum(1).mean(),
    "minus inside": lambda x, p: torch.mean(torch.sum(-(F.log_softmax(x, dim=1) * p), dim=1)),
    "no minus": lambda x, p: torch.mul(torch.log_softmax(x, -1), p).sum(dim=[-1]),
    "two": lambda x, p: -(-p * x.log_softmax(-1)).sum(-1),
    "keepdim": lambda x, p: -(p * x.log_softmax(-1)).sum(-1, keepdim=True),
    "over all": lambda x, p: -(p * F.log_softmax(x, -1)).sum() / 6,
    "one row": lambda x, p: -(p[0] * x[0].log_softmax(0)).sum(),
    "of three dimensions": lambda x, p: -(p.view(2, 3, V) * x.view(2, 3, V).log_softmax(-1)).sum(-1),
    "pixels": lambda x, p: -(p.view(2, 3, V).mT * x.view(2, 3, V).mT.contiguous().log_softmax(1)).sum(1),
    "views behind": lambda x, p: -(p.view(2, 3, V)[:, 1:] * x.view(2, 3, V).log_softmax(-1)[:, 1:]).sum(2),
    "masked": lambda x, p: (-(p * x.log_softmax(-1)).sum(-1) * (p[:, 0] > 0.01)).sum(),
    "a temperature": lambda x, p: -(p * (x / 2).log_softmax(-1)).sum(-1) * 4,
}


@pytest.mark.parametrize("case", SAME)
def test_replaced(case):
    """Value and gradient in float64, and nothing of what was written out stays."""
    backend, report = assert_same(SAME[case], *inputs(), stays=None, rtol=1e-12, atol=1e-12)
    (call,) = report.calls
    assert call.what.startswith("log_softmax, sum of float64") and "test_inductor_soft_by_hand.py" in call.where
    assert call.logit_scale == (0.5 if case == "a temperature" else 1.0)
    assert LOSS in backend.targets() and not {F.log_softmax, torch.log_softmax, "log_softmax"} & {*backend.targets()}


@pytest.mark.parametrize("weights", ["advantages", "log-probabilities"])
def test_weights_that_are_no_probabilities(weights):
    """As in policy gradients: a sum that is written out takes any numbers, of which the operator checks none."""
    x, p = inputs()
    assert_same(
        SAME["timm"], x, p - p.mean() if weights == "advantages" else p.log(), stays=None, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("case", ["timm", "over all"])
def test_any_number_of_rows(case):
    x, p = inputs()
    for dynamic in (True, None):
        torch.compiler.reset()
        compiled = torch.compile(SAME[case], backend=Rewriting(), dynamic=dynamic, fullgraph=True)
        for n in (6, 4, 5):
            given = x[:n].detach(), p[:n].clone()
            torch.testing.assert_close(compiled(*given), SAME[case](*given))
        report = inductor.last_report()
        assert len(report.replaced) == report.graphs == (1 if dynamic else 2)


@pytest.mark.parametrize("case", ["timm", "keepdim"])
def test_bfloat16_is_as_exact_as_float64_allows(case):
    """Beside float32 probabilities."""
    x, p = inputs(torch.bfloat16)
    exact, p = x.detach().double().requires_grad_(), p.float()
    SAME[case](exact, p.double()).sum().backward()
    got = torch.compile(SAME[case], backend=Rewriting(), fullgraph=True)(x, p)
    got.sum().backward()
    assert inductor.last_report().calls[0].replaced and got.dtype == torch.float32
    torch.testing.assert_close(got.double(), SAME[case](exact, p.double()), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1 / 128, atol=1e-7)


def _minus_written(x, p):
    minus = -p
    minus[:, 0] = 0
    return (minus * x.log_softmax(-1)).sum(-1)


LEFT = {
    "what is written to is not what is behind it": (_minus_written, "made by minus, which Inductor fuses"),
    "integers": (lambda x, p: -((p > 0.01).long() * x.log_softmax(-1)).sum(-1), "its target has dtype torch.int64"),
    "probabilities that require grad": (
        lambda x, p: -(x.sin() * x.log_softmax(-1)).sum(-1),
        "its target requires grad",
    ),
    "made by softmax": (lambda x, p: -(p.softmax(-1) * x.log_softmax(-1)).sum(-1), "softmax, which Inductor fuses"),
    "made pointwise": (
        lambda x, p: -((0.9 * p + 0.1).view(6, V) * x.log_softmax(-1)).sum(-1),
        "add, which Inductor fuses",
    ),
    "one for all rows": (lambda x, p: -(p[:1] * x.log_softmax(-1)).sum(-1), "its target has another shape"),
    "over rows": (lambda x, p: -(p * x.log_softmax(-1)).sum(0), "is not the one of its classes"),
    "over both": (lambda x, p: -(p * x.log_softmax(-1)).sum((0, 1)), "something other than the classes"),
    "as another dtype": (lambda x, p: -(p * x.log_softmax(-1)).sum(-1, dtype=torch.float32), "something other than"),
    "in float64": (lambda x, p: -(p * x.float().log_softmax(-1)).sum(-1), "has dtype torch.float64"),
    "a shift": (lambda x, p: -(p * (x + 1).log_softmax(-1)).sum(-1), "add stands before it"),
}


@pytest.mark.parametrize("case", LEFT)
def test_left_alone_with_the_reason(case):
    """Other readers and writers: test_region.py."""
    function, why = LEFT[case]
    assert "xent_ops.cross_entropy takes class probabilities" in assert_left_alone(function, inputs(), why).why


OTHERS = {
    "entropy": lambda x, p: (lambda y: -(y.exp() * y).sum(-1).mean())(x.log_softmax(-1)),
    "entropy of softmax": lambda x, p: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1),
    "a number": lambda x, p: -(2 * x.log_softmax(-1)).sum(-1),
    "squared": lambda x, p: (x.log_softmax(-1) * x.log_softmax(-1)).sum(-1),
    "of probabilities": lambda x, p: -(p * x.softmax(-1)).sum(-1),
    "a mean": lambda x, p: -(p * x.log_softmax(-1)).mean(-1),
}


@pytest.mark.parametrize("case", OTHERS)
def test_something_else(case):
    _, report = assert_same(OTHERS[case], *inputs(), replaced=0)
    assert report.calls == ()


def test_the_head_stays():
    """Of class probabilities all logits are made."""
    h, w = torch.randn(6, 8, requires_grad=True), torch.randn(V, 8, requires_grad=True)
    backend, report = assert_same(
        lambda h, w, p: SAME["timm"](h @ w.T, p), h, w, torch.rand(6, V), linear=True, stays=None
    )
    assert "its target is class probabilities" in report.calls[0].head_left and HEAD not in backend.targets()


def test_through_inductor():
    x, p = inputs(torch.float32)
    (want,) = torch.autograd.grad(SAME["timm"](x, p), x)
    loss = torch.compile(SAME["timm"], options=inductor.options(), fullgraph=True)(x, p)
    torch.testing.assert_close(loss, SAME["timm"](x, p))
    torch.testing.assert_close(torch.autograd.grad(loss, x)[0], want, rtol=1e-4, atol=1e-7)
    assert len(inductor.last_report().replaced) == 1
