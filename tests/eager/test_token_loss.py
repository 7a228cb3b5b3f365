"""A function of each token's statistics as the loss: published ones, how often what runs, what is refused."""

import math
import operator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers.dispatch_log import operators_of
from helpers.heads import random_head
from helpers.token_losses import LOSSES, dft, expected, focal, grpo, reinforce, rows_of
from torch.utils.checkpoint import checkpoint

import xent_ops
from xent_ops.head import loop

V = 37
problem = partial(random_head, classes=V, scale=0.5)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 4e-2}


def oracle(fn, x, head, bias, target, rows, **options):
    """(value, gradients) in float64."""
    leaves = [tensor.detach().double().requires_grad_() for tensor in (x, head, bias)]
    value = expected(fn, F.linear(*leaves), target, rows, **options)
    return value, torch.autograd.grad(value, leaves, allow_unused=True)


def assert_close(actual, wanted, dtype):
    for mine, other in zip(actual, wanted, strict=True):
        assert mine.dtype in (dtype, torch.float32, torch.float64)
        scale = other.abs().max().clamp(min=1e-3) if other.numel() else 1.0
        assert ((mine.double() - other).abs() <= TOLERANCE[dtype] * scale).all(), (mine, other)


@pytest.mark.parametrize("name", LOSSES)
def test_published_losses(device, name):
    """Functions that are not linear in the statistics."""
    x, head, bias, target = problem(device, torch.float64)
    rows = rows_of(LOSSES[name], target.shape, device, torch.float64)
    wanted, wanted_grads = oracle(LOSSES[name], x, head, bias, target, rows)
    for loss in (
        of_head(x, head, target, LOSSES[name], rows=rows, linear_bias=bias, chunk_rows=3),
        xent_ops.token_loss(F.linear(x, head, bias), target, LOSSES[name], rows=rows, reduction="sum"),
    ):
        assert_close([loss, *torch.autograd.grad(loss, (x, head, bias))], [wanted, *wanted_grads], torch.float64)


def of_logits(x, head, target, fn, **options):
    return xent_ops.token_loss(F.linear(x, head), target, fn, reduction="sum", **options)


def of_head(x, head, target, fn, **options):
    return xent_ops.linear_token_loss(x, head, target, fn, reduction="sum", **options)


BOTH = pytest.mark.parametrize("function", [of_head, of_logits], ids=["linear", "logits"])


def test_rows_of_other_shapes_and_dtypes(device):
    x, head, bias, target = problem(device)
    two = torch.randn(*target.shape, 2, device=device, dtype=torch.float64)
    whole, flag = torch.randint(3, target.shape, device=device), target > 9

    def fn(stats, pair, whole, flag):
        return torch.where(flag, stats.log_probs * pair[:, 0], whole * pair.prod(-1) * stats.lse).double()

    wanted, wanted_grads = oracle(fn, x, head, bias, target, (two, whole, flag))
    loss = xent_ops.linear_token_loss(
        x, head, target, fn, rows=(two, whole, flag), linear_bias=bias, chunk_rows=7, reduction="sum"
    )
    assert loss.dtype == torch.float32
    assert_close([loss, *torch.autograd.grad(loss, (x, head, bias))], [wanted, *wanted_grads], torch.float32)


# What runs


CHUNK = ["linear_logits", "cross_entropy_forward", "cross_entropy_backward_", "linear_grad_input"]
CHUNK += ["linear_cross_entropy_chunk_add_"]
VALUE = ["row_summary", "attach_gradients"]
FOUR = ["linear_cross_entropy_forward"], ["linear_cross_entropy_backward"]


def test_three_products_and_four(device):
    x, head, _, target = problem(device)

    def loss(x=x, head=head, **options):
        return xent_ops.linear_token_loss(x, head, target, focal, reduction="sum", **options)

    forward = operators_of(lambda: loss(chunk_rows=10))
    assert forward == [*CHUNK, *CHUNK, *VALUE]
    assert operators_of(lambda: loss(head=head.detach())) == [*CHUNK[:4], *VALUE]
    assert operators_of(lambda: loss(x.detach(), head.detach())) == [*FOUR[0], "row_summary"]
    with torch.no_grad():
        assert operators_of(loss) == [*FOUR[0], "row_summary"]
    assert operators_of(lambda: loss(skip_ignored=True)) == [*CHUNK, *VALUE]
    again = operators_of(lambda: checkpoint(loss, x, head, use_reentrant=False).backward())
    assert again == [*FOUR[0], *FOUR[0], *FOUR[1]]


@pytest.mark.parametrize(
    ("fn", "read"),
    [
        (focal, False),
        (reinforce, True),  # it unpacks
        (lambda stats, *_: stats.lse, False),
        (lambda stats, *_: stats[0], False),
        (lambda stats, *_: stats[1], True),
        (lambda stats, *_: stats.log_probs * stats.entropy.detach(), True),
    ],
)
def test_an_entropy_that_is_not_read_is_not_computed(device, monkeypatch, fn, read):
    x, head, _, target = problem(device)
    rows, seen = rows_of(reinforce, target.shape, device) if fn is reinforce else (), []
    chunk = torch.ops.xent.cross_entropy_forward

    def noted(*args, **options):
        seen.append(args[4])
        return chunk(*args, **options)

    monkeypatch.setattr(torch.ops.xent, "cross_entropy_forward", noted)
    xent_ops.linear_token_loss(x, head, target, fn, rows=rows, reduction="sum")
    assert seen == [read]


