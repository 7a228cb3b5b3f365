"""Public losses that are a user's function of each token's divergences: from logits, or from hidden states."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .divergence_function import (
    DivergenceFunction,
    bind_heads,
    bind_logits,
    factor_of_classes,
    logits_statistics,
)
from .kernels.options import TokenReduction
from .kernels.reference import accumulator, is_counted
from .ops import arguments, checks, distillation_checks, transforms
from .ops.library import check_call_of
from .token_function import loss_of_tokens
from .user_function import Function

if TYPE_CHECKING:
    from .distributed.bound import Shard


@arguments.named
def linear_distillation_token_loss(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    fn: Function,
    *,
    rows: tuple[Tensor, ...] = (),
    target: Tensor | None = None,
    classes: Tensor | None = None,
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: TokenReduction = "mean",
    divisor: Tensor | float | None = None,
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
    check: bool = False,
    shard: Shard | None = None,
) -> Tensor:
    """A loss that is your function of each token's divergences between a student's head and its teacher's.

    ``fn(divergences, *rows)`` is called on one chunk of tokens at a time, between the chunk's statistics and its
    gradient. For losses of speculative decoding: total variation, minus the log of the acceptance rate, blends of KL
    and overlap. Two chunks of logits exist at a time. The forward computes the gradients, in three matrix
    multiplications of the student's head and one of the teacher's, and the backward multiplies them by the upstream
    gradient, in place.

    Args:
        input, linear_weight, linear_bias: (..., H), (V, H) and (V,), the student's, as for ``linear_cross_entropy``.
        teacher_input, teacher_weight, teacher_bias: as for ``linear_distillation_loss``. They are constants.
        fn: takes ``TokenDivergences(kl, reverse_kl, jsd, overlap, log_prob, coverage, agrees, covers_top)`` of n tokens
            and n rows of each of ``rows``; returns (n,), floating point. What it does not read costs nothing. The rest
            is as for ``linear_token_loss``.
        rows: tensors (the rows' shape, *), constants to autograd: weights, masks.
        target: (...), class indices of the student. They mark ignored rows, and log_prob is theirs: if fn does not read
            it, they may be any numbers in the other rows. None: all rows count.
        classes: (V,), different class indices of the teacher: those that the student has, in its order (a draft
            vocabulary). Then the teacher has any number of classes. kl, reverse_kl and jsd take the teacher
            renormalised to these classes, and overlap takes its probability among all. To renormalise it everywhere,
            pass ``teacher_weight[classes]`` as the teacher's head instead. Equal classes are refused on a CPU; on a GPU
            and in compiled code the loss is NaN.
        beta: of jsd, above 0 and below 1.
        temperature: above 0.
        reduction, divisor, ignore_index: as for ``linear_token_loss``.
        num_classes, softcap, logit_scale, teacher_softcap, teacher_logit_scale: as for ``linear_distillation_loss``;
            num_classes and ``classes`` exclude each other.
        logits_dtype: as for ``linear_distillation_loss``. The gradient of overlap is discontinuous where s = t, so
            rounded logits change it more than that of a KL.
        accumulate_dtype, chunk_rows: as for ``linear_cross_entropy``.
        skip_ignored: as for ``linear_cross_entropy``, for both heads. Code compiled for a CPU computes all rows.
        check: as for ``linear_token_loss``.
        shard: as for ``linear_distillation_loss``; fn gets all tokens on every rank. ``classes`` are then those of this
            rank: the row of its ``teacher_weight`` of each of its student's classes. So the student's head is split
            where the teacher's is, and the teacher's has no padding. A row all-gathers four numbers, one for each of
            kl, reverse_kl and log_prob that fn reads, four for the argmaxes, and then two for each of jsd and overlap;
            ``classes`` adds two, and one for the argmaxes. Not with ``check`` or ``skip_ignored``.

    Returns:
        The loss, float32 (float64 for float64 input), (). It has no second derivatives, no torch.func, no forward-mode
        AD, no DTensors, no batch_invariant. In float16 it takes six products, in an eager checkpoint eight.

    Errors are those of ``linear_distillation_loss`` and ``linear_token_loss``, TypeError for a mask as ``classes`` and
    IndexError for classes that the teacher does not have.

    Sources: Leviathan et al., 2023, arXiv 2211.17192, for the acceptance rate; Zhou et al., 2024, DistillSpec, arXiv
    2310.08461, for losses of draft models.

    Examples:
        >>> hidden, head = torch.randn(6, 16, requires_grad=True), torch.randn(100, 16)
        >>> teacher_hidden, teacher_head, t2d = torch.randn(6, 32), torch.randn(1000, 32), torch.arange(0, 1000, 10)
        >>> acceptance = lambda d: -d.overlap.clamp(min=1e-6).log() + 0.1 * d.kl
        >>> function = xent_ops.linear_distillation_token_loss
        >>> function(hidden, head, teacher_hidden, teacher_head, acceptance, classes=t2d).backward()
    """
    student, teacher = (input, linear_weight, linear_bias), (teacher_input, teacher_weight, teacher_bias)
    options = (ignore_index, softcap, logit_scale, num_classes, beta, temperature, teacher_softcap, teacher_logit_scale)
    chunking = (accumulate_dtype, chunk_rows, skip_ignored, logits_dtype)
    head_args = ("xent_ops.linear_distillation_token_loss", student, teacher, target, classes, options, chunking)
    bind_all = functools.partial(bind_heads, *head_args, reduction=reduction, divisor=divisor, row_tensors=rows)
    has_target = target is not None
    if shard is not None:
        from .distributed import distillation as over_ranks  # this import is slow

        return over_ranks.token_loss(shard, bind_all, fn, rows, has_target, check)
    heads = bind_all()
    checks.reduction(reduction, ("mean", "sum"))
    arguments.boolean("check", check)
    heads = heads._replace(student=heads.student.in_autocast_dtype())
    (call, given, spec), (tensors, keywords) = heads, heads.operator_arguments()
    check_call_of("linear_divergences_forward", *tensors, given.classes, **keywords, **spec.keywords())
    call, head, dtype = call.as_sum(), call.head, accumulator(call.input)
    divisor = _divisor(call.divisor, given.classes, given.teacher_weight.shape[0], dtype)
    call = call._replace(divisor=divisor, head=head._replace(shard_range=(0, spec.num_classes)))
    learned = (call.input, head.weight, head.bias)
    function = DivergenceFunction(fn, rows, call.target, has_target, dtype, learned, spec, given)
    if given.classes is not None and transforms.can_read(given.classes):  # the row operators of a chunk read none
        distillation_checks.class_values(given.classes, given.teacher_weight.shape[0])
        if function.spec.reads("log_prob"):
            checks.index_values(call.target, None, given.classes, head.weight.shape[0], function.ignore_index)
    if check:
        with torch.no_grad():
            function.check(*function.statistics(call), call.target)
    return loss_of_tokens(call, function)


@arguments.named
def distillation_token_loss(
    input: Tensor,
    teacher_input: Tensor,
    fn: Function,
    *,
    rows: tuple[Tensor, ...] = (),
    target: Tensor | None = None,
    classes: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: TokenReduction = "mean",
    divisor: Tensor | float | None = None,
    ignore_index: int = -100,
    num_classes: int | None = None,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    check: bool = False,
) -> Tensor:
    """``linear_distillation_token_loss`` from the logits of a student and of its teacher.

    Args:
        input, teacher_input: (..., V), the classes last, as for ``distillation_loss``. With ``classes`` the teacher's
            last dimension has any number of classes, and the columns of the student's are copied from it.
        fn, rows, target, classes, beta, temperature, reduction, divisor, ignore_index, num_classes, check: as for
            ``linear_distillation_token_loss``; autograd derives fn in one call for all tokens.
        softcap, logit_scale, teacher_softcap, teacher_logit_scale: as for ``distillation_loss``.

    Returns:
        The loss, and errors, as for ``linear_distillation_token_loss``.

    Examples:
        >>> logits, teacher_logits = torch.randn(4, 10, requires_grad=True), torch.randn(4, 10)
        >>> total_variation = lambda d: 1 - d.overlap
        >>> xent_ops.distillation_token_loss(logits, teacher_logits, total_variation).backward()
    """
    options = (ignore_index, softcap, logit_scale, num_classes, beta, temperature, teacher_softcap, teacher_logit_scale)
    name, has_target = "xent_ops.distillation_token_loss", target is not None
    logits = bind_logits(name, input, teacher_input, target, classes, options, divisor)
    _, _, target, classes, spec = logits
    checks.reduction(reduction, ("mean", "sum"))
    divisor = arguments.divisor(divisor, input, reduction)
    arguments.boolean("check", check)
    dtype = accumulator(input)
    function = DivergenceFunction(fn, rows, target, has_target, dtype, (input,), spec)
    values, statistics, found = logits_statistics(function, logits)
    if check:
        function.check(values, statistics, found, target)
    if reduction == "mean":
        divisor = is_counted(target, spec.options.ignore_index).sum()
    divisor = _divisor(divisor, classes, teacher_input.shape[-1], dtype)
    return function.counted_sum(function.all_values(values, statistics, found, target), target, divisor)


def _divisor(divisor: Tensor | None, classes: Tensor | None, number: int, dtype: torch.dtype) -> Tensor | None:
    """NaN where the classes are not different, if that cannot raise an error."""
    different = factor_of_classes(classes, number)
    if different is None:
        return divisor
    return different.to(dtype) if divisor is None else different.to(dtype) * divisor.to(dtype)
