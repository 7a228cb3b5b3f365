"""A teacher's top k: its tail, 16 bits, what is compiled, what is refused. Values: tests/fuzz."""

import pytest
import torch
from helpers.graphs import AotEagerAndRecordGraphs, operator_names
from test_several_classes import DTYPES, H, K, N, activated, problem

import xent_ops

top_k = xent_ops.linear_top_k_distillation_loss


@pytest.mark.parametrize("tail", [False, True], ids=["", "tail"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ignored_rows_get_zeros_beside_a_divisor_of_zero(device, dtype, tail):
    x, head, _, ids, probs = problem(device, dtype)
    ignored, zero = (ids == -100).all(-1), torch.zeros((), device=device)
    loss = top_k(x, head, ids, probs, tail=tail, chunk_rows=4, reduction="sum", divisor=zero)
    assert ignored.any() and not loss.isfinite() and not torch.autograd.grad(loss, x)[0][ignored].any()


def test_the_tail(device):
    """Least where the named classes have their probabilities; probabilities above one in all are NaN."""
    x, head, _, ids, _ = problem(device)
    ids = ids[5:]
    with torch.no_grad():
        probs = (x[5:] @ head.t()).softmax(-1).gather(1, ids)
    loss = top_k(x[5:], head, ids, probs, tail=True)
    for grad in torch.autograd.grad(loss, (x, head)):
        assert grad.abs().max() < 1e-12
    truncated = top_k(x[5:], head, ids, probs)
    assert torch.autograd.grad(truncated, x)[0].abs().max() > 1e-3
    assert_more_than_one(lambda: top_k(x[5:], head, ids, probs + 0.5, tail=True), device)


def assert_more_than_one(loss, device):
    """Probabilities that leave no tail: an error on a CPU; elsewhere, and in a compiled step, NaN."""
    if device == "cpu":
        with pytest.raises(ValueError, match=r"probs of a row of ids add up to \d.*; expected at most 1.0.*tail=True"):
            loss()
    else:
        assert loss().isnan()
    assert torch.compile(loss, backend="aot_eager", fullgraph=True)().isnan()


DISTANCES = (-3e4, -150.0, -88.7, -80.0, 80.0, 88.7, 150.0, 3e4)  # of the named classes from the others


@pytest.mark.parametrize("options", [{}, {"softcap": 400.0}, {"logit_scale": -1.0}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_tail_is_right_at_every_distance(device, dtype, options):
    """Neither the named classes nor the others underflow or are clamped; a row of each distance, in three products."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(len(DISTANCES), 32, generator=generator).round()
    x[:, :2] += torch.tensor(DISTANCES).unsqueeze(-1)
    x = (x * options.get("logit_scale", 1.0)).to(device, dtype).requires_grad_()
    ids = torch.tensor([[0, 1]], device=device).expand(len(DISTANCES), 2)
    probs = torch.tensor([[0.5, 0.3]], device=device).expand(len(DISTANCES), 2)
    wanted_x = x.detach().double().requires_grad_()
    log_q = activated(wanted_x, **options).log_softmax(-1)
    wanted = -(log_q[:, :2] * probs.double()).sum(-1) - (1 - probs.double().sum(-1)) * log_q[:, 2:].logsumexp(-1)
    (right,) = torch.autograd.grad(wanted.sum(), wanted_x)
    step = 5e-5 if "softcap" in options else 1e-6  # float32 of 400 tanh(x / 400)
    for reduction in ("none", "sum"):
        how = {"tail": True, "reduction": reduction, **options}
        for loss in (
            top_k(x, torch.eye(32, device=device, dtype=dtype), ids, probs, **how),
            xent_ops.top_k_distillation_loss(x, ids, probs, **how),
        ):
            expected = wanted if reduction == "none" else wanted.sum()
            torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=step)
            (grad,) = torch.autograd.grad(loss.sum(), x)
            far = (grad.double() - right).norm(dim=-1) / right.norm(dim=-1)
            assert far.max() < max(torch.finfo(dtype).eps, 4 * step), far


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_one_class_with_narrow_weights(device, dtype):
    """Probability times weight of a token is not rounded to 16 bits."""
    x, head, _, ids, _ = problem(device, torch.float32)
    probs, weight = (torch.linspace(*ends, N, device=device).to(dtype) for ends in ((0.3, 0.9), (0.5, 1.7)))
    losses = [
        top_k(x, head, ids[:, :1], p.unsqueeze(-1), token_weight=w)
        for p, w in ((probs, weight), (probs.float(), weight.float()))
    ]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rounded_probabilities_add_up_to_more_than_one(device, dtype):
    """A teacher's top k that hold nearly everything, in its dtype."""
    generator = torch.Generator().manual_seed(0)
    x, head = (torch.randn(n, 16, generator=generator).to(device).requires_grad_() for n in (512, 64))
    probs, ids = (8 * torch.randn(512, 64, generator=generator)).softmax(-1).topk(16)
    probs = (probs.to(dtype) / probs.to(dtype).sum(-1, keepdim=True)).to(device)
    if dtype == torch.bfloat16:
        assert probs.double().sum(-1).max() > 1.002
    for reduction in ("mean", "none"):
        loss = top_k(x, head, ids.to(device), probs, tail=True, reduction=reduction)
        assert loss.isfinite().all()
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(loss.sum(), (x, head)))
    over = 1.05 * probs[:1]
    assert_more_than_one(lambda: top_k(x[:1], head, ids[:1].to(device), over, tail=True), device)


@pytest.mark.parametrize("store", ["log_probs", "probs"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_top_k_that_was_stored_in_16_bits(device, store, dtype):
    """Read as float32, some rows add up to more than one by what rounding does: their tail has 0, on every device."""
    generator = torch.Generator().manual_seed(0)
    teacher = torch.stack([spread * torch.randn(512, generator=generator) for spread in (0.0, 1.0, 4.0, 16.0) * 16])
    exact, ids = teacher.double().log_softmax(-1).topk(500)
    exact, ids = exact.to(device), ids.to(device)
    stored = exact.to(dtype).float().exp() if store == "log_probs" else exact.exp().to(dtype).float()
    if dtype == torch.bfloat16:
        assert stored.double().sum(-1).max() > 1.0012
    x, head = (torch.randn(n, 16, generator=generator).to(device).requires_grad_() for n in (64, 512))

    def step(x, head, probs):
        return top_k(x, head, ids, probs, tail=True)

    wanted = step(x, head, exact.exp())
    right = torch.autograd.grad(wanted, (x, head))
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        loss = function(x, head, stored)
        torch.testing.assert_close(loss, wanted, rtol=5e-3, atol=0.0)
        for grad, other in zip(torch.autograd.grad(loss, (x, head)), right, strict=True):
            assert (grad - other).norm() < 0.02 * other.norm()


@pytest.mark.parametrize("total", [1.02, 1.2, 2.0])
def test_more_than_rounding_explains(device, total):
    """The named error, eager; NaN in compiled steps and on GPUs. One class has no entropy, 64 equal ones 4.2 nats."""
    x, head = torch.randn(2, 16, device=device, requires_grad=True), torch.randn(80, 16, device=device)
    for places in (1, 64):
        ids = torch.arange(places, device=device).expand(2, places)
        probs = torch.full((2, places), total / places, device=device)
        if places == 64 and total == 1.02:
            assert top_k(x, head, ids, probs, tail=True).isfinite()
        else:
            assert_more_than_one(lambda: top_k(x, head, ids, probs, tail=True), device)  # noqa: B023


@pytest.mark.parametrize("places", [1, 4])
def test_log_probabilities_are_refused(device, places):
    """In words on a CPU; elsewhere, and in a compiled step, they give NaN."""
    x, head, _, ids, probs = problem(device, torch.float32)
    ids, wrong = ids[:, :places], (probs + 0.1)[:, :places].log()

    def loss(tail=False):
        return top_k(x, head, ids, wrong, tail=tail)

    for tail in (False, True):
        if device == "cpu":
            with pytest.raises(ValueError, match=r"probs has -\d.* pass probs.exp\(\) of log-prob"):
                loss(tail)
        else:
            assert loss(tail).isnan()
        assert torch.compile(loss, backend="aot_eager", fullgraph=True)(tail).isnan()


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}], ids=["", "softcap"])
def test_every_class_is_named(device, options):
    """Of probabilities that leave something, as rounding does: finite, and the tail passes nothing back."""
    x, head = torch.randn(3, H, device=device, requires_grad=True), torch.randn(K, H, device=device, requires_grad=True)
    ids, probs = torch.arange(K, device=device).expand(3, K), torch.full((3, K), 0.249, device=device)
    for reduction in ("mean", "none"):
        losses = [top_k(x, head, ids, probs, tail=tail, reduction=reduction, **options) for tail in (True, False)]
        assert losses[0].isfinite().all()
        torch.testing.assert_close(*(torch.autograd.grad(loss.sum(), (x, head)) for loss in losses))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled(device, backend):
    """A teacher's top k with its tail, the tenth published loss: one graph, the numbers of eager, three products."""
    x, head, _, ids, probs = problem(device, torch.float32)

    def step(x, head, ids, probs):
        return top_k(x.sin(), head, ids, probs, tail=True, chunk_rows=5)

    compiled = torch.compile(step, fullgraph=True, backend=backend, dynamic=False)
    losses = compiled(x, head, ids, probs), step(x, head, ids, probs)
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(loss, (x, head)) for loss in losses))


