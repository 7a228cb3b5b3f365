"""A script in the style of nanoGPT: the model returns the loss, and the head and the loss are one call.

    python examples/integrations/nanogpt.py

nanoGPT's forward ends so::

    logits = self.lm_head(x)
    loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
    return logits, loss

With targets nobody reads the logits: return None in their place.
"""

import torch
import torch.nn.functional as F
from common import VOCABULARY, compare, text
from torch import nn

import xent_ops

WIDTH, LENGTH = 64, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, with_xent):
        super().__init__()
        self.with_xent = with_xent
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.block, self.norm = Block(), nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.lm_head.weight = self.tokens.weight  # tied, as in nanoGPT

    def forward(self, ids, targets=None):
        x = self.norm(self.block(self.tokens(ids) + self.positions.weight))
        if targets is None:
            return self.lm_head(x[:, [-1]]), None
        if self.with_xent:
            return None, xent_ops.linear_cross_entropy(x, self.lm_head.weight, targets, ignore_index=-1)
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1), ignore_index=-1)


def run(with_xent: bool) -> list[float]:
    torch.manual_seed(0)
    model = GPT(with_xent)
    step = torch.compile(model, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for rows in text(24, LENGTH + 1).split(4):
        _, loss = step(rows[:, :-1], rows[:, 1:].contiguous())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    compare(run)
