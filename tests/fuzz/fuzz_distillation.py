"""Random calls of the functions of distillation, as fuzz_draws.py makes those of the others."""

import torch
from fuzz_compare import assert_grads, assert_loss, exact_logits, far, products, row_factors, spread, unit_of
from fuzz_heads import Heads
from fuzz_program import DTYPES

from xent_ops.testing import assert_distillation, distillation_oracle
from xent_ops.testing.rows import eps

NAMES = ("distillation_loss", "linear_distillation_loss")


def draw(*args):
    draw = Heads(*args, judge="fuzz_distillation")
    draw.split_rows()
    teacher_dtype = draw.pick(DTYPES, "teacher_dtype")
    teacher_dtype = draw.dtype if "torch.float64" in (draw.dtype, teacher_dtype) else teacher_dtype
    draw.numbers("divergences_with_grad", beta=(0.0, 0.5, 1.0, 0.03125, 0.875))  # float32 holds them, as kernels do
    widths = draw.padded()
    if draw.maybe(0.7, "target") or draw.options.get("hard_weight"):
        draw.target()
    draw.reduced("mean", "sum", *(["none"] if draw.ranks == 1 else []))
    draw.chunked()
    draw.student = draw.logits("student", draw.dtype, widths[0])
    draw.teacher = draw.logits("teacher", teacher_dtype, widths[1], (1, 4, 16))
    draw.call()
    return draw.expect()


def expect(
    loss, grads, upstream, student, teacher, target=None, token_weight=None, reduction="mean", divisor=1.0,
    shard=None, part=None, **options
):  # fmt: skip
    """Of given logits to the budgets of the oracle; through heads to a part of the largest number."""
    own, linear = student[0].dtype, len(student) > 1
    logits, teacher_logits = (exact_logits(head)[1].detach() if linear else head[0] for head in (student, teacher))
    counted = torch.ones(logits.shape[:-1], dtype=torch.bool)
    counted = counted if target is None else target.cpu() != options.get("ignore_index", -100)
    factor = row_factors(counted, token_weight, reduction, divisor)
    of_rows = factor * upstream[0].detach().double().cpu()
    expected = distillation_oracle(logits, teacher_logits, target, grad_loss=of_rows, **options)
    if not linear and reduction == "none" and token_weight is None:
        assert_distillation(loss, grads[0], expected)
        return
    # Logits of heads are rounded, to the error ``off``; the rest is what sums of rows add.
    unit = max([unit_of(own, linear), *(eps(tensor.dtype) for tensor in teacher if linear and own != torch.float64)])
    largest = max([tensor.abs().max().item() for tensor in (logits, teacher_logits) if tensor.numel()], default=0.0)
    off = far(unit) * (4 + largest)
    assert_loss(loss, own, expected.loss, expected.loss_bound + off * expected.loss_scale, factor, reduction)
    tiny = torch.finfo(own).tiny * (1 + logits.numel() ** 0.5)
    if linear:
        bounds = [off * part for part in spread(expected.grad_scale, student)]
        assert_grads(grads, products(expected.grad, student), bounds, shard, part, largest=True, tiny=tiny)
    else:
        assert_grads(grads, [expected.grad], [expected.grad_bound + off * expected.grad_scale + tiny])
