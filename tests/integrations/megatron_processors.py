"""Log-probabilities and a loss by an ``output_processor``, and from logits; run on every rank by its test."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron_cases import assert_close
from megatron_models import VARIANTS, batches, gradients, groups, make

import xent_ops
from xent_ops.integrations.megatron import output_processor


class Stats(NamedTuple):
    log_probs: torch.Tensor
    entropy: torch.Tensor


def ppo(stats, old, advantages):
    """Clipped, with a bonus for the entropy."""
    ratio = (stats.log_probs - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) - 0.1 * stats.entropy


def by_processors(model, batch, temperature=0.7):
    """((log-probabilities, entropies, PPO's loss), gradients), by two calls."""
    inputs, labels, mask = batch
    log_probs = output_processor(xent_ops.linear_token_log_probs, chunk_rows=5)
    loss = output_processor(xent_ops.linear_token_loss, fn=ppo)
    names, context = {"labels": labels, "loss_mask": mask}, {"logit_scale": 1 / temperature}
    found, entropy, _ = model(*inputs, **names, output_processor=log_probs, output_processor_context=context)
    context |= {"reduction": "sum", "divisor": mask.sum(), "rows": (found.detach() - 0.1, mask)}
    total = model(*inputs, **names, output_processor=loss, output_processor_context=context)
    ((found * mask).sum() + total).backward()
    return (found.detach(), entropy.detach(), total.detach()), gradients(model)


def by_logits(model, batch, temperature=0.7):
    """The same from the logits of all ranks."""
    inputs, labels, mask = batch
    logits = gather_from_tensor_model_parallel_region(model(*inputs)) / temperature
    log_probs, counted = logits.log_softmax(-1), labels >= 0
    found = log_probs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1) * counted
    entropy = -(log_probs.exp() * log_probs).sum(-1) * counted
    total = (ppo(Stats(found, entropy), found.detach() - 0.1, mask) * counted).sum() / mask.sum()
    ((found * mask).sum() + total).backward()
    return (found.detach(), entropy.detach(), total.detach()), gradients(model)


def over_ranks(device):
    with groups(device, tensor_model_parallel_size=dist.get_world_size()):
        for variant in ("plain", "tied", "sequence parallel", "tied, sequence parallel"):
            batch, options = next(batches(device=device)), VARIANTS[variant]
            want = by_logits(make(device=device, **options), batch)
            assert_close(by_processors(make(device=device, **options), batch), want, 1e-5)
