"""Public functions for the head and the loss together. They hold at most one chunk of the logits at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .kernels.options import HeadProducts, Reduction
from .linear_call import LinearCall, bind, cross_entropy_of_head, statistics_of_head
from .ops import arguments, checks, transforms
from .ops.dtensors import is_dtensor, only_plain_tensors
from .ops.formulas import differentiable
from .ops.linear import composite
from .outputs import CrossEntropyOutputs, TokenLogProbs, log_probs_of_rows, outputs_of_rows

if TYPE_CHECKING:
    from .distributed.bound import Shard


@arguments.named
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    divisor: Tensor | float | None = None,
    token_weight: Tensor | None = None,
    accumulate_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    skip_ignored: bool = False,
    logits_dtype: torch.dtype | None = None,
    products: HeadProducts | None = None,
    batch_invariant: bool = False,
    shard: Shard | None = None,
) -> Tensor:
    """``cross_entropy(F.linear(input, linear_weight, linear_bias), target)`` without all logits in memory.

    The logits are computed one chunk of rows at a time. If gradients of a mean or a sum are wanted, the forward makes
    three matrix multiplications of the head's size, and the backward multiplies the gradients by the upstream gradient,
    in place. reduction="none" takes four, because the backward computes the logits again; so does a call in an eager
    checkpoint, which runs one of the four twice. A second backward (retain_graph) takes three more.

    Args:
        input: (..., H), the input of the head; float32, bfloat16, float16 or float64.
        linear_weight: (V, H), the weight of the head as in nn.Linear, in the input's dtype. Under torch.autocast both
            are cast, as for nn.Linear.
        target: (...), class indices, int64, int32 or uint8. Class probabilities need all logits:
            ``xent_ops.cross_entropy(F.linear(input, linear_weight, linear_bias), target, dim=-1)``.
        linear_bias: (V,), of the input's dtype.
        weight, ignore_index, reduction, label_smoothing, lse_square_scale, softcap, logit_scale: as for
            ``cross_entropy``.
        divisor: for reduction="sum", a tensor () or float that divides the sum. With the number of counted
            targets of all micro-batches, gradients add up to those of one mean over all of them. The float 0 is
            refused. A tensor is not read, which would wait for the device: 0 in it gives inf, or NaN.
        token_weight: as for ``cross_entropy``. It needs no additional matrix multiplication and no additional pass over
            the logits.
        accumulate_dtype: the dtype that adds up the chunks' parts of linear_weight's gradient. None: the input's dtype,
            and float32 for float16. torch.float32 is more exact for bfloat16, and needs V x H float32 for a while.
        chunk_rows: the rows of a chunk. Fewer rows need less memory, chunk_rows x V logits, and more time. None: 2048
            rows of 16-bit input on a GPU, 1024 of float32, 512 rows on a CPU. Fewer if their logits take more than
            1 GiB (2 if accumulate_dtype has more bytes than the input's); on a GPU more, up to 256 MiB, and twice as
            many in a forward alone if a training step takes no less memory. A batch of one chunk has all logits in
            memory.
        skip_ignored: compute only the counted rows, packed to the front. Time is that of the counted rows. Nothing
            synchronises, and each replay of a CUDA graph may have another number of them. Needs a CPU, or bfloat16 or
            float16 on a GPU of compute capability 9 (H100, H200), a contiguous linear_weight and H a multiple of 8;
            elsewhere all rows are computed. If no row is ignored, it takes up to 3 % longer.
        logits_dtype: torch.float32 keeps the logits of 16-bit inputs in float32, the dtype in which the matrix
            multiplications add up. Nothing is rounded to 16 bits before the softmax. Log-probabilities are 100 times
            nearer, for 3 % of the time and a chunk of logits twice as large. Gradients are still rounded to 16 bits.
            None: the input's dtype.
        products: "fp8" multiplies 8-bit numbers (e4m3) in all three multiplications. "fp8_gradients" does so for the
            gradients only; loss and statistics come from 16-bit multiplications. For bfloat16 and float16 and H a
            multiple of 16, on GPUs of compute capability 8.9 or more; on a CPU in plain torch with the same rounding.
            Gradients have an error of 3 % in their norm, without a bias: docs/precision.md says when to use it. None:
            16-bit multiplications.
        batch_invariant: the bits of a row's loss (reduction="none"), log-probability, entropy, lse, argmax and input
            gradient (for a mean: except its divisor) depend only on the head and on the row's own hidden state, target
            and options. docs/reproducible.md has the conditions and the cost. ``skip_ignored`` has no effect. Not with
            ``products``.
        shard: a head whose classes are split between ranks, ``xent_ops.distributed.Shard``. 3 numbers a row (4 with
            class weights) are all-gathered, and the input's gradient is all-reduced.

    Returns:
        The loss, float32 (float64 for float64 input): (), or with "none" the target's shape. Gradients have their
        inputs' dtype and the same bits in every run.

    Second derivatives compute all logits at once: ``chunk_rows``, ``accumulate_dtype`` and ``skip_ignored`` have no
    effect there. Transforms of torch.func and forward-mode AD are refused, for ``cross_entropy(F.linear(...), ...)``.

    Other errors are those of ``cross_entropy``.

    Sources: torch.nn.functional.linear_cross_entropy for the names, Liger-Kernel for gradients in the forward.

    Examples:
        >>> head = torch.nn.Linear(16, 1000, bias=False)
        >>> hidden, target = torch.randn(2, 5, 16, requires_grad=True), torch.randint(1000, (2, 5))
        >>> loss = xent_ops.linear_cross_entropy(hidden, head.weight, target)
        >>> loss.backward()
    """
    raw_options = (ignore_index, label_smoothing, softcap, logit_scale, lse_square_scale, reduction)
    raw_chunking = (accumulate_dtype, chunk_rows, skip_ignored, logits_dtype, products, batch_invariant)
    head_args = (input, linear_weight, target, linear_bias, weight, raw_options, raw_chunking, divisor, token_weight)

    def bind_call() -> LinearCall:
        return bind(*head_args)

    if shard is not None:
        from .distributed import linear as over_ranks  # this import is slow

        return over_ranks.cross_entropy(shard, bind_call)
    transforms.refuse("xent_ops.linear_cross_entropy")
    return cross_entropy_of_head(_placed(bind_call()))


@arguments.named
def linear_cross_entropy_outputs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    divisor: Tensor | float | None = None,
    token_weight: Tensor | None = None,
    accumulate_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    skip_ignored: bool = False,
    logits_dtype: torch.dtype | None = None,
    products: HeadProducts | None = None,
    batch_invariant: bool = False,
) -> CrossEntropyOutputs:
    """``linear_cross_entropy`` with values for logging, at the same cost: see ``CrossEntropyOutputs``.

    Arguments and errors are those of ``linear_cross_entropy``; the target must be class indices. A mean or a sum needs
    three matrix multiplications if only its loss is differentiated, and six if the lse is too. reduction="none" needs
    four. If the lse leaves a compiled step only for logging, detach it.

    Examples:
        >>> hidden, weight, target = torch.eye(3), 2 * torch.eye(3), torch.tensor([0, 1, 1])
        >>> outputs = xent_ops.linear_cross_entropy_outputs(hidden, weight, target)
        >>> outputs.predictions.tolist(), round(outputs.accuracy.item(), 2)
        ([0, 1, 2], 0.67)
    """
    tensors = (input, linear_weight, target, linear_bias, weight, divisor, token_weight)
    only_plain_tensors("xent_ops.linear_cross_entropy_outputs", *tensors)
    raw_options = (ignore_index, label_smoothing, softcap, logit_scale, lse_square_scale, reduction)
    raw_chunking = (accumulate_dtype, chunk_rows, skip_ignored, logits_dtype, products, batch_invariant)
    call = bind(input, linear_weight, target, linear_bias, weight, raw_options, raw_chunking, divisor, token_weight)
    checks.token_weight(token_weight, target)
    call = call.in_autocast_dtype()
    head, loss, chunk_options = call.head, call.loss, call.head.chunking.keywords()
    target, weight, token_weight = call.target, head.class_weight, call.token_weight
    head_args = (call.input, head.weight, target, head.bias, weight)
    if loss.reduction != "none" and composite.gradients_in_forward(call.input, head.weight, head.bias):
        loss_args = (call.divisor, token_weight, head.accumulate_dtype, True, True)
        value, _, z_loss, accuracy, row_loss, lse, argmax, entropy, *_ = composite.head_with_grad(
            head_args, *loss_args, **chunk_options, **loss.keywords()
        )
        return CrossEntropyOutputs(value, z_loss, lse, argmax, accuracy, row_loss, entropy)
    keywords = {"accumulate_dtype": head.accumulate_dtype, **chunk_options, **loss.row_options.keywords()}
    rows = differentiable("linear_cross_entropy_forward", *head_args, True, True, **keywords)
    return outputs_of_rows(rows[:4], target, weight, call.divisor, loss, token_weight)


@arguments.named
def linear_token_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    accumulate_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    skip_ignored: bool = False,
    logits_dtype: torch.dtype | None = None,
    products: HeadProducts | None = None,
    batch_invariant: bool = False,
    shard: Shard | None = None,
) -> TokenLogProbs:
    """``token_log_probs`` of ``F.linear(input, linear_weight, linear_bias)`` without all logits in memory.

    Log-probability of the target, entropy and lse of every token from hidden states, differentiable, for GRPO, PPO and
    DPO. The backward computes the logits again, for any upstream gradients: four matrix multiplications in all.

    Args:
        input, linear_weight, linear_bias: (..., H), (V, H) and (V,), as for ``linear_cross_entropy``.
        target: (...), class indices; or (..., K), K classes per row, as for ``token_log_probs``.
        ignore_index, softcap, logit_scale: as for ``token_log_probs``.
        accumulate_dtype, chunk_rows, skip_ignored: as for ``linear_cross_entropy``. An ignored row that is skipped has
            an entropy of 0 and an infinite lse.
        logits_dtype, products, batch_invariant: as for ``linear_cross_entropy``.
        shard: as for ``linear_cross_entropy``, with 4 numbers a row, and with K classes a row K more.

    Returns:
        ``TokenLogProbs(log_probs, entropy, lse)``, each float32 (float64 for float64 input) with one number per row;
        log_probs has the target's shape.

    Examples:
        >>> hidden, weight = torch.randn(4, 16, requires_grad=True), torch.randn(1000, 16)
        >>> log_probs, entropy, _ = xent_ops.linear_token_log_probs(hidden, weight, torch.randint(1000, (4,)))
        >>> (-log_probs - 0.01 * entropy).mean().backward()
    """
    raw_options = (ignore_index, 0.0, softcap, logit_scale, 0.0, "none")
    raw_chunking = (accumulate_dtype, chunk_rows, skip_ignored, logits_dtype, products, batch_invariant)
    head_args = (input, linear_weight, target, linear_bias, None, raw_options, raw_chunking)
    if shard is not None:
        from .distributed import linear as over_ranks  # this import is slow

        return over_ranks.token_log_probs(shard, lambda: bind(*head_args, several=True))
    transforms.refuse("xent_ops.linear_token_log_probs")
    call = _placed(bind(*head_args, several=True)).in_autocast_dtype()
    return log_probs_of_rows(*statistics_of_head(call, with_entropy=True), call.ids, call.loss.row_options.ignore_index)


def _placed(call: LinearCall) -> LinearCall:
    head, others = call.head, (call.target, call.token_weight, call.divisor)
    if not is_dtensor(call.input, head.weight, head.bias, head.class_weight, *others):
        return call
    from .distributed.on_dtensors import layout  # for DTensors only: this import is slow

    return layout.placed(call)
