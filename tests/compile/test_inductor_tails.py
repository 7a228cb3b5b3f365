"""Softcap and scale before the loss become options of the operator; what it cannot express is left alone."""

import math
import operator

import pytest
import torch
import torch.nn.functional as F
from rewriting import Rewriting, V, assert_left_alone, assert_same, targets, wide
from torch import nn

from xent_ops import inductor

CAPS = {
    "Gemma 2": lambda x: torch.tanh(x / 30.0) * 30.0,
    "nanochat": lambda x: 30 * torch.tanh(x.float() / 30),
    "method": lambda x: 30.0 * (x / 30.0).tanh(),
    "by the inverse": lambda x: 30.0 * torch.tanh(x * (1 / 30.0)),
    "functions": lambda x: torch.mul(torch.tanh(torch.div(x, 30.0)), 30.0),
    "operators": lambda x: operator.mul(30.0, operator.truediv(x, 30.0).tanh()),
    "methods": lambda x: x.div(30).tanh().mul(30),
    "keyword": lambda x: torch.mul(torch.tanh(torch.true_divide(x, other=30.0)), other=30.0),
    "nn.Tanh": lambda x: nn.Tanh()(x / 30.0) * 30.0,
    "F.tanh": lambda x: F.tanh(x / 30.0) * 30.0,
    "two factors": lambda x: 3.0 * torch.tanh(x / 30.0) * 10,
    "negative": lambda x: -30.0 * torch.tanh(-x / 30.0),
    "cast within": lambda x: 30.0 * torch.tanh(x / 30.0).float(),
    "cast between": lambda x: 30.0 * torch.tanh((x / 30.0).float()),
    "in place": lambda x: x.div_(30.0).tanh_() * 30.0,
}


def _statements(x):
    x.div_(60.0)
    x *= 2.0
    x.tanh_()
    return x * 30.0


CAPS["in-place statements"] = _statements
VIEWS = {
    "plain": lambda x, cap, t: F.cross_entropy(cap(x), t),
    "upcast behind": lambda x, cap, t: F.cross_entropy(cap(x).float(), t),
    "upcast before": lambda x, cap, t: F.cross_entropy(cap(x.float()), t),
    "sequence": lambda x, cap, t: F.cross_entropy(cap(x.view(2, 3, V)).float().view(-1, V), t),
    "shifted": lambda x, cap, t: F.cross_entropy(
        cap(x.view(2, 3, V))[..., :-1, :].contiguous().view(-1, V).float(), t.view(2, 3)[:, 1:].reshape(-1)
    ),
    "transposed": lambda x, cap, t: F.cross_entropy(cap(x.view(2, 3, V)).transpose(1, 2), t.view(2, 3)),
}


def inputs(dtype=torch.float32):
    return (40 * torch.randn(6, 8)).to(dtype).requires_grad_(), torch.randn(8, V).to(dtype).requires_grad_(), targets(6)


def op_of(backend):
    return next(n for n in backend.graph.nodes if n.target is torch.ops.xent.cross_entropy.default)


@pytest.mark.parametrize(
    "cap, view",
    [
        *((cap, "plain") for cap in CAPS),
        *((cap, view) for cap in ("Gemma 2", "in-place statements") for view in VIEWS if view != "plain"),
    ],
)
def test_softcap_in_every_spelling(cap, view):
    function = lambda h, w, t: VIEWS[view](h @ w, CAPS[cap], t)  # noqa: E731
    backend, report = assert_same(function, *inputs(), rtol=1e-4, atol=1e-5)
    (call,) = report.replaced
    assert call.softcap == pytest.approx(30.0, rel=1e-14) and call.logit_scale == 1.0, str(report)
    names = [getattr(target, "__name__", target) for target in backend.targets()]
    assert not any("tanh" in str(name) or ("mul" in str(name) and name != "matmul") for name in names), names
    assert op_of(backend).kwargs["softcap"] == call.softcap and "logit_scale" not in op_of(backend).kwargs


