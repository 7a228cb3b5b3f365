"""Linear cross entropy on a GPU: capture and replay, no synchronisation, memory. Numbers: test_linear_cuda_values.py."""

import pytest
import torch
from helpers.gpu import captured, collected, measured, no_synchronisation  # noqa: F401 (a fixture)
from helpers.heads import random_head

import xent_ops

pytestmark = pytest.mark.gpu

CAP = {"softcap": 20.0, "logit_scale": 0.5}
OPTIONS = {"label_smoothing": 0.1, "lse_square_scale": 1e-3, **CAP}
WIDE = {"accumulate_dtype": torch.float32, "chunk_rows": 24}


def _floats(results):
    """Without the lse of ignored rows, which is infinite."""
    return sum(value.masked_fill(value.isinf(), 0.0).sum() for value in results if value.is_floating_point())


def _loss(**options):
    return lambda h, w, b, target, weight: xent_ops.linear_cross_entropy(h, w, target, **options)


def _full(**options):
    return lambda h, w, b, target, weight: xent_ops.linear_cross_entropy(
        h, w, target, linear_bias=b, weight=weight, **OPTIONS, **options
    )


# Each a scalar function of hidden states, the head, class indices and class weights.
LOSSES = {
    "plain": _loss(),
    "chunks": _loss(chunk_rows=24),
    "full": _full(),
    "full, float32 sums": _full(**WIDE),
    "sum over a tensor": lambda h, w, b, target, weight: xent_ops.linear_cross_entropy(
        h, w, target, reduction="sum", divisor=(target != -100).sum()
    ),
    "sum over a number": _full(reduction="sum", divisor=51.5),
    "skipping": _full(skip_ignored=True, chunk_rows=24),
    "skipping, float32 sums": _full(skip_ignored=True, **WIDE),
    "skipping rows": lambda *args: _full(reduction="none", skip_ignored=True, **WIDE)(*args).sum(),
    "none": lambda *args: _full(reduction="none", **WIDE)(*args).sum(),
    "outputs": lambda h, w, b, target, weight: _floats(
        xent_ops.linear_cross_entropy_outputs(h, w, target, linear_bias=b, weight=weight, **OPTIONS)
    ),
    "log_probs": lambda h, w, b, target, weight: _floats(
        xent_ops.linear_token_log_probs(h, w, target, linear_bias=b, **CAP, **WIDE)
    ),
}


def batch(seed, rows=64, classes=1003, features=40, dtype=torch.bfloat16):
    """(h, w, b, target, weight)."""
    ignored = slice(seed % 7, None, 2 + seed % 4)  # now more, now fewer
    head = random_head("cuda", dtype, (rows,), classes, features, seed=seed, ignored=ignored, requires_grad=False)
    return *head, torch.rand(classes, generator=torch.Generator().manual_seed(9)).cuda()


def leaves(h, w, b, *others):
    return h.detach().requires_grad_(), w.detach().requires_grad_(), b.detach().requires_grad_(), *others


def value_and_grads(function, *args):
    args = leaves(*args)
    loss = function(*args)
    grads = torch.autograd.grad(loss, args[:3], allow_unused=True)
    return [loss.detach().clone(), *(grad.clone() for grad in grads if grad is not None)]


def assert_close(mine, wanted):
    """The same kernels, or other products, which round some elements otherwise."""
    assert len(mine) == len(wanted)
    torch.testing.assert_close(mine[0], wanted[0], rtol=2e-4, atol=0)
    for grad, other in zip(mine[1:], wanted[1:], strict=True):
        assert grad.dtype == other.dtype
        error = (grad.double() - other.double()).norm() / other.double().norm()
        assert error < 0.01, error


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_nothing_synchronises(name, compiled):
    function = LOSSES[name]
    if compiled:
        function = torch.compile(function, fullgraph=True)
    args = batch(0)
    value_and_grads(function, *args)
    with no_synchronisation():
        found = value_and_grads(function, *args)
    assert all(tensor.isfinite().all() for tensor in found)


