"""The Ascend kernels through triton-ascend's own passes: what its compiler for the device would get, and its numbers.

The launchers run on CPU tensors. In each kernel's place stands one that lowers it for exactly that launch and runs the
IR on x86. That says nothing about bishengir, which makes the device's code of this IR, nor about speed.
"""

import itertools

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
from ascend_lowering import Kernel, live_bytes, lower, missing_tools, specialise, vector_integer_compares

from xent_ops import testing
from xent_ops.kernels import reductions, reference
from xent_ops.kernels.ascend import configs, launch
from xent_ops.kernels.options import Options

MISSING = missing_tools()
on_x86 = pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}: apt-get install mlir-19-tools clang-19")
KERNELS = [name for name in vars(launch) if name.endswith("_kernel")]
DTYPES = (torch.bfloat16, torch.float32)
FULL = {"label_smoothing": 0.1, "softcap": 30.0, "logit_scale": 0.5}


@pytest.fixture
def launches(monkeypatch):
    """Records every launch; ``run`` on it makes the launches happen."""
    found = []
    for name in KERNELS:
        monkeypatch.setattr(launch, name, Kernel(getattr(launch, name), found, run=False))
    return found


@pytest.fixture
def x86(monkeypatch):
    for name in KERNELS:
        monkeypatch.setattr(launch, name, Kernel(getattr(launch, name), [], run=True))


def everything(dtype, classes):
    """Every operator with every set of features that its kernels tell apart."""
    logits, target = torch.zeros(5, classes, dtype=dtype), torch.zeros(5, dtype=torch.int64)
    row = torch.zeros(5)
    scalar = torch.zeros(()).expand(5)
    for with_weight, smoothing, softcap in itertools.product(
        (None, torch.ones(classes)), (0.0, 0.1), (None, 30.0, 100.0)
    ):
        options = {"options": Options(label_smoothing=smoothing, softcap=softcap)}
        launch.cross_entropy_forward(logits, target, with_weight, **options)
        launch.cross_entropy_forward_argmax(logits, target, with_weight, **options)
        launch.cross_entropy_forward_entropy(logits, target, with_weight, **options)
        for grad_lse in (None, row):
            launch.cross_entropy_backward(scalar, grad_lse, logits, target, row, with_weight, **options)
            launch.cross_entropy_backward_(row, grad_lse, logits, target, row, with_weight, **options)
            launch.cross_entropy_backward_entropy(row, grad_lse, row, logits, target, row, row, with_weight, **options)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
def test_lowers_with_no_integer_compare_and_fits_the_unified_buffer(launches, monkeypatch, dtype):
    """Also with other integers in the launch: 1 and more than 32 bits are other signatures."""
    monkeypatch.delenv(configs.UB_VARIABLE, raising=False)
    everything(dtype, 32000)
    one, weight = torch.zeros(1, 1, dtype=dtype), torch.ones(1)
    launch.cross_entropy_forward(one, torch.zeros(1, dtype=torch.int32), weight, options=Options(**FULL))
    rest = (one, torch.zeros(1, dtype=torch.uint8), torch.zeros(1), weight)
    launch.cross_entropy_backward(torch.zeros(1), None, *rest, options=Options(2**40, **FULL))
    assert {found.kernel.__name__ for found in launches} == set(KERNELS)
    seen = set()
    for found in launches:
        signature, constants = specialise(found.kernel, found.args, found.kwargs)
        text = lower(found.kernel, signature, constants)
        what = f"{found.kernel.__name__} with {[k for k, v in found.kwargs.items() if v is True]}"
        assert not vector_integer_compares(text), what
        alive, tiles = live_bytes(text)
        flags = {k: v for k, v in found.kwargs.items() if k != "BLOCK"}
        counted = getattr(configs, found.kernel.__name__.replace("kernel", "bytes"))(dtype.itemsize, **flags)
        report = "\n".join([f"{what}: {alive} bytes", *tiles])
        assert alive <= counted * found.kwargs["BLOCK"] + 512, report  # 512: of scalars in one-element tiles
        assert alive <= configs.FRACTION * configs.UB_BYTES, report
        seen.add((found.kernel.__name__, alive))
    print(
        f"\n{len(seen)} kernels, the largest with {max(alive for _, alive in seen)} of {configs.UB_BYTES} bytes alive"
    )


