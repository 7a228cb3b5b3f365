"""The divergences of tokens themselves, for losses that mix tokens: beside float64, from hidden states and logits."""

import pytest
import torch
import torch.nn.functional as F
from helpers.divergence_oracle import divergences
from torch.utils.flop_counter import FlopCounterMode

import xent_ops
from xent_ops import TokenDivergences

SHAPE, HIDDEN, TEACHER, CLASSES = (3, 6), 16, 24, 60
NAMES = TokenDivergences._fields
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
NEAR = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # of a gradient's norm


def problem(device, dtype):
    """(hidden, head, the teacher's two), target with an ignored row."""
    generator = torch.Generator().manual_seed(0)
    sizes = (*SHAPE, HIDDEN), (CLASSES, HIDDEN), (*SHAPE, TEACHER), (CLASSES, TEACHER)
    heads = [torch.randn(size, generator=generator) / (size[-1] ** 0.5 / 2 if len(size) == 2 else 1) for size in sizes]
    target = torch.randint(CLASSES, SHAPE, generator=generator)
    target[1, 2] = -100
    return [tensor.to(device, dtype) for tensor in heads], target.to(device)


def mixed(d):
    """An accepted length, and weights of tokens from the tokens before them."""
    accepted = d.overlap.cumprod(1).sum() - d.log_prob.cumsum(1).square().mean()
    return accepted + (d.kl.cumsum(1) * d.jsd * (1 + d.agrees)).sum() + (d.reverse_kl * d.coverage.roll(1, 1)).sum()


def expected(heads, target, **options):
    hidden, head, *teacher = (tensor.detach().double().cpu() for tensor in heads)
    leaves = hidden.requires_grad_(), head.requires_grad_()
    found = divergences(F.linear(*leaves), F.linear(*teacher), target.cpu(), **options)
    found = TokenDivergences(*[torch.where(target.cpu() != -100, field, 0.0) for field in found])
    return found, torch.autograd.grad(mixed(found), leaves)


def assert_near(found, grads, wanted, wanted_grads, dtype):
    for name, field, right in zip(NAMES, found, wanted, strict=True):
        assert field.dtype == (torch.float64 if dtype == torch.float64 else torch.float32), name
        torch.testing.assert_close(field.detach().double().cpu(), right.detach(), rtol=4e-6, atol=2e-6)
    for grad, right in zip(grads, wanted_grads, strict=True):
        assert (grad.double().cpu() - right).norm() <= NEAR[dtype] * right.norm()


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 2.0, "beta": 0.25}, {"softcap": 5.0, "teacher_logit_scale": 0.5}]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hidden_states(device, dtype, options):
    heads, target = problem(device, dtype)
    hidden, head = leaves = [tensor.clone().requires_grad_() for tensor in heads[:2]]
    found = xent_ops.linear_token_divergences(hidden, head, *heads[2:], target=target, chunk_rows=7, **options)
    assert found.kl.shape == SHAPE and not found.agrees.requires_grad and not found.coverage.requires_grad
    grads = torch.autograd.grad(mixed(found), leaves)
    assert_near(found, grads, *expected(heads, target, **options), dtype)
    assert not grads[0][1, 2].any()


def test_logits(device):
    heads, target = problem(device, torch.float32)
    logits = F.linear(*heads[:2]).requires_grad_()
    found = xent_ops.token_divergences(logits, F.linear(*heads[2:]), target=target)
    (grad,) = torch.autograd.grad(mixed(found), logits)
    wanted, right = expected(heads, target)
    assert_near(found, (grad @ heads[1], grad.flatten(0, 1).T @ heads[0].flatten(0, 1)), wanted, right, torch.float32)


@pytest.mark.parametrize("function", ["linear_token_divergences", "token_divergences"])
def test_a_draft_vocabulary(device, function):
    heads, target = problem(device, torch.float32)
    classes = torch.arange(0, CLASSES, 3, device=device)
    heads[1], target = heads[1][: len(classes)].contiguous(), torch.where(target == -100, target, target % len(classes))
    leaves = [tensor.clone().requires_grad_() for tensor in heads[:2]]
    given = (*leaves, *heads[2:]) if "linear" in function else (F.linear(*leaves), F.linear(*heads[2:]))
    found = getattr(xent_ops, function)(*given, target=target, classes=classes)
    wanted = expected(heads, target, classes=classes.cpu())
    assert_near(found, torch.autograd.grad(mixed(found), leaves), *wanted, torch.float32)


