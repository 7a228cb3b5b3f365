"""Loss and gradient in one visit of the logits: values of the operators, and what they refuse."""

import itertools

import pytest
import torch
from against_oracle import DTYPES, OPTIONS, assert_lse_where_read, with_grad_case
from helpers.covering import covering
from helpers.dispatch_log import Notes
from helpers.interpreter import INTERPRETED

from xent_ops.testing import assert_grad, assert_loss, oracle, realistic_logits

pytestmark = pytest.mark.interpreter

ops = torch.ops.xent


# What lies between the rows of a view stays as it is. test_values.py has the values of others.
VIEWS = [lambda x: x[:, :-1], lambda x: x[..., 3:], lambda x: x[..., ::2], lambda x: x[:, :, :9].transpose(0, 2)]


@pytest.mark.parametrize("view", VIEWS, ids=range(4))
def test_views_are_written_where_they_lie(device, view):
    storage = realistic_logits(4, 5, 101, dtype=torch.float32).to(device)
    before, logits = storage.clone(), view(storage)
    target = torch.randint(0, logits.shape[-1], logits.shape[:-1], generator=torch.Generator().manual_seed(1))
    with_grad_case(device, logits.clone(), target)
    ops.cross_entropy_with_grad_(logits, target.to(device), torch.ones((), device=device))
    outside = torch.ones(4, 5, 101, dtype=torch.bool)
    view(outside)[...] = False
    assert torch.equal(storage.cpu()[outside], before.cpu()[outside])
    assert not torch.equal(logits, view(before))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_for_all_rows(device, dtype):
    """Both upstream gradients (), as a mean with a z-loss passes them."""
    target = torch.tensor([0, -100, 1002])
    with_grad_case(device, realistic_logits(3, 1003, dtype=dtype), target, upstream=False, square=torch.tensor(0.05))


def test_strided_targets_of_few_rows(device, monkeypatch):
    """Fewer rows than processors are visited twice, with a gradient of the lse between."""
    from xent_ops.kernels.triton import launch_with_grad

    monkeypatch.setattr(launch_with_grad, "processors", lambda _device: 132)
    target = torch.tensor([[7, 36], [-100, 4], [0, 11]])
    for strided in (target.mT.contiguous().mT, target.repeat_interleave(2, -1)[:, ::2]):
        with_grad_case(device, realistic_logits(3, 2, 37, dtype=torch.float32), strided)


KINDS = [(torch.float32, 1000), (torch.bfloat16, 1003), (torch.float16, 37)]


# As many rows as are fewer and more than the interpreter's processors.
@pytest.mark.parametrize("kind, name, rows", covering(KINDS, ["plain", "all"], [2, 5]), ids=str)
def test_statistics(device, kind, name, rows):
    """Those of the forward operator, and nothing else changes; of an ignored row -1 and 0, whatever it holds."""
    dtype, vocabulary = kind
    logits = realistic_logits(rows, vocabulary, dtype=dtype).to(device)
    logits[1] = float("nan")
    logits[0, [3, 30]] = logits[0].max()  # a tie
    target = torch.arange(rows, device=device)
    target[1] = -100
    given = (logits, target, torch.tensor(0.5, device=device), torch.tensor(0.1, device=device))
    options = OPTIONS[name]
    plain = ops.cross_entropy_with_grad(*given, **options)
    _, _, argmax, entropy, _ = ops.cross_entropy_forward(logits, target, None, True, True, **options)
    argmax[1], entropy[1] = -1, 0.0
    for wanted in itertools.product((False, True), repeat=2):
        made = ops.cross_entropy_with_grad(*given, None, *wanted, **options)
        over = logits.clone()
        for results in (made, (*ops.cross_entropy_with_grad_(over, *given[1:], None, *wanted, **options), over)):
            torch.testing.assert_close([*results[:2], results[-1]], [*plain[:2], plain[-1]])
            assert torch.equal(results[2], argmax if wanted[0] else argmax[:0])
            torch.testing.assert_close(results[3], entropy if wanted[1] else entropy[:0])


