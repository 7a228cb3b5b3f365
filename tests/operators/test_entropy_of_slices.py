"""Entropies beside a slice of the classes, and in place: the gradient of each slice against the whole vocabulary."""

import pytest
import torch
from flat_options import FlatOptions
from helpers.covering import covering
from helpers.interpreter import INTERPRETED

from xent_ops.kernels import reference, reference_linear
from xent_ops.testing import realistic_logits

pytestmark = pytest.mark.interpreter
ops = torch.ops.xent

DTYPES = [torch.float32, torch.bfloat16] if INTERPRETED else [torch.float32, torch.bfloat16, torch.float64]
SLICES = [(0, 150), (150, 0), (150, 53)]
OPTIONS = {
    "plain": {},
    "all": {"label_smoothing": 0.125, "softcap": 8.0, "logit_scale": 0.75, "lse_square_scale": 0.05},
}


def leaves(target, dtype):
    """Upstream gradients of loss, lse and entropy: float32, float64 with float64 logits."""
    generator = torch.Generator().manual_seed(3)
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    return [torch.randn(target.shape, generator=generator).to(target.device, kind) for _ in range(3)]


def of_all(logits, target, weight, grads, options):
    """lse, entropy, d loss / d lse and the gradient of the whole vocabulary, by torch in float64."""
    z = logits.double().clone().requires_grad_()
    scores = z * options.get("logit_scale", 1.0)
    if cap := options.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    classes, smoothing = z.shape[-1], options.get("label_smoothing", 0.0)
    w = torch.ones(classes, dtype=z.dtype, device=z.device) if weight is None else weight.double()
    counted = target >= 0
    safe = target.clamp(min=0)
    lse, log_p = scores.logsumexp(-1), scores.log_softmax(-1)
    p = log_p.exp()
    entropy = torch.where(counted, -(p * torch.where(p == 0, 0.0, log_p)).sum(-1), 0.0)
    loss = -(1 - smoothing) * w[safe] * log_p.gather(-1, safe[:, None])[:, 0] - smoothing / classes * (w * log_p).sum(
        -1
    )
    a, b, c = (grad.double() for grad in grads)
    square = options.get("lse_square_scale", 0.0) * a * lse.square()
    total = (torch.where(counted, a * loss + square, 0.0) + b * lse + c * entropy).sum()
    lse_coefficient = torch.where(counted, (1 - smoothing) * w[safe] + smoothing / classes * w.sum(), 0.0)
    return lse.detach(), entropy.detach(), lse_coefficient, torch.autograd.grad(total, z)[0]


@pytest.fixture(params=["operators", "twin", "plain torch"])
def backward(request, device):
    """The backward of slices: the operator, its twin on a copy of the logits, the function in plain torch."""
    if request.param == "operators":
        return ops.cross_entropy_backward
    if request.param == "plain torch":
        return FlatOptions(reference).cross_entropy_backward

    def over_a_copy(grad_loss, grad_lse, logits, *args, **options):
        written = logits.clone()
        assert ops.cross_entropy_backward_(grad_loss, grad_lse, written, *args, **options) is None
        return written

    return over_a_copy


def assert_gradient(grad, wanted, dtype):
    assert grad.dtype == dtype
    eps = max(torch.finfo(dtype).eps, 64 * torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps)
    torch.testing.assert_close(grad.double(), wanted, rtol=2 * eps, atol=eps * wanted.abs().max().item() / 4)


