"""Operators that keep what their first call has found out: the next, of like tensors, must be as good as a first one."""

import functools
import gc
import weakref

import pytest
import torch
from conftest import INTERPRETED
from test_operators import samples

from xent_ops.ops import library

pytestmark = pytest.mark.interpreter

ops = torch.ops.xent
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
    pytest.importorskip("triton")
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
    """(operator's name, which arguments it writes, arguments, options); in the interpreter, which is slow, some of them."""
    found = {name: [] for name in launchers}
    for op, args, options in _samples(device):
        name = op._schema.name.removeprefix("xent::")
        if name in launchers:
            writes = [arg.alias_info is not None and arg.alias_info.is_write for arg in op._schema.arguments]
            found[name].append((name, writes, args, options))
    for of_one in found.values():
        assert of_one
        yield from (of_one[:2] + of_one[4::4] if INTERPRETED else of_one)


def laid_out(args, layout, writes, seed):
    """Other numbers in the same places; class indices stay."""
    torch.manual_seed(seed)

    def like(arg, written):
        if not isinstance(arg, torch.Tensor):
            return arg
        numbers = torch.rand_like(arg) if arg.is_floating_point() else arg.clone()
        return numbers if layout == "expanded" and (written or arg.dim() == 0) else LAYOUTS[layout](numbers)

    return [like(arg, written) for arg, written in zip(args, writes, strict=False)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_later_call_is_as_good_as_a_first_one(device, launchers, layout):
    for name, writes, args, options in cases(device, launchers):
        kept, launcher = library.KERNELS[device][name], launchers[name]
        for seed in range(2):  # the second time it is kept
            kept(*laid_out(args, layout, writes, seed), **options)
        one, other = (laid_out(args, layout, writes, seed=2) for _ in range(2))
        results = kept(*one, **options), launcher(*other, **options)
        torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)
        for x, y, written in zip(one, other, writes, strict=False):
            if written:
                torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


def test_no_tensor_is_kept(device, launchers):
    for name, _, args, options in cases(device, launchers):
        tensors = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
        for _ in range(2):
            library.KERNELS[device][name](*tensors, **options)
        kept = [weakref.ref(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)]
        del tensors
        gc.collect()
        assert not any(ref() is not None for ref in kept), name


def test_a_call_that_differs_is_checked(device, launchers):
    forward, backward_ = (library.KERNELS[device][f"cross_entropy_{name}"] for name in ("forward", "backward_"))
    logits, target = torch.randn(4, 8, device=device), torch.arange(4, device=device)
    for _ in range(2):
        _, lse = forward(logits, target)
    for bad in [(logits, target[:3]), (logits[:3], target), (logits.half(), target.half()), (logits[None], target)]:
        with pytest.raises((ValueError, TypeError)):
            forward(*bad)
    with pytest.raises(ValueError, match="label_smoothing"):
        forward(logits, target, label_smoothing=2.0)
    upstream = torch.ones(4, device=device)
    for _ in range(2):
        backward_(upstream, None, logits, target, lse)
    logits.requires_grad_()
    with pytest.raises(RuntimeError, match="logits must not require grad"):
        backward_(upstream, None, logits, target, lse)
    with torch.no_grad():
        backward_(upstream, None, logits, target, lse)
    with pytest.raises(RuntimeError, match="logits must not require grad"):
        backward_(upstream, None, logits, target, lse)


def test_what_comes_again_is_kept_and_no_more_than_so_much(monkeypatch):
    """As the number of rows of a step may never come again."""
    prepared, seen, facts = {}, set(), [("a", 1), ("b", 2), ("c", 3)]
    monkeypatch.setattr(library, "PREPARED_CALLS", 2)
    monkeypatch.setattr(library, "SEEN_CALLS", 3)
    for fact in facts:
        library._keep(prepared, seen, fact, None)
    assert not prepared and len(seen) == 3
    for fact in facts:
        library._keep(prepared, seen, fact, None)
        assert fact in prepared and len(prepared) <= 2
    library._keep(prepared, seen, ("d", 4), None)
    assert len(seen) == 1
