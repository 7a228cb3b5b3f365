"""What the output layer of a model of Megatron-Core returns by ``use_xent`` in place of logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..distributed.bound import Shard
from ..top_k import linear_top_k
from .unread import NotComputed


class MegatronLogits(NotComputed):
    """Megatron takes their loss, multiplies them by a number (MuP), and counts how often the best class of a head of
    multi-token prediction is the label.

    No UnreadLogits, whose rows can be sliced and reshaped: with sequence parallelism a rank has a part of the rows.
    """

    def __init__(
        self,
        layer: Any,
        chunks: tuple[Any, ...],  # as for arguments.chunks
        input_: Tensor,  # (S, B, H), this rank's part of it with sequence_parallel
        weight: Tensor | None,
        scale: float = 1.0,
    ) -> None:
        self.layer, self.chunks, self.input, self.weight, self.scale = layer, chunks, input_, weight, scale
        self.labels: Tensor | None = None  # (S, B), once their loss was taken

    def in_layer(self, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """``compute(weight)`` in a call of the layer, whose hooks may gather its weight."""
        return self.layer(self.input, weight=self.weight, compute=compute)[0]

    def refusal(self, use: str) -> Exception:
        return RuntimeError(f"the model reads its logits ({use}), which use_xent leaves out: call remove_xent(model)")

    def __mul__(self, factor: Any) -> MegatronLogits:
        if not isinstance(factor, (int, float)):
            self.refuse("a product with a tensor")
        return MegatronLogits(self.layer, self.chunks, self.input, self.weight, self.scale * factor)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.argmax and isinstance(args[0], cls) and kwargs == {"dim": -1}:
            return args[0].best()
        return super().__torch_function__(func, types, args, kwargs)

    def best(self) -> Tensor:
        """(S, B): the class with the largest logit, of all ranks' classes, the first where several are largest.

        It takes a matrix multiplication. The statistics of the loss tell without one whether the label's logit is the
        largest, if labels are not smoothed. But they do not tell whether a class before the label is as large, where
        argmax returns that one: counted so, a small model in bfloat16 accepted 22.3 % of its tokens for 22.1 %.
        """
        target, (_, chunk_rows, _, logits_dtype, _, batch_invariant) = None, self.chunks
        if self.layer.sequence_parallel and self.labels is not None:
            target = self.labels.clamp(min=0)  # its shape says how the rows are split

        def compute(weight: Tensor) -> Tensor:
            return linear_top_k(
                self.input,
                weight,
                1,
                target,
                linear_bias=bias_of(self.layer),
                logit_scale=self.scale,
                chunk_rows=chunk_rows,
                logits_dtype=logits_dtype,
                batch_invariant=batch_invariant,
                shard=shard_of(self.layer),
            ).ids.squeeze(-1)

        return self.in_layer(compute)

    # With tensor parallelism Megatron asks for the best of this rank's columns, and compares the ranks'. The rank that
    # has the best of all answers with 1 for it, the others with 0.

    def size(self, dim: int | None = None) -> int:
        if dim != -1:
            self.refuse(f"size({dim})")
        return self.layer.output_size_per_partition

    def max(self, dim: int | None = None) -> tuple[Tensor, Tensor]:
        columns = self.size(dim)
        column = self.best() - self.layer.tp_group.rank() * columns
        here = (column >= 0) & (column < columns)
        return here.float(), column.where(here, 0)


def bias_of(layer: Any) -> Tensor | None:
    return None if layer.skip_bias_add else layer.bias


def shard_of(layer: Any) -> Shard:
    return Shard(layer.output_size, layer.tp_group, sequence_parallel=layer.sequence_parallel)
