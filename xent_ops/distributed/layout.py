"""Where the rows and the classes of DTensors lie: one dimension of a mesh may split the rows, or the classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from ..linear_call import LinearCall
from ..ops import transforms
from ..ops.contract import Shape
from ..ops.dtensors import is_dtensor, refuse_beside_plain
from .groups import Ranks, ranks_of
from .parts import all_reduce, share_of_rank

_CLASSES = ("V", "columns")  # the names of their number in ops/names.py


class Layout(NamedTuple):
    mesh: DeviceMesh
    rows: list[Placement]  # of one number a row
    shape: torch.Size  # of all rows
    row_ranks: dict[int, Ranks]  # by dimension of the mesh: those that have other rows
    vocabulary: int | None  # the dimension of the mesh that splits the classes
    ranks: Ranks  # that share the vocabulary
    num_classes: int

    @property
    def replicated(self) -> list[Placement]:
        return [Replicate()] * self.mesh.ndim

    @property
    def partial(self) -> list[Placement]:
        """Of a sum over this rank's rows."""
        return [Partial() if isinstance(row, Shard) else Replicate() for row in self.rows]

    def local_shape(self) -> torch.Size:
        """Of this rank's rows."""
        sizes = list(self.shape)
        for mesh_dim, ranks in self.row_ranks.items():
            dim = self.rows[mesh_dim].dim  # type: ignore[attr-defined]
            sizes[dim] = share_of_rank(sizes[dim], ranks.rank, ranks.world)[1]
        return torch.Size(sizes)

    def of_head(self, rows: Sequence[Placement]) -> list[Placement]:
        """Of a tensor whose first dimension are the classes, where no rank splits them: ``rows``."""
        return [Shard(0) if dim == self.vocabulary else place for dim, place in enumerate(rows)]

    def placements(self, shape: Shape, dims: int) -> list[Placement]:
        """Of a tensor with this row in ops/names.py and so many dimensions."""
        first = len(shape.before)
        has_rows = shape.rows and dims == first + len(self.shape) + len(shape.behind)  # else one number for all rows
        found: list[Placement] = [
            Shard(first + row.dim) if has_rows and isinstance(row, Shard) else Replicate() for row in self.rows
        ]
        if self.vocabulary is not None:
            for axis, size in enumerate(shape.behind, dims - len(shape.behind)):
                if size in _CLASSES:
                    found[self.vocabulary] = Shard(axis)
        return found

    def local(self, value: Any, placements: tuple[Placement, ...]) -> Tensor:
        """This rank's part. A plain tensor has all of it, on every rank."""
        if not isinstance(value, DTensor):
            value = DTensor.from_local(value, self.mesh, self.replicated, run_check=False)
        if value.placements != placements:
            value = value.detach().redistribute(placements=placements)
        return value._local_tensor

    @property
    def is_outside(self) -> bool:
        """Is this rank none of the mesh? Then it computes nothing, as with DTensor's own operators."""
        return self.mesh.get_coordinate() is None

    def nothing(self, spec: DTensorSpec) -> Tensor:
        """What DTensor gives a rank outside of the mesh as its local tensor."""
        assert spec.tensor_meta is not None
        size = () if len(spec.tensor_meta.shape) == 0 else (0,)
        return torch.zeros(size, dtype=spec.tensor_meta.dtype, device=self.mesh.device_type)

    def spec(self, placements: Sequence[Placement], shape: Sequence[int], dtype: torch.dtype) -> DTensorSpec:
        """Of a contiguous tensor."""
        stride, strides = 1, []
        for size in reversed(shape):
            strides.append(stride)
            stride = stride * size
        meta = TensorMeta(torch.Size(shape), tuple(reversed(strides)), dtype)
        return DTensorSpec(self.mesh, tuple(placements), tensor_meta=meta)

    def total(self, numbers: Tensor) -> Tensor:
        """The sum over the ranks that have other rows."""
        for ranks in self.row_ranks.values():
            numbers = all_reduce(numbers, ranks)
        return numbers

    def whole(self, weight: Tensor | None) -> Tensor | None:
        """Class weights as a DTensor of which each rank has all. A plain tensor has all."""
        if weight is None:
            return None
        if not isinstance(weight, DTensor):
            return DTensor.from_local(weight, self.mesh, self.replicated, run_check=False)
        return (
            weight if weight.placements == tuple(self.replicated) else weight.redistribute(placements=self.replicated)
        )

    def beside(self, target: Tensor, *others: Any) -> list[Any]:
        """The target, and tensors whose leading dimensions are the target's, as DTensors beside the rows.

        A plain tensor has this rank's rows, or all rows on every rank. One that fits neither is refused later.
        """
        transforms.refuse("a loss of DTensors")
        if target.dtype.is_floating_point:
            raise TypeError("DTensor logits take class indices as the target, not class probabilities")
        local_shape = self.local_shape()
        return [self._beside(row, local_shape) for row in (target, *others)]

    def _beside(self, row: Any, local_shape: torch.Size) -> Any:
        if not isinstance(row, Tensor):
            return row
        mesh, rows, front, behind = self.mesh, self.rows, row.shape[: len(self.shape)], row.shape[len(self.shape) :]
        if isinstance(row, DTensor):
            if front != self.shape or row.device_mesh != mesh or row.placements == tuple(rows):
                return row
            return row.redistribute(mesh, rows).clone()  # nothing would see a write to the whole
        if front == local_shape:
            shape = torch.Size([*self.shape, *behind])
            stride = torch.empty(shape, device="meta").stride()
            return DTensor.from_local(row.contiguous(), mesh, rows, run_check=False, shape=shape, stride=stride)
        if front == self.shape:  # a slice of it: no communication
            return DTensor.from_local(row, mesh, self.replicated, run_check=False).redistribute(mesh, rows)
        return row


