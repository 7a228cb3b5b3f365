"""Registers operators with the dispatcher: one declaration per operator.

``operator`` defines ``xent::name`` from its schema, with its fake and its kernels. If schemas.py names an argument to
overwrite, it also defines the in-place form ``xent::name_``. formulas.py adds derivatives.
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
from . import overwriting
from .contract import Call, Contract, Row
from .launch_cache import SignatureCache, call_signature
from .schemas import DECLARED, PYTHON_ONLY, SCHEMAS

try:
    LIBRARY = torch.library.Library("xent", "DEF")
except RuntimeError as error:
    raise ImportError(
        "xent_ops cannot be imported: this process has operators of the namespace xent already, as it does once it has "
        f"loaded libxent_ops.so. Import xent_ops first; then it is safe to load the library. ({error})"
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
        reference: Callable[..., Any],
        *,
        contract: Callable[[Any], Contract],
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
    reference: Callable[..., Any],
    *,
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
    OPERATORS[name] = first = Operator(name, reference, overwrites=overwrites, **shared)
    written_over = DECLARED[name][1]
    if written_over is not None:
        reference = _in_place(reference, first.arguments.index(written_over))
        OPERATORS[f"{name}_"] = Operator(f"{name}_", reference, overwrites=written_over, **shared)
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


def check_call_of(name: str, *args: Any, **keywords: Any) -> None:
    """Raise an operator's errors before it is called. Arguments may be missing."""
    contract = OPERATORS[name].contract
    contract.check(contract.blank(**dict(zip(contract.arguments, args, strict=False)), **keywords))


def below_autograd(overload: Any, *args: Any, **options: Any) -> Any:
    """Call an operator without its own formula. Modes, subclasses and kernels of users still see the call."""
    if torch.compiler.is_compiling():  # compiled autograd traces the backward
        return overload(*args, **options)
    with _below_autograd():
        return overload(*args, **options)
