"""The k most probable classes of each row and the rank of its target, from logits or from hidden states by chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .head.top_k import choose, of_ids
from .linear_call import LinearCall, bind
from .ops import arguments, checks
from .ops.arguments import classes_last
from .ops.distillation_arguments import target_of
from .ops.dtensors import only_plain_tensors
from .ops.formulas import differentiable
from .outputs import TopK, top_k_of_rows

if TYPE_CHECKING:
    from .distributed.bound import Shard


@arguments.named
def top_k(
    input: Tensor,
    k: int,
    target: Tensor | None = None,
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    batch_invariant: bool = False,
) -> TopK:
    """``linear_top_k`` of given logits (..., V), the classes last.

    Args:
        input: logits, as for ``token_log_probs``.
        k, target: as for ``linear_top_k``.
        others: as for ``token_log_probs``.

    Examples:
        >>> top = xent_ops.top_k(torch.tensor([[0.0, 2.0, 1.0]]), 2, torch.tensor([0]))
        >>> top.ids.tolist(), top.target_ranks.tolist()
        ([[1, 2]], [2])
    """
    only_plain_tensors("xent_ops.top_k", input, target)
    rows, ignore_index = target_of(target, ignore_index, 0.0, input)
    arguments.tensors(input, rows)
    options = arguments.loss_options(ignore_index, 0.0, softcap, logit_scale, dtype=input.dtype).row_options
    k = arguments.integer("k", k)
    arguments.boolean("batch_invariant", batch_invariant)
    logits = classes_last(input, -1)
    checks.top_k(k, logits.shape[-1])
    ids, rank = choose(logits.detach(), k, target, options)
    flags = {"with_entropy": True, "batch_invariant": batch_invariant}
    at_ids, lse, entropy, low = differentiable("token_logits", logits, ids, **flags, **of_ids(options).keywords())
    return top_k_of_rows((at_ids, ids, lse, entropy, rank, low), target, k, options.ignore_index)


@arguments.named
def linear_top_k(
    input: Tensor,
    linear_weight: Tensor,
    k: int,
    target: Tensor | None = None,
    *,
    linear_bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    accumulate_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    skip_ignored: bool = False,
    logits_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    shard: Shard | None = None,
) -> TopK:
    """The k most probable classes of every token from hidden states, and the rank of its target.

    It takes one matrix multiplication. Classes have a total order, that of ``logits.sort(descending=True,
    stable=True)``: larger logits first (smaller ones with a logit_scale below 0), equal ones by the smaller class, NaN
    before all numbers. So a row has the same ids alone, compiled, in any batch and over any split of the classes, if
    its logits have the same bits (``batch_invariant``). In bfloat16 many rows have equal logits at the k-th place;
    ``logits_dtype=torch.float32`` tells most apart. In counted rows log-probabilities, lse and entropy are those of
    ``linear_token_log_probs``. They are differentiable: the backward takes three more matrix multiplications.

    Args:
        input, linear_weight, linear_bias: (..., H), (V, H) and (V,), as for ``linear_cross_entropy``.
        k: the number of classes, from 1 to V. 1 gives the argmax.
        target: (...), class indices. Each gets its log-probability, and its rank among all classes.
        ignore_index, softcap, logit_scale: as for ``token_log_probs``. The softcap does not change the order.
        accumulate_dtype, chunk_rows, skip_ignored, logits_dtype, batch_invariant: as for ``linear_cross_entropy``.
        shard: as for ``linear_cross_entropy``. There is no gradient: for derivatives pass the ids to
            ``linear_token_log_probs``. 12 k + 28 bytes a row are all-gathered or summed. ``sequence_parallel`` needs a
            target, which has all rows. Not with ``skip_ignored`` or ``accumulate_dtype``.

    Returns:
        ``TopK``. Its ids and the exponentials of its log-probabilities are what ``linear_top_k_distillation_loss``
        takes. Errors are those of ``linear_token_log_probs``, and ValueError for a k below 1 or above V.

    Examples:
        >>> hidden, weight = torch.randn(4, 16), torch.randn(1000, 16)
        >>> top = xent_ops.linear_top_k(hidden, weight, 8)
        >>> student, probs = torch.randn(4, 16, requires_grad=True), top.log_probs.exp()
        >>> xent_ops.linear_top_k_distillation_loss(student, weight, top.ids, probs, tail=True).backward()
    """

    def bind_call() -> tuple[LinearCall, int]:
        rows, ignored = target_of(target, ignore_index, 0.0, input)
        raw_options = (ignored, 0.0, softcap, logit_scale, 0.0, "none")
        raw_chunking = (accumulate_dtype, chunk_rows, skip_ignored, logits_dtype, None, batch_invariant)
        return bind(input, linear_weight, rows, linear_bias, None, raw_options, raw_chunking), arguments.integer("k", k)

    if shard is not None:
        from .distributed import top_k as over_ranks  # this import is slow

        return over_ranks.top_k(shard, bind_call, target)
    only_plain_tensors("xent_ops.linear_top_k", input, linear_weight, target, linear_bias)
    call, k = bind_call()
    call = call.in_autocast_dtype()
    head, options = call.head, call.loss.row_options
    keywords = {"accumulate_dtype": head.accumulate_dtype, **head.chunking.keywords(), **options.keywords()}
    values = differentiable("linear_top_k", call.input, head.weight, k, target, head.bias, **keywords)
    return top_k_of_rows(values, target, k, options.ignore_index)