@pytest.mark.parametrize("tail", [False, True], ids=["", "tail"])
def test_the_graph(device, tail):
    """The open loop; the backward has no product."""
    x, head, _, ids, probs = problem(device, torch.float32)
    graphs = AotEagerAndRecordGraphs()

    def step(x, head):
        return top_k(x, head, ids, probs, tail=tail)

    torch.compile(step, fullgraph=True, backend=graphs)(x, head).backward()
    names = [name for gm in graphs.fw_graphs + graphs.bw_graphs for name in operator_names(gm)]
    ours = [name.removeprefix("xent.").removesuffix(".default") for name in names if name.startswith("xent.")]
    chunk = ["linear_logits", *(["cross_entropy_forward"] if tail else ["ids_forward", "cross_entropy_forward"])]
    forward = ["row_targets", *chunk, "top_k_distillation", "linear_grad_input", "attach_gradients"]
    assert ours == forward + ["linear_scale_grad"] * 2, ours
    assert not any("mm" in name for name in names)


def test_errors(device):
    x, head, _, ids, probs = problem(device, torch.float32)
    divisor = torch.ones((), device=device, requires_grad=True)
    for error, text, *tensors, options in (
        (ValueError, r"probs has shape \(9, 3\); expected \(9, 4\), a probability", ids, probs[:, :3], {}),
        (RuntimeError, "probs requires grad", ids, probs.clone().requires_grad_(), {}),
        (TypeError, "ids has dtype torch.float32; expected one of int64", probs.float(), ids, {}),
        (TypeError, "probs must be a torch.Tensor", ids, 0.5, {}),
        (TypeError, "tail must be", ids, probs, {"tail": "yes"}),
        (ValueError, r"ids has shape \(9,\); expected 2 dimensions, \(..., K\)", ids[:, 0], probs[:, 0], {}),
        (ValueError, r"ids has shape \(9, 0\): no class a row", ids[:, :0], probs[:, :0], {}),
        (ValueError, "num_items_in_batch is 0 where all", ids, probs, {"reduction": "sum", "divisor": 0}),
        (ValueError, r"token_weight has shape \(8,\)", ids, probs, {"token_weight": torch.ones(8, device=device)}),
        *((RuntimeError, "divisor requires grad", ids, probs, {"reduction": "sum", "divisor": divisor, "tail": tail})
          for tail in (False, True)),
    ):  # fmt: skip
        with pytest.raises(error, match=text):
            top_k(x, head, *tensors, **options)
        if text != "divisor requires grad":
            with pytest.raises(error, match=text):
                xent_ops.top_k_distillation_loss(x @ head.t(), *tensors, **options)


