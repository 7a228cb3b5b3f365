"""The head that a model writes out becomes one operator with the loss: each spelling, values and gradients."""

import pytest
import torch
import torch.nn.functional as F
from finding_heads import CLOSE, IN_BFLOAT16, B, H, S, V, assert_taken, ce, heads_of, inputs
from rewriting import Rewriting
from torch import nn

import xent_ops

WITHOUT_BIAS = {
    "F.linear": lambda x, w, b: F.linear(x, w),
    "@ w.T": lambda x, w, b: x @ w.T,
    "@ w.mT": lambda x, w, b: x @ w.mT,
    "matmul, w.t()": lambda x, w, b: torch.matmul(x, w.t()),
    "matmul, transpose": lambda x, w, b: x.matmul(w.transpose(0, 1)),
    "matmul, permute": lambda x, w, b: x.matmul(other=w.permute(1, 0)),
    "inner": lambda x, w, b: torch.inner(x, w),
    "mm": lambda x, w, b: torch.mm(x.view(-1, H), w.t()),
    "x.mm": lambda x, w, b: x.flatten(0, 1).mm(w.t()),
    "einsum": lambda x, w, b: torch.einsum("bsh,vh->bsv", x, w),
    "einsum, weight first": lambda x, w, b: torch.einsum("vh, bsh -> bsv", [w, x]),
    "einsum, w.t()": lambda x, w, b: torch.einsum("...h,hv->...v", x, w.t()),
}
WITH_BIAS = {
    "F.linear": lambda x, w, b: F.linear(x, w, b),
    "F.linear, keywords": lambda x, w, b: F.linear(x, weight=w, bias=b),
    "@ w.T + b": lambda x, w, b: x @ w.T + b,
    "b + x @ w.T": lambda x, w, b: torch.add(b, x @ w.T),
    "+= b": lambda x, w, b: (x @ w.T).add_(b),
    "addmm": lambda x, w, b: torch.addmm(b, x.view(-1, H), w.t()),
    "einsum": lambda x, w, b: torch.einsum("bsh,vh->bsv", x, w) + b,
}


@pytest.mark.parametrize("product", WITHOUT_BIAS)
def test_a_product_without_bias(product):
    x, w, b, t = inputs()
    _, node = assert_taken(lambda x, w, b, t: ce(WITHOUT_BIAS[product](x, w, b), t), x, w, b.detach(), t)
    assert node.args[1].op == "placeholder", "the weight itself, no transpose of its transpose"
    assert node.args[3] is None


@pytest.mark.parametrize("product", WITH_BIAS)
def test_a_product_with_bias(product):
    _, node = assert_taken(lambda x, w, b, t: ce(WITH_BIAS[product](x, w, b), t), *inputs())
    assert [node.args[index].op for index in (1, 3)] == ["placeholder"] * 2


@pytest.mark.parametrize("dims", [2, 3])
def test_a_bias_of_more_dimensions(dims):
    """As BART has it: (1, V)."""
    x, w, b, t = inputs()
    assert_taken(
        lambda x, w, b, t: ce(F.linear(x, w) + b, t), x, w, b.detach().view(*[1] * (dims - 1), -1).requires_grad_(), t
    )


def test_a_weight_that_lies_transposed():
    """(H, V), as JAX has it: our operator reads a view of it."""
    x, w, _, t = inputs()
    _, node = assert_taken(lambda x, w, t: ce(x @ w, t), x, w.detach().t().contiguous().requires_grad_(), t)
    assert node.args[1].target == "t"


def test_part_of_a_weight():
    """The transpose of a slice, and a view that looks like the transpose but begins elsewhere."""
    x, w, _, t = inputs()
    wide = torch.cat([w.detach(), w.detach()], 1).requires_grad_()
    assert_taken(lambda x, w, t: ce(x @ w[:, H:].T, t), x, wide, t)
    long = torch.cat([w.detach(), w.detach()[:1]]).requires_grad_()
    _, node = assert_taken(lambda x, w, t: ce(x @ w[:V].as_strided((H, V), (1, H), H), t), x, long, t)
    assert node.args[1].target == "t"


