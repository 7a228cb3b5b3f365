"""Linear cross entropy on a GPU in numbers: against float64, with a loss scaler, of many logits, bit by bit."""

import gc

import pytest
import torch
import torch.nn.functional as F
from test_linear_cuda import OPTIONS, batch, leaves, value_and_grads

import xent_ops
from xent_ops.testing import assert_linear, linear_oracle

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def collected():
    """Some of these need most of a GPU."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "full"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("sums", [None, torch.float32], ids=["", "float32 sums"])
def test_values_against_float64(dtype, options, reduction, sums):
    if sums is not None and dtype == torch.float64:
        pytest.skip("float64 is added up in float64")
    h, w, b, target, weight = batch(2, 700, 1003, 96, dtype)
    w = w * 0.1
    options = {**options, "reduction": reduction, "chunk_rows": 256, "accumulate_dtype": sums}
    args = leaves(h, w, b)
    loss = xent_ops.linear_cross_entropy(
        args[0], args[1], target, linear_bias=args[2], weight=weight if "softcap" in options else None, **options
    )
    upstream = torch.randn(loss.shape, device="cuda")
    grads = torch.autograd.grad(loss, args, upstream.to(loss))
    assert all(grad.dtype == dtype for grad in grads)
    weight = weight if "softcap" in options else None
    assert_linear(loss, grads, linear_oracle(h, w, target, b, weight, upstream=upstream, **options))


@pytest.mark.parametrize("head", [(96, 1), (0, 5), (0, 1), (12, 5)], ids=str)
def test_skipping_with_odd_heads(head):
    """One class of any stride is packed. No features, and rows that are not of whole 16 bytes, take plain chunks."""
    features, classes = head
    h = torch.randn(700, features, device="cuda").bfloat16()
    w = torch.randn(features, classes, device="cuda").bfloat16().t()
    target = torch.where(torch.rand(700, device="cuda") < 0.5, torch.randint(classes, (700,), device="cuda"), -100)
    args = h.requires_grad_(), w.requires_grad_()
    loss = xent_ops.linear_cross_entropy(*args, target, chunk_rows=256, label_smoothing=0.1, skip_ignored=True)
    grads = torch.autograd.grad(loss, args)
    assert_linear(loss, grads, linear_oracle(h, w, target, label_smoothing=0.1, chunk_rows=256))


def by_float64(h, w, target, rows=2048):
    """(row losses, gradients of their mean for h and w), on the GPU, a few rows at a time."""
    losses, grad_h, grad_w = [], [], torch.zeros(w.shape, device="cuda", dtype=torch.float64)
    wide = w.double()
    for x, t in zip(h.split(rows), target.split(rows), strict=True):
        log_p = (x.double() @ wide.t()).log_softmax(-1)
        losses.append(F.nll_loss(log_p, t, reduction="none"))
        g = log_p.exp_()
        g[torch.arange(len(t), device="cuda"), t] -= 1
        g /= len(h)
        grad_h.append(g @ wide)
        grad_w += g.t() @ x.double()
        del log_p, g
    return torch.cat(losses), torch.cat(grad_h), grad_w


def relative(found, wanted):
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def test_float16_with_a_loss_scaler():
    """One over 32768 rows, times a probability of one in 128256, is zero in float16."""
    rows, features, classes = 32768, 512, 128256
    h = torch.randn(rows, features, device="cuda")
    w = torch.randn(classes, features, device="cuda") * 0.05
    target = torch.randint(0, classes, (rows,), device="cuda")
    losses, grad_h, grad_w = by_float64(h.half(), w.half(), target)

    # As autocast has it, with torch's scaler.
    h.requires_grad_(), w.requires_grad_()
    optimizer, scaler = torch.optim.SGD([h, w], lr=1.0), torch.amp.GradScaler("cuda", init_scale=2.0**16)
    with torch.autocast("cuda", dtype=torch.float16):
        loss = xent_ops.linear_cross_entropy(h, w, target)
    assert abs(loss.item() / losses.mean().item() - 1) < 1e-4
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    assert relative(h.grad, grad_h) < 5e-3 and relative(w.grad, grad_w) < 5e-3
    # Of classes that are no row's target, whose gradients are the smallest.
    rare = torch.ones(classes, dtype=torch.bool, device="cuda")
    rare[target] = False
    assert relative(w.grad[rare], grad_w[rare]) < 2e-2
    assert (w.grad[rare] == 0).float().mean() < 0.05

    # All in float16, also by rows, whose gradients are made with the scale.
    for reduction in ("mean", "none"):
        half, head = h.detach().half().requires_grad_(), w.detach().half().requires_grad_()
        loss = xent_ops.linear_cross_entropy(half, head, target, reduction=reduction)
        (loss.mean() * 2.0**16).backward()
        assert relative(half.grad.float() / 2.0**16, grad_h) < 5e-3
        assert relative(head.grad.float() / 2.0**16, grad_w) < 5e-3
        assert relative(head.grad[rare].float() / 2.0**16, grad_w[rare]) < 2e-2
        del loss, half, head


@pytest.mark.parametrize("chunk_rows", [None, 70000], ids=["in all", "in one chunk"])
def test_more_than_two_to_the_31_logits(chunk_rows):
    rows, features, classes = 70000, 64, 32768
    h = torch.randn(rows, features, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(classes, features, device="cuda", dtype=torch.bfloat16) * 0.2
    target = torch.randint(0, classes, (rows,), device="cuda")
    losses, grad_h, grad_w = by_float64(h, w, target)
    h.requires_grad_(), w.requires_grad_()
    wide = {"chunk_rows": chunk_rows, "accumulate_dtype": torch.float32}
    loss = xent_ops.linear_cross_entropy(h, w, target, **wide)
    loss.backward()
    assert abs(loss.item() / losses.mean().item() - 1) < 1e-3
    assert relative(h.grad, grad_h) < 1e-2 and relative(w.grad, grad_w) < 1e-2
    last = slice(rows - 100, rows)  # behind the 2^31st
    assert relative(h.grad[last], grad_h[last]) < 1e-2
    h.grad = w.grad = None
    rowwise = xent_ops.linear_cross_entropy(h, w, target, reduction="none", **wide)
    torch.testing.assert_close(rowwise.double(), losses, rtol=0, atol=0.05)
    rowwise.mean().backward()
    assert relative(h.grad, grad_h) < 1e-2 and relative(h.grad[last], grad_h[last]) < 1e-2
    assert relative(w.grad, grad_w) < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_every_run_gives_the_same_bits(dtype, reduction):
    h, w, b, target, weight = batch(3, 5000, 32000, 256, dtype)

    def run(h, w, b, target, weight):
        loss = xent_ops.linear_cross_entropy(
            h, w * 0.1, target, linear_bias=b, weight=weight, reduction=reduction, **OPTIONS
        )
        return loss.mean()

    first = value_and_grads(run, h, w, b, target, weight)
    for _ in range(4):
        noise = torch.randn(
            2000, 2000, device="cuda"
        )  # what memory held before, and what runs beside, is nothing to it
        (noise @ noise).sum()
        del noise
        for mine, wanted in zip(value_and_grads(run, h, w, b, target, weight), first, strict=True):
            assert torch.equal(mine, wanted)


def test_a_target_out_of_range_is_nan_in_its_row():
    h, w, _, target, _ = batch(4)
    for bad in (1003, -1, 2**40):
        target[3] = bad
        args = leaves(h, w, w[:, 0])
        loss = xent_ops.linear_cross_entropy(args[0], args[1], target, reduction="none", chunk_rows=2)
        (grad,) = torch.autograd.grad(loss.sum(), args[0])
        others = torch.arange(64, device="cuda") != 3
        assert loss[3].isnan() and grad[3].isnan().all()
        assert loss[others].isfinite().all() and grad[others].isfinite().all()
        assert xent_ops.linear_cross_entropy(args[0], args[1], target).isnan()


def test_on_another_device_than_the_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    h, w, b, target, weight = (tensor.to("cuda:1") for tensor in batch(0))
    args = leaves(h, w, b)
    with torch.cuda.device(0):
        for sums in (None, torch.float32):
            loss = xent_ops.linear_cross_entropy(
                args[0], args[1], target, linear_bias=args[2], weight=weight, accumulate_dtype=sums, chunk_rows=24
            )
            grads = torch.autograd.grad(loss, args)
            expected = linear_oracle(h, w, target, b, weight, accumulate_dtype=sums, chunk_rows=24)
            assert_linear(loss, grads, expected)


OPEN_ENDED = {
    "outputs": lambda h, w, t: xent_ops.linear_cross_entropy_outputs(h, w, t, chunk_rows=256, skip_ignored=True),
    "log-probabilities": lambda h, w, t: xent_ops.linear_token_log_probs(h, w, t, chunk_rows=256, skip_ignored=True),
    "several classes": lambda h, w, t: xent_ops.linear_token_log_probs(
        h, w, torch.stack([t, t], -1), chunk_rows=256, skip_ignored=True
    ),
    "distillation": lambda h, w, t: (
        xent_ops.linear_distillation_loss(
            h, w, h.detach() * 0.9, w.detach(), target=t, chunk_rows=256, skip_ignored=True, reduction="none"
        ),
    ),
}


@pytest.mark.usefixtures("new_memory_is_nan")
@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize("function", OPEN_ENDED)
def test_rows_that_no_product_makes_reach_no_gradient(function):
    """Gradients of all rows are passed in, those that were skipped too."""
    h, w, _, target, _ = batch(0, 700, 1000, 96)
    grads = []
    for rows in (torch.arange(700, device="cuda"), (target != -100).nonzero().squeeze(1)):
        args = h[rows].requires_grad_(), w.detach().requires_grad_()
        values = [value for value in OPEN_ENDED[function](*args, target[rows]) if value.requires_grad]
        grads.append(torch.autograd.grad(values, args, [torch.ones_like(value) for value in values]))
    assert grads[0][0][target == -100].abs().max() == 0
    torch.testing.assert_close(grads[0][0][target != -100], grads[1][0])
    torch.testing.assert_close(*(grad for _, grad in grads), rtol=2e-2, atol=1e-2)
