"""batch_invariant=True in compiled steps: the bits of eager, for any number of rows."""

import pytest
import torch

import xent_ops

HIDDEN, CLASSES = 32, 1003
NUMBERS = (600, 7, 100, 512, 513)


def focal(stats):
    return -((1 - stats.log_probs.exp()) ** 2) * stats.log_probs


def of_tokens(x, head, target):
    return xent_ops.linear_token_loss(x, head, target, focal, reduction="sum", batch_invariant=True)


def of_log_probs(x, head, target):
    stats = xent_ops.linear_token_log_probs(x, head, target, batch_invariant=True)
    return -stats.log_probs - 0.1 * stats.entropy


def of_logits(x, head, target):
    return xent_ops.token_log_probs(x, target % HIDDEN, batch_invariant=True).log_probs


def summed(x, head, target):
    return xent_ops.linear_cross_entropy(x, head, target, reduction="sum", batch_invariant=True)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("loss", [of_log_probs, of_logits, summed, of_tokens], ids=lambda loss: loss.__name__)
def test_bits_of_eager(device, loss, backend):
    head = (torch.randn(CLASSES, HIDDEN, device=device) / 2).bfloat16()
    x, target = torch.randn(600, HIDDEN, device=device).bfloat16(), torch.randint(CLASSES, (600,), device=device)
    compiled, gradients = torch.compile(loss, fullgraph=True, backend=backend), []
    for number in NUMBERS[:3] if loss is of_tokens else NUMBERS:
        found = []
        for call in (loss, compiled):
            rows, classes = x[:number].clone().requires_grad_(), target[:number]
            if loss is not of_tokens:
                torch._dynamo.mark_dynamic(rows, 0), torch._dynamo.mark_dynamic(classes, 0)
            value = call(rows, head, classes)
            found.append((value.detach(), *torch.autograd.grad(value.sum(), rows)))
        (eager, eager_grad), (value, gradient) = found
        if value.dim() == 1:
            assert torch.equal(value, eager)
        if loss is not of_tokens:  # whose function Inductor computes in another order
            assert torch.equal(gradient, eager_grad)
        gradients.append(gradient)
    assert all(torch.equal(gradient, gradients[0][: len(gradient)]) for gradient in gradients)