@pytest.mark.parametrize("field", ["log_probs", "lse", "entropy"])
@pytest.mark.parametrize("ids", [False, True])
def test_what_is_not_read_needs_no_gradient(device, monkeypatch, field, ids):
    x, head, _, target = problem(device)
    chosen = torch.stack([target, (target + 1) % V], -1) if ids else target
    owner, name = (loop, "token_logits_backward") if ids else (torch.ops.xent, "cross_entropy_backward_")
    seen, write_gradient = [], getattr(owner, name)

    def fn(stats):
        values = getattr(stats, field).square()
        return values.sum(-1) if values.dim() == 2 else values

    def noted(**arguments):
        seen.append({"lse": arguments["grad_lse"] is not None, "entropy": arguments["grad_entropy"] is not None})
        return write_gradient(**arguments)

    monkeypatch.setattr(owner, name, noted)
    loss = xent_ops.linear_token_loss(x, head, chosen, fn, reduction="sum")
    stats = xent_ops.linear_token_log_probs(x, head, chosen)
    counted = (chosen != -100).reshape(*target.shape, -1).any(-1)
    values = getattr(stats, field).square()
    wanted = (values.sum(-1) if values.dim() > target.dim() else values)[counted].sum()
    torch.testing.assert_close(torch.autograd.grad(loss, (x, head)), torch.autograd.grad(wanted, (x, head)))
    assert seen[:1] == [{"lse": field == "lse" or ids, "entropy": field == "entropy"}]


