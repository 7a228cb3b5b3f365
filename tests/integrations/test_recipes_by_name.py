"""Recipes of docs/migrate.md and losses.md beside the packages that they are for: the losses are the packages'.

`make test-integrations` installs the packages.
"""

import importlib.util
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import xent_ops

DOCS = Path(__file__).parents[2] / "docs"
S, H, V = 6, 16, 50


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)


def assert_equal(ours, theirs, tensors):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    gradients = [torch.autograd.grad(loss, tensors, retain_graph=True) for loss in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name, beta", [("kl_div_loss", 0.0), ("reverse_kl_div_loss", 1.0), ("js_div_loss", 0.5)])
def test_speculators(name, beta):
    """Its losses in plain torch. Their file is run by itself, because the package wants an older transformers."""
    found = importlib.util.find_spec("speculators")
    if found is None:
        pytest.skip("speculators is not installed")
    losses = {}
    exec(Path(found.origin).parent.joinpath("losses", "eager.py").read_text(), losses)
    hidden, head = torch.randn(1, S, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    teacher_hidden, teacher_head = torch.randn(1, S, H), torch.randn(V, H)
    theirs = losses[name](hidden @ head.T, teacher_hidden @ teacher_head.T)
    options = {"beta": beta, "reduction": "none"}
    ours = xent_ops.linear_distillation_loss(hidden, head, teacher_hidden, teacher_head, **options)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert_equal(ours.sum(), theirs.sum(), [hidden, head])


def metric_problem(name, **options):
    """(the package's loss of V classes, features, labels)"""
    losses = pytest.importorskip(
        "pytorch_metric_learning.losses", reason="pytorch-metric-learning is not installed", exc_type=ImportError
    )
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
