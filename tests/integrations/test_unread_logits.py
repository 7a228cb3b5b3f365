"""What a forward may do with logits that were not computed. Everything else is refused, by its name."""

import pytest
import torch
import torch.nn.functional as F

tiny = pytest.importorskip("tiny", reason="transformers is not installed")

from transformers.modeling_outputs import CausalLMOutputWithPast  # noqa: E402

from xent_ops.integrations.transformers import remove_xent, use_xent  # noqa: E402

V = tiny.V


@pytest.fixture(scope="module")
def llama():
    model = tiny.make()
    model.per_class = torch.nn.Parameter(torch.randn(V))
    model.learnt = torch.nn.Parameter(torch.tensor(1.5))
    return model


@pytest.fixture
def edited(llama, monkeypatch):
    """A Llama whose loss is ``edit(model, logits, labels)``."""

    def edit_forward(edit):
        monkeypatch.setattr(llama, "__class__", type("Edited", (type(llama),), {"forward": _forward(edit)}))
        return llama

    yield edit_forward
    if "_xent" in vars(llama):
        remove_xent(llama)


def _forward(edit):
    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
        return CausalLMOutputWithPast(loss=edit(self, logits, labels), logits=logits)

    return forward


def flat(logits, labels, **options):
    return F.cross_entropy(logits.reshape(-1, V), labels.reshape(-1), **options)


def shifted(logits, labels):
    return flat(logits[:, :-1].contiguous(), labels[:, 1:])


def capped(logits, cap=3.0):
    return cap * torch.tanh(logits / cap)


def parts(self, logits, labels):
    """The loss of the first tokens, and twice that of the others."""
    labels = labels.clamp(min=0)
    return flat(logits[:, :2], labels[:, :2]) + 2 * flat(logits[:, 2:], labels[:, 2:])


def weighted(self, logits, labels):
    losses = flat(logits, labels, reduction="none")
    return (losses * torch.linspace(0, 1, labels.numel())).sum()


EQUAL = {
    "plain": lambda self, logits, labels: flat(logits, labels),
    "scaled": lambda self, logits, labels: flat(logits * 0.5, labels),
    "scaled from the left": lambda self, logits, labels: flat(0.5 * (2 * logits), labels),
    "torch.mul": lambda self, logits, labels: flat(torch.mul(logits, 0.5), labels),
    "divided": lambda self, logits, labels: flat(torch.div(logits / 3, 0.5), labels),
    "softcap": lambda self, logits, labels: flat(capped(logits), labels),
    "scale inside a softcap": lambda self, logits, labels: flat(capped(0.3 * logits), labels),
    "scale after a softcap": lambda self, logits, labels: flat(0.7 * capped(logits), labels),
    "nn.Tanh": lambda self, logits, labels: flat(torch.nn.Tanh()(logits), labels),
    "nn.CrossEntropyLoss": lambda self, logits, labels: torch.nn.CrossEntropyLoss()(logits.view(-1, V), labels.view(-1)),
    "bias": lambda self, logits, labels: flat(logits + self.per_class, labels),
    "bias of two dimensions": lambda self, logits, labels: flat(self.per_class[None] + logits, labels),
    "own shift": lambda self, logits, labels: shifted(logits, labels),
    "own shift, the rows first": lambda self, logits, labels: flat(logits[..., :-1, :], labels[..., 1:]),
    "every other token": lambda self, logits, labels: flat(logits[:, ::2], labels[:, ::2]),
    "mask of tokens": lambda self, logits, labels: flat(logits[labels % 3 != 0], labels[labels % 3 != 0]),
    "mask, then flat": lambda self, logits, labels: F.cross_entropy(logits.view(-1, V)[labels.view(-1) > 9], labels[labels > 9]),
    "tokens by number": lambda self, logits, labels: flat(logits[:, torch.tensor([2, 0])], labels[:, torch.tensor([2, 0])]),
    "flatten": lambda self, logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten()),
    "flatten to the last but one": lambda self, logits, labels: F.cross_entropy(logits.flatten(end_dim=-2), labels.flatten()),
    "sizes that are asked for": lambda self, logits, labels: F.cross_entropy(
        logits.view(logits.size(0) * logits.shape[1], -1), labels.view(-1)
    ) * logits.dim() / logits.numel(),
    "casts": lambda self, logits, labels: flat(logits.float().to(labels.device).to(torch.float32).clone(), labels),
    "smoothing": lambda self, logits, labels: flat(logits, labels, label_smoothing=0.2),
    "ignore_index": lambda self, logits, labels: flat(logits, labels.clamp(min=5), ignore_index=5),
    "sum": lambda self, logits, labels: flat(logits, labels, reduction="sum") / 7,
    "weights of tokens": weighted,
    "loss twice": lambda self, logits, labels: flat(logits, labels) + 0.5 * shifted(logits, labels),
    "loss of parts": parts,
    "other labels": lambda self, logits, labels: flat(logits, (labels + 1) % V),
    "beside a term of its own": lambda self, logits, labels: flat(logits, labels) + self.lm_head.weight.square().sum(),
}  # fmt: skip


