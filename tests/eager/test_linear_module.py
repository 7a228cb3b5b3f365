"""Linear cross entropy among other features of torch: hooks, autocast, transforms, modules."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.utils import parametrize
from unfused import FULL, assert_all_close, unfused

import xent_ops

TARGET = torch.tensor([3, 8, -100, 0, 7, 7])


FUNCTIONS = (xent_ops.linear_cross_entropy, unfused)


@pytest.fixture
def tensors(device):
    """(input, linear_weight, target)."""
    make = {"dtype": torch.float64, "device": device, "requires_grad": True}
    return torch.randn(6, 5, **make), torch.randn(9, 5, **make), TARGET.to(device)


# Hooks


def test_tensor_hooks_and_weights_that_are_no_leaves(tensors):
    results = []
    for function in FUNCTIONS:
        x, head = (tensor.detach().clone().requires_grad_() for tensor in tensors[:2])
        seen, scaled = [], head * 0.1
        scaled.register_hook(lambda g, seen=seen: seen.append(g.clone()) or g * 2)
        scaled.retain_grad()
        head.register_hook(lambda g, seen=seen: seen.append(g.clone()))
        head.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(p.grad.clone()))
        (function(x, scaled[:, :].t().contiguous().t(), tensors[2]) * 3).backward()
        assert len(seen) == 3
        results.append([*seen, scaled.grad, x.grad, head.grad])
    assert_all_close(*results)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_saved_tensors_hooks(tensors, reduction):
    """Inside them the forward may run twice, so it makes rows; autograd sees no write there, so it makes none."""
    x, head, target = tensors

    def loss(x):
        return xent_ops.linear_cross_entropy(x, head, target, reduction=reduction).sum()

    wanted = torch.autograd.grad(unfused(x, head, target, reduction=reduction).sum(), (x, head))
    with torch.autograd.graph.save_on_cpu():
        value = loss(x)
    assert_all_close(torch.autograd.grad(value, (x, head)), wanted)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        value = loss(x)
    for _ in range(2):
        assert_all_close(torch.autograd.grad(value, (x, head), retain_graph=True), wanted)
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        assert_all_close(torch.autograd.grad(loss(x), (x, head)), wanted)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        value = loss(x * 1)
        assert_all_close(torch.autograd.grad(value, (x, head)), wanted)


def test_a_head_tied_to_an_embedding(device):
    """One gradient, of both uses."""
    embedding = torch.nn.Embedding(9, 5, device=device, dtype=torch.float64)
    ids, results = torch.tensor([1, 2, 3, 3, 8, 0], device=device), []
    module = xent_ops.LinearCrossEntropyLoss(tied_weight=embedding.weight)
    for function in (*FUNCTIONS, lambda x, _, target: module(x, target)):
        embedding.weight.grad = None
        function(torch.tanh(embedding(ids)), embedding.weight, TARGET.to(device)).backward()
        results.append(embedding.weight.grad)
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(results[2], results[1])


# Autocast, inference


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "float32"), ("float32", "float16")], ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
def test_autocast(device, tensors, cast, dtypes, biased):
    """As nn.Linear: input, weight and bias in autocast's dtype; gradients in their own."""
    x, head = (t.detach().to(getattr(torch, d)).requires_grad_() for t, d in zip(tensors, dtypes, strict=False))
    leaves = [x, head] + ([torch.randn(9, device=device, requires_grad=True)] if biased else [])
    bias = leaves[2] if biased else None
    results = []
    for reduction in ("mean", "none"):
        for function in FUNCTIONS:
            with torch.autocast(device, dtype=cast):
                loss = function(x, head, tensors[2], linear_bias=bias, reduction=reduction, **FULL)
                assert loss.dtype == torch.float32
            grads = torch.autograd.grad(loss.sum(), leaves)
            assert [grad.dtype for grad in grads] == [leaf.dtype for leaf in leaves]
            results.append([loss.detach(), *grads])
        for mine, other in zip(results[-2], results[-1], strict=True):
            assert (mine - other).float().norm() <= 3 * torch.finfo(cast).eps * other.float().norm()
    with torch.autocast(device, dtype=cast):
        out = xent_ops.linear_cross_entropy_outputs(x, head, tensors[2])
        log_probs = xent_ops.linear_token_log_probs(x, head, tensors[2]).log_probs
        wide = xent_ops.linear_cross_entropy(*tensors)
    assert out.loss.dtype == log_probs.dtype == torch.float32
    assert wide.dtype == torch.float64, "float64 is not cast"


