"""What only a GPU can show: capture and replay, no synchronisation, memory."""

import pytest
import torch
import torch.nn.functional as F
from helpers.gpu import captured, collected, measured, no_synchronisation  # noqa: F401 (a fixture)
from helpers.graphs import calls_of, run_and_get_code
from helpers.heads import random_head

import xent_ops

pytestmark = pytest.mark.gpu

CAP = {"softcap": 20.0, "logit_scale": 0.5}
OPTIONS = {"label_smoothing": 0.1, "lse_square_scale": 1e-3, **CAP}


def _probabilities(x, target, weight):
    hot = torch.arange(x.shape[1], device=x.device) == target.unsqueeze(1)
    return xent_ops.cross_entropy(x, torch.where(hot, 0.9, 0.1 / x.shape[1]), weight, **OPTIONS)


def _floats(results):
    """Without the lse of ignored rows, which is infinite."""
    return sum(value.masked_fill(value.isinf(), 0.0).sum() for value in results if value.is_floating_point())


# Each a scalar function of logits and class indices.
LOSSES = {
    "plain": lambda x, target, weight: xent_ops.cross_entropy(x, target),
    "one pass": lambda x, target, weight: xent_ops.cross_entropy(x, target, grad_in_forward=True),
    "full, one pass": lambda x, target, weight: xent_ops.cross_entropy(
        x, target, weight, **OPTIONS, grad_in_forward=True
    ),
    "full": lambda x, target, weight: xent_ops.cross_entropy(x, target, weight, **OPTIONS),
    "outputs": lambda x, target, weight: _floats(xent_ops.cross_entropy_outputs(x, target, weight, **OPTIONS)),
    "log_probs": lambda x, target, weight: _floats(xent_ops.token_log_probs(x, target, **CAP)),
    "probabilities": lambda x, target, weight: _probabilities(x, target, weight),
}


def batch(seed, rows=64, classes=1003):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, classes, generator=generator) * 3).cuda().bfloat16()
    target = torch.randint(0, classes, (rows,), generator=generator).cuda()
    target[seed % 7 :: 5] = -100
    return x, target


def loss_function(name):
    weight = torch.rand(1003, generator=torch.Generator().manual_seed(9)).cuda()
    return lambda x, target: LOSSES[name](x, target, weight)


def value_and_grad(function, x, target):
    x = x.detach().requires_grad_()
    loss = function(x, target)
    return loss.detach().clone(), torch.autograd.grad(loss, x)[0].clone()


def assert_equal(mine, wanted):
    """Loss and bfloat16 gradient: one rounding of it, and float32 sums in another order."""
    torch.testing.assert_close(mine[0], wanted[0], rtol=5e-6, atol=0)
    torch.testing.assert_close(mine[1], wanted[1], rtol=2**-7, atol=1e-8)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_nothing_synchronises(name, compiled):
    function = loss_function(name)
    if compiled:
        function = torch.compile(function, fullgraph=True)
    x, target = batch(0)
    value_and_grad(function, x, target)
    with no_synchronisation():
        loss, grad = value_and_grad(function, x, target)
    assert loss.isfinite() and grad.isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_capture_and_replay_on_other_data(name, compiled):
    """The captured inputs may be uninitialised: out-of-range targets in them must not read outside the buffer."""
    function = loss_function(name)
    if compiled:
        function = torch.compile(function, fullgraph=True)
    x, target = batch(0)
    x.requires_grad_()

    def step():
        loss = function(x, target)
        return loss, *torch.autograd.grad(loss, x)

    graph, (loss, grad) = captured(step, before=lambda: target.random_(-(2**62), 2**62))
    graph.replay()
    assert name == "probabilities" or loss.isnan()
    for seed in (1, 2, 3):
        other, other_target = batch(seed)
        with torch.no_grad():
            x.copy_(other)
            target.copy_(other_target)
        graph.replay()
        wanted = value_and_grad(loss_function(name), other, other_target)
        assert_equal((loss, grad), wanted)


@pytest.mark.parametrize("name", LOSSES)
def test_reduce_overhead(name):
    function = torch.compile(loss_function(name), mode="reduce-overhead", fullgraph=True)
    for seed in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        x, target = batch(seed)
        loss, grad = value_and_grad(function, x, target)
        wanted = value_and_grad(loss_function(name), x, target)
        assert_equal((loss, grad), wanted)


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_reduce_overhead_of_a_step_that_reuses_its_logits(dynamic):
    w = (torch.randn(1003, 64, device="cuda", dtype=torch.bfloat16) * 0.3).requires_grad_()

    def function(h, target):
        return xent_ops.cross_entropy(h @ w.T, target, label_smoothing=0.1, lse_square_scale=1e-3)

    step = torch.compile(function, mode="reduce-overhead", fullgraph=True, dynamic=dynamic)
    for seed in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        h = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        target = batch(seed)[1]
        loss = step(h, target)
        grads = torch.autograd.grad(loss, (h, w))
        wanted = function(h, target)
        torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=0)
        for mine, other in zip(grads, torch.autograd.grad(wanted, (h, w)), strict=True):
            torch.testing.assert_close(mine, other, rtol=2e-2, atol=2e-2 * other.abs().max().item())


@pytest.mark.parametrize("name", LOSSES)
def test_make_graphed_callables(name):
    function = loss_function(name)
    x, target = batch(0)
    graphed = torch.cuda.make_graphed_callables(function, (x.detach().requires_grad_(), target))
    for seed in (1, 2):
        other, other_target = batch(seed)
        loss, grad = value_and_grad(graphed, other, other_target)
        wanted = value_and_grad(function, other, other_target)
        assert_equal((loss, grad), wanted)


