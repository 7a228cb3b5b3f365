"""``xent_ops.linear_cross_entropy`` of DTensors: each rank computes on its local tensors.

A dimension of the mesh may split the classes of the head (Shard(0), as in linear.py) or the rows of the input. If it
splits both, as after SequenceParallel and ColwiseParallel, the input is gathered first. Every gradient gets the
placement of its tensor. DTensor's own redistribution adds up gradients that are parts of a sum.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ..kernels.reference import accumulator
from ..linear_call import LinearCall
from ..ops import checks, transforms
from ..ops.linear import checks as linear_checks
from ..token_function import TokenFunction, loss_by_chunks
from ..user_function import Function
from . import pipelined, sharded_rows, tensor
from .groups import Ranks, ranks_of
from .parts import first_class


class _Local(NamedTuple):
    """The tensors and the layout that this rank computes with."""

    call: LinearCall
    ranks: Ranks  # the ranks that share the vocabulary
    mesh: DeviceMesh
    rows: list[Placement]  # the rows' placement on each dimension of the mesh
    shape: torch.Size  # the shape of all rows

    @property
    def has_all_rows(self) -> bool:
        return not any(isinstance(placement, Shard) for placement in self.rows)

    def row(self, value: Any) -> Any:
        """This rank's part of a tensor whose leading dimensions are the target's."""
        return tensor.local_row_of(value, self.shape, self.call.input.shape[:-1], self.mesh, self.rows)


def _local_of(call: LinearCall) -> _Local:
    """The local part of a call of DTensors."""
    if call.head.chunking.batch_invariant:
        raise NotImplementedError(
            "batch_invariant=True of DTensors is not supported: pass local tensors, those of a head that is split over "
            "ranks to xent_ops.distributed"
        )
    input, (linear_weight, linear_bias, weight, *_) = call.input, call.head
    mesh = _mesh_of(input, linear_weight, linear_bias)
    assert isinstance(input, DTensor) and isinstance(linear_weight, DTensor)
    vocabulary = _vocabulary_dimension(linear_weight)
    rows = _rows(input, vocabulary)
    linear_checks.head(input, linear_weight, linear_bias, call.head.accumulate_dtype, call.head.chunking)
    head_placements: list[Placement] = [Replicate()] * mesh.ndim
    head_grads: list[Placement] = [Partial() if isinstance(placement, Shard) else Replicate() for placement in rows]
    input_grads = list(rows)
    if vocabulary is not None:
        head_placements[vocabulary], head_grads[vocabulary], input_grads[vocabulary] = Shard(0), Shard(0), Partial()
    x = _local(input, mesh, rows, input_grads)
    w = _local(linear_weight, mesh, head_placements, head_grads)
    b = None if linear_bias is None else _local(linear_bias, mesh, head_placements, head_grads)
    target = tensor.local_target_of(call.target, input.shape[:-1], x.shape[:-1], mesh, rows)
    ranks = Ranks("", 0, 1) if vocabulary is None else ranks_of(mesh.get_group(vocabulary))
    num_classes, width = linear_weight.shape[0], w.shape[0]
    class_weight = tensor.local_weight_of(weight, num_classes, width, mesh, vocabulary, ranks)
    shard_range = first_class(width, None, num_classes, ranks), num_classes
    head = call.head._replace(weight=w, bias=b, class_weight=class_weight, shard_range=shard_range)
    call = call._replace(target=target, input=x, head=head).in_autocast_dtype()
    local = _Local(call, ranks, mesh, rows, input.shape[:-1])
    token_weight = local.row(call.token_weight)
    checks.token_weight(token_weight, target)
    three_products = pipelined.is_pipelined(None, call.input, call.head, call.loss)
    return local._replace(call=call._replace(token_weight=token_weight, pipelined=three_products))


def cross_entropy(call: LinearCall) -> DTensor:
    """``xent_ops.linear_cross_entropy`` of DTensors."""
    transforms.refuse("xent_ops.linear_cross_entropy of DTensors")
    local = _local_of(call)
    mine, ranks, mesh, rows, shape = local
    target, divisor, replicated = mine.target, mine.divisor, _replicated(mesh)
    if local.has_all_rows and mine.pipelined:
        total, _ = pipelined.loss(mine, target, mine.token_weight, ranks, sum_grad_input=False)
        return tensor.from_local(total, mesh, replicated, ())  # the gradients exist already
    outputs, _ = sharded_rows.sharded_rows(mine.input, target, mine.head, ranks, mine.loss, sum_grad_input=False)
    read = _read(call, mine)
    value = tensor.reduced(outputs, target, shape, mesh, rows, mine.loss, read, mine.token_weight)
    if divisor is None:
        return value
    divide = DTensor.from_local(divisor.to(value.dtype), mesh, replicated, run_check=False)
    divided_value: Any = value / divide
    return divided_value


def token_loss(call: LinearCall, fn: Function, rows: Any, check: bool) -> DTensor:
    """``xent_ops.linear_token_loss`` of DTensors."""
    transforms.refuse("xent_ops.linear_token_loss of DTensors")
    local = _local_of(call)
    mine, ranks, mesh, placements, _ = local
    # Each rank has the sum of its rows.
    partial: list[Placement] = [Partial() if isinstance(placement, Shard) else Replicate() for placement in placements]
    mine = mine.as_sum()
    if call.loss.reduction == "mean" and not local.has_all_rows and mine.divisor is not None:
        counted = DTensor.from_local(mine.divisor, mesh, partial, run_check=False)
        mine = mine._replace(divisor=counted.redistribute(mesh, _replicated(mesh)).to_local())
    if isinstance(rows, (tuple, list)):  # TokenFunction refuses other types
        rows = tuple(map(local.row, rows))
    learned, ignore_index = (mine.input, mine.head.weight, mine.head.bias), mine.loss.row_options.ignore_index
    function = TokenFunction(fn, rows, mine.target, ignore_index, accumulator(mine.input), learned=learned)

    def statistics() -> tuple[Tensor, Tensor, Tensor]:
        args = (mine.input, mine.target, mine.head, ranks, mine.loss)
        values, entropy = sharded_rows.sharded_rows(*args, sum_grad_input=False, with_entropy=function.reads_entropy)
        return values.loss, values.lse, entropy

    if check:
        with torch.no_grad():
            function.check(*statistics(), mine.target)
    read: tuple[DTensor, ...] = ()
    if mine.pipelined and mine.input.dtype != torch.float16:
        total = loss_by_chunks(mine, mine.target, function, pipelined.Collectives(ranks), sum_over_ranks=False)
    else:
        total = function.sum(function.all_values(*statistics(), mine.target), mine.target, mine.divisor)
        read = _read(call, mine)
    value = tensor.from_local(total, mesh, partial, read)
    return value if local.has_all_rows else value.redistribute(mesh, _replicated(mesh))


def _replicated(mesh: DeviceMesh) -> list[Placement]:
    return [Replicate()] * mesh.ndim


def _read(call: LinearCall, mine: LinearCall) -> tuple[DTensor, ...]:
    """The DTensors that the backward reads."""
    head_pairs = zip(call.head[:3], mine.head[:3], strict=True)
    return tensor.owners((call.input, mine.input), (call.target, mine.target), *head_pairs)


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
    split_dims = []
    for mesh_dim, placement in enumerate(linear_weight.placements):
        if isinstance(placement, Replicate):
            continue
        if isinstance(placement, _StridedShard) or not isinstance(placement, Shard) or placement.dim % 2 != 0:
            raise ValueError(
                f"linear_weight is placed as {linear_weight.placements}; valid are Replicate() and Shard(0), which "
                "splits the classes: redistribute() it first"
            )
        split_dims.append(mesh_dim)
    if len(split_dims) > 1:
        raise ValueError(f"the classes are split over dimensions {split_dims} of the mesh; at most one is supported")
    return split_dims[0] if split_dims else None


def _rows(input: DTensor, vocabulary: int | None) -> list[Placement]:
    """The placements of the rows that this rank computes: the input's, gathered where ranks split the classes."""
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


def _local(value: Tensor, mesh: DeviceMesh, placements: list[Placement], grad_placements: list[Placement]) -> Tensor:
    """The local tensor of a DTensor in these placements. Its gradient returns in ``grad_placements``."""
    assert isinstance(value, DTensor)
    return value.redistribute(mesh, placements).to_local(grad_placements=grad_placements)
