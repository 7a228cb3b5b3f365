"""The k most probable classes and the target's rank, against a stable sort of all logits in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers.covering import covering
from helpers.gpu import captured, no_synchronisation

import xent_ops

INTERPRETED = pytest.mark.interpreter
OPTIONS = {"plain": {}, "softcap": {"softcap": 3.0, "logit_scale": 0.7}, "negative": {"logit_scale": -1.5}}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# (classes, k): the whole row, blocks of 1, 2 and 8, and more candidates than a program of the kernel takes
SHAPES = [(1, 1), (13, 13), (13, 4), (5003, 1), (2051, 20), (20011, 17000)]


def randn(*shape, device, dtype=torch.float32, requires_grad=False):
    return torch.randn(shape, device=device).to(dtype).requires_grad_(requires_grad)


def expected(logits, k, target, softcap=None, logit_scale=1.0):
    z = logits.double() * logit_scale
    order = z.sort(dim=-1, descending=True, stable=True).indices
    log_p = (z if softcap is None else softcap * torch.tanh(z / softcap)).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    index = target.clamp(min=0).unsqueeze(-1)
    ranks = (order == index).long().argmax(-1)
    return log_p.gather(-1, order[..., :k]), order[..., :k], entropy, log_p.gather(-1, index).squeeze(-1), ranks


@INTERPRETED
@pytest.mark.parametrize("dtype, name, shape", covering(DTYPES, OPTIONS, SHAPES), ids=str)
def test_values(device, dtype, name, shape):
    classes, k = shape
    logits = randn(5, classes, device=device).mul(4).round().div(2).to(dtype)  # many ties
    target = torch.randint(classes, (5,), device=device)
    target[1] = -100
    top, counted = xent_ops.top_k(logits, k, target, **OPTIONS[name]), target != -100
    log_probs, ids, entropy, of_target, ranks = expected(logits, k, target, **OPTIONS[name])
    assert torch.equal(top.ids[counted], ids[counted]) and torch.equal(top.target_ranks[counted], ranks[counted])
    for found, wanted in ((top.log_probs, log_probs), (top.target_log_probs, of_target), (top.entropy, entropy)):
        torch.testing.assert_close(found[counted].double(), wanted[counted], rtol=1e-5, atol=1e-5)
    ignored = [value[1] for value in top]
    assert (ignored[1] == -100).all() and ignored[5] == -1 and ignored[2] == math.inf
    assert not any(value.any() for value in (ignored[0], ignored[3], ignored[4]))


@INTERPRETED
@pytest.mark.parametrize("ignore_index", [0, 2, -1])
@pytest.mark.parametrize("fused", [False, True], ids=["logits", "head"])
def test_ignore_index_may_be_one_of_the_classes(device, fused, ignore_index):
    """Only the target says which rows are ignored: the class itself keeps its log-probability and its gradient."""
    leaves = [randn(n, 5, device=device, requires_grad=True) for n in (6, 7)]
    target = torch.tensor([0, 1, 2, 3, 6, 2], device=device)
    counted = target != ignore_index
    if fused:
        top = xent_ops.linear_top_k(*leaves, 4, target, ignore_index=ignore_index, chunk_rows=4)
    else:
        top = xent_ops.top_k(leaves[0] @ leaves[1].t(), 4, target, ignore_index=ignore_index)
    log_probs, ids, entropy, of_target, ranks = expected(leaves[0].double() @ leaves[1].double().t(), 4, target)
    assert torch.equal(top.ids, torch.where(counted.unsqueeze(-1), ids, -100))
    assert torch.equal(top.target_ranks, torch.where(counted, ranks, -1))
    value = top.log_probs.sum() + top.entropy.sum() + top.target_log_probs.sum()
    wanted = (log_probs.sum(-1) + entropy + of_target)[counted].sum()
    torch.testing.assert_close(value.double(), wanted, rtol=1e-5, atol=1e-5)
    grads, wanted = (torch.autograd.grad(one, leaves, retain_graph=True) for one in (value, wanted))
    torch.testing.assert_close(grads, wanted, rtol=1e-4, atol=1e-4)


@INTERPRETED
@pytest.mark.parametrize("scale", [1.0, -2.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_logits_have_the_order_of_a_stable_sort(device, dtype, scale):
    values = [
        math.inf,
        -math.inf,
        math.nan,
        -math.nan,
        0.0,
        -0.0,
        1.0,
        2.0**-14,
        -(2.0**-20),
        5e4,
        torch.finfo(dtype).tiny,
    ]
    logits = torch.tensor(values, device=device, dtype=dtype).repeat(9)[torch.randperm(99)].repeat(4, 1)
    target = torch.randint(99, (4,), device=device)
    top = xent_ops.top_k(logits, 99, target, logit_scale=scale)
    signed = (logits if scale > 0 else -logits).cpu()  # CUDA's sort puts a NaN with a sign last
    order = signed.sort(dim=-1, descending=True, stable=True).indices.to(device)
    assert torch.equal(top.ids, order)
    assert torch.equal(top.ids.gather(-1, top.target_ranks.unsqueeze(-1)).squeeze(-1), target)
    some = xent_ops.top_k(logits, 5, target, logit_scale=scale)  # by blocks
    assert torch.equal(some.ids, order[:, :5]) and torch.equal(some.target_ranks, top.target_ranks)


@INTERPRETED
def test_rows_of_any_stride_and_targets_of_any_dtype(device):
    logits = randn(2, 4, 2, 300, device=device)
    target = torch.randint(200, (2, 3, 2), device=device, dtype=torch.uint8)
    part = logits[:, :-1].transpose(0, 2)
    found = xent_ops.top_k(part, 9, target.transpose(0, 2))
    wanted = xent_ops.top_k(part.contiguous(), 9, target.transpose(0, 2).contiguous().long())
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    classes_apart = xent_ops.top_k(part.contiguous().movedim(-1, 0).contiguous().movedim(0, -1), 9)
    assert torch.equal(classes_apart.ids, wanted.ids) and classes_apart.target_ranks is None


@INTERPRETED
def test_the_largest_is_the_argmax(device):
    logits, target = randn(9, 900, device=device).bfloat16(), torch.randint(900, (9,), device=device)
    top, outputs = xent_ops.top_k(logits, 1, target), xent_ops.cross_entropy_outputs(logits, target)
    assert torch.equal(top.ids.squeeze(-1), outputs.predictions)
    torch.testing.assert_close((top.target_ranks == 0).float().mean(), outputs.accuracy)


@INTERPRETED
def test_the_operator_counts_columns_of_a_slice(device):
    """Before a target of another slice, of this logit: all of the larger, and of the equal those at smaller columns."""
    logits = randn(6, 100, device=device).round().bfloat16()
    target = torch.tensor([-30, 0, 40, 99, 100, 250], device=device)
    own = randn(6, device=device).round()
    ids, rank = torch.ops.xent.top_k(logits, 0, target, own)
    before = (logits > own[:, None]) | ((logits == own[:, None]) & (torch.arange(100, device=device) < target[:, None]))
    assert ids.shape == (6, 0) and torch.equal(rank, before.sum(-1))


def test_an_entropy_alone_has_a_gradient(device):
    logits = randn(3, 20, device=device, requires_grad=True)
    (found,) = torch.autograd.grad(xent_ops.top_k(logits, 2).entropy.sum(), logits)
    (wanted,) = torch.autograd.grad(torch.distributions.Categorical(logits=logits).entropy().sum(), logits)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_row_has_the_same_ids_in_any_batch_and_compiled(device, dtype):
    x, head = randn(50, 32, device=device).bfloat16(), randn(6000, 32, device=device).bfloat16()
    target = torch.randint(6000, (50,), device=device)

    def top(rows):
        return xent_ops.linear_top_k(x[rows], head, 16, target[rows], batch_invariant=True, logits_dtype=dtype)

    some = torch.tensor([30, 2, 7], device=device)
    for found, one in zip(top(slice(None)), top(some), strict=True):
        assert torch.equal(found[some], one)
    for found, one in zip(top(some), torch.compile(top, fullgraph=True)(some), strict=True):
        assert torch.equal(found, one)


def test_products(device):
    from torch.utils.flop_counter import FlopCounterMode

    x, head = randn(8, 16, device=device, requires_grad=True), randn(300, 16, device=device, requires_grad=True)
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        xent_ops.linear_top_k(x, head, 4)
    with FlopCounterMode(display=False) as step:
        xent_ops.linear_top_k(x, head, 4).log_probs.sum().backward()
    product = 2 * 8 * 16 * 300
    assert (forward.get_total_flops(), step.get_total_flops()) == (product, 4 * product)


def test_a_compiled_step_with_dynamic_rows_is_one_graph(device):
    head = randn(300, 16, device=device, requires_grad=True)

    def step(x, target, scale):
        top = xent_ops.linear_top_k(x, head, 4, target, logit_scale=scale)
        return (top.log_probs.sum() + top.target_log_probs.sum(), *top)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    torch._dynamo.reset()
    for number in (3, 5, 12):
        with torch._dynamo.config.patch(error_on_recompile=number != 3):
            x, target = randn(number, 16, device=device), torch.randint(300, (number,), device=device)
            for found, wanted in zip(compiled(x, target, 0.5), step(x, target, 0.5), strict=True):
                torch.testing.assert_close(found, wanted)
            found, wanted = (torch.autograd.grad(f(x, target, 0.5)[0], head)[0] for f in (compiled, step))
            torch.testing.assert_close(found, wanted)


@pytest.mark.gpu
def test_a_cuda_graph_replays_other_rows():
    x, head = randn(60, 64, device="cuda"), randn(5000, 64, device="cuda")
    target = torch.randint(5000, (60,), device="cuda")

    def step():
        return xent_ops.linear_top_k(x, head, 20, target)

    with no_synchronisation():
        step()
    graph, found = captured(step)
    x.copy_(randn(60, 64, device="cuda"))
    target.copy_(target.flip(0))
    graph.replay()
    assert all(torch.equal(one, other) for one, other in zip(found, step(), strict=True))


@pytest.mark.parametrize("k", [0, 8, -1])
def test_k_is_refused(device, k):
    with pytest.raises(ValueError, match=f"k must be from 1 to 7 classes, got {k}"):
        xent_ops.top_k(randn(3, 7, device=device), k)
    with pytest.raises(ValueError, match=f"k must be from 1 to 7 classes, got {k}"):
        xent_ops.linear_top_k(randn(3, 4, device=device), randn(7, 4, device=device), k)


def test_a_teacher_s_top_k_is_a_target(device):
    teacher, student, head = (randn(*s, device=device) for s in ((6, 8), (6, 8), (90, 8)))
    target = torch.tensor([3, -100, 5, 7, 1, 0], device=device)
    losses = F.cross_entropy(student @ head.T, (teacher @ head.T).softmax(-1), reduction="none")
    for k in (90, 30):
        top = xent_ops.linear_top_k(teacher, head, k, target)
        loss = xent_ops.linear_top_k_distillation_loss(student, head, top.ids, top.log_probs.exp(), tail=True)
        if k == 90:  # all classes
            torch.testing.assert_close(loss, losses[target != -100].mean())
        else:
            p, ids = (teacher @ head.T).softmax(-1).topk(k)
            wanted = xent_ops.linear_top_k_distillation_loss(
                student[2:], head, ids[2:], p[2:], tail=True, reduction="sum"
            )
            first = xent_ops.linear_top_k_distillation_loss(student[:1], head, ids[:1], p[:1], tail=True)
            torch.testing.assert_close(loss, (wanted + first) / 5)
