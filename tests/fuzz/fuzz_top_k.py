"""Random calls of the losses of a teacher's top k, as fuzz_draws.py makes those of the others."""

import math

import torch
from fuzz_compare import assert_grads, assert_loss, exact_logits, far, row_factors, spread, unit_of
from fuzz_heads import Heads
from fuzz_program import DTYPES

from xent_ops.testing.rows import activated, eps

NAMES = ("top_k_distillation_loss", "linear_top_k_distillation_loss")


def draw(*args):
    draw = Heads(*args, judge="fuzz_top_k")
    draw.split_rows()
    places = (draw.pick((1, 2, 5, 16), "K"),)
    draw.numbers("linear_cross_entropy")
    draw.indices("ids", lambda: draw.pick((0.0, 0.0, 0.3, 1.0)), places)
    sizes, dtype = (*draw.shape, *places), draw.pick(DTYPES[:3])
    draw.say(f"probs = (torch.randn({sizes}).softmax(-1) * 0.9).to({dtype}).to({draw.device!r})")
    draw.option("tail", 0.5, (True,))
    draw.reduced("mean", "sum", *(["none"] if draw.ranks == 1 else []))
    draw.chunked()
    draw.student = draw.logits("student", draw.dtype, draw.classes)
    draw.call("ids", "probs")
    return draw.expect("ids", "probs")


def expect(
    loss, grads, upstream, student, ids, probs, token_weight=None, reduction="mean", divisor=1.0, ignore_index=-100,
    softcap=None, logit_scale=1.0, lse_square_scale=0.0, tail=False, shard=None, part=None
):  # fmt: skip
    """By autograd in float64, within a part of the sums of magnitudes."""
    own, linear = student[0].dtype, len(student) > 1
    exact, logits = exact_logits(student)
    z, ids = activated(logits, softcap, logit_scale).x, ids.cpu().long()
    counted = ids != ignore_index
    factor = row_factors(counted.any(-1), token_weight, reduction, divisor)
    place = torch.where(counted, ids, 0)
    dense = torch.zeros_like(z).detach().scatter_add(-1, place, torch.where(counted, probs.cpu().double(), 0.0))
    named = torch.zeros(z.shape).scatter_add(-1, place, counted.float()) > 0
    lse = z.logsumexp(-1, keepdim=True)
    terms = [-dense * (z - lse), lse_square_scale * lse.square()]
    if tail:
        rest, whole = 1.0 - dense.sum(-1, keepdim=True), named.all(-1, keepdim=True)
        left = torch.where(whole, 0.0, z.masked_fill(named, -math.inf)).logsumexp(-1, keepdim=True)
        terms.append(torch.where(whole, 0.0, -rest * (left - lse)))
    values = sum(term.sum(-1) for term in terms)
    unit = unit_of(own, linear)
    off = far(unit) * (4 + (z.detach().abs().max().item() if z.numel() else 0.0))
    assert_loss(loss, own, values, off * (1 + sum(term.detach().abs().sum(-1) for term in terms)), factor, reduction)
    of_rows = factor * upstream[0].double().cpu()
    wanted = torch.autograd.grad((values * of_rows).sum(), exact, allow_unused=True, materialize_grads=True)
    # Magnitudes of the gradient of the logits, m q + p, and what products make of them.
    slope = (1 + 2 * lse_square_scale * lse.detach().abs()) * z.detach().softmax(-1) + dense
    scale = slope * of_rows.abs().unsqueeze(-1) * abs(logit_scale)
    bounds = [(off + eps(own)) * part for part in spread(scale, student)]
    tiny = torch.finfo(own).tiny * (1 + z.numel() ** 0.5)
    assert_grads(grads, wanted, bounds, shard, part, largest=True, tiny=tiny)
