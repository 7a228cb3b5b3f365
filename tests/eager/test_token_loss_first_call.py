"""What the first call of a function of tokens finds, and what later calls do that the first one did not."""

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
from helpers.dispatch_log import operators_of
from helpers.heads import random_head
from helpers.token_losses import focal

import xent_ops

N = 6
ROW, LEARNED = torch.ones(N), torch.ones((), requires_grad=True)


def problem():
    x, head, _, target = random_head(rows=(N,), classes=11, ignored=[])
    return x, head, target


def of_logits(x, head, target, fn, **options):
    return xent_ops.token_loss(F.linear(x, head), target, fn, **options)


BOTH = pytest.mark.parametrize("function", [xent_ops.linear_token_loss, of_logits], ids=["linear", "logits"])
NO_GRAD = "fn returned a tensor that needs no grad, so all gradients would be zero"
REFUSED = {
    "a constant": (lambda s: torch.ones_like(s.lse), {}, NO_GRAD),
    "a detached value": (lambda s: s.log_probs.detach(), {"check": True}, NO_GRAD),
    "rows alone": (lambda s, row: row, {"rows": (ROW,)}, NO_GRAD),
    "a function in no_grad": (torch.no_grad()(lambda s: -s.log_probs), {}, NO_GRAD),
    "a number of tokens": (lambda s: s.lse * s.lse.max().item(), {}, r"fn reads a value of its tokens by item\(\)"),
    "a number of rows": (lambda s, row: s.lse * row.mean().item(), {"rows": (ROW,)}, r"by item\(\)"),
    "a list": (lambda s: s.lse * max(s.lse.tolist()), {}, r"by tolist\(\)"),
    "a branch": (lambda s: s.lse if (s.lse > 0).any() else -s.lse, {}, r"by __bool__\(\).*torch.where"),
    "a comparison": (lambda s, row: s.lse * torch.equal(row, ROW[:2]), {"rows": (ROW,)}, r"by equal\(\)"),
    "a part of a model": (lambda s: s.lse * (LEARNED * 2).exp(), {}, "fn closes over a tensor that requires grad"),
    "a model and no token": (lambda s: LEARNED.expand(s.lse.shape), {}, "fn closes over a tensor that requires grad"),
}


@BOTH
@pytest.mark.parametrize("what", REFUSED)
def test_refused_before_a_kernel_runs(function, what):
    x, head, target = problem()
    fn, options, text = REFUSED[what]

    def call():
        with pytest.raises(RuntimeError, match=text):
            function(x, head, target, fn, **options)

    assert not [name for name in operators_of(call) if name.startswith("linear_cross_entropy")]


def test_several_classes_a_token():
    x, head, target = problem()
    ids = target.unsqueeze(-1).expand(N, 3)
    for function in (xent_ops.linear_token_loss, of_logits):
        assert function(x, head, ids, lambda stats: -stats.log_probs.sum(-1)).requires_grad
        for fn, text in (
            (lambda s: s.log_probs.detach().sum(-1), NO_GRAD),
            (lambda s: s.lse * s.log_probs.max().item(), r"by item\(\)"),
            (lambda s: s.log_probs.sum(-1) * LEARNED, "fn closes over a tensor that requires grad"),
        ):
            with pytest.raises(RuntimeError, match=text):
                function(x, head, ids, fn)


@BOTH
def test_functions_that_are_right(function):
    """No gradient at zeros; the host reads a constant; code that the function compiles; a part of another function."""
    x, head, target = problem()
    clip, doubled = torch.tensor(0.5), torch.compile(lambda value: 2 * value, backend="eager", fullgraph=True)
    for fn in (
        lambda stats: stats.log_probs.clamp(max=-1e-3),
        lambda stats: stats.entropy,
        lambda stats: stats.lse * clip.item(),
        lambda stats: doubled(stats.lse),
        torch.compile(focal, backend="eager", fullgraph=True),
        functools.partial(lambda stats, factor: -stats.log_probs * factor, factor=2.0),
    ):
        assert function(x, head, target, fn).requires_grad


@BOTH
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
def test_a_constant_where_no_gradient_is_wanted(function, mode):
    x, head, target = problem()
    if mode is contextlib.nullcontext:
        x, head = x.detach(), head.detach()
    with mode():
        assert function(x, head, target, lambda stats: torch.ones_like(stats.lse)) == 1


class Switched:
    """Its first call returns one function's value, later calls that of another."""

    def __init__(self, first, later):
        self.first, self.later, self.calls = first, later, 0

    def __call__(self, stats, *rows):
        self.calls += 1
        return (self.first if self.calls == 1 else self.later)(stats, *rows)