SCALES = {
    "Granite": (lambda x: x / 8.0, 1 / 8.0),
    "Cohere": (lambda x: x * 0.0625, 0.0625),
    "number first": (lambda x: 0.25 * x, 0.25),
    "integer": (lambda x: x * 2, 2.0),
    "in place": (lambda x: x.div_(4.0), 0.25),
    "twice": (lambda x: (x * 0.5).float() / 4, 0.125),
    "negated": (lambda x: -x, -1.0),
    "functions": (lambda x: torch.div(torch.multiply(x, 3.0), 6.0), 0.5),
}


OTHER_DTYPES = [(case, dtype) for case in ("Granite", "twice") for dtype in (torch.float32, torch.float64)]


@pytest.mark.parametrize("case, dtype", [*((case, torch.bfloat16) for case in SCALES), *OTHER_DTYPES], ids=str)
def test_scale(case, dtype):
    scale, number = SCALES[case]
    cast = (lambda x: x) if dtype == torch.float64 else (lambda x: x.float())
    # float64's "twice" would round to float32
    if case == "twice" and dtype == torch.float64:
        scale = lambda x: (x * 0.5) / 4  # noqa: E731
    tolerances = {"rtol": 0.03, "atol": 0.02} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    function = lambda h, w, t: F.cross_entropy(cast(scale(h @ w)), t)  # noqa: E731
    backend, report = assert_same(function, *inputs(dtype), **tolerances)
    (call,) = report.replaced
    assert call.softcap is None and call.logit_scale == pytest.approx(number) and f"logit_scale={number}" in str(call)
    assert dtype != torch.bfloat16 or not wide(backend, 6 * 8)


@pytest.mark.parametrize(
    "tail, cap, scale",
    [
        (lambda x: 30 * torch.tanh(x * 0.25 / 30), 30, 0.25),
        (lambda x: 15 * torch.tanh(x / 30), 15, 0.5),
        (lambda x: 0.5 * (30 * torch.tanh(x / 30)), 15, 0.5),
        (lambda x: torch.tanh(x), 1, 1),
        (lambda x: torch.tanh(0.1 * x), 1, 0.1),
        (lambda x: -2 * torch.tanh(x), 2, -2),
    ],
)
def test_both(tail, cap, scale):
    """a * tanh(b * x) is a softcap of a and a scale of a * b, in whatever order the model has its numbers."""
    _, report = assert_same(lambda h, w, t: F.cross_entropy(tail(h @ w), t), *inputs(), rtol=1e-4, atol=1e-5)
    (call,) = report.replaced
    assert call.softcap == pytest.approx(cap) and call.logit_scale == pytest.approx(scale)


def test_class_probabilities():
    def function(h, w, p):
        return F.cross_entropy(30 * torch.tanh(0.5 * (h @ w) / 30), p.softmax(-1), label_smoothing=0.1)

    h, w, _ = inputs()
    _, report = assert_same(function, h, w, torch.randn(6, V).requires_grad_(), rtol=1e-4, atol=1e-5)
    assert (report.replaced[0].softcap, report.replaced[0].logit_scale) == (30.0, 0.5)


def test_bfloat16_is_as_exact_as_float64_allows():
    """Where a model computes its cap in bfloat16, the operator rounds nothing in between, as Inductor's code."""

    def function(x, t):
        x = x / 30.0
        x = torch.tanh(x)
        x = x * 30.0
        return F.cross_entropy(x.float(), t)

    x, t = (20 * torch.randn(64, V)).bfloat16().requires_grad_(), torch.randint(0, V, (64,))
    exact = x.detach().double().requires_grad_()
    want = F.cross_entropy(30 * torch.tanh(exact / 30), t)
    want.backward()
    got = torch.compile(function, backend=Rewriting())(x, t)
    got.backward()
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1 / 128, atol=1e-7)
    eager = function(x, t)
    assert (got - want).abs() < 0.1 * (eager - want).abs()


def _masked_in_place(x, t):
    x[:, -1] = -math.inf
    return F.cross_entropy(x, t.clamp(max=3))


def _in_place_after_a_view(x, t):
    view = x.view(2, 3, V)
    x.div_(30.0)
    return F.cross_entropy(view.view(6, V), t)


