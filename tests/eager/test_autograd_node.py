"""Eager training as one autograd node: modes, tracers and profilers see its operators; second derivatives."""

import numpy as np
import pytest
import torch
from helpers.dispatch_log import Log
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import xent_ops
from tools.bench import launches


def test_the_loss_is_one_node(h, target):
    loss = xent_ops.cross_entropy(h, target, lse_square_scale=0.1)
    assert type(loss.grad_fn).__name__ == "CrossEntropyFunctionBackward"
    assert [type(node).__name__ for node, _ in loss.grad_fn.next_functions if node] == ["AccumulateGrad"]


EAGER = {
    **{name: step for name, step in launches.STEPS.items() if not name.startswith("F.")},
    "cross_entropy_outputs, none": lambda x: xent_ops.cross_entropy_outputs(x.logits, x.target, reduction="none").lse,
    "cross_entropy, none, token_weight": lambda x: xent_ops.cross_entropy(
        x.logits, x.target, reduction="none", token_weight=x.token_weight
    ),
    "class probabilities": lambda x: xent_ops.cross_entropy(x.logits, x.logits.detach().softmax(-1)),
    "token_log_probs, ids": lambda x: xent_ops.token_log_probs(x.logits, x.ids).log_probs,
    "token_loss": lambda x: xent_ops.token_loss(x.logits, x.target, lambda stats: -stats.log_probs),
    "token_loss, ids": lambda x: xent_ops.token_loss(x.logits, x.ids, lambda stats: -stats.log_probs.sum(-1)),
    "top_k": lambda x: xent_ops.top_k(x.logits, 4).log_probs,
    "linear_top_k": lambda x: xent_ops.linear_top_k(x.hidden, x.weight, 4).log_probs,
    "top_k_distillation_loss": lambda x: xent_ops.top_k_distillation_loss(x.logits, x.ids, x.probs),
    "distillation_loss": lambda x: xent_ops.distillation_loss(x.logits, x.logits.detach()),
}


@pytest.mark.parametrize("name", EAGER)
def test_operators_are_nodes_of_ours(name):
    """The wrapper of torch.library reads the schema once for each argument."""
    loss = EAGER[name](launches.Inputs.on("cpu"))  # it keeps the nodes, which torch 2.11 takes apart without it
    found, nodes = set(), [loss.grad_fn]
    for node in nodes:
        found.add(type(node).__name__)
        nodes += [following for following, _ in node.next_functions if following is not None]
    assert any("xent_" in node or "FunctionBackward" in node for node in found)
    assert not [node for node in found if node.startswith("GeneratedBackward")], found


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
        assert log.ours() == ["cross_entropy_reduced", "cross_entropy_backward"]
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
        one_pass = {"xent::row_divisors", "xent::cross_entropy_with_grad", "xent::row_summary", "xent::scale_grad_"}
        assert names == one_pass
    else:
        assert names == {"xent::cross_entropy_reduced", "xent::cross_entropy_backward"}


@pytest.mark.parametrize("options", [{}, {"grad_in_forward": True}], ids=["", "grad_in_forward"])
def test_the_dispatcher_converts_options_of_other_types(h, target, options):
    """It refuses what it cannot convert; a kernel called without it would not."""
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


def test_a_default_device_changes_nothing(h, target):
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
def test_a_batch_of_upstream_gradients_is_refused(h, target, options):
    loss = xent_ops.cross_entropy(h * 1, target, **options)
    with pytest.raises(NotImplementedError, match="under vmap"):
        torch.autograd.grad(loss, h, torch.ones(3, device=h.device, dtype=h.dtype), is_grads_batched=True)
    (found,) = torch.autograd.grad(loss, h)  # which it still has
    torch.testing.assert_close(found, torch.autograd.grad(xent_ops.cross_entropy(h, target), h)[0])
