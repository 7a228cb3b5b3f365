"""What every operator is called with, from its contract: a new operator needs no line here.

``variants`` calls an operator with its required arguments, with each other argument at each of its values, and with all
that go together. The contract decides which do: its errors name the arguments that a call lacks. Tensors follow from
the names in its schema, options have the values of option_values.py. What must be refused is in refusals.py.
"""

import functools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from helpers.option_values import BY_TYPE, VALUES, arguments_of

from xent_ops.kernels.options import RowOptions
from xent_ops.kernels.reference import accumulator
from xent_ops.kernels.rows import padded_classes
from xent_ops.ops.contract import DERIVED_SIZES, Contract, Shape
from xent_ops.ops.formulas import run
from xent_ops.ops.library import OPERATORS
from xent_ops.ops.names import ARGUMENTS, RESULTS
from xent_ops.ops.rules import BY_NAME
from xent_ops.ops.schemas import COMPOSITES, SCHEMAS

ops = torch.ops.xent


class Sample(NamedTuple):
    name: str
    args: tuple[Any, ...]
    options: dict[str, Any]


class Problem(NamedTuple):
    """Sizes of a call. ``place``: where a slice of ``classes`` begins, and the number of classes of all slices."""

    rows: tuple[int, ...] = (6,)
    classes: int = 37
    place: tuple[int, int] = (5, 50)
    teacher_classes: int | None = None
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    requires_grad: bool = False
    apart: bool = False  # rows with a gap between them, and one target for all

    def size(self, name: str) -> int:
        sizes = {"V": self.classes, "columns": self.classes, "T": self.teacher_classes or self.classes}
        return int(name) if name.isdigit() else {**sizes, "H": 16, "G": 4, "K": 3}[name]


ROWS, SCALAR, EMPTY = "a tensor", "a tensor of shape ()", "a tensor of shape (0,)"
LEAVES = {"logits", "input", "linear_weight", "linear_bias", "probabilities"}
OF_PROBLEM = {*LEAVES, "grad", "grad_logits", "grad_linear_weight", "grad_input", "value"}  # of its dtype
NOT_CHECKED = {"after": ("float", "3", ""), "value": ("float", "", "")}  # beside results of that name
MAY_BE_EMPTY = {"grad_linear_weight", "grad_linear_bias"}


@functools.cache
def contract_of(name: str) -> Contract:
    if name in OPERATORS:
        return OPERATORS[name].contract
    loss = {"loss": ("acc", lambda call: (), "")}
    contract = Contract(getattr(ops, name).default._schema, {}, loss, None, ())

    def reduction(call: Any) -> None:  # a composite also returns rows
        if call.reduction != "none" or getattr(call, "divisor", None) is not None:
            BY_NAME["reduction"](call)

    contract.rules = [
        (i, default, reduction if rule is BY_NAME["reduction"] else rule) for i, default, rule in contract.rules
    ]
    return contract


@functools.cache
def _tensor_rows(name: str) -> dict[str, tuple[str, Shape]]:
    """The class of dtypes and the shape of each tensor of an operator."""
    checked = contract_of(name)
    rows = {one.name: (one.like, one.shape) for one in (*checked.tensors, *checked.checked_last)}
    for argument in arguments_of(name).values():
        if "Tensor" in str(argument.type) and argument.name not in {*rows, *VALUES}:
            like, shape, _ = {**ARGUMENTS, **RESULTS, **NOT_CHECKED}[argument.name]
            rows[argument.name] = like, Shape.of(shape)
    return rows


@functools.cache
def _optional(name: str) -> list[str]:
    """The arguments that a call may go without."""
    return [
        one.name for one in arguments_of(name).values() if one.has_default_value() or str(one.type).startswith("Opt")
    ]


