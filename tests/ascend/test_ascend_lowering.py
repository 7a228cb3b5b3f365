"""The Ascend kernels through triton-ascend's own passes: what its compiler for the device would get, and its numbers.

The launchers run on CPU tensors. In each kernel's place stands one that lowers it for exactly that launch and runs the
IR on x86. That says nothing about bishengir, which makes the device's code of this IR, nor about speed.
"""

import itertools
import re
import types

import pytest
import torch

try:
    from triton.backends import backends
except ImportError:
    backends = {}
if "ascend" not in backends:
    pytest.skip("needs triton-ascend, in an environment of its own: `make test-ascend`", allow_module_level=True)

import ascend_lowering
import triton
import triton.language as tl
from ascend_lowering import (
    Kernel,
    live_bytes,
    loop_operations,
    lower,
    missing_tools,
    specialise,
    vector_integer_compares,
)
from npu_cases import kernels

from xent_ops import testing
from xent_ops.kernels import reductions, reference, reference_shard, reference_soft
from xent_ops.kernels.ascend import configs
from xent_ops.kernels.ascend.launch import LAUNCHERS
from xent_ops.kernels.options import RowOptions

launch = types.SimpleNamespace(**LAUNCHERS)
MISSING = missing_tools()
on_x86 = pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}: apt-get install mlir-19-tools clang-19")
DTYPES = (torch.bfloat16, torch.float32)
FULL = {"label_smoothing": 0.1, "softcap": 30.0, "logit_scale": 0.5}


@pytest.fixture
def launches(monkeypatch):
    """Records every launch; ``run`` on it makes the launches happen."""
    found = []
    for module, name in kernels():
        monkeypatch.setattr(module, name, Kernel(getattr(module, name), found, run=False))
    return found


@pytest.fixture
def x86(monkeypatch):
    for module, name in kernels():
        monkeypatch.setattr(module, name, Kernel(getattr(module, name), [], run=True))


def everything(dtype, classes):
    """Every operator with every set of features that its kernels tell apart."""
    logits, target = torch.zeros(5, classes, dtype=dtype), torch.zeros(5, dtype=torch.int64)
    row = torch.zeros(5)
    scalar = torch.zeros(()).expand(5)
    activations = [(None, 1.0), (None, 0.5), (30.0, 1.0), (100.0, 0.5)]
    for weight, smoothing, (softcap, scale) in itertools.product((None, torch.ones(classes)), (0.0, 0.1), activations):
        options = {"options": RowOptions(label_smoothing=smoothing, softcap=softcap, logit_scale=scale)}
        launch.cross_entropy_forward(logits, target, weight, **options)
        launch.cross_entropy_reduced(logits, target, weight, **options)
        for wanted in ((True, False), (False, True), (True, True)):
            launch.cross_entropy_forward(logits, target, weight, *wanted, **options)
        launch.cross_entropy_backward(scalar, None, logits, target, row, weight, **options)
        for grad_lse in (None, row):
            launch.cross_entropy_backward_(row, grad_lse, logits, target, row, weight, **options)
        of_entropy = (weight, None, row, row)
        launch.cross_entropy_backward(row, row, logits, target, row, *of_entropy, **options)
        launch.cross_entropy_backward_(row, None, logits, target, row, *of_entropy, **options)
        shard = (classes, 3 * classes, weight)
        gathered = launch.cross_entropy_shard(logits, target, *shard, **options)
        launch.cross_entropy_shard_join(logits, target, gathered, *shard, **options)
        of_slice = (row, *shard[:2])
        launch.cross_entropy_backward(row, row, logits, target, row, weight, None, None, None, *of_slice, **options)
        launch.cross_entropy_backward(row, row, logits, target, row, *of_entropy, *of_slice, **options)
        for probabilities in (logits, logits.float()):
            launch.soft_cross_entropy_forward(logits, probabilities, weight, **options)
            launch.soft_cross_entropy_backward(row, row, logits, probabilities, row, weight, **options)


