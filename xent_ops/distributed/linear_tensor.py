"""``xent_ops.linear_cross_entropy`` of DTensors: each rank computes on its local tensors.

A dimension of the mesh may split the classes of the head, Shard(0), which linear.py serves, or the rows of the input.
Where it does both, as SequenceParallel and ColwiseParallel leave them, the input is gathered first. The gradients are
placed as the tensors are: DTensor's own redistribution sums them where they are parts of a sum.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ..head.loop import HeadSlice
from ..kernels.options import LossOptions
from ..kernels.reference import accumulator
from ..ops import arguments, checks, transforms
from ..ops.linear import checks as linear_checks
from ..ops.linear import composite
from ..token_function import Function, TokenFunction, divided, of_chunks
from . import pipelined, sharded_rows, tensor
from .groups import Ranks, ranks_of
from .parts import first_class


class _Local(NamedTuple):
    """What this rank computes with."""

    input: Tensor
    target: Tensor
    head: HeadSlice
    ranks: Ranks  # that share the vocabulary
    mesh: DeviceMesh
    rows: list[Placement]  # of the rows among the dimensions of the mesh

    @property
    def has_all_rows(self) -> bool:
        return not any(isinstance(placement, Shard) for placement in self.rows)


def _local_of(input: Tensor, target: Tensor, head: tuple[Any, ...]) -> _Local:
    """``head``: linear_weight, linear_bias, class weight, and the arguments of ``arguments.chunks``."""
    linear_weight, linear_bias, weight, *chunks = head
    mesh = _mesh_of(input, linear_weight, linear_bias)
    assert isinstance(input, DTensor) and isinstance(linear_weight, DTensor)
    accumulate_dtype, how = arguments.chunks(*chunks)
    checks.weight_without_grad(weight)
    vocabulary = _vocabulary_dimension(linear_weight)
    rows = _rows(input, vocabulary)
    linear_checks.head(input, linear_weight, linear_bias, accumulate_dtype, how)
    placements: list[Placement] = [Replicate()] * mesh.ndim
    of_head: list[Placement] = [Partial() if isinstance(placement, Shard) else Replicate() for placement in rows]
    of_input = list(rows)
    if vocabulary is not None:
        placements[vocabulary], of_head[vocabulary], of_input[vocabulary] = Shard(0), Shard(0), Partial()
    x, w, b = composite.cast_for_autocast(
        _local(input, mesh, rows, of_input),
        _local(linear_weight, mesh, placements, of_head),
        None if linear_bias is None else _local(linear_bias, mesh, placements, of_head),
    )
    local_target = tensor.local_target_of(target, input.shape[:-1], x.shape[:-1], mesh, rows)
    ranks = Ranks("", 0, 1) if vocabulary is None else ranks_of(mesh.get_group(vocabulary))
    num_classes, width = linear_weight.shape[0], w.shape[0]
    class_weight = tensor.local_weight_of(weight, num_classes, width, mesh, vocabulary, ranks)
    shard_range = first_class(width, None, num_classes, ranks), num_classes
    return _Local(x, local_target, HeadSlice(w, b, class_weight, shard_range, accumulate_dtype, how), ranks, mesh, rows)


def _divisor_of(divisor: Any, input: Tensor, reduction: str) -> Tensor | None:
    assert isinstance(input, DTensor)
    divisor = arguments.divisor(divisor, input)
    linear_checks.reduced_by(divisor, input.to_local(), reduction)
    return divisor


def linear_cross_entropy(
    input: Tensor,
    target: Tensor,
    head: tuple[Any, ...],
    loss: LossOptions,
    divisor: Any,
    token_weight: Tensor | None = None,
) -> DTensor:
    """Arguments are those of ``xent_ops.linear_cross_entropy``, at least one of them a DTensor.

    ``head``: as of ``_local_of``.
    """
    transforms.refuse("xent_ops.linear_cross_entropy of DTensors")
    local = _local_of(input, target, head)
    x, local_target, mine, ranks, mesh, rows = local
    divisor, replicated = _divisor_of(divisor, input, loss.reduction), _replicated(mesh)
    of_tokens = tensor.local_row_of(token_weight, input.shape[:-1], x.shape[:-1], mesh, rows)
    checks.token_weight(of_tokens, local_target)
    if local.has_all_rows and pipelined.chosen(None, x, mine, loss):
        of = (x, local_target, mine, ranks, loss, divisor)
        total = pipelined.loss(*of, scattered=False, sum_grad_input=False, token_weight=of_tokens)
        return tensor.from_local(total, mesh, replicated, ())  # the gradients are there
    outputs, _ = sharded_rows.sharded_rows(x, local_target, mine, ranks, loss, sum_grad_input=False)
    read = _read(input, target, head, local)
    value = tensor.reduced(outputs, local_target, input.shape[:-1], mesh, rows, loss, read, of_tokens)
    if divisor is None:
        return value
    divide = DTensor.from_local(divisor.to(value.dtype), mesh, replicated, run_check=False)
    divided_value: Any = value / divide
    return divided_value


def linear_token_loss(
    input: Tensor,
    target: Tensor,
    fn: Function,
    rows: Any,
    head: tuple[Any, ...],
    loss: LossOptions,
    divisor: Any,
    check: bool,
) -> DTensor:
    """Arguments are those of ``xent_ops.linear_token_loss``, at least one of them a DTensor."""
    transforms.refuse("xent_ops.linear_token_loss of DTensors")
    local = _local_of(input, target, head)
    x, local_target, mine, ranks, mesh, placements = local
    divisor = _divisor_of(divisor, input, "sum")
    if isinstance(rows, (tuple, list)):  # else it is refused
        rows = tuple(tensor.local_row_of(row, input.shape[:-1], x.shape[:-1], mesh, placements) for row in rows)
    function = TokenFunction(fn, rows, local_target, loss.rows.ignore_index, accumulator(x))

    def statistics() -> tuple[Tensor, Tensor, Tensor]:
        made, entropy = sharded_rows.sharded_rows(
            x, local_target, mine, ranks, loss, sum_grad_input=False, with_entropy=function.reads_entropy
        )
        return made.loss, made.lse, entropy

    if check:
        with torch.no_grad():
            function.check(*statistics(), local_target)
    read: tuple[DTensor, ...] = ()
    if pipelined.chosen(None, x, mine, loss):
        total = of_chunks(function, x, local_target, mine, loss, divisor, pipelined.Collectives(ranks), summed=False)
    else:
        total = divided(function.of_all(*statistics(), local_target), divisor)
        read = _read(input, target, head, local)
    # Each rank has the sum of its rows.
    partial: list[Placement] = [Partial() if isinstance(placement, Shard) else Replicate() for placement in placements]
    value = tensor.from_local(total, mesh, partial, read)
    return value if local.has_all_rows else value.redistribute(mesh, _replicated(mesh))


def _replicated(mesh: DeviceMesh) -> list[Placement]:
    return [Replicate()] * mesh.ndim


def _read(input: Tensor, target: Tensor, head: tuple[Any, ...], local: _Local) -> tuple[DTensor, ...]:
    """What the backward reads."""
    weight, bias, class_weight, *_ = head
    mine = local.head
    of_head = (weight, mine.weight), (bias, mine.bias), (class_weight, mine.class_weight)
    return tensor.owners((input, local.input), (target, local.target), *of_head)


def _mesh_of(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None) -> DeviceMesh:
    for name, value in (("input", input), ("linear_weight", linear_weight), ("linear_bias", linear_bias)):
        if value is not None and not isinstance(value, DTensor):
            raise TypeError(
                f"{name} is a plain tensor but another argument a DTensor: input, linear_weight and linear_bias must "
                "all be DTensors, or none of them. With FSDP2 (fully_shard) parameters are plain inside of the forward "
                "of the module that owns them: call the loss there, as xent_ops.LinearCrossEntropyLoss does. With "
                f"tensor parallelism, where every rank holds the same {name}, DTensor.from_local({name}, mesh, "
                "[Replicate()]) makes a DTensor of it"
            )
    assert isinstance(input, DTensor) and isinstance(linear_weight, DTensor)
    for name, value in (("linear_weight", linear_weight), ("linear_bias", linear_bias)):
        if isinstance(value, DTensor) and value.device_mesh != input.device_mesh:
            raise ValueError(
                f"{name} lies on {value.device_mesh} but input on {input.device_mesh}; both must be on one mesh"
            )
    return input.device_mesh


def _vocabulary_dimension(linear_weight: DTensor) -> int | None:
    """The mesh dimension that splits the classes, if any."""
    found = []
    for mesh_dim, placement in enumerate(linear_weight.placements):
        if isinstance(placement, Replicate):
            continue
        if isinstance(placement, _StridedShard) or not isinstance(placement, Shard) or placement.dim % 2 != 0:
            raise ValueError(
                f"linear_weight is placed as {linear_weight.placements}; valid are Replicate() and Shard(0), which "
                "splits the classes: redistribute() it first"
            )
        found.append(mesh_dim)
    if len(found) > 1:
        raise ValueError(f"the classes are split over dimensions {found} of the mesh; at most one is supported")
    return found[0] if found else None


def _rows(input: DTensor, vocabulary: int | None) -> list[Placement]:
    """The placements of the rows that this rank computes: those of the input, gathered where the classes are split."""
    features = input.dim() - 1
    rows: list[Placement] = []
    for mesh_dim, placement in enumerate(input.placements):
        plain = isinstance(placement, (Replicate, Shard)) and not isinstance(placement, _StridedShard)
        if not plain or (isinstance(placement, Shard) and placement.dim % input.dim() == features):
            raise ValueError(
                f"input is placed as {input.placements}; valid are Replicate() and Shard(dimension), for one of "
                f"the dimensions 0 to {features - 1}, which split the rows: redistribute() it first"
            )
        rows.append(Replicate() if mesh_dim == vocabulary else placement)
    return rows


def _local(value: Tensor, mesh: DeviceMesh, placements: list[Placement], of_gradient: list[Placement]) -> Tensor:
    """The local tensor of a DTensor in these placements. Its gradient comes back placed as the DTensor is."""
    assert isinstance(value, DTensor)
    return value.redistribute(mesh, placements).to_local(grad_placements=of_gradient)
