"""The budgets of xent_ops.testing: what they let pass, and what not."""

import pytest
import torch

from xent_ops.testing import assert_grad, assert_loss, linear_oracle, oracle

INF, NAN = float("inf"), float("nan")


def test_an_infinite_loss_is_no_other_number():
    """Where the oracle's loss is infinite so is its budget."""
    logits = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    logits[0, 3] = -INF
    expected = oracle(logits, torch.tensor([3, 1]))
    loss = expected.loss.float()
    assert loss[0] == INF
    assert_loss(loss, expected)
    for wrong in (7.0, -INF, NAN):
        with pytest.raises(AssertionError, match="out of budget"):
            assert_loss(torch.tensor([wrong, loss[1]]), expected)


def test_a_finite_gradient_is_no_infinite_one():
    infinite = torch.full((1, 8), INF, dtype=torch.float64)
    expected = oracle(torch.zeros(1, 8), torch.tensor([3]))._replace(grad=infinite, grad_scale=infinite)
    assert_grad(infinite.float(), expected)
    with pytest.raises(AssertionError, match="out of budget"):
        assert_grad(torch.ones(1, 8), expected)


def test_an_ignored_row_is_exactly_zero():
    """Whatever the weight of its class."""
    weight = torch.ones(8)
    weight[2] = INF
    expected = oracle(torch.zeros(2, 8), torch.tensor([3, 2]), weight, ignore_index=2)
    loss = expected.loss.float()
    assert_loss(loss, expected)
    with pytest.raises(AssertionError, match="out of budget"):
        assert_loss(torch.tensor([loss[0], 1.0]), expected)


def test_an_ignored_row_passes_nothing_back():
    """Whatever its logits hold, and however large they are."""
    logits = torch.tensor([[1e4, -1e4, 0.0], [NAN, 1.0, INF], [1e4, 0.0, 3.0]])
    expected = oracle(logits, torch.tensor([0, -100, -100]), label_smoothing=0.1)
    zeros = torch.zeros(3, 3)
    assert_grad(torch.where(torch.tensor([[True], [False], [False]]), expected.grad, 0.0).float(), expected)
    for wrong in (NAN, 1e-3):
        with pytest.raises(AssertionError, match="out of budget"):
            assert_grad(
                torch.where(torch.tensor([[True], [False], [True]]), expected.grad, zeros + wrong).float(), expected
            )
        with pytest.raises(AssertionError, match="out of budget"):
            assert_loss(torch.where(torch.tensor([True, True, False]), expected.loss, wrong).float(), expected)


@pytest.mark.parametrize("divisor", [1.0, -4.0])
def test_a_sum_may_be_off_by_what_its_rows_may_be(divisor):
    """Of the z-loss too, whose mean alone is divided by the number of rows."""
    x, head, target = torch.randn(50, 3).half(), torch.randn(7, 3).half(), torch.arange(50) % 7
    options = {"weight": torch.zeros(7), "lse_square_scale": 0.125}
    rows = linear_oracle(x, head, target, reduction="none", **options).value_bound.sum()
    assert linear_oracle(x, head, target, reduction="sum", divisor=divisor, **options).value_bound >= rows / abs(
        divisor
    )
    assert linear_oracle(x, head, target, reduction="sum", **options).value_bound < 2 * rows