def bytes_of(launched, dtype):
    """What configs.py takes a launch to need. The join has no tile."""
    if "BLOCK" not in launched.kwargs:
        return 0
    name = launched.kernel.__name__.removesuffix("_kernel")
    sizes = [dtype.itemsize]
    if name.startswith("soft"):
        sizes.append(launched.args[launched.kernel.arg_names.index("target_ptr")].element_size())
    formula = {"shard": "forward", "soft_forward": "soft", "soft_backward": "soft"}.get(name, name)
    flags = {k: v for k, v in launched.kwargs.items() if k not in ("BLOCK", "SHARD", "HAS_LSE_LOW")}
    return getattr(configs, f"{formula}_bytes")(*sizes, **flags) * launched.kwargs["BLOCK"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lowers_with_no_integer_compare_and_fits_the_unified_buffer(launches, monkeypatch, dtype):
    """Also with other integers in the launch: 1 and more than 32 bits are other signatures. float16 is as bfloat16."""
    monkeypatch.delenv(configs.UB_VARIABLE, raising=False)
    everything(dtype, 32000)
    one, weight = torch.zeros(1, 1, dtype=dtype), torch.ones(1)
    index, row, full = torch.zeros(1, dtype=torch.int32), torch.zeros(1), {"options": RowOptions(**FULL)}
    launch.cross_entropy_forward(one, index, weight, **full)
    launch.cross_entropy_forward(one, index, options=RowOptions(label_smoothing=0.1))
    launch.cross_entropy_backward(row, None, one, index.to(torch.uint8), row, weight, options=RowOptions(2**40, **FULL))
    gathered = launch.cross_entropy_shard(one, index, 1, 2**33, weight, **full)
    launch.cross_entropy_shard_join(one, index, gathered, 1, 2**33, weight, **full)
    launch.cross_entropy_shard(one[:, :0], index, 1, 1)
    launch.cross_entropy_backward(row, None, one, index, row, weight, None, None, None, row, 1, 2**33, **full)
    launch.soft_cross_entropy_backward(row, None, one, one, row, weight, **full)
    launch.soft_cross_entropy_forward(one, one, weight, **full)
    if dtype == torch.bfloat16:
        half = torch.zeros(5, 32000, dtype=torch.float16)
        launch.cross_entropy_backward(half[:, 0], None, half, torch.zeros(5, dtype=torch.int64), torch.zeros(5))
        launch.cross_entropy_reduced(half, torch.zeros(5, dtype=torch.int64), **full)
    assert {found.kernel.__name__ for found in launches} == {name for _, name in kernels()}
    seen = set()
    for found in launches:
        signature, constants = specialise(found.kernel, found.args, found.kwargs)
        text = lower(found.kernel, signature, constants)
        what = f"{found.kernel.__name__} with {[k for k, v in found.kwargs.items() if v]}"
        assert not vector_integer_compares(text), what
        alive, tiles = live_bytes(text)
        report = "\n".join([f"{what}: {alive} bytes", *tiles])
        assert alive <= bytes_of(found, dtype) + 512, report  # 512: of scalars in one-element tiles
        assert alive <= configs.FRACTION * configs.UB_BYTES, report
        seen.add((found.kernel.__name__, alive))
    print(
        f"\n{len(seen)} kernels, the largest with {max(alive for _, alive in seen)} of {configs.UB_BYTES} bytes alive"
    )


def lowered(launched):
    return lower(launched.kernel, *specialise(launched.kernel, launched.args, launched.kwargs))


@pytest.mark.parametrize("dtype, block", [(torch.bfloat16, 8192), (torch.float32, 4096)], ids=str)
def test_a_plain_loss_is_light(launches, dtype, block):
    """The operations on a whole tile, none more; the target's column by itself; blocks that could not be larger."""
    logits, target, row = torch.zeros(5, 32000, dtype=dtype), torch.zeros(5, dtype=torch.int64), torch.zeros(5)
    launch.cross_entropy_reduced(logits, target)
    launch.cross_entropy_backward(row, None, logits, target, row)
    launch.cross_entropy_backward_(row, row, logits, target, row)
    launch.cross_entropy_shard(logits, target, 7, 10**6)
    launch.cross_entropy_backward(row, None, logits, target, row, class_start=7, num_classes=10**6)
    widen, narrow = (["arith.extf"], ["arith.truncf"]) if dtype == torch.bfloat16 else ([], [])
    forward = [*widen, "linalg.reduce", "arith.subf", "math.exp", "linalg.reduce"]
    backward = [*widen, "arith.subf", "math.exp", "arith.mulf", *narrow]
    for found in launches:
        text = lowered(found)
        is_forward = found.kernel.__name__ in ("forward_kernel", "shard_kernel")
        assert found.kwargs["BLOCK"] == block
        assert loop_operations(text, block) == [forward if is_forward else backward], text
        alive = live_bytes(text)[0]
        assert alive <= configs.FRACTION * configs.UB_BYTES < 2 * alive
        if not is_forward:
            assert re.search(r"gpu\.barrier(?:(?!materialize)[^}])*materialize_in_destination %\w+ in writable", text)
            assert text.count("gpu.barrier") == 1


@triton.jit
def _compares_integers(x_ptr, t, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + columns)
    tl.store(x_ptr + columns, tl.where(columns == t, 0.0, x))


@triton.jit
def _adds_in_a_loop(x_ptr, n, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    for start in tl.range(0, n, BLOCK):
        x = tl.load(x_ptr + start + columns)
        tl.store(x_ptr + start + columns, (x + 2.0) * x)


def test_the_checks_can_fail():
    """A kernel with a vector integer compare is found out, and so is a tile that does not fit."""
    text = lower(_compares_integers, {"x_ptr": "*fp32", "t": "i32"}, {"BLOCK": 1024})
    assert vector_integer_compares(text)
    assert live_bytes(text)[0] >= 3 * 1024 * 4
    assert loop_operations(text, 1024) == []
    text = lower(_adds_in_a_loop, {"x_ptr": "*fp32", "n": "i32"}, {"BLOCK": 1024})
    assert loop_operations(text, 1024) == [["arith.addf", "arith.mulf"]]


OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "softcap": {"softcap": 20.0, "logit_scale": -0.5},
    "all": {"weight": True, **FULL},
    "exact softcap": {"softcap": 100.0},
}


@on_x86
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("classes", [1000, 4096, 4097, 32000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_on_x86(x86, dtype, classes, options):
    named = dict(OPTIONS[options])
    weight = torch.linspace(0.5, 1.5, classes) if named.pop("weight", None) else None
    options = {"options": RowOptions(**named)}
    logits = testing.realistic_logits(8, classes, dtype=dtype)
    logits[3] += 1e4  # large logits lose digits unless the loss is relative to their maximum
    target = torch.tensor([0, 1, classes - 1, classes // 2, -100, 7, 5, 3])
    generator = torch.Generator().manual_seed(1)
    grad_loss, grad_lse = torch.rand(8, generator=generator), torch.rand(8, generator=generator)

    loss, lse, argmax, _, _ = launch.cross_entropy_forward(logits, target, weight, True, **options)
    for upstream in (None, grad_lse):
        b = 0.0 if upstream is None else upstream
        expected = testing.oracle(logits, target, weight, grad_loss=grad_loss, grad_lse=b, **named)
        grad = launch.cross_entropy_backward(grad_loss, upstream, logits, target, lse, weight, **options)
        testing.assert_grad(grad, expected)
    half, divisor = grad_loss.half(), torch.tensor([100000.0, 7.0])  # which float16 does not hold
    rest = (None, logits, target, lse, weight)
    wanted = launch.cross_entropy_backward(half.float() / 100000, *rest, **options)
    assert torch.equal(launch.cross_entropy_backward(half, *rest, divisor, **options), wanted)
    reduced = launch.cross_entropy_reduced(logits, target, weight, lse_square_scale=1e-4, **options)
    rest = (logits, target, reduced[2], weight, reduced[1])
    grads = [
        module.cross_entropy_backward(half[0], None, *rest, lse_square_scale=1e-4, **options)
        for module in (launch, reference)
    ]
    wanted = reductions.cross_entropy_reduced(logits, target, weight, lse_square_scale=1e-4, **options)
    torch.testing.assert_close(reduced, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(*grads, rtol=1e-2, atol=1e-6)
    testing.assert_loss(loss, expected)
    testing.assert_lse(lse, expected)
    assert torch.equal(argmax, reference.statistics(logits, target, weight, True, **options)[2])


@on_x86
def test_edges_on_x86(x86):
    """Rows that pass nothing back, bad targets, -inf, three dimensions with a gap, an expanded gradient, in place."""
    whole = testing.realistic_logits(3, 5, 5000, dtype=torch.bfloat16, padding=4)
    whole[1, 1] = float("nan")
    logits = whole[:, :-1]
    target = torch.arange(12).view(3, 4)
    target[1, 1], target[2, 0], target[2, 1] = -100, 5000, -7
    loss, lse, _, entropy, _ = launch.cross_entropy_forward(logits, target, with_entropy=True)
    good = torch.ones(3, 4, dtype=torch.bool)
    good[1, 1] = good[2, 0] = good[2, 1] = False
    assert loss[1, 1] == 0 and loss[2, :2].isnan().all()
    expected = testing.oracle(logits[good], target[good], grad_loss=0.25)
    testing.assert_loss(loss[good], expected)
    wanted = reference.statistics(logits, target, with_entropy=True)[3]
    torch.testing.assert_close(entropy[good], wanted[good], rtol=1e-5, atol=1e-5)

    upstream = torch.tensor(0.25).expand(3, 4)
    last = whole[:, -1].clone()
    grad = launch.cross_entropy_backward(upstream, None, logits, target, lse)
    launch.cross_entropy_backward_(upstream, None, logits, target, lse)
    testing.assert_grad(grad[good], expected)
    assert (grad[1, 1] == 0).all() and grad[2, :2].isnan().all()
    assert torch.equal(grad.nan_to_num(7), logits.nan_to_num(7)) and torch.equal(last, whole[:, -1])


@on_x86
@pytest.mark.parametrize("options", ["plain", "all"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shards_on_x86(x86, dtype, options):
    """Three shards, one of them empty, one with padding."""
    named, classes = dict(OPTIONS[options]), 10_000
    weight = torch.linspace(0.5, 1.5, classes) if named.pop("weight", None) else None
    options = {"options": RowOptions(**named)}
    logits = testing.realistic_logits(8, classes, dtype=dtype)
    logits[3] += 1e4
    target = torch.tensor([0, 1, classes - 1, classes // 2, -100, 4999, 5000, 4096])
    row_grads = torch.linspace(0.1, 0.9, 8), torch.linspace(1, 0, 8)
    expected = testing.oracle(logits, target, weight, grad_loss=row_grads[0], grad_lse=row_grads[1], **named)
    shards = []
    for start, columns, padding in ((0, 5000, 0), (5000, 0, 0), (5000, 5000, 24)):
        part = torch.nn.functional.pad(logits[:, start : start + columns], (0, padding), value=float("nan"))
        w = None if weight is None else torch.nn.functional.pad(weight[start : start + columns], (0, padding), value=1)
        shards.append((part, start, w))
    parts = [launch.cross_entropy_shard(part, target, start, classes, w, **options) for part, start, w in shards]
    gathered, grads = torch.cat(parts), []
    for part, start, w in shards:
        rest = (start, classes, w)
        joined = launch.cross_entropy_shard_join(part, target, gathered, *rest, **options)
        rows = (*row_grads, part, target, joined[1])
        of_slice = (w, None, None, None, joined[3], start, classes)
        grads.append(launch.cross_entropy_backward(*rows, *of_slice, **options))
    testing.assert_loss(joined[0], expected)
    testing.assert_lse(joined[1], expected)
    testing.assert_grad(torch.cat(grads, -1)[:, :classes], expected)
    assert (grads[-1][:, 5000:] == 0).all()
    wanted = reference_shard.cross_entropy_shard_join(part, target, gathered, *rest, **options)
    torch.testing.assert_close(joined, wanted, rtol=1e-5, atol=1e-5)
    joined = launch.cross_entropy_shard_join(part, target, torch.cat([parts[0], parts[0]]), *rest, **options)
    assert joined[1].isnan().all() and joined[0].isnan().sum() == 7 and joined[0][4] == 0  # two times the first half


@on_x86
@pytest.mark.parametrize("options", ["plain", "smoothing", "all"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_class_probabilities_on_x86(x86, dtype, options):
    named, classes = dict(OPTIONS[options]), 10_000
    weight = torch.linspace(0.5, 1.5, classes) if named.pop("weight", None) else None
    options = {"options": RowOptions(**named)}
    logits = testing.realistic_logits(8, classes, dtype=dtype)
    logits[3] += 1e4
    target = torch.softmax(testing.realistic_logits(8, classes, dtype=torch.float32, seed=1), -1).to(dtype)
    grad_loss, grad_lse = torch.linspace(-0.1, 0.9, 8), torch.linspace(1, 0, 8)
    grad_loss[2], target[2] = 0.0, float("nan")  # nothing reads these probabilities backward
    made = launch.soft_cross_entropy_forward(logits, target, weight, **options)
    grad = launch.soft_cross_entropy_backward(grad_loss, grad_lse, logits, target, made[1], weight, **options)
    exact = reference_soft.soft_cross_entropy_forward(logits.double(), target, weight, **options)
    exact_grad = reference_soft.soft_cross_entropy_backward(
        grad_loss, grad_lse, logits.double(), target, exact[1], weight, **options
    )
    for actual, wanted in zip(made, exact, strict=True):
        torch.testing.assert_close(actual, wanted.float(), rtol=2e-5, atol=2e-5, equal_nan=True)
    assert grad.isfinite().all()
    # An lse of 1e4 is rounded to 5e-4 in float32, and so is a softmax that is computed from it.
    torch.testing.assert_close(grad, exact_grad.to(dtype), rtol=1e-2 if dtype == torch.bfloat16 else 1e-3, atol=1e-6)


@on_x86
def test_the_numbers_can_be_wrong(monkeypatch, x86):
    """What runs is the IR: with another constant in it, other numbers come out."""
    lowered = ascend_lowering.lower

    def tampered(*args):
        return lowered(*args).replace("0xFF800000", "0.000000e+00")  # the running maximum starts at 0

    monkeypatch.setattr(ascend_lowering, "lower", tampered)
    logits, target = torch.full((4, 1000), -200.0), torch.zeros(4, dtype=torch.int64)
    loss = launch.cross_entropy_forward(logits, target)[0]
    with pytest.raises(AssertionError, match="out of budget"):
        testing.assert_loss(loss, testing.oracle(logits, target))