@triton.jit
def _compares_integers(x_ptr, t, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + columns)
    tl.store(x_ptr + columns, tl.where(columns == t, 0.0, x))


def test_the_checks_can_fail():
    """A kernel with a vector integer compare is found out, and so is a tile that does not fit."""
    text = lower(_compares_integers, {"x_ptr": "*fp32", "t": "i32"}, {"BLOCK": 1024})
    assert vector_integer_compares(text)
    assert live_bytes(text)[0] >= 3 * 1024 * 4


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
    options = {"options": Options(**named)}
    logits = testing.realistic_logits(8, classes, dtype=dtype)
    logits[3] += 1e4  # large logits lose digits unless the loss is relative to their maximum
    target = torch.tensor([0, 1, classes - 1, classes // 2, -100, 7, 5, 3])
    generator = torch.Generator().manual_seed(1)
    grad_loss, grad_lse = torch.rand(8, generator=generator), torch.rand(8, generator=generator)

    loss, lse, argmax = launch.cross_entropy_forward_argmax(logits, target, weight, **options)
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
    assert torch.equal(argmax, reference.cross_entropy_forward_argmax(logits, target, weight, **options)[2])


@on_x86
def test_edges_on_x86(x86):
    """Rows that pass nothing back, bad targets, -inf, three dimensions with a gap, an expanded gradient, in place."""
    whole = testing.realistic_logits(3, 5, 5000, dtype=torch.bfloat16, padding=4)
    whole[1, 1] = float("nan")
    logits = whole[:, :-1]
    target = torch.arange(12).view(3, 4)
    target[1, 1], target[2, 0], target[2, 1] = -100, 5000, -7
    loss, lse, entropy = launch.cross_entropy_forward_entropy(logits, target)
    good = torch.ones(3, 4, dtype=torch.bool)
    good[1, 1] = good[2, 0] = good[2, 1] = False
    assert loss[1, 1] == 0 and loss[2, :2].isnan().all()
    expected = testing.oracle(logits[good], target[good], grad_loss=0.25)
    testing.assert_loss(loss[good], expected)
    wanted = reference.cross_entropy_forward_entropy(logits, target)[2]
    torch.testing.assert_close(entropy[good], wanted[good], rtol=1e-5, atol=1e-5)

    upstream = torch.tensor(0.25).expand(3, 4)
    last = whole[:, -1].clone()
    grad = launch.cross_entropy_backward(upstream, None, logits, target, lse)
    launch.cross_entropy_backward_(upstream, None, logits, target, lse)
    testing.assert_grad(grad[good], expected)
    assert (grad[1, 1] == 0).all() and grad[2, :2].isnan().all()
    assert torch.equal(grad.nan_to_num(7), logits.nan_to_num(7)) and torch.equal(last, whole[:, -1])


@on_x86
def test_the_numbers_can_be_wrong(monkeypatch, x86):
    """What runs is the IR: with another constant in it, other numbers come out."""
    lowered = ascend_lowering.lower

    def tampered(*args):
        return lowered(*args).replace("0xFF800000", "0.000000e+00")  # the running maximum starts at 0

    monkeypatch.setattr(ascend_lowering, "lower", tampered)
    logits, target = torch.full((4, 1000), -200.0), torch.zeros(4, dtype=torch.int64)
    loss, _ = launch.cross_entropy_forward(logits, target)
    with pytest.raises(AssertionError, match="out of budget"):
        testing.assert_loss(loss, testing.oracle(logits, target))
