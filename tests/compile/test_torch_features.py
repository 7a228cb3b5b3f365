"""The operators together with other features of torch: checkpointing, autocast, accumulation."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers.dispatch_log import Log
from helpers.graphs import AotEagerAndRecordGraphs, operator_names
from helpers.public_api import gradients, inputs
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import xent_ops

pytestmark = pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")  # torch's own recording backend
FORWARD, BACKWARD = "xent.cross_entropy_reduced.default", "xent.cross_entropy_backward.default"


def _save_the_loss(context, op, *args, **kwargs):
    ours = op == torch.ops.xent.cross_entropy_reduced.default
    return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.MUST_RECOMPUTE


def _recompute_the_loss(context, op, *args, **kwargs):
    ours = op == torch.ops.xent.cross_entropy_reduced.default
    return CheckpointPolicy.MUST_RECOMPUTE if ours else CheckpointPolicy.MUST_SAVE


POLICIES = {
    # what torch.utils.checkpoint is told, how often the forward then runs
    "whole": (None, 2),
    "a list with the operator": ([torch.ops.xent.cross_entropy_reduced.default], 1),
    "a policy that saves it": (_save_the_loss, 1),
    "a policy that recomputes it": (_recompute_the_loss, 2),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("policy", POLICIES)
def test_checkpointing(device, policy, compiled):
    """The forward runs again in the backward, or not, as the policy says of the operator's name."""
    x, target, _ = inputs("cross_entropy", device=device)
    rule, runs = POLICIES[policy]
    context = {} if rule is None else {"context_fn": partial(create_selective_checkpoint_contexts, rule)}

    def loss(x):
        return (xent_ops.cross_entropy((x * 2).sin(), target),)

    def step(x):
        return checkpoint(loss, x, use_reentrant=False, **context)

    wanted = gradients(loss, x)
    if not compiled:
        with Log() as log:
            mine = gradients(step, x)
        names = log.seen
    else:
        backend = AotEagerAndRecordGraphs()
        mine = gradients(torch.compile(step, fullgraph=True, backend=backend), x)
        names = [name for graph in backend.fw_graphs + backend.bw_graphs for name in operator_names(graph)]
    torch.testing.assert_close(mine, wanted)
    assert (names.count(FORWARD), names.count(BACKWARD)) == (runs, 1), names


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_autocast(device, where):
    """The logits of a product under autocast are bfloat16; the loss of them is float32, compiled as in eager."""
    h = torch.randn(8, 16, device=device, requires_grad=True)
    w = torch.randn(33, 16, device=device)
    target = torch.randint(0, 33, (8,), device=device)

    def plain(h):
        return (xent_ops.cross_entropy(h @ w.T, target),)

    def inside(h):
        with torch.autocast(device, dtype=torch.bfloat16):
            return plain(h)

    def outside(h):
        with torch.autocast(device, dtype=torch.bfloat16):
            return compiled(h)

    compiled = torch.compile(inside if where == "inside" else plain, fullgraph=True, backend="aot_eager")
    mine, eager = gradients(compiled if where == "inside" else outside, h), gradients(inside, h)
    torch.testing.assert_close(mine, eager)
    wanted = gradients(lambda h: (F.cross_entropy((h.bfloat16() @ w.T.bfloat16()).float(), target),), h)
    assert mine[0][0].dtype == torch.float32
    assert not torch.equal(mine[1][0], gradients(plain, h)[1][0]), "autocast did nothing"
    torch.testing.assert_close(mine, wanted, rtol=1e-2, atol=1e-3)


def test_gradient_accumulation(device):
    """Micro-batches that divide by the number of targets of all of them add up to the one big batch."""
    w = torch.randn(33, 16, device=device, requires_grad=True)
    h = torch.randn(4, 8, 16, device=device)
    target = torch.randint(0, 33, (4, 8), device=device)
    target[1, :5] = -100
    total = (target != -100).sum()

    @partial(torch.compile, fullgraph=True, backend="aot_eager")
    def step(h, t):
        return xent_ops.cross_entropy(h @ w.T, t, reduction="sum") / total

    for micro, t in zip(h, target, strict=True):
        step(micro, t).backward()
    wanted = torch.autograd.grad(F.cross_entropy(h.flatten(0, 1) @ w.T, target.flatten()), w)[0]
    torch.testing.assert_close(w.grad, wanted)


def test_what_torch_refuses(device):
    """As docs/compile.md says, with the setting that allows it."""
    w = torch.randn(33, 16, device=device, requires_grad=True)
    h, target = torch.randn(8, 16, device=device), torch.zeros(8, dtype=torch.int64, device=device)

    def loss(w):
        return xent_ops.cross_entropy(h @ w.T, target)

    def compiled():
        torch.compiler.reset()
        return torch.compile(loss, fullgraph=True, backend="aot_eager")

    step = compiled()
    step(w).backward()
    with pytest.raises(RuntimeError, match="donated_buffer"):
        step(w).backward(retain_graph=True)
    wanted, w.grad = w.grad, None
    with torch._functorch.config.patch(donated_buffer=False):
        step = compiled()
        step(w).backward()
        again = step(w)
        again.backward(retain_graph=True)
        again.backward()
    retained = compiled()(w)
    retained.backward(retain_graph=True)  # the first backward: compiled without reuse
    retained.backward()
    torch.testing.assert_close(w.grad, 5 * wanted)
    (grad,) = torch.autograd.grad(compiled()(w), w, create_graph=True)
    # The first is what torch 2.13 says, the second 2.11.
    with pytest.raises(RuntimeError, match=r"support double backward|does not require grad"):
        grad.sum().backward()
