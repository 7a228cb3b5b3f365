"""Random calls of the functions of the k most probable classes, as fuzz_draws.py makes those of the others."""

import torch
from fuzz_compare import assert_grads, exact_logits, far, spread, unit_of
from fuzz_heads import Heads

from xent_ops.testing.rows import activated, assert_within, eps

NAMES = ("top_k", "linear_top_k")


def draw(*args):
    draw = Heads(*args, judge="fuzz_largest", classes=(1, 2, 17, 64, 130, 1003, 5003))
    k = str(draw.random.randint(1, min(draw.classes, draw.pick((1, 5, 40, draw.classes)))))
    draw.numbers("linear_top_k")
    if draw.maybe(0.7, "target"):
        draw.split_rows()
        draw.target()
    draw.chunked()
    draw.student = draw.logits("student", draw.dtype, draw.classes)
    draw.call(k, result="top")
    differentiated = "top.log_probs, top.entropy, top.lse"
    differentiated += ", top.target_log_probs" if "target=target" in draw.more else ""
    return draw.expect(k, result="top", differentiated=differentiated if draw.ranks == 1 else None)


def expect(
    top, grads, upstream, student, k, target=None, ignore_index=-100, softcap=None, logit_scale=1.0, shard=None,
    part=None
):  # fmt: skip
    """By autograd in float64 at the ids that were found. Exact logits of given tensors, of heads near ones."""
    own, linear = student[0].dtype, len(student) > 1
    exact, logits = exact_logits(student)
    z = activated(logits, softcap, logit_scale).x
    sign, shape = 1 if logit_scale > 0 else -1, z.shape[:-1]
    rows = torch.ones(shape, dtype=torch.bool) if target is None else target.cpu().long() != ignore_index
    size = max([float(value.detach().abs().max()) if value.numel() else 0.0 for value in (logits, z)])
    off = far(unit_of(own, linear)) * (1 + size) * (1 + abs(logit_scale))
    ids = top.ids.cpu()
    assert ids.shape == (*shape, k) and (ids[~rows] == -100).all(), "ids of ignored rows"
    place = torch.where(rows.unsqueeze(-1), ids, 0)
    ordered, order = (sign * logits.detach()).sort(dim=-1, descending=True, stable=True)
    chosen = (sign * logits.detach()).gather(-1, place)
    if not linear:
        assert torch.equal(ids[rows], order[rows][..., :k])
    assert (place[rows].sort(dim=-1).values.diff(dim=-1) > 0).all(), "a class twice"
    assert ((chosen - ordered[..., :k]).abs()[rows] <= off).all(), "not the largest"
    log_p = z.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    kept = torch.where(rows.unsqueeze(-1), log_p.gather(-1, place), 0.0)
    for name, found, wanted in (
        ("log_probs", top.log_probs, kept),
        ("entropy", top.entropy, torch.where(rows, entropy, 0.0)),
        ("lse", top.lse, torch.where(rows, z.logsumexp(-1), float("inf"))),
    ):
        budget = off * (1 + (size if name == "entropy" else 0.0))
        assert_within(name, found, wanted.detach(), torch.full_like(wanted, budget, requires_grad=False))
    at_target = torch.zeros(shape).double()
    if target is None:
        assert top.target_ranks is None and top.target_log_probs is None
    else:
        index, ranks = torch.where(rows, target.cpu().long(), 0).unsqueeze(-1), top.target_ranks.cpu()
        own_logit = (sign * logits.detach()).gather(-1, index)
        least = ((sign * logits.detach()) > own_logit + 2 * off).sum(-1)
        most = ((sign * logits.detach()) >= own_logit - 2 * off).sum(-1) - 1
        assert ((ranks >= least) & (ranks <= most))[rows].all() and (ranks[~rows] == -1).all(), "rank"
        hit = rows & (ranks < k)
        assert torch.equal(ids[hit].gather(-1, ranks[hit].unsqueeze(-1)), index[hit])
        at_target = torch.where(rows, log_p.gather(-1, index).squeeze(-1), 0.0)
        budget = torch.full_like(at_target, off, requires_grad=False)
        assert_within("target_log_probs", top.target_log_probs, at_target.detach(), budget)
        place = torch.cat([place, index], -1)
    if grads is None:
        return
    of_log_probs, *of_rows = (value.double().cpu() for value in upstream)
    of_log_probs = torch.where(rows.unsqueeze(-1), of_log_probs, 0.0)
    of_entropy, of_lse, *of_target = (torch.where(rows, value, 0.0) for value in of_rows)
    total = (kept * of_log_probs).sum() + (entropy * of_entropy).sum() + (z.logsumexp(-1) * of_lse).sum()
    total += sum((at_target * value).sum() for value in of_target)
    wanted = torch.autograd.grad(total, exact, materialize_grads=True)
    size_of = torch.cat([of_log_probs, *(value.unsqueeze(-1) for value in of_target)], -1).abs()
    log_p, entropy = log_p.detach().abs(), entropy.detach()
    scale = of_entropy.abs().unsqueeze(-1) * (1 + log_p + entropy.unsqueeze(-1)) + of_lse.abs().unsqueeze(-1)
    scale = (scale + size_of.sum(-1, keepdim=True)) * z.detach().softmax(-1)
    scale = abs(logit_scale) * scale.scatter_add(-1, place, size_of)
    bounds = [(off + 4 * eps(own)) * part for part in spread(scale, student)]
    assert_grads(grads, wanted, bounds, shard, part, largest=True, tiny=torch.finfo(own).tiny)
