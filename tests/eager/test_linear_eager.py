"""Linear cross entropy as eager code calls it: torch's samples, which products run, later backwards, hooks, autocast."""

import threading

import pytest
import torch
import torch.nn.functional as F
from helpers.dispatch_log import Notes, operators_of
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from unfused import FULL, assert_all_close, unfused

import xent_ops

OPINFOS = [op for op in op_db if op.name == "nn.functional.linear_cross_entropy"]  # torch 2.13 has them
VARIANTS, OTHERS = [op.variant_test_name for op in OPINFOS], (torch.bfloat16, torch.float16, torch.float64)


@pytest.fixture
def x(h):
    return h.detach()[:, :8].clone().requires_grad_()


@pytest.fixture
def head(h):
    return torch.randn(30, 8, device=h.device, dtype=h.dtype, requires_grad=True)


@pytest.fixture
def bias(h):
    return torch.randn(30, device=h.device, dtype=h.dtype, requires_grad=True)


# Values against torch


@pytest.mark.skipif(not OPINFOS, reason="this torch has no F.linear_cross_entropy")
@pytest.mark.parametrize(
    "variant, dtype",
    [
        *((variant, torch.float32) for variant in VARIANTS),
        *((variant, dtype) for variant in VARIANTS[:1] for dtype in OTHERS),
    ],
    ids=str,
)
def test_pytorch_sample_inputs(device, dtype, variant):
    """A gradient for each input, in its dtype, for another upstream gradient of each loss. The loss stays float32."""
    (opinfo,) = (op for op in OPINFOS if op.variant_test_name == variant)
    count = 0
    for sample in opinfo.sample_inputs(device, dtype, requires_grad=True):
        x, (head, target), kwargs = sample.input, sample.args, dict(sample.kwargs)
        if head.dim() != 2 or target.is_floating_point():  # class probabilities are refused: test_linear_errors.py
            continue
        chunks = kwargs.pop("options", None)
        if kwargs.get("weight") is not None:
            kwargs["weight"] = kwargs["weight"].detach()
        tensors = {"x": x, "head": head, "target": target, **kwargs}
        wrt = [name for name, value in tensors.items() if isinstance(value, torch.Tensor) and value.requires_grad]
        ours = xent_ops.linear_cross_entropy(
            x, head, target, **kwargs,
            chunk_rows=None if chunks is None else chunks.batch_chunk_size,
            accumulate_dtype=None if chunks is None else chunks.acc_dtype,
        )  # fmt: skip
        assert ours.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        double = {
            name: value.detach().double().requires_grad_(value.requires_grad)
            if isinstance(value, torch.Tensor) and value.is_floating_point()
            else value
            for name, value in tensors.items()
        }
        theirs = F.linear_cross_entropy(double.pop("x"), double.pop("head"), double.pop("target"), **double)
        double = {"x": None, **double}
        upstream = torch.randn_like(theirs)
        grads = torch.autograd.grad(ours, [tensors[name] for name in wrt], upstream.to(ours))
        leaves = {name: tensors[name].detach().double().requires_grad_() for name in wrt}
        given = {name: leaves.get(name, value) for name, value in tensors.items()}
        given = {n: v.double() if n == "weight" and v is not None and n not in leaves else v for n, v in given.items()}
        theirs = F.linear_cross_entropy(given.pop("x"), given.pop("head"), given.pop("target"), **given)
        wanted = torch.autograd.grad(theirs, list(leaves.values()), upstream)
        eps = torch.finfo(dtype).eps
        scale = 1 + F.linear(x.double().abs(), head.double().abs()).max().item()
        torch.testing.assert_close(
            ours.double(), theirs, rtol=4 * eps, atol=4 * eps * scale * max(ours.numel(), x.shape[0])
        )
        for name, mine, other in zip(wrt, grads, wanted, strict=True):
            assert mine.dtype == tensors[name].dtype, name
            size = other.abs().max().item() + upstream.abs().max().item()
            torch.testing.assert_close(mine.double(), other, rtol=8 * eps, atol=8 * eps * scale * size)
        count += 1
    assert count >= 5


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradcheck_and_gradgradcheck(x, head, bias, target, reduction, device):
    """First and second derivatives against finite differences, and of the upstream gradient, with every option."""
    weight = torch.rand(30, device=device, dtype=x.dtype)
    factor = torch.tensor(1.5, device=device, dtype=x.dtype, requires_grad=True)
    leaves = x.detach()[:4, :3].clone(), head.detach()[:7, :3].clone(), bias.detach()[:7].clone()
    target = torch.tensor([3, -100, 6, 0], device=device)

    def function(x, head, bias, factor):
        loss = xent_ops.linear_cross_entropy(
            x, head, target, linear_bias=bias, weight=weight[:7], reduction=reduction, chunk_rows=3, **FULL
        )
        return loss * factor

    inputs = (*(leaf.requires_grad_() for leaf in leaves), factor)
    # The first backward multiplies what forward divided, a later one divides: other roundings.
    assert torch.autograd.gradcheck(function, inputs, nondet_tol=1e-12)
    assert torch.autograd.gradgradcheck(function, inputs)


