"""Products of 8-bit numbers: how they are rounded, how far gradients are from float64, and what is refused."""

import pytest
import torch
from helpers.interpreter import INTERPRETED

import xent_ops
from xent_ops.head import fp8
from xent_ops.kernels import reference, reference_fp8
from xent_ops.kernels.options import RowOptions
from xent_ops.kernels.reference_fp8 import DTYPE, LARGEST

BOTH = pytest.mark.parametrize("products", ["fp8", "fp8_gradients"])


def kernels_of(device):
    if INTERPRETED:
        from xent_ops.kernels.triton import launch_fp8

        return launch_fp8
    return fp8._kernels(torch.device(device))


def room(device, *shape):
    """For 8-bit numbers, with something in it."""
    return torch.full(shape, 0x31, dtype=torch.uint8, device=device).view(DTYPE)


@pytest.mark.interpreter
@pytest.mark.parametrize("factor", [False, True], ids=["plain", "factor"])
def test_matrices(device, factor):
    """To nearest, in both layouts, with zeros behind them."""
    values = torch.randn(70, 50, device=device).bfloat16()
    values[3], values[4, 5] = 0.0, 1000.0
    factors = torch.rand(70, device=device) if factor else None
    scaled = values.float() if factors is None else values.float() * factors.unsqueeze(1)
    scale = reference_fp8.scale_of(scaled.abs().amax())
    rows, transposed = room(device, 80, 64), room(device, 64, 80)
    kernels_of(device).quantize(values, scale, factors, rows, transposed)
    expected = torch.zeros(80, 64, device=device)
    expected[:70, :50] = (scaled / scale).to(DTYPE).float()
    assert rows.float().abs().amax() == LARGEST
    torch.testing.assert_close(rows.float(), expected, rtol=0.07, atol=2**-9)  # a division apart: the next number
    assert (rows.float() != expected).float().mean() < 0.01
    assert torch.equal(transposed.float(), rows.float().t())


@pytest.mark.interpreter
def test_more_rows_than_a_launch_takes(device, monkeypatch):
    kernels = kernels_of(device)
    values, factor = torch.randn(150, 20, device=device), torch.rand(150, device=device)
    made = []
    for most in (None, 64):
        if most is not None:
            monkeypatch.setattr(kernels, "_MOST_ROWS", most, raising=False)
        made.append((room(device, 160, 32), room(device, 32, 160)))
        kernels.quantize(values, torch.tensor(0.01, device=device), factor, *made[-1])
    for one, other in zip(*made, strict=True):
        assert torch.equal(one.float(), other.float())


@pytest.mark.interpreter
def test_every_number_is_rounded_to_the_nearest(device):
    """Each of e4m3, what lies half-way and next to that, beyond the largest, and NaN: as torch rounds them."""
    numbers = torch.arange(127, dtype=torch.uint8).view(DTYPE).float()
    halves = (numbers[1:] + numbers[:-1]) / 2
    values = torch.cat([numbers, halves, halves * (1 + 2.0**-16), halves * (1 - 2.0**-16), torch.tensor([460.0, 1e30])])
    values = torch.cat([values, -values, torch.tensor([float("nan")])]).to(device).unsqueeze(0)
    rows, columns = room(device, 1, values.shape[1]), room(device, values.shape[1], 1)
    kernels_of(device).quantize(values, torch.ones((), device=device), None, rows, columns)
    torch.testing.assert_close(rows.float(), values.clamp(-448, 448).to(DTYPE).float(), equal_nan=True, rtol=0, atol=0)
    torch.testing.assert_close(columns.float(), rows.float().t(), equal_nan=True, rtol=0, atol=0)


def rows_of(logits, target, options, **given):
    lse = reference.activation(logits, options).logsumexp(1)
    upstream = {"grad_loss": torch.ones_like(lse), "grad_lse": None, "grad_entropy": None, "entropy": None} | given
    row_args = (upstream["grad_loss"], upstream["grad_lse"], logits, target, lse, given.get("weight"), None)
    return reference_fp8.gradient_rows(*row_args, upstream["grad_entropy"], upstream["entropy"], options=options)


