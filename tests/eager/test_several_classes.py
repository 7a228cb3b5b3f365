"""Several classes a row: equal ones, masked ones, what is refused. Values: tests/fuzz."""

import math

import pytest
import torch
import torch.nn.functional as F

import xent_ops
from xent_ops.kernels import reference_ids

N, H, V, K = 9, 5, 13, 4
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


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


def test_there_is_no_second_derivative(device):
    x, head, bias, ids, _ = problem(device)
    total = xent_ops.token_log_probs(F.linear(x, head, bias), ids).log_probs.sum()
    (grad,) = torch.autograd.grad(total, x, create_graph=True)
    with pytest.raises(RuntimeError, match="this loss has no second derivative"):
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
    ops, rows, factors = torch.ops.xent, (x, head, ids[:, 0]), torch.ones(V, device=device)
    upstream, of_ids = (x[0, 0], None, *rows, x[:, 0]), {"ids": ids, "at_ids": x[:, :4], "grad_ids": x[:, :4]}
    for text, refused in (
        ("no class a row", lambda: xent_ops.linear_token_log_probs(x, head, ids[:, :0])),
        (r"ids has shape \(8, 4\); expected \(9, 4\), K classes", lambda: xent_ops.linear_token_log_probs(x, head, ids[:8])),
        ("label_smoothing is for one target", lambda: ops.token_logits(x @ head.t(), ids, label_smoothing=0.1)),
        ("weight is for one target", lambda: ops.linear_cross_entropy_forward(*rows, weight=factors, ids=ids)),
        ("mask_ids=True masks the columns of ids", lambda: ops.linear_cross_entropy_forward(*rows, mask_ids=True)),
        ("divisors is for one target", lambda: ops.linear_cross_entropy_backward(*upstream, divisors=factors[:2], **of_ids)),
        ("lse_square_scale is", lambda: ops.linear_cross_entropy_backward(*upstream, lse_square_scale=0.1, **of_ids)),
        ("grad_ids go together", lambda: ops.linear_cross_entropy_backward(*upstream, ids=ids)),
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
            with pytest.raises(
                IndexError, match=r"^id 13 is out of bounds: valid are 0 to 12 .*ids are classes of this head"
            ):
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
