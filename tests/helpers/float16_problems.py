"""Rows whose gradients fit into float16, and whose gradients of the logits do not: those have to be scaled."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

V, H = 37, 8


class Problem(NamedTuple):
    input: Tensor
    linear_weight: Tensor
    weight: Tensor | None  # of the classes
    target: Tensor
    upstream: Tensor  # of the rows' losses, float32
    options: dict[str, Any]

    def to(self, device):
        return self._make(value.to(device) if isinstance(value, Tensor) else value for value in self)


def _problem(upstream, input_scale, head_scale, weight=None, **options):
    generator = torch.Generator().manual_seed(4)

    def normal(*shape, scale):
        return (torch.randn(shape, generator=generator) * scale).half()

    x, head = normal(2, 5, H, scale=input_scale), normal(V, H, scale=head_scale)
    target = torch.randint(0, 10, (2, 5), generator=generator)  # classes from 10 on are no targets
    target[0, 0] = -100
    weight = None if weight is None else torch.tensor(weight)
    return Problem(x, head, weight, target, torch.full((2, 5), float(upstream)), options)


SMALL = (2.0**12, 2.0**-12)  # scales of input and head: the gradient of the head is far larger than that of the logits
LARGE = (2.0**-12, 2.0**-12)  # all gradients are far smaller than those of the logits

PROBLEMS = {
    "small": _problem(2.0**-20, *SMALL),
    "small and negative": _problem(-(2.0**-20), *SMALL),
    "large": _problem(2.0**20, *LARGE),
    "large and negative": _problem(-(2.0**20), *LARGE),
    "small class weights": _problem(-(2.0**15), *SMALL, [2.0**-35] * V),
    "large class weights": _problem(-(2.0**-15), *LARGE, [2.0**35] * V),
    "large class weights, small ones of the targets": _problem(
        -1.0, *LARGE, [2.0**-20] * 10 + [2.0**20] * (V - 10), label_smoothing=0.25
    ),
}
NEGATIVE_WEIGHTS = {
    "as many negative class weights": _problem(1.0, *LARGE, [-(2.0**20)] * V, label_smoothing=0.25),
    "class weights that add up to zero": _problem(
        1.0, *LARGE, [2.0**-20] * 9 + [2.0**20, -(2.0**20)] * ((V - 9) // 2), label_smoothing=0.25
    ),
}
