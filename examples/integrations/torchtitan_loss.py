"""torchtitan: a loss class for its config, in the place of ``ChunkedLossWrapper``.

    python examples/integrations/torchtitan_loss.py

torchtitan's trainer gives a ``ChunkedLossWrapper`` the model's head, and its decoder then returns hidden states.
``XentLoss`` is one: in a config, ``loss=XentLoss.Config()``. The head's forward becomes the head and the loss, so that
FSDP's hooks gather the weight for it once. Run here: the loss with a head of its own, in one process. Not run: a whole
torchtitan training, FSDP and pipeline parallelism around it, a head that is split over tensor-parallel ranks. With loss
parallelism use torchtitan's own class.
"""

from dataclasses import dataclass
from types import MethodType

import torch
from common import VOCABULARY, compare, prompts_ignored, text
from torch import nn
from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper

import xent_ops

WIDTH = 64


def _head_and_loss(self, hidden, labels, divisor):
    return xent_ops.linear_cross_entropy(
        hidden,
        self.weight,
        labels,
        linear_bias=self.bias,
        ignore_index=IGNORE_INDEX,
        reduction="sum",
        divisor=divisor,
    )


class XentLoss(ChunkedLossWrapper):
    """The sum of the losses over ``global_valid_tokens``, from hidden states."""

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):
        pass

    def set_lm_head(self, lm_head):
        lm_head.forward = MethodType(_head_and_loss, lm_head)
        super().set_lm_head(lm_head)

    def __call__(self, pred, labels, global_valid_tokens=None, **loss_inputs):
        return self.lm_head(pred, labels, global_valid_tokens), {}


def run(with_xent: bool) -> list[float]:
    torch.manual_seed(0)
    tokens, body = nn.Embedding(VOCABULARY, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
    head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    optimizer = torch.optim.AdamW([p for part in (tokens, body, head) for p in part.parameters()], lr=1e-2)
    loss_of = (XentLoss if with_xent else ChunkedLossWrapper).Config(num_chunks=4).build()
    loss_of.set_lm_head(head)
    losses = []
    ids = text(24, 65)
    for rows, labels in zip(ids.split(4), prompts_ignored(ids).split(4), strict=True):
        target = labels[:, 1:].contiguous()
        loss, _ = loss_of(body(tokens(rows[:, :-1]))[0], target, (target != IGNORE_INDEX).sum())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    compare(run)
