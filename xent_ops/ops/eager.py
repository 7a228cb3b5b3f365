"""Eager training: the whole loss of class indices as one autograd.Function around the same operators.

The composite operator gives autograd a node for each torch call of a reduction, and each operator with a formula a
second dispatch: measured with empty kernels, more than half of the wall time of a small loss (docs/design.md). Here is
one node, and the operators are called below autograd. In-place gradients have their Functions here as well: autograd's
version counter protects them, so that a producer that saved its output, a second backward and retain_graph all find
a tensor that was modified in place, and raise. Below saved-tensor hooks (which a non-reentrant checkpoint is made of)
nobody looks at versions, and there the gradient gets memory of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._device import DeviceContext

from ..kernels import reference
from . import checks, transforms
from .composite import Counts, count_rows, reduce_rows
from .library import KERNELS, PREPARED_DEVICES, prepared_launcher

_data_ptr = Tensor.data_ptr
_dispatch_keys = torch._C._dispatch_keys
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_tracing_state = torch._C._get_tracing_state
_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks  # of (ignore_is_tracing)
_TENSORS = frozenset((Tensor, torch.nn.Parameter))
_NUMBERS = frozenset((float, int))


class Settings(NamedTuple):
    """Arguments of the loss that are no tensors; ``options`` are those of the row operators."""

    reduction: str
    lse_square_scale: float
    options: dict[str, Any]


def _plain_numbers(settings: Settings) -> Settings:
    """The same in Python's own types, as the dispatcher would convert them."""
    values = settings.options
    if _are_numbers(lse_square_scale=settings.lse_square_scale, **values):
        return settings
    options: dict[str, Any] = {
        name: value if value is None else checks.number(name, value) for name, value in values.items()
    }
    options["ignore_index"] = checks.integer("ignore_index", values["ignore_index"])
    return Settings(settings.reduction, checks.number("lse_square_scale", settings.lse_square_scale), options)


def _are_numbers(softcap: float | None = None, ignore_index: int = 0, **options: Any) -> bool:
    return (
        _NUMBERS.issuperset(map(type, options.values()))
        and (softcap is None or type(softcap) in _NUMBERS)
        and checks.is_int64(ignore_index)
    )


def undisturbed(*args: Any, **options: Any) -> bool:
    """May the loss be one node of autograd? Not where somebody watches the torch calls that it is made of.

    Those are modes (tracers among them), subclasses of Tensor, torch.jit.trace, functorch, forward-mode AD; Dynamo
    comes first. Nor where the dispatcher has something else to do than to call a kernel: with a tensor that is lazily
    negative, sparse or batched, with an option that it would convert.
    """
    return (
        _dispatch_modes() == 0
        and (_function_modes() == 0 or _device_is_all_that_is_set())
        and _tracing_state() is None
        and not transforms.active_in_eager()
        and _plain(args)
        and (not options or _are_numbers(**options))
    )


def _device_is_all_that_is_set() -> bool:
    """torch.set_default_device leaves a mode behind, which has nothing to say to calls that name their device."""
    return all(type(mode) is DeviceContext for mode in torch.overrides._get_current_function_mode_stack())


def _plain(args: Iterable[Any]) -> bool:
    for value in args:
        if type(value) in _TENSORS:
            keys = _dispatch_keys(value).raw_repr()
            if keys not in _PLAIN_KEYS and not _has_plain_keys(value, keys):
                return False
        elif value is not None:
            return False
    return True


# Of tensors whose operators go straight to the device's kernel; those that were made in inference mode have others.
_PLAIN_KEYS: set[int] = set()


def _has_plain_keys(tensor: Tensor, keys: int) -> bool:
    for inference in (False, True):
        with torch.inference_mode(inference):
            _PLAIN_KEYS.add(_dispatch_keys(torch.empty(0, device=tensor.device)).raw_repr())
    return keys in _PLAIN_KEYS


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    settings: Settings,
    *,
    inplace_backward: bool = False,
    grad_in_forward: bool = False,
) -> Tensor:
    """The reduced loss of logits (..., V) that require grad; what the operators do not check, the caller has."""
    special = inplace_backward or grad_in_forward  # which come here with any arguments, disturbed or not
    if inplace_backward:
        _refuse_a_leaf(logits)
        checks.writable("logits", logits)
        inplace_backward = _saved_tensors_hooks(True) is None and not logits.is_neg()
    if special:
        settings = _plain_numbers(settings)
    if grad_in_forward:
        if weight is not None:  # by which the rows are counted before the operator checks it
            checks.index_forward(logits, target, weight, **settings.options)
        return _OnePass.apply(logits, target, weight, settings, inplace_backward)
    if not special or undisturbed(logits, target, weight):
        prepared = prepared_for(_prepare, logits, target, weight, settings, inplace_backward)
        if prepared is not None:
            return apply_prepared(logits, target, prepared)
    return (_InPlace if inplace_backward else _TwoPass).apply(logits, target, weight, settings)


