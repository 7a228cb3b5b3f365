"""Published losses of tokens, as users write them, and what they are in float64 from all logits."""

import torch

from xent_ops import TokenLogProbs


def grpo(stats, old, advantage):
    """Shao et al., 2024, with the entropy bonus of PPO."""
    ratio = (stats.log_probs - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) - 0.01 * stats.entropy


def dapo(stats, old, advantage):
    """Yu et al., 2025: the upper clip is wider."""
    ratio = (stats.log_probs - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - 0.2, 1 + 0.28) * advantage)


def cispo(stats, old, advantage):
    """MiniMax, 2025: the clipped ratio is a constant weight."""
    weight = (stats.log_probs - old).exp().clamp(max=1.5).detach()
    return -weight * advantage * stats.log_probs


def ppo_with_kl(stats, old, advantage, reference):
    """Schulman et al., 2017, with the unbiased estimate of KL(policy || reference) that GRPO adds."""
    ratio, behind = (stats.log_probs - old).exp(), reference - stats.log_probs
    kl = behind.exp() - behind - 1
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) + 0.05 * kl - 0.01 * stats.entropy


def dft(stats):
    """Wu et al., 2025: each token weighted by its probability, a constant."""
    return -stats.log_probs.exp().detach() * stats.log_probs


def focal(stats):
    """Lin et al., 2017."""
    return -((1 - stats.log_probs.exp()) ** 2) * stats.log_probs


def poly_1(stats):
    """Leng et al., 2022."""
    return -stats.log_probs + 2.0 * (1 - stats.log_probs.exp())


def unlikelihood(stats):
    """Welleck et al., 2020: of negative tokens."""
    return -torch.log1p(-stats.log_probs.exp().clamp(max=0.999))


def reinforce(stats, returns, baseline):
    """Williams, 1992, with a z-loss."""
    log_probs, _, lse = stats
    return -(returns - baseline) * log_probs + 1e-3 * lse.square()


LOSSES = {
    function.__name__: function for function in (grpo, dapo, cispo, ppo_with_kl, dft, focal, poly_1, unlikelihood)
} | {"reinforce": reinforce}


def rows_of(fn, shape, device="cpu", dtype=torch.float32):
    """Random rows for the function: old log-probabilities and what else it takes."""
    generator = torch.Generator().manual_seed(5)
    number = fn.__code__.co_argcount - 1
    rows = [torch.randn(shape, generator=generator) for _ in range(number)]
    if number > 0:
        rows[0] = rows[0] * 0.3 - 3.5
    return tuple(row.to(device, dtype) for row in rows)


def expected(fn, logits, target, rows, divisor=1.0, softcap=None, logit_scale=1.0, ignore_index=-100):
    """In the dtype of the logits, with autograd: what the fused losses must be."""
    z = logits * logit_scale if softcap is None else softcap * torch.tanh(logits * logit_scale / softcap)
    counted, log_p = target != ignore_index, z.log_softmax(-1)
    chosen = log_p.gather(-1, torch.where(counted, target, 0).long().unsqueeze(-1)).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    stats = TokenLogProbs(chosen[counted], entropy[counted], z.logsumexp(-1)[counted])
    return fn(stats, *(row[counted] for row in rows)).sum() / divisor