UPCAST = {
    "F.linear": lambda x, w, b: F.linear(x.float(), w.float(), b.float()),
    "@ w.float().t()": lambda x, w, b: x.float() @ w.float().t() + b.float(),
    "@ w.t().float()": lambda x, w, b: torch.addmm(b.float(), x.view(-1, H).float(), w.t().to(torch.float32)),
    "einsum": lambda x, w, b: torch.einsum("bsh,vh->bsv", x.float(), w.float()) + b.float(),
}


@pytest.mark.parametrize(
    "product, dtype", [*((product, torch.bfloat16) for product in UPCAST), ("F.linear", torch.float16)], ids=str
)
def test_operands_that_are_upcast(product, dtype):
    """The product of the 16-bit operands, with float32 logits: the same loss. The logits' gradient has 16 bits."""
    x, w, b, t = inputs(dtype)

    def loss(x, w, b, t):
        return 2 * ce(5 * UPCAST[product](x, w, b), t)

    call, node = assert_taken(loss, x, w, b, t, rtol=0.05, atol=2e-3)
    assert node.kwargs["logits_dtype"] == torch.float32 and "logits_dtype=torch.float32" in str(call)
    assert [node.args[place].meta["example_value"].dtype for place in (0, 1)] == [dtype] * 2
    compiled = torch.compile(loss, backend=Rewriting(linear=True))
    torch.testing.assert_close(compiled(x, w, b, t), loss(x, w, b, t), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("products", ["fp8", "fp8_gradients"])
def test_products_that_are_asked_for(products):
    """By heads that have them; others stay, and the report says why."""
    x, w, _, t = inputs(torch.bfloat16)
    compiled = torch.compile(lambda x, w, t: ce(x @ w.t(), t), backend=Rewriting(linear=True, products=products))
    loss = compiled(x, w, t)
    expected = xent_ops.linear_cross_entropy(x, w, t, products=products)
    assert torch.equal(loss, expected.to(loss.dtype))
    assert products in str(xent_ops.inductor.last_report())
    compiled = torch.compile(lambda x, w, t: ce(x @ w.t(), t), backend=Rewriting(linear=True, products=products))
    compiled(*(tensor.float().detach() for tensor in (x, w)), t)
    report = str(xent_ops.inductor.last_report())
    assert f"head left alone (products={products!r} makes 8-bit numbers of torch.bfloat16" in report
    with pytest.raises(ValueError, match="products must be one of"):
        xent_ops.inductor.options(products="fp4")


def test_operands_that_are_not_all_upcast():
    """A weight in float32, of which no bit is lost: the float32 product, as ever."""
    x, w, _, t = inputs()
    call, node = assert_taken(lambda x, w, t: ce(x.float() @ w.t(), t), x.detach().bfloat16(), w, t)
    assert call.logits_dtype is None and "logits_dtype" not in node.kwargs

    def written(x, w, t):
        wide = w.float()
        w.data.mul_(2)
        return ce(F.linear(x.float(), wide), t)

    x, w, _, t = inputs(torch.bfloat16)
    backend = Rewriting(linear=True)
    torch.compile(written, backend=backend)(x, w, t)
    assert not heads_of(backend.graph), "something writes to the weight between the cast and the product"


LOSSES = {
    "F.cross_entropy": lambda y, t: F.cross_entropy(y, t),
    "sum": lambda y, t: F.cross_entropy(y, t, reduction="sum"),
    "none": lambda y, t: F.cross_entropy(y, t, reduction="none"),
    "options": lambda y, t: F.cross_entropy(y, t, torch.arange(V) / V, ignore_index=3, label_smoothing=0.1),
    "nn.CrossEntropyLoss": lambda y, t: nn.CrossEntropyLoss(label_smoothing=0.1)(y, t),
    "nll_loss": lambda y, t: F.nll_loss(F.log_softmax(y, -1), t),
    "nll_loss, options": lambda y, t: F.nll_loss(y.log_softmax(1), t, torch.arange(V) / V, reduction="sum"),
    "xent_ops": lambda y, t: xent_ops.cross_entropy(y, t),
    "xent_ops, options": lambda y, t: xent_ops.cross_entropy(
        y, t, torch.arange(V) / V, ignore_index=3, label_smoothing=0.1, lse_square_scale=0.01, softcap=5.0, logit_scale=0.5
    ),
    "xent_ops, none": lambda y, t: xent_ops.cross_entropy(y, t, reduction="none", lse_square_scale=0.01),
}  # fmt: skip
if hasattr(F, "linear_cross_entropy"):  # torch 2.13
    LOSSES["F.linear_cross_entropy"] = None


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss(loss):
    def function(x, w, b, t):
        if loss == "F.linear_cross_entropy":
            return F.linear_cross_entropy(x.view(-1, H), w, t.flatten(), linear_bias=b)
        return LOSSES[loss](F.linear(x, w, b).view(-1, V), t.flatten())

    x, w, b, t = inputs()
    if "options" in loss:
        t = t.clamp(min=0)
    call, node = assert_taken(function, x, w, b, t)
    if loss == "xent_ops, options":
        assert {name: node.kwargs[name] for name in ("softcap", "logit_scale", "lse_square_scale")} == {
            "softcap": 5.0, "logit_scale": 0.5, "lse_square_scale": 0.01
        }  # fmt: skip
        assert call.what.startswith("xent of float32") and "test_find_head.py" in call.where


LINKS = {
    "sequence": lambda y, t: F.cross_entropy(y.view(-1, V), t.view(-1)),
    "reshape": lambda y, t: F.cross_entropy(y.reshape((B * S, V)), t.view(-1)),
    "flatten": lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()),
    "size of the weight": lambda y, t: F.cross_entropy(y.view(-1, y.size(-1)), t.view(-1)),
    "classes inferred": lambda y, t: F.cross_entropy(y.view(B * S, -1), t.view(-1)),
    "upcast": lambda y, t: F.cross_entropy(y.float().view(-1, V), t.view(-1)),
    "shifted": lambda y, t: F.cross_entropy(y[..., :-1, :].reshape(-1, V), t[..., 1:].reshape(-1)),
    "shifted, contiguous": lambda y, t: F.cross_entropy(
        y[:, :-1].contiguous().float().view(-1, V), t[:, 1:].contiguous().view(-1)
    ),
    "narrow, select": lambda y, t: F.cross_entropy(y.narrow(1, 1, 3).select(1, 2), t[:, 0].clamp(min=0)),
    "last token": lambda y, t: F.cross_entropy(y[:, -1], t[:, 0]),
    "transposed": lambda y, t: F.cross_entropy(y.transpose(1, 2), t),
    "mT": lambda y, t: F.cross_entropy(y.mT, t),
    "transposed, shifted": lambda y, t: F.cross_entropy(y[:, :-1].permute(0, 2, 1), t[:, 1:]),
    "batch second": lambda y, t: F.cross_entropy(y.transpose(0, 1).reshape(-1, V), t.t().flatten()),
    "movedim": lambda y, t: F.cross_entropy(y.movedim(-1, 1).contiguous(), t),
    "4-D": lambda y, t: F.cross_entropy(y[:, None].permute(0, 3, 1, 2), t[:, None]),
    "unflatten": lambda y, t: F.cross_entropy(y.unsqueeze(0).squeeze(0).unflatten(1, (1, S)).flatten(0, 2), t.flatten()),
    "one row": lambda y, t: F.cross_entropy(y[0, 0], t[0, 0]),
    "all classes": lambda y, t: F.cross_entropy(y[..., :V].view(-1, V), t.view(-1)),
    "scale": lambda y, t: F.cross_entropy((y / 4).view(-1, V), t.view(-1)),
    "softcap": lambda y, t: F.cross_entropy((5 * torch.tanh(y / 5)).view(-1, V).float(), t.view(-1)),
    "softcap in place": lambda y, t: F.cross_entropy((y.div_(5).tanh_() * 5).view(-1, V), t.view(-1)),
    "softcap, shifted": lambda y, t: F.cross_entropy(
        (3 * torch.tanh(y / 5))[:, :-1].transpose(1, 2).float(), t[:, 1:], reduction="sum"
    ),
    "nll_loss, transposed": lambda y, t: F.nll_loss((y / 4).log_softmax(-1).transpose(1, 2), t),
    "xent_ops, transposed": lambda y, t: xent_ops.cross_entropy(y.transpose(1, 2), t),
    "xent_ops, dim": lambda y, t: xent_ops.cross_entropy(-y[:, 1:], t[:, 1:], dim=-1, softcap=4.0),
    "xent_ops behind a softcap": lambda y, t: xent_ops.cross_entropy(5 * torch.tanh(y / 5), t, dim=-1, logit_scale=-0.5),
}  # fmt: skip


