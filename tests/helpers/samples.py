"""What every operator of the namespace is called with: for opcheck, offline compilation and packages.

A function for each family of operators yields samples of tensors and options that its caller chooses. An operator gets
those of the options that its schema names.
"""

import functools
import itertools
from typing import Any, NamedTuple

import torch

from xent_ops.kernels.reference import accumulator
from xent_ops.ops.library import OPERATORS

ops = torch.ops.xent
MASKS = ([True, True, True], [True, False, False], [False, True, True])  # of the gradients of a head


class Sample(NamedTuple):
    name: str
    args: tuple[Any, ...]
    options: dict[str, Any]


def _fitting(name, options):
    names = {argument.name for argument in getattr(ops, name).default._schema.arguments}
    return {key: value for key, value in options.items() if key in names}


def _call(options, name, *args, **more):
    return Sample(name, args, _fitting(name, options) | more)


def _with_twins(family):
    """Each sample for the operator's in-place form too, unless what that overwrites requires grad."""

    @functools.wraps(family)
    def samples(*given, **keywords):
        for sample in family(*given, **keywords):
            yield sample
            twin, args = OPERATORS.get(f"{sample.name}_"), list(sample.args)
            if twin is not None and not args[twin.position].requires_grad:
                args[twin.position] = args[twin.position].clone()
                yield Sample(twin.name, tuple(args), sample.options)

    return samples


def _numbers(like):
    return functools.partial(torch.randn, device=like.device, dtype=accumulator(like))


def _backwards(call, x, target, weight, square, *of_slice):
    numbers = _numbers(x)
    grad, grad_lse, lse, entropy = (numbers(target.shape) for _ in range(4))
    saved, divisor = (x, target, lse, weight), numbers(2).abs() + 1
    of_divisor, of_entropy = (divisor, None, None, *of_slice), (None, grad_lse, entropy, *of_slice)
    plain = (None, None, None, *of_slice) if of_slice else ()
    for upstream in (grad_lse, None):
        yield call("cross_entropy_backward", grad, upstream, *saved, *plain)
        yield call("cross_entropy_backward", grad, upstream, *saved, *of_entropy)
        yield call("cross_entropy_backward", numbers(()), upstream, *saved, *of_divisor, **square)
    yield call("cross_entropy_backward", numbers(()), None, *saved, *of_divisor)
    yield call("cross_entropy_backward", grad, grad_lse, *saved, *of_divisor, **square)


@_with_twins
def of_indices(x, target, weight, options, **square):
    """A loss of logits (..., V); ``square``: lse_square_scale, or nothing."""
    call, numbers, fixed = functools.partial(_call, options), _numbers(x), x.detach()
    for reduction in ("none", "mean", "sum"):
        if reduction == "mean" and not x.numel():
            continue  # NaN, as in torch: opcheck compares NaN with NaN and finds them different
        yield call("cross_entropy", x, target, weight, reduction=reduction, **square)
        if reduction != "none":
            yield call("cross_entropy_reduced", x, target, weight, reduction=reduction, **square)
    yield call("cross_entropy_forward", x, target, weight)
    for wanted in ((True, False), (False, True), (True, True)):
        yield call("cross_entropy_forward", x, target, weight, *wanted)
    yield from _backwards(call, x, target, weight, square)
    scalar, row = numbers(()), numbers(target.shape)
    for upstream in ((scalar, None), (scalar, scalar), (scalar, row), (row, None), (row, row)):
        yield call("cross_entropy_with_grad", fixed, target, *upstream, weight)
    for wanted in ((True, False), (True, True)):
        yield call("cross_entropy_with_grad", fixed, target, row, scalar, weight, *wanted)
    if x.dtype == torch.float32:  # a gradient of 16 bits
        saved = (fixed, target, row, weight, None, None, None, None, 0, None, torch.bfloat16)
        yield call("cross_entropy_backward", row, row, *saved)
        yield call("cross_entropy_with_grad", fixed, target, row, None, weight, False, True, torch.bfloat16)
    rest = {name: value for name, value in options.items() if name != "label_smoothing"}
    yield from of_ids(x, target, functools.partial(_call, rest))
    for factor in (scalar, row):
        yield call("scale_grad_", fixed.clone(), factor)
    if x.numel():
        yield call("cross_entropy_divisor", fixed, target, weight)


def several(target):
    """Three classes of each row: the target, another, and the target again."""
    return torch.stack([target, target.clamp(max=0), target], -1)


