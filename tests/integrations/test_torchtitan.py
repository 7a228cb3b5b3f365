"""The loss classes for torchtitan's config, in one process; over ranks: tests/distributed/test_torchtitan_parallel.py."""

import pytest
import torch
import torch.nn.functional as F

for package in ("torchtitan", "spmd_types"):
    pytest.importorskip(package, reason=f"{package} is not installed")

from torch import nn  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss, MSELoss, compute_logprobs  # noqa: E402
from torchtitan.config import CompileConfig  # noqa: E402

import xent_ops  # noqa: E402
from xent_ops.integrations.torchtitan import XentCrossEntropyLoss, XentLinearLoss  # noqa: E402

B, S, H, V = 2, 8, 16, 37


def inputs():
    torch.manual_seed(0)
    labels = torch.randint(V, (B, S))
    labels[0, 3] = -100
    return torch.randn(B, S, H).requires_grad_(), labels


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("skip_ignored", [False, True])
@pytest.mark.parametrize("valid", [None, torch.tensor(11)])
def test_the_head_and_the_loss(valid, skip_ignored, bias):
    hidden, labels = inputs()
    head = nn.Linear(H, V, bias=bias)
    logits = head(hidden)
    expected, _ = CrossEntropyLoss.Config().build()(logits, labels, valid)
    loss_of = XentLinearLoss.Config(skip_ignored=skip_ignored).build()
    loss_of.set_lm_head(head)
    loss, metrics = loss_of(hidden, labels, valid, positions=torch.arange(S))
    assert metrics == {}
    leaves = (hidden, *head.parameters())
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves))
    with torch.no_grad():  # as in validation
        torch.testing.assert_close(loss_of(hidden, labels, valid)[0], expected)


def test_logits_are_not_copied_to_float32():
    logits, labels = torch.randn(B, S, V).bfloat16().requires_grad_(), inputs()[1]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):
        loss, _ = XentCrossEntropyLoss.Config().build()(logits, labels)
    torch.testing.assert_close(loss, F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum"))
    assert all(one.dtype == torch.bfloat16 for one in saved if one.numel() == logits.numel())


def test_compiled_as_its_config_says():
    compiled = XentCrossEntropyLoss.Config().build(
        compile_config=CompileConfig(enable=True, components=["loss"], backend="eager")
    )
    plain = XentCrossEntropyLoss.Config().build()
    logits, labels = torch.randn(B, S, V), inputs()[1]
    assert hasattr(compiled.fn, "_torchdynamo_orig_callable") and not hasattr(plain.fn, "_torchdynamo_orig_callable")
    torch.testing.assert_close(compiled(logits, labels), plain(logits, labels))


def test_another_inner_loss_is_refused():
    with pytest.raises(ValueError, match="loss_fn is MSELoss; expected a CrossEntropyLoss"):
        XentLinearLoss.Config(loss_fn=MSELoss.Config()).build()


def test_log_probabilities_of_its_rl():
    """docs/integrations.md has this function in the place of torchtitan's."""
    logits, labels = torch.randn(2, 5, 33), torch.randint(33, (2, 5))
    labels[1, 3] = -100
    stats = xent_ops.token_log_probs(logits, labels)
    log_probs, entropy = compute_logprobs(logits, labels, return_entropy=True)
    torch.testing.assert_close(stats.log_probs, log_probs)
    counted = labels != -100
    torch.testing.assert_close(stats.entropy[counted], entropy[counted])
