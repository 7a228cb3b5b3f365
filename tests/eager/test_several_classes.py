"""Several classes a row: their log-probabilities, and cross entropy with probabilities of a few classes."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers.covering import covering
from helpers.graphs import AotEagerAndRecordGraphs, operator_names

import xent_ops
from xent_ops.kernels import reference_ids

N, H, V, K = 9, 5, 13, 4
OPTIONS = {"plain": {}, "softcap": {"softcap": 3.0, "logit_scale": 0.7}, "negative": {"logit_scale": -1.5}}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
CLOSE = {
    torch.float64: {},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 0.05, "atol": 0.05},
    torch.float16: {"rtol": 0.01, "atol": 0.01},
}


def problem(device, dtype=torch.float64):
    """input, head, bias, ids: with a tie, ignored places, a row with one place left and a row without."""
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((N, H), (V, H), (V,))]
    ids = torch.rand(N, V, generator=generator).topk(K).indices
    ids[0, 1], ids[2], ids[3, 1:], ids[4, 0] = ids[0, 0], -100, -100, -100
    leaves = [tensor.to(device, dtype).requires_grad_() for tensor in tensors]
    return *leaves, ids.to(device), (torch.rand(N, K, generator=generator, dtype=torch.float64) / K).to(device)


def activated(logits, softcap=None, logit_scale=1.0):
    z = logits * logit_scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def expected(x, head, bias, ids, **options):
    """TokenLogProbs in float64, from all logits."""
    z = activated(F.linear(x.double(), head.double(), bias.double()), **options)
    lse, counted = z.logsumexp(-1), ids != -100
    log_probs = torch.where(counted, z.gather(-1, ids.clamp(min=0)) - lse.unsqueeze(-1), 0.0)
    log_p = z - lse.unsqueeze(-1)
    return log_probs, torch.where(counted.any(-1), -(log_p.exp() * log_p).sum(-1), 0.0), lse


def weighted(stats, ids, factors):
    """A sum of everything that is counted, which no row leaves out."""
    log_probs, entropy, lse = stats
    counted = (ids != -100).any(-1)
    of_lse = torch.where(counted, lse, 0.0)
    return (log_probs.double() * factors[0]).sum() + (entropy * factors[1]).sum() + (of_lse * factors[2]).sum()


def factors_of(device):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(device) for shape in ((N, K), (N,), (N,))]


def function(stats, a, b, c):
    return (stats.log_probs * a).sum(-1) + stats.entropy * b + stats.lse * c


@pytest.mark.parametrize("dtype, name, skip_ignored", covering(DTYPES, OPTIONS, [False, True]), ids=str)
def test_log_probs(device, dtype, name, skip_ignored):
    """Of a head and of given logits; with any upstream gradients, and as a function of tokens in three products."""
    x, head, bias, ids, _ = problem(device, dtype)
    options, factors, leaves = OPTIONS[name], factors_of(device), (x, head, bias)
    theirs = expected(*leaves, ids, **options)
    total = weighted(theirs, ids, factors)
    wanted = [grad.double() for grad in torch.autograd.grad(total, leaves)]
    how = {"linear_bias": bias, "chunk_rows": 4, "skip_ignored": skip_ignored, **options}
    made = xent_ops.linear_token_log_probs(x, head, ids, **how)
    assert made.log_probs.shape == ids.shape and made.entropy.shape == made.lse.shape == (N,)
    assert made.log_probs.dtype == made.lse.dtype == (dtype if dtype == torch.float64 else torch.float32)
    assert not made.log_probs[ids == -100].any()
    logits = F.linear(x, head, bias)
    rows = tuple(factors)
    of_function = xent_ops.linear_token_loss(x, head, ids, function, rows=rows, check=True, reduction="sum", **how)
    totals = {
        "linear_token_log_probs": weighted(made, ids, factors),
        "linear_token_loss": of_function,
        "token_log_probs": weighted(xent_ops.token_log_probs(logits, ids, **options), ids, factors),
        "token_loss": xent_ops.token_loss(
            F.linear(x, head, bias), ids, function, rows=rows, check=True, reduction="sum", **options
        ),
    }
    for way, value in totals.items():
        grads = [grad.double() for grad in torch.autograd.grad(value, leaves)]
        for got, correct in zip((value.double(), *grads), (total, *wanted), strict=True):
            size = max(correct.abs().max().item(), 1.0)
            torch.testing.assert_close(
                got / size, correct / size, **CLOSE[dtype], msg=lambda text, w=way: f"{w}: {text}"
            )
    with torch.no_grad():
        value = xent_ops.linear_token_loss(x, head, ids, function, rows=rows, reduction="sum", **how)
        torch.testing.assert_close(value, of_function, **CLOSE[dtype])


def test_gradcheck(device):
    x, head, bias, ids, _ = problem(device)

    def log_probs(*leaves):
        made = xent_ops.linear_token_log_probs(*leaves[:2], ids, linear_bias=leaves[2], chunk_rows=4, softcap=4.0)
        return made.log_probs, made.entropy, made.lse

    def of_logits(x, head, bias):
        made = xent_ops.token_log_probs(F.linear(x, head, bias), ids, softcap=4.0)
        return made.log_probs, made.entropy, made.lse

    assert torch.autograd.gradcheck(log_probs, (x, head, bias)) and torch.autograd.gradcheck(of_logits, (x, head, bias))
    total = xent_ops.token_log_probs(F.linear(x, head, bias), ids).log_probs.sum()
    (grad,) = torch.autograd.grad(total, x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"of several classes a row, .* has no second derivative"):
        grad.sum().backward()


def test_columns_of_ids_are_exact(device):
    """p - y of a confident row is made before it is rounded: 16 bits of p, less one, would leave nothing."""
    logits = torch.zeros(2, 6, device=device, dtype=torch.bfloat16)
    logits[:, 0] = 12.0
    ids = torch.tensor([[0, 3], [0, 0]], device=device)
    probs = torch.tensor([[1.0, 0.0], [0.5, 0.5]], device=device)
    leaf = logits.clone().requires_grad_()
    (-(xent_ops.token_log_probs(leaf, ids).log_probs * probs).sum()).backward()
    wanted = logits.double().softmax(-1)
    wanted[:, 0] -= 1
    torch.testing.assert_close(leaf.grad.double(), wanted, rtol=0.01, atol=0)


def test_equal_ids_and_bits(device):
    """A class named twice gets both gradients, and the same bits in every run."""
    x, head, *_ = problem(device, torch.float32)
    ids = torch.randint(0, 3, (N, 40), device=device)
    factor = torch.randn(N, 40, device=device)
    grads = []
    for _ in range(3):
        value = (xent_ops.linear_token_log_probs(x, head, ids).log_probs * factor).sum()
        grads.append(torch.autograd.grad(value, (x, head)))
    for again in grads[1:]:
        assert all(map(torch.equal, again, grads[0]))
    log_q = (x @ head.t()).double().log_softmax(-1)
    wanted = torch.autograd.grad((log_q.gather(1, ids) * factor).sum(), (x, head))
    torch.testing.assert_close(grads[0], wanted, rtol=1e-4, atol=1e-4)


def test_more_pairs_than_are_compared_at_a_time(device, monkeypatch):
    monkeypatch.setattr(reference_ids, "_PAIRS", 7)
    test_equal_ids_and_bits(device)


def test_masked_classes(device):
    """A class of -inf has log-probability -inf, passes nothing on, and counts for nothing where its probability is 0."""
    logits = torch.randn(3, 6, device=device, dtype=torch.float64)
    logits[:, 2] = -math.inf
    logits.requires_grad_()
    ids = torch.tensor([[0, 2], [2, 1], [5, 4]], device=device)
    made = xent_ops.token_log_probs(logits, ids)
    assert made.log_probs[0, 1] == made.log_probs[1, 0] == -math.inf
    (grad,) = torch.autograd.grad(made.log_probs[:, 1].exp().sum(), logits)
    assert grad.isfinite().all() and not grad[:, 2].any()


def soft_expected(x, head, ids, probs, tail, z, reduction, token_weight=None):
    logits = (x @ head.t()).double()
    log_q, lse, counted = logits.log_softmax(-1), logits.logsumexp(-1), ids != -100
    dense = torch.zeros_like(logits).scatter_add(1, ids.clamp(min=0), torch.where(counted, probs.double(), 0.0))
    named = torch.zeros_like(logits, dtype=torch.int64).scatter_add(1, ids.clamp(min=0), counted.long()) > 0
    loss = -(dense * log_q).sum(-1) + z * lse.square()
    if tail:
        loss = loss - (1 - dense.sum(-1)) * torch.where(named, 0.0, log_q.exp()).sum(-1).log()
    rows = counted.any(-1)
    weight = rows.double() if token_weight is None else torch.where(rows, token_weight.double(), 0.0)
    loss = torch.where(rows, loss, 0.0) * weight
    return loss if reduction == "none" else loss.sum() / (weight.sum() if reduction == "mean" else 1.0)


@pytest.mark.parametrize(
    "reduction, tail, z, weighted, skip_ignored",
    covering(["mean", "sum", "none"], [False, True], [0.0, 0.1], [False, True], [False, True]),
    ids=str,
)
def test_target_probs(device, tail, z, reduction, weighted, skip_ignored):
    x, head, _, ids, probs = problem(device)
    token_weight = factors_of(device)[1] if weighted else None
    wanted = soft_expected(x, head, ids, probs, tail, z, reduction, token_weight)
    how = {"reduction": reduction, "lse_square_scale": z, "token_weight": token_weight, "skip_ignored": skip_ignored}
    loss = xent_ops.linear_cross_entropy(x, head, ids, target_probs=probs, tail=tail, chunk_rows=4, **how)
    torch.testing.assert_close(loss, wanted)
    grads = (torch.autograd.grad(value.sum(), (x, head)) for value in (loss, wanted))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_one_class_with_probability_one_has_the_bits_of_class_indices(device, reduction, dtype):
    x, head, bias, ids, _ = problem(device, dtype)
    ids = ids[:, :1]
    values = [
        xent_ops.linear_cross_entropy(x, head, target, linear_bias=bias, reduction=reduction, chunk_rows=4, **more)
        for target, more in ((ids[:, 0], {}), (ids, {"target_probs": torch.ones(N, 1, device=device)}))
    ]
    assert torch.equal(*values)
    grads = [torch.autograd.grad(value.sum(), (x, head, bias)) for value in values]
    assert all(map(torch.equal, *grads))


def test_the_tail(device):
    """Least where the named classes have their probabilities; probabilities above one in all are NaN."""
    x, head, _, ids, _ = problem(device)
    ids = ids[5:]
    with torch.no_grad():
        probs = (x[5:] @ head.t()).softmax(-1).gather(1, ids)
    loss = xent_ops.linear_cross_entropy(x[5:], head, ids, target_probs=probs, tail=True)
    for grad in torch.autograd.grad(loss, (x, head)):
        assert grad.abs().max() < 1e-12
    truncated = xent_ops.linear_cross_entropy(x[5:], head, ids, target_probs=probs)
    assert torch.autograd.grad(truncated, x)[0].abs().max() > 1e-3
    over = xent_ops.linear_cross_entropy(x[5:], head, ids, target_probs=probs + 0.5, tail=True)
    assert over.isnan()


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
        loss = xent_ops.linear_cross_entropy(
            x, head, ids.to(device), target_probs=probs, tail=True, reduction=reduction
        )
        assert loss.isfinite().all()
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(loss.sum(), (x, head)))
    over = 1 + 2 * max(torch.finfo(dtype).eps, 1e-3)
    loss = xent_ops.linear_cross_entropy(x[:1], head, ids[:1].to(device), target_probs=over * probs[:1], tail=True)
    assert loss.isnan()


@pytest.mark.parametrize("places", [1, 4])
def test_log_probabilities_are_refused(device, places):
    """In words on a CPU; elsewhere, and in a compiled step, they give NaN."""
    x, head, _, ids, probs = problem(device, torch.float32)
    ids, wrong = ids[:, :places], (probs + 0.1)[:, :places].log()

    def loss(tail=False):
        return xent_ops.linear_cross_entropy(x, head, ids, target_probs=wrong, tail=tail)

    for tail in (False, True):
        if device == "cpu":
            with pytest.raises(ValueError, match=r"target_probs has -\d.* pass target_probs.exp\(\) of log-prob"):
                loss(tail)
        else:
            assert loss(tail).isnan()
        assert torch.compile(loss, backend="aot_eager", fullgraph=True)(tail).isnan()


@pytest.mark.parametrize(
    "name, probability, reduction", covering(OPTIONS, [1e-4, 1e-7, 1e-12, 1e-30], ["mean", "none"]), ids=str
)
def test_the_tail_keeps_its_digits(device, name, probability, reduction):
    """However little the student gives to the other classes. Logits are exact: the head is an identity."""
    options, factor = OPTIONS[name], {"plain": 1.0, "softcap": 1 / 0.7, "negative": -1 / 1.5}[name]
    if name == "softcap":
        options = {"softcap": 60.0, "logit_scale": 0.7}
    _, _, _, ids, probs = problem(device, torch.float32)
    z = torch.randn(N, V, generator=torch.Generator().manual_seed(3)).to(device)
    named = torch.zeros(N, V, dtype=torch.bool, device=device).scatter(1, ids.clamp(min=0), ids != -100)
    x = (factor * torch.where(named, z - math.log(probability), z)).requires_grad_()
    head = torch.eye(V, device=device).requires_grad_()
    exact = x.double().detach().requires_grad_()
    log_q = activated(exact, **options).log_softmax(-1)
    dense = torch.zeros_like(log_q).scatter_add(1, ids.clamp(min=0), torch.where(ids == -100, 0.0, probs.double()))
    left = 1 - dense.sum(-1)
    log_tail = torch.where(named, -math.inf, log_q).logsumexp(-1)
    assert probability < 1e-10 or (log_tail[ids[:, 0] != -100] < math.log(100 * probability)).all()
    rows = -(dense * log_q).sum(-1) - left * log_tail
    wanted = torch.where((ids == -100).all(-1), 0.0, rows)
    how = {"target_probs": probs, "tail": True, "reduction": reduction, "chunk_rows": 4, **options}
    made = xent_ops.linear_cross_entropy(x, head, ids, **how)
    if reduction == "mean":
        wanted = wanted.sum() / (ids != -100).any(-1).sum()
    torch.testing.assert_close(made.double(), wanted, rtol=1e-5, atol=0)
    grads = (torch.autograd.grad(value.sum(), leaf)[0].double() for value, leaf in ((made, x), (wanted, exact)))
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}], ids=["", "softcap"])
def test_every_class_is_named(device, options):
    """Of probabilities that leave something, as rounding does: finite, and the tail passes nothing back."""
    x, head = torch.randn(3, H, device=device, requires_grad=True), torch.randn(K, H, device=device, requires_grad=True)
    ids, probs = torch.arange(K, device=device).expand(3, K), torch.full((3, K), 0.249, device=device)
    for reduction in ("mean", "none"):
        losses = [
            xent_ops.linear_cross_entropy(x, head, ids, target_probs=probs, tail=tail, reduction=reduction, **options)
            for tail in (True, False)
        ]
        assert losses[0].isfinite().all()
        torch.testing.assert_close(*(torch.autograd.grad(loss.sum(), (x, head)) for loss in losses))


def test_nearly_everything_is_named(device):
    """The probability of the rest is below float32's step at one: no infinity, no NaN."""
    x, head = torch.tensor([[30.0]], device=device, requires_grad=True), torch.tensor([[1.0], [0.0]], device=device)
    head.requires_grad_()
    loss = xent_ops.linear_cross_entropy(
        x, head, torch.tensor([[0]], device=device), target_probs=torch.tensor([[0.9]], device=device), tail=True
    )
    assert loss.isfinite() and all(grad.isfinite().all() for grad in torch.autograd.grad(loss, (x, head)))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled(device, backend):
    """A teacher's top k with its tail, the tenth published loss: one graph, the numbers of eager, three products."""
    x, head, _, ids, probs = problem(device, torch.float32)

    def step(x, head, ids, probs):
        return xent_ops.linear_cross_entropy(x.sin(), head, ids, target_probs=probs, tail=True, chunk_rows=5)

    compiled = torch.compile(step, fullgraph=True, backend=backend, dynamic=False)
    losses = compiled(x, head, ids, probs), step(x, head, ids, probs)
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(loss, (x, head)) for loss in losses))


