"""Types and ranges of the arguments of every public function: what is refused, with which message, and what is converted."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import xent_ops
from xent_ops.ops import arguments
from xent_ops.testing import oracle

OPTIONS = ["logit_scale", "softcap", "lse_square_scale", "label_smoothing"]
ADVICE = {
    "logit_scale": "multiply the logits, or the hidden states",
    "softcap": "compute softcap",
    "lse_square_scale": "take lse of xent_ops.cross_entropy_outputs",
    "label_smoothing": "pass class probabilities",
}
FUNCTIONS = {
    "cross_entropy": lambda x, t, **options: xent_ops.cross_entropy(x, t, **options),
    "class probabilities": lambda x, t, **options: xent_ops.cross_entropy(x, x.detach().softmax(-1), **options),
    "in place": lambda x, t, **options: xent_ops.cross_entropy(x * 1, t, inplace_backward=True, **options),
    "cross_entropy_outputs": lambda x, t, **options: xent_ops.cross_entropy_outputs(x, t, **options).loss,
    "token_log_probs": lambda x, t, **options: xent_ops.token_log_probs(x, t, **options).log_probs.sum(),
    "CrossEntropyLoss": lambda x, t, **options: xent_ops.CrossEntropyLoss(**options)(x, t),
}
CASES = [
    (function, option)
    for function in FUNCTIONS
    for option in (OPTIONS if function != "token_log_probs" else OPTIONS[:2])
]
FLOAT32_MAX = torch.finfo(torch.float32).max


def inputs(device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 9, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()
    return x, torch.tensor([0, 8, 3, 5], device=device)


# Tensors as options


@pytest.mark.parametrize("function, option", CASES)
def test_an_option_that_requires_grad_is_refused(device, function, option):
    """Its gradient would be lost without a word."""
    x, target = inputs(device)
    for value in (torch.nn.Parameter(torch.tensor(0.5, device=device)), torch.ones(1, requires_grad=True) * 0.5):
        for logits in (x, x.detach()):
            with pytest.raises(RuntimeError, match=f"^{option} .* requires grad .* {ADVICE[option]}"):
                FUNCTIONS[function](logits, target, **{option: value})
    with torch.no_grad(), pytest.raises(RuntimeError, match=f"^{option} .* requires grad"):
        FUNCTIONS[function](x, target, **{option: value})


# Each option of one function, and each function with one.
COMPILED = [("cross_entropy", option) for option in OPTIONS] + [
    (function, "softcap") for function in list(FUNCTIONS)[1:]
]


@pytest.mark.parametrize("function, option", COMPILED)
def test_an_option_that_requires_grad_is_refused_while_compiling(function, option):
    x, target = inputs()
    value = torch.nn.Parameter(torch.tensor(0.5))
    step = torch.compile(
        lambda x, t, v: FUNCTIONS[function](x, t, **{option: v}), backend="eager", fullgraph=True, dynamic=True
    )
    with pytest.raises(Exception, match=f"{option} .* requires grad .* {ADVICE[option]}"):
        step(x, target, value)


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_below_a_transform_is_refused(option):
    """torch.func.grad of it was 0, and jvp went on without the tangent."""
    x, target = inputs()
    x, value = x.detach(), torch.tensor(0.5)

    def loss(v, x=x):
        return xent_ops.cross_entropy(x, target, **{option: v})

    def loss_below_two(v):
        return torch.func.grad(lambda x: loss(v, x))(x).sum()

    transforms = [
        lambda: torch.func.grad(loss)(value),
        lambda: torch.func.grad(loss_below_two)(value),
        lambda: torch.func.vmap(loss)(value.repeat(2)),
        lambda: torch.func.jvp(loss, (value,), (value,)),
        lambda: torch.func.jacrev(loss)(value),
        lambda: torch.compile(torch.func.grad(loss), backend="eager", fullgraph=True)(value),
    ]
    for transform in transforms:
        with pytest.raises(Exception, match=f"{option} .* {ADVICE[option]}"):
            transform()
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match=f"^{option} is a tensor"):
        loss(torch.autograd.forward_ad.make_dual(value, value))
    # A constant of the function that is transformed is a number as elsewhere.
    torch.testing.assert_close(
        torch.func.grad(lambda x: loss(value, x))(x), torch.func.grad(lambda x: loss(0.5, x))(x), rtol=0, atol=0
    )


@pytest.mark.parametrize("function, option", CASES)
def test_numbers_of_other_types(device, function, option):
    x, target = inputs(device)
    wanted = FUNCTIONS[function](x, target, **{option: 1.0})
    (grad,) = torch.autograd.grad(wanted, x)
    for one in (
        1,
        torch.tensor(1.0),
        torch.tensor([1]),
        torch.tensor(1.0, dtype=torch.bfloat16),
        np.float32(1),
        np.int64(1),
    ):
        loss = FUNCTIONS[function](x, target, **{option: one})
        assert torch.equal(loss, wanted) and torch.equal(torch.autograd.grad(loss, x)[0], grad)


@pytest.mark.parametrize(
    "value, text",
    [
        ("0.5", "got '0.5'"),
        (None, "got None"),
        ([0.5], r"got \[0.5\]"),
        (0.5j, "got 0.5j"),
        (torch.ones(2), r"got a tensor of shape \(2,\) and dtype torch.float32"),
        (torch.tensor(0.5j), r"got a tensor of shape \(\) and dtype torch.complex64"),
        (torch.ones((), device="meta"), r"got a tensor on meta: .* Pass {option}.item\(\)"),
    ],
    ids=str,
)
@pytest.mark.parametrize("option", OPTIONS)
def test_what_is_no_number(option, value, text):
    if option == "softcap" and value is None:
        pytest.skip("softcap=None is no cap")
    x, target = inputs()
    for function in (xent_ops.cross_entropy, xent_ops.cross_entropy_outputs):
        with pytest.raises(TypeError, match=f"^{option} must be a number, {text.format(option=option)}"):
            function(x, target, **{option: value})


@pytest.mark.gpu
def test_a_tensor_on_a_gpu_is_not_read():
    x, target = inputs("cuda")
    with pytest.raises(TypeError, match="logit_scale must be a number, got a tensor on cuda:0"):
        xent_ops.cross_entropy(x, target, logit_scale=torch.tensor(0.5, device="cuda"))


# Large numbers


@pytest.mark.usefixtures("eager_and_dispatched")  # the kernels' part is that of the operators, below
@pytest.mark.parametrize("function", [name for name in FUNCTIONS if name != "token_log_probs"])
@pytest.mark.parametrize("option, value", [("softcap", 10**30), ("logit_scale", 2**70), ("lse_square_scale", 10**25)])
def test_integers_beyond_64_bits(device, function, option, value):
    x, target = inputs(device)
    results = []
    for number in (value, float(value)):
        loss = FUNCTIONS[function](x, target, **{option: number})
        results.append((loss, *torch.autograd.grad(loss, x)))
    assert results[0][0].isfinite()
    for mine, wanted in zip(*results, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=0)


@pytest.mark.interpreter
@pytest.mark.parametrize("option, value", [("softcap", 10**30), ("logit_scale", 2**70)])
def test_operators_take_integers_beyond_64_bits(device, option, value):
    x, target = inputs(device)
    for mine, wanted in zip(
        torch.ops.xent.cross_entropy_forward(x, target, **{option: value}),
        torch.ops.xent.cross_entropy_forward(x, target, **{option: float(value)}),
        strict=True,
    ):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("option, value", [("softcap", 10**30), ("logit_scale", 2**70), ("lse_square_scale", 10**25)])
def test_integers_beyond_64_bits_while_compiling(option, value):
    x, target = inputs()
    step = torch.compile(
        lambda x, t, v: xent_ops.cross_entropy(x, t, **{option: v}), backend="aot_eager", fullgraph=True, dynamic=True
    )
    torch.testing.assert_close(step(x, target, value), xent_ops.cross_entropy(x, target, **{option: float(value)}))


@pytest.mark.parametrize("option", OPTIONS)
def test_integers_beyond_float64(option):
    x, target = inputs()
    with pytest.raises(ValueError, match=f"^{option} must be at most .* got an integer beyond float64"):
        xent_ops.cross_entropy(x, target, **{option: 10**400})


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "option, value",
    [("softcap", 1e39), ("logit_scale", 1e39), ("logit_scale", -1e39), ("logit_scale", 10**39), ("softcap", 3.41e38)],
)
def test_what_float32_cannot_hold(device, dtype, option, value):
    """It gave NaN."""
    x, target = inputs(device, dtype)
    text = f"^{option} must be at most {FLOAT32_MAX} in magnitude for logits of dtype {dtype}, .* got {float(value)}"
    text = text.replace("+", r"\+")
    for logits in (x, x.detach()):
        for function in (
            lambda x: xent_ops.cross_entropy(x, target, **{option: value}),
            lambda x: xent_ops.cross_entropy(x, x.detach().softmax(-1), **{option: value}),
            lambda x: xent_ops.token_log_probs(x, target, **{option: value}),
            lambda x: torch.ops.xent.cross_entropy(x, target, **{option: float(value)}),
            lambda x: torch.ops.xent.cross_entropy_shard(x.detach(), target, 0, 9, **{option: float(value)}),
        ):
            with pytest.raises(ValueError, match=text):
                function(logits)
    with pytest.raises(Exception, match=text.removeprefix("^")):
        torch.compile(lambda x: xent_ops.cross_entropy(x, target, **{option: value}), backend="eager", fullgraph=True)(
            x
        )


@pytest.mark.parametrize("value", [1e39, 10**39])
def test_a_z_loss_that_float32_cannot_hold(device, value):
    x, target = inputs(device)
    text = rf"^lse_square_scale must be at most .* got {float(value)}".replace("+", r"\+")
    for function in (
        lambda: xent_ops.cross_entropy(x, target, lse_square_scale=value),
        lambda: xent_ops.cross_entropy(x, x.detach().softmax(-1), lse_square_scale=value),
        lambda: xent_ops.cross_entropy_outputs(x, target, lse_square_scale=value),
        lambda: torch.ops.xent.cross_entropy(x, target, lse_square_scale=float(value)),
    ):
        with pytest.raises(ValueError, match=text):
            function()
    for infinite in (math.inf, -math.inf, math.nan):
        with pytest.raises(ValueError, match=f"lse_square_scale must be finite, got {infinite}"):
            xent_ops.cross_entropy(x.double(), target, lse_square_scale=infinite)


def test_float64_holds_more(device):
    x, target = inputs(device, torch.float64)
    scaled = xent_ops.cross_entropy(x * 1e-39, target, logit_scale=1e39)
    torch.testing.assert_close(scaled, F.cross_entropy(x, target))
    capped = xent_ops.cross_entropy(x, target, softcap=1e39)
    torch.testing.assert_close(capped, F.cross_entropy(x, target))
    z = xent_ops.cross_entropy(x, target, lse_square_scale=1e39)
    torch.testing.assert_close(z, 1e39 * x.logsumexp(-1).square().mean())


@pytest.mark.interpreter
@pytest.mark.parametrize("softcap", [FLOAT32_MAX, 1e38, 2.0**126])
def test_caps_that_float32_just_holds(device, softcap):
    """Their reciprocal is no normal number."""
    x, target = inputs(device)
    loss = xent_ops.cross_entropy(x, target, softcap=softcap, reduction="none")
    (grad,) = torch.autograd.grad(loss.sum(), x)
    wanted = oracle(x.detach(), target)
    torch.testing.assert_close(loss.double().cpu(), wanted.loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad.double().cpu(), wanted.grad, rtol=1e-5, atol=1e-6)


# Integers


@pytest.mark.parametrize(
    "value, text",
    [
        (True, "got True"),
        (-100.0, "got -100.0"),
        (None, "got None"),
        ("3", "got '3'"),
        (torch.tensor(3.7), "got a tensor of shape .* and dtype torch.float32"),
        (torch.tensor(True), "got a tensor of shape .* and dtype torch.bool"),
        (torch.tensor([1, 2]), r"got a tensor of shape \(2,\)"),
        (torch.ones((), dtype=torch.int64, device="meta"), r"got a tensor on meta: .* Pass {option}.item\(\)"),
        (2**63, "fit into 64 bits|is not a dimension"),
    ],
    ids=str,
)
@pytest.mark.parametrize("option", ["ignore_index", "dim"])
def test_what_is_no_integer(option, value, text):
    x, target = inputs()
    for function in (
        xent_ops.cross_entropy,
        xent_ops.cross_entropy_outputs,
        xent_ops.token_log_probs,
        lambda x, t, **options: xent_ops.CrossEntropyLoss(**options)(x, t),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{option}.*({text.format(option=option)})"):
            function(x, target, **{option: value})


@pytest.mark.parametrize("value", [True, 3.5, torch.tensor(3.7)], ids=str)
def test_what_is_no_integer_while_compiling(value):
    x, target = inputs()
    step = torch.compile(
        lambda x, t: xent_ops.cross_entropy(x, t, ignore_index=value), backend="eager", fullgraph=True, dynamic=True
    )
    with pytest.raises(Exception, match="ignore_index must be an integer"):
        step(x, target)


def test_integers_of_other_types(device):
    x, target = inputs(device)
    wanted = xent_ops.cross_entropy(x, target, ignore_index=3)
    for three in (np.int64(3), torch.tensor(3), torch.tensor([3], dtype=torch.int32)):
        assert torch.equal(xent_ops.cross_entropy(x, target, ignore_index=three), wanted)
    for one in (np.int32(1), torch.tensor(1)):
        torch.testing.assert_close(xent_ops.cross_entropy(x, target, dim=one), xent_ops.cross_entropy(x, target))


# Tensors


def nested(x, layout):
    """Of two components, of sizes that differ."""
    return torch.nested.as_nested_tensor([x[:1], x[1:]], layout=layout)


@pytest.mark.parametrize("name", ["input", "target", "weight"])
@pytest.mark.parametrize(
    "make, text",
    [
        (lambda x: x.tolist(), "must be a torch.Tensor, got list; torch.as_tensor"),
        (lambda x: x.numpy(), "must be a torch.Tensor, got numpy.ndarray; torch.as_tensor"),
        (lambda x: None, "must be a torch.Tensor, got None"),
        (lambda x: x.to_sparse(), r"has layout torch.sparse_coo; expected torch.strided, .* pass {name}.to_dense\(\)"),
        (lambda x: nested(x, torch.strided), r"is a nested tensor; .* pass torch.cat\({name}.unbind\(\)\)"),
        (lambda x: nested(x, torch.jagged), r"is a nested tensor; .* pass torch.cat\({name}.unbind\(\)\)"),
    ],
    ids=["list", "numpy", "None", "sparse", "nested", "jagged"],
)
def test_what_is_no_tensor(name, make, text):
    x, target = inputs()
    given = {"input": x.detach(), "target": target, "weight": torch.ones(9)}
    given[name] = make(given[name])
    if given["weight"] is None:
        pytest.skip("weight=None is no weight")
    text = f"^{name} {text.format(name=name)}"
    with pytest.raises(TypeError, match=text):
        xent_ops.cross_entropy(**given)
    with pytest.raises(TypeError, match=text):
        xent_ops.cross_entropy_outputs(**given)
    if name != "weight":
        with pytest.raises(TypeError, match=text):
            xent_ops.CrossEntropyLoss()(given["input"], given["target"])
        del given["weight"]
        with pytest.raises(TypeError, match=text):
            xent_ops.token_log_probs(**given)


def test_arguments_of_the_usual_types_are_not_converted(monkeypatch):
    """Conversion would be most of an eager call's time."""

    def fail(*args):
        raise AssertionError(args)

    monkeypatch.setattr(arguments, "number", fail)
    x, target = inputs()
    xent_ops.cross_entropy(x, target, softcap=2.0, logit_scale=0.5, label_smoothing=0.1, lse_square_scale=0.1)