STAYING = {
    "two caps": (lambda x, t: F.cross_entropy((3 * x.tanh()).tanh(), t), "a second softcap"),
    "shift": (lambda x, t: F.cross_entropy(30 * torch.tanh(x / 30) + 1.0, t), "add stands before it"),
    "shift inside": (lambda x, t: F.cross_entropy((x + 1.0) / 30, t), "add stands before it"),
    "shift in place": (lambda x, t: F.cross_entropy((x / 30).add_(1.0), t), "add_ stands before it"),
    "tensor as scale": (lambda x, t: F.cross_entropy(x * t.sum(), t), "mul stands before it"),
    "number by logits": (lambda x, t: F.cross_entropy(2.0 / (x.exp() + 1), t), "truediv stands before it"),
    "other function": (lambda x, t: F.cross_entropy(30 * torch.sigmoid(x / 30), t), "sigmoid stands before it"),
    "rounding_mode": (lambda x, t: F.cross_entropy(torch.div(x, 3, rounding_mode="floor"), t), "div stands before it"),
    "by 0": (lambda x, t: F.cross_entropy(0 * x.tanh(), t), "multiplied by 0"),
    "by 0 alone": (lambda x, t: F.cross_entropy(0 * x, t), "its logits are multiplied by 0"),
    "a temperature that float32 cannot hold": (lambda x, t: F.cross_entropy(x * 1e300 * 1e300, t), "not finite"),
    "float64 between": (lambda x, t: F.cross_entropy((x.double() / 30).float(), t), "stands before it"),
    "masked in place": (_masked_in_place, "setitem writes to the logits before it"),
    "in place after a view": (_in_place_after_a_view, "div_ writes to the logits before it"),
}


@pytest.mark.parametrize("case", STAYING)
def test_left_alone_as_a_whole(case):
    """So that the tail costs what it costs compiled without the pass. Other readers and writers: test_region.py."""
    function, why = STAYING[case]
    assert_left_alone(lambda h, w, t: function(h @ w, t), inputs(), why)


def test_views_of_the_product_may_have_other_readers():
    def function(h, w, t):
        x = (h @ w).view(2, 3, V)
        hits = (x.detach().argmax(-1).view(-1) == t).float().mean()
        return F.cross_entropy((30 * torch.tanh(x / 30)).view(-1, V), t) + 0 * hits

    _, report = assert_same(function, *inputs(), rtol=1e-4, atol=1e-5)
    assert report.replaced[0].softcap == 30.0


def test_a_dynamic_scale_is_no_number():
    """torch makes a Python float an input of the graph where it changes from call to call."""
    backend = Rewriting()
    compiled = torch.compile(lambda x, t, s: F.cross_entropy(x * s, t), backend=backend, dynamic=True)
    x, t = torch.randn(6, V), targets(6)
    for scale in (0.5, 0.25, 0.125):
        torch.testing.assert_close(compiled(x, t, scale), F.cross_entropy(x * scale, t))


def test_the_users_hooks_see_no_tensor_of_the_pass():
    seen = []

    def pack(tensor):
        seen.append(type(tensor))
        return tensor

    h, w, t = inputs(torch.bfloat16)
    for function in (CAPS["nanochat"], lambda x: x.float()):
        compiled = torch.compile(lambda h, w, t, f=function: F.cross_entropy(f(h @ w), t), backend=Rewriting())
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            compiled(h, w, t).backward()
        assert len(inductor.last_report().replaced) == 1
    assert not [kind for kind in seen if kind not in (torch.Tensor, nn.Parameter)]


@pytest.mark.parametrize("tail", ["nanochat", "in-place statements"])
def test_through_inductor(tail):
    """The whole way: no second tensor of the logits' size in the generated code, and float64's gradient."""
    h, w, t = inputs(torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in (h, w)]
    logits64 = (exact[0] @ exact[1]).detach().bfloat16().double().requires_grad_()
    want = F.cross_entropy(30 * torch.tanh(logits64 / 30), t)
    want.backward()
    step = torch.compile(lambda h, w, t: F.cross_entropy(CAPS[tail](h @ w), t), options=inductor.options())
    got = step(h, w, t)
    got.backward()
    assert inductor.last_report().replaced[0].softcap == 30.0
    torch.testing.assert_close(got.double(), want.detach(), rtol=0.01, atol=1e-3)
    want_grad = exact[0].detach().T @ logits64.grad
    assert (w.grad.double() - want_grad).norm() < 0.01 * want_grad.norm()