def of_divergences(x, head, target, fn, **options):
    return xent_ops.linear_distillation_token_loss(x, head, x.detach().flip(0), head.detach(), fn, **options)


def of_two_logits(x, head, target, fn, **options):
    logits = F.linear(x, head)
    return xent_ops.distillation_token_loss(logits, logits.detach().flip(0), fn, **options)


FOUR = pytest.mark.parametrize("function", [xent_ops.linear_token_loss, of_logits, of_divergences, of_two_logits])
TOKENS = (xent_ops.linear_token_loss, of_logits)


@FOUR
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_a_field_that_the_first_call_did_not_read(function, mode):
    """It was not computed. Also a field that is known anyway, so that one rule holds for all."""
    x, head, target = problem()
    first, *others = ("log_probs", "lse", "entropy") if function in TOKENS else ("kl", "overlap", "agrees", "coverage")
    for name in others:
        fn = Switched(lambda s: getattr(s, first), lambda s, name=name: getattr(s, first) * getattr(s, name))
        with mode(), pytest.raises(RuntimeError, match=f"fn reads stats.{name}, which .* on every path.* rows="):
            function(x, head, target, fn)


@FOUR
def test_a_branch_by_a_shape(function):
    """The first call sees no token that is far off."""
    x, head, target = problem()
    first, other = ("lse", "log_probs") if function in TOKENS else ("kl", "overlap")

    def fn(stats):
        chosen = getattr(stats, first)
        return chosen if chosen[chosen > 1e-3].numel() == 0 else chosen + getattr(stats, other)

    with pytest.raises(RuntimeError, match=f"fn reads stats.{other}"):
        function(x, head, target, fn)

    def on_every_path(stats):
        chosen, others = getattr(stats, first), getattr(stats, other)
        return chosen if chosen[chosen > 1e-3].numel() == 0 else chosen + others

    assert function(x, head, target, on_every_path).isfinite()


@pytest.mark.parametrize("function", [xent_ops.linear_token_loss, of_divergences])
def test_a_later_call_without_the_gradients_of_the_first(function):
    """The loop over chunks derives each call, so it sees what the graph of the loss would have had."""
    x, head, target = problem()
    name = "log_probs" if function in TOKENS else "kl"
    instead = "xent_ops.linear_token_log_probs" if function in TOKENS else "xent_ops.linear_token_divergences"
    for later, text in (
        (lambda s: getattr(s, name) * LEARNED, f"fn closes over a tensor that requires grad.* learned, {instead}"),
        (lambda s: LEARNED.expand(getattr(s, name).shape), "fn closes over a tensor that requires grad"),
        (lambda s: getattr(s, name).detach(), NO_GRAD),
    ):
        fn = Switched(lambda s: getattr(s, name), later)
        with pytest.raises(RuntimeError, match=text):
            function(x, head, target, fn)
        with torch.no_grad():  # nothing is lost
            assert function(x, head, target, Switched(lambda s: getattr(s, name), later)).isfinite()


@BOTH
def test_a_function_that_writes_to_its_tokens(function):
    """The backward reads lse and entropy too."""
    x, head, target = problem()

    def writing(stats, row):
        a, b = stats.lse.detach(), stats.entropy.detach()
        a -= 1.0
        b *= 2.0
        row += a
        return stats.log_probs * (row + b) + 3 * stats.entropy

    def right(stats, row):
        return stats.log_probs * (row + stats.lse.detach() - 1 + 2 * stats.entropy.detach()) + 3 * stats.entropy

    def grads(fn, check=False):
        return torch.autograd.grad(function(x, head, target, fn, rows=(ROW,), check=check), (x, head))

    for check in (False, True):
        torch.testing.assert_close(grads(writing, check), grads(right))


MODES = []


def noting_modes(stats):
    MODES.append(torch._C._len_torch_function_stack())
    return -stats.log_probs


def test_host_reads_are_searched_once_for_the_same_code():
    """The mode that finds them takes as long as the function itself."""
    x, head, target = problem()
    for _ in range(2):
        xent_ops.linear_token_loss(x, head, target, noting_modes)
    assert MODES[0] == 1 and set(MODES[1:]) == {0}


def test_a_closure_is_judged_by_itself():
    """Functions that share their code may close over other values."""

    def made(reads):
        def fn(stats):
            return stats.log_probs * 2 if reads and stats.lse.mean() > 0 else -stats.log_probs

        return fn

    x, target = torch.randn(4, 9, requires_grad=True), torch.arange(4)
    xent_ops.token_loss(x, target, made(False))
    with pytest.raises(RuntimeError, match="fn reads a value of its tokens"):
        xent_ops.token_loss(x, target, made(True))