def of_rows(
    mesh: DeviceMesh, rows: list[Placement], shape: torch.Size, split: Sequence[int] = (), num_classes: int = 1
) -> Layout:
    """``split``: the dimensions of the mesh that split the classes."""
    split = [dim for dim in split if mesh.size(dim) > 1]
    if len(split) > 1:
        raise ValueError(f"the classes are split over dimensions {split} of the mesh; at most one is supported")
    vocabulary = split[0] if len(split) > 0 else None
    if mesh.get_coordinate() is None:  # the mesh has no groups on this rank
        return Layout(mesh, rows, shape, {}, vocabulary, Ranks("", 0, 1), num_classes)
    row_ranks = {dim: ranks_of(mesh.get_group(dim)) for dim, row in enumerate(rows) if isinstance(row, Shard)}
    ranks = Ranks("", 0, 1) if vocabulary is None else ranks_of(mesh.get_group(vocabulary))
    return Layout(mesh, rows, shape, row_ranks, vocabulary, ranks, num_classes)


def of_logits(logits: Tensor) -> Layout:
    """Of logits (..., V)."""
    if not isinstance(logits, DTensor):
        raise TypeError("an argument of an operator is a DTensor but its logits are not; both must be, or neither")
    last, rows, split = logits.dim() - 1, [], []
    for mesh_dim, placement in enumerate(logits.placements):
        if not _is_valid(placement):
            raise ValueError(
                f"DTensor logits are placed as {logits.placements}; valid are Replicate() and Shard(dimension). "
                "redistribute() them first"
            )
        splits_classes = isinstance(placement, Shard) and placement.dim % logits.dim() == last
        if splits_classes:
            split.append(mesh_dim)
        rows.append(Replicate() if splits_classes else placement)
    return of_rows(logits.device_mesh, rows, logits.shape[:-1], split, logits.shape[-1])


def of_head(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None) -> Layout:
    """Of an input (..., H) and a head. Rows are gathered where ranks split the classes."""
    mesh = _mesh_of(input, linear_weight, linear_bias)
    assert isinstance(input, DTensor) and isinstance(linear_weight, DTensor)
    split: list[int] = []
    for mesh_dim, placement in enumerate(linear_weight.placements):
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, Shard) or not _is_valid(placement) or placement.dim % 2 != 0:
            raise ValueError(
                f"linear_weight is placed as {linear_weight.placements}; valid are Replicate() and Shard(0), which "
                "splits the classes: redistribute() it first"
            )
        split.append(mesh_dim)
    features = input.dim() - 1
    for placement in input.placements:
        if not _is_valid(placement) or (isinstance(placement, Shard) and placement.dim % input.dim() == features):
            raise ValueError(
                f"input is placed as {input.placements}; valid are Replicate() and Shard(dimension), for one of "
                f"the dimensions 0 to {features - 1}, which split the rows: redistribute() it first"
            )
    rows = [Replicate() if dim in split else placement for dim, placement in enumerate(input.placements)]
    return of_rows(mesh, rows, input.shape[:-1], split, linear_weight.shape[0])


def placed(call: LinearCall) -> LinearCall:
    """A call that has DTensors. Beside a DTensor input, targets and weights are DTensors too."""
    head = call.head
    if not is_dtensor(call.input, head.weight, head.bias):
        others = {"target": call.target, "token_weight": call.token_weight, "divisor": call.divisor}
        refuse_beside_plain("input and linear_weight are", weight=head.class_weight, **others)
    at = of_head(call.input, head.weight, head.bias)
    target, token_weight, ids = at.beside(call.target, call.token_weight, call.ids)
    head = head._replace(class_weight=at.whole(head.class_weight))
    return call._replace(target=target, head=head, token_weight=token_weight, ids=ids)


def _is_valid(placement: Placement) -> bool:
    # isinstance, because Dynamo of torch 2.11 cannot trace `type(placement) is Shard`.
    return isinstance(placement, (Replicate, Shard)) and not isinstance(placement, _StridedShard)


def _mesh_of(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None) -> DeviceMesh:
    for name, value in (("input", input), ("linear_weight", linear_weight), ("linear_bias", linear_bias)):
        if value is None:
            continue
        if not isinstance(value, DTensor):
            raise TypeError(
                f"{name} is a plain tensor but another argument a DTensor: input, linear_weight and linear_bias must "
                "all be DTensors, or none of them. With FSDP2 (fully_shard) parameters are plain inside of the forward "
                "of the module that owns them: call the loss there, as xent_ops.LinearCrossEntropyLoss does. With "
                f"tensor parallelism, where every rank holds the same {name}, DTensor.from_local({name}, mesh, "
                "[Replicate()]) makes a DTensor of it"
            )
        assert isinstance(input, DTensor)
        if value.device_mesh != input.device_mesh:
            raise ValueError(
                f"{name} lies on {value.device_mesh} but input on {input.device_mesh}; both must be on one mesh"
            )
    assert isinstance(input, DTensor)
    return input.device_mesh