def test_other_ways_of_a_call_do_not_synchronise():
    """A second backward, a second derivative, no gradient, a frozen head, autocast with float16."""

    h, w, b, target, weight = leaves(*batch(1))

    def everything():
        loss = xent_ops.linear_cross_entropy(h, w, target, linear_bias=b, weight=weight, divisor=3.0, reduction="sum")
        loss.backward(retain_graph=True)
        loss.backward(torch.full_like(loss, 2.0))
        loss = xent_ops.linear_cross_entropy(h, w, target)
        (grad,) = torch.autograd.grad(loss, h, create_graph=True)
        grad.square().sum().backward()
        with torch.no_grad():
            xent_ops.linear_cross_entropy(h, w, target)
        xent_ops.linear_cross_entropy(h, w.detach(), target).backward()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = xent_ops.linear_cross_entropy(h, w.float(), target)
        loss.backward()

    everything()
    with no_synchronisation():
        everything()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_capture_and_replay_on_other_data(name, compiled):
    """The captured inputs may be uninitialised: out-of-range targets in them must not read outside the buffer."""
    function = LOSSES[name]
    if compiled:
        function = torch.compile(function, fullgraph=True)
    args = leaves(*batch(0))

    def step():
        loss = function(*args)
        return loss, torch.autograd.grad(loss, args[:3], allow_unused=True)

    graph, (loss, grads) = captured(step, before=lambda: args[3].random_(-(2**62), 2**62))
    graph.replay()
    assert loss.isnan()
    for seed in (1, 2, 3):
        other = batch(seed)
        with torch.no_grad():
            for mine, value in zip(args, other, strict=True):
                mine.copy_(value)
        graph.replay()
        found = [loss, *(grad for grad in grads if grad is not None)]
        assert_close(found, value_and_grads(LOSSES[name], *other))


@pytest.mark.parametrize("name", LOSSES)
def test_reduce_overhead(name):
    function = torch.compile(LOSSES[name], mode="reduce-overhead", fullgraph=True)
    for seed in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        args = batch(seed)
        found = value_and_grads(function, *args)
        assert_close(found, value_and_grads(LOSSES[name], *args))


@pytest.mark.parametrize("name", [name for name in LOSSES if name.startswith("full")])
def test_make_graphed_callables(name):
    """All gradients are wanted there, so with a bias."""
    function = LOSSES[name]
    graphed = torch.cuda.make_graphed_callables(function, leaves(*batch(0)))
    for seed in (1, 2):
        args = batch(seed)
        assert_close(value_and_grads(graphed, *args), value_and_grads(function, *args))


# Memory, in bytes


ROWS, CLASSES, FEATURES = 8192, 32000, 1024
SMALL = 2 * 2**20  # losses, lse, targets, and what the allocator rounds up


@pytest.mark.parametrize("chunk_rows", [None, 512])
def test_memory_of_a_step(chunk_rows):
    """The gradients and one chunk of logits; the backward allocates nothing, and AccumulateGrad takes what it gets."""
    from xent_ops.head.sizes import rows_of_chunk

    h, w, _, target, _ = batch(0, ROWS, CLASSES, FEATURES)
    h.requires_grad_(), w.requires_grad_()
    gradients = 2 * (h.numel() + w.numel())
    chunk = 2 * CLASSES * rows_of_chunk(ROWS, h, len(w), False, chunk_rows)

    def forward():
        return xent_ops.linear_cross_entropy(h, w, target, chunk_rows=chunk_rows)

    for _ in range(2):
        forward().backward()
        h.grad = w.grad = None
    loss, peak, left = measured(forward)
    assert peak <= gradients + chunk + SMALL, (peak, gradients, chunk)
    assert left <= gradients + SMALL, (left, gradients)
    _, peak, left = measured(loss.backward)
    assert peak <= SMALL and left <= SMALL, (peak, left)
    loss = forward()
    _, peak, _ = measured(lambda: loss.backward(torch.full_like(loss, 3.0)))
    assert peak <= SMALL, "another upstream gradient is applied in place"

    with torch.no_grad():
        _, peak, left = measured(forward)
    assert peak <= chunk + SMALL and left <= SMALL, (peak, chunk, left)