def test_a_dtype_of_its_own_for_the_weight_needs_autocast(tensors, device):
    x, head, target = tensors
    with pytest.raises(TypeError, match=r"both must be the same, as for nn.Linear \(torch.autocast casts both\)"):
        xent_ops.linear_cross_entropy(x.float(), head.bfloat16(), target)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=False), pytest.raises(TypeError):
        xent_ops.linear_cross_entropy(x.float(), head.bfloat16(), target)


def test_inference_mode(tensors):
    x, head, target = tensors
    with torch.inference_mode():
        wanted = unfused(x, head, target)
        torch.testing.assert_close(xent_ops.linear_cross_entropy(x, head, target), wanted)
        inferred = x.clone()
    torch.testing.assert_close(xent_ops.linear_cross_entropy(inferred, head.detach(), target), wanted.clone())
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        xent_ops.linear_cross_entropy(inferred, head, target)


# Transforms


def test_all_logits_take_transforms_and_class_probabilities(tensors):
    """The way that the refusals name has the derivatives of the fused function."""
    x, head, target = tensors

    def of_all_logits(head, target):
        return xent_ops.cross_entropy(F.linear(x.detach(), head), target, dim=-1, **FULL)

    wanted = torch.autograd.grad(xent_ops.linear_cross_entropy(x, head, target, **FULL), head)[0]
    torch.testing.assert_close(grad(of_all_logits)(head.detach(), target), wanted)
    probabilities = torch.full((6, 9), 1 / 9, device=x.device, dtype=x.dtype)
    assert of_all_logits(head, probabilities).isfinite()


def test_operators_below_transforms(tensors):
    """vmap loops over them; other transforms raise."""
    x, head, target = (tensor.detach() for tensor in tensors)
    op = torch.ops.xent.linear_cross_entropy
    for transform in (grad, lambda f: lambda h: jvp(f, (h,), (h,))):
        with pytest.raises(NotImplementedError, match=r"torch\.ops\.xent\.linear_cross_entropy inside a functorch"):
            transform(lambda h: op(x, h, target))(head)
    found = vmap(lambda x: torch.ops.xent.linear_cross_entropy_forward(x, head, target)[0])(torch.stack([x, 2 * x]))
    wanted = [unfused(value, head, target, reduction="none") for value in (x, 2 * x)]
    torch.testing.assert_close(found, torch.stack(wanted))


# The module


def test_the_module_is_the_function(device):
    weight = torch.rand(9, device=device)
    options = {"ignore_index": 3, "reduction": "sum", "chunk_rows": 4, "accumulate_dtype": torch.float32, **FULL}
    module = xent_ops.LinearCrossEntropyLoss(5, 9, bias=True, class_weight=weight, device=device, **options)
    linear = torch.nn.Linear(5, 9, device=device)
    assert list(module.state_dict()) == list(linear.state_dict()) == ["weight", "bias"]
    assert [p.shape for p in module.parameters()] == [p.shape for p in linear.parameters()]
    module.load_state_dict(linear.state_dict())
    x, target = torch.randn(2, 3, 5, device=device), TARGET.to(device).abs().clamp(max=8).view(2, 3)
    wanted = xent_ops.linear_cross_entropy(
        x, linear.weight, target, linear_bias=linear.bias, weight=weight, divisor=7, **options
    )
    for same in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(same(x, target, divisor=7), wanted)
    assert repr(module) == (
        "LinearCrossEntropyLoss(in_features=5, num_classes=9, bias=True, ignore_index=3, reduction='sum', "
        "label_smoothing=0.1, lse_square_scale=0.1, softcap=5.0, logit_scale=0.5, accumulate_dtype=torch.float32, "
        "chunk_rows=4)"
    )
    assert module.double().class_weight.dtype == torch.float64, "moves with the module"
    torch.manual_seed(0)
    first = xent_ops.LinearCrossEntropyLoss(5, 9, bias=True)
    torch.manual_seed(0)
    assert_all_close(first.parameters(), torch.nn.Linear(5, 9).parameters(), rtol=0, atol=0)


