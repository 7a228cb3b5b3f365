"""``xent_ops.cross_entropy`` of DTensor logits: each rank computes on its local tensor.

If rows are sharded, each rank computes the losses of its rows without communication; "mean" and "sum" then add up to
four numbers over the ranks that hold different rows. If classes are sharded, vocab_parallel.py serves that dimension of
the mesh; the logits are never gathered. A mesh of several dimensions may have both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from ..kernels.options import LossOptions
from ..kernels.reductions import counted_weights, reduce_rows, times, z_losses
from ..kernels.reference import is_counted
from ..kernels.rows import dense_classes
from ..ops import arguments, checks, transforms
from ..ops.second_order import no_second_derivative
from . import vocab_parallel
from .function import gradient, loss_and_saved
from .groups import Ranks, ranks_of
from .parts import first_class, share_of_rank


def cross_entropy(
    input: Tensor,  # a DTensor
    target: Tensor,
    weight: Tensor | None,
    loss: LossOptions,
    dim: int,
    token_weight: Tensor | None = None,
) -> DTensor:
    """Arguments are those of ``xent_ops.cross_entropy``. Tensors of the target's shape may be plain tensors."""
    assert isinstance(input, DTensor)
    transforms.refuse("xent_ops.cross_entropy of DTensors")
    classes_dim = arguments.class_dimension("input", input, dim)
    mesh = input.device_mesh
    vocabulary, rows = _split(input, classes_dim)
    num_classes = input.shape[classes_dim]
    each_has_all_rows = not any(placement.is_shard() for placement in rows)  # and so the whole loss
    one_node = (
        each_has_all_rows
        and token_weight is None
        and input.requires_grad
        and torch.is_grad_enabled()
        and not transforms.is_traced()
        and classes_dim == input.dim() - 1
        and input.is_contiguous()
    )
    local = dense_classes(input._local_tensor if one_node else input.to_local().movedim(classes_dim, -1))
    shape = torch.Size([*input.shape[:classes_dim], *input.shape[classes_dim + 1 :]])
    if isinstance(target, DTensor) or target.shape != local.shape[:-1]:  # otherwise it holds this rank's rows
        arguments.suggest_dim(input, target, dim)
    local_target = local_target_of(target, shape, local.shape[:-1], mesh, rows)
    local_factors = local_row_of(token_weight, shape, local.shape[:-1], mesh, rows)
    checks.token_weight(local_factors, local_target)
    ranks = Ranks("", 0, 1) if vocabulary is None else ranks_of(mesh.get_group(vocabulary))
    local_weight = local_weight_of(weight, num_classes, local.shape[-1], mesh, vocabulary, ranks)
    shard_range = first_class(local.shape[-1], None, num_classes, ranks), num_classes
    read = owners((target, local_target), (weight, local_weight))
    if each_has_all_rows:
        checks.weight_without_grad(local_weight)
        if one_node:
            return apply(input, local, local_target, local_weight, ranks, shard_range, loss, read)
        value = vocab_parallel.loss_of_shard(local, local_target, local_weight, ranks, shard_range, loss, local_factors)
        return from_local(value, mesh, rows, (*owners((input, local)), *read))
    outputs = vocab_parallel.sharded_rows(local, local_target, local_weight, ranks, shard_range, loss.row_options)
    return reduced(outputs, local_target, shape, mesh, rows, loss, (*owners((input, local)), *read), local_factors)


def owners(*pairs: tuple[Tensor | None, Tensor | None]) -> tuple[DTensor, ...]:
    """The first tensor of each pair, if it is a DTensor that shares its memory with the second.

    A backward reads this memory. A write in place to a DTensor does not change the version of its local tensor, and
    vice versa. So a node saves both, and autograd raises after either write.
    """
    if transforms.is_traced():
        return ()
    return tuple(
        dtensor
        for dtensor, local in pairs
        if isinstance(dtensor, DTensor)
        and local is not None
        and dtensor._local_tensor.untyped_storage()._cdata == local.untyped_storage()._cdata
    )


