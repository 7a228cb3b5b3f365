"""reference_fp8.py on NVIDIA's GPUs."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ..options import RowOptions
from ..reference_fp8 import GradientRows
from .flags import flags_of
from .fp8 import gradient_fp8_kernel, quantize_kernel

# 1024 x 128256 of bfloat16, both layouts: 231 us, by tiles of 64 x 64 243, of 128 x 128 343; to read and write as much
# takes 175 (one H100, 2026-11-25).
_TILE = {"BLOCK_R": 128, "BLOCK_C": 64, "num_warps": 8}


_MOST_ROWS = 65535 * _TILE["BLOCK_R"]  # of a launch: CUDA's limit of programs along that dimension


def _grid(rows: int, columns: int) -> tuple[int, int]:
    return triton.cdiv(columns, _TILE["BLOCK_C"]), triton.cdiv(rows, _TILE["BLOCK_R"])


def _bytes(numbers: Tensor | None, absent: Tensor) -> Tensor:
    return absent if numbers is None else numbers.view(torch.uint8)


def quantize(
    values: Tensor,
    scale: Tensor,
    factor: Tensor | None = None,
    rows: Tensor | None = None,
    transposed: Tensor | None = None,
) -> None:
    values = values if values.stride(1) == 1 else values.contiguous()
    most = [values.shape[0], values.shape[1]]
    for matrix in (rows, None if transposed is None else transposed.t()):
        most = most if matrix is None else [max(most[0], matrix.shape[0]), max(most[1], matrix.shape[1])]
    if most[0] > _MOST_ROWS:
        for start in range(0, most[0], _MOST_ROWS):
            part = slice(start, start + _MOST_ROWS)
            some_factor, some_rows = (None if tensor is None else tensor[part] for tensor in (factor, rows))
            columns = None if transposed is None else transposed[:, part]
            quantize(values[part], scale, some_factor, some_rows, columns)
        return
    quantize_kernel[_grid(*most)](
        values,
        scale,
        scale if factor is None else factor.contiguous(),
        _bytes(rows, scale),
        _bytes(transposed, scale),
        *values.shape,
        values.stride(0),
        *most,
        0 if rows is None else rows.stride(0),
        0 if transposed is None else transposed.stride(0),
        FACTOR=factor is not None,
        ROWS=rows is not None,
        COLUMNS=transposed is not None,
        **_TILE,
    )


def gradient(
    logits: Tensor,
    row_values: GradientRows,
    weight: Tensor | None,
    options: RowOptions,
    rows: Tensor | None,
    transposed: Tensor | None,
) -> None:
    if logits.numel() == 0:
        return
    row, absent = row_values, row_values.total
    numbers = (row.total, row.at_target, row.by_class, row.lse, row.entropy, row.grad_entropy, row.bound)
    packed = torch.stack([(absent if number is None else number).to(torch.float32) for number in numbers])
    flags = flags_of(options, weight is not None, logits.element_size())._replace(
        entropy=row_values.entropy is not None
    )
    _ignore_index, _smoothing, softcap, logit_scale = options.kernel_arguments()
    width = logits.shape[1] if rows is None else rows.shape[1]
    gradient_fp8_kernel[_grid(logits.shape[0], width)](
        logits,
        packed,
        row_values.column.contiguous(),
        row_values.seed,
        absent if weight is None else weight,
        _bytes(rows, logits),
        _bytes(transposed, logits),
        *logits.shape,
        width,
        logits.stride(0),
        packed.stride(0),
        0 if rows is None else rows.stride(0),
        0 if transposed is None else transposed.stride(0),
        softcap,
        logit_scale,
        FLAGS=flags,
        ROWS=rows is not None,
        COLUMNS=transposed is not None,
        **_TILE,
    )


def product(left: Tensor, right: Tensor, scale_left: Tensor, scale_right: Tensor, out: Tensor) -> None:
    torch._scaled_mm(left, right.t(), scale_left, scale_right, out_dtype=out.dtype, use_fast_accum=False, out=out)
