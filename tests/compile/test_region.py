"""What must keep our operator from the place of a loss, for each form of loss: a miss is a wrong number.

Each form reads tensors in a step, and the step's result in its loss. In between stands what the case says.
"""

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rewriting import Rewriting, V

from xent_ops import inductor

N, H = 6, 8


@dataclass
class Form:
    reads: str  # of the tensors below, those that our operator reads
    step: Callable[..., Any]  # of all tensors
    loss: Callable[..., Any]  # of the step's result and all tensors
    head: bool = False


def _cross_entropy(y, k):
    return F.cross_entropy(y, k.t)


FORMS = {
    "tail": Form("x", lambda k: k.x / 4, _cross_entropy),
    "tail in place": Form("x", lambda k: k.x.div_(4), _cross_entropy),
    "viewed in place": Form("", lambda k: k.x.view(N, V).div_(4), _cross_entropy),
    "nll_loss": Form("x", lambda k: k.x.log_softmax(-1), lambda y, k: F.nll_loss(y, k.t)),
    "gather": Form("x", lambda k: k.x.log_softmax(-1), lambda y, k: y.gather(-1, k.t[:, None])),
    "logsumexp": Form(
        "xt", lambda k: k.x.gather(-1, k.t[:, None]), lambda y, k: k.x.logsumexp(-1, keepdim=True) - y
    ),
    "probabilities": Form("x", lambda k: k.x / 4, lambda y, k: F.cross_entropy(y, k.p)),
    "head": Form("hwb", lambda k: F.linear(k.h, k.w, k.b), _cross_entropy, head=True),
    "transposed head": Form("hw", lambda k: k.h @ k.w.t(), _cross_entropy, head=True),
    "scaled head": Form("hwb", lambda k: F.linear(k.h, k.w, k.b) * 2, _cross_entropy, head=True),
    "wider head": Form("hw", lambda k: F.linear(k.h.float(), k.w.float()), _cross_entropy, head=True),
    "gathered head": Form("hw", lambda k: (k.h @ k.w.t()).log_softmax(-1), lambda y, k: y.gather(-1, k.t[:, None]), head=True),
}  # fmt: skip


class Tensors:
    """None is an input of the graph: who may share memory is known."""

    def __init__(self, h, w, form):
        half = torch.bfloat16 if form == "wider head" else h.dtype
        self.h, self.w, self.b = (h * 2).to(half), (w * 2).to(half), w.sum(-1)
        self.x = h.sin() @ w.t()
        self.p = torch.ones(N, V).cumsum(-1)
        self.t = torch.arange(N).flip(0)
        self.y = self.extra = self.view = None


def program(name, before=None, between=None, after=None, around=contextlib.nullcontext):
    """A loss of (h, w). The hooks get all tensors; ``before`` and ``between`` may set ``extra``, which is returned."""
    form = FORMS[name]

    def function(h, w):
        tensors = Tensors(h, w, name)
        if before is not None:
            before(tensors)
        with around():
            tensors.y = form.step(tensors)
        if between is not None:
            between(tensors)
        loss = form.loss(tensors.y, tensors)
        if after is not None:
            after(tensors)
        return loss, tensors.extra

    return function


def call_of(name, function, gradients=True, backward=True):
    """The report's record, after values and gradients were compared with those of eager."""
    found = []
    for run in (function, torch.compile(function, backend=Rewriting(linear=FORMS[name].head), fullgraph=True)):
        torch.manual_seed(0)
        h, w = torch.randn(N, H, requires_grad=gradients), torch.randn(V, H, requires_grad=gradients)
        made = run(h, w)
        if gradients and backward:
            made[0].sum().backward()
        found.append((made, h.grad, w.grad))
    torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2)
    (call,) = inductor.last_report().calls
    return call


