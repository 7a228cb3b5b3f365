"""The public functions against torch: every sample that PyTorch ships for F.cross_entropy, shapes, types, modules."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from helpers.dispatch_log import Notes
from torch.testing._internal.common_methods_invocations import op_db

import xent_ops

OPINFO = next(op for op in op_db if op.name == "nn.functional.cross_entropy")


@pytest.mark.usefixtures("eager_and_dispatched")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_pytorch_sample_inputs(device, dtype):
    """Values, and gradients with respect to every input that has one, within the dtype's own resolution."""
    count = 0
    for sample in OPINFO.sample_inputs(device, dtype, requires_grad=True):
        kwargs = dict(sample.kwargs)
        if kwargs.get("weight") is not None and not sample.args[0].is_floating_point():
            kwargs["weight"] = kwargs["weight"].detach()
        tensors = [sample.input, *sample.args, kwargs.get("weight")]
        wrt = [t for t in tensors if isinstance(t, torch.Tensor) and t.requires_grad]
        ours = xent_ops.cross_entropy(sample.input, *sample.args, **kwargs)
        # The truth in float64: eager's own bfloat16 result is further from it than ours.
        double = [
            t.detach().double().requires_grad_(t.requires_grad) if t is not None and t.is_floating_point() else t
            for t in tensors
        ]
        if double[-1] is not None:
            kwargs["weight"] = double[-1]
        theirs = F.cross_entropy(*double[:-1], **kwargs)
        eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
        torch.testing.assert_close(ours.double(), theirs, rtol=64 * eps, atol=64 * eps, equal_nan=True)
        upstream = torch.randn_like(theirs)
        grads = torch.autograd.grad(ours, wrt, upstream.to(ours))
        wanted = torch.autograd.grad(
            theirs, [t for t in double if t is not None and t.requires_grad], upstream.to(ours).double()
        )
        for mine, other in zip(grads, wanted, strict=True):
            assert mine.dtype == dtype
            resolution = torch.finfo(dtype).eps
            torch.testing.assert_close(
                mine.double(),
                other,
                rtol=4 * resolution,
                atol=64 * eps * other.abs().nan_to_num().max().clamp(min=1e-6).item(),
                equal_nan=True,
            )
        count += 1
    assert count >= 20


@pytest.mark.usefixtures("eager_and_dispatched")
@pytest.mark.parametrize("shape", [(10,), (4, 10), (4, 10, 3), (2, 10, 3, 5), (0, 10), (4, 10, 0)], ids=str)
@pytest.mark.parametrize("soft", [False, True], ids=["indices", "probabilities"])
def test_shapes_of_torch(device, shape, soft):
    x = torch.randn(shape, device=device, dtype=torch.float64, requires_grad=True)
    dim = 0 if len(shape) == 1 else 1
    target_shape = shape[:dim] + shape[dim + 1 :]
    target = torch.randint(0, 10, target_shape, device=device)
    if soft:
        target = torch.rand(shape, device=device, dtype=torch.float64).softmax(dim)
    for reduction in ("none", "mean", "sum"):
        ours = xent_ops.cross_entropy(x, target, reduction=reduction, label_smoothing=0.1)
        theirs = F.cross_entropy(x, target, reduction=reduction, label_smoothing=0.1)
        torch.testing.assert_close(ours, theirs, equal_nan=True)
        (mine,), (other,) = torch.autograd.grad(ours.sum(), x), torch.autograd.grad(theirs.sum(), x)
        torch.testing.assert_close(mine, other, equal_nan=True)


@pytest.mark.usefixtures("eager_and_dispatched")
def test_z_loss_of_class_probabilities(device):
    x = torch.randn(5, 10, device=device, dtype=torch.float64)
    soft = torch.rand(5, 10, device=device, dtype=torch.float64).softmax(-1)
    z = 0.5 * torch.logsumexp(x, -1).square()
    torch.testing.assert_close(
        xent_ops.cross_entropy(x, soft, lse_square_scale=0.5), F.cross_entropy(x, soft) + z.mean()
    )


@pytest.mark.usefixtures("eager_and_dispatched")
@pytest.mark.parametrize("shape", [(9,), (4, 9), (2, 9, 3)], ids=str)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "softcap": 3.0}], ids=["plain", "options"])
def test_batched_gradients_of_class_probabilities(device, shape, options):
    x = torch.randn(shape, device=device, dtype=torch.float64, requires_grad=True)
    dim = 0 if len(shape) == 1 else 1
    target = torch.randn(shape, device=device, dtype=torch.float64).softmax(dim).requires_grad_()
    weight = torch.rand(9, device=device, dtype=torch.float64, requires_grad=True)
    leaves = (x, target, weight)
    losses = xent_ops.cross_entropy(x, target, weight, reduction="none", **options)
    upstream = torch.randn(5, *losses.shape, device=device, dtype=torch.float64)
    batched = torch.autograd.grad(losses, leaves, upstream, is_grads_batched=True, retain_graph=True)
    one_by_one = [torch.autograd.grad(losses, leaves, one, retain_graph=True) for one in upstream]
    for mine, wanted in zip(batched, zip(*one_by_one, strict=True), strict=True):
        torch.testing.assert_close(mine, torch.stack(wanted))


