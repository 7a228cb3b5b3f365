"""A student near its teacher, with heads of 16 bits: losses and gradients beside float64 of the same operands.

The gradient is the difference of two numbers that are almost equal. Logits that are rounded to bfloat16 change it by
40 %, in the same cases.
"""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from helpers.divergence_oracle import divergences

import xent_ops

ROWS, HIDDEN, CLASSES, K = 48, 128, 1000, 16


def problem(device, dtype):
    """(hidden, head, teacher's hidden), the teacher's hidden states 2 % from the student's; logits of deviation 3."""
    generator = torch.Generator().manual_seed(0)
    hidden, noise = torch.randn(2, ROWS, HIDDEN, generator=generator)
    head = torch.randn(CLASSES, HIDDEN, generator=generator) * 3 / HIDDEN**0.5
    return tuple(tensor.to(device, dtype) for tensor in (hidden, head, hidden + 0.02 * noise))


def top_k(teacher_hidden, head):
    return F.linear(teacher_hidden.double(), head.double()).softmax(-1).float().topk(K)


def of_top_k(tail):
    def loss(hidden, head, teacher_hidden, teacher_head, **options):
        probs, ids = top_k(teacher_hidden, teacher_head)
        return xent_ops.linear_top_k_distillation_loss(hidden, head, ids, probs, tail=tail, **options)

    return loss


def top_k_oracle(tail):
    def loss(logits, teacher_logits):
        probs, ids = teacher_logits.softmax(-1).float().topk(K)
        log_q, probs = logits.log_softmax(-1), probs.double()
        others = log_q.scatter(-1, ids, float("-inf")).logsumexp(-1)
        return -(probs * log_q.gather(-1, ids)).sum(-1) - tail * (1 - probs.sum(-1)) * others

    return loss


def tokens(field):
    def loss(*heads, **options):
        return xent_ops.linear_distillation_token_loss(*heads, lambda d: getattr(d, field), **options)

    return loss


def themselves(field):
    return lambda *heads, **options: getattr(xent_ops.linear_token_divergences(*heads, **options), field).mean()


def fixed(**more):
    return lambda *heads, **options: xent_ops.linear_distillation_loss(*heads, **more, **options)


def rows(*heads, **options):
    return xent_ops.linear_distillation_loss(*heads, reduction="none", **options).mean()


LOSSES = {
    "kl": (fixed(), lambda s, t: divergences(s, t).kl),
    "jsd": (fixed(beta=0.5), lambda s, t: divergences(s, t).jsd),
    "reverse kl": (fixed(beta=1.0), lambda s, t: divergences(s, t).reverse_kl),
    "kl of rows": (rows, lambda s, t: divergences(s, t).kl),
    "tokens' kl": (tokens("kl"), lambda s, t: divergences(s, t).kl),
    "tokens' jsd": (tokens("jsd"), lambda s, t: divergences(s, t).jsd),
    "tokens' reverse kl": (tokens("reverse_kl"), lambda s, t: divergences(s, t).reverse_kl),
    "kl themselves": (themselves("kl"), lambda s, t: divergences(s, t).kl),
    "jsd themselves": (themselves("jsd"), lambda s, t: divergences(s, t).jsd),
    "top k": (of_top_k(False), top_k_oracle(False)),
    "top k with a tail": (of_top_k(True), top_k_oracle(True)),
}


def errors(name, device, dtype, autocast, **options):
    """Relative errors of (loss, the input's gradient, the head's)."""
    ours, oracle = LOSSES[name]
    hidden, head, teacher = problem(device, dtype)
    leaves = [(tensor.float() if autocast else tensor.clone()).requires_grad_() for tensor in (hidden, head)]
    context = torch.autocast(device, dtype) if autocast else contextlib.nullcontext()
    with context:
        loss = ours(*leaves, teacher, head.clone(), chunk_rows=20, **options)
    grads = torch.autograd.grad(loss, leaves)
    wide = [tensor.double().cpu().requires_grad_() for tensor in (hidden, head)]
    wanted = oracle(F.linear(*wide), F.linear(teacher.double().cpu(), head.double().cpu())).mean()
    found = [loss.double().cpu(), *(grad.double().cpu() for grad in grads)]
    right = [wanted.detach(), *torch.autograd.grad(wanted, wide)]
    return [float((a - b).norm() / b.norm()) for a, b in zip(found, right, strict=True)]


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_losses(device, name, dtype, autocast):
    """Gradients are rounded to 16 bits: of logits once, of the head once a chunk, of which there are three."""
    of_loss, *of_grads = errors(name, device, dtype, autocast)
    assert of_loss < 1e-4 and max(of_grads) < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", ["kl", "tokens' kl", "top k with a tail"])
def test_rounded_logits_are_a_choice(device, name):
    """The cases above see what rounding does."""
    _, *of_grads = errors(name, device, torch.bfloat16, False, logits_dtype=torch.bfloat16)
    assert min(of_grads) > 0.1


def test_the_teacher_of_a_float32_student_is_not_rounded(device):
    hidden, head, teacher = problem(device, torch.bfloat16)
    leaf = hidden.float().requires_grad_()
    loss = xent_ops.linear_distillation_loss(leaf, head.float(), teacher, head)
    wide = hidden.double().cpu().requires_grad_()
    wanted = divergences(F.linear(wide, head.double().cpu()), F.linear(teacher.double().cpu(), head.double().cpu())).kl
    (grad,), (right,) = torch.autograd.grad(loss, leaf), torch.autograd.grad(wanted.mean(), wide)
    assert (grad.double().cpu() - right).norm() < 1e-4 * right.norm()
