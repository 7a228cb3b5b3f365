"""batch_invariant=True: a row's bits are the same alone, beside other rows, in another place, and in other numbers."""

import pytest
import torch
from helpers.heads import random_head
from torch.nn import functional as F

import xent_ops
from xent_ops.head.packing import PaddedRows
from xent_ops.kernels import cpu

HIDDEN, CLASSES = 64, 1003
NUMBERS = (1, 7, 100)  # of rows; with those of a chunk, and one more
FORMS = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "bfloat16, float32 logits": (torch.bfloat16, torch.float32),
    "float16": (torch.float16, None),
    "float16, float32 logits": (torch.float16, torch.float32),
}
both_forms = pytest.mark.parametrize("form", FORMS)


@pytest.fixture(params=["kernels", "plain torch"])
def kernels(request, device, monkeypatch):
    """On the CPU also without the C++ kernels."""
    if request.param == "plain torch":
        if device != "cpu":
            pytest.skip("plain torch takes the place of the C++ kernels on a CPU only")
        monkeypatch.setattr(cpu, "kernel", lambda name: None)
        threads = torch.get_num_threads()
        torch.set_num_threads(2)
        yield
        torch.set_num_threads(threads)
    else:
        yield


def rows_of_chunk(device, dtype):
    return 64 if device == "cpu" else 4096 // dtype.itemsize


def problem(device, dtype, number, classes=CLASSES, hidden=HIDDEN):
    numbers = {"scale": 3 / hidden**0.5, "ignored": slice(3, None, 11), "requires_grad": False}
    return random_head(device, dtype, (number,), classes, hidden, **numbers)


def bits(compute, x, *rows):
    """What it returns of rows, and the gradient of x for upstream ones that are functions of the rows alone."""
    x = x.detach().requires_grad_()
    values = [value for value in compute(x, *rows) if value.dim() > 0]
    total = sum((factor * value).sum() for factor, value in zip((1.7, -0.3, 0.1), values, strict=False))
    return [*(value.detach() for value in values), *torch.autograd.grad(total, x)]


def assert_own_bits(compute, number, numbers, *rows):
    """The bits of all rows, and of so many of them in a random order."""
    everything = bits(compute, *rows)
    for few in numbers:
        some = torch.randperm(number, device=rows[0].device)[:few]
        for got, wanted in zip(bits(compute, *(row[some] for row in rows)), everything, strict=True):
            assert torch.equal(got, wanted[some]), f"{(got != wanted[some]).sum()} numbers of {few} rows differ"


def log_probs(x, head, bias, target, **options):
    return xent_ops.linear_token_log_probs(x, head, target, linear_bias=bias, batch_invariant=True, **options)


@both_forms
def test_log_probs_of_a_head(device, kernels, form):
    dtype, logits_dtype = FORMS[form]
    chunk = rows_of_chunk(device, dtype)
    x, head, bias, target = problem(device, dtype, chunk + 5)

    def compute(x, target):
        return log_probs(x, head, bias, target, logits_dtype=logits_dtype, softcap=30.0, chunk_rows=chunk)

    assert_own_bits(compute, len(x), (*NUMBERS, chunk, chunk + 1), x, target)
    plain = xent_ops.linear_token_log_probs(
        x, head, target, linear_bias=bias, logits_dtype=logits_dtype, softcap=30.0, chunk_rows=chunk
    )
    for got, wanted in zip(compute(x, target), plain, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-2 if logits_dtype is None else 1e-3, atol=2e-2)


