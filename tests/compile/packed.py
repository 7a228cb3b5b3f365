"""Modules whose packages hold every operator that can be packed for CUDA, and what they are called with."""

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import xent_ops

ops = torch.ops.xent


class Operators(nn.Module):
    """Each operator of class indices once."""

    def __init__(self, full):
        super().__init__()
        self.full = full
        self.options = {"ignore_index": 7}
        if full:
            self.options |= {"label_smoothing": 0.1, "softcap": 30.0, "logit_scale": 0.5}

    def forward(self, logits, target, class_weight, rows, left, right):
        """logits (N, V), target (N,), class_weight (V,), rows (N,): some numbers; left @ right.T: other logits."""
        options, weight = self.options, class_weight if self.full else None
        z_loss = {"lse_square_scale": 1e-2 if self.full else 0.0}
        loss, lse, *_ = ops.cross_entropy_forward(logits, target, weight, **options)
        top = ops.cross_entropy_forward(logits, target, weight, True, **options)[:3]
        entropy = ops.cross_entropy_forward(logits, target, weight, True, True, **options)
        value, divisor, reduced_lse, _ = ops.cross_entropy_reduced(logits, target, weight, **options, **z_loss)
        total = ops.cross_entropy_reduced(logits, target, weight, **options, **z_loss, reduction="sum")
        # The product's only reader writes the gradient over it.
        in_place = ops.cross_entropy_backward(
            value, None, left @ right.t(), target, reduced_lse, weight, divisor, **options, **z_loss
        )
        apart = ops.cross_entropy_backward(rows, rows if self.full else None, logits, target, lse, weight, **options)
        of_entropy = ops.cross_entropy_backward(
            rows, None, logits, target, lse, weight, None, rows, entropy[3], **options
        )
        divisors = ops.row_divisors(target, weight, rows if self.full else None, ignore_index=7, **z_loss)
        scale, square = divisors[1], divisors[2] if self.full else None
        summary = ops.row_summary(loss, lse, target, weight, rows, None, top[2], ignore_index=7, **z_loss)
        with_grad = ops.cross_entropy_with_grad(logits, target, scale, square, weight, **options)
        over = ops.cross_entropy_with_grad(left @ right.t(), target, rows, None, weight, **options)
        # lse_low is what float32 leaves out of lse: only their sum is a number to compare.
        total, entropy = ((*one[:-1], one[lse].double() + one[-1]) for one, lse in ((total, 2), (entropy, 1)))
        return (
            loss, lse, *top, *entropy, value, divisor, *total, in_place, apart, of_entropy, *divisors, *summary, *with_grad, *over,
            ops.linear_scale_grad(left, value),
        )  # fmt: skip


class Linear(nn.Module):
    """The operators of a head and its loss, by chunks."""

    def __init__(self, chunk_rows):
        super().__init__()
        self.chunk_rows = chunk_rows

    def forward(self, hidden, head, target, bias):
        """hidden (N, H), head (V, H), target (N,), bias (V,)."""
        chunks = {"chunk_rows": self.chunk_rows, "ignore_index": 7}
        rows = (hidden, head, target, bias)
        loss, lse, *_ = ops.linear_cross_entropy_forward(*rows, **chunks)
        top = ops.linear_cross_entropy_forward(*rows, None, True, True, **chunks)
        upstream = loss / 64
        gradients = ops.linear_cross_entropy_backward(upstream, None, hidden, head, target, lse, bias, **chunks)
        with_grad = ops.linear_cross_entropy_with_grad(*rows, **chunks, lse_square_scale=1e-2)
        frozen = ops.linear_cross_entropy_with_grad(*rows, None, None, None, [True, False, False], **chunks)
        *top, lse_low, _ = top
        names = [result.name for result in ops.linear_cross_entropy_with_grad.default._schema.returns]
        # The value too: a package leaves out launches whose results nobody reads, and eager does not.
        of_frozen = frozen[names.index("value")], frozen[names.index("grad_input")]
        return loss, lse, *top, top[1].double() + lse_low, *gradients, *with_grad, *of_frozen


def linear_inputs(rows, classes, features, dtype, device, ignored=7):
    _, target, _, _, _, _ = inputs(rows, classes, dtype, device, ignored)
    return (
        torch.randn(rows, features, device=device, dtype=dtype),
        torch.randn(classes, features, device=device, dtype=dtype) / features**0.5,
        target,
        torch.randn(classes, device=device, dtype=dtype),
    )


