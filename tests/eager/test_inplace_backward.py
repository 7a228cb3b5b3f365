"""inplace_backward: the gradient lies where the logits were, and what would be corrupted is refused."""

import pytest
import torch
import torch.nn.functional as F

import xent_ops

IN_PLACE = {"in place": {"inplace_backward": True}}
IN_PLACE["one pass in place"] = IN_PLACE["in place"] | {"grad_in_forward": True}


@pytest.mark.parametrize("shape", [(4, 30), (2, 3, 30)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_inplace_backward(device, shape, reduction):
    """The gradient lies in the logits' storage, and equals the functional one."""
    h = torch.randn(shape, device=device, requires_grad=True)
    target = torch.randint(0, 30, shape[:-1], device=device)
    target.flatten()[1] = -100
    options = {"reduction": reduction, "label_smoothing": 0.1, "lse_square_scale": 0.1, "softcap": 5.0, "dim": -1}
    wanted = torch.autograd.grad(xent_ops.cross_entropy(h * 2, target, **options).sum(), h)[0]
    logits = h * 2
    version, seen = logits._version, []
    logits.register_hook(lambda g: seen.append(g.data_ptr()))
    xent_ops.cross_entropy(logits, target, inplace_backward=True, **options).sum().backward()
    torch.testing.assert_close(h.grad, wanted)
    assert seen == [logits.data_ptr()] and logits._version > version


@pytest.mark.parametrize("options", IN_PLACE.values(), ids=IN_PLACE)
@pytest.mark.parametrize(
    "view",
    [lambda x: x.view(-1, 30), lambda x: x[:, :-1], lambda x: x[..., 3:], lambda x: x.transpose(0, 1)],
    ids=["a batch flattened", "rows shifted", "some classes", "transposed"],
)
def test_views_of_what_a_layer_returned(device, view, options):
    h, w = torch.randn(2, 4, 8, device=device, requires_grad=True), torch.randn(8, 30, device=device)
    target = torch.randint(0, 27, view(h @ w).shape[:-1], device=device)
    (wanted,) = torch.autograd.grad(xent_ops.cross_entropy(view(h @ w), target, dim=-1), h)
    (found,) = torch.autograd.grad(xent_ops.cross_entropy(view(h @ w), target, dim=-1, **options), h)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("options", IN_PLACE.values(), ids=IN_PLACE)
def test_what_would_be_corrupted_is_refused(device, options):
    target = torch.randint(0, 30, (4,), device=device)
    h = torch.randn(4, 30, device=device, requires_grad=True)
    modified = "modified by an inplace operation"

    def loss(logits):
        return xent_ops.cross_entropy(logits, target, **options)

    with pytest.raises(RuntimeError, match="would overwrite a leaf tensor"):
        loss(h)
    twice = loss(h * 2)
    twice.backward(retain_graph=True)
    given_away = "a second backward through a loss with grad_in_forward=True"
    with pytest.raises(RuntimeError, match=given_away if "grad_in_forward" in options else modified):
        twice.backward()
    with pytest.raises(RuntimeError, match=modified):
        loss(h.exp()).backward()  # exp saved its output, which are the logits
    logits = h * 2
    written = loss(logits)
    with torch.no_grad():
        logits.zero_()
    with pytest.raises(RuntimeError, match=modified):
        written.backward()
    with pytest.raises(RuntimeError, match="leaves nothing to differentiate a second time"):
        torch.autograd.grad(loss(h * 2), h, create_graph=True)
    for logits in ((h[:1] * 2).expand(4, 30), (h * 2).view(-1).unfold(0, 30, 20)[:4]):
        with pytest.raises(RuntimeError, match="share memory between their rows"):
            loss(logits)
    for option in options:
        with pytest.raises(ValueError, match=f"{option}=True takes class indices, not class probabilities"):
            xent_ops.cross_entropy(h * 2, h.detach().softmax(-1), **{option: True})
    with torch.no_grad():
        kept = h.detach().clone()
        loss(kept)
        assert torch.equal(kept, h)


@pytest.mark.parametrize("options", IN_PLACE.values(), ids=IN_PLACE)
@pytest.mark.parametrize(
    "shape, view",
    [((2, 2, 30), lambda x: x.flatten(0, 1)), ((4, 30), lambda x: x[:, :]), ((4, 30, 1), lambda x: x)],
    ids=["flat", "all", "classes in the middle"],
)
def test_views_of_a_leaf_are_not_overwritten(device, shape, view, options):
    parameter = torch.nn.Parameter(torch.randn(shape, device=device))
    kept = parameter.detach().clone()
    logits = view(parameter)
    target = torch.zeros(logits.shape[:1] + logits.shape[2:], dtype=torch.int64, device=device)
    with pytest.raises(RuntimeError, match="or a view of it, with its own gradient"):
        xent_ops.cross_entropy(logits, target, **options)
    assert torch.equal(parameter, kept)


@pytest.mark.parametrize("options", IN_PLACE.values(), ids=IN_PLACE)
def test_leaves_that_are_views_are_not_overwritten(device, options):
    logits = torch.randn(6, 30, device=device)[:4].requires_grad_()
    with pytest.raises(RuntimeError, match="would overwrite a leaf tensor"):
        xent_ops.cross_entropy(logits, torch.zeros(4, dtype=torch.int64, device=device), **options)


@pytest.mark.parametrize("options", IN_PLACE.values(), ids=IN_PLACE)
@pytest.mark.parametrize("producer", [torch.exp, torch.tanh, lambda x: x * 1.0], ids=["exp", "tanh", "product"])
def test_in_place_below_saved_tensor_hooks(device, producer, options):
    """Where autograd does not look at versions, nothing that it may still need is overwritten."""
    h = torch.randn(4, 30, device=device, requires_grad=True)
    target = torch.tensor([1, 2, -100, 29], device=device)

    def loss(h):
        return xent_ops.cross_entropy(producer(h), target, **options)

    (wanted,) = torch.autograd.grad(torch.nn.functional.cross_entropy(producer(h), target), h)
    checkpointed = torch.utils.checkpoint.checkpoint(loss, h, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(checkpointed, h)[0], wanted)
    for hooks in (
        torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
        torch.autograd.graph.save_on_cpu(),
    ):
        with hooks:
            hooked = loss(h)
        torch.testing.assert_close(torch.autograd.grad(hooked, h, retain_graph=True)[0], wanted)
        if "grad_in_forward" not in options:  # which gives its gradient once
            torch.testing.assert_close(torch.autograd.grad(hooked, h)[0], wanted)


@pytest.mark.parametrize("options", IN_PLACE.values(), ids=IN_PLACE)
def test_ignored_under_compile_and_transforms(h, target, options):
    (wanted,) = torch.autograd.grad(xent_ops.cross_entropy(h * 2, target), h)

    def step(h):
        return xent_ops.cross_entropy(h * 2, target, **options)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(h), h)[0], wanted)
    torch.testing.assert_close(torch.func.grad(step)(h.detach()), wanted)