def assert_left(name, why, function, **options):
    call = call_of(name, function, **options)
    assert not call.head and (FORMS[name].head or not call.replaced), str(call)
    assert re.search(why, call.head_left if FORMS[name].head else call.why), str(call)


@pytest.mark.parametrize("gradients", [True, False], ids=["", "no_grad"])
@pytest.mark.parametrize("name", FORMS)
def test_each_form_is_replaced(name, gradients):
    """With what does no harm: a size that is read, other memory that is written, other modes of other nodes."""

    def between(k):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            k.extra = (k.h.detach() * k.y.size(0)).mul_(2)

    call = call_of(name, program(name, between=between, after=lambda k: k.extra.mul_(2)), gradients)
    assert call.replaced and call.head == FORMS[name].head, str(call)


def _read(k):
    k.extra = k.y.sin()


def _return(k):
    k.extra = k.y


def _write(k):
    k.y.detach().mul_(2)


READERS = {
    _return: "is returned as well",
    _read: r"is read by sin(_\d)? as well, /.*test_region.py",
    _write: r"is read by detach(_\d)? as well, /.*test_region.py|mul_ writes to the logits before it",
}


@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
@pytest.mark.parametrize("hook", ["between", "after"])
@pytest.mark.parametrize("name", FORMS)
def test_other_readers(name, hook, read):
    """Of what is made between what ours reads and the loss; the report has their line."""
    assert_left(name, READERS[read], program(name, **{hook: read}), gradients=read is not _write)


@pytest.mark.parametrize("name", [name for name in FORMS if name != "viewed in place"])  # torch refuses that
def test_a_step_without_gradients(name):
    """Ours would give its inputs some."""
    function = program(name, around=torch.no_grad)
    assert_left(name, "was made without gradients", lambda h, w: _anchored(function(h, w), h, w))


VIEWED = [name for name in FORMS if "in place" not in name and name != "logsumexp"]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", VIEWED)
def test_a_view_without_gradients(name, mode):
    """Which says that it requires grad."""

    def between(k):
        with mode():
            k.y = k.y.view(N, V)

    function = program(name, between=between)
    assert_left(name, "was made without gradients", lambda h, w: _anchored(function(h, w), h, w))


def _anchored(made, h, w):
    return made[0] + 0 * (h.sum() + w.sum()), made[1]


def _transposed(h, w):
    with torch.no_grad():
        transposed = w.t()
    return h @ transposed


def _weight_wider(h, w):
    with torch.no_grad():
        wide = w.float()
    return F.linear(h.float(), wide)


def _input_wider(h, w):
    with torch.no_grad():
        wide = h.float()
    return F.linear(wide, w.float())


@pytest.mark.parametrize("head", [_transposed, _weight_wider, _input_wider], ids=lambda head: head.__name__)
def test_an_operand_without_gradients(head):
    """Ours reads what is before the transpose or the cast, which requires grad."""

    def function(h, w):
        if head is not _transposed:
            h, w = h.bfloat16(), w.bfloat16()
        return F.cross_entropy(head(h, w), torch.arange(N)), None

    assert_left("head", "was made without gradients", function)


@pytest.mark.parametrize("name", FORMS)
def test_a_loss_without_gradients(name):
    """Of a step with some: there is nothing to lose."""
    form = FORMS[name]

    def function(h, w):
        tensors = Tensors(h, w, name)
        y = form.step(tensors)
        with torch.no_grad():
            loss = form.loss(y, tensors)
        return loss + 0 * h.sum(), None

    call = call_of(name, function)
    assert call.replaced and call.head == form.head, str(call)


@pytest.mark.parametrize("name", FORMS)
def test_a_step_under_another_autocast(name):
    around = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    assert_left(name, "runs under another autocast or inference mode", program(name, around=around))


WRITTEN = [
    (name, read) for name, form in FORMS.items() for read in form.reads if (name, read) != ("tail in place", "x")
]
WORDS = {"x": "logits", "t": "target", "p": "target", "h": "input of the head", "w": "weight of the head"}
WORDS |= {"b": "bias"}


