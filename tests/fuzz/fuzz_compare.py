"""What a public function should have returned, in float64, and how far each number may be from it.

Rows of logits are held against ``xent_ops.testing.oracle``, heads against ``linear_oracle``. Entropies, and gradients of
other outputs than the loss, are added here; through a head these are held to a part of the largest.
"""

import math

import torch
import torch.nn.functional as F

from xent_ops.testing import assert_grad, linear_oracle, oracle
from xent_ops.testing.rows import activated, assert_within, eps

OF_ROWS = ("ignore_index", "label_smoothing", "softcap", "logit_scale")
OF_HEADS = (*OF_ROWS, "reduction", "lse_square_scale", "divisor", "chunk_rows", "accumulate_dtype", "logits_dtype")


def expect(
    outputs, grads, upstream, *, target, logits=None, head=None, weight=None, function=None, token_weight=None,
    shard=None, part=None, several=False, **options
):  # fmt: skip
    """Raises AssertionError where an output or a gradient is out of its budget.

    Args:
        outputs, upstream: by name.
        grads: of the logits, or of input, linear_weight and linear_bias.
        target, weight: of all classes.
        logits: of all classes, which come last.
        head: (input, linear_weight, linear_bias or None) of all ranks, in the dtype of the product.
        token_weight: of each target; the problem is then that of the losses of rows, with other upstream gradients.
        function: the loss is the mean or the sum over tokens of these factors times the statistics of these names.
        shard: (first class, the class after the last) of this rank.
        part: (dimension, rank, ranks): this rank's part of the input.
        several: the target has K classes a row. Judged are K rows of one class, whose gradients are added.
        options: those of the function that are not their defaults.
    """
    counted = target.cpu().long() != options.get("ignore_index", -100)
    number = (counted.any(-1) if several else counted).sum()
    if several:
        rows_of = _SeveralClasses(counted)
        if function is None:
            outputs = rows_of.outputs(outputs, options.get("skip_ignored", False))
            upstream = rows_of.factors(upstream)
        else:
            function = rows_of.factors(function)
        logits = logits if logits is None else rows_of.repeated(logits)
        head = head if head is None else (rows_of.repeated(head[0]), *head[1:])
    if function is not None:
        divisor = options.pop("divisor", None) or 1.0
        divisor = number if options.pop("reduction", "mean") == "mean" else divisor
        factors = {name: torch.where(counted, row.double().cpu(), 0) / divisor for name, row in function.items()}
        upstream = {name: upstream["loss"].double().cpu() * factor for name, factor in factors.items()}
    reduced = None
    if token_weight is not None:
        reduction = options.pop("reduction", "mean")
        factor = _factors(token_weight.double().cpu(), target.cpu(), weight, reduction, options)
        of_rows = {name: upstream[name].double().cpu() * factor for name in ("loss", "z_loss") if name in upstream}
        upstream, reduced = {**upstream, **of_rows}, (factor, reduction)
        options = {**options, "reduction": "none"}
    tensors = [logits] if head is None else [tensor for tensor in head if tensor is not None]
    rows = Rows(
        exact_logits(tensors)[1].detach() if logits is None else logits, target.cpu(), weight, upstream, options
    )
    own = (logits if head is None else head[0]).dtype
    wide = torch.float64 if own == torch.float64 else torch.float32
    for name, value in outputs.items():
        assert value.dtype == (torch.int64 if name == "predictions" else wide), f"{name} is {value.dtype}"
    linear = None if head is None else _of_head(head, rows, weight, upstream, options, own)
    if function is None:
        _check_values(outputs, rows, linear, own, reduced)
    else:
        _check_sum(outputs["loss"], rows, linear, own, factors)
    start, stop = shard or (0, rows.logits.shape[-1])
    if head is None:
        expected = rows.expected._replace(
            grad=rows.expected.grad[..., start:stop], grad_scale=4 * rows.expected.grad_scale[..., start:stop]
        )
        if several:
            grad, scale = (tensor.sum(-2) for tensor in (expected.grad, expected.grad_scale))
            expected = expected._replace(grad=grad, grad_scale=scale, lse=expected.lse[..., 0])
        if stop > start:
            assert_grad(_without_padding(grads[0], stop - start, -1), expected)
        return
    wanted, bounds = list(linear.grads), list(linear.grad_bounds)
    if shard is not None:  # a sum over ranks of rounded parts
        bounds[0] = bounds[0] + 4 * eps(own) * (rows.expected.grad_scale @ head[1].detach().double().cpu().abs())
    if several:
        wanted[0], bounds[0] = wanted[0].sum(-2), bounds[0].sum(-2)
    assert_grads(grads, wanted, bounds, shard, part)


