"""An operator's contract: its arguments by name, their checks, and the shapes and dtypes of its results.

All three follow from the names in its schema, with the tables in names.py and rules.py. DERIVED_SIZES and RESULT_DTYPES
compute the sizes and dtypes that no argument has.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..head import shard
from ..head.products import accumulator_of_weight
from ..kernels import divergences
from ..kernels.reference import accumulator, columns_of
from ..kernels.rows import padded_classes
from . import checks, rules
from .checks import static
from .names import ARGUMENTS, RESULTS

Call = rules.Call
Row = tuple[str, Any, str]  # a row of names.py; the shape of a result may be a function of the call
Outputs = list[tuple[tuple[int, ...], torch.dtype]]  # shape and dtype of each result

DTYPES = {
    "float": checks.FLOATS,
    "index": checks.INDICES,
    "divisor": checks.DIVISORS,
    "int32": (torch.int32,),
}
NAMES = {"probabilities": "target"}  # names of arguments in public functions, used in messages


def classes_of(call: Call) -> int:
    """The number of columns that are classes. The columns behind them are padding."""
    return columns_of(rules.width(call), getattr(call, "class_start", 0), getattr(call, "num_classes", None))


def packed_width(call: Call) -> int:
    """The number of values in the packed statistics of a rank."""
    rows, ids = call.target.numel(), getattr(call, "ids", None)
    ids_per_row = 0 if ids is None else ids.shape[-1]
    return shard.width(rows, call.weight is not None, getattr(call, "with_entropy", False), ids_per_row)


# Sizes that no argument has. Each is computed from the call and the dtype of the tensor with this size.
DERIVED_SIZES: dict[str, Callable[[Call, torch.dtype], int]] = {
    "S": lambda call, dtype: divergences.STATISTICS,
    "F": lambda call, dtype: len(divergences.FIELDS),
    "L": lambda call, dtype: 2,  # an lse and its lse_low
    "P": lambda call, dtype: padded_classes(classes_of(call), dtype),
    "W": lambda call, dtype: packed_width(call),
}
CHECKED_LAST = frozenset(("P", "W"))  # computed from arguments, so these must be checked before
# Dtypes of results that no argument has.
RESULT_DTYPES: dict[str, Callable[[Call], torch.dtype]] = {
    "acc": lambda call: accumulator(call.primary),
    "int64": lambda call: torch.int64,
    "dtype": lambda call: call.dtype or torch.float32,
    "grad_dtype": lambda call: getattr(call, "grad_dtype", None) or call.logits.dtype,
    "logits_dtype": lambda call: getattr(call, "logits_dtype", None) or call.input.dtype,
    "sum_dtype": lambda call: accumulator_of_weight(call.input.dtype, call.accumulate_dtype),
}


class Shape(NamedTuple):
    before: tuple[str, ...]  # sizes before the rows
    rows: bool
    behind: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> Shape:
        before, rows, behind = text.rpartition("...")
        shape = cls(tuple(before.split()), bool(rows), tuple(behind.split()))
        return ROWS if shape == ROWS else shape


ROWS = Shape((), True, ())  # one number per row


class Argument(NamedTuple):
    position: int  # among the operator's arguments
    name: str
    dtypes: tuple[torch.dtype, ...] | None  # None: see ``like``
    like: str
    shape: Shape
    gives: frozenset[str]  # the sizes that this argument defines
    or_scalar: bool
    meaning: str
    # For each size after the rows: a number, or the (argument, axis) that defines it. None: this argument; (): derived.
    givers: tuple[int | tuple[int, ...] | None, ...]


class Contract:
    """Built once per operator.

    Args:
        schema: the schema of the operator.
        arguments, results: rows for names with another meaning than in names.py. None: not checked.
        rows_of: from a call, the tensor with the rows and the device, if it is not the first one of names.py.
        own_rules: rules of this operator only.
    """

    def __init__(
        self,
        schema: Any,
        arguments: Mapping[str, Row | None],
        results: Mapping[str, Row],
        rows_of: Callable[[Call], Tensor] | None,
        own_rules: Sequence[Callable[[Call], None]],
    ) -> None:
        self.arguments = [argument.name for argument in schema.arguments]
        self.keyword_only = [argument.name for argument in schema.arguments if argument.kwarg_only]
        self.positions = {name: index for index, name in enumerate(self.arguments)}
        table: dict[str, Row | None] = {**ARGUMENTS, **arguments}
        rows = {name: table.get(name) for name in self.arguments}
        self.primary = next(name for name in ARGUMENTS if rows.get(name) is not None)
        # A namedtuple has its defaults at the end, like the schemas.
        self.required = [argument.name for argument in schema.arguments if not argument.has_default_value()]
        defaults = [argument.default_value for argument in schema.arguments if argument.has_default_value()]
        record = namedtuple("Call", self.arguments, defaults=defaults)  # type: ignore[misc]
        position = self.positions[self.primary]
        primary = rows_of or (lambda call: call[position])  # Dynamo cannot trace itemgetter
        tensor_names = frozenset(argument.name for argument in schema.arguments if "Tensor" in str(argument.type))
        self.Call = type("Call", (record,), {"primary": property(primary), "tensors": tensor_names})
        self.givers: dict[str, tuple[int, int]] = {}  # size -> (index of the argument that defines it, axis)
        tensors = [self._argument(name, *row) for name in ARGUMENTS if (row := rows.get(name)) is not None]
        self.checked_last = [one for one in tensors if not CHECKED_LAST.isdisjoint(one.shape.behind)]
        self.tensors = [one for one in tensors if one not in self.checked_last]
        fixed = dict(zip(self.arguments[len(self.required) :], defaults, strict=True))
        # (index, default, rule). A required argument never equals its default.
        self.rules: list[tuple[int, Any, Callable[[Call], None]]] = []
        for names, rule, unless in rules.RULES:
            if names[0] in rows and unless not in rows:
                always = [name for name in names if name in self.required]
                for name in always[:1] or [name for name in names if name in rows]:
                    self.rules.append((self.positions[name], fixed.get(name, ...), rule))
        self.rules += [(0, ..., rule) for rule in own_rules]
        self.results = [self._result(one.name, {**RESULTS, **results}) for one in schema.returns]

    def _argument(self, name: str, dtype: str, text: str, meaning: str) -> Argument:
        text, or_scalar, _ = text.partition(" | ()")
        index, shape = self.positions[name], Shape.of(text)
        places = [*enumerate(shape.before), *((axis - len(shape.behind), one) for axis, one in enumerate(shape.behind))]
        known = {*self.givers, *DERIVED_SIZES}
        own = {size: (index, axis) for axis, size in places if not (size in known or size.isdigit())}
        self.givers |= own
        givers = tuple(
            [None if one in own else int(one) if one.isdigit() else self.givers.get(one, ()) for one in shape.behind]
        )
        meaning = meaning.format(primary=self.primary) + (", or ()" if or_scalar else "")
        return Argument(index, name, DTYPES.get(dtype), dtype, shape, frozenset(own), bool(or_scalar), meaning, givers)

    def _result(self, name: str, table: Mapping[str, Row]) -> tuple[str, Any, str]:
        if name not in table:
            raise ValueError(f"the result {name!r} has no row in ops/names.py")
        dtype, text, condition = table[name]
        shape = Shape.of(text) if isinstance(text, str) else text
        if isinstance(shape, Shape):
            for size in (*shape.before, *shape.behind):
                if size not in self.givers and size not in DERIVED_SIZES and not size.isdigit():
                    raise ValueError(f"the result {name!r} has a size {size!r}, which no argument gives")
        optional = condition.partition(" ")[0] in self.positions
        return dtype, shape, condition if optional else ""

    def blank(self, **arguments: Any) -> Call:
        """A call in which some arguments may be missing."""
        return self.Call(**dict.fromkeys(self.required) | arguments)

    def bind(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> Call:
        return self.Call(*args, **keywords)

    # Checks

    def check(self, call: Call) -> None:
        self.check_tensors(call)
        for index, default, rule in self.rules:
            if call[index] is not default:  # identity, not equality: comparing would specialise a symbolic number
                rule(call)
        if self.checked_last:
            self.check_tensors(call, tensors=self.checked_last)

    def check_tensors(self, call: Call, called: Mapping[str, str] = NAMES, tensors: Any = None) -> None:
        """``called``: other names of arguments, for messages."""
        primary = call.primary
        device, rows = primary.device, primary.shape[:-1]
        known = static(rows)
        for argument in self.tensors if tensors is None else tensors:
            index, name, dtypes, like, shape = argument[:5]
            tensor = call[index]
            if tensor is None:
                continue
            if dtypes is None:
                self._same_dtype(name, tensor, like, call, called)
            elif tensor.dtype not in dtypes:
                checks.dtype(called.get(name, name), tensor, dtypes)
            sizes = tensor.shape
            if not (
                known and static(sizes) and (sizes == rows if shape is ROWS else _fits(argument, sizes, rows, call))
            ):
                self._same_shape(argument, tensor, rows, call, called)
            if tensor.device != device:
                anchor = "logits" if name == "weight" else self.primary  # the same for the classes of a head
                checks.same_device(called.get(name, name), tensor, primary, rules.are(called.get(anchor, anchor)))

    def size(self, name: str, call: Call, dtype: torch.dtype) -> int:
        place = self.givers.get(name)
        if place is not None:
            return call[place[0]].shape[place[1]]
        return DERIVED_SIZES[name](call, dtype) if name in DERIVED_SIZES else int(name)

    def _same_dtype(self, name: str, tensor: Tensor, like: str, call: Call, called: Mapping[str, str]) -> None:
        if like == "any":
            return
        peer = like.removeprefix("=")
        expected = RESULT_DTYPES[like](call) if peer == like else getattr(call, peer).dtype
        if tensor.dtype == expected:
            return
        if peer == like:
            raise TypeError(f"{called.get(name, name)} has dtype {tensor.dtype}; expected {expected}")
        raise TypeError(
            f"{called.get(name, name)} has dtype {tensor.dtype} but {called.get(peer, peer)} {expected}; both must be "
            "the same, as for nn.Linear (torch.autocast casts both)"
        )

    def _same_shape(self, argument: Argument, tensor: Tensor, rows: Any, call: Call, called: Mapping[str, str]) -> None:
        """Check the sizes. A size that the argument itself defines is right, but one of AT_LEAST_ONE must not be 0."""
        sizes, (before, has_rows, behind) = tensor.shape, argument.shape
        if argument.or_scalar and len(sizes) == 0:
            return
        text, own = called.get(argument.name, argument.name), argument.gives
        middle: Any = rows if has_rows else ()
        if has_rows and argument.name == self.primary:
            middle = sizes[: len(sizes) - len(behind)]
            if len(sizes) < len(behind):
                expected_text = f"(..., {' '.join(behind)}){argument.meaning and f', {argument.meaning}'}"
                raise ValueError(f"{text} {rules.have(text)} no dimension; expected shape {expected_text}")
        fits = len(sizes) == len(before) + len(middle) + len(behind)
        names = [*before, *[None] * len(middle), *behind]
        own = own | {size for size in names if size in self.givers and call[self.givers[size][0]] is None}
        expected = [
            (sizes[axis] if fits else size)
            if size in own
            else middle[axis - len(before)]
            if size is None
            else self.size(size, call, tensor.dtype)
            for axis, size in enumerate(names)
        ]

        def message() -> str:
            expected_text = [
                size if size in own and len(size) > 1 else expected_size
                for size, expected_size in zip(names, expected, strict=True)
            ]
            find_hint = rules.HINTS.get(argument.name)
            expected_text, hint = (expected_text, "") if find_hint is None else find_hint(call, text, expected_text)
            sizes_text = ", ".join(map(str, expected_text)) + ("," if len(expected_text) == 1 else "")
            return f"{text} has shape {tuple(sizes)}; expected ({sizes_text}), {argument.meaning}{hint}"

        checks.check_value(fits, message)
        for size, expected_size in zip(sizes, expected, strict=True):
            if not (type(size) is type(expected_size) is int and size == expected_size):
                checks.check_value(size == expected_size, message)
        for name in own & rules.AT_LEAST_ONE:
            rules.at_least_one(text, tensor, sizes[self.givers[name][1]], call)

    # Results

    def outputs(self, call: Call) -> Outputs:
        return [self._output(call, *result) for result in self.results]

    def _output(self, call: Call, dtype: str, shape: Any, condition: str) -> tuple[tuple[int, ...], torch.dtype]:
        own_dtype = RESULT_DTYPES[dtype](call) if dtype in RESULT_DTYPES else getattr(call, dtype[1:]).dtype
        name, _, place = condition.partition(" ")
        value = getattr(call, name)[int(place)] if place else getattr(call, name, True)
        if value is None or value is False:
            return (0,), own_dtype
        if not isinstance(shape, Shape):
            return shape(call), own_dtype
        before, behind = (
            [self.size(name, call, own_dtype) for name in names] for names in (shape.before, shape.behind)
        )
        rows = call.primary.shape[:-1] if shape.rows else ()
        return (*before, *rows, *behind), own_dtype


def _fits(argument: Argument, sizes: Sequence[int], rows: Sequence[int], call: Call) -> bool:
    """Is the shape certainly right? If not, ``_same_shape`` decides."""
    givers = argument.givers
    number = len(sizes) - len(givers)
    if argument.shape.before or number < 0 or sizes[:number] != (rows if argument.shape.rows else ()):
        return False
    for size, place in zip(sizes[number:], givers, strict=True):
        if type(place) is tuple:
            giver = call[place[0]] if place else None
            expected = None if giver is None else giver.shape[place[1]]
            if type(expected) is not int or size != expected:
                return False
        elif size <= 0 if place is None else size != place:
            return False
    return True