@pytest.mark.parametrize("rows", [1, 4])  # the interpreter's way through forward and backward, and the kernel
def test_strided_classes_are_copied_once(device, rows):
    if device == "cpu" and not INTERPRETED:
        pytest.skip("needs a GPU or TRITON_INTERPRET=1: only the Triton launchers copy rows")
    from xent_ops.kernels.triton.launch import LAUNCHERS

    x, target = torch.randn(rows, 100, device=device)[:, ::2], torch.zeros(rows, dtype=torch.int64, device=device)
    args = (x, target, torch.ones((), device=device))
    clone = torch.ops.aten.clone.default
    with Notes(lambda func, args, _: [func] if func is clone and args[0].device.type != "meta" else []) as copies:
        LAUNCHERS["cross_entropy_with_grad"](*args)(*args)
    assert copies.seen == [clone]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype, classes",
    [
        (torch.bfloat16, 128256),
        (torch.bfloat16, 128257),  # rows start anywhere
        (torch.bfloat16, 65528),
        (torch.float16, 262144),
        (torch.float32, 128256),
        (torch.float32, 70001),
    ],
    ids=str,
)
def test_rows_that_programs_share(dtype, classes):
    """On a GPU, rows too long to leave room beside them in shared memory; below, what is odd about one part of a row."""
    rows = torch.cuda.get_device_properties(0).multi_processor_count + 20
    logits = realistic_logits(rows, classes, dtype=dtype, std=3.0).cuda()
    target = torch.randint(0, classes, (rows,), generator=torch.Generator().manual_seed(1)).cuda()
    target[:8] = torch.tensor([0, 1, classes - 1, classes - 2, 16383, 16384, 32767, 32768])
    logits[8, : classes // 2] = float("-inf")
    target[8] = classes - 7
    logits[9, 1000:] = float("-inf")
    target[9] = 999
    logits[10, classes // 3 : -classes // 3] = float("-inf")
    target[10] = classes - 5
    logits[11] += 1e4
    logits[12, classes // 2] = 200.0
    logits[13] = float("-inf")
    logits[13, 40000] = 0.0
    target[13] = 40000
    target[14::9] = -100
    scale, square = torch.tensor(1 / rows).cuda(), torch.full((rows,), 1e-4).cuda()
    x = logits.clone()
    first = ops.cross_entropy_with_grad(x, target, scale, square)
    assert torch.equal(x, logits)
    over = logits.clone()
    some = slice(20)  # for the oracle takes its time
    upstream = torch.where(target != -100, 2 * square * first[1], 0)[some]
    expected = oracle(logits[some], target[some], grad_loss=scale, grad_lse=upstream)
    for loss, lse, *_, grad in (first, (*ops.cross_entropy_with_grad_(over, target, scale, square), over)):
        assert_loss(loss[some], expected)
        assert_lse_where_read(lse[some], expected, target[some])
        assert_grad(grad[some], expected)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.cross_entropy_with_grad(x, target, scale, square)
    for _ in range(3):
        graph.replay()
        for mine, wanted in zip(captured, first, strict=True):
            assert torch.equal(mine, wanted), "another run, other bits"

    x[14], x[15, 0], x[16, -1] = float("nan"), float("nan"), float("inf")
    target[15], target[16], target[17] = 5, 6, classes
    loss, *_, grad = ops.cross_entropy_with_grad(x, target, scale)
    assert loss[14] == 0 and grad[14].count_nonzero() == 0
    for row in (15, 16, 17):
        assert loss[row].isnan() and grad[row].isnan().all(), row


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(7, 300), (2, 5, 4099), (1,), (0, 10), (3, 5003)], ids=str)
def test_scale_grad(device, dtype, shape):
    """A gradient times a scalar, or one factor a row, each rounded once; exactly one leaves every bit."""
    grad = realistic_logits(*shape, dtype=dtype).to(device)
    rows = shape[:-1]
    per_row = torch.rand(rows, generator=torch.Generator().manual_seed(3))
    per_row.view(-1)[::2] = 1.0
    for factor in (torch.tensor(1.0), torch.tensor(0.3), torch.tensor(3.0).expand(rows), per_row):
        scaled = grad.clone()
        ops.scale_grad_(scaled, factor.to(device))
        wanted = (grad.double() * factor.to(device).double().unsqueeze(-1)).to(dtype)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(scaled, wanted, rtol=2 * eps, atol=torch.finfo(dtype).tiny)
        assert torch.equal(scaled[factor.to(device).expand(rows) == 1], grad[factor.to(device).expand(rows) == 1])


def test_scale_grad_by_zero_is_zero(device):
    """Such a row has a zero gradient, whatever it holds."""
    grad = torch.full((3, 40), float("nan"), device=device)
    grad[1] = 1.0
    ops.scale_grad_(grad, torch.tensor([0.0, 2.0, 0.0], device=device))
    assert grad.sum(-1).tolist() == [0.0, 80.0, 0.0]
    ops.scale_grad_(grad.fill_(float("inf")), torch.zeros((), device=device))
    assert grad.count_nonzero() == 0


@pytest.mark.parametrize("view", [lambda x: x[:, 1:], lambda x: x.transpose(0, 2), lambda x: x[..., ::3]], ids=range(3))
def test_scale_grad_of_views(device, view):
    storage = torch.ones(4, 6, 30, device=device)
    version = storage._version
    ops.scale_grad_(view(storage), torch.full((), 2.0, device=device))
    assert storage._version > version
    wanted = torch.ones(4, 6, 30)
    view(wanted)[...] = 2.0
    assert torch.equal(storage.cpu(), wanted)


def test_no_derivative(device):
    """It would be a second one: a backward through the operators says so, and the twin refuses beforehand."""
    x, target = torch.randn(4, 10, device=device, requires_grad=True), torch.arange(4, device=device)
    one = torch.ones((), device=device)
    with pytest.raises(RuntimeError, match="cross_entropy_with_grad has no derivative"):
        ops.cross_entropy_with_grad(x, target, one)[0].sum().backward()
    row = torch.ones(4, device=device)
    for call in (
        lambda logits: ops.cross_entropy_with_grad_(logits, target, one),
        lambda logits: ops.scale_grad_(logits, one),
        lambda logits: ops.cross_entropy_backward_(row, None, logits, target, row),
        lambda logits: ops.cross_entropy_backward_(row, None, logits, target, row, num_classes=10),
    ):
        with pytest.raises(RuntimeError, match="must not require grad, for an operator that has no derivative writes"):
            call(x * 1)
    with torch.no_grad():
        ops.cross_entropy_with_grad_(x, target, one)


def test_nothing_is_written_over_rows_that_share_memory(device):
    logits, row = torch.zeros(100, device=device).unfold(0, 30, 20), torch.zeros(4, device=device)
    target = row.long()
    for call in (
        lambda: torch.ops.xent.cross_entropy_with_grad_(logits, target, row),
        lambda: torch.ops.xent.scale_grad_(logits, row),
        lambda: torch.ops.xent.cross_entropy_backward_(row, None, logits, target, row),
        lambda: torch.ops.xent.cross_entropy_backward_(row, None, logits, target, row, num_classes=30),
    ):
        with pytest.raises(RuntimeError, match="share memory between their rows"):
            call()
    torch.ops.xent.scale_grad_(logits[::2], row[::2])