class _SeveralClasses:
    """K rows of one class for each row: what a row has once stands at its first place that counts, or else its first."""

    def __init__(self, counted):
        self.counted, first = counted, counted.to(torch.int8).argmax(-1, keepdim=True)
        self.first = torch.zeros_like(counted).scatter(-1, first, True)

    def repeated(self, tensor):
        return tensor.unsqueeze(-2).expand(*self.counted.shape, tensor.shape[-1])

    def factors(self, by_name):
        return {
            name: row if name == "log_probs" else torch.where(self.first, row.detach().cpu().unsqueeze(-1), 0.0)
            for name, row in by_name.items()
        }

    def outputs(self, outputs, skip_ignored):
        """Of places that are ignored in rows that count, what the judge expects of ignored rows."""
        spread = {name: outputs[name].unsqueeze(-1).expand(self.counted.shape) for name in ("entropy", "lse")}
        inner = (self.counted | self.first).to(spread["lse"].device)
        spread["entropy"] = torch.where(inner, spread["entropy"], 0.0)
        spread["lse"] = torch.where(inner, spread["lse"], math.inf) if skip_ignored else spread["lse"]
        return {**outputs, **spread}


def assert_grads(grads, wanted, bounds, shard=None, part=None, *, largest=False, tiny=1e-300):
    """Of logits, or of input, weight and bias. ``shard``, ``part``: as of ``expect``. ``largest``: one bound for all."""
    wanted, bounds = list(wanted), list(bounds)
    if part is not None:
        dim, rank, ranks = part
        wanted[0], bounds[0] = (tensor.chunk(ranks, dim)[rank] for tensor in (wanted[0], bounds[0]))
    for i, (name, grad) in enumerate(zip(("input", "weight", "bias"), grads, strict=False)):
        right, bound = wanted[i], bounds[i]
        bound = torch.full_like(bound, float(bound.max()) if bound.numel() else 0.0) if largest else bound
        if shard is not None and i > 0:
            start, stop = shard
            grad, right, bound = _without_padding(grad, stop - start, 0), right[start:stop], bound[start:stop]
        assert grad.shape == right.shape and bound.isfinite().all()
        assert len(grads) == 1 or grad.is_contiguous(), f"grad_{name} is not contiguous"
        assert_within(f"grad_{name}", grad, right, bound + tiny)


def exact_logits(tensors):
    """Leaves in float64, and the logits that they make: the only one, or those of input, weight and bias."""
    leaves = [tensor.detach().double().cpu().requires_grad_() for tensor in tensors]
    return leaves, F.linear(*leaves) if len(leaves) > 1 else leaves[0]


def products(grad_logits, tensors):
    """The gradients of the tensors of ``exact_logits``."""
    leaves, logits = exact_logits(tensors)
    return torch.autograd.grad(logits, leaves, grad_logits)


def spread(errors, tensors):
    """How far the gradients of these tensors are off where those of the logits are, each by itself: sums of squares."""
    squares = products(errors.square(), [tensor.detach().double().square() for tensor in tensors])
    return [square.sqrt() for square in squares]


def unit_of(own, linear):
    """The relative error of a logit: those of heads are rounded."""
    return max(eps(torch.float64 if own == torch.float64 else torch.float32), eps(own) if linear else 0.0)


def far(unit):
    """A budget relative to the numbers. Of heads of 16 bits 1/14 of it was seen (2500 draws on a CPU, 2026-11)."""
    return (2 if unit > 1e-4 else 64) * unit


def row_factors(counted, token_weight, reduction, divisor):
    """What the loss of each row is multiplied by; zeros in a mean of nothing."""
    weight = torch.where(counted, 1.0 if token_weight is None else token_weight.double().cpu(), 0.0).double()
    return (weight / (weight.sum() if reduction == "mean" else divisor if reduction == "sum" else 1.0)).nan_to_num(0.0)


def assert_loss(loss, own, values, bounds, factor, reduction):
    """``values`` of rows of this dtype, with ``bounds``, times ``row_factors``; a mean of nothing is NaN."""
    assert loss.dtype == (torch.float64 if own == torch.float64 else torch.float32), f"the loss is {loss.dtype}"
    wanted, bound = values.detach() * factor, bounds * factor.abs()
    if reduction != "none":
        wanted, bound = wanted.sum(), bound.sum()
        wanted = wanted + math.nan if reduction == "mean" and not factor.any() else wanted
    assert_within("loss", loss, wanted, bound + 1e-300)


def _factors(token_weight, target, weight, reduction, options):
    """What each target's loss is multiplied by."""
    counted = target.long() != options.get("ignore_index", -100)
    of_targets = token_weight = torch.where(counted, token_weight, 0)
    if reduction != "mean":
        return token_weight / (options.pop("divisor", None) or 1.0)
    if weight is not None:
        of_targets = token_weight * weight.double().cpu()[torch.where(counted, target.long(), 0)]
    return (token_weight / of_targets.sum()).nan_to_num(0.0)


