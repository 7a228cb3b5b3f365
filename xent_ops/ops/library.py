"""Registers operators with the dispatcher: one declaration per operator.

``operator`` defines ``xent::name`` from its schema, with its fake and its kernels. If schemas.py names an argument to
overwrite, it also defines the in-place form ``xent::name_``. ``autograd`` adds a derivative formula.
This module needs only torch. Triton is imported when a tensor on its device first arrives (devices.py).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._private import private
from ..kernels import accelerators, cpu, devices
from ..kernels.options import RowOptions, as_record
from ..kernels.rows import front_of
from . import checks, overwriting, transforms
from .contract import Call, Contract, Row
from .dtensors import locals_of
from .launch_cache import SignatureCache, call_signature
from .schemas import DECLARED, PYTHON_ONLY, SCHEMAS

try:
    LIBRARY = torch.library.Library("xent", "DEF")
except RuntimeError as error:
    raise ImportError(
        "xent_ops cannot be imported: this process has operators of the namespace xent already, as it does once it has "
        f"loaded libxent_ops.so. Import xent_ops first; to load the library afterwards does no harm. ({error})"
    ) from None

# needs_fixed_stride_order: our kernels accept any row stride but need dense classes. So Inductor may pad the rows of
# a matrix product (odd vocabularies) but not transpose it.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)

# Devices that use plain torch. For any other device, the dispatcher's error names operator and device.
_REFERENCE_DEVICES = ("MPS", "XPU")

# Hooks that run before any of our operators is traced; inductor/ adds to them.
BEFORE_TRACING: list[Callable[[], None]] = []

_below_autograd = private("torch._C._AutoDispatchBelowAutograd", contextlib.nullcontext, "some microseconds a call")


def define(name: str) -> Any:
    """Define ``xent::name`` from its schema and return the overload."""
    LIBRARY.define(name + SCHEMAS[name], tags=_TAGS)
    return getattr(torch.ops.xent, name).default


class Operator:
    """One operator: its contract, and a kernel for each device. ``operator`` documents the arguments."""

    def __init__(
        self,
        name: str,
        *,
        contract: Callable[[Any], Contract],
        reference: Callable[..., Any],
        check_values: Callable[[Call], None] | None,
        ascend: bool,
        calls_operators: bool,
        overwrites: str | None,
    ) -> None:
        self.name, self.overload = name, define(name)
        self.contract = contract(self.overload._schema)
        self.bind = self.contract.Call
        self.reference, self.check_values = _with_contiguous_results(reference), check_values
        self.ascend, self.calls_operators, self.overwrites = ascend, calls_operators, overwrites
        self.arguments = self.contract.arguments
        self.position = self.arguments.index(overwrites) if overwrites is not None else -1
        self.has_options = not set(self.arguments).isdisjoint(RowOptions._fields)
        self.launches, self.checked = SignatureCache(), SignatureCache()
        self.node: Callable[..., Any] = self.overload  # with a formula, as one autograd node
        torch.library.register_fake(f"xent::{name}", self.fake, lib=LIBRARY)
        if calls_operators:
            self.on_cpu = self.on_npu = self.on_reference  # type: ignore[method-assign]
            self.on_triton = self.on_reference_below_autograd  # type: ignore[method-assign]
        LIBRARY.impl(name, self.on_cpu, "CPU")
        for accelerator in accelerators.ALL.values():
            LIBRARY.impl(name, self.on_triton, accelerator.key)
        # The key, not the name "npu", because the key works without torch_npu, before its import and after it.
        LIBRARY.impl(name, self.on_npu, "PrivateUse1")
        for key in _REFERENCE_DEVICES:
            LIBRARY.impl(name, self.on_reference, key)

    def keywords(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The keywords of a call, with the options as one record."""
        return as_record(kwargs) if self.has_options else kwargs

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check what a call signature contains."""
        self.contract.check(self.bind(*args, **kwargs))
        if self.overwrites is not None:
            overwriting.writable(self.overwrites, args[self.position])

    def check_once(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check a call, once for its signature."""
        if self.overwrites is not None:  # the signature does not contain it
            overwriting.may_be_written(self.overwrites, args[self.position])
        signature = call_signature(args, kwargs)
        if self.checked.get(signature) is None:
            self.check(args, kwargs)
            self.checked.put(signature, True)

    def fake(self, *args: Any, **kwargs: Any) -> Any:
        """Outputs without values, for tracing. The meta device uses it too."""
        call = self.bind(*args, **kwargs)
        if call.primary.device.type != "meta":  # a fake tensor reports the device that it represents
            for prepare in BEFORE_TRACING:
                prepare()
        self.contract.check(call)
        return returned([call.primary.new_empty(shape, dtype=dtype) for shape, dtype in self.contract.outputs(call)])

    def on_reference(self, *args: Any, **kwargs: Any) -> Any:
        self.check_once(args, kwargs)
        if self.calls_operators and self.check_values is not None and args[0].device.type == "cpu":
            self.check_values(self.bind(*args, **kwargs))
        return self.reference(*args, **self.keywords(kwargs))

    def on_reference_below_autograd(self, *args: Any, **kwargs: Any) -> Any:
        """For Inductor's code, which skips the dispatcher: autograd would take 80 us for each operator inside."""
        with _below_autograd():
            return self.on_reference(*args, **kwargs)

    def on_cpu(self, *args: Any, **kwargs: Any) -> Any:
        self.check_once(args, kwargs)
        # The C++ kernel checks the targets' values itself.
        kernel = None if self.name in PYTHON_ONLY else cpu.kernel(self.name)
        if kernel is not None:
            return kernel(*args, **kwargs)
        if self.check_values is not None:
            self.check_values(self.bind(*args, **kwargs))
        return self.reference(*args, **self.keywords(kwargs))

    def on_triton(self, *args: Any, **kwargs: Any) -> Any:
        if self.overwrites is not None:
            overwriting.may_be_written(self.overwrites, args[self.position])
        signature = call_signature(args, kwargs)
        launch = self.launches.get(signature)
        if launch is None:
            self.check(args, kwargs)
            launch = devices.triton_launchers()[self.name](*args, **self.keywords(kwargs))
            self.launches.put(signature, launch)
        return launch(*args)

    def on_npu(self, *args: Any, **kwargs: Any) -> Any:
        self.check_once(args, kwargs)
        keywords = self.keywords(kwargs)
        # The vector cores have no float64, and our Ascend kernels write gradients in the logits' dtype.
        if not self.ascend or any(
            isinstance(arg, torch.dtype) or (isinstance(arg, Tensor) and arg.dtype == torch.float64) for arg in args
        ):
            return self.reference(*args, **keywords)
        return devices.ascend_launchers()[self.name](*args, **keywords)


