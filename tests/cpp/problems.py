"""Problems for the C++ kernels that hypothesis makes up, and how close a kernel must come to plain torch."""

import os

import torch
from helpers.option_values import drawn
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from xent_ops.kernels import cpu, reference
from xent_ops.kernels.options import as_record

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@st.composite
def problems(draw):
    """Logits of some shape and strides, and the options: (logits, target, weight, options, generator)."""
    classes = draw(st.one_of(st.integers(1, 80), st.sampled_from([1000, 4095, 4096, 4097, 8250])))  # blocks of 4096
    batch = draw(st.sampled_from([(), (1,), (4,), (3, 2), (2, 3, 2), (0,)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from(FLOATS))
    layout = draw(st.sampled_from(["contiguous", "padded rows", "transposed", "classes apart", "expanded"]))
    values = draw(st.sampled_from(["flat", "normal", "steep", "ties", "offset", "huge"]))

    def normal(*shape):
        x = torch.randn(shape, generator=generator)
        if values == "ties":
            x = x.round()
        elif values == "offset":
            x = x + 1000
        elif values != "normal":
            x = x * {"flat": 0, "steep": 8, "huge": 1e4 if dtype == torch.float16 else 1e30}[values]
        return x.to(dtype)

    if layout == "padded rows":
        logits = normal(*batch, classes + 3)[..., :classes]
    elif layout == "transposed" and len(batch) > 1:
        logits = normal(*reversed(batch), classes).permute(*reversed(range(len(batch))), len(batch))
    elif layout == "classes apart":
        logits = normal(*batch, classes, 2)[..., 0]
    elif layout == "expanded" and batch:
        logits = normal(*[1] * len(batch), classes).expand(*batch, classes)
    else:
        logits = normal(*batch, classes)
    strange = draw(st.sampled_from([None, None, None, float("-inf"), float("inf"), float("nan")]))
    if strange is not None and layout != "expanded":
        logits.masked_fill_(torch.rand(logits.shape, generator=generator) < 0.05, strange)

    ignore_index = draw(st.sampled_from([-100, 0, -1, classes - 1, classes + 3]))
    target = torch.randint(classes, batch, generator=generator)
    target = torch.where(torch.rand(batch, generator=generator) < 0.3, ignore_index, target)
    index_dtype = draw(st.sampled_from([torch.int64, torch.int32, torch.uint8]))
    if index_dtype != torch.uint8 or (0 <= ignore_index <= 255 and classes <= 256):
        target = target.to(index_dtype)
    weight = None
    if draw(st.booleans()):
        weight = torch.rand(classes, generator=generator).to(draw(st.sampled_from(FLOATS)))
        weight[:: draw(st.integers(2, 9))] = 0.0
    options = {name: draw(st.sampled_from(values)) for name, values in drawn("cross_entropy_forward").items()}
    return logits, target, weight, {"ignore_index": ignore_index, **options}, generator


def rows_like(target, dtype, generator, expanded=False):
    if expanded:
        return torch.randn((), generator=generator).to(dtype).expand(target.shape)
    values = torch.randn(target.shape, generator=generator)
    return torch.where(torch.rand(target.shape, generator=generator) < 0.2, 0.0, values).to(dtype)


def in_float64(arguments):
    return [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in arguments]


def finite(tensor):
    """Magnitudes, 0 for what is infinite or NaN."""
    return tensor.abs().where(tensor.isfinite(), 0)


def assert_same(actual, plain, exact, logits):
    """Each number as close to plain torch, or to what plain torch says in float64, as float32 (float64) sums and one
    rounding to the result's dtype allow. Large logits round when they are scaled: then the two differ."""
    accumulator = reference.accumulator(logits)
    largest = finite(logits).amax().item() if logits.numel() else 0.0
    for got, *expected in zip(*(x if isinstance(x, tuple) else (x,) for x in (actual, plain, exact)), strict=True):
        assert got.dtype == expected[0].dtype and got.shape == expected[0].shape
        if got.dtype == torch.int64:
            assert torch.equal(got, expected[0])
            continue
        tolerance = 2 * torch.finfo(got.dtype).eps + (400 + 8 * min(largest, 2000)) * torch.finfo(accumulator).eps
        good = [torch.isclose(got.double(), e.double(), tolerance, tolerance, equal_nan=True) for e in expected]
        if not bool((good[0] | good[1]).all()):
            torch.testing.assert_close(got.double(), expected[1], rtol=tolerance, atol=tolerance, equal_nan=True)


def lse_of(logits, target, weight, options):
    return reference.cross_entropy_forward(logits, target, weight, **as_record(options))[1]


def check(name, arguments, options, logits, plain=reference, compared=lambda results: results):
    """As plain torch, in what ``compared`` takes of the results."""
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
    actual = cpu.kernel(name)(*arguments, **options)
    for was, now in zip(before, arguments, strict=True):
        if isinstance(was, torch.Tensor):
            torch.testing.assert_close(now, was, rtol=0, atol=0, equal_nan=True)  # nothing of the caller's is written
    function = reference.statistics if name == "cross_entropy_forward" else getattr(plain, name)
    record = as_record(options)
    results = actual, function(*arguments, **record), function(*in_float64(arguments), **record)
    assert_same(*map(compared, results), logits)
    return actual


# The same problems every run; for others: XENT_OPS_EXAMPLES=5000 pytest tests/cpp/test_kernels.py
EXAMPLES = int(os.environ.get("XENT_OPS_EXAMPLES", 0))
many = settings(
    max_examples=EXAMPLES or 60,
    derandomize=not EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