def test_gradcheck_of_the_other_outputs(x, head, target):
    inputs = x.detach()[:4, :3].clone().requires_grad_(), head.detach()[:7, :3].clone().requires_grad_()
    target = torch.tensor([3, -100, 6, 0], device=x.device)

    def outputs(x, head):
        out = xent_ops.linear_cross_entropy_outputs(x, head, target, chunk_rows=3, **FULL)
        assert not (out.z_loss.requires_grad or out.token_losses.requires_grad or out.entropy.requires_grad)
        return out.loss, out.lse[target != -100]

    def of_rows(x, head):
        out = xent_ops.linear_cross_entropy_outputs(x, head, target, reduction="none", chunk_rows=3, **FULL)
        return out.loss, out.z_loss, out.lse[target != -100]

    def log_probs(x, head):
        return tuple(xent_ops.linear_token_log_probs(x, head, target, chunk_rows=3, softcap=5.0, logit_scale=0.5))

    for function in (outputs, of_rows, log_probs):
        # A second backward through one pass computes the logits again, with the rounded lse: last bits differ.
        assert torch.autograd.gradcheck(function, inputs, nondet_tol=1e-14)
        assert torch.autograd.gradgradcheck(function, inputs)


def test_gradient_accumulation_is_one_mean(x, head, target):
    weight = torch.rand(30, device=x.device, dtype=x.dtype)
    for weighted in (None, weight):
        wanted = torch.autograd.grad(xent_ops.linear_cross_entropy(x, head, target, weight=weighted), head)[0]
        counted = target != -100
        divisor = counted.sum() if weighted is None else weighted[target[counted]].sum()
        head.grad = None
        for rows in (slice(0, 3), slice(3, 4), slice(4, 6)):
            xent_ops.linear_cross_entropy(
                x[rows], head, target[rows], weight=weighted, reduction="sum", divisor=divisor
            ).backward()
        torch.testing.assert_close(head.grad, wanted)


# Which products run, and what is kept


def bytes_of(func, args, result):
    return [tensor.untyped_storage().nbytes() for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor)]


@pytest.fixture
def products(monkeypatch):
    """How many products the operators make, and the most rows that one of them has."""
    seen = []

    def counting(function):
        def product(*args, **kwargs):
            seen.append(max(args[-2].shape[0], args[-1].shape[1]))
            return function(*args, **kwargs)

        return product

    for name in ("mm", "addmm"):
        monkeypatch.setattr(torch, name, counting(getattr(torch, name)))
    return seen


@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("wanted, forward", [((1, 1), 3), ((1, 0), 2), ((0, 1), 2), ((0, 0), 1)])
def test_products(products, x, head, bias, target, wanted, forward, biased):
    """Three in all; none of a frozen head's, of an input without gradient's; one where only a loss is wanted."""
    x, head = x.detach().requires_grad_(wanted[0] == 1), head.detach().requires_grad_(wanted[1] == 1)
    bias = bias if biased else None
    loss = xent_ops.linear_cross_entropy(x, head, target, linear_bias=bias)
    assert len(products) == forward
    if loss.requires_grad:
        loss.backward(retain_graph=True)
        assert len(products) == forward
        loss.backward(retain_graph=True)  # makes the logits again
        assert len(products) == 2 * forward
    del products[:]
    loss = xent_ops.linear_cross_entropy(x, head, target, linear_bias=bias, reduction="none").sum()
    assert len(products) == 1
    if loss.requires_grad:
        loss.backward()
        assert len(products) == 1 + forward
    del products[:]
    with torch.no_grad():
        assert not xent_ops.linear_cross_entropy(x, head, target, linear_bias=bias).requires_grad
    with torch.inference_mode():
        xent_ops.linear_cross_entropy(x, head, target, linear_bias=bias)
    assert len(products) == 2


