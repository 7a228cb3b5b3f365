"""Losses and gradients of the row operators against the float64 oracle, on every kernel that this machine has."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from flat_options import FlatOptions
from helpers.interpreter import INTERPRETED

import xent_ops
from xent_ops.kernels import reference, reference_soft
from xent_ops.testing import assert_grad, assert_loss, assert_lse, oracle, realistic_logits

pytestmark = pytest.mark.interpreter

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# Exactly representable: the interpreter hands kernels a Python float as float32.
OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.125},
    "softcap": {"softcap": 20.0},
    "scale": {"logit_scale": 1.5},
    "all": {"label_smoothing": 0.25, "softcap": 30.0, "logit_scale": 0.75},
}


@pytest.fixture(params=["operators", "plain torch", "Ascend"])
def kernels(request, device):
    """The operators; the functions of their names in plain torch, which a CPU with C++ does not run; those for NPUs."""
    if request.param == "operators":
        return torch.ops.xent
    if request.param == "plain torch":
        return FlatOptions(reference)
    if not INTERPRETED:
        pytest.skip("needs TRITON_INTERPRET=1: the Ascend kernels run on the CPU in Triton's interpreter alone")
    from xent_ops.kernels.ascend import launch

    return FlatOptions(launch)


def _bits(tensor):
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def row_case(device, logits, target, weight=None, *, upstream=True, **options):
    """Run forward and backward of the row operator and hold both against the oracle."""
    logits = logits.to(device).requires_grad_()
    target = target.to(device)
    weight = None if weight is None else weight.to(device)
    before = logits.detach().clone()
    loss, lse = torch.ops.xent.cross_entropy_forward(logits, target, weight, **options)
    generator = torch.Generator().manual_seed(7)
    grad_loss = torch.randn(target.shape, generator=generator).to(loss) if upstream else torch.ones_like(loss)
    grad_lse = torch.randn(target.shape, generator=generator).to(loss) if upstream else None
    (grad,) = torch.autograd.grad(
        (loss, lse) if upstream else (loss,), logits, (grad_loss, grad_lse) if upstream else (grad_loss,)
    )
    expected = oracle(logits, target, weight, grad_loss=grad_loss, grad_lse=grad_lse if upstream else 0.0, **options)
    assert grad.dtype == logits.dtype and loss.dtype == lse.dtype
    assert loss.dtype == (torch.float64 if logits.dtype == torch.float64 else torch.float32)
    assert_loss(loss, expected)
    assert_lse(lse, expected)
    assert_grad(grad, expected)
    assert _bits(before) == _bits(logits), "the logits were written"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", [1, 2, 127, 128, 1000, 4097])
def test_vocabularies(device, dtype, vocabulary):
    logits = realistic_logits(5, vocabulary, dtype=dtype)
    target = torch.randint(0, vocabulary, (5,), generator=torch.Generator().manual_seed(1))
    target[2] = -100
    row_case(device, logits, target)
    row_case(device, logits, target, upstream=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_odd_vocabulary_of_gpt2(device, dtype):
    row_case(device, realistic_logits(3, 50257, dtype=dtype), torch.tensor([50256, 0, 777]))


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weight"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_options(device, dtype, name, weighted):
    """Every option alone, all together, each with and without class weights, and a ragged last tile."""
    logits = realistic_logits(6, 1003, dtype=dtype)
    target = torch.tensor([0, 1002, 5, -1, 500, 7])
    weight = torch.rand(1003, generator=torch.Generator().manual_seed(2)) if weighted else None
    row_case(device, logits, target, weight, ignore_index=-1, **OPTIONS[name])


def test_every_combination_of_options(device):
    logits = realistic_logits(4, 300, dtype=torch.float32)
    target = torch.tensor([3, 299, 11, 0])
    weight = torch.rand(300, generator=torch.Generator().manual_seed(2))
    for w, e, cap, scale in itertools.product([None, weight], [0.0, 0.25, 1.0], [None, 8.0], [1.0, -2.0]):
        row_case(device, logits, target, w, label_smoothing=e, softcap=cap, logit_scale=scale, ignore_index=11)


@pytest.mark.parametrize("std", [1.0, 10.0, 30.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_realistic_scales(device, dtype, std):
    """Outliers of 1e4 and columns of padding at -inf; smoothing would make an infinite loss there, as in torch."""
    logits = realistic_logits(8, 2000, dtype=dtype, std=std, outliers=True, padding=37)
    target = torch.randint(0, 1963, (8,), generator=torch.Generator().manual_seed(1))
    row_case(device, logits, target)
    row_case(device, logits, target, softcap=32.0)


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


def test_softcap_is_accurate_near_zero_and_far_away(device):
    """tanh by exponentials alone loses digits to cancellation near 0."""
    logits = torch.cat([torch.logspace(-6, 3, 200), -torch.logspace(-6, 3, 200)]).expand(3, -1)
    row_case(device, logits.contiguous(), torch.tensor([0, 100, 399]), softcap=1.5)
    row_case(device, logits.contiguous(), torch.tensor([0, 100, 399]), softcap=50.0)


def test_large_common_offset_keeps_the_loss(device):
    """lse and target logit near 1e4: their difference as float32 numbers would be off by 1e-3."""
    logits = (realistic_logits(4, 500, dtype=torch.float32) + 9000.0).to(device)
    target = torch.arange(4, device=device)
    loss, _ = torch.ops.xent.cross_entropy_forward(logits, target)
    smooth, _ = torch.ops.xent.cross_entropy_forward(logits, target, label_smoothing=0.5)
    torch.testing.assert_close(loss.cpu().double(), oracle(logits, target).loss, rtol=2e-6, atol=0)
    torch.testing.assert_close(
        smooth.cpu().double(), oracle(logits, target, label_smoothing=0.5).loss, rtol=2e-6, atol=0
    )


@pytest.mark.usefixtures("eager_and_dispatched")
def test_infinite_logits_follow_torch(device):
    inf = float("inf")
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(0))
    logits[0, :290] = -inf  # most of the row, the leading tile of small tiles among it
    logits[1] = -inf
    logits[2, 5] = inf
    logits[3, 7] = float("nan")
    logits[4, 9] = -inf  # the target itself
    target = torch.tensor([295, 3, 4, 5, 9, 1])
    for options in ({}, {"label_smoothing": 0.125}):
        x, y = logits.to(device).requires_grad_(), logits.to(device).requires_grad_()
        ours = xent_ops.cross_entropy(x, target.to(device), reduction="none", **options)
        theirs = F.cross_entropy(y, target.to(device), reduction="none", **options)
        torch.testing.assert_close(ours, theirs, equal_nan=True)
        ours.sum().backward()
        theirs.sum().backward()
        torch.testing.assert_close(x.grad, y.grad, equal_nan=True)


def test_leading_tiles_of_minus_infinity(device):
    logits = realistic_logits(2, 20000, dtype=torch.bfloat16)
    logits[:, :12000] = float("-inf")
    row_case(device, logits, torch.tensor([12000, 19999]))


def test_softcap_of_minus_infinity_is_minus_cap(device):
    logits = torch.randn(2, 100, generator=torch.Generator().manual_seed(0))
    logits[:, 50:] = float("-inf")
    row_case(device, logits, torch.tensor([3, 70]), softcap=10.0)


@pytest.mark.parametrize("softcap", [0.5, 30.0, 64.0, 65.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_softcap_of_16_bit_logits(device, dtype, softcap):
    """Kernels sum e^x relative to nothing there, and neighbours share a reciprocal: saturated ones, infinite ones too."""
    inf = float("inf")
    logits = realistic_logits(8, 300, dtype=torch.float32, std=3 * softcap)
    logits[0] = 6e4  # all at the cap
    logits[1] = -6e4
    logits[2, ::2], logits[2, 1::2] = 6e4, -6e4
    logits[3, ::4], logits[3, 1::4], logits[3, 2::4] = inf, -inf, 0.0
    logits[4] = torch.logspace(-7, 4, 300)
    logits[5] = -logits[4]
    target = torch.tensor([0, 299, 1, 4, 17, 18, 19, 20])
    weight = torch.rand(300, generator=torch.Generator().manual_seed(2))
    for options in ({}, {"label_smoothing": 0.25, "weight": weight}):
        row_case(device, logits.to(dtype), target, softcap=softcap, **options)


@pytest.mark.parametrize("classes", [1, 2, 8])
def test_softcap_keeps_losses_of_certain_rows_positive(device, classes):
    logits = torch.full((64, classes), -3e4)
    logits[:, 0] = torch.linspace(-100, 100, 64)
    x, target = logits.bfloat16().to(device), torch.zeros(64).long().to(device)
    loss, _ = torch.ops.xent.cross_entropy_forward(x, target, softcap=60.0)
    assert bool((loss >= 0).all()), loss
    entropy = torch.ops.xent.cross_entropy_forward_entropy(x, target, softcap=60.0)[2]
    assert bool((entropy >= 0).all()), entropy
    halves = ((0, classes // 2), (classes // 2, classes))
    parts = [
        torch.ops.xent.cross_entropy_shard(x[:, start:end], target, start, classes, softcap=60.0)
        for start, end in halves
    ]
    whole = torch.ops.xent.cross_entropy_shard_join(
        x[:, : classes // 2], target, torch.cat(parts), 0, classes, softcap=60.0
    )
    assert bool((whole[0] >= 0).all()), whole[0]
    torch.testing.assert_close(
        loss.cpu().double(),
        oracle(logits.bfloat16(), torch.zeros(64).long(), softcap=60.0).loss,
        atol=60 * 8e-7,  # numerics.tanh_rest; it is largest at -60
        rtol=1e-5,
    )


def test_softcap_keeps_nan_in_its_row(device):
    logits = realistic_logits(3, 300, dtype=torch.bfloat16)
    logits[1, 7] = float("nan")
    x = logits.to(device).requires_grad_()
    loss = xent_ops.cross_entropy(x, torch.tensor([0, 1, 2], device=device), reduction="none", softcap=30.0)
    loss.sum().backward()
    assert loss.isnan().tolist() == [False, True, False]
    assert x.grad.isnan().any(-1).tolist() == [False, True, False]
    assert bool(x.grad[1].isnan().all())


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
    loss, lse = torch.ops.xent.cross_entropy_forward(x, target.to(device))
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


@pytest.mark.interpreter
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weight"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("rows", [0, 1, 5, 9001])
def test_reduced(device, rows, reduction, weighted):
    """Value and divisor of the reduced operator are those of its rows, added up in float64; likewise the divisor alone."""
    logits = torch.randn(rows, 7, device=device) * 3
    target = torch.randint(0, 7, (rows,), device=device)
    target[1::3] = -100
    weight = torch.rand(7, device=device) if weighted else None
    options = {"label_smoothing": 0.1, "softcap": 5.0}
    value, divisor, lse = torch.ops.xent.cross_entropy_reduced(
        logits, target, weight, lse_square_scale=0.25, reduction=reduction, **options
    )
    loss, row_lse = torch.ops.xent.cross_entropy_forward(logits, target, weight, **options)
    counted = target != -100
    weights = counted.double() if weight is None else weight.double()[target.clamp(min=0)] * counted
    sums = loss.double().sum(), 0.25 * row_lse.double()[counted].square().sum()
    wanted = sum(sums) if reduction == "sum" else sums[0] / weights.sum() + sums[1] / counted.sum()
    torch.testing.assert_close(value.double(), wanted, rtol=1e-5, atol=0, equal_nan=True)
    torch.testing.assert_close(
        divisor.double(), torch.stack([weights.sum(), counted.sum().double()]), rtol=1e-5, atol=0
    )
    torch.testing.assert_close(lse, row_lse, rtol=0, atol=0)
    alone, inverse = torch.ops.xent.cross_entropy_divisor(logits, target, weight)
    torch.testing.assert_close(alone, divisor)
    torch.testing.assert_close(inverse, alone.reciprocal())


@pytest.mark.parametrize(
    "view",
    [
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
        lambda x: x.transpose(0, 2),
        lambda x: x[..., ::2],
        lambda x: x.reshape(2, 2, 5, 101)[:, :, 1:].transpose(0, 2),
    ],
    ids=range(14),
)
def test_views_of_logits_and_targets(device, view):
    logits = view(realistic_logits(4, 5, 101, dtype=torch.float32))
    target = torch.randint(0, logits.shape[-1], (*logits.shape[:-1], 2), generator=torch.Generator().manual_seed(1))
    row_case(device, logits, target[..., 1])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8], ids=str)
def test_target_dtypes(device, dtype):
    """uint8 compared with ignore_index=-100 wraps around to 156 in torch: class 156 must still count."""
    target = torch.tensor([0, 156, 255, 3]).to(dtype)
    row_case(device, realistic_logits(4, 256, dtype=torch.float32), target)


@pytest.mark.parametrize("ignore_index", [-100, 0, 7, 10**12])
def test_ignore_index_of_any_value(device, ignore_index):
    target = torch.tensor([0, 7, ignore_index, 3])
    row_case(device, realistic_logits(4, 50, dtype=torch.float32), target, ignore_index=ignore_index)


@pytest.mark.parametrize("bad", [50, -1, 10**10, -(10**10)])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "softcap": 5.0}], ids=["plain", "options"])
def test_target_out_of_range(device, raises_out_of_range, bad, options):
    logits = realistic_logits(3, 50, dtype=torch.float32).to(device).requires_grad_()
    target = torch.tensor([4, bad, 5], device=device)
    weight = torch.rand(50, device=device)
    calls = {
        "forward": lambda w: torch.ops.xent.cross_entropy_forward(logits, target, w, **options)[0],
        "argmax": lambda w: torch.ops.xent.cross_entropy_forward_argmax(logits, target, w, **options)[0],
        "entropy": lambda w: torch.ops.xent.cross_entropy_forward_entropy(logits, target, w, **options)[0],
    }
    for call, w in itertools.product(calls.values(), (None, weight)):
        if raises_out_of_range:
            with pytest.raises(IndexError, match=rf"target {bad} is out of bounds: valid are 0 to 49"):
                call(w)
            continue
        loss = call(w)
        (grad,) = torch.autograd.grad(loss.sum(), logits)
        assert loss.isnan().tolist() == [False, True, False]
        assert grad.isnan().all(-1).tolist() == grad.isnan().any(-1).tolist() == [False, True, False]
    if not raises_out_of_range:
        for w in (None, weight):
            assert xent_ops.cross_entropy(logits, target, w, **options).isnan()
    with pytest.raises(IndexError, match=rf"target {bad} is out of bounds"):
        xent_ops.check_targets(target, 50)
    xent_ops.check_targets(target, 50, ignore_index=bad)


@pytest.mark.usefixtures("eager_and_dispatched")
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weight"])
def test_all_rows_ignored_and_no_rows(device, reduction, weighted):
    """Mean is NaN as in torch, sum 0; the gradient of ignored rows is exactly zero whatever they hold."""
    weight = torch.rand(40, device=device) if weighted else None
    for rows in (0, 3):
        x = torch.randn(rows, 40, device=device, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        target = torch.full((rows,), -100, device=device)
        ours = xent_ops.cross_entropy(x, target, weight, reduction=reduction)
        theirs = F.cross_entropy(y, target, weight, reduction=reduction)
        torch.testing.assert_close(ours, theirs, equal_nan=True)
        (ours.nan_to_num() if reduction == "mean" else ours).sum().backward()
        assert x.grad.shape == (rows, 40)
        if reduction != "mean":
            assert x.grad.count_nonzero() == 0


@pytest.mark.usefixtures("eager_and_dispatched")
def test_rows_of_padding_may_hold_anything(device):
    x = torch.randn(4, 100, device=device)
    x[1], x[2] = float("nan"), float("inf")
    x.requires_grad_()
    target = torch.tensor([3, -100, -100, 4], device=device)
    loss = xent_ops.cross_entropy(x, target, lse_square_scale=0.01, label_smoothing=0.125)
    loss.backward()
    assert loss.isfinite() and x.grad.isfinite().all() and x.grad[1:3].count_nonzero() == 0


def test_entropy_of_padding_may_be_nan(device, kernels):
    x = torch.randn(4, 100, device=device)
    x[1], x[2] = float("nan"), float("inf")
    target = torch.tensor([3, -100, 5, 4], device=device)
    grad_loss, grad_entropy = torch.tensor([[1.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 1.0]], device=device)
    _, lse, entropy = kernels.cross_entropy_forward_entropy(x, target)
    grad = kernels.cross_entropy_backward_entropy(grad_loss, None, grad_entropy, x, target, lse, entropy)
    assert grad.isfinite().all() and grad[1:3].count_nonzero() == 0 and grad[[0, 3]].count_nonzero() == 200


@pytest.mark.parametrize("ignore_index", [-100, 0])
def test_weight_of_an_ignored_class_may_be_infinite(device, kernels, ignore_index):
    """One over its number of targets: class 0 has none."""
    x = realistic_logits(4, 100, dtype=torch.float32).to(device).requires_grad_()
    target = torch.tensor([3, ignore_index, 99, 4], device=device)
    weight = torch.rand(100, generator=torch.Generator().manual_seed(2)).to(device)
    weight[0] = float("inf")
    theirs = F.cross_entropy(x, target, weight, ignore_index=ignore_index, reduction="none")
    (wanted,) = torch.autograd.grad(theirs.sum(), x)
    options = {"ignore_index": ignore_index}
    loss, lse = kernels.cross_entropy_forward(x.detach(), target, weight, **options)
    grad = kernels.cross_entropy_backward(torch.ones_like(loss), None, x.detach(), target, lse, weight, **options)
    torch.testing.assert_close(loss, theirs.detach())
    torch.testing.assert_close(grad, wanted)
    assert grad.isfinite().all() and grad[1].count_nonzero() == 0


def test_upstream_gradients_that_cancel_do_not_hide_an_infinite_logit(device, kernels):
    x, target = torch.randn(1, 40, device=device), torch.tensor([1], device=device)
    x[0, 7] = float("inf")
    _, lse = kernels.cross_entropy_forward(x, target)
    one = torch.ones(1, device=device)
    assert kernels.cross_entropy_backward(one, -one, x, target, lse).isnan().any()


@pytest.mark.usefixtures("eager_and_dispatched")
def test_second_backward_gives_the_same_gradient(device):
    x = torch.randn(4, 100, device=device, requires_grad=True)
    loss = xent_ops.cross_entropy(x, torch.arange(4, device=device), label_smoothing=0.125)
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, x)[0])


@pytest.mark.usefixtures("eager_and_dispatched")
def test_bitwise_the_same_in_every_run(device):
    x = realistic_logits(64, 3000, dtype=torch.bfloat16).to(device).requires_grad_()
    target = torch.randint(0, 3000, (64,), device=device)

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


def test_argmax_takes_the_first_index_on_ties(device):
    logits = torch.zeros(5, 5000)
    logits[1, [4321, 17]] = 2.0
    logits[2, 4999] = 1.0
    logits[3] = float("-inf")
    logits[4, 1000:] = -1.0
    target = torch.arange(5)
    for dtype in (torch.float32, torch.bfloat16):
        x = logits.to(device, dtype)
        argmax = torch.ops.xent.cross_entropy_forward_argmax(x, target.to(device), softcap=0.5)[2]
        assert argmax.dtype == torch.int64
        assert argmax.tolist() == [0, 17, 4999, 0, 0]
    x = realistic_logits(20, 3333, dtype=torch.bfloat16).to(device)
    argmax = torch.ops.xent.cross_entropy_forward_argmax(x, torch.zeros(20, dtype=torch.int64, device=device))[2]
    assert torch.equal(argmax, x.float().argmax(-1))


@pytest.mark.parametrize("classes", [1, 64, 100, 1024, 5001])
def test_argmax_of_rows_without_a_number_is_the_first_column(device, kernels, classes):
    for value in (float("nan"), float("-inf")):
        x = torch.full((5, classes), value, device=device)
        target = torch.zeros(5, dtype=torch.int64, device=device)
        assert kernels.cross_entropy_forward_argmax(x, target)[2].tolist() == [0] * 5


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_entropy(device, dtype, softcap):
    """Against torch.distributions in float64, with masked classes and gradients of all three outputs."""
    logits = realistic_logits(6, 1003, dtype=dtype)
    logits[3, 100:] = float("-inf")
    target = torch.tensor([0, 1002, 5, 6, -100, 7])
    x = logits.to(device).requires_grad_()
    log_probs, entropy, lse = xent_ops.token_log_probs(x, target.to(device), logit_scale=0.5, softcap=softcap)
    z = logits.double().requires_grad_()
    scores = z * 0.5 if softcap is None else softcap * torch.tanh(z * 0.5 / softcap)
    p = torch.distributions.Categorical(logits=scores)
    log_p = torch.log_softmax(scores, -1)
    wanted_entropy = -torch.where(p.probs == 0, 0.0, p.probs * log_p.clamp(min=-1e9)).sum(-1)
    wanted_entropy = torch.where(target >= 0, wanted_entropy, 0)
    wanted_log = torch.where(target >= 0, log_p.gather(-1, target.clamp(min=0)[:, None])[:, 0], 0)
    eps = torch.finfo(entropy.dtype).eps
    torch.testing.assert_close(entropy.cpu().double(), wanted_entropy, rtol=32 * eps, atol=32 * eps)
    torch.testing.assert_close(log_probs.cpu().double(), wanted_log, rtol=32 * eps, atol=32 * eps)
    g = torch.randn(3, 6, generator=torch.Generator().manual_seed(0)).double()
    (ours,) = torch.autograd.grad((log_probs, entropy, lse), x, [v.to(entropy) for v in g])
    (theirs,) = torch.autograd.grad((wanted_log, wanted_entropy, torch.logsumexp(scores, -1)), z, list(g))
    tolerance = max(torch.finfo(dtype).eps, 64 * eps)
    torch.testing.assert_close(
        ours.cpu().double(), theirs, rtol=2 * tolerance, atol=tolerance * theirs.abs().max().item() / 8
    )


def test_large_common_offset_keeps_the_entropy(device, kernels):
    """Not made from the lse, which is off by 1e-3 there."""
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)) + 3e4
    entropy = kernels.cross_entropy_forward_entropy(logits.to(device), torch.arange(4, device=device))[2]
    wanted = torch.distributions.Categorical(logits=logits.double()).entropy()
    torch.testing.assert_close(entropy.cpu().double(), wanted, rtol=1e-5, atol=0)


def test_second_derivatives_of_the_entropy_pass_masked_classes(device):
    """A logit of -inf changes those of the others as little as a column that is left out."""
    logits = torch.randn(2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(device)
    target, factor = torch.tensor([0, 1], device=device), torch.arange(5.0, dtype=torch.float64, device=device)

    def derivatives(x, columns):
        x.requires_grad_()
        entropy = torch.ops.xent.cross_entropy_forward_entropy(x, target)[2]
        (grad,) = torch.autograd.grad(entropy.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad((grad[:, columns] * factor).sum(), x)
        return grad.detach()[:, columns], second[:, columns]

    kept = torch.tensor([0, 1, 2, 4, 5], device=device)
    masked = logits.clone()
    masked[:, 3] = float("-inf")
    wanted = derivatives(logits[:, kept], slice(None))
    torch.testing.assert_close(derivatives(masked, kept), wanted)
    masked = masked.detach().requires_grad_()
    (grad,) = torch.autograd.grad(reference.cross_entropy_forward_entropy(masked, target)[2].sum(), masked)
    torch.testing.assert_close(grad[:, kept], wanted[0])


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weight"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_class_probabilities(device, dtype, weighted, name):
    options = OPTIONS[name]
    logits = realistic_logits(5, 1003, dtype=dtype)
    target = torch.softmax(realistic_logits(5, 1003, dtype=torch.float64, seed=5), -1).to(dtype)
    weight = (
        torch.rand(1003, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)
        if weighted
        else None
    )
    x, q = logits.to(device).requires_grad_(), target.to(device).requires_grad_()
    w = None if weight is None else weight.to(device).requires_grad_()
    ours = xent_ops.cross_entropy(x, q, w, reduction="none", **options)
    x64, q64 = logits.double().requires_grad_(), target.double().requires_grad_()
    w64 = None if weight is None else weight.double().requires_grad_()
    z = x64 * options.get("logit_scale", 1.0)
    if "softcap" in options:
        z = options["softcap"] * torch.tanh(z / options["softcap"])
    theirs = F.cross_entropy(z, q64, w64, reduction="none", label_smoothing=options.get("label_smoothing", 0.0))
    eps = torch.finfo(ours.dtype).eps
    torch.testing.assert_close(ours.cpu().double(), theirs, rtol=32 * eps, atol=32 * eps)
    g = torch.randn(5, generator=torch.Generator().manual_seed(3)).double()
    wrt, wrt64 = [v for v in (x, q, w) if v is not None], [v for v in (x64, q64, w64) if v is not None]
    for mine, other in zip(
        torch.autograd.grad(ours, wrt, g.to(ours)), torch.autograd.grad(theirs, wrt64, g), strict=True
    ):
        tolerance = max(torch.finfo(dtype).eps, 64 * eps)
        torch.testing.assert_close(
            mine.cpu().double(), other, rtol=2 * tolerance, atol=64 * eps * other.abs().max().item()
        )


@pytest.mark.parametrize("plain", [False, True], ids=["operator", "plain torch"])
def test_class_probabilities_of_padding_may_hold_anything(device, plain):
    """They count for nothing where the loss passes nothing back, even where the lse does."""
    soft = reference_soft if plain else torch.ops.xent
    x = torch.randn(3, 100, device=device)
    q = torch.randn(3, 100, device=device).softmax(-1)
    lse = soft.soft_cross_entropy_forward(x, q)[1]
    q[1:] = float("nan")
    grad_loss, grad_lse = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 2.0]], device=device)
    without = soft.soft_cross_entropy_backward(grad_loss, None, x, q, lse)
    assert without[0].isfinite().all() and without[1:].count_nonzero() == 0
    grad = soft.soft_cross_entropy_backward(grad_loss, grad_lse, x, q, lse)
    torch.testing.assert_close(grad, torch.stack([without[0], without[1], 2 * x[2].softmax(-1)]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_class_probabilities_with_an_lse_of_another_dtype(device, dtype):
    """It is rounded, not what is computed from it."""
    x = torch.randn(3, 100, device=device)
    q = torch.randn(3, 100, device=device).softmax(-1)
    lse = torch.logsumexp(x, -1).to(dtype)
    one = torch.ones(3, device=device)
    grad = torch.ops.xent.soft_cross_entropy_backward(one, None, x, q, lse)
    torch.testing.assert_close(grad, reference_soft.soft_cross_entropy_backward(one, None, x, q, lse.float()))
