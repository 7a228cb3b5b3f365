"""The one-pass kernel in Gluon, which Triton's interpreter does not run, by an emulation: reads, writes, waiting."""

import inspect

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import gluon_emulator

from xent_ops.kernels import reference, reference_with_grad
from xent_ops.kernels.triton import cached, configs, launch_with_grad, with_grad_shared
from xent_ops.kernels.triton.launch import LAUNCHERS
from xent_ops.testing import assert_grad, assert_loss, assert_lse, oracle, realistic_logits

KERNEL = with_grad_shared.with_grad_shared_kernel


@pytest.fixture
def emulated(monkeypatch):
    """Launches as GPUs with 227 KiB would have them; the number of programs of each."""
    launched = []

    def emulate(self, *tensors):
        if self.kernel is with_grad_shared.join_statistics_kernel:
            return join(*tensors)
        assert self.kernel is KERNEL
        launched.append(self.grid)
        parameters = [name for name in inspect.signature(KERNEL.fn).parameters if name not in self.constants]
        arguments = dict(zip(parameters, (*tensors, *self.numbers), strict=True)) | self.constants
        del arguments["num_warps"]
        # As few at once as may be: the parts of a row.
        gluon_emulator.run(KERNEL, self.grid, arguments, at_once=self.constants["PARTS"], seed=len(launched))

    monkeypatch.setattr(cached.Launch, "__call__", emulate)
    monkeypatch.setattr(launch_with_grad, "_shared_memory", lambda device: (232448, 32))
    return launched


def join(tops, firsts, entropies, argmax, entropy):
    """What join_statistics_kernel does, in torch."""
    argmax.copy_(torch.where(tops == tops.amax(1, keepdim=True), firsts, 2**31 - 1).amin(1))
    entropy.copy_(entropies.sum(1))


def run(launcher, *args):
    return launcher(*args)(*args)


