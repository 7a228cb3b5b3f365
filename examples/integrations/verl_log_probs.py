"""verl: log-probabilities and entropies of its fused kernels by ``linear_token_log_probs``.

    python examples/integrations/verl_log_probs.py

With ``use_fused_kernels`` and the backend "torch" verl 0.9 calls ``FusedLinearForPPO`` on hidden states and the head's
weight. ``XentFusedLinearForPPO`` has its signature. In a worker, before models are made::

    from verl.utils.experimental import torch_functional

    torch_functional.FusedLinearForPPO = XentFusedLinearForPPO

With the backend "triton", and in Megatron, verl calls ``linear_cross_entropy`` of ``verl.utils.kernel``, over the ranks
that share the vocabulary: the function of this name below.
"""

import importlib.util
from pathlib import Path

import torch
import torch.distributed as dist
from common import compare, text, tiny_llama
from torch import Tensor, nn

import xent_ops


class XentFusedLinearForPPO(nn.Module):
    """Chunks of the size that the operator chooses; float32 logits, as an inference engine has them, if you ask."""

    def __init__(
        self, chunk_size: int | None = None, impl_backend: str = "torch", logits_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.logits_dtype = logits_dtype

    def forward(
        self, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        stats = xent_ops.linear_token_log_probs(
            hidden_states, vocab_weights, input_ids, logit_scale=1 / temperature, logits_dtype=self.logits_dtype
        )
        return stats.log_probs, stats.entropy.to(hidden_states.dtype)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,  # this rank's rows, as many on each
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of tokens, each of the labels' number, as verl's kernel returns them."""
    if reduction != "none":
        raise NotImplementedError(f"verl asks for reduction='none', got {reduction!r}")
    rows, shard = (hidden.flatten(0, -2), weight, labels.flatten()), None
    if dist_process_group is not None:
        classes = len(weight) * dist.get_world_size(dist_process_group)
        shard = xent_ops.distributed.Shard(classes, dist_process_group)
    stats = xent_ops.linear_token_log_probs(*rows, logit_scale=1 / temperature, shard=shard)
    return stats.log_probs, stats.entropy


def verls_own() -> type[nn.Module]:
    """From the installed package, without what importing all of verl needs (ray and more)."""
    package = importlib.util.find_spec("verl")
    path = Path(package.submodule_search_locations[0]) / "utils" / "experimental" / "torch_functional.py"
    spec = importlib.util.spec_from_file_location("verl_torch_functional", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FusedLinearForPPO


def run(with_xent: bool) -> list[float]:
    """PPO with an entropy bonus on one batch, three steps; the loss of each, and what it is made of."""
    model, ids = tiny_llama(), text(4, 24)
    fused = XentFusedLinearForPPO() if with_xent else verls_own()()
    labels, advantage = torch.roll(ids, -1, 1), torch.linspace(-1, 1, ids.numel()).view(ids.shape)
    optimizer, found, old = torch.optim.AdamW(model.parameters(), lr=1e-3), [], None
    for step in range(3):
        hidden = model.model(ids, use_cache=False).last_hidden_state
        if with_xent and step == 1:  # the other function, in turn
            values = linear_cross_entropy(hidden, model.lm_head.weight, labels, 0.7)
            log_probs, entropy = (value.view(labels.shape) for value in values)
        else:
            log_probs, entropy = fused(hidden, model.lm_head.weight, labels, temperature=0.7)
        old = log_probs.detach() if old is None else old
        ratio = (log_probs - old).exp()
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        loss = (-surrogate - 0.01 * entropy).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item(), log_probs.mean().item(), entropy.mean().item()]
    return found


if __name__ == "__main__":
    compare(run)