OPERATORS: dict[str, Operator] = {}  # by name, without the namespace


def operator(
    name: str,
    *,
    reference: Callable[..., Any],
    check_values: Callable[[Call], None] | None = None,
    arguments: Mapping[str, Row | None] | None = None,
    results: Mapping[str, Row] | None = None,
    rows_of: Callable[[Call], Tensor] | None = None,
    rules: Sequence[Callable[[Call], None]] = (),
    ascend: bool = False,
    calls_operators: bool = False,
    overwrites: str | None = None,
) -> Any:
    """Define and register ``xent::name``, and its in-place form if schemas.py has one. Returns the overload.

    The types of arguments and results follow from the names in its schema: contract.py.

    Args:
        reference: the kernel in plain torch. The CPU runs the C++ kernel ``xent_cpu::name`` if it is built, unless
            schemas.PYTHON_ONLY names the operator. CUDA and ROCm run what the ``@launcher`` of this name prepares.
        check_values: raises on values of tensors. It runs on the CPU without C++: reading them does not synchronise.
        arguments, results, rows_of, rules: exceptions of this operator; see ``Contract``.
        ascend: kernels/ascend/ has a ``@launcher`` of this name. Else NPUs run the reference, and do not import Triton.
        calls_operators: ``reference`` calls other operators and is the kernel of every device. Autograd and tracers
            still see one operator, unlike with a composite (composite.py).
        overwrites: the argument that the operator itself writes to.
    """
    tables: dict[str, Any] = {"arguments": arguments or {}, "results": results or {}, "rows_of": rows_of}
    shared: dict[str, Any] = {"check_values": check_values, "ascend": ascend, "calls_operators": calls_operators}
    shared["contract"] = functools.partial(Contract, own_rules=rules, **tables)
    OPERATORS[name] = first = Operator(name, reference=reference, overwrites=overwrites, **shared)
    written_over = DECLARED[name][1]
    if written_over is not None:
        reference = _in_place(reference, first.arguments.index(written_over))
        OPERATORS[f"{name}_"] = Operator(f"{name}_", reference=reference, overwrites=written_over, **shared)
    return first.overload


