"""float32 logits and 8-bit products over ranks; run on every rank by test_linear_parallel.py."""

import torch
from helpers import over_ranks
from linear_parallel_cases import head_of, one
from vocab_parallel_cases import V, same_bits_everywhere, shard_of, split

import xent_ops


def float32_logits(device):
    """To budgets in which logits are not rounded: pipelined and not, the input split or not."""
    problem = head_of(torch.bfloat16)
    for kind in ("uneven", "padded"):
        for options in ({"pipelined": True}, {"pipelined": False}, {"reduction": "none"}, {"skip_ignored": True}):
            one(device, kind, problem, logits_dtype=torch.float32, chunk_rows=4, **options)
    few_rows = head_of(torch.bfloat16, (6, 4))
    one(device, "uneven", few_rows, sequence_dim=0, logits_dtype=torch.float32, pipelined=False)


def eight_bits(device):
    """Gradients as near to float64 as of one rank, and the same loss on every rank; four products, of a slice each."""
    generator = torch.Generator().manual_seed(4)
    x, head = ((torch.randn(rows, 32, generator=generator) / 2).bfloat16().to(device) for rows in (24, V))
    target = torch.randint(0, V, (24,), generator=generator).to(device)
    target[2] = -100
    leaves = [x.double().requires_grad_(), head.double().requires_grad_()]
    exact = xent_ops.linear_cross_entropy(*leaves, target, label_smoothing=0.1, reduction="sum")
    of_input, of_head = torch.autograd.grad(exact, leaves)
    for kind in ("uneven", "padded"):
        place = split(kind, V, None)
        for products in ("fp8", "fp8_gradients"):
            mine = shard_of(head.t().cpu(), place).t().contiguous().to(device).requires_grad_()
            hidden = x.clone().requires_grad_()
            where = {"num_classes": V, "class_start": place[0], "products": products}
            loss = over_ranks.linear_cross_entropy(hidden, mine, target, label_smoothing=0.1, reduction="sum", **where)
            same_bits_everywhere(loss, None)
            assert abs(loss.item() / exact.item() - 1) < 0.02
            found = torch.autograd.grad(loss, (hidden, mine))
            assert (found[0].double() - of_input).norm() < 0.06 * of_input.norm()
            start, size, _ = place
            wanted = of_head[start : start + size]
            assert (found[1][: len(wanted)].double() - wanted).norm() <= 0.08 * wanted.norm()
            assert found[1][len(wanted) :].count_nonzero() == 0
            of_tokens = over_ranks.linear_token_loss(
                hidden, mine, target, lambda stats: -stats.log_probs, reduction="sum", **where
            )
            plain = over_ranks.linear_cross_entropy(hidden, mine, target, reduction="sum", **where)
            torch.testing.assert_close(of_tokens, plain)
            torch.autograd.grad(of_tokens, (hidden, mine))