def peak_in_logits(step, *tensors, size):
    """Peak memory of a call beyond what it starts and ends with, in units of ``size`` bytes."""
    for _ in range(3):
        step(*tensors)
        for t in tensors:
            t.grad = None
    _, peak, _ = measured(lambda: step(*tensors))
    grads = sum(t.grad.numel() * t.grad.element_size() for t in tensors)
    for t in tensors:
        t.grad = None
    return (peak - grads) / size


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("classes", [32000, 50304])  # Inductor pads matrix products with odd sizes: a copy of its own
def test_one_buffer_of_logits_in_a_compiled_step(dynamic, classes):
    rows = 4096
    h, w, _, target = random_head("cuda", torch.bfloat16, (rows,), classes, 256, scale=0.1, ignored=[])
    if dynamic:
        torch._dynamo.mark_dynamic(h, 0)
        torch._dynamo.mark_dynamic(target, 0)
    loss = torch.compile(lambda h, w: xent_ops.cross_entropy(h @ w.T, target), fullgraph=True)
    peak = peak_in_logits(lambda h, w: loss(h, w).backward(), h, w, size=rows * classes * 2)
    assert peak <= 1.02, peak


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_a_replaced_loss_needs_one_buffer_of_logits(dynamic):
    """An unmodified step with the usual upcast to float32: our operators in Inductor's code, eager's numbers."""
    rows, classes = 4096, 32000
    h, w, _, target = random_head(
        "cuda", torch.bfloat16, (rows,), classes, 256, scale=0.1, ignored=slice(None, None, 7)
    )

    def step(h, w, target):
        return F.cross_entropy((h @ w.T).float(), target, label_smoothing=0.1)

    def gradients(step):
        loss = step(h, w, target)
        return loss.detach(), *torch.autograd.grad(loss, (h, w))

    wanted = gradients(step)
    if dynamic:
        torch._dynamo.mark_dynamic(h, 0)
        torch._dynamo.mark_dynamic(target, 0)
    compiled = torch.compile(step, options=xent_ops.inductor.options(linear=False), fullgraph=True)
    mine, code = run_and_get_code(gradients, compiled)
    (call,) = xent_ops.inductor.last_report().calls
    assert call.replaced and call.upcast_removed, str(call)
    assert calls_of("cross_entropy_reduced", code[0]) == 1 and calls_of("cross_entropy_backward_", code[1]) == 1
    torch.testing.assert_close(mine[0], wanted[0], rtol=1e-4, atol=0)
    for grad, other in zip(mine[1:], wanted[1:], strict=True):  # eager rounds the gradient of the logits no less
        assert (grad - other).float().norm() < 0.01 * other.float().norm()
    del mine, wanted
    peak = peak_in_logits(lambda h, w: compiled(h, w, target).backward(), h, w, size=rows * classes * 2)
    assert peak <= 1.02, peak


@pytest.mark.parametrize("with_grad", [False, True], ids=["", "with_grad"])
@pytest.mark.parametrize("inplace", [False, True], ids=["", "inplace"])
def test_eager_memory(inplace, with_grad):
    """inplace_backward: no more than the logits that the step needs anyway; else one gradient beside them."""
    rows, classes = 4096, 32000
    h, w, _, target = random_head("cuda", torch.bfloat16, (rows,), classes, 256, scale=0.1, ignored=[])

    def step(h, w):
        loss = xent_ops.cross_entropy(h @ w.T, target, inplace_backward=inplace, grad_in_forward=with_grad)
        loss.backward()

    peak = peak_in_logits(step, h, w, size=rows * classes * 2)
    assert peak <= (1.05 if inplace else 2.05), peak


def test_an_upstream_gradient_of_one_is_found_on_the_device():
    """The gradient is neither read nor written then, which time shows."""
    grad = torch.randn(16384, 32000, device="cuda", dtype=torch.bfloat16)
    one, two = torch.ones((), device="cuda"), torch.full((), 2.0, device="cuda")

    def ms(factor):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        times = []
        for _ in range(20):
            start.record()
            torch.ops.xent.scale_grad_(grad, factor)
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        return sorted(times)[len(times) // 2]

    ms(one)
    assert ms(one) < ms(two) / 3  # two: 2 GiB of traffic; one: a launch


def test_kernels_are_compiled_once_for_all_option_values():
    from xent_ops.kernels.triton.backward import backward_kernel
    from xent_ops.kernels.triton.forward import forward_kernel

    def compiled():
        caches = (forward_kernel.device_caches, backward_kernel.device_caches)
        return sum(len(cache[0]) for device_caches in caches for cache in device_caches.values())

    x, target = batch(0)
    x.requires_grad_()

    def run(rows, e, cap, scale, ignore):
        loss = xent_ops.cross_entropy(
            x[:rows], target[:rows], ignore_index=ignore, label_smoothing=e, softcap=cap, logit_scale=scale
        )
        torch.autograd.grad(loss, x)

    run(64, 0.1, 30.0, 1.0, -100)
    first = compiled()
    for rows, *values in [
        (64, 0.2, 5.0, 2.0, -100),
        (32, 1.0, 16.0, -1.0, 3),
        (17, 0.5, 1.0, 4.0, 16),
        (1, 0.3, 2.0, 3.0, 1),
    ]:
        run(rows, *values)
    assert compiled() == first
