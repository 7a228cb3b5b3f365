"""Public losses that are a user's function of each token's statistics: from logits, or from hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .kernels.options import HeadProducts, TokenReduction
from .kernels.reference import accumulator
from .linear_call import bind, refuse_call, rows_counted, statistics_of_head
from .ops import arguments, checks, transforms
from .ops.arguments import classes_last
from .ops.dtensors import is_dtensor, only_plain_tensors
from .ops.formulas import differentiable
from .ops.token_logits import target_and_ids
from .token_function import TokenFunction, loss_of_tokens
from .user_function import Function

if TYPE_CHECKING:
    from .distributed.bound import Shard


@arguments.named
def linear_token_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    fn: Function,
    *,
    rows: tuple[Tensor, ...] = (),
    linear_bias: Tensor | None = None,
    reduction: TokenReduction = "mean",
    divisor: Tensor | float | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    accumulate_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    skip_ignored: bool = False,
    logits_dtype: torch.dtype | None = None,
    products: HeadProducts | None = None,
    batch_invariant: bool = False,
    check: bool = False,
    shard: Shard | None = None,
) -> Tensor:
    """A loss that is a mean or a sum of one number per token, from hidden states, at the cost of cross entropy.

    ``fn(linear_token_log_probs(input, linear_weight, target), *rows).mean()`` over the counted tokens. ``fn(stats,
    *rows)`` is called on one chunk of tokens at a time, between the chunk's statistics and its gradient. For policy
    gradients (GRPO, DAPO, CISPO, PPO), token weights, focal and entropy-regularised losses. The forward computes the
    gradients, and the backward multiplies them by the upstream gradient, in place.

    Args:
        input, linear_weight, linear_bias: (..., H), (V, H) and (V,), as for ``linear_cross_entropy``.
        target: (...), class indices; or (..., K), K classes per token, any of which may be ignore_index. Then
            ``log_probs`` is (n, K), 0 at ignored places, and a token is ignored if all of its places are. Equal ids
            add up.
        fn: takes ``TokenLogProbs(log_probs, entropy, lse)`` of n tokens, each (n,), float32 (float64 for float64
            input), and n rows of each of ``rows``; returns (n,), floating point. A token's number must not depend on
            other tokens. Autograd derives it, and compiled steps trace it. A first call, on two tokens of zeros, shows
            which fields it reads and what it returns: an entropy that it does not read costs nothing, and reading it in
            a later call is a RuntimeError. A value without a gradient is refused if a gradient is wanted, and in eager
            a host read of a token's value (``.item()``, ``if``); compiled code does not refuse ``.item()``. In ignored
            tokens its value and its derivatives are not used.
        rows: tensors (target's shape, *), constants to autograd: old log-probabilities, advantages, weights.
        reduction: "mean" divides the sum over tokens by the number of counted tokens (NaN if there are none); or "sum".
        divisor: for "sum", as for ``linear_cross_entropy``.
        ignore_index, softcap, logit_scale: as for ``cross_entropy``.
        accumulate_dtype, chunk_rows, skip_ignored: as for ``linear_cross_entropy``. Code compiled for a CPU computes
            all rows.
        logits_dtype, products: as for ``linear_cross_entropy``. With ``products``, and in float16, the loss takes four
            matrix multiplications.
        batch_invariant: as for ``linear_cross_entropy``. fn gets the bits of ``linear_token_log_probs``.
        check: compare fn on all tokens with fn on parts of them, and raise if they differ. This costs a matrix
            multiplication and synchronises; not in compiled graphs.
        shard: as for ``linear_cross_entropy``; fn gets all tokens on every rank. With several classes a row not with
            ``skip_ignored``, ``products`` or ``check``.

    Returns:
        The loss, float32 (float64 for float64 input), (). It has no second derivatives, no torch.func, no forward-mode
        AD. Without gradients it takes one matrix multiplication, and five inside an eager checkpoint, which runs the
        forward twice: leave the loss outside, because it keeps no logits.

    DTensors are as for ``linear_cross_entropy``. ``rows`` are placed as the target, or plain.

    Errors are those of ``linear_cross_entropy``, and TypeError, ValueError or RuntimeError for a function that returns
    another type or shape, and for rows, or tensors that fn closes over, that require grad. For losses that mix tokens
    (DPO, GSPO) use ``linear_token_log_probs``, which takes four matrix multiplications.

    Examples:
        >>> hidden, weight = torch.randn(6, 16, requires_grad=True), torch.randn(1000, 16)
        >>> def reinforce(stats, advantage):
        ...     return -stats.log_probs * advantage - 0.01 * stats.entropy
        >>> target, advantage = torch.randint(1000, (6,)), torch.randn(6)
        >>> xent_ops.linear_token_loss(hidden, weight, target, reinforce, rows=(advantage,)).backward()
    """
    name = "xent_ops.linear_token_loss"
    raw_options = (ignore_index, 0.0, softcap, logit_scale, 0.0, reduction)
    raw_chunking = (accumulate_dtype, chunk_rows, skip_ignored, logits_dtype, products, batch_invariant)
    head_args = (input, linear_weight, target, linear_bias, None, raw_options, raw_chunking, divisor)
    if shard is not None:
        from .distributed import token_loss as over_ranks  # this import is slow

        return over_ranks.token_loss(shard, lambda: bind(*head_args, several=True), fn, rows, check)
    transforms.refuse(name)
    call = bind(*head_args, several=True)
    checks.reduction(reduction, ("mean", "sum"))
    arguments.boolean("check", check)
    if is_dtensor(input, linear_weight, target, linear_bias):
        from .distributed import token_loss as over_ranks  # for DTensors only: this import is slow

        if call.ids is not None:
            raise NotImplementedError(f"{name} of DTensors takes one class a row, not ids (..., K)")
        return over_ranks.of_dtensors(call, fn, rows, check)
    call = call.in_autocast_dtype().as_sum()
    ignore_index = call.loss.row_options.ignore_index
    refuse_call(call)
    learned, dtype = (call.input, call.head.weight, call.head.bias), accumulator(call.input)
    function = TokenFunction(fn, rows, call.target, ignore_index, dtype, call.ids, learned=learned)
    if check:
        with torch.no_grad():
            function.check(*statistics_of_head(call, function.reads_entropy), call.target)
    return loss_of_tokens(call, function)


@arguments.named
def token_loss(
    input: Tensor,
    target: Tensor,
    fn: Function,
    *,
    rows: tuple[Tensor, ...] = (),
    reduction: TokenReduction = "mean",
    divisor: Tensor | float | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    dim: int = -1,
    check: bool = False,
) -> Tensor:
    """``linear_token_loss`` from logits: one pass over them forward, one backward.

    Args:
        input: logits as for ``token_log_probs``.
        target: class indices, the input's shape without ``dim``; or K classes per token, K being the last dimension.
        fn, rows, reduction, divisor, check: as for ``linear_token_loss``; autograd derives fn in one call for all
            tokens.
        ignore_index, softcap, logit_scale, dim: as for ``token_log_probs``.

    Returns:
        The loss, float32 (float64 for float64 input), (). Errors are those of ``token_log_probs`` and
        ``linear_token_loss``.

    Examples:
        >>> logits, target = torch.randn(4, 10, requires_grad=True), torch.tensor([1, 3, 3, 7])
        >>> focal = lambda stats: -((1 - stats.log_probs.exp()) ** 2) * stats.log_probs
        >>> xent_ops.token_loss(logits, target, focal).backward()
    """
    only_plain_tensors("xent_ops.token_loss", input, target, divisor)
    arguments.tensors(input, target)
    loss = arguments.loss_options(ignore_index, 0.0, softcap, logit_scale, dtype=input.dtype)
    checks.reduction(reduction, ("mean", "sum"))
    divisor = arguments.divisor(divisor, input, reduction)
    arguments.boolean("check", check)
    logits, options = classes_last(input, dim), loss.row_options
    target, ids = target_and_ids(target, input.dim() - 1, options.ignore_index)
    function = TokenFunction(fn, rows, target, options.ignore_index, accumulator(input), ids, learned=(input,))
    if ids is not None:
        ids_args = (logits, ids, function.reads_entropy)
        loss_or_at_ids, lse, entropy, low = differentiable("token_logits", *ids_args, **options.keywords())
    else:
        row_args = (logits, target, None, False, function.reads_entropy)
        loss_or_at_ids, lse, _, entropy, low = differentiable("cross_entropy_forward", *row_args, **options.keywords())
    if check:
        function.check(loss_or_at_ids, lse, entropy, low, target)
    if reduction == "mean":
        divisor = rows_counted(target, None, options.ignore_index, function.dtype)
    values = function.all_values(loss_or_at_ids, lse, entropy, low, target)
    return function.counted_sum(values, target, divisor)
