"""Errors of a head and its loss in bfloat16, without and with use_xent, beside float64 of the same operands."""

import torch
import torch.nn.functional as F

# Several chunks of rows add up their parts of the head's gradient. In bfloat16, the default, each sum is rounded, which
# no code does that multiplies all rows at once: docs/precision.md. In float32 it is rounded once, as there.
OPTIONS = [{}, {"chunk_rows": 20, "accumulate_dtype": torch.float32}]


def scaled(head):
    """The head's weight and bias, for logits of deviation 3 beside hidden states of deviation 1."""
    with torch.no_grad():
        head.weight.normal_(0.0, 3 / head.weight.shape[1] ** 0.5)
        if head.bias is not None:
            head.bias.normal_()
    return [tensor for tensor in (head.weight, head.bias) if tensor is not None]


def assert_no_further(run, use, hidden, head, oracle):
    """``run()`` returns the values, before and after ``use()``. Gradients are those of their sum.

    Both round the logits to bfloat16, so that their errors are the same but for the order of sums in float32.
    """
    leaves, found = [hidden, *head], []
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    wanted = oracle(F.linear(*wide))
    wanted = [wanted.detach(), *torch.autograd.grad(wanted.sum(), wide)]
    for replaced in (False, True):
        if replaced:
            use()
        values = run()
        values = [values.detach(), *torch.autograd.grad(values.sum(), leaves)]
        errors = [(one.double() - right).norm() / right.norm() for one, right in zip(values, wanted, strict=True)]
        found.append([float(error) for error in errors])
    for theirs, ours in zip(*found, strict=True):
        assert 0.0 < theirs < 2e-2 and ours <= 1.05 * theirs + 1e-6, found