class Distillation(nn.Module):
    """The operators of distillation, of given logits and by chunks."""

    def __init__(self, chunk_rows):
        super().__init__()
        self.chunk_rows = chunk_rows

    def forward(self, hidden, head, target, bias, rows):
        """As Linear; rows (N,): some numbers. The teacher is the student, seen in a mirror."""
        options = {"ignore_index": 7, "temperature": 2.0, "softcap": 30.0, "fields": "mixture,overlap,log_prob"}
        chunks = {"chunk_rows": self.chunk_rows, "ignore_index": 7}
        logits, teacher = hidden @ head.t(), hidden @ head.flip(0).t()
        values, statistics = ops.divergences_forward(logits, teacher, target, **options)
        upstream = rows.expand(5, -1)
        gradient = ops.divergences_backward(upstream, logits, teacher, target, statistics, **options)
        with_grad = ops.divergences_with_grad(logits, teacher, target, rows, ignore_index=7, fields="reverse_kl")
        heads = (hidden, head, target, hidden, head.flip(0), bias)
        of_rows, statistics, _ = ops.linear_divergences_forward(*heads, **chunks)
        again = ops.linear_divergences_backward(upstream, statistics, *heads, **chunks)
        return values, gradient, *with_grad, of_rows, *again, *ops.linear_divergences_with_grad(*heads, **chunks)


def distillation_inputs(rows, classes, features, dtype, device):
    return *linear_inputs(rows, classes, features, dtype, device), torch.randn(rows, device=device)


class Shard(nn.Module):
    """The operators of one rank's columns, [256, 512) of 1024; ``gathered`` is what all four ranks have made."""

    def forward(self, logits, target, gathered, rows):
        place = (256, 1024)
        part = ops.cross_entropy_shard(logits, target, *place, label_smoothing=0.1)
        joined = ops.cross_entropy_shard_join(logits, target, gathered, *place, label_smoothing=0.1)
        reduced = ops.cross_entropy_shard_reduced(logits, target, gathered, *place, label_smoothing=0.1)
        of_slice = (None, *place)  # no class weight, whose lse_coefficient it would be
        saved = (logits, target, joined[1])
        gradient = ops.cross_entropy_backward(rows, None, *saved, *(None,) * 4, *of_slice, label_smoothing=0.1)
        of_entropy = ops.cross_entropy_backward(rows, None, *saved, None, None, rows, rows, *of_slice)
        soft = ops.soft_cross_entropy_forward(logits, logits.float().softmax(-1).to(logits.dtype), None)
        return part, *joined, *reduced, gradient, of_entropy, *soft


def shard_inputs(rows, dtype, device):
    logits = [torch.randn(rows, 256, device=device, dtype=dtype) for _ in range(4)]
    target = torch.randint(1024, (rows,), device=device)
    parts = [
        ops.cross_entropy_shard(part, target, 256 * rank, 1024, label_smoothing=0.1) for rank, part in enumerate(logits)
    ]
    return logits[1], target, torch.cat(parts), torch.randn(rows, device=device)


def traced_step(hidden, head, target):
    """A head, its loss and the gradients, as a graph for static shapes: autograd does not run in a package."""

    def step(hidden, head, target):
        hidden, head = hidden.detach().requires_grad_(), head.detach().requires_grad_()
        loss = xent_ops.cross_entropy(hidden @ head.t(), target, ignore_index=7, lse_square_scale=1e-4)
        return loss.detach(), *torch.autograd.grad(loss, (hidden, head))

    return make_fx(step)(hidden, head, target)


def inputs(rows, classes, dtype, device, ignored=7):
    """What Operators takes. A tenth of the targets is ignored."""
    target = torch.randint(classes, (rows,), device=device)
    target[torch.rand(rows, device=device) < 0.1] = ignored
    return (
        torch.randn(rows, classes, device=device, dtype=dtype) * 3,
        target,
        torch.rand(classes, device=device) + 0.5,
        torch.randn(rows, device=device),
        torch.randn(rows, 64, device=device, dtype=dtype),
        torch.randn(classes, 64, device=device, dtype=dtype) / 8,
    )
