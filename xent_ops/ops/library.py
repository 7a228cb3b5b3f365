"""Where operators meet the dispatcher: one declaration an operator.

``operator`` defines ``xent::name`` from its schema, with its fake and its kernels, and where schemas.py says that it
overwrites an argument its in-place twin ``xent::name_`` too. ``autograd`` adds a formula.
Everything here needs torch alone; Triton is imported when a tensor first arrives on its device (devices.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _copies
from .._private import private
from ..kernels import accelerators, cpu, devices
from ..kernels.options import Options, as_record
from ..kernels.rows import front_of
from . import overwriting
from .launch_cache import LaunchCache, call_signature
from .schemas import DECLARED, PYTHON_ONLY, SCHEMAS

try:
    LIBRARY = torch.library.Library("xent", "DEF")
except RuntimeError as error:
    raise ImportError(
        "xent_ops cannot be imported: this process has operators of the namespace xent already, as it does once it has "
        f"loaded libxent_ops.so. Import xent_ops first; to load the library afterwards does no harm. ({error})"
    ) from None
_copies.defined()

# needs_fixed_stride_order: our kernels take any row stride but want the classes dense, so Inductor may pad
# the rows of a matrix product (odd vocabularies) but not transpose it.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)

# Devices that plain torch serves; any other gets the dispatcher's error, which names operator and device.
_REFERENCE_DEVICES = ("MPS", "XPU")

# What runs whenever one of our operators is traced; inductor/ adds to it.
BEFORE_TRACING: list[Callable[[], None]] = []

_below_autograd = private("torch._C._AutoDispatchBelowAutograd", contextlib.nullcontext, "some microseconds a call")

Outputs = tuple[tuple[tuple[int, ...], torch.dtype], ...]  # shape and dtype of each


def define(name: str) -> Any:
    """Define ``xent::name`` from its schema and return the overload."""
    LIBRARY.define(name + SCHEMAS[name], tags=_TAGS)
    return getattr(torch.ops.xent, name).default


class Operator:
    """One operator: a check that all devices share, and a kernel for each. ``operator`` tells the arguments."""

    def __init__(
        self,
        name: str,
        *,
        check: Callable[..., None],
        outputs: Callable[..., Outputs],
        reference: Callable[..., Any],
        check_values: Callable[..., None] | None,
        ascend: bool,
        composed: bool,
        overwrites: str | None,
        sized_by_options: bool,
    ) -> None:
        self.name, self.overload = name, define(name)
        self.check_arguments, self.check_values = check, check_values
        self.outputs, self.reference, self.sized_by_options = outputs, reference, sized_by_options
        self.ascend, self.composed, self.overwrites = ascend, composed, overwrites
        self.arguments = [argument.name for argument in self.overload._schema.arguments]
        self.position = self.arguments.index(overwrites) if overwrites is not None else -1
        self.has_options = not set(self.arguments).isdisjoint(Options._fields)
        self.launches = LaunchCache()
        torch.library.register_fake(f"xent::{name}", self.fake, lib=LIBRARY)
        if composed:
            self.on_cpu = self.on_triton = self.on_npu = self.on_reference  # type: ignore[method-assign]
        LIBRARY.impl(name, self.on_cpu, "CPU")
        for accelerator in accelerators.ALL.values():
            LIBRARY.impl(name, self.on_triton, accelerator.key)
        # By key, not by the name "npu": that works without torch_npu, before it is imported and after.
        LIBRARY.impl(name, self.on_npu, "PrivateUse1")
        for key in _REFERENCE_DEVICES:
            LIBRARY.impl(name, self.on_reference, key)

    def keywords(self, given: dict[str, Any]) -> dict[str, Any]:
        """The keywords of a call with the options as one record."""
        return as_record(given) if self.has_options else given

    def check(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if self.overwrites is None:
            self.check_arguments(*args, **keywords)
            return
        overwriting.may_be_written(self.overwrites, args[self.position])
        self.check_arguments(*args, **keywords)
        overwriting.writable(self.overwrites, args[self.position])

    def fake(self, *args: Any, **given: Any) -> Any:
        """Outputs without values, for tracing; serves the meta device too."""
        like = next(arg for arg in args if isinstance(arg, Tensor))
        if like.device.type != "meta":  # a fake tensor shows the device that it stands for
            for prepare in BEFORE_TRACING:
                prepare()
        keywords = self.keywords(given)
        self.check_arguments(*args, **keywords)
        outputs = self.outputs(*args, **keywords) if self.sized_by_options else self.outputs(*args)
        return _returned([like.new_empty(shape, dtype=dtype) for shape, dtype in outputs])

    def on_reference(self, *args: Any, **given: Any) -> Any:
        keywords = self.keywords(given)
        self.check(args, keywords)
        return self.reference(*args, **keywords)

    def on_cpu(self, *args: Any, **given: Any) -> Any:
        keywords = self.keywords(given)
        self.check(args, keywords)
        # Which checks the targets' values itself.
        kernel = None if self.name in PYTHON_ONLY else cpu.kernel(self.name)
        if kernel is not None:
            return kernel(*args, **given)
        if self.check_values is not None:
            self.check_values(*args, **keywords)
        return self.reference(*args, **keywords)

    def on_triton(self, *args: Any, **given: Any) -> Any:
        if self.overwrites is not None:  # what the signature does not hold
            overwriting.may_be_written(self.overwrites, args[self.position])
        signature = call_signature(args, given)
        launch = self.launches.get(signature)
        if launch is None:
            keywords = self.keywords(given)
            self.check(args, keywords)
            launch = devices.triton_launchers()[self.name](*args, **keywords)
            self.launches.put(signature, launch)
        return launch(*args)

    def on_npu(self, *args: Any, **given: Any) -> Any:
        keywords = self.keywords(given)
        self.check(args, keywords)
        # The vector cores have no float64, and our kernels there write gradients in the logits' dtype.
        if not self.ascend or any(
            isinstance(arg, torch.dtype) or (isinstance(arg, Tensor) and arg.dtype == torch.float64) for arg in args
        ):
            return self.reference(*args, **keywords)
        return devices.ascend_launchers()[self.name](*args, **keywords)


OPERATORS: dict[str, Operator] = {}  # by name, without the namespace


def operator(
    name: str,
    *,
    check: Callable[..., None],
    outputs: Callable[..., Outputs],
    reference: Callable[..., Any],
    check_values: Callable[..., None] | None = None,
    ascend: bool = False,
    composed: bool = False,
    overwrites: str | None = None,
    sized_by_options: bool = False,
) -> Any:
    """Define and register ``xent::name``, and its in-place twin where schemas.py has one; return the overload.

    Args:
        check: raises on what no kernel can take; sees the operator's arguments, with ``options`` as one record.
        outputs: shape and dtype of each output, from the positional arguments.
        reference: the kernel in plain torch. The CPU runs the C++ kernel ``xent_cpu::name`` where it is built, unless
            schemas.PYTHON_ONLY names the operator, CUDA and ROCm what the ``@launcher`` of this name in kernels/triton/
            prepares.
        check_values: like ``check``, for the CPU without C++, where reading values does not synchronise.
        ascend: kernels/ascend/ has a ``@launcher`` of this name. Else NPUs run the reference, and import no Triton.
        composed: of other operators: ``reference`` is the kernel of every device. Autograd and tracers still see one
            operator, unlike a composite (composite.py).
        overwrites: the argument that the operator itself writes to.
        sized_by_options: ``outputs`` sees the keywords of ``check`` too.
    """
    shared: dict[str, Any] = {
        "check": check,
        "check_values": check_values,
        "ascend": ascend,
        "composed": composed,
        "sized_by_options": sized_by_options,
    }
    OPERATORS[name] = Operator(name, outputs=outputs, reference=reference, overwrites=overwrites, **shared)
    written_over = DECLARED[name][1]
    if written_over is not None:
        twin = f"{name}_"
        OPERATORS[twin] = Operator(
            twin,
            outputs=lambda *args: outputs(*args)[:-1],
            reference=_in_place(reference, OPERATORS[name].arguments.index(written_over)),
            overwrites=written_over,
            **shared,
        )
    return OPERATORS[name].overload


def _in_place(function: Callable[..., Any], position: int) -> Callable[..., Any]:
    """The function with its last output written over the argument at ``position``."""

    def write(*args: Any, **keywords: Any) -> Any:
        made = function(*args, **keywords)
        *others, written = made if isinstance(made, tuple) else (made,)
        front_of(args[position], written.dtype).copy_(written)
        return _returned(others)

    return write


def _returned(outputs: list[Any]) -> Any:
    """As the dispatcher wants the outputs of an operator."""
    if not outputs:
        return None
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def autograd(name: str, backward: Callable[..., Any], setup_context: Callable[..., Any]) -> None:
    torch.library.register_autograd(f"xent::{name}", backward, setup_context=setup_context, lib=LIBRARY)


def needs_grad(ctx: Any, position: int) -> bool:
    """Does the argument at this position of an operator need a gradient?

    For formulas: the dispatcher leaves out arguments at the end that equal their defaults.
    """
    return any(ctx.needs_input_grad[position : position + 1])


def save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any, **keywords: Any) -> None:
    """The ``setup_context`` of a formula that only raises. torch passes keyword_only_inputs where there are such."""


def below_autograd(overload: Any, *args: Any, **options: Any) -> Any:
    """Call an operator inside an autograd.Function, which has recorded what there is to record.

    The dispatcher then skips the operator's own formula. Modes, subclasses and kernels that users register over ours
    still see the call.
    """
    if torch.compiler.is_compiling():  # compiled autograd traces the backward
        return overload(*args, **options)
    with _below_autograd():
        return overload(*args, **options)
