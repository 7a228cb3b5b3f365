"""The three matrix multiplications of a linear cross entropy. The number of rows is read on the device."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .. import accelerators
from ..accelerators import processors
from .product import grad_input_kernel, grad_weight_kernel, logits_kernel, scatter_kernel


class Tile(NamedTuple):
    """ROWS x COLUMNS of a result, and INNER, the length of a step along the inner dimension."""

    ROWS: int = 128
    COLUMNS: int = 256
    INNER: int = 64


_TILE = Tile()
_COMPILER: dict[str, Any] = {"num_warps": 8, "num_stages": 3}
_GROUP = 8
_SLICE = 8


def why_not(input: Tensor, linear_weight: Tensor) -> str | None:
    """The reason why the kernels cannot take these, or None. It reads only shapes, dtypes and the device."""
    if input.dtype not in (torch.bfloat16, torch.float16):
        return f"products of {input.dtype} are not offered, only of torch.bfloat16 and torch.float16"
    accelerator = accelerators.of(input.device)
    if accelerator is not None:
        capability = accelerator.capability(input.device)
        if capability is None:
            return "products were written for NVIDIA GPUs"
        if capability[0] != 9:  # on 10.0 the tiles exceed shared memory; others were not measured
            return f"products need compute capability 9.0, this GPU has {capability[0]}.{capability[1]}"
    for name, operand in (("input", input), ("linear_weight", linear_weight)):
        if operand.numel() == 0:
            return f"{name} of shape {tuple(operand.shape)} has nothing to multiply"
    step = 16 // input.element_size()
    if input.shape[1] % step or not linear_weight.is_contiguous() or linear_weight.data_ptr() % 16:
        return "rows of input and linear_weight must be contiguous and of whole 16 bytes"
    return None


def _descriptor(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    stride, step = tensor.stride(0), 16 // tensor.element_size()
    if tensor.shape[0] == 1 and stride % step:  # the stride of a single row is not used, but TMA needs whole 16 bytes
        stride = -(-tensor.shape[1] // step) * step
    return TensorDescriptor(tensor, list(tensor.shape), [stride, tensor.stride(1)], [rows, columns])


def _aligned_rows(rows: Tensor) -> Tensor:
    """The rows; a copy if they do not start at multiples of 16 bytes."""
    columns, step = rows.shape[1], 16 // rows.element_size()
    return rows if rows.stride(0) % step == 0 else torch.nn.functional.pad(rows, (0, -columns % step))[:, :columns]


def _programs(tensor: Tensor, tiles: int) -> int:
    return max(min(processors(tensor.device), tiles), 1)


def _tiles(rows: int, columns: int) -> int:
    return -(-rows // _TILE.ROWS) * -(-columns // _TILE.COLUMNS)


def logits(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, count: Tensor, out: Tensor) -> None:
    """out = input @ linear_weight.T + linear_bias, in the first ``count`` rows.

    TMA writes whole 16 bytes: the memory behind a row of out must have room for them.
    """
    (classes, features), quarters = linear_weight.shape, out.dtype == torch.float32
    logits_kernel[(_programs(out, _tiles(*out.shape)),)](
        _descriptor(input, _TILE.ROWS, _TILE.INNER),
        _descriptor(linear_weight, _TILE.COLUMNS, _TILE.INNER),
        _descriptor(out, _TILE.ROWS, _TILE.COLUMNS // 4 if quarters else _TILE.COLUMNS // 2),
        count if linear_bias is None else linear_bias,
        count,
        classes,
        features,
        BIAS=linear_bias is not None,
        QUARTERS=quarters,
        GROUP=_GROUP,
        **_TILE._asdict(),
        **_COMPILER,
    )


def grad_weight(gradient: Tensor, input: Tensor, count: Tensor, out: Tensor, add: bool) -> None:
    """out = gradient.T @ input, or += with ``add``, over the first ``count`` rows. The rows after them are zeros."""
    gradient, quarters = _aligned_rows(gradient), out.dtype == torch.float32
    grad_weight_kernel[(_programs(out, _tiles(*out.shape)),)](
        _descriptor(gradient, _TILE.INNER, _TILE.ROWS),
        _descriptor(input, _TILE.INNER, _TILE.COLUMNS),
        _descriptor(out, _TILE.ROWS, _TILE.COLUMNS // 4 if quarters else _TILE.COLUMNS // 2),
        count,
        *out.shape,
        ADD=add,
        QUARTERS=quarters,
        GROUP=_GROUP,
        **_TILE._asdict(),
        **_COMPILER,
    )


def grad_input(gradient: Tensor, linear_weight: Tensor, count: Tensor, order: Tensor, out: Tensor) -> None:
    """out[order] = gradient @ linear_weight, of the first ``count`` rows. out (N, H) is contiguous."""
    (classes, features), gradient = linear_weight.shape, _aligned_rows(gradient)
    programs = processors(out.device)
    packed = out.new_empty((gradient.shape[0], features))
    parts = out.new_empty((2 * programs * _TILE.ROWS, _TILE.COLUMNS), dtype=torch.float32)
    for split in (False, True):
        grad_input_kernel[(programs,)](
            _descriptor(gradient, _TILE.ROWS, _TILE.INNER),
            _descriptor(linear_weight, _TILE.INNER, _TILE.COLUMNS),
            _descriptor(packed, _TILE.ROWS, _TILE.COLUMNS // 2),
            _descriptor(parts, _TILE.ROWS, _TILE.COLUMNS // 2),
            count,
            classes,
            features,
            GROUP=_GROUP,
            SPLIT=split,
            **_TILE._asdict(),
            **_COMPILER,
        )
    scatter_kernel[(_tiles(gradient.shape[0], features), _TILE.ROWS // _SLICE)](
        packed,
        parts,
        order,
        out,
        count,
        classes,
        features,
        programs,
        GROUP=_GROUP,
        SLICE=_SLICE,
        **_TILE._asdict(),
    )