_UPCASTS = ("upcast", "shifted, contiguous", "softcap", "softcap, shifted")
IN_BOTH = ("sequence", *_UPCASTS)  # dtypes


@pytest.mark.parametrize(
    "link, dtype", [*((link, torch.float32) for link in LINKS), *((link, torch.bfloat16) for link in IN_BOTH)], ids=str
)
def test_what_stands_between(link, dtype):
    tolerances = CLOSE if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    call, _ = assert_taken(lambda x, w, b, t: LINKS[link](F.linear(x, w, b), t), *inputs(dtype), **tolerances)
    assert call.upcast_removed == (dtype == torch.bfloat16 and link in _UPCASTS)
    if "softcap" in link:
        assert call.softcap == pytest.approx({"softcap, shifted": 3.0, "xent_ops behind a softcap": 2.5}.get(link, 5.0))


def test_a_shift_slices_the_hidden_states():
    """Not the logits: rows that no loss reads are not multiplied."""
    x, w, _, t = inputs()
    _, node = assert_taken(lambda x, w, t: LINKS["shifted"](x @ w.T, t), x, w, t)
    assert node.args[0].meta["example_value"].shape == (B * (S - 1), H)


def test_bfloat16_against_float64():
    """Gradients of input, weight and bias as exact as those of the graph without the head."""
    x, w, b, _ = inputs(torch.bfloat16)
    x = torch.randn(64, H).bfloat16().requires_grad_()
    t = torch.randint(0, V, (64,))
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, w, b)]
    want = torch.autograd.grad(F.cross_entropy(F.linear(*exact), t), exact)

    def errors(linear):
        backend = Rewriting(linear=linear)
        step = torch.compile(lambda x, w, b: F.cross_entropy(F.linear(x, w, b).float(), t), backend=backend)
        made = torch.autograd.grad(step(x, w, b), (x, w, b))
        return [float((a.double() - e).norm() / e.norm()) for a, e in zip(made, want, strict=True)]

    without, found = errors(False), errors(True)
    torch.compiler.reset()
    assert max(found) < 2 * max(without) + 1e-3 and max(found) < 0.01, (without, found)


