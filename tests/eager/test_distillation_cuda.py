"""Distillation on a GPU: capture and replay, no synchronisation, memory. Values: test_distillation.py, on any device."""

import pytest
import torch
from helpers.gpu import captured, collected, measured, no_synchronisation  # noqa: F401 (a fixture)

import xent_ops
from xent_ops.head.sizes import rows_of_chunk

pytestmark = pytest.mark.gpu

ROWS, CLASSES, FEATURES, TEACHER = 8192, 32000, 1024, 2048
SMALL = 2 * 2**20  # losses, targets, and what the allocator rounds up


def batch(seed, rows=64, classes=1003, features=40, teacher_features=72):
    """(hidden, head, teacher's, teacher's head, target) in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows, features), (classes, features), (rows, teacher_features), (classes, teacher_features))
    tensors = [torch.randn(shape, generator=generator).cuda().bfloat16() for shape in shapes]
    target = torch.randint(0, 999, (rows,), generator=generator).cuda()  # "full" has so many classes
    target[seed % 7 :: 2 + seed % 4] = -100  # now more, now fewer
    return *tensors, target


def of_heads(**options):
    def loss(hidden, head, teacher, teacher_head, target):
        return xent_ops.linear_distillation_loss(hidden, head, teacher, teacher_head, target=target, **options)

    return loss


def of_logits(**options):
    def loss(hidden, head, teacher, teacher_head, target):
        logits = hidden @ head.t()
        return xent_ops.distillation_loss(logits, teacher @ teacher_head.t(), target=target, **options)

    return loss


LOSSES = {
    "forward KL": of_heads(chunk_rows=24),
    "reverse KL": of_heads(beta=1.0, chunk_rows=24, token_weight=None),
    "full": of_heads(beta=0.5, hard_weight=0.5, temperature=2.0, softcap=20.0, num_classes=999),
    "skipping": of_heads(beta=0.5, skip_ignored=True, chunk_rows=24, reduction="sum", divisor=7.0),
    "logits": of_logits(beta=0.5, hard_weight=0.5),
}


def value_and_grads(function, hidden, head, *others):
    leaves = hidden.detach().requires_grad_(), head.detach().requires_grad_()
    loss = function(*leaves, *others)
    return [loss.detach().clone(), *(grad.clone() for grad in torch.autograd.grad(loss, leaves))]


def assert_close(mine, wanted):
    torch.testing.assert_close(mine[0], wanted[0], rtol=2e-4, atol=0)
    for grad, other in zip(mine[1:], wanted[1:], strict=True):
        error = (grad.double() - other.double()).norm() / other.double().norm()
        assert error < 0.01, error


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_nothing_synchronises(name, compiled):
    function = torch.compile(LOSSES[name], fullgraph=True) if compiled else LOSSES[name]
    args = batch(0)
    value_and_grads(function, *args)
    with no_synchronisation():
        found = value_and_grads(function, *args)
    assert all(tensor.isfinite().all() for tensor in found)


@pytest.mark.parametrize("name", LOSSES)
def test_capture_and_replay_on_other_data(name):
    function, (hidden, head, *others) = LOSSES[name], batch(0)
    leaves = hidden.requires_grad_(), head.requires_grad_()

    def step():
        loss = function(*leaves, *others)
        return loss, torch.autograd.grad(loss, leaves)

    graph, (loss, grads) = captured(step)
    for seed in (1, 2, 3):
        other = batch(seed)
        with torch.no_grad():
            for mine, value in zip((*leaves, *others), other, strict=True):
                mine.copy_(value)
        graph.replay()
        assert_close([loss, *grads], value_and_grads(LOSSES[name], *other))


@pytest.mark.parametrize("name", LOSSES)
def test_reduce_overhead(name):
    function = torch.compile(LOSSES[name], mode="reduce-overhead", fullgraph=True)
    for seed in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        args = batch(seed)
        assert_close(value_and_grads(function, *args), value_and_grads(LOSSES[name], *args))


@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize("chunk_rows", [None, 512])
def test_memory_of_a_step(chunk_rows, beta):
    """The gradients and a chunk of float32 logits of each model; the backward allocates nothing."""
    hidden, head, *others = batch(0, ROWS, CLASSES, FEATURES, TEACHER)
    hidden.requires_grad_(), head.requires_grad_()
    gradients = 2 * (hidden.numel() + head.numel())
    chunk = 4 * CLASSES * rows_of_chunk(ROWS, hidden, len(head), False, chunk_rows, torch.float32, heads=2)
    function = of_heads(beta=beta, chunk_rows=chunk_rows)
    for _ in range(2):
        function(hidden, head, *others).backward()
        hidden.grad = head.grad = None
    loss, peak, left = measured(lambda: function(hidden, head, *others))
    assert peak <= gradients + 2 * chunk + SMALL, (peak, gradients, chunk)
    assert left <= gradients + SMALL, (left, gradients)
    assert measured(loss.backward)[1] <= SMALL


def test_memory_of_given_logits_compiled():
    """The gradient is written over the student's logits."""
    hidden, head, *others = batch(0, 2048, CLASSES, FEATURES, TEACHER)
    hidden.requires_grad_(), head.requires_grad_()
    logits = 2 * 2048 * CLASSES
    gradients = 2 * (hidden.numel() + head.numel())
    step = torch.compile(of_logits(), fullgraph=True)
    for _ in range(2):
        step(hidden, head, *others).backward()
        hidden.grad = head.grad = None
    _, peak, _ = measured(lambda: step(hidden, head, *others).backward())
    assert peak <= 2 * logits + gradients + SMALL, (peak / logits, gradients)