def values_of(name: str, argument: str, problem: Problem) -> list[Any]:
    """The values of an argument. Of a required one, the first is that of most calls."""
    found, kind = arguments_of(name)[argument], str(arguments_of(name)[argument].real_type)
    if argument in VALUES:
        values = VALUES[argument]
        return list(values[:1] if "float" in kind else values)
    if "Tensor" in kind:
        rows = {one.name: one.or_scalar for one in contract_of(name).tensors}
        return [ROWS, *[SCALAR] * rows.get(argument, False), *[EMPTY] * (argument in MAY_BE_EMPTY)]
    if kind in ("int", "Optional[int]"):
        start, total = problem.place
        of_slice = {
            "class_start": [start, 0],
            "num_classes": [total, start + problem.classes - 7],
            "columns": [problem.classes],
        }
        return of_slice.get(argument, [2])
    return [value for value in BY_TYPE[kind] if not found.has_default_value() or value != found.default_value]


@functools.lru_cache(100)
def _random(name: str, shape: tuple[int, ...], device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator).to(device)


def _target(name: str, shape: Sequence[int], ignore_index: int, problem: Problem) -> torch.Tensor:
    """Classes that every slice and every padded head has. Some are ignored, and of several a row the last is the first."""
    classes = (_random(name, tuple(shape), problem.device).abs() * 1000).long() % max(1, problem.classes - 7)
    classes = classes[..., :1].expand(shape).clone() if problem.apart and shape else classes
    if name == "ids" and classes.numel():
        classes[..., -1] = classes[..., 0]
    if classes.numel() > 3 and not problem.apart:
        classes.view(-1)[3:5] = ignore_index
    return classes


def _tensor(name: str, argument: str, kind: str, values: dict[str, Any], problem: Problem) -> torch.Tensor:
    like, shape = _tensor_rows(name)[argument]
    own, primary = problem.dtype, values.get(contract_of(name).primary)
    wide = accumulator(torch.empty(0, dtype=own))
    if like == "index":
        sizes = [*(problem.rows if shape.rows else ()), *map(problem.size, shape.behind)]
        if argument == "classes":  # all different
            return torch.arange(sizes[0], device=problem.device).flip(0)
        return _target(argument, sizes, values.get("ignore_index", -100), problem)
    if like == "int32":
        return torch.tensor(3, dtype=torch.int32, device=problem.device)
    if argument == "divisor":
        return torch.tensor(3, device=problem.device)
    if argument.startswith("teacher"):
        dtype = torch.float64 if own == torch.float64 else torch.float32
    else:
        dtype = own if argument in OF_PROBLEM or like == "=input" else torch.float32 if argument == "weight" else wide
    if argument == "grad_linear_bias" and primary is not None and "columns" in values:
        dtype = wide  # the sum over chunks
    call = contract_of(name).blank(**{key: value for key, value in values.items() if value is not None})

    def size(letter: str) -> int:
        return DERIVED_SIZES[letter](call, dtype) if letter in DERIVED_SIZES else problem.size(letter)

    sizes = [*map(size, shape.before), *(problem.rows if shape.rows else ()), *map(size, shape.behind)]
    if argument == "grad_logits" and "columns" in values:
        sizes[-1] = padded_classes(values["columns"], dtype)
    if kind in (SCALAR, EMPTY):
        sizes = [] if kind == SCALAR else [0]
    if problem.apart and argument == contract_of(name).primary and len(sizes) > 2:
        whole = _random(argument, (*sizes[:-2], sizes[-2] + 1, sizes[-1]), problem.device)
        return (whole / 2).to(dtype)[..., :-1, :]
    tensor = _random(argument, tuple(sizes), problem.device)
    if argument == "joined":  # at one temperature one lse serves the log-probability, and the teacher has one
        tensor = torch.cat([tensor[:5], tensor[:2], tensor[7:9], tensor[7:9]])
    if argument == "probs":  # of some classes: with a tail they add up to one at most
        return (tensor.softmax(-1) / 2).to(dtype)
    positive = argument in ("weight", "token_weight", "divisors", "probabilities")
    return (tensor.abs() + 0.1 if positive else tensor / 2).to(dtype)


def _gathered(name: str, values: dict[str, Any], problem: Problem) -> torch.Tensor:
    """The results of as many ranks as have all classes. They have the same logits."""
    shard = re.sub("_(join|reduced)$", "", name)
    given = {key: value.detach() if isinstance(value, torch.Tensor) else value for key, value in values.items()}
    starts = range(0, values["num_classes"], problem.classes)
    return torch.cat([run(shard, {**given, "class_start": start}) for start in starts])


