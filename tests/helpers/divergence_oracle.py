"""Divergences of tokens in float64, from logits that are rounded as the kernels' are, and differentiable through that."""

import torch

from xent_ops import TokenDivergences


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dtype):
        return x.to(dtype).double()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def rounded(logits, dtype):
    """In float64 what a tensor of this dtype would hold. The gradient passes as it is."""
    return _Round.apply(logits, dtype)


def _x(z, softcap, scale, temperature):
    z = z * scale
    return (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature


def _mean(p, value):
    return torch.where(p == 0.0, 0.0, p * value).sum(-1)


def divergences(
    logits, teacher_logits, target=None, classes=None, teacher_lse=None, *, beta=0.5, temperature=1.0, softcap=None,
    logit_scale=1.0, teacher_softcap=None, teacher_logit_scale=1.0, num_classes=None, ignore_index=-100,
):  # fmt: skip
    """TokenDivergences of float64 logits. ``teacher_lse``: of the overlap's probabilities, if no classes say it."""
    x = _x(logits[..., :num_classes], softcap, logit_scale, temperature)
    y = _x(teacher_logits[..., :num_classes], teacher_softcap, teacher_logit_scale, temperature)
    of_classes = y if classes is None else y[..., classes]
    lse = y.logsumexp(-1) if teacher_lse is None else teacher_lse.double()
    log_s, log_t, log_all = x.log_softmax(-1), of_classes.log_softmax(-1), of_classes - lse.unsqueeze(-1)
    s, t = log_s.exp(), log_t.exp()
    log_m = ((1 - beta) * s + beta * t).log()
    mixture = beta * _mean(t, log_t - log_m) + (1 - beta) * _mean(s, log_s - log_m)
    log_prob = torch.zeros_like(lse)
    if target is not None:
        index = torch.where(target == ignore_index, 0, target).long().unsqueeze(-1)
        log_prob = (x * temperature).log_softmax(-1).gather(-1, index).squeeze(-1)
    ids = torch.arange(y.shape[-1], device=y.device) if classes is None else classes
    top = y.argmax(-1)
    agrees, covers = ids[x.argmax(-1)] == top, (ids == top.unsqueeze(-1)).any(-1)
    return TokenDivergences(
        _mean(t, log_t - log_s),
        _mean(s, log_s - log_t),
        mixture,
        torch.minimum(s, log_all.exp()).sum(-1),
        log_prob,
        log_all.exp().sum(-1).detach(),
        agrees.double(),
        covers.double(),
    )
