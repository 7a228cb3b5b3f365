"""The public functions of logits: they bring the arguments to the operators' shape (..., V), and reduce the losses.

The formulas are in kernels/reference.py, the contract of the operators in docs/ops.md.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .kernels import reference_soft
from .kernels.options import LossOptions, Reduction
from .ops import arguments, checks, function, scalars, transforms
from .ops.arguments import classes_last
from .ops.dtensors import is_dtensor, only_plain_tensors, refuse_beside_plain, refuse_in_transforms
from .ops.formulas import differentiable
from .ops.library import check_call_of
from .ops.token_logits import target_and_ids
from .outputs import CrossEntropyOutputs, TokenLogProbs, log_probs_of_rows, outputs_of_rows


@arguments.named
def check_targets(target: Tensor, num_classes: int, ignore_index: int = -100) -> None:
    """Raise IndexError for a target outside [0, num_classes) that is not ignore_index.

    It reads the values and so synchronises a GPU: call it while debugging. Without it, such a target is an IndexError
    on the CPU. On other devices it gives NaN in its row's loss and gradient.

    Args:
        target: class indices of any shape; int64, int32 or uint8.
        num_classes: V, the number of classes.
        ignore_index: a row with this target does not count.

    Examples:
        >>> xent_ops.check_targets(torch.tensor([0, 2, -100]), num_classes=3)
        >>> xent_ops.check_targets(torch.tensor([0, 3, -100]), num_classes=3)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        IndexError: target 3 is out of bounds: valid are 0 to 2 and ignore_index=-100 (1 of 3 targets are out of ...
    """
    arguments.required("target", target)
    num_classes = scalars.at_least_one("num_classes", num_classes)
    checks.dtype("target", target, checks.INDICES)
    checks.target_values(target, num_classes, scalars.integer("ignore_index", ignore_index))


def refuse_token_weight(where: str, token_weight: Tensor | None) -> None:
    if token_weight is not None:
        raise ValueError(
            f'token_weight is not supported by {where}: multiply the losses of reduction="none" by it, and add them up'
        )


@arguments.named
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    token_weight: Tensor | None = None,
    dim: int = 1,
    inplace_backward: bool = False,
    grad_in_forward: bool = False,
) -> Tensor:
    """Cross entropy between logits and class indices or class probabilities: ``F.cross_entropy`` and more.

    x = softcap * tanh(logit_scale * input / softcap), or without a softcap x = logit_scale * input. e is the label
    smoothing, w are the class weights, and t is the target of a row:

        lse  = logsumexp_j x_j
        loss = w_t (1-e) (lse - x_t) + (e/C) sum_j w_j (lse - x_j) + lse_square_scale * lse^2

    The input is never upcast in memory, and never written unless you ask for ``inplace_backward``. The forward and the
    backward each read it once. Only the input and one float per row are saved.

    Args:
        input: logits, (C,), (N, C) or (N, C, d1, ..., dK) with the classes in ``dim``; float32, bfloat16, float16 or
            float64. Rows of any stride are read in place (``logits[:, :-1]``). A class dimension that is not dense is
            copied once.
        target: class indices, the input's shape without ``dim``, int64, int32 or uint8; or class probabilities, the
            input's shape, floating point. On the CPU log-probabilities, whose rows add up to less than 0, are an error.
        weight: (C,), a factor for each class; any floating dtype. With class indices it must not require grad.
        ignore_index: rows with this target add neither loss nor gradient. Not for class probabilities.
        reduction: "none" (the shape of class indices), "sum", or "mean". A mean is the sum of the losses divided by the
            sum of the counted targets' weights, as in torch; NaN if no row counts. The z-loss is divided by the number
            of counted rows. Class probabilities are divided by the number of rows.
        label_smoothing: e, from 0 to 1 (Szegedy et al., 2016).
        lse_square_scale: the factor of the z-loss (PaLM), which keeps lse near 0; 0 or above. Ignored rows have none.
        softcap: cap of the logits (Gemma 2), above 0; None for none.
        logit_scale: a factor for the logits, applied before the softcap (an inverse temperature); not 0. With a factor
            below 0, distances serve as logits. Options are constants: a tensor that requires grad is refused. For a
            learned temperature multiply the logits by it.
        token_weight: a factor for each target's loss and z-loss, of the target's shape, any sign and dtype; 0 leaves a
            target out. "mean" then divides by the sum of the counted targets' factors (times their class weights), NaN
            if that is 0. It is a constant: it must not require grad.
        dim: the class dimension. 1 as in torch; -1 for language-model logits (B, S, V) with targets (B, S).
        inplace_backward: in eager, write the gradient over the input's storage, without a second buffer of this size.
            The input must be neither a leaf nor a view of one. After the backward the input holds the gradient, and a
            later backward that needs the input raises. Inside saved-tensor hooks (a non-reentrant checkpoint,
            ``save_on_cpu``) autograd could not raise, so the gradient gets its own memory. Compiled graphs, which reuse
            the buffer anyway, and torch.func's transforms ignore this option. Class indices only.
        grad_in_forward: in eager, compute the gradient in the forward, in the same pass over the input. The input is
            read once and written once, instead of read twice and written once. The backward multiplies the gradient by
            the upstream gradient, at no cost if that is one, and returns it once: a second backward or a second
            derivative raises. The gradient is rounded to the input's dtype before the multiplication, so with float16
            and a loss scaler more small gradients underflow. With ``inplace_backward`` the forward already writes the
            gradient over the input, so do not read the input after this call. Compiled graphs and torch.func's
            transforms ignore this option. Class indices only.

    Returns:
        The loss, float32 (float64 for float64 input): (), or with "none" the shape of class indices.

    Raises:
        ValueError, TypeError, RuntimeError: types, shapes, dtypes, devices or options are not as above; or a softcap,
            logit_scale or lse_square_scale is beyond float32 and the logits are not float64.
        IndexError: on the CPU, a class index is out of range and not ignore_index. On a GPU, where a check would
            synchronise, the row's loss and gradient are NaN instead; ``check_targets`` checks there too.

    Sources: torch.nn.functional.cross_entropy; z-loss as in Liger-Kernel and flash-attention.

    Examples:
        >>> logits, labels = torch.randn(2, 5, 1000, requires_grad=True), torch.randint(1000, (2, 5))
        >>> loss = xent_ops.cross_entropy(logits, labels, dim=-1, lse_square_scale=1e-4)
        >>> loss.backward()
    """
    arguments.tensors(input, target, weight)
    if transforms.functorch_is_active():
        refuse_in_transforms(input, target, weight, token_weight)
    loss = arguments.loss_options(
        ignore_index, label_smoothing, softcap, logit_scale, lse_square_scale, reduction, input.dtype
    )
    arguments.optional("token_weight", token_weight)
    if inplace_backward and not grad_in_forward:
        refuse_token_weight("inplace_backward=True without grad_in_forward=True", token_weight)
    is_soft = target.dim() == input.dim() > 0
    logits = classes_last(input, dim, apart=not (is_soft or inplace_backward or grad_in_forward))
    target = classes_last(target, dim, "target") if is_soft and target.is_floating_point() else target
    if is_dtensor(input, target, weight, token_weight):
        for name, value in (("inplace_backward", inplace_backward), ("grad_in_forward", grad_in_forward)):
            if value:
                raise ValueError(f"{name}=True is not supported for DTensor logits")
        target, token_weight, weight = _beside(logits, target, token_weight, weight)
    if not is_soft:
        arguments.suggest_dim(input, target, dim)
        checks.token_weight(token_weight, target)
        options = {"inplace_backward": inplace_backward, "grad_in_forward": grad_in_forward}
        return function.cross_entropy(logits, target, weight, loss, token_weight, **options)
    if target.dtype in checks.INDICES:
        raise TypeError(
            f"target has shape {tuple(target.shape)} and dtype {target.dtype}: with as many dimensions as the "
            "logits it holds class probabilities, which are floating point; class indices have shape "
            f"{tuple(logits.shape[:-1])}"
        )
    for name, value in (("inplace_backward", inplace_backward), ("grad_in_forward", grad_in_forward)):
        if value:
            raise ValueError(f"{name}=True takes class indices, not class probabilities")
    refuse_token_weight("class probabilities", token_weight)
    return _soft_cross_entropy(logits, target, weight, loss)


def _beside(
    logits: Tensor, target: Tensor, token_weight: Tensor | None = None, weight: Tensor | None = None
) -> list[Any]:
    """The arguments behind DTensor logits (..., C) as DTensors."""
    if not is_dtensor(logits):
        refuse_beside_plain("the logits are", target=target, token_weight=token_weight, weight=weight)
    from .distributed.on_dtensors import layout  # for DTensors only: this import is slow

    at = layout.of_logits(logits)
    return [*at.beside(target, token_weight), at.whole(weight)]


def _soft_cross_entropy(logits: Tensor, target: Tensor, weight: Tensor | None, loss: LossOptions) -> Tensor:
    if loss.row_options.ignore_index >= 0:
        raise ValueError(
            f"ignore_index={loss.row_options.ignore_index} is not supported for class probabilities; leave it below 0"
        )
    if transforms.functorch_is_active() or transforms.forward_mode():
        check_call_of("soft_cross_entropy_forward", logits, target, weight, **loss.row_options.soft_keywords())
        row_loss, lse = reference_soft.soft_cross_entropy_forward(logits, target, weight, options=loss.row_options)
    else:
        keywords = loss.row_options.soft_keywords()
        row_loss, lse = differentiable("soft_cross_entropy_forward", logits, target, weight, **keywords)
    if loss.lse_square_scale != 0.0:
        row_loss = row_loss + loss.lse_square_scale * lse.square()
    if loss.reduction == "none":
        return row_loss
    return row_loss.sum() if loss.reduction == "sum" else row_loss.mean()


@arguments.named
def cross_entropy_outputs(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    token_weight: Tensor | None = None,
    dim: int = 1,
    grad_in_forward: bool = False,
    batch_invariant: bool = False,
) -> CrossEntropyOutputs:
    """``cross_entropy`` with values for logging, from the same pass: see ``CrossEntropyOutputs``.

    Dtypes and errors are those of ``cross_entropy``. The loss and the lse are differentiable. With reduction="none" the
    z-loss is too.

    Args:
        others: as for ``cross_entropy``; the target must be class indices.
        grad_in_forward: as for ``cross_entropy``: one pass computes the loss, its gradient and all other outputs. Only
            the loss is then differentiable.
        batch_invariant: as for ``token_log_probs``. It applies to lse, predictions, token_losses, entropy and the
            loss of reduction="none". It cannot be combined with grad_in_forward.

    Examples:
        >>> outputs = xent_ops.cross_entropy_outputs(torch.eye(3), torch.tensor([0, 1, 1]))
        >>> outputs.predictions.tolist(), round(outputs.accuracy.item(), 2)
        ([0, 1, 2], 0.67)
    """
    only_plain_tensors("xent_ops.cross_entropy_outputs", input, target, weight, token_weight)
    arguments.tensors(input, target, weight)
    loss = arguments.loss_options(
        ignore_index, label_smoothing, softcap, logit_scale, lse_square_scale, reduction, input.dtype
    )
    checks.constant("weight", weight)
    arguments.optional("token_weight", token_weight)
    checks.token_weight(token_weight, target)
    if arguments.boolean("batch_invariant", batch_invariant) and grad_in_forward:
        raise ValueError(
            "batch_invariant=True beside grad_in_forward=True, which splits a row over more programs where rows are "
            "few: leave one of them out"
        )
    logits = classes_last(input, dim)
    arguments.suggest_dim(input, target, dim)
    row_args = (logits, target, weight, loss, token_weight)
    one_pass = grad_in_forward and function.wants_gradient(logits)
    if loss.reduction != "none" and not transforms.is_traced():
        if one_pass:
            results = function.logits_with_grad(*row_args, with_statistics=True)
        else:
            results = function.summarised(*row_args, True, batch_invariant)
        value, z_loss, accuracy, row_loss, lse, argmax, entropy = results
        outputs = CrossEntropyOutputs(value, z_loss, lse, argmax, accuracy, row_loss, entropy)
    elif one_pass:
        value, _, _, *rows = function.logits_with_grad(*row_args, with_statistics=True)
        outputs = outputs_of_rows(rows, target, weight, None, loss, token_weight)._replace(loss=value)
    else:
        flags, options = (True, True, batch_invariant), loss.row_options.keywords()
        rows = differentiable("cross_entropy_forward", logits, target, weight, *flags, **options)[:4]
        outputs = outputs_of_rows(rows, target, weight, None, loss, token_weight)
    if grad_in_forward:  # in compiled graphs too
        outputs = outputs._replace(lse=outputs.lse.detach(), z_loss=outputs.z_loss.detach())
    return outputs


@arguments.named
def token_log_probs(
    input: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    dim: int = -1,
    batch_invariant: bool = False,
) -> TokenLogProbs:
    """log p(target), the entropy of the softmax and the lse of every row, in one pass and differentiable.

    Policy-gradient losses need ``log_probs = x_t - lse`` and ``entropy = -sum_j p_j log p_j`` in nats. Classes masked
    with -inf add nothing. In ignored rows both are 0, and so are their gradients.

    Args:
        input: logits as for ``cross_entropy``.
        target: class indices, the input's shape without ``dim``; or K classes per row, with K as an additional last
            dimension. A place with ignore_index does not count, and a row is ignored if all of its places are.
        ignore_index, softcap, logit_scale: as for ``cross_entropy``; logit_scale is one over the temperature.
        dim: the class dimension, by default the last one.
        batch_invariant: the bits of a row's numbers, and of its row of the input's gradient, depend only on its own
            logits, target and options. They do not depend on other rows, on their number, or on their memory. Few rows
            take longer. Rows that do not start at multiples of 16 bytes, as with odd vocabularies, are copied:
            docs/reproducible.md.

    Returns:
        ``TokenLogProbs(log_probs, entropy, lse)``, each float32 (float64 for float64 input) with one number per row;
        log_probs has the target's shape. Errors are those of ``cross_entropy``.

    Examples:
        >>> logits, actions = torch.randn(4, 10, requires_grad=True), torch.tensor([1, 3, 3, 7])
        >>> log_probs, entropy, _ = xent_ops.token_log_probs(logits, actions, logit_scale=1 / 0.7)
        >>> (-log_probs - 0.01 * entropy).mean().backward()
    """
    transforms.refuse("xent_ops.token_log_probs")
    arguments.tensors(input, target)
    rows = arguments.loss_options(ignore_index, 0.0, softcap, logit_scale, dtype=input.dtype).row_options
    logits = classes_last(input, dim)
    arguments.boolean("batch_invariant", batch_invariant)
    if is_dtensor(input, target):
        target, *_ = _beside(logits, target)
    target, ids = target_and_ids(target, input.dim() - 1, rows.ignore_index)
    if ids is not None:
        ids_args = (logits, ids, True, batch_invariant)
        loss_or_at_ids, lse, entropy, low = differentiable("token_logits", *ids_args, **rows.keywords())
    else:
        row_args = (logits, target, None, False, True, batch_invariant)
        loss_or_at_ids, lse, _, entropy, low = differentiable("cross_entropy_forward", *row_args, **rows.keywords())
    return log_probs_of_rows(loss_or_at_ids, lse, entropy, low, ids, rows.ignore_index)
