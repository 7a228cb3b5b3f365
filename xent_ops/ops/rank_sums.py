"""Sums over ranks by functional collectives, which are nodes that tracers see and passes move.

The order of the additions of an all-reduce or a reduce-scatter depends on the place of a number in the buffer, with
three ranks or more. With ``in_rank_order`` it is the order of the ranks at every place: an all-to-all of equal parts,
additions in float32, and for the whole sum an all-gather. Together they send as much as a ring all-reduce.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.reference import accumulator
from ..kernels.reference_shard import sum_in_order
from . import transforms


def _collectives() -> Any:
    """Looked up at each call: `import xent_ops` works with a torch that lacks this private name."""
    return torch.ops._c10d_functional


def wait(result: Tensor) -> Tensor:
    """What gather or start returned, when it has arrived: on a CPU, at once."""
    return result if result.device.type == "cpu" else _collectives().wait_tensor(result)


def _one_at_a_time(result: Tensor) -> Tensor:
    """What a collective returned. On a CPU it is waited for, so that one collective is in flight at a time.

    Two all-gathers of gloo in flight corrupt the heap, in plain torch too (2.11, 2.13, 2.15). With a sum in flight
    beside an all-gather, a rank of three hung once in some tens of runs of the tests (2.13, 2026-11-28).
    """
    return _collectives().wait_tensor(result) if result.device.type == "cpu" else result


def gather(tensor: Tensor, world: int, group_name: str) -> Tensor:
    """(world * n, ...) of each rank's (n, ...). Call wait on it."""
    return _one_at_a_time(_collectives().all_gather_into_tensor(tensor, world, group_name))


def start(tensor: Tensor, world: int, group_name: str, scattered: bool, in_rank_order: bool) -> Tensor:
    """The sum of (n, ...); with ``scattered``, this rank's (n / world, ...) of it. Call wait on it.

    The caller gives the tensor away, and it is contiguous: in eager the sum may be written over it, because
    ``all_reduce`` would copy it first. A graph has ``all_reduce``, which Inductor lowers to ``all_reduce_``.
    """
    if scattered:
        if in_rank_order:
            return _part_of_sum(tensor, world, group_name)
        return _one_at_a_time(_collectives().reduce_scatter_tensor(tensor, "sum", world, group_name))
    if not in_rank_order:
        collectives = _collectives()
        all_reduce = collectives.all_reduce if transforms.is_recorded() else collectives.all_reduce_
        return _one_at_a_time(all_reduce(tensor, "sum", group_name))
    missing = -tensor.shape[0] % world
    if missing == 0:
        return gather(_part_of_sum(tensor, world, group_name), world, group_name)
    filled_up = torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))])
    total = gather(_part_of_sum(filled_up, world, group_name), world, group_name)
    return wait(total)[: tensor.shape[0]]


def _part_of_sum(tensor: Tensor, world: int, group_name: str) -> Tensor:
    sizes = [tensor.shape[0] // world] * world
    parts = _collectives().wait_tensor(_collectives().all_to_all_single(tensor.contiguous(), sizes, sizes, group_name))
    return sum_in_order(parts.to(accumulator(parts)).unflatten(0, (world, -1))).to(parts.dtype)