def test_fields_that_are_not_asked_for(device):
    """They are None, so that a loss that reads one raises; the others have the same bits."""
    heads, target = problem(device, torch.float32)
    whole = xent_ops.linear_token_divergences(*heads, target=target)
    for fields in (("kl",), ["overlap", "coverage"], ("agrees",), ("log_prob", "jsd", "covers_top")):
        found = xent_ops.linear_token_divergences(*heads, target=target, fields=fields)
        for name, one, other in zip(NAMES, found, whole, strict=True):
            assert (one is None) == (name not in fields) and (one is None or torch.equal(one, other)), name
    without = xent_ops.linear_token_divergences(*heads)
    assert without.log_prob is None and without.kl[1, 2] != 0


def test_products(device):
    """Two forward, four backward: the student's and the teacher's logits twice, and both gradients."""
    heads, _ = problem(device, torch.float32)
    leaves = [tensor.clone().requires_grad_() for tensor in heads[:2]]
    rows = SHAPE[0] * SHAPE[1]
    with FlopCounterMode(display=False) as counter:
        found = xent_ops.linear_token_divergences(*leaves, *heads[2:], fields=("kl",))
    forward = counter.get_total_flops()
    assert forward == 2 * rows * CLASSES * (HIDDEN + TEACHER)
    with FlopCounterMode(display=False) as counter:
        found.kl.sum().backward()
    assert counter.get_total_flops() == forward + 4 * rows * CLASSES * HIDDEN


def test_ignored_rows(device):
    """No gradient, even where the caller's is NaN; with skip_ignored the same numbers."""
    heads, target = problem(device, torch.float32)
    grads = []
    for options in ({}, {"skip_ignored": True}):
        leaves = [tensor.clone().requires_grad_() for tensor in heads[:2]]
        found = xent_ops.linear_token_divergences(*leaves, *heads[2:], target=target, **options)
        upstream = torch.where(target == -100, float("nan"), 1.0)
        grads.append(torch.autograd.grad((found.overlap + found.jsd) * upstream, leaves, torch.ones_like(upstream)))
        assert not grads[-1][0][1, 2].any() and not grads[-1][0].isnan().any()
    torch.testing.assert_close(*grads)


def test_compiled(device):
    heads, target = problem(device, torch.float32)
    leaves = [tensor.clone().requires_grad_() for tensor in heads[:2]]

    def step(hidden, head):
        return mixed(xent_ops.linear_token_divergences(hidden, head, *heads[2:], target=target, chunk_rows=7))

    loss = step(*leaves)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(*leaves)
    torch.testing.assert_close(compiled, loss)
    torch.testing.assert_close(torch.autograd.grad(compiled, leaves), torch.autograd.grad(loss, leaves))


def test_equal_classes(device):
    """Refused where the values can be read; else NaN."""
    heads, _ = problem(device, torch.float32)
    classes = torch.zeros(CLASSES, dtype=torch.int64, device=device)
    if device == "cpu":
        with pytest.raises(ValueError, match="classes has 0 more than once"):
            xent_ops.linear_token_divergences(*heads, classes=classes)
    else:
        found = xent_ops.linear_token_divergences(*heads, classes=classes)
        assert all(field is None or field.isnan().all() for field in found)


@pytest.mark.parametrize("function", ["linear_token_divergences", "token_divergences"])
def test_refusals(device, function):
    heads, _ = problem(device, torch.float32)
    call, given = getattr(xent_ops, function), heads if "linear" in function else heads[::2]
    for fields in ("kl", ("klm",), (), 3):
        with pytest.raises(ValueError, match=r"fields must be a tuple or a list of some of kl, reverse_kl"):
            call(*given, fields=fields)
    with pytest.raises(ValueError, match="fields has log_prob, the log-probability of the target: pass target="):
        call(*given, fields=("log_prob",))
    leaf = given[0].clone().requires_grad_()
    teacher = [tensor.clone().requires_grad_() for tensor in given[1:]]
    with pytest.raises(RuntimeError, match="teacher_input"):
        call(leaf, *(given[1:-2] if "linear" in function else []), *teacher[-2 if "linear" in function else 0 :])