def _refuse_a_leaf(logits: Tensor) -> None:
    """As torch does for its own in-place operators: also a view of one."""
    if any(x is not None and x.is_leaf and x.requires_grad for x in (logits, logits._base)):
        raise RuntimeError(
            "inplace_backward=True would overwrite a leaf tensor that requires grad, or a view of it, with its own "
            "gradient: pass the output of a layer, or leave inplace_backward off"
        )


def below(operator: Any, *args: Any, **options: Any) -> Any:
    """An operator below autograd, which records nothing in here: that spares the dispatch to a formula."""
    if torch.compiler.is_compiling():  # compiled autograd traces the backward
        return operator(*args, **options)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*args, **options)


class _Operators:
    """Operators below autograd, by name."""

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return functools.partial(below, getattr(torch.ops.xent, name).default)


def kernels_for(*args: Any, **options: Any) -> Any:
    """By name, what computes an operator of such arguments and records nothing, for the device of the first one.

    Where nobody watches, a profiler neither, those are the kernels themselves: the dispatcher's way through Python and
    back takes longer than all that a launch does on the host (docs/design.md).
    """
    watched = torch.compiler.is_compiling() or torch.autograd._profiler_enabled()
    kernels = None if watched else KERNELS.get(args[0].device.type)
    return kernels if kernels is not None and undisturbed(*args, **options) else _Operators()


def _count(logits: Tensor, target: Tensor, weight: Tensor | None, settings: Settings) -> tuple[Counts, Tensor | None]:
    """The counts, and 1 / number where the launch that counts a plain mean's rows makes that too."""
    plain = settings.reduction == "mean" and settings.lse_square_scale == 0.0 and weight is None
    if plain and target.dtype in checks.INDICES and undisturbed(target):
        launcher = prepared_launcher(target, "launch_mean")
        if launcher is not None:
            inverse, number = launcher.count(target, settings.options["ignore_index"], reference.accumulator(logits))
            return Counts(None, number, number), inverse
    counts = count_rows(
        target,
        weight,
        ignore_index=settings.options["ignore_index"],
        lse_square_scale=settings.lse_square_scale,
        reduction=settings.reduction,
        classes=logits.shape[-1],
        dtype=reference.accumulator(logits),
    )
    return counts, None


def _reduce(loss: Tensor, lse: Tensor, counts: Counts, settings: Settings) -> Tensor:
    return reduce_rows(loss, lse, counts, lse_square_scale=settings.lse_square_scale, reduction=settings.reduction).loss


def _refuse_derivatives(option: str, grad: Tensor) -> None:
    """Not ``once_differentiable``: that is silent where the upstream gradient itself needs no gradient."""
    batched = not torch.compiler.is_compiling() and torch._C._functorch.is_legacy_batchedtensor(grad)
    if batched or transforms.active():
        raise NotImplementedError(
            f"{option}=True has one gradient to give: its backward below vmap (is_grads_batched=True), another "
            "functorch transform or forward-mode AD is not supported"
        )
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{option}=True leaves nothing to differentiate a second time, which create_graph=True asks for"
        )


def upstream(grad: Tensor, lse: Tensor, counts: Counts, settings: Settings) -> tuple[Tensor, Tensor | None]:
    """grad_loss and grad_lse of the rows, from the gradient of the reduced loss."""
    grad_loss = grad if counts.weights is None else grad / counts.weights
    grad_lse = None
    if settings.lse_square_scale != 0.0:
        assert counts.counted is not None
        per_row = grad if counts.number is None else grad / counts.number
        # Chosen last: without a counted row, per_row is infinite.
        grad_lse = torch.where(counts.counted, lse * (2 * settings.lse_square_scale * per_row), 0.0)
    return grad_loss.expand(lse.shape), grad_lse


