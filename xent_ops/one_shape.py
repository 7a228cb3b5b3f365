"""``batch_invariant=True`` for a head: all products of a call have one shape, for any number of rows.

cuBLAS and oneDNN choose a kernel, and with it the order in which numbers are added up, by the shape of a product. So
all chunks have the same number of rows (head/sizes.py: rows_of_one_shape). The last one is filled up with zeros whose
targets are ignored. Operators get this longer call, and the public functions cut off the values of the added rows.
The library must still give a row the same bits at every place in a chunk. The doctor checks that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from .head.loop import wanted_gradients
from .head.sizes import rows_of_one_shape
from .linear_call import LinearCall
from .ops import checks, transforms
from .ops.library import refuse
from .token_function import TokenFunction

Result = TypeVar("Result")  # a tensor, or a NamedTuple of tensors
Order = Callable[[Tensor], Tensor]


def _unchanged(values: Tensor) -> Tensor:
    return values


class PaddedCall:
    """``call``: the same call with chunks of one shape, with rows (number,).

    ``parts``: the number of ranks that the rows are split over. Each rank's part is padded. ``order`` brings tensors of
    the target's shape into the order of these parts, (parts, ...), and ``back`` reverses it.
    """

    def __init__(
        self, call: LinearCall, ranks: int = 1, parts: int = 1, order: Order = _unchanged, back: Order = _unchanged
    ) -> None:
        head, chunking, features = call.head, call.head.chunking, call.input.shape[-1]
        if call.input.dtype == torch.float64 and features % 2 == 1:
            raise NotImplementedError(
                f"batch_invariant=True takes no float64 with an odd number of features, here {features}: the bits that "
                "MKL's products give a row depend on its place"
            )
        weighted = call.token_weight is not None or head.class_weight is not None
        scaled = weighted and call.loss.reduction != "none" and call.input.dtype == torch.float16
        if scaled and any(wanted_gradients(call.input, head)):
            raise NotImplementedError(
                "batch_invariant=True takes no float16 gradients of a mean or a sum with weights of tokens or classes, "
                'because they are scaled by the largest weight of all rows: use reduction="none", bfloat16 or float32, '
                "or call it in torch.no_grad()"
            )
        checks.chunk_rows(chunking.chunk_rows)
        size, num_classes = chunking.chunk_rows, head.shard_range[1]
        if size is None:
            classes = head.weight.shape[0] if num_classes is None else -(-num_classes // ranks)
            size = rows_of_one_shape(call.input, classes, chunking.logits_dtype)
        self.parts, self.order, self.back, self.shape = parts, order, back, order(call.target).shape
        if parts == 1:
            checks.same_shape("target", self.shape, call.input.shape[:-1], "a class index for each row of the input")
        checks.token_weight(call.token_weight, call.target)
        size = max(size // parts, 1)  # of a part
        self.rows = math.prod(call.input.shape[:-1])  # of a part
        self.padded_rows = self.rows + -self.rows % size
        self.number, ignore_index = parts * self.padded_rows, call.loss.row_options.ignore_index
        chunking = chunking._replace(chunk_rows=parts * size, skip_ignored=False, batch_invariant=False)
        self.call = call._replace(
            target=self.pad(call.target.to(torch.int64), ignore_index),  # uint8 holds no -100
            input=self._filled_up(call.input.reshape(1, self.rows, features), 0)[0],
            head=head._replace(chunking=chunking),
            token_weight=None if call.token_weight is None else self.pad(call.token_weight),
            ids=None if call.ids is None else self.pad(call.ids.to(torch.int64), ignore_index),
            target_probs=None if call.target_probs is None else self.pad(call.target_probs),
            sequence_dim=None if call.sequence_dim is None else 0,
        )

    def pad(self, values: Tensor, fill: float = 0) -> Tensor:
        """Tensors (target's shape, *) to (number, *)."""
        values = self.order(values)
        tail = values.shape[len(self.shape) :]
        return self._filled_up(values.reshape(self.parts, self.rows, *tail), fill).flatten(0, 1)

    def cut(self, values: Tensor) -> Tensor:
        """The inverse of ``pad``, in new memory: AOTAutograd cannot take apart two views of the padded tensor."""
        tail = values.shape[1:]
        own = values.view(self.parts, self.padded_rows, *tail)[:, : self.rows].clone()
        return self.back(own.reshape((*self.shape, *tail)))

    def compute(self, function: Callable[[LinearCall], Result]) -> Result:
        """``function(call)`` without the values of the added rows."""
        result: Any = function(self.call)
        cut: Any = self._cut(result) if isinstance(result, Tensor) else type(result)(*map(self._cut, result))
        return cut

    def _cut(self, value: Tensor) -> Tensor:
        """A value that is a sum over the rows is not cut."""
        return value if value.dim() == 0 else self.cut(value)

    def pad_rows_of(self, function: TokenFunction) -> None:
        function.arrange(self.pad, self.number)
        if self.call.ids is not None:
            function.rows[-1] = self.call.ids  # ignored in the added rows

    def _filled_up(self, values: Tensor, fill: float) -> Tensor:
        """(parts, rows, *) to (parts, padded_rows, *). The result starts at a multiple of 16 bytes."""
        if not transforms.is_traced() and self.rows == self.padded_rows:
            values = values.contiguous()
            return values.clone() if values.data_ptr() % 16 else values
        parts, _, *tail = values.shape
        return torch.cat([values, values.new_full((parts, self.padded_rows - self.rows, *tail), fill)], 1)


def computed(call: LinearCall, compute: Callable[[LinearCall], Result]) -> Result:
    """``compute`` for plain tensors, with chunks of one shape if the call asks for them."""
    if not call.head.chunking.batch_invariant:
        return compute(call)
    call = call.in_autocast_dtype()
    if not transforms.is_traced():  # the errors must describe the caller's tensors, not the padded ones
        head, options = call.head, {**call.head.chunking.keywords(), **call.loss.row_options._asdict()}
        if call.ids is None:
            head_args = (call.input, head.weight, call.target, head.bias, head.class_weight)
            refuse("linear_cross_entropy_forward", *head_args, **options)
        else:
            refuse("linear_token_logits", call.input, head.weight, call.ids, head.bias, **options)
    return PaddedCall(call).compute(compute)
