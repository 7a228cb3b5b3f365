"""float32 logits of 16-bit operands: gradients of 16 bits over them, in every kernel, and the head's numbers."""

import itertools

import pytest
import torch
from helpers.covering import covering
from helpers.interpreter import INTERPRETED

import xent_ops
from xent_ops.testing import assert_linear, linear_oracle, realistic_logits

ops = torch.ops.xent
SIXTEEN = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def padded(rows, classes, step=4):
    """Logits as a head has them: a row starts at a multiple of 16 bytes, behind the classes stands NaN."""
    memory = torch.full((rows, -(-classes // step) * step), float("nan"))
    memory[:, :classes] = realistic_logits(rows, classes, dtype=torch.float32)
    return memory[:, :classes]


def front(logits, dtype):
    return logits.view(dtype)[:, : logits.shape[1]]


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "classes, dtype, full",
    covering([3, 64, 1003, 1024, 4100, 9000], [torch.bfloat16, torch.float16], [False, True]),
    ids=str,
)
def test_gradients_of_rows(device, dtype, classes, full):
    """In place and out of place: those of the float32 operators, rounded once."""
    rows = 4 if INTERPRETED else 7
    logits = padded(rows, classes).to(device)
    target = torch.arange(rows, device=device) * (classes - 1) // (rows - 1)
    target[2] = -100
    options = {"label_smoothing": 0.1, "softcap": 20.0, "logit_scale": 1.5} if full else {}
    weight = torch.rand(classes, device=device) + 0.5 if full else None
    scale, square = torch.rand(rows, device=device) - 0.5, torch.rand(rows, device=device)
    wide = ops.cross_entropy_with_grad(logits, target, scale, square, weight, True, True, **options)
    lse, entropy = wide[1], torch.rand(rows, device=device)
    upstream = (scale, square, logits, target, lse, weight)
    rest = (None, square, entropy, None, 0, None)
    backward = ops.cross_entropy_backward(*upstream, *rest, **options)
    narrow = ops.cross_entropy_with_grad(logits, target, scale, square, weight, True, True, dtype, **options)
    over, over_too = padded(rows, classes).to(device), padded(rows, classes).to(device)
    before = over.clone()
    in_place = ops.cross_entropy_with_grad_(over, target, scale, square, weight, True, True, dtype, **options)
    ops.cross_entropy_backward_(scale, square, over_too, *upstream[3:], *rest, dtype, **options)
    found = ops.cross_entropy_backward(*upstream, *rest, dtype, **options)
    torch.testing.assert_close(before, logits)
    for statistics in (narrow[:4], in_place):
        for value, expected in zip(statistics, wide[:4], strict=True):
            torch.testing.assert_close(value, expected)
    for gradient, expected in (
        (narrow[4], wide[4]),
        (front(over, dtype), wide[4]),
        (found, backward),
        (front(over_too, dtype), backward),
    ):
        assert gradient.dtype == dtype and gradient.shape == logits.shape
        torch.testing.assert_close(gradient.float(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)
    for gradient in (narrow[4], front(over, dtype)):  # backward's row has an upstream gradient of its lse
        assert gradient[2].count_nonzero() == 0


def test_what_is_refused():
    logits, target = torch.randn(2, 8), torch.zeros(2, dtype=torch.int64)
    scale, lse = torch.ones(()), torch.zeros(2)
    with pytest.raises(TypeError, match=r"grad_dtype must be None, the logits' torch.bfloat16 or, for float32"):
        ops.cross_entropy_with_grad(logits.bfloat16(), target, scale, None, None, False, False, torch.float32)
    with pytest.raises(TypeError, match=r"torch.float16; got torch.float64"):
        ops.cross_entropy_backward(scale, None, logits, target, lse, *(None,) * 5, 0, None, torch.float64)
    x, head = torch.randn(2, 4), torch.randn(8, 4)
    with pytest.raises(TypeError, match=r"logits_dtype must be None, the input's torch.float32 or, for 16-bit inputs"):
        xent_ops.linear_cross_entropy(x, head, target, logits_dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"logits_dtype must be a torch.dtype or None, got 'float32'"):
        xent_ops.linear_cross_entropy(x, head, target, logits_dtype="float32")


CASES = [
    {},
    {"label_smoothing": 0.1, "lse_square_scale": 1e-2},
    {"softcap": 5.0, "logit_scale": 1.5, "reduction": "sum"},
    {"chunk_rows": 8, "accumulate_dtype": torch.float32},
    {"chunk_rows": 8, "skip_ignored": True},
    {"reduction": "none", "chunk_rows": 16},
]


@SIXTEEN
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_heads(device, dtype, case, bias):
    """Against float64, with budgets in which logits are not rounded to 16 bits."""
    options, rows, classes, features = dict(CASES[case]), 33, 203, 24
    x = torch.randn(rows, features, device=device).to(dtype).requires_grad_()
    head = torch.randn(classes, features, device=device).to(dtype).requires_grad_()
    shift = torch.randn(classes, device=device).to(dtype).requires_grad_() if bias else None
    target = torch.randint(classes, (rows,), device=device)
    target[::5] = -100
    upstream = torch.rand(rows, device=device) if options.get("reduction") == "none" else torch.tensor(0.7)
    value = xent_ops.linear_cross_entropy(x, head, target, linear_bias=shift, logits_dtype=torch.float32, **options)
    value.backward(upstream.to(device))
    options.pop("skip_ignored", None)
    expected = linear_oracle(x, head, target, shift, upstream=upstream, logits_dtype=torch.float32, **options)
    if device == "cuda":  # whose products cut off what they add up: 1.09 of the budgets were seen, .82 on a CPU
        expected = expected._replace(grad_bounds=tuple(1.25 * bound for bound in expected.grad_bounds))
    assert_linear(value, [x.grad, head.grad, None if shift is None else shift.grad], expected)


def test_log_probabilities_come_nearer(device):
    """At least 30 times, of 16-bit operands whose products are exact in float32."""
    x = torch.randn(64, 512, device=device).bfloat16()
    head = (torch.randn(4000, 512, device=device) * (3 / 512**0.5)).bfloat16()
    target = torch.randint(4000, (64,), device=device)
    exact = xent_ops.linear_token_log_probs(x.double(), head.double(), target)
    errors = []
    for dtype in (None, torch.float32):
        found = xent_ops.linear_token_log_probs(x, head, target, logits_dtype=dtype)
        errors.append([(value - true).abs().max() for value, true in zip(found, exact, strict=True)])
    for rounded, kept in zip(*errors, strict=True):
        assert kept < rounded / 30


def test_every_way_has_the_same_logits():
    """Mean, rows, outputs, tokens' losses and log-probabilities, several classes: of one head."""
    x = torch.randn(50, 32).bfloat16().requires_grad_()
    head = torch.randn(300, 32).bfloat16().requires_grad_()
    target, wide = torch.randint(300, (50,)), {"logits_dtype": torch.float32}
    rows = xent_ops.linear_cross_entropy(x, head, target, reduction="none", **wide)
    log_probs = xent_ops.linear_token_log_probs(x, head, target, **wide).log_probs
    several = xent_ops.linear_token_log_probs(x, head, target.unsqueeze(1), **wide).log_probs
    ways = [
        xent_ops.linear_cross_entropy(x, head, target, **wide),
        rows.mean(),
        -log_probs.mean(),
        -several.mean(),
        xent_ops.linear_cross_entropy_outputs(x, head, target, **wide).loss,
        xent_ops.linear_token_loss(
            x, head, target, lambda stats: -stats.log_probs, reduction="sum", divisor=50, **wide
        ),
        xent_ops.linear_token_loss(
            x, head, target.unsqueeze(1), lambda stats: -stats.log_probs[:, 0], reduction="sum", divisor=50, **wide
        ),
        xent_ops.linear_top_k_distillation_loss(
            x, head, target.unsqueeze(1).expand(50, 2), torch.full((50, 2), 0.5), **wide
        ),
        xent_ops.linear_top_k_distillation_loss(x, head, target.unsqueeze(1), torch.ones(50, 1), tail=True, **wide),
    ]
    gradients = [torch.autograd.grad(value, (x, head)) for value in ways]
    for value, gradient in zip(ways[1:], gradients[1:], strict=True):
        torch.testing.assert_close(value, ways[0], rtol=1e-5, atol=1e-6)
        for found, expected in zip(gradient, gradients[0], strict=True):
            torch.testing.assert_close(found.float(), expected.float(), rtol=0.02, atol=2e-4)


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled(backend):
    """Fullgraph, and bits as in eager: the loop over chunks is in the graph."""
    target = torch.randint(300, (50,))

    def both(x, head, wanted):
        reward = xent_ops.linear_token_loss(
            x, head, target, lambda stats: -stats.log_probs - 0.1 * stats.entropy, reduction="sum", **wanted
        )
        return reward, xent_ops.linear_cross_entropy(x, head, target, **wanted)

    wanted = {"logits_dtype": torch.float32, "chunk_rows": 16}
    made = []
    for function in (both, torch.compile(both, fullgraph=True, backend=backend)):
        torch.manual_seed(1)
        x, head = torch.randn(50, 32).bfloat16().requires_grad_(), torch.randn(300, 32).bfloat16().requires_grad_()
        losses = function(x, head, wanted)
        made.append((*losses, *torch.autograd.grad(sum(losses), (x, head))))
    for eager, compiled in itertools.zip_longest(*made):
        torch.testing.assert_close(compiled, eager, rtol=1e-5 if eager.dtype == torch.float32 else 0.01, atol=1e-6)
