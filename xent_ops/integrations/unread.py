"""Logits that were not computed: code may reshape, scale and cap them, and give them to F.cross_entropy.

Every other use raises and names itself. So code that reads its logits never gets wrong ones, and nothing has to be
known about a model before it is called.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.options import Activation


class NotComputed:
    """In place of a tensor. It is none, so that only what a subclass defines can be done with it.

    All else raises and names itself: torch's functions, attributes, operators.
    """

    def refusal(self, use: str) -> Exception:
        raise NotImplementedError

    def refuse(self, use: str, *operands: Any) -> NoReturn:
        raise self.refusal(use)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        values = [value if isinstance(value, (tuple, list)) else (value,) for value in (*args, *kwargs.values())]
        one = next(one for value in values for one in value if isinstance(one, cls))
        one.refuse(f"{name} with {', '.join(kwargs)}" if kwargs else name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a protocol that it does not have
            raise AttributeError(name)
        self.refuse(name)


# What Python would answer in another way, or would answer without a name.
_OPERATORS = (
    "add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv pow matmul rmatmul neg abs eq ne lt le gt ge "
    "bool float len iter getitem setitem array reduce"
)
for _name in _OPERATORS.split():
    setattr(NotComputed, f"__{_name}__", functools.partialmethod(NotComputed.refuse, f"__{_name}__"))


class Unread(NamedTuple):
    """What the logits x are: after * tanh(before * z), or before * z + bias, where z = head(rows)."""

    owner: Any  # has refusal(use), and cross_entropy(logits, target, ...) with the options of F.cross_entropy
    rows: Tensor  # (..., H), the head's input, sliced and reshaped as the logits were
    classes: int
    dtype: torch.dtype
    autocast: torch.dtype | None = None  # in the call of the head
    grid: tuple[int, ...] | None = None  # the rows' shape before they were reshaped
    before: float = 1.0
    tanh: bool = False
    after: float = 1.0
    bias: Tensor | None = None  # (classes,)

    def tail(self) -> Activation:
        return Activation(self.after, self.before * self.after) if self.tanh else Activation(None, self.before)


class UnreadLogits(NotComputed):
    """In place of the logits that a head returns."""

    def __init__(self, state: Unread) -> None:
        self.unread = state

    def changed(self, **changes: Any) -> UnreadLogits:
        # Not _replace: Dynamo of torch 2.11 cannot rebuild what it returns.
        return type(self)(Unread(**(self.unread._asdict() | changes)))

    def refusal(self, use: str) -> Exception:
        return self.unread.owner.refusal(use)

    def like(self) -> Tensor:
        """One number, expanded to the logits' shape."""
        state = self.unread
        return state.rows.new_zeros((), dtype=state.dtype).expand(*state.rows.shape[:-1], state.classes)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if func is F.cross_entropy and isinstance(args[0], cls):
            return args[0].cross_entropy(*args[1:], **kwargs)
        if name in _FUNCTIONS and isinstance(args[0], cls) and not kwargs:
            return getattr(args[0], name)(*args[1:])
        if name in ("add", "mul") and isinstance(args[1], cls) and not kwargs:
            return getattr(args[1], name)(args[0])
        return super().__torch_function__(func, types, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "size", "dim", "ndim", "numel", "dtype", "device", "is_cuda"):
            return getattr(self.like(), name)
        return super().__getattr__(name)

    def to(self, *args: Any, **kwargs: Any) -> UnreadLogits:
        dtype = self.unread.rows.new_empty(0, dtype=self.dtype).to(*args, **kwargs).dtype
        if dtype != self.dtype and (dtype != torch.float32 or self.dtype == torch.float64):  # it would round them
            self.refuse(f"a cast from {self.dtype} to {dtype}")
        return self.changed(dtype=dtype)

    def float(self) -> UnreadLogits:
        return self.to(torch.float32)

    def contiguous(self) -> UnreadLogits:
        return self

    def view(self, *shape: Any) -> UnreadLogits:
        rows, classes = self.unread.rows, self.unread.classes
        shape = tuple(self.like().view(*shape).shape)
        if shape[-1:] != (classes,):
            self.refuse(f"a view of shape {shape}, {classes} classes")
        return self.changed(rows=rows.reshape(*shape[:-1], rows.shape[-1]), grid=self.unread.grid or rows.shape[:-1])

    def flatten(self, *dims: int, **named: int) -> UnreadLogits:
        return self.view(self.like().flatten(*dims, **named).shape)

    def __getitem__(self, index: Any) -> UnreadLogits:
        items = list(index) if isinstance(index, tuple) else [index]
        if any([item is not Ellipsis and not isinstance(item, (slice, Tensor)) for item in items]):
            self.refuse("an index that is not a slice or a tensor")
        # A mask of several dimensions is one item.
        more = sum([item.dim() - 1 for item in items if isinstance(item, Tensor) and item.dtype == torch.bool])
        for place in [place for place, item in enumerate(items) if item is Ellipsis]:
            items[place : place + 1] = [slice(None)] * (self.dim() - more - len(items) + 1)
        if len(items) + more == self.dim():
            last = items.pop()
            if not isinstance(last, slice) or last.indices(self.unread.classes) != (0, self.unread.classes, 1):
                self.refuse("an index of classes")
        return self.changed(rows=self.unread.rows[tuple(items)], grid=None)

    def mul(self, factor: Any) -> UnreadLogits:
        state = self.unread
        if not isinstance(factor, (int, float)) or state.bias is not None:
            self.refuse("a product with a tensor" if state.bias is None else "a product after a sum")
        return self.changed(after=state.after * factor) if state.tanh else self.changed(before=state.before * factor)

    def div(self, divisor: Any) -> UnreadLogits:
        if not isinstance(divisor, (int, float)) or divisor == 0:
            self.refuse("a quotient by a tensor, or by 0")
        return self.mul(1 / divisor)

    def tanh(self) -> UnreadLogits:
        if self.unread.tanh or self.unread.bias is not None:
            self.refuse("tanh after tanh, or after a sum")
        return self.changed(tanh=True)

    def add(self, bias: Any) -> UnreadLogits:
        state = self.unread
        fits = isinstance(bias, Tensor) and 0 < bias.dim() <= self.dim()
        if not fits or not state.classes == bias.numel() == bias.shape[-1]:
            self.refuse("a sum with something else than one number a class")
        if state.tanh or state.before != 1.0 or state.bias is not None:
            self.refuse("a sum after a product, tanh or another sum")
        return self.changed(bias=bias.flatten(), dtype=torch.promote_types(self.dtype, bias.dtype))

    reshape, clone = view, contiguous
    __mul__, __rmul__, __truediv__, __add__, __radd__ = mul, mul, div, add, add

    def cross_entropy(self, target: Any, weight: Any = None, **options: Any) -> Tensor:
        """F.cross_entropy, which passes its further arguments by name."""
        others = (weight, options.pop("size_average", None), options.pop("reduce", None))
        if any([value is not None for value in others]):
            self.refuse("cross_entropy with weight, size_average or reduce")
        if not isinstance(target, Tensor) or target.is_floating_point():
            self.refuse("cross_entropy with class probabilities")
        if self.dim() != 2 or target.dim() != 1:
            self.refuse(f"cross_entropy of shapes {tuple(self.shape)} and {tuple(target.shape)}")
        return self.unread.owner.cross_entropy(self, target, **options)


# Torch's functions that are methods here.
_FUNCTIONS = ("reshape", "flatten", "clone", "mul", "div", "tanh", "add")
# Dynamo's errors show this name where it puts a function of tensors alone into the graph: for a CrossEntropyLoss that a
# forward makes, and F.tanh. Without fullgraph=True the graph breaks there.
UnreadLogits.__name__ = (
    "UnreadLogits of use_xent: for one graph call remove_xent(model) and compile a function that returns the loss "
    "alone with options=xent_ops.inductor.options(linear=True)"
)