def _gradient(
    grad: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, lse: Tensor, counts: Counts, settings: Settings
) -> Tensor:
    """That of the logits, in eager or traced by compiled autograd."""
    if torch.is_grad_enabled():  # create_graph: the gradient has to be differentiable itself
        logits = logits.view_as(logits)  # without the user's hooks, which the engine around this calls
        again = torch.ops.xent.cross_entropy(
            logits,
            target,
            weight,
            lse_square_scale=settings.lse_square_scale,
            reduction=settings.reduction,
            **settings.options,
        )
        return torch.autograd.grad(again, logits, grad, create_graph=True)[0]
    if transforms.forward_mode():  # the upstream gradient has a tangent, which operators would drop
        kernel = reference.cross_entropy_backward
    else:
        kernel = kernels_for(grad, logits, target, lse, weight)["cross_entropy_backward"]
    return kernel(*upstream(grad, lse, counts, settings), logits, target, lse, weight, **settings.options)


def _gradient_in_place(
    grad: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, lse: Tensor, counts: Counts, settings: Settings
) -> Tensor:
    """The same over the logits; compiled autograd has read what others saved, and checked it, before it runs."""
    if torch.compiler.is_compiling():
        return _gradient(grad, logits, target, weight, lse, counts, settings)
    kernel = kernels_for(grad, logits, target, lse, weight)["cross_entropy_backward_"]
    kernel(*upstream(grad, lse, counts, settings), logits, target, lse, weight, **settings.options)
    return logits.detach()


class _TwoPass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, settings: Settings) -> Tensor:
        kernels = kernels_for(logits, target, weight, **settings.options)
        loss, lse = kernels["cross_entropy_forward"](logits, target, weight, **settings.options)
        counts, _ = _count(logits, target, weight, settings)
        ctx.save_for_backward(logits, target, weight, lse, *counts)
        ctx.settings = settings
        return _reduce(loss, lse, counts, settings)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, weight, lse, *counts = ctx.saved_tensors
        return _gradient(grad, logits, target, weight, lse, Counts(*counts), ctx.settings), None, None, None


class Prepared(NamedTuple):
    """A plain mean or sum on a GPU, where the host takes longer than a small loss does."""

    facts: tuple[Any, ...]  # what it was made for, see facts_of
    launches: Any  # kernels/triton/prepared.py
    gradient: Callable[..., Tensor]  # of grad, logits, target, lse, Counts, where the launches do not fit
    in_place: bool = False  # the backward writes the gradient over the logits


class _PreparedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, prepared: Prepared) -> Tensor:
        value, number, lse = prepared.launches.forward(logits, target)
        saved = (logits, target, lse) if number is None else (logits, target, lse, number)
        ctx.save_for_backward(*saved)
        ctx.prepared = prepared
        # With hooks another tensor may come back, and have found its memory at the same address.
        ctx.addresses = (*map(_data_ptr, saved),) if _saved_tensors_hooks(True) is None else None
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _, launches, gradient, in_place = ctx.prepared
        if in_place:
            _refuse_derivatives("inplace_backward", grad)
        saved = ctx.saved_tensors
        logits, target, lse, number = saved if len(saved) == 4 else (*saved, None)
        if (
            torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or not undisturbed(grad)
            or not (_at(ctx.addresses, saved) or _fit(ctx.prepared, logits, target, lse, number))
        ):
            return gradient(grad, logits, target, lse, Counts(None, number, number)), None, None
        out = logits.detach() if in_place else None
        return launches.backward(grad, number, logits, target, lse, out), None, None


# Of (logits, target, prepared). Function.apply first asks for transforms, as ``undisturbed`` has: 6 us of the host.
apply_prepared: Callable[[Tensor, Tensor, Prepared], Tensor] = super(torch.autograd.Function, _PreparedLoss).apply


def _at(addresses: tuple[int, ...] | None, saved: tuple[Tensor, ...]) -> bool:
    """Are these the tensors that were saved, as far as the host can tell in no time?"""
    return addresses is not None and addresses == (*map(_data_ptr, saved),)


def _fit(prepared: Prepared, logits: Tensor, target: Tensor, lse: Tensor, number: Tensor | None) -> bool:
    """Are they laid out like those that were saved? Hooks on saved tensors may bring back anything."""
    return (
        undisturbed(logits, target, lse, number)
        and facts_of(logits, target) == prepared.facts
        and prepared.launches.fits(lse, number)
    )


def facts_of(logits: Tensor, target: Tensor) -> tuple[Any, ...]:
    """What launches of these tensors depend on, but for the tensors themselves."""
    return (
        logits.shape,
        logits.stride(),
        logits.dtype,
        logits.device,
        target.shape,
        target.stride(),
        target.dtype,
        target.device,
    )


_PREPARED: dict[tuple[Any, ...], Prepared | None] = {}
_UNKNOWN: Any = object()