def test_the_operators_of_each_way(x, head, target):
    def loss(**options):
        return xent_ops.linear_cross_entropy(x, head, target, **options)

    assert operators_of(loss) == ["linear_cross_entropy_with_grad"]
    assert operators_of(lambda: loss().backward()) == ["linear_cross_entropy_with_grad", "scale_grad_", "scale_grad_"]
    rows = ["linear_cross_entropy_forward", "linear_cross_entropy_backward"]
    assert operators_of(lambda: loss(reduction="none").sum().backward()) == rows
    with torch.no_grad():
        assert operators_of(loss) == ["linear_cross_entropy_forward", "row_summary"]
    assert operators_of(lambda: checkpoint(loss, use_reentrant=False).backward())[1:] == rows


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_logits_never_exist_as_a_whole(products, device, reduction):
    rows, features, classes, chunk = 512, 8, 1000, 32
    x = torch.randn(rows, features, device=device, requires_grad=True)
    head = torch.randn(classes, features, device=device, requires_grad=True)
    target = torch.randint(0, classes, (rows,), device=device)
    saved = []
    with (
        Notes(bytes_of) as made,
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        loss = xent_ops.linear_cross_entropy(x, head, target, reduction=reduction, chunk_rows=chunk)
        loss.sum().backward(retain_graph=True)
        loss.sum().backward()
    assert max(made.seen) <= 4 * classes * features, "the gradient of the head"
    assert max(t.untyped_storage().nbytes() for t in saved) <= 4 * classes * features
    assert len(products) == (rows // chunk) * (1 + 3 * 2) and max(products) <= classes


def test_nothing_is_kept_without_grad(x, head, target):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        with torch.no_grad():
            xent_ops.linear_cross_entropy(x, head, target)
        xent_ops.linear_cross_entropy(x.detach(), head.detach(), target)
    assert saved == []


@pytest.mark.parametrize("dtype, sums", [(torch.float32, None), (torch.bfloat16, torch.float32), (torch.float16, None)])
def test_gradients_are_handed_out_and_not_copied(x, head, bias, target, dtype, sums):
    leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in (x, head, bias)]

    def pointers(func, args, result):
        scaled = "scale_grad" in str(func) or "_to_copy" in str(func)  # from float32 sums
        return [(args[0] if result is None else result).data_ptr()] if scaled else []

    loss = xent_ops.linear_cross_entropy(*leaves[:2], target, linear_bias=leaves[2], accumulate_dtype=sums)
    with Notes(pointers) as scaled:
        loss.backward()
    assert all(leaf.grad.data_ptr() in scaled.seen for leaf in leaves)


# Later backwards


def test_what_changed_in_between_raises(x, head, bias, target):
    """The one pass needs no saved tensor, and looks at them all the same."""
    weight = torch.rand(30, device=x.device, dtype=x.dtype)
    for changed in range(5):
        for reduction in ("mean", "none"):
            tensors = [tensor.detach().clone() for tensor in (x, head, target, bias, weight)]
            for i in (0, 1, 3):
                tensors[i].requires_grad_()
            loss = xent_ops.linear_cross_entropy(
                *tensors[:3], linear_bias=tensors[3], weight=tensors[4], reduction=reduction
            )
            with torch.no_grad():
                tensors[changed].mul_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.sum().backward()


def test_second_derivatives(x, head, bias, target):
    """After them the first gradients are there as before."""
    results = []
    for function in (xent_ops.linear_cross_entropy, unfused):
        loss = function(x, head, target, linear_bias=bias, **FULL)
        grads = torch.autograd.grad(loss, (x, head, bias), create_graph=True)
        penalty = sum(grad.square().sum() for grad in grads)
        results.append([
            *grads,
            *torch.autograd.grad(penalty, (x, head, bias), retain_graph=True),
            *torch.autograd.grad(loss, (x, head, bias)),
        ])  # fmt: skip
    assert_all_close(*results)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_batches_of_upstream_gradients(x, head, target, reduction, dtype):
    leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in (x, head)]
    loss = xent_ops.linear_cross_entropy(*leaves, target, reduction=reduction)
    upstream = torch.randn(3, *loss.shape, device=x.device).to(loss)
    batched = torch.autograd.grad(loss, leaves, upstream, is_grads_batched=True, retain_graph=True)
    one_by_one = [torch.autograd.grad(loss, leaves, one, retain_graph=True) for one in upstream]
    for mine, wanted in zip(batched, zip(*one_by_one, strict=True), strict=True):
        tolerance = {"rtol": 0.01, "atol": 0.01} if dtype == torch.float16 else {}
        torch.testing.assert_close(mine, torch.stack(wanted), **tolerance)


def test_threads(device):
    """Each with its own loss, and all with one that keeps its graph."""
    x, head = torch.randn(200, 16, device=device), torch.randn(50, 16, device=device)
    target = torch.randint(0, 50, (200,), device=device)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, head)]
    wanted = torch.autograd.grad(unfused(*leaves, target), leaves)
    shared = xent_ops.linear_cross_entropy(*leaves, target, chunk_rows=50)
    wrong = []

    def run():
        for _ in range(10):
            own = [tensor.clone().requires_grad_() for tensor in (x, head)]
            found = [torch.autograd.grad(xent_ops.linear_cross_entropy(*own, target, chunk_rows=50), own)]
            found.append(torch.autograd.grad(shared, leaves, retain_graph=True))
            for mine, other in ((m, o) for grads in found for m, o in zip(grads, wanted, strict=True)):
                if not torch.allclose(mine, other, rtol=1e-4, atol=1e-6):
                    wrong.append(mine)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