@pytest.mark.parametrize("tail", [False, True], ids=["", "tail"])
def test_the_graph(device, tail):
    """One visit where the derivatives are known before the statistics; the backward has no product."""
    x, head, _, ids, probs = problem(device, torch.float32)
    graphs = AotEagerAndRecordGraphs()

    def step(x, head):
        return xent_ops.linear_cross_entropy(x, head, ids, target_probs=probs, tail=tail)

    torch.compile(step, fullgraph=True, backend=graphs)(x, head).backward()
    names = [name for gm in graphs.fw_graphs + graphs.bw_graphs for name in operator_names(gm)]
    ours = [name.removeprefix("xent.").removesuffix(".default") for name in names if name.startswith("xent.")]
    first = "linear_cross_entropy_chunk" if tail else "linear_token_logits_with_grad"
    assert ours == [first, "attach_gradients"] + ["linear_scale_grad"] * 2
    assert not any("mm" in name for name in names)


def test_errors(device):
    x, head, _, ids, probs = problem(device, torch.float32)
    call, one, divisor = xent_ops.linear_cross_entropy, ids[:, 0], torch.ones((), device=device, requires_grad=True)
    several = {"target_probs": probs}
    for error, text, target, options in (
        (ValueError, r"target_probs has shape \(9, 3\); expected \(9, 4\), a probability", ids, {"target_probs": probs[:, :3]}),
        (RuntimeError, "target_probs requires grad", ids, {"target_probs": probs.clone().requires_grad_()}),
        (ValueError, "weight is for one target a row: multiply target_probs", ids, several | {"weight": torch.ones(V, device=device)}),
        (ValueError, "label_smoothing is for one target a row: smooth target_probs", ids, several | {"label_smoothing": 0.1}),
        (TypeError, "with target_probs it holds class indices", probs, several),
        (TypeError, "target_probs must be a torch.Tensor", ids, {"target_probs": 0.5}),
        (TypeError, "tail must be", ids, several | {"tail": "yes"}),
        (ValueError, r"target has shape \(9,\); with target_probs it has 2 dimensions", one, {"target_probs": probs[:, 0]}),
        (ValueError, r"target has shape \(9, 0\): no class a row", ids[:, :0], {"target_probs": probs[:, :0]}),
        (ValueError, "num_items_in_batch is 0 where all labels of a step are ignored", one, {"reduction": "sum", "divisor": 0}),
        (ValueError, "tail=True is for target_probs", one, {"tail": True}),
        *((RuntimeError, "divisor requires grad", ids, several | {"reduction": "sum", "divisor": divisor, "tail": tail}) for tail in (False, True)),
    ):  # fmt: skip
        with pytest.raises(error, match=text):
            call(x, head, target, **options)
    for text, refused in (
        ("no class a row", lambda: xent_ops.linear_token_log_probs(x, head, ids[:, :0])),
        (r"ids has shape \(8, 4\); expected \(9, 4\), K classes", lambda: xent_ops.linear_token_log_probs(x, head, ids[:8])),
        ("label_smoothing is for one target", lambda: torch.ops.xent.token_logits(x @ head.t(), ids, label_smoothing=0.1)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            refused()


def test_ids_out_of_range(device):
    """An IndexError on a CPU; on a GPU NaN in their rows, in the loss and in the gradient."""
    x, head, _, ids, _ = problem(device, torch.float32)
    ids[1, 2] = V
    if device == "cpu":
        for call in (
            lambda: xent_ops.linear_token_log_probs(x, head, ids),
            lambda: xent_ops.token_log_probs(x @ head.t(), ids),
            lambda: xent_ops.linear_token_loss(x, head, ids, lambda stats: stats.log_probs.sum(-1), reduction="sum"),
        ):
            with pytest.raises(IndexError, match="target 13 is out of bounds: valid are 0 to 12"):
                call()
        return
    for value in (
        xent_ops.linear_token_log_probs(x, head, ids).log_probs.sum(-1),
        xent_ops.token_log_probs(x @ head.t(), ids).log_probs.sum(-1),
    ):
        assert value[1].isnan() and value.isnan().sum() == 1
        grad = torch.autograd.grad(value.sum(), x)[0]
        assert grad[1].isnan().all() and grad.isnan().any(-1).sum() == 1
    assert xent_ops.linear_token_loss(x, head, ids, lambda stats: stats.log_probs.sum(-1), reduction="sum").isnan()


def test_of_dtensors_is_refused(device):
    x, head, _, ids, probs = problem(device, torch.float32)

    class LikeDTensor(torch.Tensor):
        device_mesh = None

    x = x.detach().as_subclass(LikeDTensor)
    with pytest.raises(NotImplementedError, match=r"xent_ops.linear_cross_entropy with target_probs of DTensors"):
        xent_ops.linear_cross_entropy(x, head, ids, target_probs=probs)
    with pytest.raises(NotImplementedError, match="linear_token_loss of DTensors takes one class a row"):
        xent_ops.linear_token_loss(x, head, ids, lambda stats: stats.log_probs.sum(-1), reduction="sum")
