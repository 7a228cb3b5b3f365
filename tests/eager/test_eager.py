"""Eager training as one node of autograd: what sees its operators, second derivatives, grad_in_forward."""

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import xent_ops

OPTIONS = {
    "plain": {},
    "z-loss": {"lse_square_scale": 0.1},
    "all": {"label_smoothing": 0.1, "lse_square_scale": 0.1, "softcap": 5.0, "logit_scale": 0.5},
}


class Log(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))

    def ours(self):
        return [name for name in self.names if name.startswith("xent")]


@pytest.fixture
def h(device):
    return torch.randn(6, 30, device=device, dtype=torch.float64, requires_grad=True)


@pytest.fixture
def target(device):
    return torch.tensor([3, 29, -100, 0, 7, 7], device=device)


@pytest.mark.parametrize("in_place", [False, True], ids=["", "in_place"])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weight"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_grad_in_forward(device, h, target, reduction, name, weighted, in_place):
    """Loss and gradient of the ordinary path, for upstream gradients of one and others, which differ between rows."""
    options = {"reduction": reduction, "weight": torch.rand(30, device=device) if weighted else None, **OPTIONS[name]}
    wanted = xent_ops.cross_entropy(h * 2, target, **options)
    for factor in (1.0, torch.randn(wanted.shape, device=device), 0.0):
        (wanted_grad,) = torch.autograd.grad((wanted * factor).sum(), h, retain_graph=True)
        logits = h * 2
        version, seen = logits._version, []
        logits.register_hook(lambda g, seen=seen: seen.append(g.data_ptr()))
        loss = xent_ops.cross_entropy(logits, target, grad_in_forward=True, inplace_backward=in_place, **options)
        torch.testing.assert_close(loss, wanted)
        (grad,) = torch.autograd.grad((loss * factor).sum(), h)
        torch.testing.assert_close(grad, wanted_grad)
        assert (seen == [logits.data_ptr()]) == in_place == (logits._version > version)


def test_grad_in_forward_below_a_class_dimension_in_the_middle(device):
    h = torch.randn(2, 10, 5, device=device, requires_grad=True)
    target = torch.randint(0, 10, (2, 5), device=device)
    (wanted,) = torch.autograd.grad(xent_ops.cross_entropy(h, target), h)
    for in_place in (False, True):
        loss = xent_ops.cross_entropy(h, target, grad_in_forward=True, inplace_backward=in_place)
        torch.testing.assert_close(torch.autograd.grad(loss, h)[0], wanted)


def test_grad_in_forward_in_place_of_views(device):
    """Of what a layer returned: rows of one batch flattened, shifted, or a part of the classes."""
    h, w = torch.randn(2, 4, 8, device=device, requires_grad=True), torch.randn(8, 30, device=device)
    for view in (lambda x: x.view(-1, 30), lambda x: x[:, :-1], lambda x: x[..., 3:], lambda x: x.transpose(0, 1)):
        target = torch.randint(0, 27, view(h @ w).shape[:-1], device=device)
        (wanted,) = torch.autograd.grad(xent_ops.cross_entropy(view(h @ w), target, dim=-1), h)
        h.grad = None
        xent_ops.cross_entropy(view(h @ w), target, dim=-1, grad_in_forward=True, inplace_backward=True).backward()
        torch.testing.assert_close(h.grad, wanted)


def test_grad_in_forward_visits_the_logits_once_and_saves_the_gradient_alone(h, target):
    saved = []
    with Log() as log, torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = xent_ops.cross_entropy(h, target, grad_in_forward=True)
        assert log.ours() == ["xent.cross_entropy_divisor.default", "xent.cross_entropy_with_grad.default"]
        log.names.clear()
        loss.backward()
    assert log.ours() == ["xent.scale_grad_.default"]
    (gradient,) = saved
    assert gradient.shape == h.shape and h.grad.data_ptr() == gradient.data_ptr(), "handed out, not copied"


