"""How many rows a chunk has: memory for its logits against products of fewer rows."""

from __future__ import annotations

from torch import Tensor

# Rows of a chunk by kind of device.
ROWS = {"cuda": 2048}
ROWS_ELSEWHERE = 1024
_MULTIPLE = 128


def rows_of_chunk(input: Tensor, chunk_rows: int | None) -> int:
    """For input (N, H). Chunks of one size, as far as N allows: a short last one costs almost as much as a full one."""
    number = max(input.shape[0], 1)
    largest = ROWS.get(input.device.type, ROWS_ELSEWHERE) if chunk_rows is None else chunk_rows
    if number <= largest or chunk_rows is not None:
        return min(number, largest)
    even = -(-number // -(-number // largest))
    return min(largest, -(-even // _MULTIPLE) * _MULTIPLE)
