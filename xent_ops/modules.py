"""``nn.Module`` versions of the functions."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from . import functional, linear
from .kernels.options import HeadProducts, Reduction
from .ops import arguments, scalars
from .ops.message_values import type_name


class CrossEntropyLoss(nn.Module):
    """``xent_ops.cross_entropy`` as a module. The state_dict is that of ``nn.CrossEntropyLoss`` (``weight``, if set).

    ``forward(input, target, token_weight=None)``. Arguments, shapes, dtypes, formula and errors are those of
    ``xent_ops.cross_entropy``.

    Examples:
        >>> criterion = xent_ops.CrossEntropyLoss(label_smoothing=0.1)
        >>> logits = torch.randn(4, 10, requires_grad=True)
        >>> criterion(logits, torch.tensor([1, 2, 3, -100])).backward()
    """

    weight: Tensor | None

    @arguments.named
    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        lse_square_scale: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        dim: int = 1,
        inplace_backward: bool = False,
        grad_in_forward: bool = False,
    ) -> None:
        super().__init__()
        rows, self.lse_square_scale, self.reduction = arguments.loss_options(
            ignore_index, label_smoothing, softcap, logit_scale, lse_square_scale, reduction
        )
        self.ignore_index, self.label_smoothing, self.softcap, self.logit_scale = rows
        self.register_buffer("weight", weight)
        self.dim = scalars.integer("dim", dim)
        self.inplace_backward = arguments.boolean("inplace_backward", inplace_backward)
        self.grad_in_forward = arguments.boolean("grad_in_forward", grad_in_forward)

    def forward(self, input: Tensor, target: Tensor, token_weight: Tensor | None = None) -> Tensor:
        options = _options_of(self, _LOGITS_OPTIONS)
        return functional.cross_entropy(input, target, self.weight, token_weight=token_weight, **options)

    def extra_repr(self) -> str:
        return _not_defaults(self, _LOGITS_OPTIONS)


def _options_with_defaults(function: Callable[..., Tensor], *own_names: str) -> dict[str, Any]:
    """The options that a module passes to its function: the keyword-only arguments, except those of each call."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in own_names}


_LOGITS_OPTIONS = _options_with_defaults(functional.cross_entropy, "token_weight")
_HEAD_OPTIONS = _options_with_defaults(
    linear.linear_cross_entropy, "linear_bias", "weight", "divisor", "token_weight", "shard"
)


def _options_of(module: nn.Module, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(module, name) for name in names}


def _not_defaults(module: nn.Module, defaults: dict[str, Any]) -> str:
    options = _options_of(module, defaults)
    return ", ".join(f"{name}={value!r}" for name, value in options.items() if value != defaults[name])


def _size(name: str, value: Any) -> int | None:
    if isinstance(value, (nn.Module, Tensor)):
        raise TypeError(
            f"{name} must be an integer, got {type_name(value)}; LinearCrossEntropyLoss(tied_weight=...) takes "
            "the weight of a head that is there already"
        )
    return None if value is None else scalars.at_least_one(name, value)


