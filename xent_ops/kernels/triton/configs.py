"""Block sizes for each kind of row. No autotuning: it breaks capture and slows down the first step.

Measured on an H200, triton 3.6, bf16, 2026-11: times in copies of the logits (the limit is 0.5 forward, 1.0 backward).
"""

from typing import NamedTuple

from triton import next_power_of_2

from ..options import RowOptions


class Config(NamedTuple):
    block: int  # elements of a row that one program handles at a time
    num_warps: int
    num_stages: int


def load(options: RowOptions, weighted: bool) -> int:
    """The cost of an element beyond its exponential: 1 for a softcap, 2 for class weights together with smoothing."""
    return (options.softcap is not None) + 2 * (weighted and options.label_smoothing > 0.0)


def forward(classes: int, itemsize: int, extra: bool = False, load: int = 0) -> Config:
    """A program walks over a row, with 16 elements a thread. With 32, kernels with ``extra`` outputs may spill.

    With a ``load`` and more than 8192 columns 8 elements a thread: 32000 with all options on 0.79 (0.80 with 16).

    Short rows spend their time on the barriers of reductions, and one warp needs no barrier.
    """
    if itemsize == 8:
        return Config(min(max(next_power_of_2(classes), 128), 512), 4, 3)
    if classes <= 1024:
        most = 1024 if itemsize == 2 and not extra else 512
        if extra and load == 3:
            most = 256  # 512 spill on sm_100, by Triton 3.6
        block = min(max(next_power_of_2(classes), 128), most)
        return Config(block, 2 if extra and most > 256 else 1, 3)
    if classes <= 8192:
        if itemsize == 2 and load:  # 4096: softcap 0.71 (2 warps of 1024 0.74), all options 0.80 (0.86)
            return Config(512 if load >= 2 else 1024, 1, 3)
        return Config(1024, 2, 3)  # 4096: 0.565, 4 warps of 2048: 0.58
    if load >= 2 and classes > 65536:  # more weights than a processor's cache holds
        return Config(2048, 8, 3)  # all options, 128256: 0.78, 4 warps of 1024: 0.82
    return Config(1024 if load or (itemsize == 4 and extra) else 2048, 4, 3)  # 32000: 0.53, 128256: 0.50


class Short(NamedTuple):
    rows: int  # that one program handles
    block: int  # V or more
    num_warps: int


