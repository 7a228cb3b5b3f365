"""The floating-point operations of operators with products, for torch.utils.flop_counter.

A product of (n, H) and (H, V) counts 2 n H V. Nothing else counts, the same as for nn.Linear and F.cross_entropy. All
rows count, because only the device knows the number of rows that ``skip_ignored`` leaves out. Rows that fill up a chunk
of ``batch_invariant`` count too.

Importing torch.utils.flop_counter imports Triton (0.1 s). So the formulas are registered once other code imports it.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from ..head.sizes import rows_of_one_shape
from ..kernels.reference import columns_of
from .contract import Call
from .library import OPERATORS

_MODULE = "torch.utils.flop_counter"


def _without_padding(classes: int, call: Call) -> int:
    return columns_of(classes, getattr(call, "class_start", None), getattr(call, "num_classes", None))


def _product(call: Call) -> int:
    """One product with the head, for the classes of a slice or the rows of a chunk."""
    classes, features = call.linear_weight.shape
    rows = math.prod(call.logits.shape[:1] if hasattr(call, "logits") else call.input.shape[:-1])
    classes = _without_padding(classes, call)
    if getattr(call, "batch_invariant", False):
        rows += -rows % rows_of_one_shape(call.input, classes, call.chunk_rows, call.logits_dtype)
    return 2 * rows * features * classes


def _teacher_product(call: Call) -> int:
    classes, features = call.teacher_weight.shape
    if getattr(call, "classes", None) is None:
        classes = _without_padding(classes, call)
    return 2 * math.prod(call.teacher_input.shape[:-1]) * features * classes


def _with_grads(call: Call) -> int:
    """The product for the logits, and one for each gradient in the mask. A bias' gradient is a sum; with shares of rows
    it is a product with them."""
    product, has_shares = _product(call), getattr(call, "shares", None) is not None
    of_bias = product // call.linear_weight.shape[1] if has_shares and call.output_mask[2] else 0
    return (1 + sum(call.output_mask[:2])) * product + of_bias


def _grad_weight_product(call: Call) -> int:
    of_weight = call.input.shape[1] if call.grad_linear_weight.dim() == 2 else 0
    of_bias = 1 if call.shares is not None and call.grad_linear_bias.numel() > 0 else 0
    return 2 * call.input.shape[0] * call.columns * (of_weight + of_bias)


# The operators with products.
FLOPS: dict[str, Callable[[Call], int]] = {
    "linear_cross_entropy_forward": _product,
    "linear_cross_entropy_backward": _with_grads,
    "linear_cross_entropy_with_grad": _with_grads,
    "linear_top_k": _product,
    "linear_divergences_forward": lambda call: _product(call) + _teacher_product(call),
    "linear_divergences_backward": lambda call: _with_grads(call) + _teacher_product(call),
    "linear_divergences_with_grad": lambda call: _with_grads(call) + _teacher_product(call),
    "linear_cross_entropy_shard": _product,
    "linear_logits": _product,
    "linear_grad_input": lambda call: _product(call) if call.with_grad_input else 0,
    "linear_cross_entropy_chunk_add_": _grad_weight_product,
}


def formula(name: str) -> Callable[..., int]:
    """flop_counter calls it with the operator's arguments and with its own keywords."""
    contract = OPERATORS[name].contract

    def flops(*args: Any, **keywords: Any) -> int:
        own = {option: value for option, value in keywords.items() if option in contract.positions}
        return FLOPS[name](contract.bind(args, own))

    return flops


def register(flop_counter: ModuleType) -> None:
    for name in FLOPS:
        operator = getattr(torch.ops.xent, name)
        if operator not in flop_counter.flop_registry:
            flop_counter.register_flop_formula(operator, get_raw=True)(formula(name))


class _WhenImported:
    """Finds flop_counter like the other finders. Its loader registers the formulas at the end."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _MODULE:
            return None
        other_finders = (finder for finder in list(sys.meta_path) if finder is not self)
        spec = next((spec for finder in other_finders if (spec := finder.find_spec(name, path, target))), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def then_register(module: ModuleType) -> None:
            execute(module)
            register(module)

        spec.loader.exec_module = then_register  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Call this after all operators are registered."""
    if _MODULE in sys.modules:
        register(sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, _WhenImported())