def _without_padding(grad, classes, dim):
    assert grad.narrow(dim, classes, grad.shape[dim] - classes).count_nonzero() == 0, "padding got a gradient"
    return grad.narrow(dim, 0, classes)


class Rows:
    """Losses, lse and entropies of rows in float64, and the gradient of the logits for upstream gradients by name."""

    def __init__(self, logits, target, weight, upstream, options):
        self.logits, self.target = logits.detach().double().cpu(), target
        self.options = {name: options[name] for name in OF_ROWS if name in options}
        self.scale = options.get("logit_scale", 1.0)
        self.reduction, self.z_scale = options.get("reduction", "mean"), options.get("lse_square_scale", 0.0)
        self.skips = options.get("skip_ignored", False)
        self.counted = target.long() != options.get("ignore_index", -100)
        self.forward = oracle(self.logits, target, weight, **self.options)
        self.square = torch.where(self.counted, self.z_scale * self.forward.lse.square(), 0)
        self.divide = (torch.tensor(float(options.get("divisor") or 1.0)).double(),) * 2
        if self.reduction == "mean":
            w = torch.ones(logits.shape[-1]).double() if weight is None else weight.detach().double().cpu()
            of_target = torch.where(self.counted, w[torch.where(self.counted, target.long(), 0)], 0)
            self.divide = of_target.sum(), self.counted.sum().double()
        self.upstream = {name: value.detach().double().cpu().expand(target.shape) for name, value in upstream.items()}
        self._gradient(weight)
        self._entropies()

    def _given(self, name):
        value = self.upstream.get(name, torch.zeros(self.target.shape, dtype=torch.float64))
        return value if name == "lse" and not self.skips else torch.where(self.counted, value, 0)

    def _gradient(self, weight):
        def divided(value, by):
            return torch.where(value == 0, 0, value / by)

        a = divided(self._given("loss"), self.divide[0]) - self._given("log_probs")
        z = 2 * self.z_scale * (self._given("loss") + self._given("z_loss"))
        b = divided(torch.where(z == 0, 0, z * self.forward.lse), self.divide[1]) + self._given("lse")
        self.expected = oracle(self.logits, self.target, weight, grad_loss=a, grad_lse=b, **self.options)

    def _entropies(self):
        x = self.logits.clone().requires_grad_()
        log_p = activated(x, self.options.get("softcap"), self.scale).x.log_softmax(-1)
        entropy, c = -(log_p.exp() * log_p).sum(-1), self._given("entropy")
        (grad,) = torch.autograd.grad(entropy, x, c)
        self.entropy, self.far = torch.where(self.counted, entropy, 0).detach(), log_p.detach().abs().amax(-1)
        parts = c.abs().unsqueeze(-1) * log_p.exp() * (1 + log_p.abs() + entropy.unsqueeze(-1)) * abs(self.scale)
        self.expected = self.expected._replace(
            grad=self.expected.grad + grad, grad_scale=self.expected.grad_scale + parts.detach()
        )

    def reduced(self, values, by):
        if self.reduction == "none":
            return values
        return values.sum() / by


def _of_head(head, rows, weight, upstream, options, own):
    """LinearExpected for the upstream gradients of all outputs."""
    kept = {name: value for name, value in options.items() if name in OF_HEADS and value is not None}
    of_loss = upstream.get("loss", 0.0)
    if "log_probs" in upstream:
        kept["reduction"], of_loss = "none", -upstream["log_probs"]
    x, w, bias = head
    expected = linear_oracle(x, w, rows.target, bias, weight, upstream=of_loss, **kept)
    if set(upstream) <= {"loss"} or set(upstream) <= {"log_probs"}:
        return expected
    tensors = [tensor for tensor in head if tensor is not None]
    grads = products(rows.expected.grad, tensors)
    parts = spread(rows.expected.grad_scale, tensors)
    largest = abs(rows.scale) * rows.logits.abs().max() if rows.logits.numel() else 0.0
    tolerance = 4 * eps(own) * (4 + largest) * math.sqrt(1 + rows.target.numel() + sum(w.shape))
    tiny = torch.finfo(own).tiny
    bounds = tuple(
        torch.full_like(part, float(tolerance * part.max() + tiny) if part.numel() else 0.0) for part in parts
    )
    return expected._replace(grads=grads, grad_bounds=bounds)


