"""Operators for one chunk of rows of a rank's slices of two heads. The caller's gathers run between them.

The last two operators of chunk.py are used here too. head/loop.py has the loop, and
distributed/distillation.py calls it::

    linear_distillation_chunk         a chunk's logits of both heads, and the packed statistics of a rank
    (distillation_forward             the slice's part of the sums with the mixture, at a beta between 0 and 1)
    linear_distillation_chunk_grad_   from the statistics of all ranks: the gradient, written over the student's logits,
                                      and this rank's part of the input's gradient
"""

from __future__ import annotations

from ...head import distillation_shard
from ..library import operator
from .chunk import GRAD_INPUT, PADDED, one_chunk

operator("linear_distillation_chunk", reference=distillation_shard.chunk, rules=(one_chunk,), calls_operators=True)
operator(
    "linear_distillation_chunk_grad_",
    reference=distillation_shard.chunk_grad_,
    arguments=PADDED
    | {
        "logits": ("float", "... P", "as linear_distillation_chunk makes them"),
        "teacher_logits": ("float", "... P", "as linear_distillation_chunk makes them"),
    },
    results=GRAD_INPUT,
    rules=(one_chunk,),
    calls_operators=True,
    overwrites="logits",
)
