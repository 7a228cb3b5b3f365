"""For a machine with an Ascend NPU: `pytest -m npu`. Elsewhere everything here is skipped, and was never run so far."""

import itertools
import types

import pytest
import torch
from npu_cases import OPTIONS, check_join, check_shards, check_soft, check_values, inputs, kernels, names, why_no_device

import xent_ops

REASON = why_no_device()
pytestmark = [pytest.mark.npu, pytest.mark.skipif(REASON is not None, reason=f"needs an Ascend NPU: {REASON}")]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def on_npu(classes, dtype=torch.bfloat16, rows=64):
    logits, target = inputs(classes, dtype, rows)
    return logits.to("npu"), target.to("npu")


def step(x, target, **options):
    loss = xent_ops.cross_entropy(x, target, **options)
    return loss, *torch.autograd.grad(loss, x)


def reference(x, target, **options):
    loss, grad = step(x.detach().double().cpu().requires_grad_(), target.cpu(), **options)
    return loss.float(), grad.to(x.dtype)


def close(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.detach().cpu(), e, rtol=1.6e-2 if a.dtype == torch.bfloat16 else 1e-4, atol=1e-6)


@pytest.mark.parametrize("options", OPTIONS, ids=names)
@pytest.mark.parametrize("classes", [1, 1000, 4097, 32000, 128256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients(classes, dtype, options):
    check_values(classes, dtype, options)


@pytest.mark.parametrize("options", OPTIONS, ids=names)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shards_and_class_probabilities(dtype, options):
    check_shards(dtype, options)
    check_soft(dtype, options, target_dtype=dtype)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_join(weighted):
    check_join(weighted)


def test_many_rows():
    """More rows than vector cores, so that a program has a chunk of them."""
    x, target = on_npu(1000, rows=5000)
    close(step(x.requires_grad_(), target), reference(x, target))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_kernel_fits_the_unified_buffer(dtype):
    """bishengir refuses a kernel that does not: every set of features, at the largest blocks."""
    from xent_ops.kernels.ascend.launch import LAUNCHERS
    from xent_ops.kernels.options import RowOptions

    launch = types.SimpleNamespace(**LAUNCHERS)

    logits, target = on_npu(32000, dtype, rows=5)
    row, ones = torch.zeros(5, device="npu"), torch.ones(32000, device="npu")
    for weight, smoothing, softcap in itertools.product((None, ones), (0.0, 0.1), (None, 30.0, 100.0)):
        options = {"options": RowOptions(label_smoothing=smoothing, softcap=softcap)}
        launch.cross_entropy_forward(logits, target, weight, **options)
        for wanted in ((True, False), (False, True), (True, True)):
            launch.cross_entropy_forward(logits, target, weight, *wanted, **options)
        launch.cross_entropy_reduced(logits, target, weight, **options)
        gathered = launch.cross_entropy_shard(logits, target, 32000, 96000, weight, **options)
        launch.cross_entropy_shard_join(logits, target, gathered, 32000, 96000, weight, **options)
        for probabilities in (logits, logits.float()):
            launch.soft_cross_entropy_forward(logits, probabilities, weight, **options)
            launch.soft_cross_entropy_backward(row, row, logits, probabilities, row, weight, **options)
        for grad_lse in (None, row):
            launch.cross_entropy_backward(row, grad_lse, logits, target, row, weight, **options)
            of_entropy = (weight, None, row, row)
            launch.cross_entropy_backward(row, grad_lse, logits, target, row, *of_entropy, **options)
            of_slice = (row, 32000, 96000)
            launch.cross_entropy_backward(row, grad_lse, logits, target, row, *of_entropy, *of_slice, **options)
    torch.npu.synchronize()


@pytest.mark.parametrize("classes", [1000, 4097, 32000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_place_backward(classes, dtype):
    """The target's column is written after its row and next to other rows, in elements of no aligned address."""
    x, target = on_npu(classes, dtype)
    hidden = x.requires_grad_()
    xent_ops.cross_entropy(hidden * 1.0, target, inplace_backward=True).backward()
    close((hidden.grad,), reference(x, target)[1:])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend):
    compiled = torch.compile(xent_ops.cross_entropy, backend=backend, fullgraph=True)
    for shift in (0, 1):
        x, target = on_npu(4097)
        x, target = x.requires_grad_(), target.roll(shift)
        loss = compiled(x, target, label_smoothing=0.1)
        close((loss, *torch.autograd.grad(loss, x)), reference(x, target, label_smoothing=0.1))


def test_npugraph_ex_forward():
    compiled = torch.compile(xent_ops.cross_entropy, backend="npugraph_ex", fullgraph=True, dynamic=False)
    x, target = on_npu(4097)
    with torch.no_grad():
        xent_ops.cross_entropy(x, target)  # compiles the kernels outside the capture
        number = compiled_kernels()
        for shift in (0, 1):
            close((compiled(x, target.roll(shift)),), reference(x, target.roll(shift))[:1])
        assert compiled_kernels() == number


def compiled_kernels():
    """How many binaries Triton holds of ours."""
    number = 0
    for kernel in {getattr(module, name) for module, name in kernels()}:
        if hasattr(kernel, "device_caches"):  # Triton 3.3 and newer
            number += sum(len(of_device[0]) for of_device in kernel.device_caches.values())
        else:
            number += sum(len(of_device) for of_device in kernel.cache.values())
    return number


def test_graph_capture_and_replay_with_other_targets():
    x, target = on_npu(32000)
    x.requires_grad_()
    stream = torch.npu.Stream()
    with torch.npu.stream(stream):
        step(x, target)  # compiles the kernels
    torch.npu.synchronize()
    number = compiled_kernels()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        outputs = step(x, target)
    assert compiled_kernels() == number
    for shift in (1, 2):
        target.copy_(target.roll(shift))
        graph.replay()
        close(outputs, reference(x, target))


def test_make_graphed_callables():
    x, target = on_npu(4097)
    x.requires_grad_()
    loss_of = torch.npu.make_graphed_callables(xent_ops.CrossEntropyLoss(), (x, target))
    for shift in (0, 1):
        other = target.roll(shift)
        loss = loss_of(x, other)
        close((loss, *torch.autograd.grad(loss, x)), reference(x, other))
