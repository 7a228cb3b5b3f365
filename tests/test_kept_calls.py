"""Operators that keep what their first call has found out: the next, of like tensors, must be as good as a first one."""

import contextlib
import functools
import gc
import weakref

import pytest
import torch
from conftest import INTERPRETED
from test_operators import samples

from xent_ops.kernels import reference as plain_torch
from xent_ops.kernels import reference_shard
from xent_ops.ops import library

pytestmark = pytest.mark.interpreter

WRITTEN = "what the operator writes over"
LAYOUTS = {
    "dense": lambda x: x,
    "off a boundary": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
    "padded rows": lambda x: torch.stack([x, x], -1).flatten(-2)[..., : x.shape[-1]] if x.dim() else x,
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
    "expanded": lambda x: x.flatten()[:1].view([1] * x.dim()).expand(x.shape) if x.numel() else x,
}


@pytest.fixture
def launchers(device):
    """By name, of the operators that are launched in two steps."""
    if device == "cpu" and not INTERPRETED:
        pytest.skip("the kernels of C++ and plain torch keep nothing")
    pytest.importorskip("triton", reason="needs triton")
    from xent_ops.kernels.triton import launch, launch_shard
    from xent_ops.kernels.triton.common import InTwoSteps

    return {
        name: launcher
        for module in (launch, launch_shard)
        for name, launcher in vars(module).items()
        if isinstance(launcher, InTwoSteps) and name in library.SCHEMAS
    }


@functools.cache
def _samples(device):
    return list(samples(device, torch.float32, requires_grad=False))


def cases(device, launchers):
    """(operator's name, its arguments' names, arguments, options); in the interpreter, which is slow, some of them."""
    found = {name: [] for name in launchers}
    for op, args, options in _samples(device):
        name = op._schema.name.removeprefix("xent::")
        if name in launchers:
            names = [
                WRITTEN if arg.alias_info is not None and arg.alias_info.is_write else arg.name
                for arg in op._schema.arguments
            ]
            found[name].append((name, names, args, options))
    for of_one in found.values():
        assert of_one
        yield from (of_one[:2] + of_one[4::4] if INTERPRETED else of_one)


def laid_out(args, layout, names, seed):
    """Other numbers in the same places; class indices stay, and what ranks have handed over."""
    torch.manual_seed(seed)

    def like(arg, name):
        if not isinstance(arg, torch.Tensor):
            return arg
        numbers = torch.rand_like(arg) if arg.is_floating_point() and name != "gathered" else arg.clone()
        dense = layout == "expanded" and (name in ("gathered", "target", WRITTEN) or arg.dim() == 0)
        return numbers if dense else LAYOUTS[layout](numbers)

    return [like(arg, name) for arg, name in zip(args, names, strict=False)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_later_call_is_as_good_as_a_first_one(device, launchers, layout):
    """And both are what plain torch makes of the same numbers."""
    for name, names, args, options in cases(device, launchers):
        kept = library.KERNELS[device][name]
        for seed in range(2):  # the second time it is kept
            kept(*laid_out(args, layout, names, seed), **options)
        later, first, plain = (laid_out(args, layout, names, seed=2) for _ in range(3))
        version = [x._version if isinstance(x, torch.Tensor) else 0 for x in later]
        results = kept(*later, **options), launchers[name](*first, **options)
        torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)
        reference = vars(reference_shard if "shard" in name else plain_torch)[name]
        torch.testing.assert_close(results[0], reference(*plain, **options), rtol=2e-5, atol=2e-5, equal_nan=True)
        for x, y, z, before, role in zip(later, first, plain, version, names, strict=False):
            if role == WRITTEN:
                torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
                torch.testing.assert_close(x, z, rtol=2e-5, atol=2e-5, equal_nan=True)
                assert x._version > before or not x.numel()


def test_no_tensor_is_kept(device, launchers):
    for name, _, args, options in cases(device, launchers):
        tensors = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
        run = launchers[name].prepare(*tensors, **options)
        run(*tensors, **options)
        held = [weakref.ref(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)]
        del tensors
        gc.collect()
        assert not any(ref() is not None for ref in held), name


