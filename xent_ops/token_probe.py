"""Parts of the first call of a user's function of tokens, which runs on two tokens of zeros."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .ops.foreign_names import refuse_field

PROBED = 2  # tokens: with only one, a sum over tokens would have the right shape
_HOST_READS = frozenset(
    getattr(owner, name)
    for owner, names in (
        (Tensor, "item tolist numpy __array__ __bool__ __int__ __float__ __complex__ __index__ __contains__"),
        (Tensor, "equal allclose is_nonzero"),
        (torch, "equal allclose is_nonzero"),
    )
    for name in names.split()
)
_without_host_reads: set[CodeType] = set()


def _leaves(*values: Any) -> Iterator[Any]:
    """What these values contain, in tuples, lists and dicts too."""
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _leaves(*value)
        elif isinstance(value, dict):
            yield from _leaves(*value.values())
        else:
            yield value


class _HostReads(TorchFunctionMode):
    """Raise if the function reads a value of its tokens. It may read the values of other tensors, its constants."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.of_tokens = {id(tensor): tensor for tensor in tensors}  # tensors stay alive, so that no id is used again

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_compiling():  # in code that fn compiles
            return func(*args, **(kwargs or {}))
        reads_tokens = any([id(leaf) in self.of_tokens for leaf in _leaves(args, kwargs)])
        if reads_tokens and func in _HOST_READS:
            raise RuntimeError(
                f"fn reads a value of its tokens by {getattr(func, '__name__', func)}(): this number would be a "
                "constant to autograd, and another one in each chunk. Compute with tensors (torch.where for a branch). "
                "For logging, keep tensor.detach() and read it after the call"
            )
        result = func(*args, **(kwargs or {}))
        if reads_tokens and func is Tensor.__setitem__:
            self.of_tokens[id(args[0])] = args[0]
        if reads_tokens:
            self.of_tokens |= {id(leaf): leaf for leaf in _leaves(result) if isinstance(leaf, Tensor)}
        return result


def first_call(fn: Callable[..., Any], stats: FieldRecorder, rows: list[Tensor], shape: torch.Size) -> Any:
    """The function's value for PROBED tokens of zeros. ``shape``: that of all tokens."""
    if torch.compiler.is_compiling():
        return fn(stats, *rows)
    try:
        with _host_reads_refused(fn, [*stats.fields.values(), *rows]):
            value = fn(stats, *rows)
        # A leaf that requires grad has refused a write itself.
        if any([not field.is_leaf and field._version > 0 for field in stats.fields.values()]):
            stats.refuse_write()
        return value
    except Exception as error:
        _refuse_other_parameters(fn, stats, *rows)
        if re.search(r"\b(size|shape)", str(error)):
            refuse_closure_over_all_tokens(fn, shape, error)
        if "leaf Variable that requires grad is being used in an in-place" in str(error):
            stats.refuse_write()
        add_note = getattr(error, "add_note", lambda text: None)  # Python 3.11 has it
        add_note(
            f"raised by fn, which is called on parts of the tokens, first on {PROBED} of zeros to see what it "
            f"reads: a tensor of all tokens, as (B, S), must come by rows=, here {len(rows)} of them"
        )
        raise


def refuse_closure_over_all_tokens(fn: Any, shape: torch.Size, error: Exception | None = None) -> None:
    """Raise if fn, which failed, closes over a tensor with a number for each of all tokens."""
    if torch.compiler.is_compiling() or not inspect.isfunction(fn):
        return
    closure = inspect.getclosurevars(fn)
    for name, value in {**closure.globals, **closure.nonlocals}.items():
        if isinstance(value, Tensor) and (value.shape[: len(shape)] == shape or value.shape == (shape.numel(),)):
            raise ValueError(
                f"fn closes over {name}, which has shape {tuple(value.shape)}, the numbers of all tokens, but fn gets "
                f"a part of the tokens at a time: pass rows=({name},), and take it as a parameter, fn(stats, {name})"
            ) from error


