"""Several classes a row: targets of rows, x of the ids, masked columns, the loss of a teacher's top k."""

import math

import pytest
import torch
from helpers.covering import covering

from xent_ops.kernels import reference_ids, reference_top_k_distillation
from xent_ops.kernels.options import RowOptions
from xent_ops.testing import realistic_logits

pytestmark = pytest.mark.interpreter
ops = torch.ops.xent
V, ROWS = 133, 6


def ids_of(places, dtype=torch.int64):
    """Ids of V + 20 classes: equal ones, ignored ones, a row of them, and one id that is no class."""
    ids = torch.randint(0, V + 20, (ROWS, places), generator=torch.Generator().manual_seed(places))
    ids[:, places // 2] = ids[:, 0]
    ids[1, : places // 3] = ids[2] = -100
    ids[3, -1] = V + 20
    return ids.to(dtype)


def test_a_target_of_each_row(device):
    def target(*rows, ignore_index=-100):
        ids = torch.tensor(rows, device=device)
        found = [ops.row_targets(ids, ignore_index=ignore_index)]
        found.append(reference_ids.row_targets(ids, options=RowOptions(ignore_index=ignore_index)))
        assert torch.equal(*found) and found[0].dtype == torch.int64
        return found[0].tolist()

    assert target([5, -100, 3], [-100, -100, -100], [0, 0, -100]) == [5, -100, 0]
    assert target([5, 7, 3], [7, 7, 7], ignore_index=7) == [5, 7]
    assert target([5, -2, 10**12], [5, 6, 10**12]) == [-2, 10**12]  # no class, so the row's numbers are NaN
    assert ops.row_targets(torch.zeros(2, 3, 1, dtype=torch.uint8, device=device)).shape == (2, 3)
    assert ops.row_targets(torch.zeros(0, 4, dtype=torch.int32, device=device)).shape == (0,)


@pytest.mark.parametrize(
    "dtype, places, name, mask",
    covering(
        [torch.float32, torch.bfloat16, torch.float16, torch.float64],
        [1, 5, 64],
        ["plain", "scaled", "softcap", "falling", "slice"],
        [False, True],
    ),
    ids=str,
)
def test_x_of_the_ids(device, dtype, places, name, mask):
    """With ``mask`` their columns, and no others, are masked, for rows with a gap too."""
    options = RowOptions(
        softcap=8.0 if name == "softcap" else None, logit_scale={"scaled": 0.5, "falling": -0.75}.get(name, 1.0)
    )
    start, number = (10, V + 20) if name == "slice" else (0, None)
    logits = realistic_logits(ROWS, V, dtype=dtype, padding=7).to(device)
    ids, before = ids_of(places).to(device), logits.clone()
    apart = before.clone()
    wanted, masked = torch.zeros(ROWS, places, dtype=torch.float64), before.clone()
    for row in range(ROWS):
        for place, id in enumerate(ids[row].tolist()):
            column = id - start
            if id != -100 and (id >= V + 20 or (number is None and id >= V)):
                wanted[row, place] = math.nan
            elif id != -100 and 0 <= column < V:
                x = float(before[row, column]) * options.logit_scale
                wanted[row, place] = x if options.softcap is None else options.softcap * math.tanh(x / options.softcap)
                masked[row, column] = -math.inf if options.is_increasing else math.inf
    operator, plain = (ops.mask_ids_, reference_ids.mask_ids_) if mask else (ops.ids_forward, reference_ids.ids_forward)
    found = [operator(logits, ids, start, number, **options.keywords())]
    found.append(plain(apart, ids, start, number, options=options))
    for x in found:
        assert x.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(x.double().cpu(), wanted, rtol=1e-6, atol=1e-6, equal_nan=True)
    for written in (logits, apart):
        assert torch.equal(written, masked if mask else before)


def top_k_in_float64(at_ids, lse, ids, probs, weight, tail, scale):
    """By autograd, row by row."""
    x, o = (one.detach().double().clone().requires_grad_() for one in (at_ids, lse))
    losses = []
    for row in range(ROWS):
        counted = ids[row] != -100
        p, own, w = probs[row][counted].double(), x[row][counted], 1.0 if weight is None else weight[row].double()
        if not bool(counted.any()):
            losses.append(0 * o[row])
            continue
        if tail:
            first = [i for i, id in enumerate(ids[row][counted].tolist()) if id not in ids[row][counted][:i].tolist()]
            all_lse = torch.cat([own[first], o[row].view(1)]).logsumexp(0)
            p, own = torch.cat([p, (1 - p.sum()).clamp(min=0).view(1)]), torch.cat([own, o[row].view(1)])
        else:
            all_lse = o[row]
        losses.append(w * (-(p * (own - all_lse)).sum() + scale * all_lse.square()))
    losses = torch.stack(losses)
    grads = torch.autograd.grad(losses.sum(), (x, o), allow_unused=True)
    return losses.detach(), grads[0], grads[1]


@pytest.mark.parametrize(
    "dtype, places, tail, weighted, scale",
    covering([torch.float32, torch.float64], [1, 5, 64], [False, True], [False, True], [0.0, 0.25]),
    ids=str,
)
def test_the_loss_of_a_top_k(device, dtype, places, tail, weighted, scale):
    generator = torch.Generator().manual_seed(3)
    ids = ids_of(places, torch.int32)
    at_ids, lse = torch.randn(places, ROWS, generator=generator).to(dtype).t(), torch.randn(ROWS).to(dtype) + 3
    at_ids = torch.where(ids == ids[:, :1], at_ids[:, :1], at_ids)  # equal ids have equal x
    at_ids = at_ids.t().contiguous().t()  # as a chunk's statistics are packed
    probs = torch.rand(ROWS, places, generator=generator).to(torch.bfloat16) / (2 * places)
    weight = torch.rand(ROWS, generator=generator).to(torch.float16) if weighted else None
    wanted = top_k_in_float64(at_ids, lse, ids, probs, weight, tail, scale)
    given = [None if one is None else one.to(device) for one in (at_ids, lse, ids, probs, weight)]
    found = [ops.top_k_distillation(*given, tail, lse_square_scale=scale)]
    found.append(reference_top_k_distillation.top_k_distillation(*given, tail, lse_square_scale=scale))
    for results in found:
        for result, right in zip(results, wanted, strict=True):
            assert result.dtype == dtype and not result.requires_grad
            tolerance = 1e-12 if dtype == torch.float64 else 2e-6
            torch.testing.assert_close(result.double().cpu(), right, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("tail", [False, True])
def test_probabilities_that_cannot_be(device, tail):
    """NaN, for sums below 0, NaN, and with a tail above one. A weight of 0 leaves their row out."""
    probs = torch.tensor([[-0.5, 0.1], [math.nan, 0.1], [0.9, 0.9], [math.nan, 0.0], [0.5, 0.5]], device=device)
    ids = torch.tensor([[1, 2]], device=device).expand(5, 2)
    weight = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0], device=device)
    x, lse = torch.ones(5, 2, device=device), torch.ones(5, device=device)
    for function in (ops.top_k_distillation, reference_top_k_distillation.top_k_distillation):
        loss, grad_ids, grad_lse = function(x, lse, ids, probs, weight, tail)
        wrong = [True, True, tail, False, False]
        assert loss.isnan().tolist() == grad_ids.isnan().all(-1).tolist() == grad_lse.isnan().tolist() == wrong
        assert loss[3] == 0 and not grad_ids[3].any() and grad_lse[3] == 0


def test_no_other_class_is_left(device):
    """o is -inf: the remainder is left out, and the gradient is that of a softmax of the ids."""
    x, lse = torch.tensor([[1.0, 2.0]], device=device), torch.full((1,), -math.inf, device=device)
    probs, ids = torch.tensor([[0.25, 0.5]], device=device), torch.tensor([[0, 1]], device=device)
    for function in (ops.top_k_distillation, reference_top_k_distillation.top_k_distillation):
        loss, grad_ids, grad_lse = function(x, lse, ids, probs, None, True)
        log_q = x.log_softmax(-1)
        torch.testing.assert_close(loss, -(probs * log_q).sum(-1))
        torch.testing.assert_close(grad_ids, 0.75 * log_q.exp() - probs)
        assert grad_lse.tolist() == [0.0]


def test_the_derivative_of_the_loss(device):
    generator = torch.Generator().manual_seed(3)
    ids, probs = torch.tensor([[1, 4], [2, -100], [-100, -100]], device=device), torch.full((3, 2), 0.25, device=device)
    x = torch.randn(3, 2, generator=generator).to(device, torch.float64).requires_grad_()
    lse = torch.randn(3, generator=generator).to(device, torch.float64).requires_grad_()
    for tail in (False, True):
        torch.autograd.gradcheck(
            lambda x, lse, tail=tail: ops.top_k_distillation(x, lse, ids, probs, None, tail)[0], (x, lse)
        )
    loss = ops.top_k_distillation(x, lse, ids, probs)[0]
    upstream = torch.tensor([1.0, 2.0, math.nan], device=device, dtype=torch.float64)
    grads = torch.autograd.grad(loss, (x, lse), upstream, retain_graph=True)
    assert all(grad.isfinite().all() for grad in grads)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(loss.sum(), x, create_graph=True)