@pytest.mark.parametrize("dtype, form", [(torch.float32, None), (torch.float64, None), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("hidden, classes, chunk_rows", [(33, 5, None), (130, 11, 13), (7, 40, None), (64, 1003, 6)])
def test_small_heads_on_a_cpu(dtype, form, hidden, classes, chunk_rows):
    """MKL has other kernels for few rows, classes or features, and where a row starts between multiples of 16 bytes."""
    x, head, bias, target = problem("cpu", dtype, 60, classes, hidden)

    def compute(x, target):
        return log_probs(x, head, bias, target, chunk_rows=chunk_rows, logits_dtype=form)

    def one_loss(x, target):  # its gradients are made in the forward
        lse = lambda stats: stats.lse  # noqa: E731
        options = {"linear_bias": bias, "chunk_rows": chunk_rows, "logits_dtype": form, "reduction": "sum"}
        loss = xent_ops.linear_token_loss(x, head, target, lse, batch_invariant=True, **options)
        return torch.autograd.grad(loss, x)[0].detach()

    assert_own_bits(compute, len(x), (1, 20, len(x)), x, target)
    everything = one_loss(x.requires_grad_(), target)
    for few in (1, 20, len(x)):
        some = torch.randperm(len(x))[:few]
        assert torch.equal(one_loss(x.detach()[some].requires_grad_(), target[some]), everything[some])


@pytest.mark.gpu
@pytest.mark.parametrize("hidden, classes", [(2048, 50257), (4096, 32000), (1024, 128256)])
@pytest.mark.parametrize("logits_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_large_heads(hidden, classes, logits_dtype, dtype):
    chunk = rows_of_chunk("cuda", dtype)
    x, head, bias, target = problem("cuda", dtype, 2 * chunk, classes, hidden)

    def compute(x, target):
        return log_probs(x, head, bias, target, logits_dtype=logits_dtype)

    assert_own_bits(compute, len(x), (*NUMBERS, chunk - 1, chunk, chunk + 1), x, target)


def test_layouts_of_the_input(device):
    """Where the rows lie in memory, and in which shape."""
    x, head, bias, target = problem(device, torch.bfloat16, 60)
    wanted = bits(lambda x: log_probs(x, head, bias, target), x)
    wide = F.pad(x, (3, 5))[:, 3:-5]
    columns = x.t().contiguous().t()
    for other in (wide, columns, F.pad(x, (0, 0, 1, 0)).view(-1)[HIDDEN:].view(60, HIDDEN)):
        assert all(map(torch.equal, bits(lambda x: log_probs(x, head, bias, target), other), wanted))
    shaped = log_probs(x.view(3, 20, HIDDEN), head, bias, target.view(3, 20))
    assert all(torch.equal(got.view(-1), value) for got, value in zip(shaped, wanted[:3], strict=True))


def test_what_else_does_not_matter(device):
    """skip_ignored, other targets' indices and dtypes, a checkpoint, no gradient."""
    x, head, bias, target = problem(device, torch.bfloat16, 100)
    counted = target != -100
    wanted = log_probs(x, head, bias, target)
    with torch.no_grad():
        others = [
            log_probs(x, head, bias, target, skip_ignored=True),
            log_probs(x, head, bias, target.to(torch.int32)),
            log_probs(x, head, bias, torch.where(counted, target, 7), ignore_index=7),
        ]
    counted &= target != 7
    for other in others:
        assert all(torch.equal(got[counted], value[counted]) for got, value in zip(other, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_losses_of_rows(device, dtype):
    x, head, bias, target = problem(device, dtype, 600)
    weight = torch.rand(CLASSES, device=device)
    factor = torch.rand(600, device=device)
    options = {"linear_bias": bias, "batch_invariant": True, "reduction": "none"}

    def loss(x, target, factor):
        of_loss = {"weight": weight, "label_smoothing": 0.1, "lse_square_scale": 1e-3, "token_weight": factor}
        return (xent_ops.linear_cross_entropy(x, head, target, **of_loss, **options),)

    assert_own_bits(loss, 600, NUMBERS, x, target, factor)
    probs = torch.rand(600, 3, device=device).softmax(-1) * 0.9
    ids = torch.randint(CLASSES, (600, 3), device=device)

    def top_classes(x, ids, probs):
        return (xent_ops.linear_top_k_distillation_loss(x, head, ids, probs, tail=True, **options),)

    assert_own_bits(top_classes, 600, NUMBERS, x, ids, probs)


def test_module(device):
    x, *_, target = problem(device, torch.float32, 600)
    options = {"bias": True, "reduction": "none", "device": device}
    head = xent_ops.LinearCrossEntropyLoss(HIDDEN, CLASSES, batch_invariant=True, **options)
    assert_own_bits(lambda x, t: (head(x, t),), 600, NUMBERS, x, target)


def test_outputs_of_a_head(device):
    x, head, bias, target = problem(device, torch.bfloat16, 600)

    def outputs(x, target):
        found = xent_ops.linear_cross_entropy_outputs(
            x, head, target, linear_bias=bias, reduction="none", batch_invariant=True
        )
        assert found.loss.shape == found.predictions.shape == target.shape
        return found.loss, found.lse.nan_to_num(posinf=0.0), found.entropy, found.predictions, found.token_losses

    assert_own_bits(outputs, 600, NUMBERS, x, target)


@pytest.mark.parametrize(
    "several, dtype", [(False, torch.bfloat16), (True, torch.bfloat16), (False, torch.float16)], ids=str
)
def test_token_loss(device, several, dtype):
    """The function gets the bits of linear_token_log_probs, and the sum's gradient of the input has rows of their own."""
    x, head, bias, target = problem(device, dtype, 600)
    if several:
        target = torch.stack([target, target.flip(0)], -1)
    old = torch.randn(target.shape, device=device)
    seen = []

    def fn(stats, old):
        if len(stats.lse) > 2:
            seen.append(stats.log_probs.detach())
        value = (stats.log_probs - old).exp().reshape(len(stats.lse), -1).sum(-1)
        return value + 0.1 * stats.entropy

    def compute(x, target, old):
        x = x.detach().requires_grad_()
        loss = xent_ops.linear_token_loss(
            x, head, target, fn, rows=(old,), linear_bias=bias, reduction="sum", batch_invariant=True
        )
        return torch.autograd.grad(loss, x)[0]

    everything = compute(x, target, old)
    for few in NUMBERS:
        some = torch.randperm(600, device=device)[:few]
        assert torch.equal(compute(x[some], target[some], old[some]), everything[some])
    seen.clear()
    with torch.no_grad():
        xent_ops.linear_token_loss(x, head, target, fn, rows=(old,), linear_bias=bias, batch_invariant=True)
    assert torch.equal(torch.cat(seen)[:600], log_probs(x, head, bias, target).log_probs)


def test_rows_beside_a_far_larger_gradient(device):
    """A factor for all rows, the largest upstream gradient, would leave few bits to the gradients of the others."""
    x, head, bias, target = problem(device, torch.float16, 100)
    upstream = torch.full((100,), 1e-2, device=device)
    upstream[::7] = 1e3

    def compute(x, target, upstream):
        x = x.detach().requires_grad_()
        found = log_probs(x, head, bias, target)
        return [torch.autograd.grad((found.log_probs * upstream).sum(), x)[0]]

    (everything,) = compute(x, target, upstream)
    for some in (torch.arange(1, 7), torch.tensor([3]), torch.randperm(100)):
        some = some.to(device)
        assert torch.equal(compute(x[some], target[some], upstream[some])[0], everything[some])
    exact = log_probs(z := x.double().requires_grad_(), head.double(), bias.double(), target)
    (wanted,) = torch.autograd.grad((exact.log_probs * upstream).sum(), z)
    assert ((everything - wanted).norm(dim=-1) <= 5e-3 * wanted.norm(dim=-1)).all()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_reduced_losses(device, reduction):
    """Beside the one without: the number that a mean divides by does not count what was added."""
    x, head, bias, target = problem(device, torch.float32, 530)
    results = []
    for invariant in (False, True):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, head, bias)]
        loss = xent_ops.linear_cross_entropy(
            leaves[0], leaves[1], target, linear_bias=leaves[2], reduction=reduction, batch_invariant=invariant
        )
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    for got, wanted in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    x.requires_grad_()
    if reduction == "sum":
        loss = xent_ops.linear_cross_entropy(x, head, target, linear_bias=bias, reduction="sum", batch_invariant=True)
        alone = x.detach()[5:6].requires_grad_()
        of_one = xent_ops.linear_cross_entropy(
            alone, head, target[5:6], linear_bias=bias, reduction="sum", batch_invariant=True
        )
        assert torch.equal(torch.autograd.grad(of_one, alone)[0], torch.autograd.grad(loss, x)[0][5:6])


def test_a_chunk_of_ones_own(device):
    """chunk_rows is one shape too."""
    x, head, bias, target = problem(device, torch.bfloat16, 100)
    assert_own_bits(lambda x, t: log_probs(x, head, bias, t, chunk_rows=16), 100, (1, 15, 16, 17), x, target)


def test_only_the_last_chunk_is_copied(device):
    x, *_, target = problem(device, torch.bfloat16, 40)
    rows = PaddedRows(target, -100, 16)
    for start in (0, 16):
        assert rows.select(x, slice(start, start + 16)).data_ptr() == x[start:].data_ptr()
    last = rows.select(x, slice(32, 48))
    assert torch.equal(last, F.pad(x[32:], (0, 0, 0, 8)))


def test_what_fills_up_a_chunk_reaches_nothing(device):
    """Its logits are the bias, whose exponential may overflow, and its class is no class, of any dtype."""
    x, head, bias, _ = problem(device, torch.float32, 5, classes=200)
    ids = torch.randint(200, (5, 3), device=device, dtype=torch.uint8)

    def loss(several, **options):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, head, bias + 200)]
        head_args = {"linear_bias": leaves[2], "batch_invariant": True, **options}
        if several:
            found = xent_ops.linear_token_log_probs(leaves[0], leaves[1], ids, **head_args)
            value = (found.log_probs.sum(-1) + found.entropy).sum()
        else:
            value = xent_ops.linear_token_loss(leaves[0], leaves[1], ids, lambda s: s.log_probs.sum(-1), **head_args)
        return [value, *torch.autograd.grad(value, leaves)]

    for several in (True, False):
        for got, wanted in zip(loss(several), loss(several, batch_invariant=False), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_no_rows(device):
    x, head, bias, target = problem(device, torch.bfloat16, 0)
    found = bits(lambda x, t: log_probs(x, head, bias, t), x, target)
    assert [value.shape for value in found] == [(0,), (0,), (0,), (0, HIDDEN)]


@pytest.mark.parametrize("classes", [40, 1000, 1003, 50257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_given_logits(device, kernels, dtype, classes):
    logits = (3 * torch.randn(40, classes, device=device)).to(dtype)
    target = torch.randint(classes, (40,), device=device)

    def compute(z, t):
        found = xent_ops.cross_entropy_outputs(z, t, reduction="none", dim=-1, batch_invariant=True)
        return *xent_ops.token_log_probs(z, t, batch_invariant=True), found.predictions, found.token_losses

    assert_own_bits(compute, 40, (1, 2, 7), logits, target)
    wanted = [value[3:9] for value in bits(compute, logits, target)]
    places = [F.pad(logits, (left, right))[3:9, left : left + classes] for left, right in ((1, 0), (8, 8), (3, 5))]
    for other in (*places, logits[3:9].t().contiguous().t()):
        assert all(map(torch.equal, bits(compute, other, target[3:9]), wanted))
    ids = torch.stack([target, target.flip(0)], -1)
    assert_own_bits(lambda z, t: xent_ops.token_log_probs(z, t, batch_invariant=True), 40, (1, 7), logits, ids)


@pytest.mark.interpreter
def test_a_row_alone(device):
    """Without the flag more programs share it than one of many rows, in the interpreter too."""
    logits = 3 * torch.randn(30, 8192, device=device)
    target = torch.randint(8192, (30,), device=device)
    assert_own_bits(lambda z, t: xent_ops.token_log_probs(z, t, batch_invariant=True), 30, (1, 5), logits, target)


@pytest.mark.gpu
@pytest.mark.parametrize("classes", [32000, 50257, 128256])
def test_few_and_many_rows_of_logits(classes):
    """Without the flag the split of a row over programs follows the number of rows."""
    logits = (3 * torch.randn(2000, classes, device="cuda")).bfloat16()
    target = torch.randint(classes, (2000,), device="cuda")

    def compute(z, t):
        return xent_ops.token_log_probs(z, t, batch_invariant=True)

    assert_own_bits(compute, 2000, (1, 7, 64, 400, 1056, 1500), logits, target)


@pytest.mark.parametrize("kind", ["tokens", "classes", "both", "outputs", "top k, one class", "top k", "top k, tail"])
def test_weighted_sums_in_float16(device, kind):
    """No row's scale depends on the largest weight of all rows."""
    x, head, bias, target = problem(device, torch.float16, 600)
    factors = torch.logspace(-5, 0, 600, device=device)[torch.randperm(600, device=device)]
    weight = torch.logspace(-5, 0, CLASSES, device=device)
    options = {"linear_bias": bias, "reduction": "sum", "batch_invariant": True}

    def compute(x, target, factors):
        x = x.detach().requires_grad_()
        ids, few = target.unsqueeze(-1), torch.stack([0.7 * factors, 0.1 * factors], -1)
        more = torch.cat([ids, (ids + 1) % CLASSES], -1)
        call = {
            "tokens": {"target": target, "token_weight": factors, "lse_square_scale": 1e-3},
            "classes": {"target": target, "weight": weight, "label_smoothing": 0.1},
            "both": {"target": target, "weight": weight, "token_weight": factors},
            "outputs": {"target": target, "token_weight": factors},
            "top k, one class": {"ids": ids, "probs": factors.unsqueeze(-1)},
            "top k": {"ids": more, "probs": few, "token_weight": factors},
            "top k, tail": {"ids": more, "probs": few, "token_weight": factors, "tail": True},
        }[kind]
        if kind == "outputs":
            loss = xent_ops.linear_cross_entropy_outputs(x, head, **call, **options).loss
        else:
            top_k = kind.startswith("top k")
            function = xent_ops.linear_top_k_distillation_loss if top_k else xent_ops.linear_cross_entropy
            loss = function(x, head, **call, **options)
        return torch.autograd.grad(loss, x, torch.tensor(1024.0, device=device))[0]

    everything = compute(x, target, factors)
    for few in NUMBERS:
        some = torch.randperm(600, device=device)[:few]
        assert torch.equal(compute(x[some], target[some], factors[some]), everything[some])


def test_refused(device):
    x, head, bias, target = problem(device, torch.bfloat16, 4)
    for products in ("fp8", "fp8_gradients"):
        with pytest.raises(ValueError, match="16-bit products"):
            log_probs(x, head, bias, target, products=products)
    with pytest.raises(ValueError, match="chunk_rows must be at least 1"):
        log_probs(x, head, bias, target, chunk_rows=0)
    with pytest.raises(ValueError, match=r"target has shape \(3,\)"):
        log_probs(x, head, bias, target[:3])
    with pytest.raises(TypeError, match="batch_invariant must be True or False"):
        xent_ops.token_log_probs(x, target % HIDDEN, batch_invariant=1)
    with pytest.raises(ValueError, match="grad_in_forward"):
        xent_ops.cross_entropy_outputs(x, target % HIDDEN, batch_invariant=True, grad_in_forward=True)
