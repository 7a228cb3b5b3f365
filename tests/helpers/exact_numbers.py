"""Numbers of which every order of every sum makes the same bits: a tile that is dropped or added twice cannot hide.

Inputs and heads are small integers. A row's logits are its maximum k at a power of two of classes, and k - 128 or less
elsewhere: probabilities are 1/m, once they are rounded to the 16 bits of the logits, and exactly 0. So all products, of
the logits and of the gradients, are sums of few small multiples of 1/V, which 16 bits hold.

Numbers of 8 bits, e4m3, have four significant ones, and are kept times 448 over the largest of their matrix, or of the
gradient's row. So that scales are powers of two, the largest are 112 of an input and 7 of a head, in every row of
either. A gradient of 1/m is then 448/m = 7 * 2^6/m, which fits. That of a target among m classes, 448 (1 - 1/m), fits
for m = 2 alone (4: 336 = 21 * 2^4 has five bits): other rows have a target that is excluded, with a gradient of -448.
"""

import torch
import torch.nn.functional as F

ROWS, V, DIVISOR = 24, 32, 16  # the gradients are those of a sum over this divisor


def exact_problem(dtype, pairs=9):
    """((input, head, target), (gradient of the input, of the head)): exact ones of the cross entropy."""
    generator = torch.Generator().manual_seed(0)
    u = torch.randint(-1, 2, (ROWS, pairs), generator=generator)
    v = torch.randint(-3, 4, (V, pairs), generator=generator)
    excluded, bits = ((torch.arange(size)[:, None] >> torch.arange(5)) & 1 for size in (ROWS, V))
    # u (v + 1 - v) is the same for all classes; those that have one of the bits of the row's number are excluded.
    x, head = torch.cat([u, u, -128 * excluded], -1), torch.cat([v, 1 - v, bits], -1)
    logits = x @ head.t()
    alive = logits == logits.amax(-1, keepdim=True)
    target = torch.stack([classes.nonzero().flatten()[row % int(classes.sum())] for row, classes in enumerate(alive)])
    target[4::5] = -100
    return finished(x, head, target, alive, dtype)


def exact_fp8_problem(dtype, pairs=9):
    """The same for products of 8-bit numbers. No row has more than four classes, so that sums fit in 16 bits."""
    generator = torch.Generator().manual_seed(0)
    u = torch.randint(-1, 2, (ROWS, pairs), generator=generator)
    v = torch.randint(-3, 4, (V, pairs), generator=generator)
    bits = (torch.arange(V)[:, None] >> torch.arange(5)) & 1
    many = bits[bits.sum(-1) >= 3]
    excluded = many[torch.arange(ROWS) % len(many)]
    x = torch.cat([u, u, -112 * excluded, torch.full((ROWS, 1), 112), torch.zeros(ROWS, 8, dtype=torch.int64)], -1)
    largest = torch.tensor([[0, 7] + 7 * [0]]).expand(V, -1)  # 32 features: products want a multiple of 16
    head = torch.cat([v, 1 - v, bits, largest], -1)
    logits = x @ head.t()
    alive = logits == logits.amax(-1, keepdim=True)
    candidates = torch.where(alive.sum(-1, keepdim=True) == 2, alive, ~alive)
    target = torch.stack([of.nonzero().flatten()[row % int(of.sum())] for row, of in enumerate(candidates)])
    target[4::5] = -100
    return finished(x, head, target, alive, dtype)


def finished(x, head, target, alive, dtype):
    p = alive.double() / alive.sum(-1, keepdim=True)
    of_logits = (p - F.one_hot(target.clamp(min=0), V)) * (target != -100)[:, None] / DIVISOR
    wanted = of_logits @ head.double(), of_logits.t() @ x.double()
    for exact in wanted:
        assert torch.equal(exact.to(dtype).double(), exact), "these numbers do not fit"
    return (x.to(dtype), head.to(dtype), target), tuple(exact.to(dtype) for exact in wanted)