@pytest.mark.parametrize("through", ["itself", "a view of it"])
@pytest.mark.parametrize("name, read", WRITTEN)
def test_written_between(name, read, through):
    """To what ours would read where the loss stands."""

    def before(k):
        k.view = getattr(k, read) if through == "itself" else getattr(k, read).view(-1)

    function = program(name, before=before, between=lambda k: k.view.zero_())
    assert_left(name, f"zero_ may write to the {WORDS[read]} between ", function, gradients=False)


@pytest.mark.parametrize("name, read", [(name, read) for name, read in WRITTEN if read != "x"])
def test_written_before(name, read):
    """Is read as it is then."""
    call = call_of(name, program(name, before=lambda k: getattr(k, read).mul_(2)), gradients=False)
    assert call.replaced and call.head == FORMS[name].head


def test_a_target_that_is_written_before_it_is_read():
    """Though after a part of the loss was computed."""

    def function(h, w):
        k = Tensors(h, w, "logsumexp")
        total = k.x.logsumexp(-1, keepdim=True)
        k.t.add_(1)
        return total - k.x.gather(-1, k.t[:, None]), None

    assert call_of("logsumexp", function).replaced


def test_a_bias_that_is_the_weight_of_the_loss_too():
    """The loss reads it where ours does, the head does not."""

    def function(h, w):
        k = Tensors(h, w, "head")
        y = F.linear(k.h, k.w, k.b)
        k.b.abs_()
        return F.cross_entropy(y, k.t, weight=k.b), None

    assert_left("head", "abs_ may write to the bias between", function, gradients=False)


SAVED = [(name, read) for name, read in WRITTEN if read in "xphwb"] + [
    ("gather", "t"),
    ("gathered head", "t"),
    ("probabilities", "p"),
]


@pytest.mark.parametrize("name, read", SAVED)
def test_written_after(name, read):
    """Autograd refuses some of these without the pass too: the report tells."""

    def after(k):
        with torch.no_grad():
            getattr(k, read).zero_()

    backward = name in ("tail", "nll_loss") or (name, read) == ("gather", "x")
    why = f"zero_ may write to the {WORDS[read]} after it, whose backward needs it"
    assert_left(name, why, program(name, after=after), backward=backward)
    call = call_of(name, program(name, after=after), gradients=False)
    assert call.replaced and call.head == FORMS[name].head


@pytest.mark.parametrize("name", ["tail in place"])
@pytest.mark.parametrize("seen", ["by a reader", "by a view"])
def test_what_is_written_in_place_is_seen(name, seen):
    def before(k):
        k.view = k.x.view(-1)

    hooks = {"after": lambda k: setattr(k, "extra", k.x.sin() if seen == "by a reader" else k.view.sin())}
    assert_left(name, " writes in place to what ", program(name, before=before, **hooks))


def test_an_input_that_is_written_in_place():
    """Its owner sees it."""

    def function(h, w):
        return F.cross_entropy(h.div_(4), torch.arange(N)), None

    assert_left("tail", "writes in place to .*, an input", function, gradients=False)


def test_what_is_written_to_out_is_seen():
    def function(h, w):
        k = Tensors(h, w, "nll_loss")
        k.extra = torch.zeros_like(k.x)
        return F.nll_loss(torch.log_softmax(k.x, -1, out=k.extra), k.t), k.extra

    assert_left("nll_loss", "log_softmax writes to its out=", function, gradients=False)


@pytest.mark.parametrize("name", ["tail", "head"])
def test_the_weight_of_the_loss_is_the_logits(name):
    def function(h, w):
        k = Tensors(h, w, name)
        y = FORMS[name].step(k)[0]
        return F.cross_entropy(y, k.t[0], weight=y), None

    assert_left(name, "is its target or weight as well", function, gradients=False)
