"""Peak memory by dispatch, in Triton's interpreter: run by test_npu.py in a process of its own. See npu_host_cases.py."""

import itertools

import npu_host
import pytest
import torch
from helpers.dispatch_log import Notes
from npu_cases import inputs

import xent_ops
from xent_ops.kernels import devices, reference_shard
from xent_ops.kernels.options import RowOptions

with pytest.warns(UserWarning, match="TRITON_INTERPRET is set"):
    devices.ascend_launchers()
from xent_ops.kernels.ascend import configs

ops = torch.ops.xent


def memory(call, *arguments):
    """The most bytes in use during a call beyond those before it, in logits."""
    return npu_host.peak(call, *arguments) / (16 * 2000 * 2)


def test_memory(monkeypatch):
    """Forward and backward take a gradient and a few numbers a row, whatever the form of the loss."""
    monkeypatch.setenv(configs.BLOCK_VARIABLE, "2048")  # one tile a row: the interpreter is slow
    logits, target = inputs(2000, torch.bfloat16, rows=16)
    x, target = logits.to("npu").requires_grad_(), target.to("npu")
    soft = torch.softmax(logits, -1).to("npu")

    def step(targets, **options):
        torch.autograd.grad(xent_ops.cross_entropy(x, targets, **options), x)

    def shard(columns):
        part, start = x[:, :columns].detach().requires_grad_(), 2000 - columns
        gathered = torch.cat([ops.cross_entropy_shard(part.detach(), target, start, 2000) for _ in range(2)])
        value, *_ = ops.cross_entropy_shard_reduced(part, target, gathered, start, 2000)
        torch.autograd.grad(value, part)

    assert memory(step, target) <= 1.02
    assert memory(lambda: step(target, grad_in_forward=True)) <= 1.02
    assert memory(lambda: step(target, label_smoothing=0.1, lse_square_scale=1e-4)) <= 1.02
    assert memory(step, soft) <= 1.02
    assert memory(shard, 1000) <= 0.54  # of whole logits: half of them, and 3 numbers a row from each of two ranks
    with torch.no_grad():
        assert memory(lambda: xent_ops.cross_entropy(x, target)) <= 0.02

    hidden, head = torch.rand(16, 16).bfloat16(), torch.rand(2000, 16).bfloat16()
    hidden, head = hidden.to("npu").requires_grad_(), head.to("npu").requires_grad_()
    gradients = (hidden.numel() + head.numel()) / logits.numel()

    def linear():
        torch.autograd.grad(xent_ops.linear_cross_entropy(hidden, head, target, chunk_rows=4), (hidden, head))

    chunk = 0.25 * 2048 / 2000  # a quarter of the logits, in rows of padded_classes
    assert memory(linear) <= gradients + chunk + 0.01


def gathered(rows, ranks, weighted=False, **options):
    """Arguments of the join, of ``ranks`` shards of 10 classes each."""
    x, target = (tensor.to("npu") for tensor in inputs(10 * ranks, torch.float32, rows=rows))
    weight = torch.ones(10, device="npu") if weighted else None
    part = reference_shard.cross_entropy_shard
    options = RowOptions(**options)
    starts = range(0, 10 * ranks, 10)
    parts = [part(x[:, s : s + 10], target, s, 10 * ranks, weight, options=options) for s in starts]
    return x[:, :10], target, torch.cat(parts), 0, 10 * ranks, weight


def no_view(func, args, result):
    return [] if func.is_view or func.overloadpacket.__name__ in ("reshape", "_unsafe_view") else [func]


def test_the_join_beside_plain_torch():
    """The numbers in docs/npu.md: operations, and bytes a row."""
    arguments = gathered(64, 2)
    assert npu_host.peak(lambda: ops.cross_entropy_shard_join(*arguments)) == 5 * 4 * 64  # its outputs
    join = reference_shard.cross_entropy_shard_join
    for ranks, bytes_of_a_row in ((2, 58), (8, 152)):
        arguments = gathered(512, ranks)
        assert round(npu_host.peak(lambda arguments=arguments: join(*arguments)) / 512) == bytes_of_a_row
    numbers = []
    for weighted, smoothing in itertools.product((True, False), (0.0, 0.1)):
        arguments = gathered(64, 2, weighted, label_smoothing=smoothing)
        with Notes(no_view) as operations:
            join(*arguments, options=RowOptions(label_smoothing=smoothing))
        numbers.append(len(operations.seen))
    assert min(numbers) == 74 and max(numbers) == 82, numbers


def test_memory_of_what_is_plain_torch(monkeypatch):
    """The numbers in docs/npu.md, of logits of the same dtype."""
    monkeypatch.setenv(configs.BLOCK_VARIABLE, "2048")
    logits, target = inputs(2000, torch.bfloat16, rows=16)
    x, target = logits.to("npu").requires_grad_(), target.to("npu")
    soft = torch.softmax(logits, -1).to("npu").requires_grad_()
    double = x.detach().double().requires_grad_()

    def twice():
        (grad,) = torch.autograd.grad(xent_ops.cross_entropy(x, target), x, create_graph=True)
        torch.autograd.grad(grad.sum(), x)

    assert 2.9 < memory(lambda: torch.autograd.grad(xent_ops.cross_entropy(double, target), double)) / 4 < 3.1
    assert 7.9 < memory(lambda: torch.autograd.grad(xent_ops.cross_entropy(x, soft), (x, soft))) < 8.1
    assert 16.0 < memory(twice) < 16.4