def test_calls_that_differ_in_an_option_are_not_one(device, launchers):
    forward = library.KERNELS[device]["cross_entropy_forward"]
    logits, target = torch.randn(4, 9, device=device) * 3, torch.arange(4, device=device)
    for options in [{}, {"softcap": 2.0}, {"logit_scale": 2.0}, {"softcap": 3.0}, {"ignore_index": 2}] * 3:
        wanted = plain_torch.cross_entropy_forward(logits, target, **options)
        torch.testing.assert_close(forward(logits, target, **options), wanted)


def test_an_option_that_is_a_tensor_is_not_remembered(device, launchers):
    """The dispatcher makes numbers of such; the kernels themselves may be asked for anything."""
    forward = library.KERNELS[device]["cross_entropy_forward"]
    logits, target = torch.randn(4, 9, device=device), torch.arange(4, device=device)
    for _ in range(3):
        with contextlib.suppress(Exception):  # whatever Triton says of a tensor where a number should be
            forward(logits, target, logit_scale=torch.tensor(1.0))
        with pytest.raises(ValueError, match="logit_scale must be finite"):
            forward(logits, target, logit_scale=torch.tensor(float("inf")))


def test_tensors_by_name(device, launchers):
    kernels = library.KERNELS[device]
    logits, target = torch.randn(4, 9, device=device), torch.arange(4, device=device)
    place = {"class_start": 3, "num_classes": 20}
    for _ in range(3):
        weight, upstream = torch.rand(9, device=device), torch.rand(4, device=device)
        wanted = plain_torch.cross_entropy_forward(logits, target, weight)
        torch.testing.assert_close(
            kernels["cross_entropy_forward"](logits=logits, target=target, weight=weight), wanted
        )
        tensors = (upstream, None, logits, target, wanted[1])
        divisor = torch.rand((), device=device) + 1
        grad = kernels["cross_entropy_backward"](*tensors, divisor=divisor)
        torch.testing.assert_close(grad, plain_torch.cross_entropy_backward(*tensors, divisor=divisor))
        part = kernels["cross_entropy_shard"](logits, target, **place)
        torch.testing.assert_close(part, reference_shard.cross_entropy_shard(logits, target, **place))
        grad = kernels["cross_entropy_shard_backward"](*tensors, weight=weight, coefficient=upstream, **place)
        wanted = reference_shard.cross_entropy_shard_backward(*tensors, weight=weight, coefficient=upstream, **place)
        torch.testing.assert_close(grad, wanted)


def test_a_call_that_differs_is_checked(device, launchers):
    forward, backward_ = (library.KERNELS[device][f"cross_entropy_{name}"] for name in ("forward", "backward_"))
    logits, target = torch.randn(4, 8, device=device), torch.arange(4, device=device)
    for _ in range(3):
        _, lse = forward(logits, target)
    for bad in [(logits, target[:3]), (logits[:3], target), (logits.half(), target.half()), (logits[None], target)]:
        with pytest.raises((ValueError, TypeError)):
            forward(*bad)
    with pytest.raises(ValueError, match="label_smoothing"):
        forward(logits, target, label_smoothing=2.0)
    upstream = torch.ones(4, device=device)
    for _ in range(3):
        backward_(upstream, None, logits, target, lse)
    logits.requires_grad_()
    with pytest.raises(RuntimeError, match="logits must not require grad"):
        backward_(upstream, None, logits, target, lse)
    with torch.no_grad():
        for _ in range(3):
            backward_(upstream, None, logits, target, lse)
    with pytest.raises(RuntimeError, match="logits must not require grad"):
        backward_(upstream, None, logits, target, lse)


def test_what_comes_again_is_kept_and_no_more_than_so_much(monkeypatch):
    """As the number of rows of a step may never come again."""
    monkeypatch.setattr(library.Kept, "MOST", 2)
    monkeypatch.setattr(library.Kept, "SEEN", 3)
    kept, facts = library.Kept(), [("a", 1), ("b", 2), ("c", 3)]
    for fact in facts:
        kept.keep(fact, print)
    assert not kept and len(kept.seen) == 3
    for fact in facts:
        kept.keep(fact, print)
    assert list(kept) == facts[1:]
    kept.keep(("d", 4), print)
    assert len(kept.seen) == 1