@pytest.mark.interpreter
@pytest.mark.parametrize("case", ["plain", "options", "entropy", "magnitudes"])
def test_gradients_of_logits(device, case):
    """One step of e4m3 from the gradient at most, in both layouts; nothing is cut off; rows of any magnitude."""
    rows, classes = 37, 219
    logits, target = torch.randn(rows, classes, device=device) * 3, torch.arange(rows, device=device)
    target[4], options, given = -100, RowOptions(), {}
    if case == "options":
        options = RowOptions(label_smoothing=0.2, softcap=9.0, logit_scale=-1.5)
        given = {"grad_lse": torch.randn(rows, device=device), "weight": torch.rand(classes, device=device) * 1e3}
    elif case == "entropy":
        given = {"grad_entropy": torch.randn(rows, device=device)}
        given["entropy"] = torch.distributions.Categorical(logits=logits).entropy()
    elif case == "magnitudes":
        given = {"grad_loss": 10.0 ** torch.linspace(-20, 10, rows, device=device)}
    of_rows = rows_of(logits, target, options, **given)
    expected = reference.cross_entropy_backward(
        given.get("grad_loss", torch.ones(rows, device=device)),
        given.get("grad_lse"),
        logits.double(),
        target,
        of_rows.lse.double(),
        given.get("weight"),
        None,
        given.get("grad_entropy"),
        given.get("entropy"),
        options=options,
    )
    made, transposed = room(device, rows, 224), room(device, 224, rows)
    kernels_of(device).gradient(logits, of_rows, given.get("weight"), options, made, transposed)
    assert torch.equal(made.float().t()[:classes], transposed.float()[:classes])
    assert made[:, classes:].float().count_nonzero() == 0
    bound = of_rows.bound.unsqueeze(1).double()
    assert (expected.abs() <= bound * (1 + 1e-6)).all()
    wanted = torch.where(bound == 0, 0.0, expected * LARGEST / bound)
    step = torch.maximum(2.0 ** (wanted.abs().clamp_min(1e-30).log2().floor() - 3), torch.tensor(2.0**-9))
    assert ((made[:, :classes].double() - wanted).abs() <= step * 1.001).all()
    assert made[4].float().count_nonzero() == 0 or "grad_lse" in given or case == "entropy"


def test_rounding_is_right_in_the_mean():
    """Of what is far below the least number too. To nearest, that would be zero."""
    columns, seed = torch.arange(400_000), torch.full((400_000,), 77, dtype=torch.int32)
    bits = reference_fp8.random_bits(columns, seed)
    for value in (3e-6, 4e-4, 1e-3, 0.0157, 0.9, 1.03, 250.0, 258.0, 447.0):
        made = reference_fp8.round_at_random(torch.full((400_000,), value), bits)
        assert torch.equal(made, made.to(DTYPE).float()), "numbers that e4m3 has"
        error = made.double().std() / 400_000**0.5
        assert abs(made.double().mean() - value) < 5 * error + 2.0**-16 * 2.0**-9
    for value in (0.0, 2.0**-9, 0.5, 448.0, float("inf")):
        made = reference_fp8.round_at_random(torch.full((1000,), value), bits[:1000])
        assert (made == min(value, LARGEST)).all()
    for word in (0x7FC00000, 0x7FFFFFFF, -1):  # a CPU's NaN, a GPU's, and a negative one
        broken = torch.tensor([word], dtype=torch.int32).view(torch.float32)
        assert reference_fp8.round_at_random(broken, bits[1:2]).isnan()


def problem(device, rows, features, classes, dtype=torch.bfloat16):
    """Weights and inputs as those of a head, with logits of a standard deviation of 3."""
    x = torch.randn(rows, features, device=device).to(dtype)
    head = (torch.randn(classes, features, device=device) * (3 / features**0.5)).to(dtype)
    return x, head, torch.randint(classes, (rows,), device=device)


def gradients(loss, *tensors, **options):
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    value = loss(*leaves, **options)
    return value.detach(), torch.autograd.grad(value, leaves)