def build(name: str, problem: Problem, chosen: dict[str, Any]) -> Sample:
    """The call with these values, where ``ROWS``, ``SCALAR`` and ``EMPTY`` stand for tensors."""
    arguments, contract = arguments_of(name), contract_of(name)
    values = {key: value for key, value in chosen.items() if value not in (ROWS, SCALAR, EMPTY)}
    last = {one.name for one in contract.checked_last}
    overwritten = {one.name for one in arguments.values() if one.alias_info is not None}
    for argument in sorted(
        (key for key in chosen if key not in values), key=lambda key: (key in last, key == "target")
    ):
        if argument == "gathered":
            values[argument] = _gathered(name, values, problem)
            continue
        if argument == "target" and "ids" in values:  # one of them
            values[argument] = ops.row_targets(values["ids"], ignore_index=values.get("ignore_index", -100))
            continue
        tensor = _tensor(name, argument, chosen[argument], values, problem)
        if problem.requires_grad and argument in LEAVES - overwritten:
            tensor.requires_grad_()
        values[argument] = tensor.contiguous() if argument in overwritten else tensor
    args, options = [], {}
    for argument in arguments.values():
        if argument.kwarg_only:
            if argument.name in values:
                options[argument.name] = values[argument.name]
        else:
            args.append(values[argument.name] if argument.name in values else default_of(argument))
    while args and len(args) > len(contract.required) and contract.arguments[len(args) - 1] not in values:
        args.pop()
    return Sample(name, tuple(args), options)


def default_of(argument: Any) -> Any:
    return argument.default_value if argument.has_default_value() else None


def complete(name: str, problem: Problem, chosen: dict[str, Any], depth: int = 4) -> dict[str, Any] | None:
    """The chosen values, with the arguments that they do not go without; None if they are refused."""
    try:
        sample = build(name, problem, chosen)
        contract = contract_of(name)
        contract.check(contract.bind(sample.args, sample.options))
    except (ValueError, TypeError, RuntimeError) as error:
        for argument in _optional(name) if depth else ():
            if argument not in chosen and re.search(rf"\b{argument}\b", str(error)):
                for value in values_of(name, argument, problem):
                    found = complete(name, problem, {**chosen, argument: value}, depth - 1)
                    if found is not None:
                        return found
        return None
    return chosen


def variants(
    name: str, problem: Problem, always: dict[str, Any] | None = None, never: Sequence[str] = (), each: bool = True
) -> list[Sample]:
    """Calls of an operator: with each argument at each value, if ``each``, and with all that go together.

    Args:
        always: values that all calls have whose schema has the name and whose rules accept them.
        never: arguments that stay at their defaults.
    """
    always = tuple((key, value) for key, value in (always or {}).items() if key in arguments_of(name))
    detached = problem._replace(requires_grad=False)
    found = []
    for chosen in _chosen(name, detached._replace(device="cpu"), always, tuple(never), each):
        has_derivative = problem.requires_grad and _has_derivative(build(name, problem, chosen))
        found.append(build(name, problem if has_derivative else detached, chosen))
    return found


def _has_derivative(sample: Sample) -> bool:
    """Some formulas only raise, some for a slice of the classes."""
    leaves = [arg for arg in sample.args if isinstance(arg, torch.Tensor) and arg.requires_grad]
    formula = torch._C._dispatch_has_kernel_for_dispatch_key(f"xent::{sample.name}", "Autograd")
    if not (formula or sample.name in COMPOSITES):
        return False
    try:
        results = getattr(ops, sample.name)(*sample.args, **sample.options)
        results = results if isinstance(results, tuple) else (results,)
        summed = [result.sum() for result in results if result is not None and result.requires_grad]
        if leaves and summed:
            torch.autograd.grad(summed, leaves, allow_unused=True)
    except RuntimeError as error:
        # attach_gradients gives an empty gradient to a weight only if that does not require one.
        if not re.search("ha(s|ve) no (second )?derivative|invalid gradient at index", str(error)):
            raise
        return False
    return bool(leaves and summed)