def test_parameters_by_other_means(device):
    """functional_call and a parametrization."""
    module = xent_ops.LinearCrossEntropyLoss(5, 9, bias=True, device=device, dtype=torch.float64)
    x, target = torch.randn(6, 5, device=device, dtype=torch.float64), TARGET.to(device)
    doubled = {name: value.detach() * 2 for name, value in module.named_parameters()}
    wanted = unfused(x, doubled["weight"], target, linear_bias=doubled["bias"])
    torch.testing.assert_close(functional_call(module, doubled, (x, target)), wanted)
    module(x, target).backward()
    plain = {name: value.detach() for name, value in module.named_parameters()}
    leaves = {name: value.requires_grad_() for name, value in plain.items()}
    functional_call(module, leaves, (x, target)).backward()
    assert_all_close((leaf.grad for leaf in leaves.values()), (value.grad for value in module.parameters()))

    class Double(torch.nn.Module):
        def forward(self, weight):
            return weight * 2

    before = module.weight.detach().clone()
    parametrize.register_parametrization(module, "weight", Double())
    torch.testing.assert_close(module(x, target), unfused(x, before * 2, target, linear_bias=module.bias))
    module(x, target).backward()
    assert module.parametrizations.weight.original.grad.shape == (9, 5)


def test_a_tied_module(device):
    embedding = torch.nn.Embedding(9, 5, device=device)
    model = torch.nn.ModuleList([embedding, xent_ops.LinearCrossEntropyLoss(tied_weight=embedding.weight)])
    assert len(list(model.parameters())) == 1
    kept = embedding.weight.detach().clone()
    model[1].reset_parameters()
    assert torch.equal(embedding.weight, kept), "the embedding's to draw"
    for same in (copy.deepcopy(model), model.double(), pickle.loads(pickle.dumps(model))):
        assert same[0].weight is same[1].weight
    x, target = torch.randn(6, 5, device=device, dtype=torch.float64), TARGET.to(device)
    model[1](x, target).backward()
    assert embedding.weight.grad.shape == (9, 5)


@pytest.mark.parametrize("kind", ["to_empty", "meta", "assign", "overwriting"])
def test_a_broken_tie_is_an_error(device, kind):
    """Untied, the head would have a weight that nobody has made, or one that its embedding does not learn."""
    embedding = torch.nn.Embedding(9, 5, device=device)
    model = torch.nn.ModuleList([embedding, xent_ops.LinearCrossEntropyLoss(tied_weight=embedding.weight)])
    x, target = torch.randn(6, 5, device=device), TARGET.to(device)
    if kind == "assign":
        model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
    elif kind == "overwriting":
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        try:
            model.double()
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(False)
        x = x.double()
    else:
        model.to("meta")
        if kind == "to_empty":
            model.to_empty(device=device)
        else:
            x, target = x.to("meta"), target.to("meta")
    with pytest.raises(RuntimeError, match=r"tie it again, head\.weight = embedding\.weight"):
        model[1](x, target)
    model[1].weight = model[0].weight
    assert model[1](x, target).shape == ()


def test_arguments_in_another_order(device):
    x, target = torch.randn(6, 5, device=device), TARGET.to(device)
    with pytest.raises(ValueError, match=r"transposed.*LinearCrossEntropyLoss takes \(H, V\)"):
        xent_ops.LinearCrossEntropyLoss(9, 5, device=device)(x, target)
    module = xent_ops.LinearCrossEntropyLoss(5, 9, device=device)
    with pytest.raises(ValueError, match="Liger-Kernel's is weight, input, target"):
        module(module.weight, x, target)


def test_a_module_on_the_meta_device(device):
    module = xent_ops.LinearCrossEntropyLoss(5, 9, bias=True, device="meta")
    module.to_empty(device=device).reset_parameters()
    assert module(torch.randn(6, 5, device=device), TARGET.to(device)).isfinite()