def test_other_losses_name_the_function(device):
    """target_probs and tail were arguments of linear_cross_entropy once."""
    x, head, _, ids, probs = problem(device, torch.float32)
    module = xent_ops.LinearCrossEntropyLoss(tied_weight=torch.nn.Parameter(head))
    for name, call in (
        ("linear_top_k_distillation_loss", lambda **old: xent_ops.linear_cross_entropy(x, head, ids, **old)),
        ("linear_top_k_distillation_loss", lambda **old: module(x, ids, **old)),
        ("top_k_distillation_loss", lambda **old: xent_ops.cross_entropy(x, ids, **old)),
    ):
        for old in ({"target_probs": probs}, {"tail": True}):
            with pytest.raises(TypeError, match=rf"unexpected keyword argument '{next(iter(old))}'; use .*{name}"):
                call(**old)
    with pytest.raises(TypeError, match="'target_probs'; pass probs="):
        top_k(x, head, ids, target_probs=probs)
    with pytest.raises(TypeError, match="'target'; pass ids="):
        top_k(x, head, probs=probs, target=ids)
    with pytest.raises(ValueError, match=r"fn returned shape \(2, \d+\) for 2 tokens; .*add up over its K classes"):
        xent_ops.linear_token_loss(x, head, ids, lambda stats: -stats.log_probs)