def _in_place(function: Callable[..., Any], position: int) -> Callable[..., Any]:
    """The function, with its last output written over the argument at ``position``."""

    def write(*args: Any, **keywords: Any) -> Any:
        results = function(*args, **keywords)
        *other_results, written = results if isinstance(results, tuple) else (results,)
        front_of(args[position], written.dtype).copy_(written)
        return returned(other_results)

    return write


def _with_contiguous_results(function: Callable[..., Any]) -> Callable[..., Any]:
    """Results have the strides of the fake ones, which traced code relies on. Those of the arguments may be others."""

    @functools.wraps(function)
    def compute(*args: Any, **keywords: Any) -> Any:
        results = function(*args, **keywords)
        if results is None or isinstance(results, Tensor):
            return None if results is None else results.contiguous()
        return tuple([result.contiguous() for result in results])

    return compute


def returned(outputs: list[Any]) -> Any:
    """The outputs in the form that the dispatcher needs."""
    return None if not outputs else outputs[0] if len(outputs) == 1 else tuple(outputs)


def refuse(name: str, *args: Any, **keywords: Any) -> None:
    """Raise an operator's errors before it is called. Arguments may be missing."""
    contract = OPERATORS[name].contract
    contract.check(contract.blank(**dict(zip(contract.arguments, args, strict=False)), **keywords))


Gradients = Mapping[str, "Tensor | None"]  # by argument name


