"""A Llama-like decoder, to see what a loss is worth in a training step: Llama 3.2 1B with a head of its own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .sizes import Sizes


def _rotary(length: int, width: int, device: torch.device) -> Tensor:
    """(2, length, width): cosines and sines of each position."""
    frequency = 500000.0 ** (-torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequency)
    return torch.stack([angles.cos(), angles.sin()]).repeat(1, 1, 2)


def _rotate(x: Tensor, rotary: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return (x * rotary[0] + torch.cat([-right, left], -1) * rotary[1]).to(x.dtype)


class _Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.kv_heads = sizes.heads, sizes.kv_heads
        self.width = sizes.hidden // sizes.heads
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(sizes.hidden), nn.RMSNorm(sizes.hidden)
        self.qkv = nn.Linear(sizes.hidden, (sizes.heads + 2 * sizes.kv_heads) * self.width, bias=False)
        self.out = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.gate_up = nn.Linear(sizes.hidden, 2 * sizes.feed_forward, bias=False)
        self.down = nn.Linear(sizes.feed_forward, sizes.hidden, bias=False)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, -1, self.width).transpose(1, 2)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)
        q, k = _rotate(q, rotary), _rotate(k, rotary)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        gate, up = self.gate_up(self.feed_forward_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    """Hidden states of tokens (B, S). The head is a parameter like the others, and called by the loss."""

    def __init__(self, sizes: Sizes, generator: torch.Generator) -> None:
        super().__init__()
        self.width = sizes.hidden // sizes.heads
        self.embedding = nn.Embedding(sizes.classes, sizes.hidden)
        self.blocks = nn.ModuleList(_Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.classes, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        rotary = _rotary(tokens.shape[1], self.width, x.device)
        for block in self.blocks:
            x = block(x, rotary)
        return self.norm(x)
