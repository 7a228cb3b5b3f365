"""The operators on DTensors: each rank computes on its local tensors.

DTensor's dispatcher calls ``_run`` in place of an operator. The shapes of ops/names.py say how its tensors are placed:
those of rows beside the rows of the logits or the input, those of classes beside the head. Class weights are gathered.
A rule computes local results. A head's gradient is then the sum over all rows, an input's that over all classes, and
both are placed as their tensors are.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from .._private import private
from ..head import shard
from ..head.float16 import Split
from ..head.loop import HeadSlice
from ..head.products import concatenated
from ..kernels import reductions, reference
from ..kernels.options import Chunking, LossOptions, as_record
from ..ops import transforms
from ..ops.contract import Call, Shape
from ..ops.dtensors import not_of_dtensors, takes_rows
from ..ops.formulas import call_of, run
from ..ops.launch_cache import SignatureCache
from ..ops.library import OPERATORS, Operator, returned
from ..ops.schemas import COMPOSITES
from . import layout
from .layout import Layout
from .parts import all_gather, all_gather_shard_stats, all_reduce, shard_range
from .pipelined import rows_and_gradients

_ops = torch.ops.xent
_HANDLERS: dict[Any, Any] = private(
    "torch.distributed.tensor.DTensor._op_dispatcher._custom_op_handlers", {}, "no losses of DTensors"
)
# Gradients among the results, and their tensors.
_OWNERS = {
    "grad_logits": "logits",
    "grad_input": "input",
    "grad_linear_weight": "linear_weight",
    "grad_linear_bias": "linear_bias",
    "scaled": "grad",
}
_PLANS = SignatureCache()
_world: weakref.ref[Any] | None = None  # the default group of the plans


class _Plan(NamedTuple):
    """What follows from the signature of a call."""

    at: Layout
    arguments: list[tuple[int, tuple[Placement, ...]]]  # position, placements
    results: list[tuple[DTensorSpec, tuple[Placement, ...]]]  # as they are computed, as they are returned


def _plan_of(operator: Operator, call: Call) -> _Plan:
    contract, at = operator.contract, _layout_of(call)
    if not at.is_outside:  # there torch's own operators return tensors of the CPU, for a mesh of GPUs too
        contract.check(call)
    arguments, results = [], []
    for argument in (*contract.tensors, *contract.checked_last):
        value = call[argument.position]
        if value is not None:
            if isinstance(value, DTensor) and value.device_mesh != at.mesh:
                raise ValueError(
                    f"{argument.name} lies on {value.device_mesh} but others on {at.mesh}; all must be on one mesh"
                )
            places = at.replicated if argument.name == "weight" else at.placements(argument.shape, value.dim())
            arguments.append((argument.position, tuple(places)))
    names = [one.name for one in operator.overload._schema.returns]
    for name, (_, shape, _), (sizes, dtype) in zip(names, contract.results, contract.outputs(call), strict=True):
        owner, whole = getattr(call, _OWNERS.get(name, ""), None), not isinstance(shape, Shape) or sizes == (0,)
        places = at.replicated if whole else at.placements(shape, len(sizes))
        if name in _OWNERS and not whole:
            if not shape.rows:
                places = at.of_head(at.partial)
            elif name == "grad_input" and at.vocabulary is not None and not _in_rank_order(at, call):
                places[at.vocabulary] = Partial()
        final = tuple(places) if owner is None or whole else owner.placements
        results.append((at.spec(places, sizes, dtype), final))
    return _Plan(at, arguments, results)


def _layout_of(call: Call) -> Layout:
    if hasattr(call, "linear_weight"):
        return layout.of_head(call.input, call.linear_weight, call.linear_bias)
    if hasattr(call, "logits") or hasattr(call, "grad"):
        return layout.of_logits(call.grad if hasattr(call, "grad") else call.logits)
    rows = call.loss if hasattr(call, "loss") else call.ids
    if not isinstance(rows, DTensor):
        raise TypeError("an argument of an operator is a DTensor but its rows are not; both must be, or neither")
    return layout.of_rows(rows.device_mesh, list(rows.placements), call.primary.shape[:-1])


def _in_rank_order(at: Layout, call: Call) -> bool:
    return at.ranks.for_batches(call.batch_invariant).in_rank_order


def _signature(args: Any, kwargs: Any) -> Any:
    return (
        *[
            (id(arg.device_mesh), arg.placements, arg.shape, arg.dtype)
            if isinstance(arg, DTensor)
            else (arg.shape, arg.dtype, arg.device)
            if isinstance(arg, Tensor)
            else tuple(arg)
            if type(arg) is list
            else arg
            for arg in args
        ],
        *kwargs.items(),
    )


def _keep(signature: Any, plan: _Plan) -> None:
    """A plan holds a mesh, and that its groups: the first plan of a new default group drops those of the one before."""
    global _world
    world = dist.group.WORLD
    if _world is None or _world() is not world:
        _PLANS.clear()
        _world = weakref.ref(world)
    _PLANS.put(signature, plan)


def _run(operator: Operator, overload: Any, args: Any, kwargs: Any) -> Any:
    call = operator.contract.bind(args, kwargs)
    rule = _RULES.get(operator.name)
    if rule is None:
        raise NotImplementedError(not_of_dtensors(f"torch.ops.xent.{operator.name}"))
    if transforms.is_recorded():  # sizes may be symbols
        plan = _plan_of(operator, call)
    else:
        signature = (operator.name, *_signature(args, kwargs))
        known = _PLANS.get(signature)
        plan = known or _plan_of(operator, call)
        if known is None:
            _keep(signature, plan)
    at, mine = plan.at, [*call]
    values: Any
    if at.is_outside:
        values = [at.nothing(spec) for spec, _ in plan.results]
    else:
        for position, places in plan.arguments:
            mine[position] = at.local(mine[position], places)
        values = rule(operator.name, at, operator.bind(*mine))
        values = values if isinstance(values, (tuple, list)) else (values,)
    found = []
    for value, (spec, placements) in zip(values, plan.results, strict=False):  # an in-place form has none
        result = DTensor(value.contiguous(), spec, requires_grad=False)
        found.append(result if spec.placements == placements else result.redistribute(placements=placements))
    return returned(found)


# Rules: from a call of local tensors to local results. The class weights are those of all classes.


def _local(name: str, at: Layout, call: Call) -> Any:
    return run(name, call._asdict())


def _of_rows(name: str, at: Layout, call: Call) -> Any:
    if at.vocabulary is not None:
        raise NotImplementedError(
            f"torch.ops.xent.{name} of DTensors whose classes are split is not supported with these arguments: "
            "redistribute() the logits or the head to Replicate(), or see the functions of xent_ops.distributed"
        )
    return run(name, call._asdict())


def _slice(at: Layout, call: Call) -> dict[str, Any]:
    """This rank's arguments of the operators for a slice of the classes."""
    width = call.logits.shape[-1] if hasattr(call, "logits") else call.linear_weight.shape[0]
    start, number = shard_range(width, at.num_classes, None, at.ranks)
    weight = None if call.weight is None else call.weight[start : start + width]
    return call._asdict() | {"class_start": start, "num_classes": number, "weight": weight}


