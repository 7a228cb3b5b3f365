"""Launchers of the forward operators of a vocabulary split over ranks. See launch.py."""

from __future__ import annotations

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from .. import reference_shard
from ..options import DEFAULTS, RowOptions
from ..reference import accumulator, columns_of
from ..rows import dense_like
from ..sizes import size_hint
from . import configs
from .cached import Launch
from .common import Run, class_weights, edges, launcher, new_tensor, realigned, row_layout
from .flags import Flags, flags_of
from .launch_reduce import prepare_reduce
from .shard import join_shards_kernel, shard_kernel

JOIN_BLOCK = 128  # rows; a program reads 3 or 4 numbers of each from every rank


@launcher
def cross_entropy_shard(
    logits: Tensor,
    target: Tensor,
    class_start: int,
    num_classes: int,
    weight: Tensor | None = None,
    batch_invariant: bool = False,
    *,
    options: RowOptions = DEFAULTS,
) -> Run:
    columns = columns_of(logits.shape[-1], class_start, num_classes)
    if batch_invariant:
        logits = logits[..., :columns]  # the stride of a single row is its number of columns
    number, strides, as_rows = row_layout(logits)
    empty = size_hint(number) == 0
    itemsize, weighted = logits.element_size(), weight is not None
    border = edges(columns, itemsize, strides)
    load = configs.load(options, weighted)
    config = configs.forward(columns, itemsize, load > 0, load)
    launch = Launch(
        shard_kernel,
        number,
        columns,
        class_start,
        num_classes,
        *strides,
        *options.kernel_arguments()[1:],
        FLAGS=flags_of(options, weighted, itemsize),
        EDGES=border,
        BLOCK=config.block,
        VECTOR=configs.vector(itemsize),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    shape = (1, reference_shard.width(number, weighted))
    new_part = new_tensor(shape, accumulator(logits), logits.device)
    as_targets, keywords = dense_like(target), options.keywords()

    def run(
        logits: Tensor, target: Tensor, _class_start: int, _num_classes: int, weight: Tensor | None = None, *_: bool
    ) -> Tensor:
        if batch_invariant and columns > 0:
            logits = logits[..., :columns]
            copy = realigned(logits)
            if copy is not None:
                arguments = (copy, target, class_start, num_classes, weight, batch_invariant)
                return torch.ops.xent.cross_entropy_shard(*arguments, **keywords)
        out = new_part()
        if not empty:  # without rows the header is not read
            weight = None if weight is None else weight[:columns]
            weights = class_weights(weight, out, options.label_smoothing > 0.0 and border != 0)
            launch(as_rows(logits), as_targets(target), weights, out)
        return out

    return run


def _prepare_join(target: Tensor, gathered: Tensor, num_classes: int, weighted: bool, options: RowOptions) -> Run:
    """``join(logits, target, gathered, ...)`` -> (loss, lse, target_weight, lse_coefficient, lse_low)."""
    number, world = target.numel(), gathered.shape[0]
    empty = size_hint(number) == 0
    launch = Launch(
        join_shards_kernel,
        cdiv(number, JOIN_BLOCK),
        number,
        world,
        num_classes,
        options.ignore_index,
        options.label_smoothing,
        FLAGS=Flags(weighted, options.label_smoothing > 0.0),
        RANKS=next_power_of_2(world),
        BLOCK=JOIN_BLOCK,
        num_warps=4,
        num_stages=1,
    )
    new_row = new_tensor(target.shape, gathered.dtype, gathered.device)
    as_targets, as_gathered = dense_like(target), dense_like(gathered)

    def join(_logits: Tensor, target: Tensor, gathered: Tensor, *_unread: int | Tensor | None) -> tuple[Tensor, ...]:
        outputs = (new_row(), new_row(), new_row(), new_row(), new_row())
        if not empty:
            launch(as_gathered(gathered), as_targets(target), *outputs)
        return outputs

    return join


@launcher
def cross_entropy_shard_join(
    logits: Tensor,
    target: Tensor,
    gathered: Tensor,
    class_start: int,
    num_classes: int,
    weight: Tensor | None = None,
    *,
    options: RowOptions = DEFAULTS,
) -> Run:
    return _prepare_join(target, gathered, num_classes, weight is not None, options)


@launcher
def cross_entropy_shard_reduced(
    logits: Tensor,
    target: Tensor,
    gathered: Tensor,
    class_start: int,
    num_classes: int,
    weight: Tensor | None = None,
    *,
    options: RowOptions = DEFAULTS,
    lse_square_scale: float = 0.0,
    reduction: str = "mean",
) -> Run:
    join = _prepare_join(target, gathered, num_classes, weight is not None, options)
    reduce = prepare_reduce(logits, target, options, lse_square_scale, reduction, weighted=True, row_weights=True)

    def run(logits: Tensor, target: Tensor, gathered: Tensor, *_unread: int | Tensor | None) -> tuple[Tensor, ...]:
        loss, lse, target_weight, lse_coefficient, lse_low = join(logits, target, gathered)
        value, divisors = reduce(loss, lse, target, target_weight)
        return value, divisors, lse, lse_coefficient, lse_low

    return run