class DTensorFunction(torch.autograd.Function):
    """The node of function.py from DTensor to DTensor.

    ``to_local`` and ``from_local`` would be separate nodes. They would cost the host more than the loss itself
    (docs/lab/2026-11-host-time.md). So this node creates the DTensors. The gradient has the layout of the logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: DTensor,  # contiguous, classes last
        local: Tensor,  # this rank's tensor, without a graph
        target: Tensor,
        weight: Tensor | None,
        ranks: Ranks,
        shard_range: tuple[int, int],
        loss: LossOptions,
        read: tuple[DTensor, ...],  # owners of target and weight
    ) -> DTensor:
        value, saved = loss_and_saved(local, target, weight, ranks, shard_range, loss)
        ctx.save_for_backward(*read, logits, *saved)
        ctx.call = shard_range, loss
        ctx.owners = len(read)
        ctx.set_materialize_grads(False)  # the zeros would be a plain tensor
        mesh = logits.device_mesh
        meta = TensorMeta(value.shape, value.stride(), value.dtype)
        spec = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta)
        return DTensor(value, spec, requires_grad=False)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 8
        _refuse_create_graph()
        logits, *saved = ctx.saved_tensors[ctx.owners :]
        if not all(placement.is_replicate() for placement in grad.placements):
            grad = grad.redistribute(placements=[Replicate()] * logits.device_mesh.ndim)
        local = gradient(grad.to_local(), saved, *ctx.call)
        dtensor = DTensor(local, copy.copy(logits._spec), requires_grad=False)
        return dtensor, None, None, None, None, None, None, None


# As in ops/function.py.
apply: Callable[..., DTensor] = super(torch.autograd.Function, DTensorFunction).apply


class _BackwardChecks(torch.autograd.Function):
    """Returns the loss unchanged. Its backward raises if the gradient would be wrong: see ``from_local``."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, read: tuple[DTensor, ...]) -> Tensor:
        ctx.save_for_backward(*read)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_create_graph()
        _ = ctx.saved_tensors  # raises if one was written to
        return grad, None


def from_local(
    value: Tensor, mesh: DeviceMesh, placements: list[Placement], read: tuple[DTensor, ...], **layout: Any
) -> DTensor:
    """A loss as a DTensor.

    Its backward raises for ``create_graph=True``, because torch 2.11's to_local would drop that graph. It also raises
    if a DTensor in ``read`` was written to after the loss: see ``owners``.
    """
    if value.requires_grad and not transforms.is_traced():
        value = _BackwardChecks.apply(value, read)
    return DTensor.from_local(value, mesh, placements, run_check=False, **layout)


def _refuse_create_graph() -> None:
    if torch.is_grad_enabled():
        no_second_derivative()


def reduced(
    outputs: vocab_parallel.RowValues,
    target: Tensor,
    shape: torch.Size,
    mesh: DeviceMesh,
    rows: list[Placement],
    loss: LossOptions,
    read: tuple[DTensor, ...],
    token_weight: Tensor | None = None,
) -> DTensor:
    """The loss from this rank's rows and targets. ``rows`` places them in a tensor of ``shape``.

    ``read``: as for ``from_local``.
    """
    if loss.reduction == "none":
        value = reduce_rows(outputs.loss, outputs.lse, target, None, loss, token_weight).value
        stride = torch.empty(shape, device="meta").stride()
        return from_local(value.contiguous(), mesh, rows, read, shape=shape, stride=stride)
    factors = None
    if token_weight is not None:
        factors = counted_weights(token_weight, target, loss.row_options.ignore_index, outputs.loss.dtype)
    sums = torch.stack([times(term, factors).sum() for term in _terms_of_rows(outputs, target, loss)])
    partial = [Partial() if isinstance(placement, Shard) else Replicate() for placement in rows]
    replicated: list[Placement] = [Replicate()] * mesh.ndim
    if partial != replicated:
        sums = DTensor.from_local(sums, mesh, partial, run_check=False).redistribute(mesh, replicated).to_local()
    value = _combine(list(sums.unbind()), loss.reduction)
    return from_local(value, mesh, replicated, read)


