"""Several classes a row: their log-probabilities, and functions of them."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers.covering import covering

import xent_ops
from xent_ops.kernels import reference_ids

N, H, V, K = 9, 5, 13, 4
OPTIONS = {"plain": {}, "softcap": {"softcap": 3.0, "logit_scale": 0.7}, "negative": {"logit_scale": -1.5}}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
CLOSE = {
    torch.float64: {},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 0.05, "atol": 0.05},
    torch.float16: {"rtol": 0.01, "atol": 0.01},
}


def problem(device, dtype=torch.float64):
    """input, head, bias, ids: with a tie, ignored places, a row with one place left and a row without."""
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((N, H), (V, H), (V,))]
    ids = torch.rand(N, V, generator=generator).topk(K).indices
    ids[0, 1], ids[2], ids[3, 1:], ids[4, 0] = ids[0, 0], -100, -100, -100
    leaves = [tensor.to(device, dtype).requires_grad_() for tensor in tensors]
    return *leaves, ids.to(device), (torch.rand(N, K, generator=generator, dtype=torch.float64) / K).to(device)


def activated(logits, softcap=None, logit_scale=1.0):
    z = logits * logit_scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def expected(x, head, bias, ids, **options):
    """TokenLogProbs in float64, from all logits."""
    z = activated(F.linear(x.double(), head.double(), bias.double()), **options)
    lse, counted = z.logsumexp(-1), ids != -100
    log_probs = torch.where(counted, z.gather(-1, ids.clamp(min=0)) - lse.unsqueeze(-1), 0.0)
    log_p = z - lse.unsqueeze(-1)
    return log_probs, torch.where(counted.any(-1), -(log_p.exp() * log_p).sum(-1), 0.0), lse


def weighted(stats, ids, factors):
    """A sum of everything that is counted, which no row leaves out."""
    log_probs, entropy, lse = stats
    counted = (ids != -100).any(-1)
    of_lse = torch.where(counted, lse, 0.0)
    return (log_probs.double() * factors[0]).sum() + (entropy * factors[1]).sum() + (of_lse * factors[2]).sum()


def factors_of(device):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(device) for shape in ((N, K), (N,), (N,))]


def function(stats, a, b, c):
    return (stats.log_probs * a).sum(-1) + stats.entropy * b + stats.lse * c


@pytest.mark.parametrize("dtype, name, skip_ignored", covering(DTYPES, OPTIONS, [False, True]), ids=str)
def test_log_probs(device, dtype, name, skip_ignored):
    """Of a head and of given logits; with any upstream gradients, and as a function of tokens in three products."""
    x, head, bias, ids, _ = problem(device, dtype)
    options, factors, leaves = OPTIONS[name], factors_of(device), (x, head, bias)
    theirs = expected(*leaves, ids, **options)
    total = weighted(theirs, ids, factors)
    wanted = [grad.double() for grad in torch.autograd.grad(total, leaves)]
    how = {"linear_bias": bias, "chunk_rows": 4, "skip_ignored": skip_ignored, **options}
    made = xent_ops.linear_token_log_probs(x, head, ids, **how)
    assert made.log_probs.shape == ids.shape and made.entropy.shape == made.lse.shape == (N,)
    assert made.log_probs.dtype == made.lse.dtype == (dtype if dtype == torch.float64 else torch.float32)
    assert not made.log_probs[ids == -100].any()
    logits = F.linear(x, head, bias)
    rows = tuple(factors)
    of_function = xent_ops.linear_token_loss(x, head, ids, function, rows=rows, check=True, reduction="sum", **how)
    totals = {
        "linear_token_log_probs": weighted(made, ids, factors),
        "linear_token_loss": of_function,
        "token_log_probs": weighted(xent_ops.token_log_probs(logits, ids, **options), ids, factors),
        "token_loss": xent_ops.token_loss(
            F.linear(x, head, bias), ids, function, rows=rows, check=True, reduction="sum", **options
        ),
    }
    for way, value in totals.items():
        grads = [grad.double() for grad in torch.autograd.grad(value, leaves)]
        for got, correct in zip((value.double(), *grads), (total, *wanted), strict=True):
            size = max(correct.abs().max().item(), 1.0)
            torch.testing.assert_close(
                got / size, correct / size, **CLOSE[dtype], msg=lambda text, w=way: f"{w}: {text}"
            )
    with torch.no_grad():
        value = xent_ops.linear_token_loss(x, head, ids, function, rows=rows, reduction="sum", **how)
        torch.testing.assert_close(value, of_function, **CLOSE[dtype])


def test_gradcheck(device):
    x, head, bias, ids, _ = problem(device)

    def log_probs(*leaves):
        made = xent_ops.linear_token_log_probs(*leaves[:2], ids, linear_bias=leaves[2], chunk_rows=4, softcap=4.0)
        return made.log_probs, made.entropy, made.lse

    def of_logits(x, head, bias):
        made = xent_ops.token_log_probs(F.linear(x, head, bias), ids, softcap=4.0)
        return made.log_probs, made.entropy, made.lse

    assert torch.autograd.gradcheck(log_probs, (x, head, bias)) and torch.autograd.gradcheck(of_logits, (x, head, bias))
    total = xent_ops.token_log_probs(F.linear(x, head, bias), ids).log_probs.sum()
    (grad,) = torch.autograd.grad(total, x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"of several classes a row, .* has no second derivative"):
        grad.sum().backward()


def test_columns_of_ids_are_exact(device):
    """p - y of a confident row is made before it is rounded: 16 bits of p, less one, would leave nothing."""
    logits = torch.zeros(2, 6, device=device, dtype=torch.bfloat16)
    logits[:, 0] = 12.0
    ids = torch.tensor([[0, 3], [0, 0]], device=device)
    probs = torch.tensor([[1.0, 0.0], [0.5, 0.5]], device=device)
    leaf = logits.clone().requires_grad_()
    (-(xent_ops.token_log_probs(leaf, ids).log_probs * probs).sum()).backward()
    wanted = logits.double().softmax(-1)
    wanted[:, 0] -= 1
    torch.testing.assert_close(leaf.grad.double(), wanted, rtol=0.01, atol=0)


def test_equal_ids_and_bits(device):
    """A class named twice gets both gradients, and the same bits in every run."""
    x, head, *_ = problem(device, torch.float32)
    ids = torch.randint(0, 3, (N, 40), device=device)
    factor = torch.randn(N, 40, device=device)
    grads = []
    for _ in range(3):
        value = (xent_ops.linear_token_log_probs(x, head, ids).log_probs * factor).sum()
        grads.append(torch.autograd.grad(value, (x, head)))
    for again in grads[1:]:
        assert all(map(torch.equal, again, grads[0]))
    log_q = (x @ head.t()).double().log_softmax(-1)
    wanted = torch.autograd.grad((log_q.gather(1, ids) * factor).sum(), (x, head))
    torch.testing.assert_close(grads[0], wanted, rtol=1e-4, atol=1e-4)


def test_more_pairs_than_are_compared_at_a_time(device, monkeypatch):
    monkeypatch.setattr(reference_ids, "_PAIRS", 7)
    test_equal_ids_and_bits(device)


def test_masked_classes(device):
    """A class of -inf has log-probability -inf, passes nothing on, and counts for nothing where its probability is 0."""
    logits = torch.randn(3, 6, device=device, dtype=torch.float64)
    logits[:, 2] = -math.inf
    logits.requires_grad_()
    ids = torch.tensor([[0, 2], [2, 1], [5, 4]], device=device)
    made = xent_ops.token_log_probs(logits, ids)
    assert made.log_probs[0, 1] == made.log_probs[1, 0] == -math.inf
    (grad,) = torch.autograd.grad(made.log_probs[:, 1].exp().sum(), logits)
    assert grad.isfinite().all() and not grad[:, 2].any()


def test_errors(device):
    x, head, _, ids, _ = problem(device, torch.float32)
    for text, refused in (
        ("no class a row", lambda: xent_ops.linear_token_log_probs(x, head, ids[:, :0])),
        (r"ids has shape \(8, 4\); expected \(9, 4\), K classes", lambda: xent_ops.linear_token_log_probs(x, head, ids[:8])),
        ("label_smoothing is for one target", lambda: torch.ops.xent.token_logits(x @ head.t(), ids, label_smoothing=0.1)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            refused()


def test_ids_out_of_range(device):
    """An IndexError on a CPU; on a GPU NaN in their rows, in the loss and in the gradient."""
    x, head, _, ids, _ = problem(device, torch.float32)
    ids[1, 2] = V
    if device == "cpu":
        for call in (
            lambda: xent_ops.linear_token_log_probs(x, head, ids),
            lambda: xent_ops.token_log_probs(x @ head.t(), ids),
            lambda: xent_ops.linear_token_loss(x, head, ids, lambda stats: stats.log_probs.sum(-1), reduction="sum"),
        ):
            with pytest.raises(IndexError, match="target 13 is out of bounds: valid are 0 to 12"):
                call()
        return
    for value in (
        xent_ops.linear_token_log_probs(x, head, ids).log_probs.sum(-1),
        xent_ops.token_log_probs(x @ head.t(), ids).log_probs.sum(-1),
    ):
        assert value[1].isnan() and value.isnan().sum() == 1
        grad = torch.autograd.grad(value.sum(), x)[0]
        assert grad[1].isnan().all() and grad.isnan().any(-1).sum() == 1
    assert xent_ops.linear_token_loss(x, head, ids, lambda stats: stats.log_probs.sum(-1), reduction="sum").isnan()
