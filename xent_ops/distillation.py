"""The public distillation functions: from logits, or from the hidden states of a student and its teacher."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .divergence_function import bind_heads
from .head.loop import wanted_gradients
from .kernels.options import LossOptions, Reduction, RowOptions
from .ops import arguments, checks, distillation_arguments, transforms
from .ops.dtensors import only_plain_tensors
from .ops.formulas import differentiable
from .ops.reduction import summary

if TYPE_CHECKING:
    from .distributed.bound import Shard


@arguments.named
def distillation_loss(
    input: Tensor,
    teacher_input: Tensor,
    *,
    target: Tensor | None = None,
    beta: float = 0.0,
    temperature: float = 1.0,
    hard_weight: float = 0.0,
    reduction: Reduction = "mean",
    divisor: Tensor | float | None = None,
    ignore_index: int = -100,
    num_classes: int | None = None,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    token_weight: Tensor | None = None,
) -> Tensor:
    """The generalised Jensen-Shannon divergence between the logits of a student and of its teacher.

    s and t are the softmax of the student's and the teacher's x / temperature, with x as for ``cross_entropy``, and
    m = (1 - beta) s + beta t. The loss of a row is

        beta KL(t || m) + (1 - beta) KL(s || m)         for beta between 0 and 1
        KL(t || s) for beta = 0, forward KL;            KL(s || t) for beta = 1, reverse KL

    plus ``hard_weight`` times the student's cross entropy on the target, which is not divided by the temperature. There
    is no factor temperature^2: multiply the loss by it if gradients should not shrink with the temperature.

    Args:
        input: logits of the student, (..., V), the classes last; float32, bfloat16, float16 or float64.
        teacher_input: logits of the teacher, with the same rows, of any of these dtypes. It is a constant: it must not
            require grad.
        target: (...), class indices, int64, int32 or uint8. It marks ignored rows, and is the target of hard_weight's
            cross entropy. Without hard_weight it may be any number in the other rows. None: all rows count.
        beta: from 0 to 1.
        temperature: above 0.
        hard_weight: the factor of the cross entropy; 0 for none.
        reduction: "mean" divides the sum by the number of counted rows (TRL's "batchmean" with labels), or by the sum
            of their token_weight; "sum"; or "none", one number per row, 0 in ignored rows.
        divisor: for "sum", as for ``linear_cross_entropy``.
        ignore_index: rows with this target add neither loss nor gradient. Without a target it is refused.
        num_classes: the number of classes, if one or both sides have padding columns behind them. Padding has no
            probability on both sides, and its gradient is 0. None: all columns are classes, equally many on both sides.
        softcap, logit_scale: as for ``cross_entropy``, for the student.
        teacher_softcap, teacher_logit_scale: the same for the teacher.
        token_weight: a factor for each row's loss, of the target's shape, as for ``cross_entropy``.

    A class that -inf masks on both sides adds nothing. If only one side gives a class probability, the loss is infinite
    where the formula says so: at beta = 0 if the student lacks the class, at beta = 1 if the teacher lacks it. It is
    finite in between.

    Returns:
        The loss, float32 (float64 for float64 input): (), or with "none" the shape of the rows. It has no second
        derivatives, no torch.func, no forward-mode AD, no DTensors.

    Errors are those of ``cross_entropy``, and RuntimeError for a teacher that requires grad.

    Source: generalized_jsd_loss of TRL's GKDTrainer (Agarwal et al., 2023, arXiv 2306.13649).

    Examples:
        >>> logits, teacher_logits = torch.randn(4, 10, requires_grad=True), torch.randn(4, 10)
        >>> loss = xent_ops.distillation_loss(logits, teacher_logits, beta=0.5, temperature=2.0)
        >>> loss.backward()
    """
    only_plain_tensors("xent_ops.distillation_loss", input, teacher_input, target, token_weight, divisor)
    target, ignore_index = distillation_arguments.target_of(target, ignore_index, hard_weight, input)
    arguments.tensors(input, target)
    arguments.required("teacher_input", teacher_input)
    options = (num_classes, beta, temperature, teacher_softcap, teacher_logit_scale)
    spec = distillation_arguments.spec(ignore_index, softcap, logit_scale, *options)
    fixed = distillation_arguments.fixed_loss(spec, hard_weight)
    loss = LossOptions(RowOptions(fixed.spec.options.ignore_index), reduction=reduction)
    checks.reduction(reduction)
    divisor = arguments.divisor(divisor, input, reduction)
    arguments.optional("token_weight", token_weight)
    checks.token_weight(token_weight, target)
    checks.constant("teacher_input", teacher_input)
    values, _ = differentiable("divergences_forward", input, teacher_input, target, **fixed.spec.keywords())
    losses = fixed.of(values)
    return summary(losses, losses, target, None, token_weight, divisor, loss)[0]


@arguments.named
def linear_distillation_loss(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    *,
    target: Tensor | None = None,
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    beta: float = 0.0,
    temperature: float = 1.0,
    hard_weight: float = 0.0,
    reduction: Reduction = "mean",
    divisor: Tensor | float | None = None,
    ignore_index: int = -100,
    num_classes: int | None = None,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    token_weight: Tensor | None = None,
    accumulate_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    skip_ignored: bool = False,
    logits_dtype: torch.dtype | None = None,
    shard: Shard | None = None,
) -> Tensor:
    """``distillation_loss`` from the hidden states and heads of a student and its teacher, without all logits.

    Two chunks of logits exist at a time. If gradients are wanted, the forward computes them too, in three matrix
    multiplications of the student's head and one of the teacher's. The backward multiplies them by the upstream
    gradient, in place. Without gradients: one matrix multiplication of each. With ``reduction="none"`` the backward
    computes both logits again: six.

    Args:
        input, linear_weight, linear_bias: (..., H), (V, H) and (V,), the student's, as for ``linear_cross_entropy``.
        teacher_input, teacher_weight, teacher_bias: (..., H'), (V', H') and (V',), the teacher's, with the same rows.
            H' and the dtype may differ from the student's. They are constants and must not require grad. Under
            torch.autocast they are cast too.
        num_classes: the number of classes, if V and V' differ because heads are padded. Rows behind them may hold any
            values, and are not multiplied.
        target, beta, temperature, hard_weight, reduction, ignore_index, token_weight: as for ``distillation_loss``.
        softcap, teacher_softcap, logit_scale, teacher_logit_scale: as for ``distillation_loss``.
        divisor, accumulate_dtype, chunk_rows: as for ``linear_cross_entropy``.
        skip_ignored: as for ``linear_cross_entropy``, for both heads if both have such matrix multiplications. Without
            a target no row is ignored, and it saves nothing. Not with a shard.
        logits_dtype: of both logits. None: torch.float32 for 16-bit inputs, because two near models differ by less than
            the rounding of their logits. The input's dtype rounds them and takes less time: docs/distillation.md.
        shard: as for ``linear_cross_entropy``, for both heads, which are split at the same classes. 5 numbers a row are
            all-gathered, or 4 and then 2 more with beta between 0 and 1. ``hard_weight`` adds 1, or 3 at a temperature
            other than one. reduction="none" has no gradients.

    Returns:
        The loss, float32 (float64 for float64 input): (), or with "none" the shape of the rows. The student's input,
        weight and bias get gradients, in their dtype. Restrictions and errors are as for ``distillation_loss``.

    Sources: as for ``distillation_loss``; Liger-Kernel's fused linear JSD for the chunks.

    Examples:
        >>> head, teacher_head = torch.nn.Linear(16, 1000, bias=False), torch.nn.Linear(32, 1000, bias=False)
        >>> hidden, teacher_hidden = torch.randn(2, 5, 16, requires_grad=True), torch.randn(2, 5, 32)
        >>> teacher_weight = teacher_head.weight.detach()
        >>> loss = xent_ops.linear_distillation_loss(hidden, head.weight, teacher_hidden, teacher_weight, beta=0.5)
        >>> loss.backward()
    """
    student, teacher = (input, linear_weight, linear_bias), (teacher_input, teacher_weight, teacher_bias)
    options = (ignore_index, softcap, logit_scale, num_classes, beta, temperature, teacher_softcap, teacher_logit_scale)
    chunking = (accumulate_dtype, chunk_rows, skip_ignored, logits_dtype)
    head_args = ("xent_ops.linear_distillation_loss", student, teacher, target, None, options, chunking)
    bind_all = functools.partial(
        bind_heads,
        *head_args,
        reduction=reduction,
        divisor=divisor,
        token_weight=token_weight,
        row_tensors=(token_weight,),
        hard_weight=hard_weight,
    )
    if shard is not None:
        from .distributed import distillation as over_ranks  # this import is slow

        return over_ranks.fixed_loss(shard, bind_all, hard_weight)
    heads = bind_all()
    fixed = distillation_arguments.fixed_loss(heads.spec, hard_weight)
    call = heads.student.in_autocast_dtype()
    output_mask = wanted_gradients(call.input, call.head)
    tensors, keywords = heads._replace(student=call).operator_arguments()
    keywords |= fixed.spec.keywords()
    if reduction == "none" or not any(output_mask) or transforms.is_jit_traced():
        values, _, _ = differentiable("linear_divergences_forward", *tensors, **keywords)
        losses = fixed.of(values)
        return summary(losses, losses, call.target, None, token_weight, call.divisor, call.loss)[0]
    loss_args = (call.divisor, token_weight, output_mask, keywords.pop("accumulate_dtype"))
    keywords |= {"hard_weight": fixed.hard_weight, "reduction": reduction}
    return differentiable("linear_divergences_with_grad", *tensors, *loss_args, **keywords)[0]