def _terms_of_rows(rows: vocab_parallel.RowValues, target: Tensor, loss: LossOptions) -> list[Tensor]:
    """The terms to add up over this rank's rows: loss, z-loss if there is one, and for "mean" the divisor of each."""
    terms = [rows.loss]
    if loss.reduction == "mean":
        terms.append(rows.weight)
    if loss.lse_square_scale != 0.0:
        terms.append(z_losses(rows.lse, target, loss.row_options.ignore_index, loss.lse_square_scale))
        if loss.reduction == "mean":
            terms.append(is_counted(target, loss.row_options.ignore_index).to(rows.loss.dtype))
    return terms


def _combine(sums: list[Tensor], reduction: str) -> Tensor:
    """The loss from the sums of ``_terms_of_rows``."""
    if reduction != "mean":
        return sums[0] if len(sums) == 1 else sums[0] + sums[1]
    loss = sums[0] / sums[1]
    return loss if len(sums) == 2 else loss + sums[2] / sums[3]


def _split(input: DTensor, classes_dim: int) -> tuple[int | None, list[Placement]]:
    """The mesh dimension that splits the classes, if any, and the placements of rows, targets and losses."""
    split_dims: list[int] = []
    rows: list[Placement] = []
    for mesh_dim, placement in enumerate(input.placements):
        # isinstance, because Dynamo of torch 2.11 cannot trace `type(placement) is Shard`.
        strided = isinstance(placement, _StridedShard)
        if strided or not isinstance(placement, (Shard, Replicate)):
            raise ValueError(
                f"DTensor logits are placed as {input.placements}; valid are Replicate() and Shard(dimension). "
                "redistribute() them first"
            )
        if isinstance(placement, Replicate):
            rows.append(placement)
        elif placement.dim % input.dim() == classes_dim:
            split_dims.append(mesh_dim)
            rows.append(Replicate())
        else:
            dim = placement.dim % input.dim()
            rows.append(Shard(dim - (dim > classes_dim)))
    if len(split_dims) > 1:
        raise ValueError(f"the classes are split over dimensions {split_dims} of the mesh; at most one is supported")
    return split_dims[0] if split_dims else None, rows


def local_target_of(
    target: Tensor, shape: torch.Size, local_shape: torch.Size, mesh: DeviceMesh, rows: list[Placement]
) -> Tensor:
    """The targets of this rank's rows. A plain tensor holds these, or all targets on every rank."""
    if target.dtype.is_floating_point:
        raise TypeError("DTensor logits take class indices as the target, not class probabilities")
    if isinstance(target, DTensor):
        if target.device_mesh != mesh:
            raise ValueError(f"target lies on {target.device_mesh} but logits on {mesh}; both must be on one mesh")
        # Raises on every rank, before any rank communicates.
        checks.same_shape("target", target.shape, shape, "one class index for each row of the logits")
        return target.redistribute(mesh, rows).to_local()
    if target.shape == local_shape or target.shape != shape:
        return target  # if it fits neither, the operator raises
    replicated = DTensor.from_local(target, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(mesh, rows).to_local()  # a slice of it: no communication


def local_row_of(row: Any, shape: torch.Size, local_shape: torch.Size, mesh: DeviceMesh, rows: list[Placement]) -> Any:
    """As ``local_target_of``, for a value whose leading dimensions are the target's."""
    if isinstance(row, DTensor):
        return row.redistribute(mesh, rows).to_local()
    in_front = row.shape[: len(shape)] if isinstance(row, Tensor) else None
    if in_front is None or in_front == local_shape or in_front != shape:
        return row  # if it fits neither, it is refused
    full_row = DTensor.from_local(row, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return full_row.redistribute(mesh, rows).to_local()


def local_weight_of(
    weight: Tensor | None, num_classes: int, width: int, mesh: DeviceMesh, vocabulary: int | None, ranks: Ranks
) -> Tensor | None:
    """The weights of this rank's classes. A plain tensor holds the weights of all classes on every rank."""
    if weight is None:
        return None
    if isinstance(weight, DTensor):
        placements: list[Placement] = [Replicate()] * mesh.ndim
        if vocabulary is not None:
            placements[vocabulary] = Shard(0)
        return weight.redistribute(mesh, placements).to_local()
    if weight.shape != (num_classes,):
        raise ValueError(f"weight has shape {tuple(weight.shape)}; expected ({num_classes},), one weight a class")
    start, _ = share_of_rank(num_classes, ranks.rank, ranks.world)
    return weight[start : start + width]