def test_explicit_casts_are_kept():
    """float32 parameters, cast by the model: the operator gets what F.linear got."""
    x, w, _, t = inputs()

    def function(x, w, t):
        return ce(F.linear(x.bfloat16(), w.to(torch.bfloat16)).float(), t)

    _, node = assert_taken(function, x, w, t, **IN_BFLOAT16)
    assert [node.args[index].meta["example_value"].dtype for index in (0, 1)] == [torch.bfloat16] * 2


@pytest.mark.parametrize("inside", [True, False])
def test_autocast(inside):
    """What F.linear casts, the operator casts: products of bfloat16, and a float32 loss."""
    x, w, b, t = inputs()

    def plain(x, w, b, t):
        return ce(F.linear(x, w, b), t)

    def function(x, w, b, t):
        with torch.autocast("cpu", torch.bfloat16):
            return plain(torch.tanh(x) @ torch.eye(H), w, b, t)  # a bfloat16 input for a float32 weight

    if inside:
        _, node = assert_taken(function, x, w, b, t, **IN_BFLOAT16)
        assert [node.args[index].meta["example_value"].dtype for index in (0, 1)] == [torch.bfloat16, torch.float32]
    else:
        with torch.autocast("cpu", torch.bfloat16):
            assert_taken(plain, x, w, b, t, **IN_BFLOAT16)


def test_tied_to_an_embedding():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(V, H)
            self.head = nn.Linear(H, V, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, t):
            return ce(self.head(self.embedding(t.clamp(min=0))), t)

    model, (*_, t) = Model(), inputs()
    want = torch.autograd.grad(model(t), model.parameters())
    backend = Rewriting(linear=True)
    got = torch.autograd.grad(torch.compile(model, backend=backend, fullgraph=True)(t), model.parameters())
    torch.testing.assert_close(got, want)
    assert len(heads_of(backend.graph)) == 1
