"""What holds on every "npu": on a device, and on the emulation of its dispatch (npu_host.py)."""

import types

import torch

from xent_ops import testing
from xent_ops.kernels import reference_shard
from xent_ops.kernels.options import RowOptions

OPTIONS = [
    {},
    {"label_smoothing": 0.1},
    {"softcap": 20.0, "logit_scale": -0.5},
    {"weight": True, "label_smoothing": 0.1, "softcap": 100.0, "ignore_index": 3},
]


def kernels():
    """(module, name) of every kernel that a launcher calls."""
    from xent_ops.kernels.ascend import launch_backward, launch_forward, launch_shard, launch_soft

    modules = (launch_backward, launch_forward, launch_shard, launch_soft)
    return [(module, name) for module in modules for name in vars(module) if name.endswith("_kernel")]


def names(options):
    return "-".join(options) or "plain"


def inputs(classes, dtype, rows=7, ignored=-100):
    logits = testing.realistic_logits(rows, classes, dtype=dtype)
    target = torch.arange(rows) * (classes // rows)
    target[2] = ignored
    return logits, target


def check_values(classes, dtype, options):
    """The row operators and their gradients against float64; the lse's gradient is given or not."""
    ops = torch.ops.xent
    options = dict(options)
    weight = torch.linspace(0.5, 1.5, classes) if options.pop("weight", None) else None
    logits, target = inputs(classes, dtype, ignored=options.get("ignore_index", -100))
    grad_loss, grad_lse = torch.linspace(-1, 2, 7), torch.linspace(1, 0, 7)
    arguments = (target.to("npu"), None if weight is None else weight.to("npu"))
    for b in (None, grad_lse):
        upstream = {"grad_loss": grad_loss, "grad_lse": 0.0 if b is None else b}
        expected = testing.oracle(logits, target, weight, **upstream, **options)
        x = logits.to("npu").requires_grad_()
        loss, lse, argmax, _, _ = ops.cross_entropy_forward(x, *arguments, True, **options)
        outputs, grads = ((loss,), (grad_loss,)) if b is None else ((loss, lse), (grad_loss, b))
        torch.autograd.backward(outputs, [grad.to("npu") for grad in grads])
        testing.assert_loss(loss, expected)
        testing.assert_lse(lse, expected)
        testing.assert_grad(x.grad, expected)
    assert torch.equal(argmax.cpu(), ops.cross_entropy_forward(logits, target, weight, True, **options)[2])


SHARDS = ((0, 400), (400, 0), (400, 250), (650, 360))  # (class_start, columns): one empty, the last beyond the classes


def check_shards(dtype, options, classes=1003):
    """The parts of a split vocabulary, their join and each shard's gradient against float64."""
    ops = torch.ops.xent
    options = dict(options)
    weight = torch.linspace(0.5, 1.5, classes) if options.pop("weight", None) else None
    logits, target = inputs(classes, dtype, ignored=options.get("ignore_index", -100))
    grad_loss, grad_lse = torch.linspace(-1, 2, 7), torch.linspace(1, 0, 7)
    expected = testing.oracle(logits, target, weight, grad_loss=grad_loss, grad_lse=grad_lse, **options)
    shards = []
    for start, columns in SHARDS:
        part = torch.full((7, columns + 1), float("nan"), dtype=dtype)  # rows with a gap, and padding
        part[:, : min(columns, classes - start)] = logits[:, start : start + columns]
        w = None if weight is None else torch.ones(columns)
        if w is not None:
            w[: classes - start] = weight[start : start + columns]
            w = w.to("npu")
        shards.append((part.to("npu")[:, :-1].requires_grad_(), start, w))
    t = target.to("npu")
    parts = [ops.cross_entropy_shard(x.detach(), t, start, classes, w, **options) for x, start, w in shards]
    gathered, grads = torch.cat(parts), []
    for x, start, w in shards:
        loss, lse, *_ = ops.cross_entropy_shard_join(x, t, gathered, start, classes, w, **options)
        testing.assert_loss(loss, expected)
        testing.assert_lse(lse, expected)
        grads.append(torch.autograd.grad((loss, lse), x, [g.to("npu") for g in (grad_loss, grad_lse)])[0].cpu())
    testing.assert_grad(torch.cat(grads, -1)[:, :classes], expected)
    assert (grads[-1][:, classes - SHARDS[-1][0] :] == 0).all()


def check_join(weighted):
    """The join by itself against plain torch on the same parts, reduced as well; NaN of shards that do not tile.

    The first row is -inf but for one shard, the second holds a target of no class, the third is ignored, in the fourth
    all but the target's shard are masked with the most negative number.
    """
    ops = torch.ops.xent
    classes, options = 1003, {"label_smoothing": 0.1} if weighted else {}
    logits, target = inputs(classes, torch.float32)
    weight = torch.linspace(0.5, 1.5, classes) if weighted else None
    logits[0, 400:] = float("-inf")
    target[1] = classes
    logits[3, :400] = logits[3, 650:] = torch.finfo(torch.float32).min
    tilings = (
        [(0, 400), (400, 0), (400, 250), (650, 353)],
        [(650, 353), (0, 400), (400, 250)],
        [(0, 1003)],
    )
    faulty = ([(0, 1003), (0, 1003)], [(0, 650)], [(0, 400), (401, 602)], [(0, 401), (400, 603)], [(0, 500), (0, 503)])
    for shards in (*tilings, *faulty):
        gathered = torch.cat(
            [
                reference_shard.cross_entropy_shard(
                    logits[:, start : start + columns],
                    target,
                    start,
                    classes,
                    None if weight is None else weight[start : start + columns],
                    options=RowOptions(**options),
                )
                for start, columns in shards
            ]
        )
        start, columns = shards[0]
        arguments = (logits[:, start : start + columns], target, gathered, start, classes)
        w = None if weight is None else weight[start : start + columns]
        wanted = reference_shard.cross_entropy_shard_join(*arguments, w, options=RowOptions(**options))
        reduced = reference_shard.cross_entropy_shard_reduced(
            *arguments, w, options=RowOptions(**options), lse_square_scale=0.1
        )
        moved = [a.to("npu") if isinstance(a, torch.Tensor) else a for a in (*arguments, w)]
        made = [tensor.cpu() for tensor in ops.cross_entropy_shard_join(*moved, **options)]
        torch.testing.assert_close(made, list(wanted), rtol=1e-5, atol=1e-5, equal_nan=True)
        made_reduced = [t.cpu() for t in ops.cross_entropy_shard_reduced(*moved, **options, lse_square_scale=0.1)]
        torch.testing.assert_close(made_reduced, list(reduced), rtol=1e-5, atol=1e-5, equal_nan=True)
        tiles = shards in tilings
        assert made[0].isnan().tolist() == [not tiles, True, False, *[not tiles] * 4]
        assert made[1].isnan().tolist() == [not tiles] * 7


def check_soft(dtype, options, target_dtype=torch.float32, classes=1003):
    """Class probabilities: loss, lse and the gradient of logits against plain torch in float64."""
    ops = torch.ops.xent
    options = {name: value for name, value in options.items() if name != "ignore_index"}
    weight = torch.linspace(0.5, 1.5, classes) if options.pop("weight", None) else None
    logits, _ = inputs(classes, dtype)
    target = torch.softmax(testing.realistic_logits(7, classes, dtype=torch.float32, seed=1), -1).to(target_dtype)
    grad_loss, grad_lse = torch.linspace(-1, 2, 7), torch.linspace(1, 0, 7)
    grad_loss[1] = 0.0
    target[1, 3] = float("inf")  # of a row whose loss passes nothing back
    results = []
    for device, kind in (("npu", None), ("cpu", torch.float64)):
        x = logits.to(device, kind).requires_grad_()
        others = [None if tensor is None else tensor.to(device) for tensor in (target, weight)]
        made = ops.soft_cross_entropy_forward(x, *others, **options)
        (grad,) = torch.autograd.grad(made, x, [g.to(made[0]) for g in (grad_loss, grad_lse)])
        results.append([tensor.detach().cpu().float() for tensor in (*made, grad)])
    for made in results:
        assert not made[0][1].isfinite()
        made[0] = made[0][made[0].isfinite()]
    for actual, expected in zip(*results, strict=True):
        rtol = 1e-2 if dtype == torch.bfloat16 and actual.shape == logits.shape else 2e-5
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-5)
    assert results[0][2].isfinite().all()


