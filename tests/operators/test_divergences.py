"""Divergences of rows, (5, ...), and the gradient from an upstream gradient of each: values, ties, masks, rounding."""

import math

import pytest
import torch
from helpers.covering import covering
from helpers.divergence_oracle import divergences, rounded
from helpers.interpreter import INTERPRETED

from xent_ops.kernels.divergences import FIELDS

pytestmark = pytest.mark.interpreter

ops, INF = torch.ops.xent, math.inf
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
ALL = ",".join(FIELDS)
ASKED = ["kl", "reverse_kl", "mixture", "overlap", "log_prob", "kl,overlap", "overlap,mixture", ALL]
OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 2.0},
    "caps": {"softcap": 20.0, "teacher_softcap": 8.0, "logit_scale": 1.5, "temperature": 0.5},
    "scales": {"teacher_logit_scale": 0.5, "logit_scale": -1.5, "ignore_index": 3},
    "padding": {"num_classes": 30},
    "beta": {"beta": 0.875},
}
# Of a value, and of a gradient beside the largest or one: float32 sums; 16-bit gradients are rounded once.
NEAR = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def problem(device, dtype=torch.float32, rows=6, classes=37, scale=3.0):
    generator = torch.Generator().manual_seed(0)
    both = [(scale * torch.randn(rows, classes, generator=generator)).to(dtype) for _ in range(2)]
    target = torch.randint(0, min(30, classes), (rows,), generator=generator)
    return *(logits.to(device) for logits in both), target.to(device)


def expected(logits, teacher, target, upstream, teacher_lse, names, **options):
    """(values, gradient) in float64 of the fields that are asked for."""
    leaf = logits.detach().cpu().double().clone().requires_grad_()
    lse = None if teacher_lse is None else teacher_lse.cpu().double().sum(0)
    found = divergences(leaf, teacher.double().cpu(), target.cpu(), None, lse, **options)
    counted = target.cpu() != options.get("ignore_index", -100)
    zero = torch.zeros(len(counted), dtype=torch.float64)
    values = torch.stack([
        torch.where(counted, value, 0.0) if name in names else zero
        for name, value in zip(FIELDS, found, strict=False)
    ])  # fmt: skip
    (grad,) = torch.autograd.grad((values * upstream.double().cpu()).sum(), leaf)
    return values.detach(), grad