@pytest.mark.parametrize("parts, tiles", [(1, 5), (2, 3), (3, 2), (5, 1)])
@pytest.mark.parametrize(
    "dtype, classes", [(torch.bfloat16, 1003), (torch.bfloat16, 1024), (torch.float32, 1001)], ids=str
)
def test_rows_of_any_parts(monkeypatch, emulated, dtype, classes, parts, tiles):
    """Odd rows and even ones; -inf, NaN and targets in one part or another; the last part may be empty."""
    monkeypatch.setattr(configs, "with_grad_shared", lambda *args: configs.Shared(parts, 256, tiles, 1))
    logits = realistic_logits(9, classes, dtype=dtype)
    target = torch.tensor([0, 5, classes - 1, 255, 256, 511, -100, 700, classes - 4])
    logits[1, 6:] = float("-inf")
    logits[2, : classes // 2] = float("-inf")
    logits[3, 300:900] = float("-inf")
    logits[6, 3] = float("nan")  # in the row that is not counted
    scale, square = torch.rand(9, generator=torch.Generator().manual_seed(0)), torch.tensor(1e-3)
    before = logits.clone()
    results = run(LAUNCHERS["cross_entropy_with_grad"], logits, target, scale, square)
    assert torch.equal(logits.nan_to_num(7), before.nan_to_num(7)) and emulated == [9 * parts]
    over = logits.clone()
    in_place = (*run(LAUNCHERS["cross_entropy_with_grad_"], over, target, scale, square), over)
    counted = target != -100
    upstream = 2 * square * results[1][counted]
    expected = oracle(logits[counted], target[counted], grad_loss=scale[counted], grad_lse=upstream)
    for loss, lse, *_, grad in (results, in_place):
        assert_loss(loss[counted], expected)
        assert_lse(lse[counted], expected)
        assert_grad(grad[counted], expected)
        assert loss[6] == 0 and grad[6].count_nonzero() == 0


@pytest.mark.parametrize("parts, tiles", [(1, 5), (2, 3), (5, 1)])
@pytest.mark.parametrize("dtype, classes", [(torch.bfloat16, 1003), (torch.float32, 1001)], ids=str)
def test_statistics_of_any_parts(monkeypatch, emulated, dtype, classes, parts, tiles):
    """Ties within a part and over two, the edges, -inf; of an ignored row -1 and 0, and of one that passes nothing."""
    monkeypatch.setattr(configs, "with_grad_shared", lambda *args: configs.Shared(parts, 256, tiles, 1))
    logits = realistic_logits(7, classes, dtype=dtype)
    logits[0, [3, 500, 990]] = logits[1, [classes - 1]] = logits[2, [0, 1]] = 60.0
    logits[3, :400] = float("-inf")
    logits[4, 3] = float("nan")  # in the row that is not counted
    target = torch.tensor([0, 5, classes - 1, 700, -100, 511, 4])
    scale = torch.tensor([0.5, 1.0, 0.25, 1.0, 1.0, 0.0, 1.0])
    given = (logits, target, scale, None, None)
    plain = run(LAUNCHERS["cross_entropy_with_grad"], *given)
    loss, lse, argmax, entropy, grad = run(LAUNCHERS["cross_entropy_with_grad"], *given, True, True)
    assert all(map(torch.equal, (loss, lse, grad), (*plain[:2], plain[-1])))
    wanted = reference.statistics(logits.double(), target, None, True, True)
    assert argmax[4] == -1 and entropy[4] == 0
    counted = target != -100
    assert torch.equal(argmax[counted], wanted[2][counted])
    torch.testing.assert_close(entropy[counted].double(), wanted[3][counted], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "dtype, classes, parts", [(torch.bfloat16, 60001, 4), (torch.float32, 33, 1), (torch.float32, 65536, 4)], ids=str
)
def test_rows_as_configured(emulated, dtype, classes, parts):
    storage = realistic_logits(3, classes + 8, dtype=dtype)
    logits = storage[:, :classes]  # a gap after each row, which must not be written
    target = torch.tensor([1, classes - 1, classes])  # the last is no class
    results = run(LAUNCHERS["cross_entropy_with_grad_"], logits, target, torch.ones(()))
    assert emulated == [3 * parts]
    original = realistic_logits(3, classes + 8, dtype=dtype)
    expected = oracle(original[:2, :classes], target[:2], grad_loss=1.0)
    assert_loss(results[0][:2], expected)
    assert_grad(logits[:2], expected)
    assert results[0][2].isnan() and logits[2].isnan().all()
    assert torch.equal(storage[:, classes:], original[:, classes:])


def test_rows_that_no_device_holds():
    assert configs.with_grad_shared(128256, 4, 101376, most_parts=1) is None  # an RTX A400: 6 processors
    assert configs.with_grad_shared(128256, 4, 232448, most_parts=33).parts == 8
    assert configs.with_grad_shared(2**20, 4, 232448, most_parts=33) is None  # more parts than lanes
    for capacity in (101376, 166912, 232448):
        for size in range(2048, 2**19, 1022):
            found = configs.with_grad_shared(size // 2, 2, capacity, most_parts=33)
            part = found.tile * found.tiles * 2
            assert found.parts * part >= size // 2 * 2 and part + 1024 <= capacity


@pytest.mark.parametrize("parts, tiles", [(1, 4), (3, 2), (5, 1)])
def test_a_narrower_gradient_in_the_front_of_rows(monkeypatch, emulated, parts, tiles):
    """16 bits over float32 logits: over those of other parts, which must have read theirs."""
    classes = 1008
    monkeypatch.setattr(configs, "with_grad_shared", lambda *args: configs.Shared(parts, 256, tiles, 1))
    logits = realistic_logits(9, classes, dtype=torch.float32)
    target = torch.tensor([0, 5, classes - 1, 255, 256, 511, -100, 700, classes - 4])
    scale = torch.rand(9, generator=torch.Generator().manual_seed(0))
    expected = reference_with_grad.cross_entropy_with_grad(logits, target, scale, None, None, True, True)
    over, given = logits.clone(), (target, scale, None, None, True, True, torch.bfloat16)
    made = run(LAUNCHERS["cross_entropy_with_grad_"], over, *given)
    assert emulated == [9 * parts]
    for value, wanted in zip(made, expected, strict=False):
        torch.testing.assert_close(value, wanted)
    gradient = over.view(torch.bfloat16)[:, :classes]
    torch.testing.assert_close(gradient.float(), expected[-1], rtol=2**-7, atol=1e-8)
