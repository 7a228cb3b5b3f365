"""What no backward of class indices can take: see checks.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.options import DEFAULTS, Options
from . import checks


def index_backward(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    weight: Tensor | None = None,
    divisor: Tensor | None = None,
    grad_entropy: Tensor | None = None,
    entropy: Tensor | None = None,
    coefficient: Tensor | None = None,
    class_start: int = 0,
    num_classes: int | None = None,
    grad_dtype: torch.dtype | None = None,
    *,
    options: Options = DEFAULTS,
    lse_square_scale: float = 0.0,
) -> None:
    checks.narrower(grad_dtype, logits)
    if num_classes is None:
        checks.index_forward(logits, target, weight, options=options)
    else:
        checks.shard(logits, target, class_start, num_classes, weight, options=options)
    slice_of(class_start, num_classes, weight, coefficient)
    checks.rows_of(logits, grad_lse=grad_lse, lse=lse, coefficient=coefficient)
    checks.scalar_or_rows_of("logits", logits, grad_loss=grad_loss)
    checks.divisor(divisor, logits)
    with_entropy("logits", logits, grad_entropy, entropy)


def slice_of(class_start: int, num_classes: int | None, weight: Tensor | None, coefficient: Tensor | None) -> None:
    """What a backward gets for a slice of the classes alone."""
    if num_classes is None:
        if class_start != 0 or coefficient is not None:
            raise ValueError("class_start and coefficient go with num_classes, of a slice of the classes")
    elif (weight is None) != (coefficient is None):
        raise ValueError("a class weight needs the coefficient that cross_entropy_shard_join returned: both or neither")


def with_entropy(owner: str, matrix: Tensor, grad_entropy: Tensor | None, entropy: Tensor | None) -> None:
    checks.rows_of(matrix, owner, grad_entropy=grad_entropy, entropy=entropy)
    if (grad_entropy is None) != (entropy is None):
        raise ValueError("grad_entropy and entropy go together: the gradient of an entropy needs its value")
