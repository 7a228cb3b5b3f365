"""The columns of several classes a row in a gradient: the Triton kernel and plain torch."""

import pytest
import torch
from helpers.covering import covering

from xent_ops.kernels import reference_ids
from xent_ops.kernels.options import RowOptions

pytestmark = pytest.mark.interpreter
V, ROWS = 133, 5


def problem(device, dtype, places, with_entropy):
    """A gradient whose other columns are written; ids of the slice [10, 10 + V) and others, ignored ones among them."""
    generator = torch.Generator().manual_seed(places)
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    ids = torch.randint(-30, V + 50, (ROWS, places), generator=generator)
    ids[ids < 0] = -100
    x = torch.randn(ROWS, V + 50, generator=generator).gather(1, ids.clamp(min=0))
    rows = [torch.rand(ROWS, generator=generator) for _ in range(4)]
    grad = torch.randn(ROWS, V, generator=generator).to(device, dtype)
    values = (x, torch.randn(ROWS, places, generator=generator), rows[0], rows[1] + 4, *rows[2:])
    at_ids, grad_ids, grad_lse, lse, grad_entropy, entropy = (value.to(device, accumulator) for value in values)
    grad_lse[3], grad_ids[3] = 0.0, 0.0  # a row that passes nothing back but by its entropy
    of_entropy = (grad_entropy, entropy) if with_entropy else (None, None)
    return grad, ids.to(device), at_ids, grad_ids, grad_lse, lse, *of_entropy, 10, V + 40


def wanted(grad, ids, at_ids, grad_ids, b, lse, c, entropy, start, _, options):
    """Place by place, in float64."""
    made = grad.double().cpu()
    for row in range(ROWS):
        for id in set(ids[row].tolist()) - {-100}:
            places = (ids[row] == id).nonzero().flatten().tolist()
            x, column = at_ids[row, places[0]].double(), id - start
            if not 0 <= column < V:
                continue
            log_p = x - lse[row].double()
            value = b[row] * log_p.exp() + grad_ids[row, places].double().sum()
            if c is not None:
                value = value - c[row] * log_p.exp() * (log_p + entropy[row])
            slope = 1.0 if options.softcap is None else 1 - (x / options.softcap) ** 2
            made[row, column] = value * slope * options.logit_scale
    return made


@pytest.mark.parametrize(
    "dtype, places, name",
    covering(
        [torch.float32, torch.bfloat16, torch.float16, torch.float64],
        [1, 3, 64, 100],
        ["plain", "entropy", "softcap", "both"],
    ),
    ids=str,
)
def test_values(device, dtype, places, name):
    options = RowOptions(softcap=5.0 if name in ("softcap", "both") else None, logit_scale=0.7)
    given = problem(device, dtype, places, name in ("entropy", "both"))
    correct = wanted(*given, options)
    made = given[0].clone()
    torch.ops.xent.ids_grad_(made, *given[1:], **options.keywords())
    exact = {"rtol": torch.finfo(dtype).eps * 4, "atol": 1e-6}
    torch.testing.assert_close(made.double().cpu(), correct, **exact)
    plain = given[0].clone()
    reference_ids.ids_grad_(plain, *given[1:], options=options)
    torch.testing.assert_close(plain.double().cpu(), correct, **exact)


HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64
MIXED = {  # grad_logits, ids, at_ids, grad_ids, grad_lse, lse, grad_entropy, entropy
    "float32 beside bfloat16": (HALF, torch.int32, SINGLE, SINGLE, SINGLE, SINGLE, SINGLE, SINGLE),
    "bfloat16 beside float32": (SINGLE, torch.int64, HALF, HALF, HALF, SINGLE, HALF, HALF),
    "float16 all over": (torch.float16, torch.int32, *[torch.float16] * 6),
    "bfloat16 lse": (SINGLE, torch.int64, SINGLE, SINGLE, SINGLE, HALF, SINGLE, SINGLE),
    "float64 lse": (SINGLE, torch.int64, SINGLE, SINGLE, HALF, DOUBLE, SINGLE, HALF),
    "float64 beside float32": (SINGLE, torch.int32, DOUBLE, DOUBLE, DOUBLE, SINGLE, DOUBLE, DOUBLE),
}


@pytest.mark.parametrize("case", MIXED)
def test_mixed_dtypes(device, case):
    """Each tensor of its own; the sums are those of float32, or of the lse where that is float64."""
    given = problem(device, torch.float64, 7, True)
    mixed = [value.to(dtype) for value, dtype in zip(given, MIXED[case], strict=False)]
    correct = wanted(mixed[0], mixed[1], *[value.cpu().double() for value in mixed[2:]], *given[8:], RowOptions())
    made, plain = mixed[0].clone(), mixed[0].clone()
    torch.ops.xent.ids_grad_(made, *mixed[1:], *given[8:])
    reference_ids.ids_grad_(plain, *mixed[1:], *given[8:])
    for result in (made, plain):
        exact = {"rtol": torch.finfo(made.dtype).eps * 4, "atol": 1e-6}
        torch.testing.assert_close(result.double().cpu(), correct, **exact)


def test_rows_of_any_stride(device):
    _, *rest = problem(device, torch.float32, 7, True)
    storage = torch.randn(ROWS, V + 9, device=device)
    view = storage[:, 3 : 3 + V]
    before, dense = storage.clone(), view.contiguous()
    torch.ops.xent.ids_grad_(view, *rest)
    torch.ops.xent.ids_grad_(dense, *rest)
    assert torch.equal(view, dense)
    assert torch.equal(storage[:, :3], before[:, :3]) and torch.equal(storage[:, 3 + V :], before[:, 3 + V :])


def test_what_passes_nothing_back_is_exactly_zero(device):
    """Whatever its x is; and what is not a number passes on."""
    grad = torch.ones(3, 4, device=device)
    ids = torch.tensor([[1], [1], [1]], device=device)
    at_ids = torch.tensor([[float("nan")], [float("inf")], [0.0]], device=device)
    zeros, lse = torch.zeros(3, device=device), torch.ones(3, device=device)
    torch.ops.xent.ids_grad_(grad, ids, at_ids, torch.zeros(3, 1, device=device), zeros, lse, softcap=2.0)
    assert grad[:, 1].tolist() == [0.0, 0.0, 0.0] and grad[:, [0, 2, 3]].eq(1).all()
    grad_lse = torch.full((3,), float("nan"), device=device)
    torch.ops.xent.ids_grad_(grad, ids, at_ids, torch.zeros(3, 1, device=device), grad_lse, lse)
    assert grad[:, 1].isnan().all()