def _refuse_other_parameters(fn: Callable[..., Any], *args: Any) -> None:
    with contextlib.suppress(ValueError):  # a builtin has no signature
        signature = inspect.signature(fn)
        try:
            signature.bind(*args)
        except TypeError as error:
            raise TypeError(
                f"fn has the parameters {signature}, but gets (stats, *rows) with {len(args) - 1} rows: one "
                f"parameter for stats and one for each tensor of rows= ({error})"
            ) from None


@contextlib.contextmanager
def _host_reads_refused(fn: Any, tensors: list[Tensor]) -> Iterator[None]:
    """Refuse host reads in the first call of a function. If it closes over nothing, later ones do not pay for this."""
    code = None  # equal code of another closure may read what this one does not
    if not (getattr(fn, "__closure__", True) or fn.__defaults__ or fn.__kwdefaults__ or hasattr(fn, "__self__")):
        code = fn.__code__
    if code in _without_host_reads or hasattr(fn, "_torchdynamo_orig_callable"):  # torch.compile would trace the mode
        yield
        return
    with _HostReads(tensors):
        yield
    if code is not None:
        _without_host_reads.add(code)


def is_learned_elsewhere(value: Tensor, *own_leaves: Tensor) -> bool:
    """Would a backward of this value add to the gradient of another leaf?"""
    own = {id(leaf) for leaf in own_leaves}
    if value.grad_fn is None:
        return value.requires_grad and id(value) not in own
    nodes, seen = [value.grad_fn], {value.grad_fn}
    for node in nodes:
        variable = getattr(node, "variable", None)  # AccumulateGrad has it
        if variable is not None and id(variable) not in own:
            return True
        found = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= found
        nodes += found
    return False


class FieldRecorder:
    """The fields of tokens: in the first call zeros, and it records those that are read; later calls may read these."""

    record: Any  # the NamedTuple that it stands for
    learned: tuple[str, ...]  # the fields that have a gradient

    def __init__(self, fields: dict[str, Tensor], readable: Sequence[str] | None = None) -> None:
        self.fields, self.readable = fields, readable
        self.read: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name not in self.record._fields:
            refuse_field(self.record.__name__, name, self.record._fields)
        if self.readable is not None and name not in self.readable:
            raise RuntimeError(
                f"fn reads stats.{name}, which it did not read in its first call, on {PROBED} tokens of zeros. Only "
                f"what that call reads is computed. Read stats.{name} on every path, in front of a branch, or pass "
                "rows= with what the branch depends on (torch.where chooses)"
            )
        self.read.append(name)
        return self.fields[name]

    def refuse_write(self) -> NoReturn:
        raise RuntimeError(
            f"fn writes in place to {self.listed(self.learned, 'or')}, whose gradient it would lose: make a new tensor "
            "instead, as stats.lse * 2 for stats.lse.mul_(2), and torch.where(mask, 0.0, value) for value[mask] = 0.0"
        )

    @staticmethod
    def listed(names: Sequence[str], last: str) -> str:
        first = [f"stats.{name}" for name in names]
        return f"{', '.join(first[:-1])} {last} {first[-1]}"

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        fields = cls.record._fields
        raise TypeError(
            f"fn gets (stats, *rows), and stats is no tensor: it has {cls.listed(fields, 'and')}, which are tensors "
            f"({', '.join(fields)} = stats)"
        )

    def __iter__(self) -> Iterator[Tensor]:
        return iter([getattr(self, name) for name in self.record._fields])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int):
            return getattr(self, self.record._fields[index])
        if not isinstance(index, slice):
            _no_tensor(self)
        return tuple([getattr(self, name) for name in self.record._fields[index]])

    def __len__(self) -> int:
        return len(self.record._fields)


def _no_tensor(recorder: FieldRecorder, *_: Any) -> Any:
    recorder.__torch_function__()


_OTHERS = "neg pos abs invert bool float int complex index round floor ceil trunc call contains setitem delitem"
_COMPARING = "lt le gt ge eq ne"
_BINARY = "add sub mul truediv floordiv mod divmod pow matmul and or xor lshift rshift"
for _name in f"{_OTHERS} {_COMPARING} {_BINARY} r{_BINARY.replace(' ', ' r')}".split():
    setattr(FieldRecorder, f"__{_name}__", _no_tensor)