@pytest.mark.parametrize("name", EQUAL)
def test_equal(edited, name):
    model, (ids, labels) = edited(EQUAL[name]), tiny.batch()
    want = tiny.step(model, model, ids, labels)
    report = use_xent(model)
    assert report.untried is None
    got = tiny.step(model, model, ids, labels)
    tiny.assert_same(got, want)
    assert got[0].logits is None
    remove_xent(model)
    assert torch.equal(tiny.step(model, model, ids, labels)[1], want[1])


def set_row(self, logits, labels):
    logits[:, 0] = 0
    return flat(logits, labels)


def in_place(self, logits, labels):
    other = logits
    other *= 2
    return flat(logits, labels)


def of_bool(self, logits, labels):
    return flat(logits, labels) if logits else None


REFUSED = {
    "z-loss": (lambda self, x, y: flat(x, y) + x.logsumexp(-1).square().mean(), "logsumexp"),
    "torch.logsumexp": (lambda self, x, y: flat(x, y) + torch.logsumexp(x, -1).mean(), "logsumexp"),
    "mean": (lambda self, x, y: flat(x, y) + x.mean(), "mean"),
    "argmax": (lambda self, x, y: flat(x, y) + (x.argmax(-1) == y).sum(), "argmax"),
    "two softcaps": (lambda self, x, y: flat(capped(capped(x)), y), "tanh after tanh"),
    "scale after a bias": (lambda self, x, y: flat((x + self.per_class) * 2, y), "a product after a sum"),
    "bias after a scale": (lambda self, x, y: flat(x * 2 + self.per_class, y), "a sum after a product"),
    "bias after a softcap": (lambda self, x, y: flat(capped(x) + self.per_class, y), "a sum after a product"),
    "two biases": (lambda self, x, y: flat(x + self.per_class + self.per_class, y), "a sum after a product, tanh or another sum"),
    "softcap after a bias": (lambda self, x, y: flat(torch.tanh(x + self.per_class), y), "tanh after"),
    "number added": (lambda self, x, y: flat(x + 1e-3, y), "a sum with something else"),
    "memory like them": (lambda self, x, y: flat(x, y) + x.new_ones(1).sum(), "new_ones"),
    "bias of each token": (lambda self, x, y: flat(x + self.per_class.expand(y.shape[1], V), y), "a sum with"),
    "alpha": (lambda self, x, y: flat(torch.add(x, self.per_class, alpha=2), y), "add with alpha"),
    "learnt scale": (lambda self, x, y: flat(x * self.learnt, y), "a product with a tensor"),
    "learnt scale from the left": (lambda self, x, y: flat(self.learnt * x, y), "a product with a tensor"),
    "learnt temperature": (lambda self, x, y: flat(x / self.learnt, y), "a quotient by a tensor"),
    "scale of each class": (lambda self, x, y: flat(x * self.per_class, y), "a product with a tensor"),
    "logits + logits": (lambda self, x, y: flat(x + x, y), "a sum with something else"),
    "minus": (lambda self, x, y: flat(x - self.per_class, y), "__sub__"),
    "power": (lambda self, x, y: flat(x**2, y), "__pow__"),
    "comparison": (lambda self, x, y: flat(x, y) + (x > 0).sum(), "__gt__"),
    "equality": (lambda self, x, y: flat(x, y) if (x == y) is not None else None, "__eq__"),
    "truth": (of_bool, "__bool__"),
    "in place": (in_place, "__imul__"),
    "mul_": (lambda self, x, y: flat(x.mul_(2), y), "mul_"),
    "a row set": (set_row, "__setitem__"),
    "data": (lambda self, x, y: flat(x.data, y), "data"),
    "detach": (lambda self, x, y: flat(x.detach(), y), "detach"),
    "item": (lambda self, x, y: flat(x, y) + x[0, 0, 0].item(), "an index that"),
    "clamp": (lambda self, x, y: flat(x.clamp(-5, 5), y), "clamp"),
    "where": (lambda self, x, y: flat(torch.where(torch.arange(V) == 7, -1e9, x), y), "where"),
    "masked_fill": (lambda self, x, y: flat(x.masked_fill(torch.arange(V) == 7, -1e9), y), "masked_fill"),
    "fewer classes": (lambda self, x, y: F.cross_entropy(x[..., :60].reshape(-1, 60), y.view(-1) % 60), "an index of"),
    "other classes": (lambda self, x, y: F.cross_entropy(x.view(-1, V // 2), y.view(-1).repeat(2) % 32), "a view of shape"),
    "one dimension": (lambda self, x, y: flat(x.flatten(), y), "a view of shape"),
    "transposed": (lambda self, x, y: F.cross_entropy(x.transpose(1, 2), y), "transpose"),
    "permuted": (lambda self, x, y: F.cross_entropy(x.permute(0, 2, 1), y), "permute"),
    "classes in the middle": (lambda self, x, y: F.cross_entropy(x, y[:, :1].expand(-1, V)), "cross_entropy of shapes"),
    "flip": (lambda self, x, y: flat(x.flip(1), y), "flip"),
    "unbind": (lambda self, x, y: flat(torch.stack(x.unbind(1), 1), y), "unbind"),
    "stack": (lambda self, x, y: flat(torch.stack([x, x]), torch.stack([y, y])), "stack"),
    "cat": (lambda self, x, y: flat(torch.cat([x, x]), torch.cat([y, y])), "cat"),
    "log_softmax": (lambda self, x, y: F.nll_loss(x.log_softmax(-1).view(-1, V), y.view(-1)), "log_softmax"),
    "class weights": (lambda self, x, y: flat(x, y, weight=self.per_class.detach().exp()), "cross_entropy with weight"),
    "reduce": (lambda self, x, y: flat(x, y, reduce=True), "cross_entropy with weight, size_average or reduce"),
    "probabilities": (lambda self, x, y: F.cross_entropy(x.view(-1, V), F.one_hot(y.view(-1) % V, V).float()), "cross_entropy with class prob"),
    "half": (lambda self, x, y: flat(x.half(), y), "half"),
    "rounding": (lambda self, x, y: flat(x.to(torch.bfloat16).float(), y), "a cast from torch.float32 to torch.bfloat16"),
    "float64": (lambda self, x, y: flat(x.to(torch.float64), y), "a cast from torch.float32 to torch.float64"),
    "target": (lambda self, x, y: F.cross_entropy(torch.randn(y.numel(), V), x.view(-1, V)), "cross_entropy"),
    "numpy": (lambda self, x, y: flat(torch.tensor(x.numpy()), y), "numpy"),
    "head twice": (lambda self, x, y: flat(x, y) + self.lm_head(torch.ones(1, 16)).sum(), "sum|its head 2 times"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(edited, name):
    edit, use = REFUSED[name]
    model, (ids, labels) = edited(edit), tiny.batch()
    with pytest.raises(ValueError, match=f"Edited (reads its logits beside the loss: |calls )({use})"):
        use_xent(model)
    later = edited(lambda self, logits, labels: edit(self, logits, labels) if self.training else flat(logits, labels))
    use_xent(later)
    with pytest.raises(RuntimeError, match=f"(reads its logits beside the loss: ({use})|called its head twice)"):
        later(input_ids=ids, labels=labels)


def test_a_head_without_gradients(edited):
    """The loss of its logits would have gradients, where the model's has none."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        with torch.no_grad():
            logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
        return CausalLMOutputWithPast(loss=flat(logits, labels), logits=logits)

    model, (ids, labels) = edited(EQUAL["plain"]), tiny.batch()
    model.__class__.forward = forward
    use_xent(model)
    with pytest.raises(RuntimeError, match="its head is called under another mode of gradients"):
        model(input_ids=ids, labels=labels)


def test_smoothing_of_the_loss_and_of_use_xent(edited):
    model, (ids, labels) = edited(EQUAL["smoothing"]), tiny.batch()
    use_xent(model, label_smoothing=0.1)
    with pytest.raises(ValueError, match=r"Edited has label_smoothing=0.2: give none to use_xent"):
        model(input_ids=ids, labels=labels)