@pytest.mark.parametrize("ignored", ["some", "all", "none"])
def test_skipping(device, ignored):
    """The counted tokens alone, packed to the front: the same numbers."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16  # which has products that count rows
    x, head, bias, target = problem(device, dtype, (6, 8))
    target = {"some": target, "all": target.fill_(-100), "none": target.clamp(min=0)}[ignored]
    rows = (*rows_of(grpo, target.shape, device)[:1], torch.randn(6, 8, 2, device=device))

    def fn(stats, old, pair):
        return grpo(stats, old, pair[:, 0]) * pair[:, 1]

    results = []
    for skip_ignored in (False, True):
        given = {"rows": rows, "linear_bias": bias, "divisor": 3.0, "chunk_rows": 20, "skip_ignored": skip_ignored}
        loss = xent_ops.linear_token_loss(x, head, target, fn, reduction="sum", **given)
        results.append([loss, *torch.autograd.grad(loss, (x, head, bias))])
    assert (results[1][1][target == -100] == 0).all()
    assert_close(results[1], [value.double() for value in results[0]], dtype)


def test_a_hook_sees_the_gradient_and_there_is_no_second(device):
    x, head, bias, target = problem(device)
    loss = xent_ops.linear_token_loss(x, head, target, focal, linear_bias=bias, reduction="sum")
    (grad,) = torch.autograd.grad(loss, x)
    with pytest.raises(RuntimeError, match="this loss has no second derivative"):
        once = xent_ops.linear_token_loss(x, head, target, focal, reduction="sum")
        torch.autograd.grad(once, x, create_graph=True)
    seen = []
    x.register_hook(lambda grad: seen.append(grad.clone()))
    xent_ops.linear_token_loss(x, head, target, focal, linear_bias=bias, reduction="sum").backward()
    torch.testing.assert_close(seen[0], grad)


def test_the_callers_tensors_stay_as_they_are(device):
    x, head, bias, target = problem(device)
    rows = rows_of(grpo, target.shape, device)
    given = (x, head, bias, target, *rows)
    before = [(tensor.detach().clone(), tensor._version) for tensor in given]
    xent_ops.linear_token_loss(
        x, head, target, grpo, rows=rows, linear_bias=bias, chunk_rows=3, reduction="sum"
    ).backward()
    for tensor, (value, version) in zip(given, before, strict=True):
        assert torch.equal(tensor, value) and tensor._version == version


# What is refused

learned = torch.ones((), requires_grad=True)
REFUSED = {
    "no function": (3, {}, TypeError, r"fn must be a function of \(stats, \*rows\), got .*int"),
    "a mean": (lambda s: s.log_probs.mean(), {}, ValueError, r"fn returned shape \(\) for 2 tokens; expected \(2,\)"),
    "a sum that is kept": (lambda s: s.lse.sum(0, keepdim=True), {}, ValueError, r"shape \(1,\) for 2 tokens"),
    "two a token": (lambda s: torch.stack([s.lse, s.lse], 1), {}, ValueError, r"shape \(2, 2\)"),
    "integers": (lambda s: s.lse.long(), {}, TypeError, "fn returned a tensor of dtype torch.int64; expected floating"),
    "nothing": (lambda s: None, {}, TypeError, "fn returned .*None.*; expected a tensor"),
    "its stats": (lambda s: s, {}, TypeError, "fn returned its stats; expected a tensor"),
    "closes over a parameter": (lambda s: s.lse * learned, {}, RuntimeError, "closes over a tensor that requires grad"),
    "rows that are a tensor": (dft, {"rows": torch.ones(4, 5)}, TypeError, r"for one tensor pass rows=\(tensor,\)"),
    "rows that are none": (dft, {"rows": (1.0,)}, TypeError, r"rows\[0\] must be a torch.Tensor, got .*float"),
    "rows of another length": (dft, {"rows": (torch.ones(5, 4),)}, ValueError, r"rows\[0\] has shape \(5, 4\); expected"),
    "fewer dimensions": (dft, {"rows": (torch.ones(4),)}, ValueError, r"rows\[0\] has shape \(4,\)"),
    "rows that are learned": (dft, {"rows": (learned.expand(4, 5),)}, RuntimeError, r"rows\[0\] requires grad"),
    "a divisor of zero": (dft, {"divisor": 0}, ValueError, "divisor must be a finite number above 0, got 0"),
    "a learned divisor": (dft, {"divisor": learned}, RuntimeError, "divisor requires grad"),
    "check of another kind": (dft, {"check": 1}, TypeError, "check must be True or False"),
}  # fmt: skip


@BOTH
@pytest.mark.parametrize("what", REFUSED)
def test_refused(function, what):
    fn, options, error, text = REFUSED[what]
    x, head, _, target = problem("cpu")
    if function is of_logits and what == "a learned divisor":
        pytest.skip("given logits have a derivative for it")
    with pytest.raises(error, match=text):
        function(x, head, target, fn, **options)


def setitem(stats):
    stats[0] = 0


def delitem(stats):
    del stats[0]


def iadd(stats):
    stats += 1.0


BINARY = "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift lt le gt ge eq ne"
OPERATIONS = {
    **{name: getattr(operator, name) for name in ["neg", "pos", "abs", "invert", "not_", "truth", "index"]},
    **{name: lambda s, name=name: getattr(operator, name)(s, 2.0) for name in BINARY.split()},
    **{f"r{name}": lambda s, name=name: getattr(operator, name)(2.0, s) for name in BINARY.split()},
    "of a tensor": lambda s: torch.ones(2) - s,
    **{function.__name__: function for function in (round, float, int, complex, math.floor, math.ceil, math.trunc)},
    **{"divmod": lambda s: divmod(s, 2), "rdivmod": lambda s: divmod(2, s), "in": lambda s: 1.0 in s},
    **{"name": lambda s: s["log_probs"], "mask": lambda s: s[s.lse > 0], "call": lambda s: s()},
    **{function.__name__: function for function in (setitem, delitem, iadd)},
    **{"exp": lambda s: torch.exp(s), "stack": lambda s: torch.stack([s, s])},
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_stats_are_no_tensor(name):
    x, w, target = torch.randn(4, 3), torch.randn(7, 3), torch.arange(4)
    for function in (xent_ops.linear_token_loss, of_logits):
        with pytest.raises(TypeError, match=r"stats is no tensor: it has stats\.log_probs"):
            function(x, w, target, OPERATIONS[name])


def test_what_stats_can_do():
    """All that a TokenLogProbs can, as the tuple that it is."""

    def fn(stats):
        log_probs, _, lse = stats
        assert len(stats) == 3 and stats[0] is log_probs and stats[-1] is lse and len(stats[:2]) == 2
        return -stats.log_probs

    x, head, _, target = problem("cpu")
    assert xent_ops.linear_token_loss(x, head, target, fn, reduction="sum").isfinite()


def test_what_an_error_of_the_function_says():
    x, head, _, target = problem("cpu")
    of_some = torch.ones(7)
    with pytest.raises(RuntimeError) as raised:
        xent_ops.linear_token_loss(x, head, target, lambda stats: stats.lse * of_some, reduction="sum")
    assert any(
        "by rows=, here 0 of them" in note for note in getattr(raised.value, "__notes__", ["by rows=, here 0 of them"])
    )
    with pytest.raises(AttributeError, match="TokenLogProbs has no 'logprobs'; use log_probs"):
        xent_ops.linear_token_loss(x, head, target, lambda stats: stats.logprobs, reduction="sum")


@BOTH
def test_functions_that_write_to_their_rows(device, function):
    x, head, _, target = problem(device)
    row = torch.ones(4, 5, device=device)

    def fn(stats, row):
        row.mul_(2)
        return stats.log_probs * row

    loss = function(x, head, target, fn, rows=(row,))
    torch.testing.assert_close(loss, function(x, head, target, lambda stats: 2 * stats.log_probs))
    assert (row == 1).all()


@BOTH
def test_functions_that_mix_tokens(device, function):
    x, head, _, target = problem(device)

    def centred(stats):
        return -(stats.log_probs - stats.log_probs.mean()) * stats.lse

    with pytest.raises(ValueError, match=r"it must not mix tokens.*linear_token_log_probs"):
        function(x, head, target, centred, check=True)
    for fn in LOSSES.values():
        function(x, head, target, fn, rows=rows_of(fn, target.shape, device), check=True)