@functools.cache
def _chosen(
    name: str, problem: Problem, always: tuple[Any, ...], never: tuple[str, ...], each: bool
) -> list[dict[str, Any]]:
    arguments = arguments_of(name)
    optional = [argument for argument in _optional(name) if argument not in never]
    required = {key: values_of(name, key, problem)[0] for key in arguments if key not in _optional(name)}
    least = complete(name, problem, required)
    if least is None:
        return []
    for key, value in always:
        least = complete(name, problem, {**least, key: value}) or least
    found = [least]
    if each:
        for argument in (*required, *optional):
            if argument in dict(always) or "float" in str(arguments[argument].real_type):
                continue  # the call with all numbers will do
            for value in values_of(name, argument, problem):
                found.append(complete(name, problem, {**least, argument: value}))
    most = _with_all(name, problem, least, optional)
    found += [_with_all(name, problem, least, [one for one in optional if one not in most]), most]
    different = {str(sorted(one.items(), key=str)): one for one in found if one is not None}
    return list(different.values())


def _with_all(name: str, problem: Problem, chosen: dict[str, Any], optional: Sequence[str]) -> dict[str, Any]:
    """The chosen values and of these arguments as many as go together, in this order."""
    for argument in optional:
        for value in values_of(name, argument, problem) if argument not in chosen else ():
            more = complete(name, problem, {**chosen, argument: value})
            if more is not None:
                chosen = more
                break
    return chosen


def least_and_most(name: str, problem: Problem) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of the call with the least arguments, and of that with as many as go together."""
    chosen = _chosen(name, problem, (), (), False)
    return chosen[0], chosen[-1]


def companions(name: str) -> list[str]:
    """What the rules say of combinations: of each argument those that must come along, as far as a sample shows."""
    problem, found = Problem(dtype=torch.bfloat16), []
    least, most = least_and_most(name, problem)
    for argument in _optional(name):
        for value in values_of(name, argument, problem):
            label = f"{argument}={value}" if isinstance(value, str) and value not in (ROWS, SCALAR) else argument
            together = complete(name, problem, {**least, argument: value})
            others = [key for key in together or () if key not in least and key != argument]
            if together is None:
                found.append(f"{label} never")
            elif others or argument not in most:
                found.append(f"{label} with {' '.join(others)}" if others else f"{label} not beside all others")
    return list(dict.fromkeys(found))


@functools.cache
def calls_of(name: str, device: str, dtype: torch.dtype, requires_grad: bool) -> list[Sample]:
    """Samples of one operator, built once for all tests: copy what is written to, as opcheck does."""
    problem = Problem(device=device, dtype=dtype, requires_grad=requires_grad)
    found = variants(name, problem)
    others = [problem._replace(rows=(2, 4), classes=16, place=(0, 16), apart=True), problem._replace(rows=())]
    if any(argument.startswith("teacher") for argument in arguments_of(name)):
        others.append(problem._replace(teacher_classes=40))
    for other in others:
        found += variants(name, other, each=False)
    # A mean of no rows is NaN, which opcheck finds different from NaN.
    return found + variants(name, problem._replace(rows=(0,)), {"reduction": "sum"}, each=False)


def calls(device: str, dtype: torch.dtype, requires_grad: bool):
    """Samples of every operator."""
    for name in SCHEMAS:
        yield from calls_of(name, device, dtype, requires_grad)


def launched() -> set[str]:
    return {name for name, operator in OPERATORS.items() if not operator.calls_operators}


def of_launchers(problem: Problem, options: dict[str, Any], weighted: bool) -> list[Sample]:
    """Samples of every operator that has a launcher, with these options, and class weights or none.

    Not with batch_invariant, which calls the operator again, on a copy, where rows begin at other multiples.
    """
    always = {**options, **({"weight": ROWS} if weighted else {})}
    never = {*RowOptions._fields, "lse_square_scale", "weight", "batch_invariant"} - set(always)
    return [sample for name in sorted(launched()) for sample in variants(name, problem, always, sorted(never))]
