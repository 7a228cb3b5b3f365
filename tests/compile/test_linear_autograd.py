"""The head and the loss as one beside what changes a backward: checkpoints, retain_graph, compiled autograd."""

import contextlib
from functools import partial

import pytest
import torch
from helpers.dispatch_log import Log
from helpers.graphs import AotEagerAndRecordGraphs, operator_names
from linear_cases import AGAIN, IN_PLACE, ONE_PASS, ROWS, SCALED, gradients, inputs, loss
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

pytestmark = pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")  # torch's own recording backend


def after_pointwise(x, w, b, target):
    return loss((x * 2).sin(), w, b, target)


# What torch.utils.checkpoint is told, and our operators in the order in which they run in eager, forward and backward.
CHECKPOINTS = {
    "not reentrant": ({"use_reentrant": False}, [ROWS, ROWS, AGAIN]),
    "reentrant": ({"use_reentrant": True}, [ROWS, "row_summary", ONE_PASS, IN_PLACE, IN_PLACE, IN_PLACE]),
    "selective, saved": (
        {
            "use_reentrant": False,
            "context_fn": partial(
                create_selective_checkpoint_contexts, [torch.ops.xent.linear_cross_entropy_forward.default]
            ),
        },
        [ROWS, AGAIN],
    ),
    "selective, something else": (
        {
            "use_reentrant": False,
            "context_fn": partial(create_selective_checkpoint_contexts, [torch.ops.aten.sin.default]),
        },
        [ROWS, ROWS, AGAIN],
    ),
}


def backward(function, tensors):
    """As ``gradients``, by backward(), which a reentrant checkpoint asks for."""
    leaves = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
    value = function(*leaves)
    (value * 3.0).backward()
    return value.detach(), tuple(leaf.grad for leaf in leaves if leaf.requires_grad)


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_checkpoints_in_eager(device, case):
    """The forward runs twice: as rows, which take one product each time, not three."""
    keywords, operators = CHECKPOINTS[case]
    tensors = inputs(device=device)
    with Log() as log:
        made = backward(lambda *tensors: checkpoint(after_pointwise, *tensors, **keywords), tensors)
    assert log.ours() == list(operators)
    torch.testing.assert_close(made, gradients(after_pointwise, tensors))


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_checkpoints_in_compiled_code(device, case):
    keywords, _ = CHECKPOINTS[case]
    tensors, graphs = inputs(device=device), AotEagerAndRecordGraphs()
    step = torch.compile(lambda *t: checkpoint(after_pointwise, *t, **keywords), fullgraph=True, backend=graphs)
    torch.testing.assert_close(backward(step, tensors), gradients(after_pointwise, tensors))
    forward, *_ = [operator_names(graph) for graph in graphs.fw_graphs]
    assert forward.count(f"xent.{ONE_PASS}.default") == 1


def test_a_selective_checkpoint_that_saves_the_with_grad(device):
    """In compiled code of another backend than Inductor, which needs to be told."""
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.xent.linear_cross_entropy_with_grad.default])
    tensors, graphs = inputs(device=device), AotEagerAndRecordGraphs()

    def step(*tensors):
        return checkpoint(after_pointwise, *tensors, use_reentrant=False, context_fn=contexts)

    made = gradients(torch.compile(step, fullgraph=True, backend=graphs), tensors)
    torch.testing.assert_close(made, gradients(after_pointwise, tensors))
    names = [name for graph in graphs.fw_graphs + graphs.bw_graphs for name in operator_names(graph)]
    assert names.count(f"xent.{ONE_PASS}.default") == 1


def test_retain_graph_in_compiled_code(device):
    """As docs/compile.md says, for the gradients that the forward has made are donated to the backward."""
    *leaves, target = tensors = inputs(device=device)
    _, wanted = gradients(loss, tensors)

    def compiled():
        torch.compiler.reset()
        return torch.compile(loss, fullgraph=True, backend="aot_eager")

    def twice(step):
        value = step(*leaves, target) * 3.0
        return [torch.autograd.grad(value, leaves, retain_graph=retained) for retained in (True, False)]

    step = compiled()
    torch.autograd.grad(step(*leaves, target), leaves)
    with pytest.raises(RuntimeError, match="donated_buffer"):
        twice(step)
    for grads in twice(compiled()):  # the first backward: compiled without reuse
        torch.testing.assert_close(grads, wanted)
    with torch._functorch.config.patch(donated_buffer=False):
        step = compiled()
        torch.autograd.grad(step(*leaves, target), leaves)
        for grads in twice(step):
            torch.testing.assert_close(grads, wanted)


def _compiled_autograd():
    return compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True))


ENGINES = {"compiled": _compiled_autograd, "eager": contextlib.nullcontext}


ORDERS = [("compiled", None), ("compiled", "compiled"), ("compiled", "eager"), ("eager", "compiled")]


@pytest.mark.parametrize(
    "forward, first, second", [*(("eager", *order) for order in ORDERS), *(("aot_eager", *o) for o in ORDERS[1:3])]
)
def test_compiled_autograd(device, forward, first, second):
    """Right for other tensors too, and in a second backward: no gradient of an earlier call is a constant of the graph,
    none is scaled twice."""
    step = loss if forward == "eager" else torch.compile(loss, fullgraph=True, backend=forward)
    for factor in (1.0, 2.0):
        *leaves, target = tensors = inputs(device=device)
        with torch.no_grad():
            leaves[0].mul_(factor)
        _, wanted = gradients(loss, tensors)
        value = step(*leaves, target) * 3.0
        for engine, retained in ((first, second is not None), (second, False)):
            if engine is None:
                continue
            with ENGINES[engine]():
                value.backward(retain_graph=retained)
            torch.testing.assert_close([leaf.grad for leaf in leaves], list(wanted))
            for leaf in leaves:
                leaf.grad = None


def test_compiled_autograd_of_a_whole_step(device):
    """Dynamo leaves the compiled region at backward(), which compiled autograd takes up."""
    *leaves, target = tensors = inputs(device=device)

    @partial(torch.compile, backend="aot_eager")
    def step(*tensors):
        value = loss(*tensors)
        (value * 3.0).backward()
        return value

    with torch._dynamo.config.patch(compiled_autograd=True):
        value = step(*leaves, target)
    wanted, grads = gradients(loss, tensors)
    torch.testing.assert_close(value, wanted)
    torch.testing.assert_close([leaf.grad for leaf in leaves], list(grads))


def test_no_second_derivative_of_compiled_code(device):
    *leaves, target = inputs(device=device)
    grads = torch.autograd.grad(
        torch.compile(loss, fullgraph=True, backend="aot_eager")(*leaves, target), leaves, create_graph=True
    )
    # The first is what torch 2.13 says, the second 2.11.
    with pytest.raises(RuntimeError, match=r"support double backward|does not require grad"):
        grads[0].sum().backward()


def test_scaled_gradients_have_no_derivative(device):
    """It is an operator of graphs alone."""
    grad = torch.ones(3, 4, device=device, requires_grad=True)
    scaled = getattr(torch.ops.xent, SCALED)(grad, torch.tensor(2.0, device=device))
    with pytest.raises(RuntimeError, match="no derivative"):
        scaled.sum().backward()
