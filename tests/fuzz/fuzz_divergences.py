"""Random calls of losses that are a function of a token's divergences, and of these, as fuzz_draws.py makes others."""

import torch
import torch.nn.functional as F
from fuzz_compare import assert_grads, assert_loss, exact_logits, far, row_factors, spread, unit_of
from fuzz_heads import Heads
from helpers.divergence_oracle import divergences

from xent_ops.testing.rows import activated, eps

LOSSES = ("distillation_token_loss", "linear_distillation_token_loss")
NAMES = (*LOSSES, "token_divergences", "linear_token_divergences")
FIELDS = ("kl", "reverse_kl", "jsd", "overlap", "log_prob")


def draw(*args):
    draw = Heads(*args, judge="fuzz_divergences")
    draw.split_rows()
    draft = draw.maybe(0.4, "draft")
    draw.numbers("divergences_forward")
    widths = (draw.classes, draw.classes + draw.pick((0, 1, 50))) if draft else draw.padded()
    read = draw.pick([draw.random.sample(FIELDS, draw.pick((1, 1, 2, 3, 5)))], "read")
    needed = draw.sequence is not None and draw.name not in LOSSES  # it says how the rows are split
    if draw.maybe(0.7, "target") or "log_prob" in read or needed:
        draw.target()
    if draw.name in LOSSES:
        draw.reduced("mean", "sum")
    draw.chunked()
    if draft:
        draw.draft_of = widths[1]
        order = ".sort().values" if draw.ranks > 1 else ""  # the heads are split at the same classes
        draw.say(f"classes = torch.randperm({widths[1]})[:{draw.classes}]{order}.to({draw.device!r})")
        draw.more.append("classes=classes")
    draw.student = draw.logits("student", draw.dtype, widths[0])
    draw.teacher = draw.logits("teacher", draw.dtype, widths[1], (1, 4, 16))
    draw.say(f"factors = torch.randn({(len(read), *draw.shape)}).double().to({draw.device!r})")
    total = " + ".join(f"rows[{i}] * d.{field}" for i, field in enumerate(read))
    if draw.name in LOSSES:
        draw.more += [f"fn=lambda d, *rows: {total}", "rows=tuple(factors)"]
        draw.call()
    else:
        draw.more.append(f"fields={read}")
        draw.call(result="d")
        draw.judged.append("reduction='sum'")
        draw.say("rows = factors", f"loss = ({total}).sum().to(d.{read[0]}.dtype)")
    return draw.expect(repr(read), "factors")


def expect(
    loss, grads, upstream, student, teacher, read, factors, target=None, classes=None, reduction="mean", divisor=1.0,
    ignore_index=-100, num_classes=None, shard=None, part=None, **options
):  # fmt: skip
    """By autograd in float64, within a part of the sums of magnitudes.

    A class whose s and t are as near as rounding may be on the other side of the overlap: it may have its whole s.
    """
    own, linear = student[0].dtype, len(student) > 1
    (exact, logits), (_, y) = exact_logits(student), exact_logits(teacher)
    z, y = logits[..., :num_classes], y[..., :num_classes].detach()
    target, classes = (None if tensor is None else tensor.cpu() for tensor in (target, classes))
    found = divergences(z, y, target, classes, ignore_index=ignore_index, **options)
    factors = factors.cpu()
    values = sum(row * getattr(found, field) for row, field in zip(factors, read, strict=True))
    counted = torch.ones_like(values, dtype=torch.bool) if target is None else target != ignore_index
    factor = row_factors(counted, None, reduction, divisor)
    total = (values * factor).sum() * upstream[0].double().cpu()
    wanted = torch.autograd.grad(total, exact, allow_unused=True, materialize_grads=True)
    with torch.no_grad():
        temperature, scale = options.get("temperature", 1.0), options.get("logit_scale", 1.0)
        teacher_scale = options.get("teacher_logit_scale", 1.0)
        log_s = (activated(z, options.get("softcap"), scale).x / temperature).log_softmax(-1)
        log_t = (activated(y, options.get("teacher_softcap"), teacher_scale).x / temperature).log_softmax(-1)
        log_t = log_t if classes is None else log_t[..., classes]
        s, t = log_s.exp(), log_t.log_softmax(-1).exp()
        unit = unit_of(own, linear)
        steep = max(1.0, 1 / temperature) * max(1.0, abs(scale), abs(teacher_scale))
        largest = max([one.abs().max().item() for one in (z, y) if one.numel()], default=0.0)
        off = far(unit) * (4 + largest) * steep
        distance = log_s.abs() + log_t.abs()
        sizes = ((s + t) * distance).sum(-1, keepdim=True) + found.log_prob.abs().unsqueeze(-1) + 4
        weight = factors.abs().sum(0).unsqueeze(-1)
        assert_loss(loss, own, values, (off * weight * sizes).sum(-1), factor, reduction)
        parts = s * (1 + distance + sizes) + t + (0.0 if "log_prob" not in read else steep)
        flips = torch.where((log_s - log_t).abs() < off * steep, s, 0.0) if "overlap" in read else 0.0
        slope = abs(scale) * max(1.0, 1 / temperature) * upstream[0].double().cpu().abs() * factor.abs().unsqueeze(-1)
        bounds = weight * slope * ((off + eps(own)) * parts + flips)
    bounds = spread(F.pad(bounds, (0, logits.shape[-1] - z.shape[-1])), student)
    tiny = torch.finfo(own).tiny * (1 + z.numel() ** 0.5)
    assert_grads(grads, wanted, bounds, shard, part, largest=True, tiny=tiny)
