"""Logits that share a large offset, as in tests/operators/test_offsets.py; run on every rank by test_linear_parallel.py.

Hidden states are logits, the head is a slice of the identity, and its bias brings the offset.
"""

import torch
from helpers import over_ranks
from helpers.divergence_oracle import divergences
from vocab_parallel_cases import V, same_bits_everywhere, split

# At the last two all classes of a row are equal.
OFFSETS = (0.0, 1e6, -1e9, torch.finfo(torch.float32).min / 4)
NEAR = 7e-7  # of a row's gradient, by its norm, and of the loss. The JSD has 5e-7, at no offset too
TARGET = torch.tensor([4, V - 1, -100, 77])
IDS = torch.tensor([[4, V - 1, 4], [V - 1, 0, -100], [77, -100, 12], [0, 1, 2]])
PROBS = torch.tensor([0.5, 0.25, 0.125]).expand(4, 3)


def fields_of(d):
    return d.kl + 2 * d.reverse_kl + 3 * d.jsd - d.overlap - d.log_prob


def log_probs_of_ids(logits):
    return torch.where(IDS == -100, 0.0, logits.log_softmax(-1).gather(-1, IDS.clamp(min=0)))


def teachers_top_k(logits, tail):
    log_q, p = logits.log_softmax(-1), torch.where(IDS == -100, 0.0, PROBS).double()
    named = torch.zeros_like(log_q).scatter_add(-1, IDS.clamp(min=0), (IDS != -100).double())
    others = log_q.masked_fill(named > 0, float("-inf")).logsumexp(-1)
    return -(p * log_q.gather(-1, IDS.clamp(min=0))).sum(-1) - tail * (1 - p.sum(-1)) * others


def counted(rows):
    return torch.where(TARGET == -100, 0.0, rows).sum()


def fixed(beta):
    return lambda x, t, o: over_ranks.linear_distillation_loss(*x, target=t, beta=beta, reduction="sum", **o)


def on(ids):
    """Of the student alone: its hidden states and head, these ids and options."""
    return lambda call: lambda x, t, o: call(x[0], x[1], ids.to(t.device), {k: o[k] for k in o if "teacher" not in k})


# Name: (ours, float64's).
LOSSES = {
    "kl": (fixed(0.0), lambda s, t: counted(divergences(s, t).kl)),
    "jsd": (fixed(0.5), lambda s, t: counted(divergences(s, t).jsd)),
    "reverse kl": (fixed(1.0), lambda s, t: counted(divergences(s, t).reverse_kl)),
    "fields": (
        lambda x, t, o: over_ranks.linear_distillation_token_loss(*x, fields_of, target=t, reduction="sum", **o),
        lambda s, t: counted(fields_of(divergences(s, t, TARGET))),
    ),
    "divergences of tokens": (
        lambda x, t, o: fields_of(over_ranks.linear_token_divergences(*x, target=t, **o)).sum(),
        lambda s, t: counted(fields_of(divergences(s, t, TARGET))),
    ),
    "several classes": (
        on(IDS)(lambda x, w, ids, o: over_ranks.linear_token_log_probs(x, w, ids, **o).log_probs.square().sum()),
        lambda s, t: log_probs_of_ids(s).square().sum(),
    ),
    "a function of several classes": (
        on(IDS)(
            lambda x, w, ids, o: over_ranks.linear_token_loss(
                x, w, ids, lambda stats: stats.log_probs.square().sum(-1), reduction="sum", **o
            )
        ),
        lambda s, t: log_probs_of_ids(s).square().sum(),
    ),
    "most probable": (
        on(TARGET)(lambda x, w, target, o: over_ranks.linear_top_k(x, w, 1, target, **o).target_log_probs.sum()),
        lambda s, t: counted(s.log_softmax(-1).gather(-1, TARGET.clamp(min=0).unsqueeze(-1)).squeeze(-1)),
    ),
} | {
    f"a teacher's top k, {tail=}": (
        on(IDS)(
            lambda x, w, ids, o, tail=tail: over_ranks.linear_top_k_distillation_loss(
                x, w, ids, PROBS.to(x.device), tail=tail, reduction="sum", **o
            )
        ),
        lambda s, t, tail=tail: teachers_top_k(s, tail).sum(),
    )
    for tail in (False, True)
}


def losses(device):
    student, teacher = torch.randn(2, 4, V, generator=torch.Generator().manual_seed(0))
    start, size, _ = split("chunk", V)
    head = torch.eye(V)[start : start + size].to(device)
    for offset in OFFSETS:
        for of_teacher in {0.0, offset}:
            s, t = (student + offset).double().requires_grad_(), (teacher + of_teacher).double()
            options = {"num_classes": V, "chunk_rows": 3, "linear_bias": head.new_full((size,), offset)}
            options["teacher_bias"] = head.new_full((size,), of_teacher)
            for name, (ours, oracle) in LOSSES.items():
                if offset < -1e6 and of_teacher == offset and name in ("fields", "divergences of tokens"):
                    continue  # the overlap of equal models has no gradient
                x = student.to(device).requires_grad_()
                loss, wanted = ours((x, head, teacher.to(device), head), TARGET.to(device), options), oracle(s, t)
                same_bits_everywhere(loss.detach())
                case = f"{name} at {offset}, the teacher at {of_teacher}"
                error = abs(loss.item() - wanted.item())
                assert error <= NEAR * max(1.0, abs(wanted.item())), f"{case}: {loss.item()}, not {wanted.item()}"
                if name == "most probable":  # constants over ranks
                    continue
                (grad,), (right,) = torch.autograd.grad(loss, x), torch.autograd.grad(wanted, s)
                errors = (grad.double().cpu() - right).norm(dim=-1) / right.norm(dim=-1).clamp(min=1e-2)
                assert errors.max() <= NEAR, f"{case}: {errors.tolist()}"