def test_memory_of_skipping():
    """Beside the chunk of logits one of hidden states, one of their gradients, and shares of tiles."""
    from xent_ops.head.sizes import rows_of_chunk

    h, w, _, target, _ = batch(0, ROWS, CLASSES, FEATURES)
    h.requires_grad_(), w.requires_grad_()
    rows = rows_of_chunk(ROWS, h, len(w), False, None)
    shares = 2 * torch.cuda.get_device_properties(0).multi_processor_count * 128 * 256 * 4

    def forward():
        return xent_ops.linear_cross_entropy(h, w, target, skip_ignored=True)

    for _ in range(2):
        forward().backward()
        h.grad = w.grad = None
    _, peak, left = measured(forward)
    gradients = 2 * (h.numel() + w.numel())
    assert peak <= gradients + 2 * CLASSES * rows + 2 * FEATURES * rows + shares + SMALL
    assert left <= gradients + SMALL


def test_memory_of_rows():
    """reduction="none": a chunk of logits forward; backward again, and the gradients."""
    h, w, _, target, _ = batch(0, ROWS, CLASSES, FEATURES)
    h.requires_grad_(), w.requires_grad_()
    gradients, chunk = 2 * (h.numel() + w.numel()), 2 * CLASSES * 1024

    def forward():
        return xent_ops.linear_cross_entropy(h, w, target, reduction="none", chunk_rows=1024)

    forward().sum().backward()
    h.grad = w.grad = None
    losses, peak, left = measured(forward)
    assert peak <= chunk + SMALL and left <= SMALL, (peak, chunk, left)
    _, peak, _ = measured(lambda: losses.backward(torch.rand_like(losses)))
    assert peak <= gradients + chunk + SMALL, (peak, gradients, chunk)


def test_memory_of_a_forward_alone():
    """It has chunks of twice as many rows, and takes no more than its backward."""
    h, w, _, target, _ = batch(0, ROWS, CLASSES, 4 * FEATURES)
    h.requires_grad_(), w.requires_grad_()

    def forward():
        return xent_ops.linear_token_log_probs(h, w, target).log_probs

    forward().sum().backward()
    h.grad = w.grad = None
    log_probs, of_forward, _ = measured(forward)
    _, of_backward, _ = measured(lambda: log_probs.backward(torch.rand_like(log_probs)))
    assert of_forward <= min(2 * CLASSES * ROWS + SMALL, of_backward), (of_forward, of_backward)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_memory_of_float32_sums(dtype):
    """Twice the head's gradient while they are added up, and it once more in the backward."""
    h, w, _, target, _ = batch(0, ROWS, CLASSES, FEATURES, dtype)
    h.requires_grad_(), w.requires_grad_()
    chunk = 2 * CLASSES * 1024

    def forward():
        return xent_ops.linear_cross_entropy(h, w, target, accumulate_dtype=torch.float32, chunk_rows=1024)

    forward().backward()
    h.grad = w.grad = None
    loss, peak, _ = measured(forward)
    assert peak <= 2 * h.numel() + 4 * w.numel() + chunk + SMALL, peak
    _, peak, _ = measured(loss.backward)
    assert peak <= 2 * h.numel() + 2 * w.numel() + SMALL, peak


def test_memory_of_a_frozen_head():
    h, w, _, target, _ = batch(0, ROWS, CLASSES, FEATURES)
    h.requires_grad_()

    def step():
        xent_ops.linear_cross_entropy(h, w, target, chunk_rows=1024).backward()

    step()
    h.grad = None
    _, peak, _ = measured(step)
    assert peak <= 2 * h.numel() + 2 * CLASSES * 1024 + SMALL, peak