def _tied(
    weight: Any,
    num_classes: int | None,
    in_features: int | None,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> nn.Parameter:
    expected = "tied_weight must be a torch.nn.Parameter of shape (V, H), got"
    if not isinstance(weight, nn.Parameter):
        hint = "" if isinstance(weight, Tensor) else arguments.way_to_tensor("tied_weight", weight)
        raise TypeError(f"{expected} {type_name(weight)}{hint}")
    if weight.dim() != 2:
        raise TypeError(f"{expected} one of shape {tuple(weight.shape)}")
    rows, columns = weight.shape
    sizes = (num_classes or rows, in_features or columns)
    if sizes != (rows, columns):
        raise ValueError(f"tied_weight has shape {(rows, columns)}; expected {sizes}, (num_classes, in_features)")
    if device is not None or dtype is not None:
        like = weight.new_empty(0, device=device, dtype=dtype)
        if (like.device, like.dtype) != (weight.device, weight.dtype):
            raise ValueError(
                f"device={device} and dtype={dtype} are of parameters that are made here, but tied_weight is there "
                f"already, {weight.dtype} on {weight.device}: leave them out"
            )
    return weight


class LinearCrossEntropyLoss(nn.Module):
    """The head of a model and its loss as one module: ``xent_ops.linear_cross_entropy`` with its own weight.

    The state_dict is that of ``nn.Linear(in_features, num_classes, bias)``: ``weight`` (V, H) and ``bias`` (V,).

    Args:
        in_features: H.
        num_classes: V.
        bias: whether the head has a bias.
        tied_weight: a Parameter (V, H) to use as the head's weight, for example an embedding's. The sizes may then be
            omitted. If something replaces the module's Parameter, as ``to_empty`` does, the next call raises: tie it
            again by ``head.weight = embedding.weight``. If only the embedding's Parameter is replaced, as by
            ``embedding.load_state_dict(assign=True)``, the module does not notice: tie the head again then.
        class_weight: (V,), a factor for each class. It moves with the module, and is not in its state_dict.
        device, dtype: of the parameters, as in nn.Linear. A tied weight keeps its own.
        others: as for ``xent_ops.linear_cross_entropy``.

    ``forward(input, target, divisor=None, token_weight=None)`` takes input (..., H) and class indices (...). It runs
    the module's hooks, so FSDP2 gathers the weight once for forward and backward.

    Examples:
        >>> embedding = torch.nn.Embedding(1000, 16)
        >>> head = xent_ops.LinearCrossEntropyLoss(tied_weight=embedding.weight)
        >>> tokens = torch.randint(1000, (2, 5))
        >>> head(embedding(tokens[:, :-1]), tokens[:, 1:]).backward()
    """

    class_weight: Tensor | None

    @arguments.named
    def __init__(
        self,
        in_features: int | None = None,
        num_classes: int | None = None,
        bias: bool = False,
        *,
        tied_weight: nn.Parameter | None = None,
        class_weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        lse_square_scale: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        accumulate_dtype: torch.dtype | None = None,
        chunk_rows: int | None = None,
        skip_ignored: bool = False,
        logits_dtype: torch.dtype | None = None,
        products: HeadProducts | None = None,
        batch_invariant: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        loss = arguments.loss_options(ignore_index, label_smoothing, softcap, logit_scale, lse_square_scale, reduction)
        rows, self.lse_square_scale, self.reduction = loss
        self.ignore_index, self.label_smoothing, self.softcap, self.logit_scale = rows
        chunks = (accumulate_dtype, chunk_rows, skip_ignored, logits_dtype, products, batch_invariant)
        self.accumulate_dtype, chunking = arguments.chunks(*chunks)
        self.chunk_rows, self.skip_ignored, self.logits_dtype, self.products, self.batch_invariant = chunking
        in_features, num_classes = _size("in_features", in_features), _size("num_classes", num_classes)
        if tied_weight is None:
            if in_features is None or num_classes is None:
                raise TypeError("LinearCrossEntropyLoss needs in_features and num_classes, or a tied_weight")
            self.weight = nn.Parameter(torch.empty((num_classes, in_features), device=device, dtype=dtype))
        else:
            self.weight = _tied(tied_weight, num_classes, in_features, device, dtype)
        self.num_classes, self.in_features = self.weight.shape
        self.register_parameter("bias", None)
        if arguments.boolean("bias", bias):
            self.bias = nn.Parameter(self.weight.new_empty(self.num_classes))
        self.register_buffer("class_weight", class_weight, persistent=False)
        self.tied = tied_weight is not None
        self._untied: nn.Parameter | None = None
        self.reset_parameters()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LinearCrossEntropyLoss:
        with self._tie_is_watched():
            super()._apply(fn, recurse)
        return self

    def _load_from_state_dict(self, *args: Any, **keywords: Any) -> None:
        with self._tie_is_watched():
            super()._load_from_state_dict(*args, **keywords)

    @contextlib.contextmanager
    def _tie_is_watched(self) -> Iterator[None]:
        """Notice new Parameters from to_empty(), to() another kind of device and load_state_dict(assign=True)."""
        before = self.weight
        yield
        if self.tied and self.weight is not before:
            object.__setattr__(self, "_untied", self.weight)  # not registered: no second name of the Parameter

    def reset_parameters(self) -> None:
        """Initialise as nn.Linear does. A tied weight is not changed."""
        if not self.tied:
            nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0
            nn.init.uniform_(self.bias, -bound, bound)

    @arguments.named
    def forward(
        self,
        input: Tensor,
        target: Tensor,
        divisor: Tensor | float | None = None,
        token_weight: Tensor | None = None,
    ) -> Tensor:
        if self._untied is self.weight:
            raise RuntimeError(
                "the tied weight of LinearCrossEntropyLoss has become a Parameter of its own, as to_empty(), "
                'to("meta") and load_state_dict(assign=True) make it: tie it again, head.weight = embedding.weight'
            )
        return linear.linear_cross_entropy(
            input,
            self.weight,
            target,
            linear_bias=self.bias,
            weight=self.class_weight,
            divisor=divisor,
            token_weight=token_weight,
            **_options_of(self, _HEAD_OPTIONS),
        )

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, num_classes={self.num_classes}, bias={self.bias is not None}"
        options = _not_defaults(self, _HEAD_OPTIONS)
        return f"{sizes}, {options}" if options else sizes
