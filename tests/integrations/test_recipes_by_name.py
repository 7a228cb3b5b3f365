"""Recipes of docs/migrate.md and losses.md beside the packages that they are for: the losses are the packages'.

`make test-integrations` installs the packages.
"""

import importlib.util
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import xent_ops

DOCS = Path(__file__).parents[2] / "docs"
B, S, H, V = 2, 6, 16, 50


def package(name, needed=""):
    """Skips where it is not installed. A package whose own dependencies are missing is not installed either."""
    return pytest.importorskip(name, reason=f"{needed or name} is not installed", exc_type=ImportError)


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def recipes():
    """The names that docs/migrate.md defines. The page starts a group of one rank, which the tests of Megatron need."""
    names = {}
    for block in blocks("migrate.md"):
        exec(block, names)
    yield names
    dist.destroy_process_group()


def batch():
    """(hidden states, labels) of B sequences of S tokens; every third label is ignored."""
    labels = torch.randint(V, (B, S))
    return torch.randn(B, S, H, requires_grad=True), labels.masked_fill(torch.arange(S) % 3 == 1, -100)


def assert_equal(ours, theirs, tensors):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    gradients = [torch.autograd.grad(loss, tensors, retain_graph=True) for loss in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("items", [None, 7])
def test_flash_linear_attention(recipes, items):
    """The code of its models between the last layer and the loss. (Its layers need a GPU.)"""
    modeling = package("fla.models.modeling_utils", "flash-linear-attention")
    config = modeling.PretrainedConfig(fuse_linear_cross_entropy=False, fuse_cross_entropy=False, use_l2warp=False)
    model = modeling.FLAForCausalLM(config)
    model.lm_head, model.criterion = nn.Linear(H, V), None
    hidden, labels = batch()
    theirs, _ = model._compute_logits_and_loss(hidden, labels, num_items_in_batch=items)
    config.fuse_linear_cross_entropy, model.criterion = True, recipes["Criterion"]()
    ours, logits = model._compute_logits_and_loss(hidden, labels, num_items_in_batch=items)
    assert logits is None
    assert_equal(ours, theirs, [hidden, model.lm_head.weight, model.lm_head.bias])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("z_loss", [None, 1e-3])
def test_olmo_core(recipes, monkeypatch, reduction, z_loss):
    lm_head = package("olmo_core.nn.lm_head", "ai2-olmo-core")
    monkeypatch.setattr(lm_head, "fused_linear_cross_entropy_loss", recipes["fused_linear_cross_entropy_loss"])
    head = lm_head.LMHead(d_model=H, vocab_size=V)
    hidden, labels = batch()
    options = {"labels": labels, "loss_reduction": reduction, "z_loss_multiplier": z_loss, "return_logits": False}
    theirs = head(hidden, **options)
    head._loss_implementation = lm_head.LMLossImplementation.fused_linear
    ours = head(hidden, **options)
    assert_equal(ours.loss, theirs.loss, [hidden, *head.w_out.parameters()])
    torch.testing.assert_close((ours.ce_loss, ours.z_loss), (theirs.ce_loss, theirs.z_loss), rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def speculators_losses():
    """Its losses in plain torch. Their file is run by itself, because the package wants an older transformers."""
    found = importlib.util.find_spec("speculators")
    if found is None:
        pytest.skip("speculators is not installed")
    losses = {}
    exec(Path(found.origin).parent.joinpath("losses", "eager.py").read_text(), losses)
    return losses


def two_heads():
    hidden, head = torch.randn(1, S, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    return hidden, head, torch.randn(1, S, H), torch.randn(V, H)


@pytest.mark.parametrize("name, beta", [("kl_div_loss", 0.0), ("reverse_kl_div_loss", 1.0), ("js_div_loss", 0.5)])
def test_speculators(speculators_losses, name, beta):
    hidden, head, teacher_hidden, teacher_head = two_heads()
    theirs = speculators_losses[name](hidden @ head.T, teacher_hidden @ teacher_head.T)
    options = {"beta": beta, "reduction": "none"}
    ours = xent_ops.linear_distillation_loss(hidden, head, teacher_hidden, teacher_head, **options)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert_equal(ours.sum(), theirs.sum(), [hidden, head])


def lk_hybrid(divergences):
    """The blend of docs/recipes.md#lk-losses."""
    weight = (-3 * divergences.overlap.detach()).exp()
    return weight * divergences.kl + (1 - weight) * (1 - divergences.overlap)


SPECULATORS = {
    "tv_loss": lambda divergences: 1 - divergences.overlap,
    "neg_log_acceptance_loss": lambda divergences: -divergences.overlap.log(),
    "lk_hybrid_loss": lk_hybrid,
}


@pytest.mark.parametrize("name", SPECULATORS)
def test_speculators_by_a_function(speculators_losses, name):
    hidden, head, teacher_hidden, teacher_head = two_heads()
    logits = hidden @ head.T, teacher_hidden @ teacher_head.T
    theirs, fn = speculators_losses[name](*logits).mean(), SPECULATORS[name]
    ours = xent_ops.linear_distillation_token_loss(hidden, head, teacher_hidden, teacher_head, fn)
    assert_equal(ours, theirs, [hidden, head])
    assert_equal(xent_ops.distillation_token_loss(*logits, fn), theirs, [hidden, head])


def metric_problem(name, **options):
    """(the package's loss of V classes, features, labels)"""
    losses = package("pytorch_metric_learning.losses", "pytorch-metric-learning")
    loss = getattr(losses, name)(num_classes=V, embedding_size=H, **options)
    return loss, torch.randn(8, H, requires_grad=True), torch.randint(V, (8,))


def test_normalized_softmax_loss():
    loss, features, labels = metric_problem("NormalizedSoftmaxLoss", temperature=0.05)
    ours = xent_ops.linear_cross_entropy(F.normalize(features), F.normalize(loss.W.t()), labels, logit_scale=1 / 0.05)
    assert_equal(ours, loss(features, labels), [features, loss.W])


@pytest.mark.parametrize("name, function, margin", [("ArcFaceLoss", "arcface", 0.5), ("CosFaceLoss", "cosface", 0.35)])
def test_margin_losses(name, function, margin):
    """Their functions are those of docs/losses.md."""
    (block,) = (block for block in blocks("losses.md") if "def arcface" in block)
    names = {"torch": torch, "F": F, "xent_ops": xent_ops, "H": H, "V": V}
    exec(block, names)
    degrees = margin * 180 / torch.pi if name == "ArcFaceLoss" else margin
    loss, features, labels = metric_problem(name, margin=degrees, scale=30.0)
    operands = F.normalize(features), F.normalize(loss.W.t())
    ours = xent_ops.linear_token_loss(*operands, labels, names[function], logit_scale=30.0)
    torch.testing.assert_close(ours, loss(features, labels), rtol=1e-4, atol=1e-4)


class Embedder(nn.Module):
    """A module of a SentenceTransformer: the embedding of a sentence is the mean of those of its tokens."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(V, H)

    def forward(self, features):
        return features | {"sentence_embedding": self.tokens(features["input_ids"]).mean(1)}


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 drops the gradient of to_dense")
def test_sentence_transformers():
    package("sentence_transformers", "sentence-transformers")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    embedder = Embedder()
    loss = MultipleNegativesRankingLoss(SentenceTransformer(modules=[embedder], device="cpu"))
    pairs = [{"input_ids": torch.randint(V, (4, S))} for _ in range(2)]
    theirs = torch.autograd.grad(loss(pairs, None), embedder.tokens.weight)
    loss.compile(options=xent_ops.inductor.options(linear=True))
    ours = torch.autograd.grad(loss(pairs, None), embedder.tokens.weight)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    (call,) = xent_ops.inductor.last_report().calls
    assert call.replaced and call.head, str(call)


@pytest.mark.parametrize("tied", [False, True])
def test_log_probs_of_megatron_core(recipes, tied):
    """The functions for verl, NeMo-RL, SkyRL and slime, on a GPTModel."""
    package("megatron.core", "megatron-core")
    import megatron_models as models

    with models.groups("cpu"):
        inputs, labels, _ = next(models.batches())
        labels = labels.clamp(min=0)
        model, ours = models.make(tied=tied), models.make(tied=tied)
        theirs = (model(*inputs) / 0.7).log_softmax(-1)
        entropy = -(theirs.exp() * theirs).sum(-1)
        log_probs = theirs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        recipes["return_hidden_states"](ours)
        weight = ours.shared_embedding_or_output_weight() if tied else ours.output_layer.weight
        found = recipes["log_probs_and_entropy"](ours(*inputs), weight, labels, None, temperature=0.7)
        torch.testing.assert_close(found, (log_probs, entropy), rtol=1e-5, atol=1e-5)
        ((log_probs * entropy).sum() + log_probs.sum()).backward()
        ((found[0] * found[1]).sum() + found[0].sum()).backward()
        torch.testing.assert_close(models.gradients(ours), models.gradients(model), rtol=1e-4, atol=1e-5)


def test_megatron_core(recipes, monkeypatch):
    """The loss of logits (S, B, V) on one rank, and as the loss of a GPTModel. test_megatron.py has use_xent."""
    tensor_parallel = package("megatron.core.tensor_parallel", "megatron-core")
    import megatron_models as models

    with models.groups("cpu"):
        logits, labels = torch.randn(S, B, V, requires_grad=True), torch.randint(V, (S, B))
        theirs = tensor_parallel.vocab_parallel_cross_entropy(logits.clone(), labels)  # it writes over its argument
        ours = recipes["vocab_parallel_cross_entropy"](logits, labels)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        assert_equal(ours.mean(), theirs.mean(), [logits])
        want = models.one_step(models.make())
        monkeypatch.setattr(tensor_parallel, "vocab_parallel_cross_entropy", recipes["vocab_parallel_cross_entropy"])
        torch.testing.assert_close(models.one_step(models.make()), want, rtol=1e-5, atol=1e-6)
