"""Log-probabilities and entropies of a head over ranks; run on every rank by test_linear_parallel.py."""

import pytest
import torch
import torch.distributed as dist
from helpers import over_ranks
from linear_parallel_cases import H, classes_of, head_of, leaves
from vocab_parallel_cases import Collectives, V, same_bits_everywhere, split

import xent_ops

TOLERANCES = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}


def reference(input, head, bias, target, options):
    """(outputs, gradients of their weighted sum) of one process in float64, from all logits."""
    x, w, b = (tensor.double().requires_grad_() for tensor in (input, head, bias))
    logits = x @ w.t() + b
    scale, cap = options.get("logit_scale", 1.0), options.get("softcap")
    z = logits * scale if cap is None else cap * torch.tanh(logits * scale / cap)
    counted, lse = target != -100, z.logsumexp(-1)
    log_p = z - lse.unsqueeze(-1)
    chosen = log_p.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    entropy = -(log_p.exp() * log_p.nan_to_num(neginf=0.0)).sum(-1)
    outputs = torch.where(counted, chosen, 0.0), torch.where(counted, entropy, 0.0), torch.where(counted, lse, 0.0)
    total = sum((factor * value).sum() for factor, value in zip(upstream(target), outputs, strict=True))
    return outputs, torch.autograd.grad(total, (x, w, b))


def upstream(target):
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(target.shape, generator=generator, dtype=torch.float64) for _ in range(3)]


def close(actual, expected, dtype):
    """Within the tolerance of the largest value."""
    assert actual.shape == expected.shape
    if expected.numel() == 0:
        return
    error = (actual.detach().double().cpu() - expected).abs().max()
    assert error <= TOLERANCES[dtype] * expected.abs().max().clamp(min=1.0), f"{error} of {expected.abs().max()}"


def gradients_close(made, wanted, kind, dtype, sequence_dim=None, group=None):
    """This rank's gradients of (input, head, bias) are its parts of ``wanted``, and those of padding are zero."""
    of_input, *others = wanted
    if sequence_dim is not None:
        of_input = of_input.chunk(dist.get_world_size(group), sequence_dim)[dist.get_rank(group)]
    start, size, _ = split(kind, V, group)
    close(made[0], of_input, dtype)
    for grad, part in zip(made[1:], others, strict=True):
        close(grad[:size], part[start : start + size], dtype)
        assert grad[size:].count_nonzero() == 0, "padding got a gradient"


def one(device, kind, problem, sequence_dim=None, **options):
    input, head, bias, _, target = problem
    x, w, b, labels = leaves(device, *problem, kind=kind, sequence_dim=sequence_dim)
    options["sequence_parallel"] = sequence_dim is not None
    outputs = over_ranks.linear_token_log_probs(x, w, labels, linear_bias=b, **classes_of(kind), **options)
    counted = (target != -100).to(device)
    if options.get("skip_ignored"):
        assert (outputs.lse[~counted] == float("inf")).all()
    outputs = outputs._replace(lse=torch.where(counted, outputs.lse, 0.0))
    expected, grads = reference(input, head, bias, target, options)
    for value, wanted in zip(outputs, expected, strict=True):
        same_bits_everywhere(value)
        assert value.dtype == (torch.float64 if input.dtype == torch.float64 else torch.float32)
        close(value, wanted, input.dtype)
    total = sum((factor.to(value) * value).sum() for factor, value in zip(upstream(target), outputs, strict=True))
    gradients_close(torch.autograd.grad(total, (x, w, b)), grads, kind, input.dtype, sequence_dim)


def values(device, kind):
    for dtype in TOLERANCES:
        problem = head_of(dtype)
        for options in ({}, {"softcap": 30.0, "logit_scale": 0.75, "chunk_rows": 4}):
            one(device, kind, problem, **options)
    one(device, kind, head_of(torch.float32), chunk_rows=4, skip_ignored=True)
    rows = head_of(torch.float32, (3, 2 * dist.get_world_size()))
    one(device, kind, rows, sequence_dim=1, chunk_rows=5)


def behaviour(device):
    """One gather of 4 numbers a row, one all-reduce; compiled as in eager; shards that do not tile; masked columns."""
    x, w, b, target = leaves(device, *head_of(torch.float32, (6,)))

    def total(x, w, b):
        outputs = over_ranks.linear_token_log_probs(x, w, target, num_classes=V, linear_bias=b)
        return (outputs.log_probs + outputs.entropy.square() + outputs.lse).sum()

    with Collectives() as mode:
        loss = total(x, w, b)
    assert mode.seen == [("all_gather_into_tensor.default", 4 * 6 + 5)]
    with Collectives() as mode:
        grads = torch.autograd.grad(loss, (x, w, b))
    assert mode.seen == [("all_reduce_.default", 6 * H)]
    compiled = torch.compile(total, fullgraph=True, backend="aot_eager")(x, w, b)
    torch.testing.assert_close(compiled, loss)
    torch.testing.assert_close(torch.autograd.grad(compiled, (x, w, b)), grads)

    wrong = over_ranks.linear_token_log_probs(x, w, target, num_classes=V, class_start=0)
    assert wrong.lse.isnan().all() and wrong.entropy[target != -100].isnan().all()
    with pytest.raises(ValueError, match="an overlap"):
        over_ranks.linear_token_log_probs(x, w, target, num_classes=V, class_start=0, check=True)
    with pytest.raises(ValueError, match=r"target has shape \(3,\)"):
        over_ranks.linear_token_log_probs(x, w, target[:3], num_classes=V)
    bad = target.clone()
    bad[2] = V
    if device == "cpu":
        with pytest.raises(IndexError, match=f"target {V} is out of bounds"):
            over_ranks.linear_token_log_probs(x, w, bad, num_classes=V)
    else:
        assert over_ranks.linear_token_log_probs(x, w, bad, num_classes=V).log_probs[2].isnan()

    # A whole shard of -inf hands over an lse of -inf.
    input, head, bias, _, _ = head_of(torch.float32, (6,))
    bias[: -(-V // dist.get_world_size())] = float("-inf")
    start, size, _ = split("chunk", V)
    last = torch.full_like(target, V - 1)
    found = over_ranks.linear_token_log_probs(
        x, w, last, num_classes=V, linear_bias=bias[start : start + size].to(device)
    )
    wanted = xent_ops.linear_token_log_probs(input, head, last.cpu(), linear_bias=bias)
    torch.testing.assert_close(tuple(value.cpu() for value in found), tuple(wanted), check_device=False)
    (grad,) = torch.autograd.grad(found.entropy.sum(), x)
    assert grad.isfinite().all()
