"""Peak memory by dispatch, in Triton's interpreter: run by test_npu.py in a process of its own. See npu_host_cases.py."""

import npu_host
import pytest
import torch
from npu_cases import inputs

import xent_ops
from xent_ops.kernels import reference_shard
from xent_ops.ops import devices

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

    assert memory(linear) <= gradients + 0.25 + 0.01  # a chunk: a quarter of the logits


def test_the_join_takes_its_outputs():
    """Plain torch takes 50 bytes a row here, and 153 with eight ranks."""
    logits, target = inputs(40, torch.float32, rows=64)
    x, target = logits.to("npu"), target.to("npu")
    gathered = torch.cat([ops.cross_entropy_shard(x[:, s : s + 20], target, s, 40) for s in (0, 20)])
    arguments = (x[:, :20], target, gathered, 0, 40)
    assert npu_host.peak(lambda: ops.cross_entropy_shard_join(*arguments)) == 4 * 4 * 64
    assert npu_host.peak(lambda: reference_shard.cross_entropy_shard_join(*arguments)) > 3 * 4 * 4 * 64


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
