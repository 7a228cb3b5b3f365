"""Whether a compiled gradient may be written over the logits, where other tensors lie in the same memory."""

import pytest
import torch
import torch.nn.functional as F
from helpers.graphs import calls_of, run_and_get_code

import xent_ops
from xent_ops import cross_entropy as ce

pytestmark = pytest.mark.usefixtures("cpu_as_cuda")

IN_PLACE = "cross_entropy_backward_"


def huber(x):
    return F.huber_loss(x, torch.zeros_like(x))


def sequences(x, t, cut):
    """The logits of (2, 12) tokens without the last ones, and the targets that many tokens ahead."""
    return ce(x.view(2, 12, -1)[:, :-cut], t.view(2, 12)[:, cut:], dim=-1)


# The loss of 24 rows of logits, and whether only the loss reads their memory.
ALONE = {
    "plain": lambda x, t: ce(x, t),
    "next token": lambda x, t: sequences(x, t, 1),
    "next token, dense": lambda x, t: ce(x.view(2, 12, -1)[:, :-1].reshape(22, -1), t[:22]),
    "options": lambda x, t: ce(x, t, lse_square_scale=1e-2, label_smoothing=0.1, softcap=20.0),
    "accuracy beside it": lambda x, t: (ce(x, t), (x.argmax(-1) == t).float().mean()),
    "perplexity": lambda x, t: 3.0 * ce(x, t).exp(),
    "predictions": lambda x, t: xent_ops.cross_entropy_outputs(x, t),
}
SHARED = {
    "rows that overlap": lambda x, t: ce(x[:8], t[:8]) + 0.5 * ce(x[4:12], t[4:12]),
    "classes that overlap": lambda x, t: ce(x[:, :60], t % 60) + ce(x[:, 30:90], t % 60),
    "coarse and fine": lambda x, t: ce(x[:, :50], t % 50) + ce(x, t),
    "two views": lambda x, t: ce(x.view(-1, x.shape[1] // 2)[:20], t[:20] % 60) + ce(x[0, :20], t[0] % 20),
    "one more loss": lambda x, t: ce(x, t) + ce(x, t.flip(0)),
    "two and three tokens ahead": lambda x, t: sequences(x, t, 1) + 0.5 * sequences(x, t, 2),
    "huber": lambda x, t: ce(x[:12], t[:12]) + huber(x[10:14]),
    "smooth l1": lambda x, t: ce(x[:12], t[:12]) + F.smooth_l1_loss(x[10:14], torch.zeros_like(x[10:14])),
    "distillation": lambda x, t: ce(x, t) + F.log_softmax(x[3:9].float(), -1).square().mean(),
    "tanh": lambda x, t: ce(x[:12], t[:12]) + x[10:14].tanh().sum(),
    "overlap of one product made twice": lambda x, t, again: ce(x[:12], t[:12]) + huber(again()[10:14]),
    "overlap of one product made twice, losses": lambda x, t, again: ce(x[:8], t[:8]) + ce(again()[4:12], t[4:12]),
    "upcast twice": lambda x, t: ce((x := x.bfloat16()).float()[:12], t[:12]) + huber(x.float()[10:14]),
    "part of a cat": lambda x, t: ce(torch.cat([a := x[:12] * 2, x[12:] * 3])[2:10], t[2:10]) + huber(a[4:8]),
    "returned part of a stack": lambda x, t: (
        ce(torch.stack([a := x[:12].tanh(), x[12:] * 3]).view(24, -1), t),
        a[4:8],
    ),
    "rows that overlap themselves": lambda x, t: ce(x.as_strided((3, 600), (300, 1)), t[:3] % 600),
    "factor read again": lambda x, t: ce(x[:12], t[:12]) * (x[10:14].sigmoid() * x[10:14].tanh()).mean(),
    "upcast factor": lambda x, t: ce((x := x.bfloat16())[:12], t[:12]) * (x[10:14].float() * 0.1).exp().mean(),
    "factor of each row": lambda x, t: (ce(x[:12], t[:12], reduction="none") * x[10:22].sigmoid().mean(-1)).sum(),
    "returned": lambda x, t: (ce(x, t), x[10:14]),
    # Inductor may allocate the product with room for the padding.
    "padded, read without": lambda x, t: ce(F.pad(x, (0, 24), value=-9.0), t) + huber(x[10:14]),
    "padded, returned without": lambda x, t: (ce(F.pad(x, (0, 24)), t), x[10:14]),
}


# One of each way to share memory; the others are slow.
QUICK = (*("next token", "accuracy beside it", "rows that overlap", "upcast twice", "returned"),)


def _cases():
    for name in ALONE | SHARED:
        yield pytest.param(name, None, marks=() if name in QUICK else pytest.mark.slow)
    for name in ("next token, dense", "two views", "huber"):
        yield pytest.param(name, True, marks=() if name == "next token, dense" else pytest.mark.slow)


@pytest.mark.parametrize("name, dynamic", _cases())
def test_gradients_are_those_of_eager(device, name, dynamic):
    """With the gradient over the logits where it may be, and nowhere else: slices that are saved apart look donated."""
    loss_of = (ALONE | SHARED)[name]
    h, w = torch.randn(24, 16, device=device), torch.randn(1000, 16, device=device)
    t = torch.randint(0, 1000, (24,), device=device)

    def outputs(h, w):
        again = [lambda: h @ w.T] if "made twice" in name else []
        result = loss_of(h @ w.T, t, *again)
        return result if isinstance(result, tuple) else (result,)

    def run(function):
        leaves = [x.clone().requires_grad_() for x in (h, w)]
        loss, *rest = function(*leaves)
        kept = [x.clone() for x in rest]
        loss.backward()
        torch.testing.assert_close(rest, kept)  # what was returned is not written over either
        return [x.grad for x in leaves]

    grads, code = run_and_get_code(run, torch.compile(outputs, fullgraph=True, dynamic=dynamic))
    assert calls_of(IN_PLACE, "".join(code)) == (name in ALONE)
    share = 2e-2 if "upcast" in name else 1e-5  # upcasts are of bfloat16; what is written over is off by .05 and more
    for grad, wanted in zip(grads, run(outputs), strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=share * wanted.abs().max().item())


class Unscaled(torch.autograd.Function):
    """Passes the loss on, and makes of a slice of the logits a gradient that does not wait for an upstream one."""

    @staticmethod
    def forward(ctx, loss, part, other, way):
        ctx.save_for_backward(part.expand(other.shape).tanh() if way == "made in forward" else part, other)
        ctx.way = way
        return loss.clone()

    @staticmethod
    def backward(ctx, grad):
        part, other = ctx.saved_tensors
        if ctx.way == "written to a buffer":
            other.copy_(part.expand(other.shape))
            return grad, None, None, None
        return grad, None, part if ctx.way == "made in forward" else 1.0 * part * torch.ones_like(other), None


@pytest.mark.parametrize("way", ["made in backward", "made in forward", "written to a buffer"])
def test_a_backward_that_ignores_its_upstream_gradient(device, way):
    """As that of an auxiliary loss does which Megatron scales, or a statistic of what was saved."""
    h, w = torch.randn(24, 16, device=device), torch.randn(1000, 16, device=device)
    t = torch.randint(0, 1000, (24,), device=device)

    def loss_of(h, w, other):
        x = h @ w.T
        return Unscaled.apply(ce(x[:12], t[:12]), x[10:14].detach(), other, way)

    def run(function):
        leaves = [x.clone().requires_grad_() for x in (h, w)]
        other = torch.zeros(6, 4, 1000, device=device, requires_grad=way != "written to a buffer")
        function(*leaves, other).backward()
        return [x.grad for x in leaves] + [other.detach() if other.grad is None else other.grad]

    for got, wanted in zip(run(torch.compile(loss_of, fullgraph=True)), run(loss_of), strict=True):
        assert wanted.abs().max() > 0
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())


def test_no_row_has_no_memory_to_share(device):
    """The usual shift of one token: rows of strides (0, 0) arrive at the kernel."""
    h, w = torch.randn(1, 16, device=device, requires_grad=True), torch.randn(200, 16, device=device)
    t = torch.zeros(1, 1, dtype=torch.int64, device=device)

    def loss_of(h):
        logits = (h @ w.T)[None]
        return ce(logits[:, :-1].reshape(-1, 200), t[:, 1:].reshape(-1), reduction="sum")

    loss = torch.compile(loss_of, fullgraph=True)(h)
    loss.backward()
    assert loss == 0 and h.grad.count_nonzero() == 0


def test_without_the_mark_nothing_is_written_over(device):
    """The pass that marks has to have run: not, for one, where Inductor's pattern matcher is off."""
    h = torch.randn(24, 16, device=device, requires_grad=True)
    w, t = torch.randn(1000, 16, device=device), torch.randint(0, 1000, (24,), device=device)
    step = torch.compile(lambda h: ce(h @ w.T, t), options={"pattern_matcher": False})
    _, code = run_and_get_code(lambda: step(h).backward())
    assert not calls_of(IN_PLACE, "".join(code)) and calls_of("cross_entropy_backward", "".join(code))