def _check_values(outputs, rows, linear, own, reduced=None):
    """``reduced``: factors of losses of rows, and the reduction of these."""
    gpu = any(value.is_cuda for value in outputs.values())
    values = _Values(rows, linear, own, gpu)
    for name, value in outputs.items():
        if name == "predictions":
            _check_predictions(value.cpu(), rows, values.eps)
        elif name == "accuracy":
            hits = (outputs["predictions"].cpu() == rows.target) & rows.counted
            wanted = hits.sum().double() / rows.counted.sum()
            assert_within(name, value, wanted, torch.full_like(wanted, 4 * values.eps))
        else:
            wanted, bound = getattr(values, name)()
            if reduced is not None and name in ("loss", "z_loss"):
                factor, reduction = reduced
                empty = reduction == "mean" and not rows.counted.any() and (name == "loss" or rows.z_scale)
                bound = (bound + 16 * values.accumulator * wanted.abs()) * factor.abs()
                wanted = torch.where(factor == 0, 0, wanted * factor)
                wanted, bound = (wanted, bound) if reduction == "none" else (wanted.sum(), bound.sum())
                wanted = wanted + math.nan if empty else wanted
            assert_within(name, value, wanted, bound)


def _check_sum(value, rows, linear, own, factors):
    values, wanted, bound = _Values(rows, linear, own, value.is_cuda), 0.0, 0.0
    for name, factor in factors.items():
        statistic, off = getattr(values, name)()
        wanted += torch.where(rows.counted, statistic * factor, 0).sum()
        magnitude = off + 16 * values.accumulator * statistic.abs()
        bound += torch.where(rows.counted, magnitude * factor.abs(), 0).sum()
    assert_within("loss", value, wanted, bound)


class _Values:
    """The outputs by name: (what is wanted, how far it may be off)."""

    def __init__(self, rows, linear, own, gpu):
        self.rows, self.linear = rows, linear
        wide = eps(torch.float64 if own == torch.float64 else torch.float32)
        # What GPU kernels for 16-bit logits may be off with a softcap: see assert_lse.
        self.cap = 6e-7 * rows.options.get("softcap", 0.0) if gpu and eps(own) > 1e-4 else 0.0
        self.of_lse = self.cap + (8 * wide * (1 + rows.forward.lse.abs()) if linear is None else linear.lse_bound)
        self.far = 1 + rows.far + rows.forward.lse.abs()
        self.accumulator, self.eps = wide, wide
        if linear is not None and rows.logits.numel():  # logits are rounded
            self.eps = max(wide, own_eps(own, rows))
        square = rows.z_scale * (2 * rows.forward.lse.abs() + self.of_lse) * self.of_lse
        self.of_square = torch.where(rows.counted, square + 16 * wide * rows.square, 0)

    def loss(self):
        if self.linear is not None:
            return self.linear.value, self.linear.value_bound + self.cap * (1 + self.linear.value.abs())
        rows, loss, square = self.rows, self.rows.forward.loss, self.rows.square
        of_loss = (16 * self.accumulator + 2 * self.cap) * rows.forward.loss_scale
        of_loss = of_loss + 4 * self.accumulator * math.sqrt(1 + loss.numel()) * loss.abs()
        divide = rows.divide[0].abs()
        bound = rows.reduced(of_loss, divide) + rows.reduced(self._sums(self.of_square), rows.divide[1].abs())
        return rows.reduced(loss, rows.divide[0]) + rows.reduced(square, rows.divide[1]), bound

    def _sums(self, bound):
        return bound + 4 * self.accumulator * math.sqrt(1 + bound.numel()) * self.rows.square

    def z_loss(self):
        rows = self.rows
        # Without a z-loss zeros, where a mean of nothing would be NaN.
        wanted = rows.reduced(rows.square, rows.divide[1] if rows.z_scale else torch.tensor(1.0))
        return wanted, rows.reduced(self._sums(self.of_square), rows.divide[1].abs())

    def token_losses(self):
        bound = 16 * self.accumulator * self.rows.forward.loss_scale + 8 * self.eps * self.far
        return self.rows.forward.loss, torch.where(self.rows.counted, bound + 4 * self.cap, 0.0)

    def log_probs(self):
        bound = 16 * self.accumulator * self.rows.forward.loss_scale + 4 * self.eps * self.far
        return -self.rows.forward.loss, torch.where(self.rows.counted, bound + 2 * self.cap, 0.0)

    def lse(self):
        wanted = self.rows.forward.lse
        return (torch.where(self.rows.counted, wanted, math.inf) if self.rows.skips else wanted), self.of_lse

    def entropy(self):
        return self.rows.entropy, (32 * self.eps + 4 * self.cap) * self.far


def own_eps(own, rows):
    """The absolute error of logits that are rounded to their dtype."""
    return eps(own) * (1 + float(rows.logits.abs().max()) * abs(rows.scale))


def _check_predictions(value, rows, wide):
    x = rows.scale * rows.logits
    assert (value[~rows.counted] == -1).all(), "predictions of ignored rows"
    chosen = x.gather(-1, value.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    close = chosen >= x.amax(-1) - 4 * wide * (1 + x.abs().amax(-1))
    assert close[rows.counted].all(), "a prediction is no largest logit"