def of_ids(x, target, call):
    """Several classes a row, of given logits."""
    numbers, ids = _numbers(x), several(target)
    row, places = numbers(target.shape), numbers(ids.shape)
    for entropy in (False, True):
        yield call("token_logits", x, ids, entropy)
    yield call("token_logits_backward", places, row, row, x.detach(), ids, places, row, row)
    yield call("token_logits_backward", places, None, None, x.detach(), ids, places, row)
    yield call("ids_grad_", x.detach().clone(), ids, places, places, row, row)
    yield call("ids_grad_", x.detach().clone(), ids, places, places, row, row, row, row, 1, 2 * x.shape[-1])


def of_probabilities(x, target, weight, options):
    call, numbers = functools.partial(_call, options), _numbers(x)
    grad, grad_lse, lse = (numbers(x.shape[:-1]) for _ in range(3))
    yield call("soft_cross_entropy_forward", x, target, weight)
    for upstream in (grad_lse, None):
        yield call("soft_cross_entropy_backward", grad, upstream, x, target, lse, weight)


@_with_twins
def of_distillation(x, teacher, target, options, num_classes=None):
    """Of a student's logits and its teacher's."""
    call, numbers, fixed = functools.partial(_call, options), _numbers(x), x.detach()
    scalar, row, statistics = numbers(()), numbers(target.shape), numbers(4, *target.shape)
    for beta, more in ((0.0, {}), (1.0, {"hard_weight": 0.5}), (0.5, {"hard_weight": 0.5, "temperature": 2.0})):
        more = {"beta": beta, "num_classes": num_classes, **more}
        yield call("distillation_forward", x, teacher, target, **more)
        yield call("distillation_backward", row, fixed, teacher, target, statistics, **more)
        yield call("distillation_with_grad", fixed, teacher, target, scalar, **more)
    yield call("distillation_backward", scalar, fixed, teacher, target, statistics, **more)
    yield call("distillation_with_grad", fixed, teacher, target, row, **more)
    classes, both = num_classes or x.shape[-1], (fixed, teacher, target)  # the last of twice as many
    for beta, given in ((0.0, (None,)), (1.0, (None,)), (0.5, (None,)), (0.5, (statistics,))):
        more.update(beta=beta, num_classes=2 * classes)
        yield call("distillation_forward", *both, *given, classes, **more)
        yield call("distillation_backward", row, *both, statistics, classes, **more)


@_with_twins
def of_shard(x, target, weight, place, options, **square):
    """Logits of the classes from place[0] on, of place[1] in all. Each rank has these logits."""
    call, fixed = functools.partial(_call, options), x.detach()  # the join alone is differentiable, and but once
    fitting = _fitting("cross_entropy_shard", options)
    starts = range(0, place[1], x.shape[-1])
    gathered = torch.cat([ops.cross_entropy_shard(fixed, target, at, place[1], weight, **fitting) for at in starts])
    yield call("cross_entropy_shard", fixed, target, *place, weight)
    yield call("cross_entropy_shard_join", x, target, gathered, *place, weight)
    for reduction in ("mean", "sum"):
        of_all = (x, target, gathered, *place, weight)
        yield call("cross_entropy_shard_reduced", *of_all, reduction=reduction, **square)
    lse_coefficient = None if weight is None else _numbers(x)(target.shape)
    yield from _backwards(call, fixed, target, weight, square, lse_coefficient, *place)


def of_launchers(x, target, weight, place, options, **square):
    """Of every operator that has a launcher."""
    families = (
        of_indices(x, target, weight, options, **square),
        of_probabilities(x, x, weight, options),
        of_distillation(x.detach(), x.detach().clone(), target, options),
        of_shard(x, target, weight, place, options, **square),
    )
    return [sample for sample in itertools.chain(*families) if sample.name in launched()]


def launched():
    return {name for name, operator in OPERATORS.items() if not operator.calls_operators}


