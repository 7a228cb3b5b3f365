"""The divergences of each token between two models, differentiable, for losses that mix tokens."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .divergence_function import TokenFields, bind_heads, bind_logits, factor_of_classes, logits_statistics
from .kernels.reference import accumulator
from .ops import arguments, transforms
from .outputs import TokenDivergences

if TYPE_CHECKING:
    from .distributed.bound import Shard


@arguments.named
def linear_token_divergences(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    *,
    target: Tensor | None = None,
    classes: Tensor | None = None,
    fields: Sequence[str] | None = None,
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    ignore_index: int = -100,
    num_classes: int | None = None,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    logits_dtype: torch.dtype | None = None,
    accumulate_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    skip_ignored: bool = False,
    shard: Shard | None = None,
) -> TokenDivergences:
    """Each token's divergences between a student's head and its teacher's, without all logits, differentiable.

    For losses that mix tokens: the expected length that is accepted is a sum of products of acceptance rates along a
    draft. Where a token's number depends on this token alone, ``linear_distillation_token_loss`` takes four matrix
    multiplications. This takes two in the forward and four in the backward.

    Args:
        fields: names of ``TokenDivergences``: those that are wanted. The others are None. kl, reverse_kl and log_prob
            come with the first visit of the logits. jsd and overlap take a second one together, agrees and covers_top
            another one of each head. None: all; log_prob only with a target.
        input, linear_weight, linear_bias, teacher_input, teacher_weight, teacher_bias, target, classes: as for
            ``linear_distillation_token_loss``.
        beta, temperature, ignore_index, num_classes, softcap, logit_scale, teacher_softcap, teacher_logit_scale:
            likewise.
        logits_dtype, accumulate_dtype, chunk_rows, skip_ignored: likewise.
        shard: as for ``linear_distillation_token_loss``. All ranks get the same numbers, and must send the same
            gradients back: the backward gathers the statistics again. Not with ``skip_ignored``.

    Returns:
        ``TokenDivergences``, each field of the rows' shape, float32 (float64 for float64 input); 0 in ignored rows. The
        first five are differentiable, once. Restrictions and errors are as for ``linear_distillation_token_loss``.

    Source: Leviathan et al., 2023, arXiv 2211.17192, for the length that is accepted.

    Examples:
        >>> hidden, head = torch.randn(2, 5, 16, requires_grad=True), torch.randn(100, 16)
        >>> teacher_hidden, teacher_head = torch.randn(2, 5, 32), torch.randn(100, 32)
        >>> function = xent_ops.linear_token_divergences
        >>> overlap = function(hidden, head, teacher_hidden, teacher_head, fields=("overlap",)).overlap
        >>> accepted = overlap.cumprod(1).sum(1)  # of a draft of 5 tokens
        >>> (-accepted.mean()).backward()
    """
    student, teacher = (input, linear_weight, linear_bias), (teacher_input, teacher_weight, teacher_bias)
    options = (ignore_index, softcap, logit_scale, num_classes, beta, temperature, teacher_softcap, teacher_logit_scale)
    chunking = (accumulate_dtype, chunk_rows, skip_ignored, logits_dtype)
    name, read = "xent_ops.linear_token_divergences", _wanted(fields, target is not None)
    bind_all = functools.partial(bind_heads, name, student, teacher, target, classes, options, chunking)
    if shard is not None:
        from .distributed import distillation as over_ranks  # this import is slow

        return over_ranks.token_divergences(shard, bind_all, read)
    transforms.refuse(name)
    call, given, spec = bind_all()
    call = call.in_autocast_dtype()
    rows = TokenFields(read, call.target, accumulator(call.input), spec, given)
    factor = factor_of_classes(given.classes, teacher_weight.shape[0])
    return rows.divergences(rows.statistics(call), call.target, factor)


@arguments.named
def token_divergences(
    input: Tensor,
    teacher_input: Tensor,
    *,
    target: Tensor | None = None,
    classes: Tensor | None = None,
    fields: Sequence[str] | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    ignore_index: int = -100,
    num_classes: int | None = None,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
) -> TokenDivergences:
    """``linear_token_divergences`` of the logits of a student and of its teacher.

    Args:
        fields: as for ``linear_token_divergences``.
        input, teacher_input, target, classes, beta, temperature, ignore_index, num_classes: as for
            ``distillation_token_loss``.
        softcap, logit_scale, teacher_softcap, teacher_logit_scale: likewise.

    Returns:
        ``TokenDivergences``, and errors, as for ``linear_token_divergences``.

    Examples:
        >>> logits, teacher_logits = torch.randn(2, 5, 10, requires_grad=True), torch.randn(2, 5, 10)
        >>> accepted = xent_ops.token_divergences(logits, teacher_logits).overlap.cumprod(1).sum(1)
        >>> (-accepted.mean()).backward()
    """
    options = (ignore_index, softcap, logit_scale, num_classes, beta, temperature, teacher_softcap, teacher_logit_scale)
    read = _wanted(fields, target is not None)
    logits = bind_logits("xent_ops.token_divergences", input, teacher_input, target, classes, options)
    rows = TokenFields(read, logits.target, accumulator(input), logits.spec)
    factor = factor_of_classes(logits.classes, teacher_input.shape[-1])
    return rows.divergences(logits_statistics(rows, logits), logits.target, factor)


def _wanted(fields: Sequence[str] | None, has_target: bool) -> tuple[str, ...]:
    names = TokenDivergences._fields
    if fields is None:
        return tuple([name for name in names if name != "log_prob" or has_target])
    if not isinstance(fields, (tuple, list)) or not fields or not all(name in names for name in fields):
        raise ValueError(f"fields must be a tuple or a list of some of {', '.join(names)}, or None; got {fields!r}")
    if "log_prob" in fields and not has_target:
        raise ValueError("fields has log_prob, the log-probability of the target: pass target=")
    return tuple(fields)