def _key(facts: tuple[Any, ...], settings: Settings, place: tuple[Any, ...]) -> tuple[Any, ...]:
    """All that a preparation may depend on. The types too, for 1 and 1.0 are one key, and not one ignore_index."""
    reduction, lse_square_scale, options = settings
    numbers = (lse_square_scale, *options.values(), *place)
    return (*facts, reduction, *numbers, *map(type, numbers))


def ready(logits: Tensor, target: Tensor, settings: Settings, *place: Any) -> Prepared | None:
    """What an earlier loss like this one, without weights, has prepared: its arguments were checked then.

    The first question of an eager call, for a small loss takes as long as the host does. None where there was no such
    loss, or where this one wants no gradient or is watched.
    """
    if logits.device.type not in PREPARED_DEVICES or not (logits.requires_grad and torch.is_grad_enabled()):
        return None
    if not undisturbed(logits, target):
        return None
    try:
        return _PREPARED.get(_key(facts_of(logits, target), settings, place))
    except TypeError:  # an option that has no hash
        return None


def prepared_for(
    make: Callable[..., Prepared | None],
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    settings: Settings,
    *place: Any,
) -> Prepared | None:
    """``make(launcher, facts, logits, target, settings, *place)``, kept by all that it may depend on.

    None for losses that have to be computed by the operators.
    """
    plain = weight is None and settings.reduction != "none" and settings.lse_square_scale == 0.0
    if not plain or logits.device.type not in PREPARED_DEVICES:
        return None
    facts = facts_of(logits, target)
    key = _key(facts, settings, place)
    found = _PREPARED.get(key, _UNKNOWN)
    if found is _UNKNOWN:
        if len(_PREPARED) >= 1024:
            _PREPARED.clear()
        launcher = prepared_launcher(target)
        found = None if launcher is None else make(launcher, facts, logits, target, settings, *place)
        _PREPARED[key] = found
    return found


def _prepare(
    launcher: Any, facts: tuple[Any, ...], logits: Tensor, target: Tensor, settings: Settings, in_place: bool
) -> Prepared | None:
    if in_place and not logits.is_contiguous():  # which the prepared gradient is
        return None
    checks.index_forward(logits, target, **settings.options)
    launches = launcher.prepare(logits, target, settings.reduction == "mean", **settings.options)
    ordinary = _gradient_in_place if in_place else _gradient

    def gradient(grad: Tensor, logits: Tensor, target: Tensor, lse: Tensor, counts: Counts) -> Tensor:
        return ordinary(grad, logits, target, None, lse, counts, settings)

    return launches and Prepared(facts, launches, gradient, in_place)


class _InPlace(_TwoPass):
    """The backward writes the gradient over the logits."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_derivatives("inplace_backward", grad)
        logits, target, weight, lse, *counts = ctx.saved_tensors
        gradient = _gradient_in_place(grad, logits, target, weight, lse, Counts(*counts), ctx.settings)
        return gradient, None, None, None


def _one_over(divisor: Tensor | None, logits: Tensor) -> Tensor:
    dtype = reference.accumulator(logits)
    if divisor is None:
        return torch.ones((), dtype=dtype, device=logits.device)
    return divisor.to(dtype).reciprocal()


class _OnePass(torch.autograd.Function):
    """The forward makes the gradient too, for an upstream gradient of one; the backward multiplies it by another."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, settings: Settings, in_place: bool
    ) -> Tensor:
        counts, scale = _count(logits, target, weight, settings)
        if scale is None:
            scale = _one_over(counts.weights, logits)
        square = None
        if settings.lse_square_scale != 0.0:
            square = settings.lse_square_scale * _one_over(counts.number, logits)
        args = (logits, target, scale, square, weight)
        kernels = kernels_for(logits, target, weight, **settings.options)
        if in_place:
            loss, lse = kernels["cross_entropy_with_grad_"](*args, **settings.options)
            ctx.save_for_backward(logits)
        else:
            loss, lse, gradient = kernels["cross_entropy_with_grad"](*args, **settings.options)
            ctx.save_for_backward(gradient)
        ctx.spent = False
        return _reduce(loss, lse, counts, settings)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_derivatives("grad_in_forward", grad)
        if ctx.spent:
            raise RuntimeError(
                "a second backward through a loss with grad_in_forward=True: its gradient was made once, and the first "
                "backward has scaled it and given it away. Leave grad_in_forward off to go through the loss again"
            )
        (gradient,) = ctx.saved_tensors
        gradient = gradient.detach()
        kernels_for(grad, gradient)["scale_grad_"](gradient, grad)
        ctx.spent = True
        return gradient, None, None, None, None
