"""Losses of rows that are one divergence and a cross entropy, by the operators of divergences."""

import torch

from xent_ops.kernels.divergences import Divergences
from xent_ops.kernels.options import as_record
from xent_ops.kernels.reference import accumulator
from xent_ops.ops.distillation_arguments import fixed_loss

ops = torch.ops.xent


def fixed(hard_weight=0.0, beta=0.0, **options):
    return fixed_loss(Divergences(beta=beta, **as_record(options)), hard_weight)


def forward(logits, teacher, target, **options):
    """(losses, statistics)."""
    loss = fixed(**options)
    values, statistics = ops.divergences_forward(logits, teacher, target, **loss.spec.keywords())
    assert values.dtype == statistics.dtype == accumulator(logits)
    return loss.of(values), statistics


def _upstream(scale, logits, target, loss):
    return loss.upstream(scale.to(accumulator(logits)).expand(target.shape))


def backward(scale, logits, teacher, target, statistics, **options):
    loss = fixed(**options)
    upstream = _upstream(scale, logits, target, loss)
    return ops.divergences_backward(upstream, logits, teacher, target, statistics, **loss.spec.keywords())


def backward_(scale, logits, teacher, target, statistics, **options):
    loss = fixed(**options)
    upstream = _upstream(scale, logits, target, loss)
    return ops.divergences_backward_(upstream, logits, teacher, target, statistics, **loss.spec.keywords())


def with_grad(logits, teacher, target, scale, operator=ops.divergences_with_grad, **options):
    loss = fixed(**options)
    return operator(logits, teacher, target, scale, **loss.spec.keywords(), hard_weight=loss.hard_weight)


def with_grad_(*args, **options):
    return with_grad(*args, operator=ops.divergences_with_grad_, **options)
