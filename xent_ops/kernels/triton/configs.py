"""Which block for which row: one table, no autotuning at run time (it breaks capture and costs the first step)."""

from typing import NamedTuple

from triton import next_power_of_2


class Config(NamedTuple):
    block: int
    num_warps: int
    num_stages: int = 1


def forward(classes: int, itemsize: int) -> Config:
    """A program walks over a row: 16 bytes a thread and load, several loads in flight."""
    block = min(next_power_of_2(max(classes, 128)), 8192 // itemsize)
    return Config(block, 4, 3)


def backward(classes: int, itemsize: int) -> Config:
    """A program is a tile of a row: 16 bytes a thread."""
    block = min(next_power_of_2(max(classes, 128)), 4096 // itemsize)
    return Config(block, max(1, min(8, block * itemsize // 512)))


def soft(classes: int, itemsize: int) -> Config:
    block = min(next_power_of_2(max(classes, 128)), 4096 // itemsize)
    return Config(block, 4)


def vector(itemsize: int) -> int:
    """Elements of one 16-byte load."""
    return 16 // itemsize