def _forward(name: str, at: Layout, call: Call) -> Any:
    if at.vocabulary is None or call.with_argmax or getattr(call, "ids", None) is not None:
        return _of_rows(name, at, call)
    values, ranks, target = _slice(at, call), at.ranks.for_batches(call.batch_invariant), call.target
    if name == "linear_cross_entropy_forward":
        values["gathered"] = all_gather(run("linear_cross_entropy_shard", values), ranks)
        values["in_rank_order"] = ranks.in_rank_order
        loss, lse, _, _, entropy, lse_low, at_ids = run("linear_cross_entropy_shard_join", values)
        return loss, lse, target.new_empty(0, dtype=torch.int64), entropy, lse_low, at_ids
    logits, weight, options = call.logits, values["weight"], as_record(call._asdict())["options"]
    shard_range = values["class_start"], values["num_classes"]
    if call.with_entropy:
        flat, rows = logits.flatten(0, -2), target.reshape(-1)
        statistics = shard.rank_statistics(flat, rows, *shard_range, weight, True, options, call.batch_invariant)
        gathered = all_gather(shard.pack_statistics(statistics, shard_range[0], flat.shape[1], weight, True), ranks)
    else:
        flat, rows = logits, target
        gathered = all_gather_shard_stats(logits, target, weight, ranks, shard_range, options)
    join_args = (shard_range, weight, call.with_entropy, options, 0, ranks.in_rank_order)
    joined = shard.join_statistics(gathered, flat, rows, *join_args)
    loss, lse, lse_low = (value.view(target.shape) for value in (joined.loss, joined.lse, joined.lse_low))
    counted, entropy = reference.is_counted(target, options.ignore_index), joined.entropy
    if call.skip_ignored:
        lse = torch.where(counted, lse, float("inf"))
    if call.with_entropy:
        entropy = torch.where(counted, entropy.view(target.shape), 0.0)
    return loss, lse, target.new_empty(0, dtype=torch.int64), entropy, lse_low


def _backward(name: str, at: Layout, call: Call) -> Any:
    if at.vocabulary is None:
        return run(name, call._asdict())
    values = _slice(at, call)
    if call.weight is not None:
        weight, ignore_index = call.weight.to(call.lse.dtype), call.ignore_index
        at_target = reductions.target_weights(call.target, weight, ignore_index, weight.dtype)
        coefficient = torch.lerp(at_target, weight.mean(), call.label_smoothing)
        values["lse_coefficient"] = torch.where(reference.is_counted(call.target, ignore_index), coefficient, 0.0)
    grads = run(name, values)
    return grads if name == "cross_entropy_backward" else _added_up(at, call, grads)