@pytest.mark.parametrize("fields, name, dtype, other_lse", covering(ASKED, OPTIONS, DTYPES, [False, True]), ids=str)
def test_values(device, fields, name, dtype, other_lse):
    """Of every combination of fields, of both forms, and by the formula; another lse of the teacher is the overlap's."""
    rows = 4 if INTERPRETED else 6
    logits, teacher, target = problem(device, dtype, rows)
    options = OPTIONS[name]
    target[1::3] = options.get("ignore_index", -100)
    lse, wide = None, torch.float64 if dtype == torch.float64 else torch.float32
    upstream = torch.randn(5, rows, generator=torch.Generator().manual_seed(1)).to(device, wide)
    if other_lse:
        plain = ops.divergences_forward(logits, teacher, target, **options)[1][6]
        lse = plain + torch.rand(rows, generator=torch.Generator().manual_seed(2)).to(plain)
        lse = torch.stack([lse, torch.full_like(lse, 2.0**-20)])
    right, of_logits = expected(logits, teacher, target, upstream, lse, fields.split(","), **options)
    values, statistics = ops.divergences_forward(logits, teacher, target, lse, fields=fields, **options)
    assert values.dtype == statistics.dtype == wide and values.shape == (5, rows) and statistics.shape == (11, rows)
    torch.testing.assert_close(values.double().cpu(), right, rtol=NEAR[wide], atol=NEAR[wide])
    grad = ops.divergences_backward(upstream, logits, teacher, target, statistics, fields=fields, **options)
    error = (grad.double().cpu() - of_logits).abs().max() / of_logits.abs().max().clamp(min=1.0)
    assert grad.dtype == dtype and error < NEAR[dtype], error
    over = logits.clone()
    assert ops.divergences_backward_(upstream, over, teacher, target, statistics, fields=fields, **options) is None
    assert torch.equal(over, grad)
    leaf = logits.clone().requires_grad_()
    ops.divergences_forward(leaf, teacher, target, lse, fields=fields, **options)[0].mul(upstream).sum().backward()
    assert torch.equal(leaf.grad, grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_forward_and_the_backward_see_the_same_classes_below(device, dtype):
    """Where s and t differ by a rounding, each must find the same s <= t, or the gradient would not sum to zero."""
    rows = 16 if INTERPRETED else 64
    logits, _, target = problem(device, dtype, rows, classes=5)
    noise = torch.randn(rows, 5, generator=torch.Generator().manual_seed(3)).to(device)
    for far in (0.0, 2.0**-24, 2.0**-22, 2.0**-20):
        teacher = logits.float() * (1 + far * noise) + 100.0 * (far != 0.0)
        _, statistics = ops.divergences_forward(logits, teacher, target, fields="overlap")
        wide = logits.float()  # the gradient is not rounded
        upstream = torch.ones(5, rows, device=device)
        grad = ops.divergences_backward(upstream, wide, teacher, target, statistics, fields="overlap")
        assert grad.sum(-1).abs().max() < 1e-6


def test_equal_logits(device):
    """All classes tie: no gradient. The overlap is one but for rounding, and is not clamped: that would end a gradient."""
    logits, _, target = problem(device, rows=4, classes=1000)
    values, statistics = ops.divergences_forward(logits, logits.clone(), target, fields="overlap")
    assert (values[3] - 1.0).abs().max() < 1e-6
    upstream = torch.ones(5, 4, device=device)
    grad = ops.divergences_backward(upstream, logits, logits.clone(), target, statistics, fields="overlap")
    assert grad.abs().max() < 1e-6


def test_the_gradient_of_the_overlap_is_discontinuous(device):
    """Logits that differ by 1e-6 have an overlap of 1 and a gradient of the size of s. The docs say so."""
    logits, _, target = problem(device, rows=4, classes=1000)
    teacher = logits + 1e-6 * torch.randn(4, 1000, generator=torch.Generator().manual_seed(1)).to(device)
    values, statistics = ops.divergences_forward(logits, teacher, target, fields="overlap")
    grad = ops.divergences_backward(
        torch.ones(5, 4, device=device), logits, teacher, target, statistics, fields="overlap"
    )
    assert (values[3] - 1.0).abs().max() < 2e-6 and grad.abs().sum(-1).min() > 0.1


@pytest.mark.parametrize("who", ["both", "student", "teacher"])
def test_masked_classes(device, who):
    """0 log 0 is 0. A class that one of them lacks: kl or reverse_kl is infinite, overlap and its gradient are finite."""
    logits, teacher, target = problem(device, rows=2)
    target[:], zeros = 0, torch.zeros(5, 2, device=device)
    if who != "teacher":
        logits[:, 5] = -INF
    if who != "student":
        teacher[:, 5] = -INF
    values, statistics = ops.divergences_forward(logits, teacher, target, fields=ALL)
    assert not values.isnan().any()
    assert values[0].isinf().all() == (who == "student") and values[1].isinf().all() == (who == "teacher")
    assert values[2:].isfinite().all()
    upstream = zeros.clone()
    upstream[3] = 1.0  # a coefficient of 0 beside an infinite divergence
    grad = ops.divergences_backward(upstream, logits, teacher, target, statistics, fields=ALL)
    alone = ops.divergences_forward(logits, teacher, target, fields="overlap")[1]
    assert grad.isfinite().all()
    assert torch.equal(grad, ops.divergences_backward(upstream, logits, teacher, target, alone, fields="overlap"))


def test_no_common_class(device):
    """The overlap is 0 and so is its gradient: -log(overlap.clamp(min)) alone teaches such a row nothing."""
    logits, teacher = torch.full((1, 4), -INF, device=device), torch.full((1, 4), -INF, device=device)
    logits[0, 0], teacher[0, 1] = 1.0, 1.0
    leaf, target = logits.requires_grad_(), torch.zeros(1, dtype=torch.int64, device=device)
    overlap = ops.divergences_forward(leaf, teacher, target, fields="overlap")[0][3]
    loss = -overlap.clamp(min=1e-6).log().sum()
    assert overlap.item() == 0.0 and math.isclose(loss.item(), 13.8, abs_tol=0.1)
    assert not torch.autograd.grad(loss, leaf)[0].any()


def test_rows_that_pass_nothing_back(device):
    """Ignored rows are never read, whatever they hold and get; rows without an upstream gradient are exact zeros."""
    logits, teacher, target = problem(device, rows=4)
    logits[0], teacher[1], logits[2] = math.nan, INF, math.nan
    target[:2] = -100
    upstream = torch.ones(5, 4, device=device)
    upstream[:, 0], upstream[:, 2] = math.nan, 0.0
    values, statistics = ops.divergences_forward(logits, teacher, target, fields=ALL)
    grad = ops.divergences_backward(upstream, logits, teacher, target, statistics, fields=ALL)
    assert not values[:, :2].any() and values[:, 3].isfinite().all()
    assert not grad[:3].any() and grad[3].isfinite().all() and grad[3].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_terms_are_added_before_the_one_rounding(device, dtype):
    """The gradient of 16-bit logits is that of the same logits in float32, rounded; so is one in grad_dtype."""
    logits, teacher, target = problem(device, dtype, classes=40)
    wide = logits.float()
    upstream = torch.randn(5, 6, generator=torch.Generator().manual_seed(1)).to(device)
    statistics = ops.divergences_forward(logits, teacher, target, fields=ALL)[1]
    backward, options = ops.divergences_backward, {"fields": ALL}
    narrow = backward(upstream, logits, teacher, target, statistics, **options)
    found = backward(upstream, wide, teacher, target, statistics, None, dtype, **options)
    assert found.dtype == dtype and torch.equal(found, narrow)
    if not INTERPRETED:
        assert torch.equal(backward(upstream, wide, teacher, target, statistics, **options).to(dtype), narrow)
    ops.divergences_backward_(upstream, wide, teacher, target, statistics, None, dtype, **options)
    assert torch.equal(wide.view(dtype)[:, :40], narrow)


@pytest.mark.parametrize("classes", [5, 300, 5000])
def test_a_narrow_gradient_over_its_logits(device, classes):
    """Of rows that are shorter than a lane, of one tile and of several: no number is overwritten before it is read."""
    logits, teacher, target = problem(device, rows=3, classes=classes)
    target.clamp_(max=classes - 1)
    upstream = torch.ones(5, 3, device=device)
    statistics = ops.divergences_forward(logits, teacher, target, fields=ALL)[1]
    row_args = (teacher, target, statistics, None, torch.bfloat16)
    expected = ops.divergences_backward(upstream, logits, *row_args, fields=ALL)
    ops.divergences_backward_(upstream, logits, *row_args, fields=ALL)
    assert torch.equal(logits.view(torch.bfloat16)[:, :classes], expected)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes a minute for rows of this length")
def test_many_classes(device):
    """A KL near 0 among 128256 classes has an absolute error of 1e-6: it is a sum of moments in float32.

    On a GPU exponentials and logarithms are approximate too.
    """
    atol = 1e-6 if device == "cpu" else 5e-6
    logits, teacher, target = problem(device, rows=2, classes=128256, scale=2.0)
    for distance in (0.0, 0.01, 1.0):
        near = torch.lerp(logits, teacher, distance)
        found = ops.divergences_forward(logits, near, target, fields="kl,reverse_kl,mixture,overlap")[0]
        exact = divergences(logits.double(), near.double())
        for value, wanted in zip(found[:4], exact, strict=False):
            torch.testing.assert_close(value.double(), wanted, rtol=2e-6, atol=atol)


def test_refused(device):
    logits, teacher, target = problem(device)
    for options, text in (
        ({"fields": "jsd"}, "fields must be some of kl, reverse_kl, mixture, overlap, log_prob"),
        ({"fields": "kl,kl"}, "got 'kl,kl'"),
        ({"fields": ""}, "fields must be some of"),
        ({"fields": "mixture", "beta": 0.0}, "beta of a mixture .* above 0.0 and below 1.0, got 0.0"),
        ({"fields": "mixture", "beta": 1.0}, "beta of a mixture"),
    ):
        with pytest.raises(ValueError, match=text):
            ops.divergences_forward(logits, teacher, target, **options)
    one = torch.ones((), device=device)
    for options in ({"fields": "overlap"}, {"fields": "kl,log_prob"}, {"fields": "kl", "hard_weight": 0.5}):
        with pytest.raises(ValueError, match="fields must be one of kl, reverse_kl and mixture, and log_prob"):
            ops.divergences_with_grad(logits, teacher, target, one, **options)


def test_the_oracle_rounds_as_the_kernels_see_logits():
    logits = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.equal(rounded(logits, torch.bfloat16), logits.bfloat16().double())
    assert torch.autograd.grad(rounded(logits, torch.bfloat16).sum(), logits)[0].eq(1).all()