@pytest.mark.parametrize("dtype, name, weighted", covering(DTYPES, OPTIONS, [False, True]), ids=str)
def test_the_gradients_of_slices_are_those_of_the_whole(device, backward, dtype, name, weighted):
    """With a masked class, an ignored row, an empty slice, and padding of NaN behind the last class."""
    options = OPTIONS[name]
    logits = realistic_logits(6, 203, dtype=dtype)
    logits[3, 100:] = float("-inf")
    logits = logits.to(device)
    target = torch.tensor([0, 202, 64, 5, -100, 7], device=device)
    weight = torch.rand(203, generator=torch.Generator().manual_seed(2)).to(device) if weighted else None
    grads = leaves(target, dtype)
    lse, entropy, lse_coefficient, wanted = of_all(logits, target, weight, grads, options)
    lse, entropy, lse_coefficient = (value.to(grads[0].dtype) for value in (lse, entropy, lse_coefficient))
    parts = []
    for start, size in SLICES:
        part = logits[:, start : start + size]
        w = None if weight is None else weight[start : start + size]
        if start + size == 203 and size:
            part = torch.cat([part, part.new_full((6, 5), float("nan"))], -1)
            w = None if w is None else torch.cat([w, w.new_ones(5)])
        rest = (w, None, grads[2], entropy, lse_coefficient if weighted else None, start, 203)
        parts.append(backward(*grads[:2], part, target, lse, *rest, **options))
    grad = torch.cat(parts, -1)
    assert grad[:, 203:].count_nonzero() == 0, "padding got a gradient"
    assert_gradient(grad[:, :203], wanted, dtype)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_twin_writes_over_the_logits(device, dtype, name):
    """Of all classes, the same bits as the operator; rows with a gap leave what lies between them."""
    options = OPTIONS[name]
    whole = realistic_logits(6, 203, dtype=dtype, padding=9).to(device)
    target = torch.tensor([0, 202, 64, 5, -100, 7], device=device)
    grads = leaves(target, dtype)
    _, lse, _, entropy, _ = ops.cross_entropy_forward(
        whole, target, with_entropy=True, **{k: v for k, v in options.items() if k != "lse_square_scale"}
    )
    _, exact, _, wanted = of_all(whole, target, None, grads, options)
    torch.testing.assert_close(entropy.double(), exact, rtol=1e-5, atol=1e-5)
    arguments = (target, lse, None, None, grads[2], entropy)
    apart = ops.cross_entropy_backward(*grads[:2], whole, *arguments, **options)
    assert_gradient(apart, wanted, dtype)
    storage = whole.as_strided((whole.untyped_storage().nbytes() // whole.element_size(),), (1,), 0).clone()
    assert ops.cross_entropy_backward_(*grads[:2], whole, *arguments, **options) is None
    assert torch.equal(whole, apart)
    after = whole.as_strided(storage.shape, (1,), 0)
    gap = torch.ones_like(storage, dtype=torch.bool)
    gap.as_strided(whole.shape, whole.stride(), whole.storage_offset()).fill_(False)
    assert torch.equal(after[gap], storage[gap])


def test_a_slice_passes_nothing_back_where_all_gradients_are_zero(device, backward):
    x = torch.randn(3, 40, device=device)
    x[1] = float("nan")
    target, zero = torch.tensor([3, 5, 39], device=device), torch.zeros(3, device=device)
    only = torch.tensor([0.0, 0.0, 1.0], device=device)
    _, lse, _, entropy, _ = ops.cross_entropy_forward(x, target, with_entropy=True)
    grad = backward(zero, None, x[:, :20], target, lse, None, None, only, entropy, None, 0, 40)
    assert grad[:2].count_nonzero() == 0 and grad[2].count_nonzero() == 20


def test_a_slice_of_a_head(device):
    """The backward of the rank's rows of the head with entropies, against all logits in plain torch."""
    generator = torch.Generator().manual_seed(4)
    x, head, bias = (torch.randn(*shape, generator=generator).to(device) for shape in ((6, 8), (37, 8), (37,)))
    target = torch.tensor([0, 36, 5, -100, 7, 20], device=device)
    # An ignored row that is skipped gives nothing, whatever the upstream of its lse and entropy.
    grads, options = [torch.where(target >= 0, grad, 0.0) for grad in leaves(target, x.dtype)], {"softcap": 5.0}
    logits = x @ head.t() + bias
    lse, entropy, _, _ = of_all(logits, target, None, grads, options)
    saved = (lse.float(), bias, None, None, grads[2], entropy.float())
    wanted = FlatOptions(reference_linear).linear_cross_entropy_backward(*grads[:2], x, head, target, *saved, **options)
    for how in ({"chunk_rows": 4}, {"chunk_rows": 4, "skip_ignored": True}):
        parts = []
        for start, end in ((0, 17), (17, 37)):
            rows = (lse.float(), bias[start:end], None, None, grads[2], entropy.float(), None, start, 37)
            parts.append(
                ops.linear_cross_entropy_backward(*grads[:2], x, head[start:end], target, *rows, **options, **how)
            )
        made = [sum(part[0] for part in parts), *(torch.cat([part[i] for part in parts]) for i in (1, 2))]
        torch.testing.assert_close(made, list(wanted), rtol=1e-4, atol=1e-5)