def test_transposed_logits_are_not_copied(device):
    """(B, S, V) as the idiom hands it over, transposed to (B, V, S): the gradient can lie where the logits were."""
    leaf = torch.randn(2, 6, 9, device=device, requires_grad=True)
    target = torch.randint(0, 9, (2, 5), device=device)
    wanted = F.cross_entropy(leaf[:, :-1].transpose(1, 2), target)
    (wanted_grad,) = torch.autograd.grad(wanted, leaf)
    logits, places = (leaf * 1)[:, :-1], []
    logits.register_hook(lambda grad: places.append(grad.data_ptr()))
    loss = xent_ops.cross_entropy(logits.transpose(1, 2), target, inplace_backward=True)
    torch.testing.assert_close(loss, wanted)
    loss.backward()
    torch.testing.assert_close(leaf.grad, wanted_grad)
    assert places == [logits.data_ptr()]


@pytest.mark.interpreter
@pytest.mark.parametrize("grad_in_forward", [False, True])
def test_in_place_of_lazily_negative_logits(h, target, grad_in_forward):
    """The memory holds other numbers than the tensor: the gradient gets memory of its own."""

    def loss(**options):
        return xent_ops.cross_entropy(torch._neg_view(h * 2), target, **options)

    wanted = torch.autograd.grad(loss(), h)[0]
    got = torch.autograd.grad(loss(inplace_backward=True, grad_in_forward=grad_in_forward), h)[0]
    torch.testing.assert_close(got, wanted)