def test_module_is_the_function(device):
    weight = torch.rand(10)
    ours = xent_ops.CrossEntropyLoss(weight, ignore_index=3, reduction="sum", label_smoothing=0.1, softcap=4.0).to(
        device
    )
    theirs = torch.nn.CrossEntropyLoss(weight, ignore_index=3, reduction="sum", label_smoothing=0.1)
    assert ours.state_dict().keys() == theirs.state_dict().keys() == {"weight"}
    ours.load_state_dict(theirs.state_dict())
    assert xent_ops.CrossEntropyLoss().state_dict() == torch.nn.CrossEntropyLoss().state_dict() == {}
    x, target = torch.randn(5, 10, device=device), torch.tensor([1, 3, 4, 5, 9], device=device)
    torch.testing.assert_close(
        ours(x, target),
        xent_ops.cross_entropy(
            x, target, weight.to(device), ignore_index=3, reduction="sum", label_smoothing=0.1, softcap=4.0
        ),
    )
    assert repr(ours) == "CrossEntropyLoss(ignore_index=3, reduction='sum', label_smoothing=0.1, softcap=4.0)"


@pytest.mark.usefixtures("eager_and_dispatched")
def test_autocast_makes_no_float32_copy(device):
    saved = []
    x = torch.randn(8, 100, device=device, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, 100, (8,), device=device)
    with (
        torch.autocast(device, dtype=torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        loss = xent_ops.cross_entropy(x, target)
    assert loss.dtype == torch.float32
    assert not any(t.dtype == torch.float32 and t.numel() >= x.numel() for t in saved)
    torch.testing.assert_close(loss, F.cross_entropy(x.float(), target))


@pytest.mark.usefixtures("eager_and_dispatched")
def test_reductions_of_every_dtype_are_float32(device):
    """Row losses of bfloat16 logits are summed in float32: in bfloat16 the sum would stop growing."""
    x = torch.zeros(3000, 4, device=device, dtype=torch.bfloat16)
    target = torch.zeros(3000, device=device, dtype=torch.int64)
    total = xent_ops.cross_entropy(x, target, reduction="sum")
    torch.testing.assert_close(total.item(), 3000 * torch.log(torch.tensor(4.0)).item(), rtol=1e-6, atol=0)


def test_signature_is_that_of_torch():
    ours = inspect.signature(xent_ops.cross_entropy).parameters
    theirs = inspect.signature(F.cross_entropy).parameters
    legacy = {"size_average", "reduce"}
    assert set(theirs) - legacy <= set(ours)
    for name in set(theirs) - legacy:
        assert ours[name].default == theirs[name].default
    module = inspect.signature(xent_ops.CrossEntropyLoss).parameters
    assert set(module) == set(ours) - {"input", "target", "token_weight"}
    assert all(module[name].default == ours[name].default for name in module)


def test_the_error_tells_a_column_of_indices_from_probabilities(device):
    logits, target = torch.randn(4, 9, device=device), torch.zeros(4, 1, dtype=torch.int64, device=device)
    with pytest.raises(TypeError, match=r"class probabilities, .* class indices have shape \(4,\)"):
        xent_ops.cross_entropy(logits, target)


@pytest.mark.parametrize("classes", [64, 65])
def test_classes_that_are_not_dense_are_copied_once(device, classes):
    """The copy is made before the operators, each of which would make its own. The CPU's kernels read few as they are."""
    leaf = torch.randn(classes, 4, device=device, requires_grad=True)
    target = torch.tensor([1, 8, -100, 0], device=device)
    with Notes(lambda func, args, _: args if func.namespace == "xent" else []) as arguments:
        xent_ops.cross_entropy(leaf.t(), target, lse_square_scale=0.1).backward()
    seen = arguments.seen
    logits = {x.data_ptr(): x for x in seen if isinstance(x, torch.Tensor) and x.dim() == 2}
    assert len(logits) == 1
    if device == "cpu" and classes == 64:
        assert leaf.data_ptr() in logits
    else:
        assert all(x.stride(-1) == 1 for x in logits.values())
