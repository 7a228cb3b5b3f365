"""The kinds of group that users pass: ProcessGroup, one-dimensional DeviceMesh, group name, None for all ranks.

torch.compile treats everything here as a constant.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh, ProcessGroup

from ..ops.message_values import repr_for_message

Group = ProcessGroup | DeviceMesh | str | None


class Ranks(NamedTuple):
    """This rank in a group."""

    name: str  # the group's name, which functional collectives take
    rank: int
    world: int
    batch_invariant: bool = False  # the bits of a row do not depend on the other rows
    in_rank_order: bool = False  # sums over the ranks are added up in their order, whatever a number's place

    def for_batches(self, invariant: bool) -> Ranks:
        """The ranks of a call with this batch_invariant. A sum of two has one order."""
        return self._replace(batch_invariant=True, in_rank_order=self.world > 2) if invariant else self


def process_group(group: Group) -> ProcessGroup:
    if group is None:
        if dist.group.WORLD is None:
            raise ValueError("group=None means all ranks, but torch.distributed is not initialized")
        return dist.group.WORLD
    if isinstance(group, str):
        return dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group is a DeviceMesh of {group.ndim} dimensions; pass one of them, mesh[name], for the vocabulary"
            )
        return group.get_group()
    found: Any = group
    # NON_GROUP_MEMBER: what new_group returns to the other ranks.
    if not isinstance(found, ProcessGroup) and found != dist.GroupMember.NON_GROUP_MEMBER:
        hint = f": torch.distributed.new_group({found}) makes one of these ranks" if isinstance(found, list) else ""
        raise TypeError(
            "group must be a ProcessGroup, a DeviceMesh of one dimension, a group's name, or None for all ranks, got "
            f"{repr_for_message(found)}{hint}"
        )
    return found


@torch.compiler.assume_constant_result
def _rank_and_world(name: str) -> tuple[int, int]:
    """Rank and size of a named group. Dynamo does not trace the lookup."""
    group = process_group(name)
    return dist.get_rank(group), dist.get_world_size(group)


def ranks_of(group: Group) -> Ranks:
    resolved: Any = group if isinstance(group, str) else process_group(group)
    if isinstance(resolved, str):
        rank, world = _rank_and_world(resolved)
    elif isinstance(resolved, ProcessGroup):  # the functions of torch.distributed take the host 30 us for the same
        rank, world = resolved.rank(), resolved.size()
    else:
        rank, world = dist.get_rank(resolved), dist.get_world_size(resolved)
    if rank < 0:  # a group without this rank has no name either
        raise ValueError("this rank is not a member of the group")
    return Ranks(resolved if isinstance(resolved, str) else resolved.group_name, rank, world)