def of_head(x, head, target, bias, weight, options, **square):
    """The head and the loss as one: input (..., H), head (V, H)."""
    call, numbers = functools.partial(_call, options), _numbers(x)
    given, masks = (x, head, target, bias, weight), MASKS[:1]
    if "accumulate_dtype" in options:
        masks = MASKS[1:]
    yield call("linear_cross_entropy", *given, reduction="none" if masks == MASKS[:1] else "mean", **square)
    token_weight, divisor = torch.randn(target.shape, device=x.device), torch.tensor(3, device=x.device)
    yield call("linear_cross_entropy", *given, divisor, token_weight, reduction="sum", **square)
    for wanted in ((), (True, False), (False, True)):
        yield call("linear_cross_entropy_forward", *given, *wanted)
    grad, grad_lse, lse, entropy = (numbers(target.shape) for _ in range(4))
    saved = (x, head, target, lse, bias, weight)
    yield call("linear_cross_entropy_backward", grad, grad_lse, *saved)
    yield call("linear_cross_entropy_backward", numbers(()), None, *saved, numbers(2).abs() + 1, **square)
    yield call("linear_cross_entropy_backward", grad, None, *saved, None, grad_lse, entropy)
    for mask in masks:
        yield call("linear_cross_entropy_backward", grad, None, *saved, *(None,) * 4, 0, None, mask)
        if x.numel():
            for factors, more in ((None, {}), (token_weight, {"with_argmax": True, "with_entropy": True})):
                yield call("linear_cross_entropy_with_grad", *given, None, factors, mask, **more, **square)
    if "label_smoothing" not in options:
        ids = several(target)
        row, places = numbers(target.shape), numbers(ids.shape)
        for entropy in (False, True):
            yield call("linear_token_logits", x, head, ids, bias, entropy)
        yield call("linear_token_logits", x, head, ids, bias, mask_ids=True)
        saved = (x.detach(), head.detach(), ids, places, row, None if bias is None else bias.detach())
        yield call("linear_token_logits_backward", places, row, row, *saved, row)
        for mask in MASKS[1:]:
            yield call("linear_token_logits_backward", places, None, None, *saved, None, mask)
        yield call("linear_token_logits_backward", places, row, None, *saved, mask_ids=True)
        fixed = (x.detach(), head.detach(), ids, places)
        yield call("linear_token_logits_with_grad", *fixed)
        for mask in MASKS:
            yield call("linear_token_logits_with_grad", *fixed, row, saved[-1], mask)
    for factor in (numbers(()), numbers(len(head))):
        yield call("linear_scale_grad", head.detach(), factor)


def of_head_in_8_bits(x, head, target, bias, weight, options, **square):
    """Products of 8-bit numbers: what ``of_head`` has, but for several classes a row."""
    for products in ("fp8", "fp8_gradients"):
        for sample in of_head(x, head, target, bias, weight, {**options, "products": products}, **square):
            if "token_logits" not in sample.name and "scale_grad" not in sample.name:
                yield sample


def of_two_heads(x, head, teacher, teacher_head, target, biases, options, num_classes=None):
    """Distillation of a student's head and its teacher's. ``biases``: of both."""
    call = functools.partial(_call, options)
    more = {"beta": 0.5, "hard_weight": 0.5, "temperature": 2.0, "num_classes": num_classes}
    both = (x, head, target, teacher, teacher_head, *biases)
    fixed = [tensor if tensor is None else tensor.detach() for tensor in both]  # which have no gradient
    yield call("linear_distillation_forward", *both, **more)
    numbers = _numbers(x)
    for factor, rest in ((numbers(target.shape), ()), (numbers(()), (*fixed[5:], MASKS[2]))):
        yield call("linear_distillation_backward", factor, numbers(4, *target.shape), *fixed[:5], *rest, **more)
    if x.numel():
        # A positive loss: the backward scales the gradients in place, and opcheck's is that of its magnitude.
        token_weight, divisor = torch.rand(target.shape, device=x.device), torch.tensor(3, device=x.device)
        for mask in MASKS:
            yield call("linear_distillation_with_grad", *both, None, None, mask, **more)
        yield call("linear_distillation_with_grad", *both, divisor, token_weight, reduction="sum", **more)


def of_two_slices(x, head, teacher, teacher_head, target, place, biases, options):
    """A chunk of rows of a rank's slices of both heads, from place[0] on, of place[1] in all."""
    call, numbers = functools.partial(_call, options), _numbers(x)
    tensors = (x, head, target, teacher, teacher_head, *biases)
    *both, bias, teacher_bias = [tensor if tensor is None else tensor.detach() for tensor in tensors]
    for beta, hard_weight, temperature in ((0.0, 0.0, 1.0), (1.0, 0.5, 1.0), (0.5, 0.5, 2.0)):
        more = {"beta": beta, "hard_weight": hard_weight, "temperature": temperature, "num_classes": place[1]}
        given = (*both, place[0], bias, teacher_bias)
        yield call("linear_distillation_chunk", *given, **more)
        fitting = _fitting("linear_distillation_chunk", {**options, **more})
        _, logits, teacher_logits = ops.linear_distillation_chunk(*given, numbers(3), **fitting)
        saved = (teacher_logits, both[1], target, numbers(4, len(target)), place[0])
        for factor, rest in ((numbers(()), ()), (numbers(len(target)), (False, numbers(3)))):
            yield call("linear_distillation_chunk_grad_", logits.clone(), factor, *saved, *rest, **more)