def why_no_device():
    """Why there is no NPU here; None where a real one has answered. No emulation of one passes."""
    try:
        import torch_npu
    except ImportError:
        return "torch_npu is not installed"
    if not isinstance(getattr(torch_npu, "_C", None), types.ModuleType) or not torch_npu._C.__file__.endswith(".so"):
        return "this torch_npu is not the real one"
    if getattr(torch, "npu", None) is not torch_npu.npu:
        return "the device npu of this process is not torch_npu's"
    if not torch.npu.is_available():
        return "torch_npu finds no NPU"
    if not torch.npu.get_device_name(0).startswith("Ascend"):
        return f"{torch.npu.get_device_name(0)} is no Ascend NPU"
    try:
        computed = (torch.ones(1, device="npu") + 1).item()
    except Exception as error:  # whatever a driver without a device raises
        return f"the NPU does not compute: {error}"
    if computed != 2:
        return f"the NPU computes 1 + 1 = {computed}"
    try:
        from triton.backends import backends
        from triton.runtime import driver
        from triton.runtime.interpreter import InterpretedFunction

        from xent_ops.kernels.ascend.forward import forward_kernel
    except ImportError as error:
        return f"triton-ascend is not installed ({error})"
    if "ascend" not in backends or isinstance(forward_kernel, InterpretedFunction):
        return "Triton would not compile for the NPU"
    try:
        backend = driver.active.get_current_target().backend
    except Exception as error:
        return f"Triton's driver does not answer: {error}"
    return None if backend == "npu" else f"Triton's driver is for {backend}"
