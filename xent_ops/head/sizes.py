"""The number of rows of a chunk. More rows need more memory; with few, products are slow.

Measured on an H200 with torch 2.11, bfloat16, 8192 rows (16384 at V = 32000), forward and backward in CUDA graphs. The
figures are multiples of the time of the three products alone (2026-11-23; one machine, other runs differ by .03):

    H x V            1024   2048   4096   8192 rows
    1024 x 32000     1.33   1.24   1.17   1.14
    2048 x 32000     1.24   1.12   1.10   1.08
    4096 x 32000     1.18   1.05   1.05   1.03
    8192 x 32000     1.20   1.03   1.02   1.03
    1024 x 128256    1.23   1.19   1.15
    2048 x 128256    1.12   1.07   1.06
    3072 x 128256    1.11   1.06   1.04
    4096 x 128256    1.14   1.06   1.03
    6144 x 128256    1.10   1.02   1.02
    8192 x 128256    1.12    .94    .93
    2304 x 256000    1.24   1.06   1.02

On two cores of a CPU with AVX-512 (2048 rows, 256 x 32000): float32 .97, .94, .91 and 1.03 with 256, 512, 1024 and 2048
rows, bfloat16 1.00, .96, 1.03 and 1.35.

On a GPU little is gained above 2048 rows. In each chunk the product for the weight's gradient reads and writes all of
it, and the row kernel takes as long as a copy of the logits (.03 at H = 4096, .12 at 1024). A size in between is slower
if it leaves the last wave of tiles of the input's gradient half empty: docs/lab/2026-11-linear.md.

A chunk has at most 1 GiB of logits. 2048 rows would be 2 GB at 500,000 classes and 40 GB at ten million, where hidden
sizes, and so the gradients, are small. Fewer rows cost 1.04 times the time at H = 64. A chunk may be twice as large if
the sum of the weight's gradient is wider than the result: it uses memory that the copy of the sum needs later.

A forward alone may have chunks of twice as many rows in the memory that a training step needs for the gradients.
8192 x 4096 x 128256 on an H200 (bfloat16, 2026-11-29), in times of the product of all rows: 1.119, 1.099, 1.080 and
1.040 with 1024, 2048, 4096 and 8192 rows a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.options import Chunking
from ..kernels.sizes import size_hint

_BYTES = 256 * 2**20  # a chunk's logits; a small vocabulary gets more rows, up to this
_MOST_BYTES = 2**30  # a chunk's logits; a large vocabulary gets fewer rows, down to this
_ROWS_ON_CPU = 512
_MULTIPLE = 128


def rows_of_chunk(
    number: int,
    input: Tensor,
    classes: int,
    wider: bool,
    chunk_rows: int | None,
    logits_dtype: torch.dtype | None = None,
    heads: int = 1,
) -> int:
    """The rows of a chunk, for this number of rows of input (N, H) and this number of classes.

    ``wider``: the sum of the weight's gradient has more bytes than the result. ``heads``: two have a chunk of logits
    each. If these are wider than the input, a chunk has half the rows, and both take the memory of the input's dtype.
    """
    number, features = max(number, 1), input.shape[1]
    if chunk_rows is not None:
        return min(number, chunk_rows)
    on_cpu, itemsize = input.device.type == "cpu", input.element_size()
    rows = least = _least_rows(input)
    while not on_cpu and rows < number and 2 * rows * classes * itemsize <= _BYTES:
        rows *= 2
    halved = heads == 2 and not on_cpu and logits_dtype is not None and logits_dtype.itemsize > itemsize
    rows = _within_most_bytes(rows, input, classes, None if halved else logits_dtype)
    if wider and not on_cpu and rows < features:
        # The sum and its copy exist together only at the end. Until then a chunk of H rows uses the copy's memory.
        rows = max(rows, min(features // least * least, 2 * rows))
    return evenly(number, max(rows // 2, 1) if halved else rows)


def without_gradients(chunking: Chunking, number: int, input: Tensor, classes: int) -> Chunking:
    """The chunking of a forward alone: twice as many rows, in at most 1 GiB and no more than a training step takes.

    That holds the weight's gradient beside a chunk, as many bytes as a chunk of H rows of logits in the input's dtype.
    """
    if chunking.chunk_rows is not None or chunking.products is not None or input.device.type == "cpu":
        return chunking
    number, classes, dtype = max(size_hint(number), 1), size_hint(classes), chunking.logits_dtype or input.dtype
    rows = rows_of_chunk(number, input, classes, False, None, dtype)
    if rows * dtype.itemsize <= input.shape[1] * input.element_size():
        rows = _within_most_bytes(2 * rows, input, classes, dtype)
    return chunking._replace(chunk_rows=evenly(number, rows))


def rows_of_one_shape(
    input: Tensor, classes: int, chunk_rows: int | None, logits_dtype: torch.dtype | None = None, parts: int = 1
) -> int:
    """The rows of every chunk, for any number of rows and any wanted gradients; of one of ``parts`` that share it."""
    rows = max((chunk_rows or _within_most_bytes(_least_rows(input), input, classes, logits_dtype)) // parts, 1)
    # On a CPU a multiple of 4: else MKL gives the last rows of a product other bits.
    return rows if input.device.type != "cpu" else -(-rows // 4) * 4


def _least_rows(input: Tensor) -> int:
    # Products of wider numbers take longer, so fewer rows are enough.
    return _ROWS_ON_CPU if input.device.type == "cpu" else 4096 // input.element_size()


def _within_most_bytes(rows: int, input: Tensor, classes: int, logits_dtype: torch.dtype | None) -> int:
    # Only comparisons: for a symbolic number of classes the result is a plain number, and the guard is a range.
    itemsize = (logits_dtype or input.dtype).itemsize
    while rows > 1 and rows * classes * itemsize > _MOST_BYTES:
        rows //= 2
    return rows


def evenly(number: int, most: int) -> int:
    """The rows of a chunk if as few chunks as possible share them. A short last one costs almost as much as a full."""
    if number <= most:
        return number
    even = -(-number // -(-number // most))
    return min(most, -(-even // _MULTIPLE) * _MULTIPLE)
