"""torchtitan: losses for its config, in the place of ``ChunkedLossWrapper`` and of ``CrossEntropyLoss``.

    python examples/integrations/torchtitan_loss.py

In a Trainer.Config, ``loss=XentLinearLoss.Config()`` is the head and the loss as one. With a head that is split over
tensor-parallel ranks (loss parallelism) take torchtitan's chunks and our loss of the logits:

    loss=ChunkedLossWrapper.Config(loss_fn=XentCrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec)))

Run here: the losses with a head of torchtitan's, in one process, as its trainer calls them.
"""

import torch
from common import VOCABULARY, compare, prompts_ignored, text
from torch import nn
from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.models.common.linear import Linear

from xent_ops.integrations.torchtitan import XentCrossEntropyLoss, XentLinearLoss

WIDTH = 64
# (without us, with us)
CONFIGS = [
    (ChunkedLossWrapper.Config(num_chunks=4), XentLinearLoss.Config()),
    (ChunkedLossWrapper.Config(num_chunks=4), XentLinearLoss.Config(skip_ignored=True)),
    (
        ChunkedLossWrapper.Config(num_chunks=4),
        ChunkedLossWrapper.Config(num_chunks=4, loss_fn=XentCrossEntropyLoss.Config(global_vocab_size=VOCABULARY)),
    ),
    (CrossEntropyLoss.Config(), XentCrossEntropyLoss.Config()),
]


def train(config) -> list[float]:
    torch.manual_seed(0)
    tokens, body = nn.Embedding(VOCABULARY, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
    head = Linear.Config(in_features=WIDTH, out_features=VOCABULARY).build()
    optimizer = torch.optim.AdamW([p for part in (tokens, body, head) for p in part.parameters()], lr=1e-2)
    loss_of = config.build()
    chunked = isinstance(loss_of, ChunkedLossWrapper)
    if chunked:
        loss_of.set_lm_head(head)
    losses = []
    ids = text(24, 65)
    for rows, labels in zip(ids.split(4), prompts_ignored(ids).split(4), strict=True):
        target = labels[:, 1:].contiguous()
        hidden = body(tokens(rows[:, :-1]))[0]
        loss, _ = loss_of(hidden if chunked else head(hidden), target, (target != IGNORE_INDEX).sum())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run(with_xent: bool) -> list[float]:
    return [loss for pair in CONFIGS for loss in train(pair[with_xent])]


if __name__ == "__main__":
    compare(run)
