"""Losses and gradients of the row operators against the float64 oracle, on every kernel that this machine has."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from against_oracle import CASES, DTYPES, OPTIONS, row_case
from helpers.covering import covering
from helpers.interpreter import INTERPRETED

import xent_ops
from xent_ops.testing import assert_grad, oracle, realistic_logits

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize(
    "vocabulary, dtype, case, upstream", covering([1, 2, 127, 128, 1000, 4097, 9001], DTYPES, CASES, [True, False])
)
def test_vocabularies(device, dtype, vocabulary, case, upstream):
    logits = realistic_logits(5, vocabulary, dtype=dtype)
    target = torch.randint(0, vocabulary, (5,), generator=torch.Generator().manual_seed(1))
    target[2] = -100
    case(device, logits, target, upstream=upstream)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_odd_vocabulary_of_gpt2(device, dtype):
    row_case(device, realistic_logits(3, 50257, dtype=dtype), torch.tensor([50256, 0, 777]))


@pytest.mark.parametrize(
    "dtype, name, case, weighted",
    covering([torch.float32, torch.bfloat16, torch.float64], OPTIONS, CASES, [False, True]),
)
def test_options(device, dtype, name, case, weighted):
    """Every option alone, all together, each with and without class weights, and a ragged last tile."""
    logits = realistic_logits(6, 1003, dtype=dtype)
    target = torch.tensor([0, 1002, 5, -1, 500, 7])
    weight = torch.rand(1003, generator=torch.Generator().manual_seed(2)) if weighted else None
    case(device, logits, target, weight, ignore_index=-1, **OPTIONS[name])


def test_every_combination_of_options(device):
    logits = realistic_logits(4, 300, dtype=torch.float32)
    target = torch.tensor([3, 299, 11, 0])
    weight = torch.rand(300, generator=torch.Generator().manual_seed(2))
    for w, e, cap, scale in itertools.product([None, weight], [0.0, 0.25, 1.0], [None, 8.0], [1.0, -2.0]):
        row_case(device, logits, target, w, label_smoothing=e, softcap=cap, logit_scale=scale, ignore_index=11)


@pytest.mark.parametrize(
    "dtype, std, case, options", covering(DTYPES, [1.0, 10.0, 30.0], CASES, [{}, {"softcap": 32.0}])
)
def test_realistic_scales(device, dtype, std, case, options):
    """Outliers of 1e4 and columns of padding at -inf; smoothing would make an infinite loss there, as in torch."""
    logits = realistic_logits(8, 2000, dtype=dtype, std=std, outliers=True, padding=37)
    target = torch.randint(0, 1963, (8,), generator=torch.Generator().manual_seed(1))
    case(device, logits, target, **options)


@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1}, {"softcap": 30.0}, {"label_smoothing": 0.1, "softcap": 30.0}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_never_worse_than_eager_upcast(device, dtype, options):
    """Mean absolute errors of loss and gradient beside those of eager F.cross_entropy on float32 logits."""
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter truncates to bfloat16 where the hardware rounds: twice the error")
    logits = realistic_logits(16, 3001, dtype=dtype, std=5.0)
    target = torch.randint(0, 3001, (16,), generator=torch.Generator().manual_seed(1))
    expected = oracle(logits, target, **options)

    def errors(function):
        x = logits.to(device).requires_grad_()
        loss = function(x)
        (grad,) = torch.autograd.grad(loss.sum(), x)
        return (
            (loss.detach().double().cpu() - expected.loss).abs().mean(),
            ((grad.double().cpu() - expected.grad).abs() / expected.grad_scale).mean(),
        )

    def eager(x):
        x = x.float()
        if "softcap" in options:
            x = options["softcap"] * torch.tanh(x / options["softcap"])
        return F.cross_entropy(
            x, target.to(device), reduction="none", label_smoothing=options.get("label_smoothing", 0.0)
        )

    ours = errors(lambda x: torch.ops.xent.cross_entropy_forward(x, target.to(device), **options)[0])
    theirs = errors(eager)
    eps = torch.finfo(torch.float32).eps
    assert ours[0] <= theirs[0] + eps * expected.loss.abs().mean()
    # the lse is stored in float32: its rounding is the one thing that eager does not have
    assert ours[1] <= theirs[1] + eps * (1 + expected.lse.abs().mean())


def test_large_common_offset_keeps_the_loss(device):
    """lse and target logit near 1e4: their difference as float32 numbers would be off by 1e-3."""
    logits = (realistic_logits(4, 500, dtype=torch.float32) + 9000.0).to(device)
    target = torch.arange(4, device=device)
    loss = torch.ops.xent.cross_entropy_forward(logits, target)[0]
    smooth = torch.ops.xent.cross_entropy_forward(logits, target, label_smoothing=0.5)[0]
    torch.testing.assert_close(loss.cpu().double(), oracle(logits, target).loss, rtol=2e-6, atol=0)
    torch.testing.assert_close(
        smooth.cpu().double(), oracle(logits, target, label_smoothing=0.5).loss, rtol=2e-6, atol=0
    )


@pytest.mark.parametrize("classes", [1024, 1537, 2048, 3000, 4099, 9000, 9001])
def test_all_options_over_several_tiles(device, classes):
    """Several tiles a program, and weights whose tiles start in any column: rows start on and off every boundary."""
    logits = realistic_logits(6, classes, dtype=torch.bfloat16)
    target = torch.tensor([0, classes - 1, classes // 2, -100, 3, 1023])
    weight = torch.rand(classes, generator=torch.Generator().manual_seed(2))
    for softcap in (None, 30.0):
        row_case(device, logits, target, weight, label_smoothing=0.25, softcap=softcap)


@pytest.mark.parametrize("upstream", ["expanded", "strided", "transposed", "broadcast"])
def test_upstream_gradients_of_any_stride(device, upstream):
    logits = realistic_logits(4, 6, 200, dtype=torch.float32)
    target = torch.randint(0, 200, (4, 6), generator=torch.Generator().manual_seed(1))
    x = logits.to(device).requires_grad_()
    loss, lse, *_ = torch.ops.xent.cross_entropy_forward(x, target.to(device))
    values = torch.randn(6, 8, generator=torch.Generator().manual_seed(3)).to(device)
    grad = {
        "expanded": values[0, 0].expand(4, 6),
        "strided": values.T[:4].contiguous()[:, ::1].repeat(1, 2)[:, ::2],
        "transposed": values[:, :4].T,
        "broadcast": values[0, :6].expand(4, 6),
    }[upstream]
    (result,) = torch.autograd.grad((loss, lse), x, (grad, grad * 2))
    assert_grad(result, oracle(logits, target, grad_loss=grad, grad_lse=grad * 2))


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("square", [0.0, 0.25])
def test_divisor(device, dtype, square):
    """The first number divides the gradient of the losses, the second that of the z-loss; in place as well."""
    logits = realistic_logits(5, 1000, dtype=torch.bfloat16).to(device)
    target = torch.tensor([1, 999, -100, 3, 4], device=device)
    lse = torch.ops.xent.cross_entropy_forward(logits, target)[1]
    grad_loss, grad_lse = torch.arange(1.0, 6.0, device=device), torch.full((5,), 0.125, device=device)
    divisor = torch.tensor([3, 4], dtype=dtype, device=device)
    rows = (logits, target, lse, None, divisor)
    z_grads = torch.where(target == -100, 0.0, 2 * square * lse.double() * grad_loss.double() / 4)
    wanted = oracle(logits, target, grad_loss=grad_loss.double() / 3, grad_lse=grad_lse.double() + z_grads)
    grad = torch.ops.xent.cross_entropy_backward(grad_loss, grad_lse, *rows, lse_square_scale=square)
    assert_grad(grad, wanted)
    torch.ops.xent.cross_entropy_backward_(grad_loss, grad_lse, *rows, lse_square_scale=square)
    assert_grad(logits, wanted)


REDUCED = covering([0, 1, 5], ["mean", "sum"], [False, True])
MANY = [(9001, "mean", True)] if INTERPRETED else list(itertools.product([9001], ["mean", "sum"], [False, True]))


@pytest.mark.parametrize("rows, reduction, weighted", REDUCED + MANY, ids=str)
def test_reduced(device, rows, reduction, weighted):
    """Value and divisors of the reduced operator are those of its rows, added up in float64."""
    logits = torch.randn(rows, 8, device=device) * 3
    target = torch.randint(0, 8, (rows,), device=device)
    target[1::3] = -100
    weight = torch.rand(8, device=device) if weighted else None
    options = {"label_smoothing": 0.1, "softcap": 5.0}
    value, divisor, lse, _ = torch.ops.xent.cross_entropy_reduced(
        logits, target, weight, lse_square_scale=0.25, reduction=reduction, **options
    )
    loss, row_lse, *_ = torch.ops.xent.cross_entropy_forward(logits, target, weight, **options)
    counted = target != -100
    weights = counted.double() if weight is None else weight.double()[target.clamp(min=0)] * counted
    sums = loss.double().sum(), 0.25 * row_lse.double()[counted].square().sum()
    wanted = sum(sums) if reduction == "sum" else sums[0] / weights.sum() + sums[1] / counted.sum()
    torch.testing.assert_close(value.double(), wanted, rtol=1e-5, atol=0, equal_nan=True)
    torch.testing.assert_close(
        divisor.double(), torch.stack([weights.sum(), counted.sum().double()]), rtol=1e-5, atol=0
    )
    torch.testing.assert_close(lse, torch.where(counted, row_lse, float("inf")), rtol=0, atol=0)


VIEWS = [
    lambda x: x[:, :-1],
    lambda x: x[:, 1:],
    lambda x: x[::2],
    lambda x: x[..., :77],
    lambda x: x[..., 3:],
    lambda x: x.transpose(0, 1),
    lambda x: x[:, 1:, :90].transpose(0, 1),
    lambda x: x[0],
    lambda x: x[1, 2],
    lambda x: x[:1].expand(3, -1, -1),
    lambda x: x.unsqueeze(1)[:, :, ::2],
    lambda x: x[:, :, :9].transpose(0, 2),
    lambda x: x[..., ::2],
    lambda x: x.reshape(2, 2, 5, 101)[:, :, 1:].transpose(0, 2),
]
EACH = [(number, case) for number in range(len(VIEWS)) for case in (CASES[number % 2 :][:1] if INTERPRETED else CASES)]


@pytest.mark.parametrize("number, case", EACH)
def test_views_of_logits_and_targets(device, number, case):
    logits = VIEWS[number](realistic_logits(4, 5, 101, dtype=torch.float32))
    target = torch.randint(0, logits.shape[-1], (*logits.shape[:-1], 2), generator=torch.Generator().manual_seed(1))
    case(device, logits, target[..., 1])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8], ids=str)
def test_target_dtypes(device, dtype):
    """uint8 compared with ignore_index=-100 wraps around to 156 in torch: class 156 must still count."""
    target = torch.tensor([0, 156, 255, 3]).to(dtype)
    row_case(device, realistic_logits(4, 256, dtype=torch.float32), target)


@pytest.mark.parametrize("ignore_index", [-100, 0, 7, 10**12])
def test_ignore_index_of_any_value(device, ignore_index):
    target = torch.tensor([0, 7, ignore_index, 3])
    row_case(device, realistic_logits(4, 50, dtype=torch.float32), target, ignore_index=ignore_index)


@pytest.mark.usefixtures("eager_and_dispatched")
def test_bitwise_the_same_in_every_run(device):
    rows = 4 if INTERPRETED else 64  # whose programs run one after the other
    x = realistic_logits(rows, 3000, dtype=torch.bfloat16).to(device).requires_grad_()
    target = torch.randint(0, 3000, (rows,), device=device)

    def run():
        loss = xent_ops.cross_entropy(x, target, lse_square_scale=1e-3, label_smoothing=0.125)
        return loss.detach(), torch.autograd.grad(loss, x)[0]

    first = run()
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(3):
            assert all(map(torch.equal, first, run()))
    finally:
        torch.use_deterministic_algorithms(False)
