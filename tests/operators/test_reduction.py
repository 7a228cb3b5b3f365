"""The operators that reduce rows, against float64: on every kernel that this machine has."""

import itertools

import pytest
import torch
from helpers.covering import covering
from helpers.interpreter import INTERPRETED

import xent_ops

pytestmark = pytest.mark.interpreter
ops = torch.ops.xent
V = 8
SQUARE = 0.25

SHAPES = [(0,), (), (12,), (3, 4)]
CASES = covering(SHAPES, ["mean", "sum"], [False, True], [False, True], [torch.float32, torch.float64])
# 9001: several programs add up the rows.
CASES += list(
    itertools.product([(9001,)], ["mean"] if INTERPRETED else ["mean", "sum"], [True], [True], [torch.float32])
)


class Rows:
    def __init__(self, shape, weighted, by_token, dtype, device):
        def random(*sizes):
            return torch.rand(sizes, dtype=dtype, device=device)

        self.target = torch.randint(0, V, shape, device=device)
        self.target.view(-1)[1::3] = -100
        self.loss, self.lse = random(*shape), random(*shape) + 1
        self.argmax = torch.where(random(*shape) < 0.5, self.target, 0)
        self.weight = random(V) + 0.5 if weighted else None
        self.token_weight = (random(*shape) - 0.3).to(torch.float16) if by_token else None

        self.counted = self.target != -100
        self.loss[~self.counted] = float("nan")
        self.tokens = self.counted.double()
        if by_token:
            self.token_weight.view(-1)[:1] = 0  # and the row is left out, whatever it holds
            self.loss.view(-1)[:1] = self.lse.view(-1)[:1] = float("nan")
            self.tokens = self.tokens * self.token_weight.double()
        classes = self.tokens if not weighted else self.tokens * self.weight.double()[self.target.clamp(min=0)]
        self.divisors = torch.stack([classes.sum(), self.tokens.sum()])

    def sums(self):
        """Of the losses and the z-losses."""
        losses, squares = (torch.where(self.counted, one, 0.0).double() for one in (self.loss, self.lse.square()))
        products = [torch.where(self.tokens == 0, 0.0, values * self.tokens) for values in (losses, SQUARE * squares)]
        return torch.stack([one.sum() for one in products])


def assert_near(found, wanted, dtype):
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    assert found.dtype == dtype and found.shape == wanted.shape
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("shape, reduction, weighted, by_token, dtype", CASES, ids=str)
def test_divisors_and_factors(device, shape, reduction, weighted, by_token, dtype):
    rows = Rows(shape, weighted, by_token, dtype, device)
    divisor = torch.tensor(7, device=device) if reduction == "sum" else None
    wanted = rows.divisors if reduction == "mean" else rows.divisors.new_full((2,), 7)
    for square in (0.0, SQUARE):
        divisors, scale, square_scale = ops.row_divisors(
            rows.target,
            rows.weight,
            rows.token_weight,
            divisor,
            lse_square_scale=square,
            reduction=reduction,
            dtype=dtype,
        )
        assert_near(divisors, wanted, dtype)
        factors = rows.tokens if by_token else rows.divisors.new_ones(())
        by_row = [torch.where(rows.counted, factors / one, 0.0) if by_token else factors / one for one in wanted]
        assert_near(scale, by_row[0], dtype)
        assert_near(square_scale, square * by_row[1] if square else wanted.new_empty(0), dtype)


@pytest.mark.parametrize("shape, reduction, weighted, by_token, dtype", CASES, ids=str)
@pytest.mark.parametrize("given", [None, (3, 5), 4], ids=str)
def test_summary(device, shape, reduction, weighted, by_token, dtype, given):
    rows = Rows(shape, weighted, by_token, dtype, device)
    """``given``: two divisors, or one number for both, expanded."""
    divisors = torch.tensor(given, device=device).expand(2) if given else None
    by = divisors.double() if given else rows.divisors
    sums = rows.sums() / by if reduction == "mean" else rows.sums()
    args = (rows.loss, rows.lse, rows.target, rows.weight, rows.token_weight, divisors)
    for square, argmax in itertools.product((0.0, SQUARE), (None, rows.argmax)):
        options = {"lse_square_scale": square, "reduction": reduction}
        value, made, z_loss, accuracy = ops.row_summary(*args, argmax, **options)
        z_part = sums[1] if square else sums.new_zeros(())
        assert_near(value, sums[0] + z_part, dtype)
        assert_near(made, rows.divisors.new_empty(0) if given else rows.divisors, dtype)
        hits = ((rows.argmax == rows.target) & rows.counted).sum() / rows.counted.sum().double()
        assert_near(z_loss, z_part if argmax is not None else sums.new_empty(0), dtype)
        assert_near(accuracy, hits if argmax is not None else sums.new_empty(0), dtype)


def test_views_and_other_dtypes(device):
    """Rows of any strides and of 16 bits; integer token weights; targets of 32 and 8 bits."""
    rows = Rows((9, 2), True, False, torch.float32, device)
    for column in (0, 1):
        part = [one[:, column] for one in (rows.loss.bfloat16(), rows.lse.bfloat16(), rows.target.int())]
        whole = [one.clone() for one in (part[0].float(), part[1].float(), part[2].long())]
        weights = torch.arange(18, device=device).view(9, 2)[:, column]
        found = ops.row_summary(*part, rows.weight.bfloat16(), weights, lse_square_scale=SQUARE)
        wanted = ops.row_summary(*whole, rows.weight.bfloat16().float(), weights.float(), lse_square_scale=SQUARE)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(
            ops.row_divisors(part[2], rows.weight.bfloat16(), weights),
            ops.row_divisors(whole[2], rows.weight.bfloat16().float(), weights.float()),
        )
    bytes_ = torch.tensor([0, 255, 3], dtype=torch.uint8, device=device)
    assert ops.row_divisors(bytes_, ignore_index=255)[0].tolist() == [2, 2]
    assert ops.row_divisors(bytes_)[0].tolist() == [3, 3], "ignore_index=-100 is no class of uint8"


def test_no_derivative(device):
    rows = Rows((4,), False, False, torch.float32, device)
    value, *_ = ops.row_summary(rows.loss.requires_grad_(), rows.lse, rows.target)
    with pytest.raises(RuntimeError, match="row_summary has no derivative"):
        value.backward()


def test_a_weight_of_zero_leaves_out_what_is_not_finite(device):
    logits = torch.randn(3, V, device=device)
    logits[1] = float("nan")
    target, token_weight = torch.tensor([1, 2, 3], device=device), torch.tensor([1.0, 0.0, 2.0], device=device)
    options = {"lse_square_scale": SQUARE, "token_weight": token_weight}
    wanted = xent_ops.cross_entropy(logits[::2], target[::2], lse_square_scale=SQUARE, token_weight=token_weight[::2])
    torch.testing.assert_close(xent_ops.cross_entropy(logits, target, **options), wanted)
    outputs = xent_ops.cross_entropy_outputs(logits, target, **options)
    torch.testing.assert_close(outputs.loss, wanted)