@pytest.mark.parametrize("in_place", [False, True], ids=["", "in_place"])
def test_grad_in_forward_gives_its_gradient_once(h, target, in_place):
    options = {"grad_in_forward": True, "inplace_backward": in_place}
    loss = xent_ops.cross_entropy(h * 2, target, **options)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward through a loss with grad_in_forward=True"):
        loss.backward()
    with pytest.raises(RuntimeError, match="leaves nothing to differentiate a second time"):
        torch.autograd.grad(xent_ops.cross_entropy(h * 2, target, **options), h, create_graph=True)


@pytest.mark.interpreter
@pytest.mark.parametrize("grad_in_forward", [False, True])
def test_in_place_of_lazily_negative_logits(h, target, grad_in_forward):
    """The memory holds other numbers than the tensor: the gradient gets memory of its own."""

    def loss(**options):
        return xent_ops.cross_entropy(torch._neg_view(h * 2), target, **options)

    wanted = torch.autograd.grad(loss(), h)[0]
    got = torch.autograd.grad(loss(inplace_backward=True, grad_in_forward=grad_in_forward), h)[0]
    torch.testing.assert_close(got, wanted)


def test_grad_in_forward_refuses_what_it_would_corrupt(h, target):
    def loss(logits, **options):
        return xent_ops.cross_entropy(logits, target, grad_in_forward=True, inplace_backward=True, **options)

    with pytest.raises(RuntimeError, match="would overwrite a leaf tensor"):
        loss(h)
    with pytest.raises(RuntimeError, match="share memory between their rows"):
        loss((h[:1] * 2).expand(6, 30))
    with pytest.raises(RuntimeError, match="share memory between their rows"):
        loss((h * 2).view(-1).unfold(0, 30, 20)[:6])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss(h.exp()).backward()  # exp saved its output, which are the logits
    logits = h * 2
    written = loss(logits)
    with torch.no_grad():
        logits.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        written.backward()  # the gradient was there
    with pytest.raises(ValueError, match="grad_in_forward=True takes class indices, not class probabilities"):
        xent_ops.cross_entropy(h, h.detach().softmax(-1), grad_in_forward=True)


def test_grad_in_forward_without_a_gradient_is_the_plain_forward(h, target):
    kept = h.detach().clone()
    wanted = xent_ops.cross_entropy(kept, target)
    with Log() as log:
        for logits, grad in ((kept, True), (h, False)):
            with torch.set_grad_enabled(grad):
                loss = xent_ops.cross_entropy(logits, target, grad_in_forward=True, inplace_backward=True)
            assert torch.equal(loss, wanted) and not loss.requires_grad
    assert log.ours() == ["xent.cross_entropy_reduced.default"] * 2
    assert torch.equal(kept, h)


def test_grad_in_forward_means_the_ordinary_path_under_compile_and_transforms(h, target):
    options = {"grad_in_forward": True, "inplace_backward": True}
    (wanted,) = torch.autograd.grad(xent_ops.cross_entropy(h * 2, target), h)

    def step(h):
        return xent_ops.cross_entropy(h * 2, target, **options)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(h), h)[0], wanted)
    torch.testing.assert_close(torch.func.grad(step)(h.detach()), wanted)


