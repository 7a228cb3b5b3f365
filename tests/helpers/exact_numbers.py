"""Numbers of which every order of every sum makes the same bits: a tile that is dropped or added twice cannot hide.

Inputs and heads are small integers. A row's logits are its maximum k at a power of two of classes, and k - 128 or less
elsewhere: probabilities are 1/m, once they are rounded to the 16 bits of the logits, and exactly 0. So all products, of
the logits and of the gradients, are sums of few small multiples of 1/V, which 16 bits hold.
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
    p = alive.double() / alive.sum(-1, keepdim=True)
    of_logits = (p - F.one_hot(target.clamp(min=0), V)) * (target != -100)[:, None] / DIVISOR
    wanted = of_logits @ head.double(), of_logits.t() @ x.double()
    for exact in wanted:
        assert torch.equal(exact.to(dtype).double(), exact), "these numbers do not fit"
    return (x.to(dtype), head.to(dtype), target), tuple(exact.to(dtype) for exact in wanted)