def autograd(
    name: str,
    backward: Callable[..., Gradients],
    save: Callable[[Any, Call, Any], None],
    constants: Sequence[str] = (),
) -> None:
    """Add a formula: ``save(ctx, call, output)``, and ``backward(ctx, *grads)``, which returns gradients by name.

    ``constants``: arguments without a derivative. If one of them requires grad, the call raises.
    """
    contract = OPERATORS[name].contract
    positional = contract.arguments[: len(contract.arguments) - len(contract.keyword_only)]
    refused = [(contract.positions[argument], argument) for argument in constants]

    # torch passes keyword_only_inputs if the operator has any, and inserts the defaults.
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any, keyword_only_inputs: Any = None) -> None:
        ctx.positions = contract.positions
        ctx.set_materialize_grads(False)
        for position, argument in refused:
            if any(ctx.needs_input_grad[position : position + 1]):  # as needs_grad, without a call
                checks.constant_needs_grad(argument)
        save(ctx, contract.bind(inputs, keyword_only_inputs or {}), output)

    def formula(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        gradients = {} if all(grad is None for grad in grads) else backward(ctx, *grads)
        return tuple([gradients.get(argument) for argument in positional])

    torch.library.register_autograd(f"xent::{name}", formula, setup_context=setup_context, lib=LIBRARY)
    overload = OPERATORS[name].overload

    def forward(ctx: Any, *inputs: Any) -> Any:
        *args, keywords = inputs
        output = below_autograd(overload, *args, **keywords)
        setup_context(ctx, tuple(args), output, keywords)
        return output

    def backward_of_node(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return *formula(ctx, *grads)[: len(ctx.needs_input_grad) - 1], None

    functions = {"forward": staticmethod(forward), "backward": staticmethod(backward_of_node)}
    node = type(f"xent_{name}", (torch.autograd.Function,), functions)
    # Function.apply would bind forward's signature at every call, for 20 us of host time.
    OPERATORS[name].node = super(torch.autograd.Function, node).apply  # type: ignore[misc]


def differentiable(name: str, *args: Any, **keywords: Any) -> Any:
    """Call an operator that has a formula, in eager as one node of ours.

    The wrapper of torch.library reads the schema's list once for each argument: 250 us of the host for an operator with
    25 arguments (torch 2.11, the host of an H100, 2026-11).
    """
    operator = OPERATORS[name]
    if not torch.is_grad_enabled() or transforms.any_tracer() or transforms.functorch_is_active():
        return operator.overload(*args, **keywords)
    return operator.node(*args, keywords)


def needs_grad(ctx: Any, name: str) -> bool:
    """Does this argument need a gradient? The dispatcher omits defaults at the end."""
    position = ctx.positions[name]
    return any(ctx.needs_input_grad[position : position + 1])


def save_nothing(ctx: Any, call: Call, output: Any) -> None:
    """For a formula that only raises."""


def save_for(ctx: Any, name: str, call: Call, *also: str, **results: Any) -> None:
    """Keep the arguments of the backward operator ``name`` that the call or results have, and the names in ``also``."""
    names, tensors, options = _kept(name, call.__class__, also, tuple(results))
    kept = [call[index] for index in tensors]
    ctx.save_for_backward(*kept, *results.values(), *locals_of(call.primary, *kept))
    ctx.kept = name, names, [call[index] for index in options]


@functools.cache
def _kept(
    name: str, call: Any, also: tuple[str, ...], results: tuple[str, ...]
) -> tuple[tuple[str, ...], list[int], list[int]]:
    """(names of the tensors, the results and the options to keep; positions of the tensors, and of the options)."""
    fields = call._fields
    kept = [field for field in (*OPERATORS[name].arguments, *also) if field in fields and field not in results]
    tensors, options = ([field for field in kept if (field in call.tensors) == wanted] for wanted in (True, False))
    return (*tensors, *results, *options), [*map(fields.index, tensors)], [*map(fields.index, options)]


def saved(ctx: Any) -> dict[str, Any]:
    _name, names, options = ctx.kept
    return dict(zip(names, (*ctx.saved_tensors[: len(names) - len(options)], *options), strict=True))


def bound(name: str, values: Mapping[str, Any]) -> Call:
    """A call of an operator with those of these values that it takes."""
    contract = OPERATORS[name].contract
    return contract.blank(**{argument: values[argument] for argument in contract.arguments if argument in values})


def run(name: str, values: Mapping[str, Any]) -> Any:
    """Call an operator with the values of its arguments. Other values are ignored."""
    operator, call = OPERATORS[name].overload, bound(name, values)
    keywords = {argument: getattr(call, argument) for argument in OPERATORS[name].contract.keyword_only}
    return operator(*call[: len(call) - len(keywords)], **keywords)


def run_backward(ctx: Any, grad_loss: Tensor | None, kept: dict[str, Any] | None = None, **updates: Any) -> Any:
    """Run the operator that ``save_for`` named, with the values that it kept and with these updates.

    An entropy without a gradient is left out. Beside an lse, a loss without a gradient gets a gradient of 0, and so do
    classes named by ids. ``kept``: what ``saved`` returned. A checkpoint lets a backward unpack its tensors once.
    """
    values = (saved(ctx) if kept is None else kept) | updates
    if updates.get("grad_entropy") is None:
        values.pop("entropy", None)
    lse = values.get("lse")
    values["grad_loss"] = lse.new_zeros(()) if grad_loss is None and lse is not None else grad_loss
    if lse is not None and values.get("ids") is not None and updates.get("grad_ids") is None:
        values["grad_ids"] = lse.new_zeros(values["ids"].shape)
    return run(ctx.kept[0], values)


def below_autograd(overload: Any, *args: Any, **options: Any) -> Any:
    """Call an operator without its own formula. Modes, subclasses and kernels of users still see the call."""
    if torch.compiler.is_compiling():  # compiled autograd traces the backward
        return overload(*args, **options)
    with _below_autograd():
        return overload(*args, **options)