def test_one_pass_checks_weights_before_it_counts_rows(h, target):
    for weight, message in (
        (torch.ones(3), r"weight has shape \(3,\)"),
        (torch.ones(h.shape[-1], 2), "weight has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            xent_ops.cross_entropy(h * 2, target, weight.to(h), grad_in_forward=True)


@pytest.mark.parametrize("options", [{}, {"inplace_backward": True}, {"grad_in_forward": True}], ids=str)
@pytest.mark.parametrize("scale", [0.0, 0.1])
def test_without_a_counted_row(device, eager_and_dispatched, scale, options):
    """The mean of nothing is NaN; ignored rows have zero gradients all the same."""
    h = torch.randn(3, 10, device=device, requires_grad=True)
    ignored = torch.full((3,), -100, device=device)
    loss = xent_ops.cross_entropy(h * 1, ignored, lse_square_scale=scale, **options)
    (grad,) = torch.autograd.grad(loss, h)
    assert loss.isnan() and grad.count_nonzero() == 0


def test_grad_in_forward_without_rows(device):
    empty = torch.randn(0, 10, device=device, requires_grad=True)
    xent_ops.cross_entropy(empty, torch.zeros(0, device=device, dtype=torch.int64), grad_in_forward=True).backward()
    assert empty.grad.shape == (0, 10)


def test_the_loss_is_one_node(h, target):
    loss = xent_ops.cross_entropy(h, target, lse_square_scale=0.1)
    assert type(loss.grad_fn).__name__ == "CrossEntropyFunctionBackward"
    assert [type(node).__name__ for node, _ in loss.grad_fn.next_functions if node] == ["AccumulateGrad"]


class Pass(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Wrapped(torch.Tensor):
    """A subclass that sees torch functions."""


@pytest.mark.parametrize("name", ["dispatch mode", "function mode", "subclass", "make_fx", "jit.trace"])
def test_modes_and_tracers_see_the_operators(h, target, name):
    def loss(x):
        return xent_ops.cross_entropy(x, target)

    if name == "dispatch mode":
        with Log() as log:
            loss(h).backward()
        assert log.ours() == ["xent.cross_entropy_reduced.default", "xent.cross_entropy_backward.default"]
    elif name == "function mode":
        with Pass():
            loss(h).backward()
    elif name == "subclass":
        assert isinstance(loss(h.as_subclass(Wrapped)), Wrapped)
    elif name == "make_fx":
        for pre_dispatch in (False, True):
            graph = make_fx(loss, pre_dispatch=pre_dispatch)(h).graph
            assert any("xent.cross_entropy" in str(node.target) for node in graph.nodes)
    else:
        traced = torch.jit.trace(loss, (h,), check_trace=False)
        assert "xent::cross_entropy" in str(traced.graph)


def test_a_kernel_registered_over_ours_is_called(h, target):
    """By eager training too, forward and backward, and no more once its library is gone."""
    seen = []
    with torch.library._scoped_library("xent", "IMPL") as library:
        for name in ("cross_entropy_reduced", "cross_entropy_backward"):
            kernel = xent_ops.ops.library.OPERATORS[name].on_reference

            def record(*args, name=name, kernel=kernel, **options):
                seen.append(name)
                return kernel(*args, **options)

            library.impl(name, record, h.device.type.upper(), allow_override=True)
        xent_ops.cross_entropy(h, target).backward()
    assert seen == ["cross_entropy_reduced", "cross_entropy_backward"]


def test_a_checkpoint_with_a_dispatch_mode_around_its_forward_alone(h, target):
    def body(h):
        return xent_ops.cross_entropy(h * 2, target)

    with FlopCounterMode(display=False):
        loss = torch.utils.checkpoint.checkpoint(body, h, use_reentrant=False)
    (found,) = torch.autograd.grad(loss, h)
    torch.testing.assert_close(found, torch.autograd.grad(body(h), h)[0])


@pytest.mark.parametrize("options", [{"lse_square_scale": 0.1}, {"grad_in_forward": True}], ids=str)
def test_a_profiler_sees_the_operators(h, target, options):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        xent_ops.cross_entropy(h, target, **options).backward()
    names = {event.name for event in profile.events() if event.name.startswith("xent::")}
    if "grad_in_forward" in options:
        assert names == {"xent::cross_entropy_divisor", "xent::cross_entropy_with_grad", "xent::scale_grad_"}
    else:
        assert names == {"xent::cross_entropy_reduced", "xent::cross_entropy_backward"}


@pytest.mark.parametrize("options", [{}, {"grad_in_forward": True}], ids=["", "grad_in_forward"])
def test_options_of_other_types_are_the_dispatchers(h, target, options):
    """It converts what it can and refuses the rest, which a kernel called without it would not."""
    wanted = xent_ops.cross_entropy(h, target, label_smoothing=0.25, softcap=5.0)
    found = xent_ops.cross_entropy(h, target, label_smoothing=np.float64(0.25), softcap=5, **options)
    torch.testing.assert_close(found, wanted)
    with pytest.raises((RuntimeError, TypeError), match="ignore_index"):
        xent_ops.cross_entropy(h, target, ignore_index=-100.0, **options)


def test_second_derivatives_of_the_single_node(h, target, device):
    """Through upstream gradients as well, in eager's own way: backward is traced again where a graph is asked for."""
    weight = torch.rand(30, device=device, dtype=torch.float64)

    def function(x, factor):
        loss = xent_ops.cross_entropy(x * 1, target, weight, label_smoothing=0.25, lse_square_scale=0.1)
        assert type(loss.grad_fn).__name__ == "CrossEntropyFunctionBackward"
        return loss * factor

    factor = torch.tensor(2.0, device=device, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(function, (h, factor))


def test_compiled_autograd(h, target):
    """It traces the backward of the single node."""
    (wanted,) = torch.autograd.grad(xent_ops.cross_entropy(h, target), h)
    for options in ({}, {"grad_in_forward": True}):
        h.grad = None
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            xent_ops.cross_entropy(h, target, **options).backward()
        torch.testing.assert_close(h.grad, wanted)
    # exp saved its output, the logits, which compiled autograd hands out before the loss's backward runs.
    (wanted,) = torch.autograd.grad(xent_ops.cross_entropy(h.exp(), target), h)
    h.grad = None
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        xent_ops.cross_entropy(h.exp(), target, inplace_backward=True).backward()
    torch.testing.assert_close(h.grad, wanted)


@pytest.mark.parametrize("leaf", [True, False])
def test_hooks_run_once_where_the_gradient_gets_a_graph(h, target, leaf):
    """The backward differentiates the loss again, and that is not the gradient that a user's hook waits for."""

    def gradients(loss):
        x = h.detach().requires_grad_()
        logits, calls = (x if leaf else x * 1), []
        logits.register_hook(lambda grad: calls.append(1) or grad * 0.5)
        logits.retain_grad()
        (first,) = torch.autograd.grad(loss(logits, target), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        return len(calls), x.detach() if leaf else logits.grad.detach(), first.detach(), second

    found, wanted = map(gradients, (xent_ops.cross_entropy, torch.nn.functional.cross_entropy))
    torch.testing.assert_close(found, wanted)


def test_a_default_device_watches_nothing(h, target):
    torch.set_default_device("meta")  # where what names no device would turn up
    try:
        loss = xent_ops.cross_entropy(h, target, lse_square_scale=0.1)
        assert type(loss.grad_fn).__name__ == "CrossEntropyFunctionBackward"
        (found,) = torch.autograd.grad(loss, h)
    finally:
        torch.set_default_device(None)
    (wanted,) = torch.autograd.grad(xent_ops.cross_entropy(h, target, lse_square_scale=0.1), h)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{"inplace_backward": True}, {"grad_in_forward": True}], ids=str)
def test_one_gradient_is_no_batch_of_them(h, target, options):
    loss = xent_ops.cross_entropy(h * 1, target, **options)
    with pytest.raises(NotImplementedError, match="below vmap"):
        torch.autograd.grad(loss, h, torch.ones(3, device=h.device, dtype=h.dtype), is_grads_batched=True)
    (found,) = torch.autograd.grad(loss, h)  # which it still has
    torch.testing.assert_close(found, torch.autograd.grad(xent_ops.cross_entropy(h, target), h)[0])