def _added_up(at: Layout, call: Call, grads: Any) -> Any:
    """Gradients of a head. The input's is added up here where the order of the ranks matters."""
    grad_input, *others = grads
    if at.vocabulary is not None and call.output_mask[0] and _in_rank_order(at, call):
        grad_input = all_reduce(grad_input.flatten(0, -2), at.ranks, in_rank_order=True).view(grad_input.shape)
    return grad_input, *others


def _reduced(name: str, at: Layout, call: Call) -> Any:
    if at.vocabulary is None and not at.row_ranks:
        return run(name, call._asdict())
    values = call._asdict() | {"skip_ignored": True}
    loss, lse, _, _, lse_low = _forward("cross_entropy_forward", at, call_of("cross_entropy_forward", values))
    value, divisors, *_ = _summary("row_summary", at, call_of("row_summary", values | {"loss": loss, "lse": lse}))
    return value, divisors, lse, lse_low


def _summary(name: str, at: Layout, call: Call) -> Any:
    """``row_summary`` of the rows of all ranks, with one all-reduce."""
    if not at.row_ranks:
        return run(name, call._asdict())
    if call.argmax is not None:
        raise NotImplementedError(f"torch.ops.xent.{name} of DTensors whose rows are split takes no argmax")
    updates = {"reduction": "sum", "divisors": None, "argmax": call.target}  # the z-loss is returned with an argmax
    value, divisors, z_loss, _ = run(name, call._asdict() | updates)
    numbers = at.total(torch.stack([value - z_loss, z_loss, *divisors]))
    loss, z_loss, made, empty = numbers[0], numbers[1], numbers[2:], value.new_empty(0)
    if call.reduction == "mean":
        by = made if call.divisors is None else call.divisors
        loss, z_loss = loss / by[0], z_loss / by[1]
    return loss + z_loss, made if call.divisors is None else empty, empty, empty


def _head_with_grad(name: str, at: Layout, call: Call) -> Any:
    """The open loop: three products, with the divisors of all ranks' rows."""
    if call.with_argmax or call.with_entropy or takes_rows(call.input.dtype, call.skip_ignored, call.products):
        raise NotImplementedError(
            f"torch.ops.xent.{name} of DTensors has no argmax, entropy, skip_ignored or products, and no float16"
        )
    values, target, token_weight = _slice(at, call), call.target, call.token_weight
    loss = LossOptions(as_record(call._asdict())["options"], call.lse_square_scale, call.reduction)
    dtype = reference.accumulator(call.input)
    divisors = reductions.divisors_of(target, call.weight, token_weight, call.divisor, loss, dtype)
    divisors = at.total(divisors) if call.reduction == "mean" else divisors
    chunking = Chunking(**{field: values[field] for field in Chunking._fields})
    head_args = (values["weight"], (values["class_start"], at.num_classes), call.accumulate_dtype, chunking)
    head = HeadSlice(call.linear_weight, call.linear_bias, *head_args)
    loop_args = (at.ranks.for_batches(call.batch_invariant), Split(divisors, token_weight), call.output_mask)
    row_args = (call.input, target, token_weight, head, loss)
    rows, _, gradients = rows_and_gradients(*row_args, *loop_args, sum_over_ranks=False)
    row_loss, lse, _ = (concatenated(values)[: target.numel()].view(target.shape) for values in zip(*rows, strict=True))
    reduced = reductions.reduce_rows(row_loss, lse, target, divisors, loss._replace(reduction="mean"), token_weight)
    empty, no_argmax = row_loss.new_empty(0), target.new_empty(0, dtype=torch.int64)
    value = at.total(reduced.value)
    if transforms.is_recorded():  # else a partitioner computes the gradients in the backward, and keeps all logits
        value = _ops.attach_gradients(value, call.input, call.linear_weight, call.linear_bias, *gradients)
    return value, divisors, empty, empty, row_loss, lse, no_argmax, empty, *_added_up(at, call, gradients)


_RULES: dict[str, Callable[[str, Layout, Call], Any]] = {
    "cross_entropy_forward": _forward,
    "cross_entropy_backward": _backward,
    "cross_entropy_reduced": _reduced,
    "row_summary": _summary,
    "row_targets": _local,
    "token_logits": _of_rows,
    "token_logits_backward": _of_rows,
    "linear_cross_entropy_forward": _forward,
    "linear_cross_entropy_backward": _backward,
    "linear_cross_entropy_with_grad": _head_with_grad,
    "linear_scale_grad": _local,
    "scale_grad_": _local,
}
for _operator in OPERATORS.values():
    _HANDLERS[_operator.overload] = functools.partial(_run, _operator)
for _name in COMPOSITES:  # in inference mode
    _HANDLERS[getattr(_ops, _name).default] = lambda overload, args, kwargs: overload.decompose(*args, **kwargs)