def of_head_shard(x, head, target, place, bias, weight, options, **square):
    """One rank's rows of the head, from place[0] on, of place[1] in all; the same a chunk of rows at a time."""
    call, numbers = functools.partial(_call, options), _numbers(x)
    fixed = (x.detach(), head.detach(), target)
    shard = (*fixed, *place, bias.detach(), weight)
    plain = weight is None and "label_smoothing" not in options  # else there are no entropies
    for entropy in (False, True)[: 1 + plain]:
        gathered = ops.linear_cross_entropy_shard(*shard, entropy, **_fitting("linear_cross_entropy_shard", options))
        yield call("linear_cross_entropy_shard", *shard, entropy)
        joined = (x, head, target, gathered, *place, bias, weight, None, entropy)
        yield call("linear_cross_entropy_shard_join", *joined)
    row = numbers(target.shape)
    saved, of_slice = (*fixed, row, bias.detach(), weight), (None if weight is None else row, *place)
    if plain:
        yield call("linear_cross_entropy_backward", row, None, *saved, None, row, row, *of_slice)
    for mask in MASKS:
        yield call("linear_cross_entropy_backward", row, row, *saved, None, None, None, *of_slice, mask)
    for slice_of_head in (place, (0, None)):
        yield from of_chunk(x, head, target, slice_of_head, bias, weight, options, **square)


def of_chunk(x, head, target, place, bias, weight, options, **square):
    """A chunk of rows of a head, or of a rank's rows of it; the caller's code stands between the operators."""
    call, numbers = functools.partial(_call, options), _numbers(x)
    fixed, one_rank = (x.detach(), head.detach(), target), place[1] is None
    shard = (*fixed, *place, bias.detach(), weight)
    with_entropy = weight is None and (one_rank or "label_smoothing" not in options)
    for entropy in (False, True)[: 1 + with_entropy]:
        yield call("linear_cross_entropy_chunk", *shard, entropy)
    count = torch.tensor(3, dtype=torch.int32, device=x.device)
    yield call("linear_cross_entropy_chunk", *shard, False, count)
    _, logits = ops.linear_cross_entropy_chunk(*shard, **_fitting("linear_cross_entropy_chunk", options))
    row = numbers(target.shape)
    saved, divisor = (*fixed[1:], row, *place, weight), numbers(2).abs() + 1
    lse_coefficient = None if one_rank or weight is None else row
    for after in ((), (False, None, numbers(3)), (True, count)):
        rest = (divisor, None, None, lse_coefficient, *after)
        yield call("linear_cross_entropy_chunk_grad_", logits.clone(), numbers(()), None, *saved, *rest, **square)
    rest = (None, row, row, lse_coefficient)
    yield call("linear_cross_entropy_chunk_grad_", logits.clone(), row, row, *saved, *rest)
    if "label_smoothing" not in options and weight is None:
        ids = several(target)
        yield call("linear_cross_entropy_chunk", *shard, True, count, None, ids)
        yield call("linear_cross_entropy_chunk", *shard, False, count, None, ids, True)
        places = (ids, numbers(ids.shape), numbers(ids.shape))
        yield call(
            "linear_cross_entropy_chunk_grad_", logits.clone(), row, row, *saved, *rest, True, None, None, *places
        )
        yield call(
            "linear_cross_entropy_chunk_grad_",
            logits.clone(),
            numbers(()),
            row,
            *saved,
            None,
            None,
            None,
            lse_coefficient,
            True,
            None,
            None,
            *places,
            mask_ids=True,
        )
    sums, none = (numbers(head.shape).to(head.dtype), numbers(len(head))), (head.new_empty(0).detach(), numbers(0))
    for first, wanted in ((True, sums), (False, sums), (True, (sums[0], none[1])), (False, (none[0], sums[1]))):
        copies = [tensor.clone() for tensor in wanted]
        columns = len(head) if one_rank else min(len(head), place[1])
        yield call("linear_cross_entropy_chunk_add_", *copies, logits, fixed[0], columns, first)
    copies = [tensor.clone() for tensor in sums]
    yield call("linear_cross_entropy_chunk_add_", *copies, logits, fixed[0], columns, False, count)
    gradients = [tensor.detach().clone() for tensor in (x, head, bias)]
    yield call("attach_gradients", numbers(()), x, head, bias, *gradients)
    yield call("attach_gradients", numbers(()), x, head, None, *gradients[:2], numbers(0), numbers(()))
