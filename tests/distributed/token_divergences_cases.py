"""The divergences of tokens over ranks, and a student near its teacher; run on every rank by test_linear_parallel.py."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distillation_cases import heads_of, leaves
from distillation_token_cases import DTYPES, draft_of
from helpers import over_ranks
from helpers.divergence_oracle import divergences
from linear_log_prob_cases import close, gradients_close
from vocab_parallel_cases import V, same_bits_everywhere, split

import xent_ops
from xent_ops import TokenDivergences


def mixed(d):
    """Of tokens of a row: a product of acceptance rates, and a sum of the tokens before."""
    return (d.overlap.cumprod(-1) * d.kl * (1 + d.agrees)).sum() - (d.log_prob.cumsum(-1) * d.jsd + d.reverse_kl).sum()


def one(device, kind, dtype, sequence_dim=None, rows=(2, 5), **options):
    student, teacher, target = heads_of(dtype, rows)
    (x, w, b), (y, u, c) = given = leaves(device, kind, (student, teacher), sequence_dim)
    more = {"num_classes": V, "class_start": None if kind == "chunk" else split(kind, V)[0]}
    more |= {"linear_bias": b, "teacher_bias": c, "sequence_parallel": sequence_dim is not None, **options}
    found = over_ranks.linear_token_divergences(x, w, y, u, target=target.to(device), **more)
    for field in found:
        same_bits_everywhere(field.detach())
    whole = [tensor.double().requires_grad_() for tensor in student]
    wanted = divergences(F.linear(*whole), F.linear(*[tensor.double() for tensor in teacher]), target)
    wanted = TokenDivergences(*[torch.where(target == -100, 0.0, field) for field in wanted])
    for field, right in zip(found, wanted, strict=True):
        assert not right.requires_grad or field.requires_grad
        close(field, right.detach(), torch.float64 if dtype == torch.float64 else torch.float32)
    made, right = torch.autograd.grad(mixed(found), given[0]), torch.autograd.grad(mixed(wanted), whole)
    gradients_close(made, right, kind, dtype, sequence_dim)


def values(device, kind):
    for dtype in DTYPES:
        one(device, kind, dtype, chunk_rows=4)
    one(device, kind, torch.float32)
    world = dist.get_world_size()
    for rows, dim in (((2 * world, 3), 0), ((3, 2 * world), 1)):
        one(device, kind, torch.float32, dim, rows, chunk_rows=5)


def behaviour(device):
    """A draft vocabulary; some fields; a frozen head; what is refused."""
    student, teacher, target = heads_of(torch.float32)
    (x, w, b), (y, u, c) = leaves(device, "chunk", (student, teacher))
    more = {"num_classes": V, "linear_bias": b, "teacher_bias": c, "target": target.to(device)}
    call = over_ranks.linear_token_divergences
    whole = call(x, w, y, u, **more)
    for fields in (("kl",), ("overlap", "coverage"), ("agrees",)):
        found = call(x, w, y, u, fields=fields, **more)
        for name, field, other in zip(TokenDivergences._fields, found, whole, strict=True):
            assert (field is None) == (name not in fields) and (field is None or torch.equal(field, other))
    frozen = call(x.detach(), w, y, u, **more)
    for found, given in ((frozen, (w, b)), (whole, (w, b))):
        grads = torch.autograd.grad(mixed(found), given, retain_graph=True)
        torch.testing.assert_close(grads, torch.autograd.grad(mixed(found), given))
    some = torch.randperm(V, generator=torch.Generator().manual_seed(3))[:60].sort().values
    own, of_teacher, of_draft, _ = draft_of(device, "chunk", some, rows=(2, 3))
    shared = {**of_draft, "linear_bias": own[2], "teacher_bias": of_teacher[2]}
    found = call(*own[:2], *of_teacher[:2], **shared)
    fn = lambda d: d.overlap.log() + d.jsd * d.coverage * d.covers_top  # noqa: E731
    loss = over_ranks.linear_distillation_token_loss(*own[:2], *of_teacher[:2], fn, **shared, reduction="sum")
    counted = shared["target"] != -100
    mine = torch.where(counted, fn(found), 0.0).sum()
    torch.testing.assert_close(mine, loss)
    torch.testing.assert_close(torch.autograd.grad(mine, own), torch.autograd.grad(loss, own), rtol=1e-4, atol=1e-5)
    with pytest.raises(NotImplementedError, match="skip_ignored=True is of cross entropy"):
        call(x, w, y, u, skip_ignored=True, **more)


def compiled(device):
    """As in eager, also with the rows split and in float16, where each row's gradient has a factor. Two chunks: each is
    traced."""
    world = dist.get_world_size()
    for dtype, dim in ((torch.float32, None), (torch.float16, 1)):
        rows = (3, 2 * world)
        student, teacher, target = heads_of(dtype, rows)
        (x, w, b), (y, u, c) = leaves(device, "chunk", (student, teacher), dim)
        more = {"num_classes": V, "linear_bias": b, "teacher_bias": c, "target": target.to(device), "chunk_rows": 6}
        more["sequence_parallel"] = dim is not None

        def step(x, w, b, y=y, u=u, more=more):
            return mixed(over_ranks.linear_token_divergences(x, w, y, u, **{**more, "linear_bias": b}))

        loss, found = step(x, w, b), torch.compile(step, fullgraph=True, backend="aot_eager")(x, w, b)
        torch.testing.assert_close(found, loss)
        torch.testing.assert_close(torch.autograd.grad(found, (x, w, b)), torch.autograd.grad(loss, (x, w, b)))


def rows_of_float16(device):
    """Rows of one rank weigh 256 times those of another: each rank has the factors of its own rows."""
    world, rank = dist.get_world_size(), dist.get_rank()
    student, teacher, target = heads_of(torch.float16, (3, 2 * world))
    (x, w, b), (y, u, c) = leaves(device, "chunk", (student, teacher), 1)
    more = {"num_classes": V, "linear_bias": b, "teacher_bias": c, "sequence_parallel": True}
    scale = 256.0 ** (torch.arange(2 * world) // 2 % 2)
    found = over_ranks.linear_token_divergences(x, w, y, u, target=target.to(device), **more)
    (made,) = torch.autograd.grad((found.kl * scale.to(device)).sum(), x)
    whole = [tensor.double().requires_grad_() for tensor in student]
    wanted = divergences(F.linear(*whole), F.linear(*[tensor.double() for tensor in teacher]), target)
    (right,) = torch.autograd.grad((torch.where(target == -100, 0.0, wanted.kl) * scale).sum(), whole[0])
    right = right.chunk(world, 1)[rank]
    assert (made.double().cpu() - right).norm() < 0.01 * right.norm()


def near_teacher(device):
    """Logits that were rounded to bfloat16 changed the gradient by 40 %: fixed losses, token losses, a top k."""
    for dtype, autocast in ((torch.bfloat16, False), (torch.float16, False), (torch.bfloat16, True)):
        near_teacher_in(device, dtype, autocast)


def near_teacher_in(device, dtype, autocast):
    generator, world = torch.Generator().manual_seed(0), dist.get_world_size()
    hidden, noise = torch.randn(2, 24, 64, generator=generator)
    head = (torch.randn(400, 64, generator=generator) * 3 / 8).to(dtype)
    hidden, teacher = hidden.to(dtype), (hidden + 0.02 * noise).to(dtype)
    wide = [tensor.double().requires_grad_() for tensor in (hidden, head)]
    logits, of_teacher = F.linear(*wide), F.linear(teacher.double(), head.double())
    found = divergences(logits, of_teacher)
    probs, ids = of_teacher.softmax(-1).float().topk(16)
    log_q = logits.log_softmax(-1)
    others = (1 - probs.double().sum(-1)) * log_q.scatter(-1, ids, float("-inf")).logsumexp(-1)
    top_k = -(probs.double() * log_q.gather(-1, ids)).sum(-1) - others
    rank = dist.get_rank()
    mine = slice(rank * -(-400 // world), (rank + 1) * -(-400 // world))
    y, u, ids, probs = (tensor.to(device) for tensor in (teacher, head[mine], ids, probs))
    options = {"shard": xent_ops.distributed.Shard(num_classes=400), "chunk_rows": 10}
    losses = {
        "kl": (lambda *heads: xent_ops.linear_distillation_loss(*heads, **options), found.kl),
        "jsd": (lambda *heads: xent_ops.linear_distillation_loss(*heads, beta=0.5, **options), found.jsd),
        "reverse kl": (lambda *heads: xent_ops.linear_distillation_loss(*heads, beta=1.0, **options), found.reverse_kl),
        "of tokens": (
            lambda *heads: xent_ops.linear_distillation_token_loss(*heads, lambda d: d.kl, **options),
            found.kl,
        ),
        "themselves": (lambda *heads: xent_ops.linear_token_divergences(*heads, **options).kl.mean(), found.kl),
        "top k": (
            lambda x, w, *_: xent_ops.linear_top_k_distillation_loss(x, w, ids, probs, tail=True, **options),
            top_k,
        ),
    }
    for name, (ours, right) in losses.items():
        x, w = (tensor.to(device, torch.float32 if autocast else dtype).clone() for tensor in (hidden, head[mine]))
        x, w = x.requires_grad_(), w.requires_grad_()
        with torch.autocast(device, dtype, enabled=autocast):
            loss = ours(x, w, y, u)
        of_input, of_head = torch.autograd.grad(right.mean(), wide, retain_graph=True)
        assert abs(loss.item() / right.mean().item() - 1) < 1e-4, (name, dtype, autocast)
        for grad, wanted in zip(torch.autograd.grad(loss, (x, w)), (of_input, of_head[mine]), strict=True):
            assert (grad.double().cpu() - wanted).norm() < 2e-2 * wanted.norm(), (name, dtype, autocast)