def error(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize(
    "products, dtype",
    [
        ("fp8", torch.bfloat16),
        pytest.param("fp8", torch.float16, marks=pytest.mark.slow),
        pytest.param("fp8_gradients", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("fp8_gradients", torch.float16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_gradients_of_heads(device, products, dtype):
    """3.2e-2 of their norm from float64; "fp8_gradients" has the loss of 16-bit products, to the bit."""
    x, head, target = problem(device, 256, 512, 32000, dtype)

    def loss(x, head, **how):
        return xent_ops.linear_cross_entropy(x, head, target, **how)

    exact = gradients(loss, x.double(), head.double())
    plain, found = gradients(loss, x, head), gradients(loss, x, head, products=products)
    for gradient, right in zip(found[1], exact[1], strict=True):
        assert gradient.dtype == dtype and error(gradient, right) < 3.2e-2
    if products == "fp8_gradients":
        assert torch.equal(found[0], plain[0]) if device == "cpu" else found[0].sub(plain[0]).abs() < 1e-5
    else:
        assert abs(found[0] - exact[0]) < 0.05
    again = gradients(loss, x, head, products=products)
    assert all(torch.equal(one, other) for one, other in zip(found[1], again[1], strict=True)), "bits repeat"


@BOTH
def test_there_is_no_bias(device, products):
    """Rows of the logits' gradient add up to zero, and a class' mean gradient over many rows is right: small
    probabilities have not become zero. Seen in a head of ones: the input's gradient is the sum of a row."""
    rows, classes = 512, 16384
    x = torch.zeros(rows, 16, device=device).bfloat16()
    head = torch.ones(classes, 16, device=device).bfloat16()
    target = torch.zeros(rows, dtype=torch.int64, device=device)
    _, (of_input, of_head) = gradients(
        lambda x, head: xent_ops.linear_cross_entropy(x, head, target, reduction="sum", products=products), x + 1, head
    )
    # Each p is 1 / 16384, times 448 14 steps of the least number. A tensor core adds what stands beside the target's
    # 448, the products of 128 classes or so, with 14 bits: these are lost, whatever the number of classes.
    lost = 128 / classes if device == "cuda" else 0.0
    assert of_input.double().abs().max() < 0.1 and of_input.double().mean().abs() < 1e-3 + lost
    expected = rows / classes
    assert abs(of_head[1:].double().mean() / expected - 1) < 1e-2
    assert (of_head[1:].double().mean(1) / expected - 1).abs().max() < 0.2


COEFFICIENTS = {
    "token weights": {"token_weight": True, "reduction": "sum"},
    "class weights": {"weight": True, "label_smoothing": 0.1},
    "z-loss": {"lse_square_scale": 1e-2, "softcap": 15.0},
    "float32 logits": {"logits_dtype": torch.float32},
    "wide sums": {"accumulate_dtype": torch.float32},
}


@BOTH
@pytest.mark.parametrize("case", COEFFICIENTS)
def test_coefficients(device, products, case):
    """Ten orders of magnitude: a row's gradient of the input is right beside rows that pass back far more."""
    x, head, target = problem(device, 96, 64, 1003)
    target[::7] = -100
    options = dict(COEFFICIENTS[case])
    if options.pop("token_weight", False):
        options["token_weight"] = 10.0 ** torch.linspace(-5, 5, 96, device=device)
    if options.pop("weight", False):
        options["weight"] = 10.0 ** torch.linspace(-5, 5, 1003, device=device)[torch.randperm(1003)]
    shift = torch.randn(1003, device=device).bfloat16()

    def loss(x, head, shift, **how):
        return xent_ops.linear_cross_entropy(x, head, target, linear_bias=shift, **{**options, **how})

    exact_options = {"logits_dtype": None, "accumulate_dtype": None}
    exact = gradients(loss, x.double(), head.double(), shift.double(), **exact_options)[1]
    found = gradients(loss, x, head, shift, products=products)[1]
    for gradient, right in zip(found, exact, strict=True):
        assert error(gradient, right) < 0.08
    counted = target != -100
    of_rows = (found[0].double() - exact[0]).norm(dim=1) / exact[0].norm(dim=1).clamp_min(1e-30)
    assert of_rows[counted].max() < 0.25 and found[0][~counted].count_nonzero() == 0


@BOTH
def test_every_way(products):
    """Chunks and blocks of rows, packed rows, outputs, log-probabilities, a user's function, frozen operands."""
    x, head, target = problem("cpu", 100, 32, 219)
    target[::3] = -100
    mean = gradients(lambda x, head: xent_ops.linear_cross_entropy(x, head, target), x.double(), head.double())
    number, counted = (target != -100).sum(), target != -100
    ways = {
        "chunks": lambda x, head, **how: xent_ops.linear_cross_entropy(x, head, target, chunk_rows=16, **how),
        "packed": lambda x, head, **how: xent_ops.linear_cross_entropy(
            x, head, target, skip_ignored=True, chunk_rows=17, **how
        ),
        "outputs": lambda x, head, **how: xent_ops.linear_cross_entropy_outputs(x, head, target, **how).loss,
        "rows": lambda x, head, **how: (
            xent_ops.linear_cross_entropy(x, head, target, reduction="none", **how).sum() / number
        ),
        "log-probabilities": lambda x, head, **how: (
            -torch.where(counted, xent_ops.linear_token_log_probs(x, head, target, **how).log_probs, 0).sum() / number
        ),
        "function": lambda x, head, **how: xent_ops.linear_token_loss(
            x, head, target, lambda stats: -stats.log_probs, reduction="sum", divisor=number, **how
        ),
        "module": lambda x, head, **how: (
            xent_ops.LinearCrossEntropyLoss(tied_weight=torch.nn.Parameter(head.detach()), **how)(x, target)
            + 0 * head.sum()
        ),
    }
    for name, way in ways.items():
        value, found = gradients(way, x, head, products=products)
        assert abs(value - mean[0]) < 0.1, name
        assert error(found[0], mean[1][0]) < 0.06, name
        assert name == "module" or error(found[1], mean[1][1]) < 0.06, name
    leaf = x.clone().requires_grad_()
    xent_ops.linear_cross_entropy(leaf, head, target, products=products).backward()
    assert error(leaf.grad, mean[1][0]) < 0.06
    leaf = head.clone().requires_grad_()
    xent_ops.linear_cross_entropy(x, leaf, target, products=products).backward()
    assert error(leaf.grad, mean[1][1]) < 0.06


def test_blocks_of_rows(monkeypatch, device):
    """Where the gradient's transpose would be too large, the weight's gradient is added up a block at a time."""
    x, head, target = problem(device, 100, 32, 208)

    def loss(x, head):
        return xent_ops.linear_cross_entropy(x, head, target, products="fp8", chunk_rows=16)

    _, whole = gradients(loss, x, head)
    monkeypatch.setattr(fp8, "_BLOCK_BYTES", 208 * 64)
    monkeypatch.setattr(fp8, "_PART_BYTES", 208 * 40)
    monkeypatch.setattr(fp8, "_SLAB", 64)
    _, parts = gradients(loss, x, head)
    assert torch.equal(parts[0], whole[0])
    assert error(parts[1], whole[1].double()) < 0.04 and not torch.equal(parts[1], whole[1])


@pytest.mark.parametrize("products", ["fp8", "fp8_gradients"])
def test_no_row(device, products):
    x = torch.randn(0, 32, device=device, dtype=torch.bfloat16, requires_grad=True)
    head = torch.randn(48, 32, device=device, dtype=torch.bfloat16, requires_grad=True)
    target = torch.zeros(0, dtype=torch.int64, device=device)
    loss = xent_ops.linear_cross_entropy(x, head, target, reduction="sum", products=products)
    assert loss == 0 and not torch.autograd.grad(loss, head)[0].any()


def test_nan_is_seen(device):
    """In a weight, in an input, by a target out of range: nothing is a number any more that it has part in."""
    x, head, target = problem(device, 20, 32, 64)
    broken = head.clone()
    broken[3, 4] = float("nan")
    for tensors in (
        (x, broken),
        (torch.where(torch.arange(20, device=device).unsqueeze(1) == 2, float("nan"), x), head),
    ):
        value, (of_input, of_head) = gradients(
            lambda x, head: xent_ops.linear_cross_entropy(x, head, target, products="fp8"), *tensors
        )
        assert value.isnan() and of_input.isnan().any() and of_head.isnan().any()
    if device == "cuda":
        target[1] = 64
        value, (of_input, of_head) = gradients(
            lambda x, head: xent_ops.linear_cross_entropy(x, head, target, products="fp8"), x, head
        )
        assert value.isnan() and of_input[1].isnan().all() and of_head.isnan().any()


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@BOTH
def test_compiled(products):
    """One operator of the graph, as ever; the bits of eager."""
    x, head, target = problem("cpu", 40, 32, 208)

    def loss(x, head):
        return xent_ops.linear_cross_entropy(x, head, target, products=products) * 2

    eager, compiled = gradients(loss, x, head), gradients(torch.compile(loss, fullgraph=True), x, head)
    assert torch.equal(eager[0], compiled[0])
    assert all(torch.equal(one, other) for one, other in zip(eager[1], compiled[1], strict=True))


def test_what_is_refused(monkeypatch):
    x, head, target = problem("cpu", 4, 32, 16)
    call = xent_ops.linear_cross_entropy
    for error, text, args in (
        (TypeError, r"makes 8-bit numbers of torch.bfloat16 and torch.float16", (x.float(), head.float(), target)),
        (ValueError, r"a number of features that is a multiple of 16.*got 24", (x[:, :24], head[:, :24], target)),
    ):
        with pytest.raises(error, match=text):
            call(*args, products="fp8")
    with pytest.raises(ValueError, match=r"products must be one of 'fp8', 'fp8_gradients', or None .* got 'fp9'"):
        call(x, head, target, products="fp9")
    with pytest.raises(NotImplementedError, match=r"several classes a row take no products='fp8'"):
        xent_ops.linear_token_log_probs(x, head, target.unsqueeze(1), products="fp8")
    monkeypatch.setattr(fp8, "why_not", lambda device: "they need compute capability 8.9")
    with pytest.raises(RuntimeError, match=r"not available on this device: they need compute capability 8.9"):
        call(x, head, target, products="fp8_gradients")