def short(classes: int, itemsize: int, extra: bool = False, load: int = 0, smoothing: bool = False) -> Short | None:
    """A tile that holds whole rows in registers, or None for longer rows.

    Copies of the logits, forward: 1048576 x 32 1.09, by the loop 13.4; 524288 x 128 .84 and 3.5; 131072 x 1024 .60 both
    ways (one H100, 2026-11-25).

    64 elements a thread; with weights and smoothing 32 (131072 x 1024 0.80, with 64 0.90; softcap too 0.93, 1.68);
    16 if an element has more than 2 bytes or ``extra`` outputs need registers too. With options the loop is faster from
    2048 columns on (32768 x 4096, smoothing 0.63, by one tile 0.71; all options 0.80, 0.92; 65536 x 2048, softcap 0.74,
    0.76; smoothing alone 0.65 both ways).
    """
    longest = 2048 if itemsize == 2 and load else 4096 if itemsize == 2 and smoothing else 8192  # bytes
    if classes * itemsize > longest:
        return None
    elements = 16 if itemsize > 2 or extra else 32 if load >= 2 else 64
    block = max(next_power_of_2(classes), 16)
    num_warps = max(block // (32 * elements), 1)
    return Short(max(32 * elements // block, 1), block, num_warps)


def parts(rows: int, classes: int, config: Config, processors: int) -> tuple[Config, int, int]:
    """(config, programs that share a row in the forward, columns of each).

    One program a row, unless that leaves the processors with few loads in flight. In a CUDA graph: 512 x 32000 takes
    16.0 us with one program of 8 warps a row, 18.3 with two of 4 warps, which need a second launch to join them; 64 x
    128256 13.4 with 16 programs a row or 21, 14.0 with 32, 14.4 with 11; 256 x 128256 29.6 with 6, 30.8 with 4.
    """
    if classes <= 2 * config.block or rows >= 8 * processors:
        return config, 1, classes
    if rows >= 3 * processors:
        return Config(2 * config.block, 2 * config.num_warps, config.num_stages), 1, classes
    part_classes = -(-classes * rows // (12 * processors))
    part_classes = -(-part_classes // config.block) * config.block
    return config, -(-classes // part_classes), part_classes


class Backward(NamedTuple):
    block: int  # elements of a row that a program handles at a time
    tiles: int  # blocks that it handles
    num_warps: int


def backward(classes: int, itemsize: int, load: int = 0) -> Backward:
    """Four 16-byte loads a thread: 32 elements of 16 bits, 16 of float32 (131072 x 1024 0.98, with one load 1.13).

    With two loads, few rows are slower (64 x 128256, both passes, 25.0 us for 24.1; 512 x 32000 36.1 for 35.5) and many
    the same to 1 %; with one load all are slower. With a ``load``, two tiles share a program's prologue (in brackets:
    one tile). Softcap: 32768 x 4096 1.04 (1.11), 8192 x 32000 1.04, but 1.02 by one tile of 4 warps. Weights with
    smoothing: 1.05 (1.09), 1.05 (1.11). All options on: 1.12 (1.34), 1.12 by 2 warps (1.23), 131072 x 1024 1.22 (1.28).
    """
    row = max(next_power_of_2(classes), 128)
    if itemsize == 8:
        return Backward(min(row, 256), 1, 4)
    if itemsize == 4:
        block = min(row, 1024)
        return Backward(block, 1, max(block // 512, 1))  # 0.98 to 0.99
    if load == 1 and classes > 4096:
        return Backward(4096, 1, 4)
    if load == 3 and classes > 4096:
        return Backward(2048, 2, 2)
    block = min(row, 1024 if load else 2048)
    if load == 3 and row == 1024:
        block = 512
    return Backward(block, 2 if load and row > block else 1, max(block // 1024, 1))


def backward_in_order(classes: int) -> Backward:
    """For float32 logits and a 16-bit gradient over them: one program per row, from the first tile to the last."""
    block = min(max(next_power_of_2(classes), 128), 4096)
    return Backward(block, -(-classes // block), max(block // 512, 1))


def with_grad(classes: int, itemsize: int) -> Config:
    """A program walks over a row twice. It has many warps, so that the rows in flight fit the L2 cache."""
    if itemsize == 8:
        return Config(min(max(next_power_of_2(classes), 128), 256), 4, 3)
    # With 8 warps, more rows are in flight than the L2 cache holds. In copies, bfloat16, plain and with
    # argmax and entropy, 8 and 16 warps: 4096 x 128256 1.62 and 1.55, both; 8192 x 50304 1.50, 1.34 and 1.44, 1.30;
    # 8192 x 32000 1.36, 1.15 and 1.48, 1.31 (one H100, 2026-11-25).
    return forward(classes, itemsize) if classes <= 8192 else Config(4096, 16, 3)


class Shared(NamedTuple):
    parts: int  # programs that share a row
    tile: int
    tiles: int  # tiles of a part
    num_warps: int


def with_grad_shared(classes: int, itemsize: int, capacity: int, most_parts: int) -> Shared | None:
    """A row, or a part of one, in ``capacity`` bytes of shared memory for each program. None if it does not fit.

    At least two programs should fit on a processor, so that one reads while the other computes. In copies
    (limit 1.0; in brackets with_grad): 131072 x 1024 1.07 (1.11), 32768 x 4096 1.03 (1.13), 8192 x 32000 1.05 (1.31; in
    two parts 1.11), 8192 x 50257 1.05 (1.50; in two parts 1.15), 4096 x 128256 1.07 (1.53; in 4 parts 1.11), 2100 x
    262144 1.09 (1.57; in 8 parts 1.13); float32, 4096 x 128256: 8 parts of 4 warps 1.05, of 8 warps 1.08.
    """
    row, parts = classes * itemsize, 1
    if row <= 8192:
        size, num_warps = 2048, 1 if row <= 2048 else 2
    elif row <= 65536:
        size, num_warps = 8192, 8
    elif row <= min(114688, (capacity - 1024) // 16384 * 16384):  # 1024 bytes for the sums
        size, num_warps = 16384, 16
    elif row <= 524288 and itemsize == 2:
        size, num_warps, parts = 4096, 4, -(-row // 32768)
    else:
        size, num_warps, parts = 8192, 4, -(-row // 65536)
    tiles = -(-row // (size * parts))
    fits = size * tiles <= capacity - 1024 and parts <= min(most_parts, 32)  # a lane a part
    return Shared(parts, size // itemsize, tiles, num_warps) if fits else None


def soft(classes: int, itemsize: int) -> Config:
    """A program walks over a row of logits and one of probabilities."""
    return Config(min(max(next_power_of_2(classes), 128), 2048 // max(itemsize, 4)), 4, 1)


REDUCE_MOST_ROWS = 8192  # for one program
REDUCE_MOST_PROGRAMS = 256


def reduce(rows: int, itemsize: int) -> tuple[int, Config]:
    """(programs that share the sums over rows, their config). From two programs on, a second kernel adds their parts.

    8192 rows: by one program 8.4 us, by several 8.0 and a second launch; 131072: 50.5 and 8.9. A multiple of 32, so
    that the parts of each sum start on a 16-byte boundary. 8 rows take 1.16 us with a block of 16, 1.28 with one of 64;
    64 rows 1.3 with one of 64, 1.9 with one of 4096; 512 rows 1.6 and 2.1.
    """
    if rows <= REDUCE_MOST_ROWS:
        block = min(max(next_power_of_2(rows), 16), 4096 if itemsize == 4 else 1024)
        return 1, Config(block, min(max(block // 64, 1), 16), 1)
    num_warps = 4 if itemsize == 4 else 8  # with 4, Triton 3.6 spills 16 bytes of float64
    return min(-(-rows // 32768) * 32, REDUCE_MOST_PROGRAMS), Config(1024, num_warps, 1)


def edges(classes: int, itemsize: int) -> int:
    """For rows that start anywhere: their body starts on a multiple of this many elements (128 bytes or 32).

    Forward and backward: 8192 x 50257 0.588 ms (0.591 with 32), 131072 x 1003 0.234 (0.223).
    """
    return (128 if classes >= 16384 else 32) // itemsize


def vector(itemsize: int) -> int:
    """Elements of one 16-byte load."""
    return 16 // itemsize


def softcap(cap: float | None, itemsize: int) -> int:
    """0: no softcap; 1: a tanh that is right to the last bits; 2: one that is right to 6e-7 of the cap.

    The last one takes half of the instructions, and its bound on x makes the maximum unnecessary. 16-bit logits have a
    precision of 4e-3, so the error does not matter for the caps in use (30, 50). Beyond 64, sums of e^x might overflow.
    """
    if cap is None:
        return 0
    return 2 if itemsize == 2 and cap <= 64.0 else 1
