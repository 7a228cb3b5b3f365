"""A problem has inputs, a step on them, and a check of its result: a loss of logits, or of hidden states and a head.

A problem allocates its tensors once, so that a captured CUDA graph can be replayed on other values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import check
from .arguments import Shape
from .check import PLAIN, Options
from .contestants import Contestant, Outputs

# Logits of a head held in float64 at a time, in about five copies: 512 MiB each on a GPU. There a chunk of few rows
# would be slow, because each chunk reads and writes all of the weight's gradient.
CHUNK = {"cuda": 1 << 26}


class Problem:
    """Base class with targets and class weights.

    ``ignored``: the fraction of rows that are ignored, at random positions; None ignores every 17th row.
    """

    unit = (1 << 20, "MiB")  # the unit of memory in tables, and its name

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float | None = None) -> None:
        self.shape, self.dtype, self.device, self.ignored = shape, dtype, device, ignored
        # Its own generator, because a failed capture of a CUDA graph leaves the default generator unusable.
        self.generator = torch.Generator(device).manual_seed(0)
        self.targets = (self._random_target(), self._random_target())
        self.target = self.targets[0].clone()
        self.weight = torch.rand(shape.classes, generator=self.generator, device=device) + 0.5

    def _random_target(self) -> Tensor:
        shape = self.shape
        target = torch.randint(shape.classes, (shape.rows,), generator=self.generator, device=self.device)
        # The first row is never ignored: the mean over no row is NaN.
        if self.ignored is None:
            target[16::17] = check.IGNORE_INDEX
        else:
            order = torch.randperm(shape.rows - 1, generator=self.generator, device=self.device) + 1
            target[order[: round(self.ignored * shape.rows)]] = check.IGNORE_INDEX
        return target

    def random(self, *size: int, std: float) -> Tensor:
        values = torch.randn(size, generator=self.generator, device=self.device, dtype=self.dtype)
        return values.mul_(std)

    def use_targets(self, which: int) -> None:
        self.target.copy_(self.targets[which])

    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors that get gradients."""
        raise NotImplementedError

    def others(self) -> tuple[Tensor, ...]:
        """A function's further arguments."""
        raise NotImplementedError

    def restore(self) -> None:
        """Undo a contestant's changes to the inputs."""

    def overwritten(self) -> bool:
        return False

    def bind(self, contestant: Contestant) -> Callable[[], Outputs]:
        function = contestant.load()
        leaves = tuple(tensor.detach().requires_grad_() for tensor in self.inputs())
        others = tuple(tensor.detach() for tensor in self.others())

        def run() -> Outputs:
            found = function(*leaves, *others)
            if isinstance(found, Outputs):
                return found
            return Outputs(found.detach(), torch.autograd.grad(found, leaves))

        return run

    def check(self, outputs: Outputs, contestant: Contestant) -> check.Verdict:
        raise NotImplementedError


class _Produced(torch.autograd.Function):
    """Returns its input like the output of a layer: it is no leaf, so its gradient may be written over it.

    It is no view either. After a write in place, autograd moves a view in the graph, and no gradient would reach it.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits.new_empty(0).set_(
            logits.untyped_storage(), logits.storage_offset(), logits.shape, logits.stride()
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def produced(logits: Tensor) -> Tensor:
    out: Tensor = _Produced.apply(logits)
    return out


class Loss(Problem):
    """Forward and backward of the loss alone, from logits."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float | None = None) -> None:
        super().__init__(shape, dtype, device, ignored)
        self.source = self.random(*shape, std=3.0)
        self.logits = self.source.clone()
        self.unit = (self.logits.nbytes, "logits")

    def inputs(self) -> tuple[Tensor, ...]:
        return (self.logits,)

    def others(self) -> tuple[Tensor, ...]:
        return self.target, self.weight

    def restore(self) -> None:
        self.logits.copy_(self.source)

    def overwritten(self) -> bool:
        return not torch.equal(self.logits, self.source)

    def check(self, outputs: Outputs, contestant: Contestant) -> check.Verdict:
        limit = check.tolerance(self.dtype)
        limits = {"loss": limit, "gradient": limit}
        loss, grads = outputs
        grad = grads[0] if grads else loss
        if loss.shape != () or grad.shape != self.logits.shape or grad.dtype != self.dtype:
            return check.Verdict(dict.fromkeys(limits, math.inf), limits)
        share = check.cross_entropy(self.target, self.weight, contestant.options)
        scale = 1 / check.divisor(self.target, self.weight, contestant.options)
        smoothing = check.smoothing_term(self.weight, contestant.options, scale)
        step = torch.finfo(grad.dtype).tiny * torch.finfo(grad.dtype).eps / 2
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        errors = []
        for part in check.chunks(*self.shape):
            value, expected = check.differentiated(share, self.source[part], part)
            total += value
            errors.append(check.row_errors(grad[part], expected, self.target[part], scale, step, smoothing))
        loss_error = check.worst((loss.detach().double() - total).abs() / total.abs())
        return check.Verdict({"loss": loss_error, "gradient": check.worst(*errors)}, limits)


class Expected(NamedTuple):
    loss: Tensor  # ()
    hidden: Tensor  # gradient of the hidden states, (rows, H)
    matrix: Tensor  # (classes, H)


class Head(Problem):
    """Gradients of hidden states and of a head's weight, compared with float64, in which no logit is rounded.

    It keeps the float64 results of both targets for all contestants: 2 x V x H x 8 bytes.
    """

    slack, loss_slack = 1.0, 1.0  # factors of the tolerances

    def __init__(
        self, shape: Shape, dtype: torch.dtype, device: torch.device, hidden: int, ignored: float | None = None
    ) -> None:
        super().__init__(shape, dtype, device, ignored)
        self.hidden = self.random(shape.rows, hidden, std=1.0)
        self.matrix = self.random(shape.classes, hidden, std=3.0 / math.sqrt(hidden))
        self.which = 0
        self._expected: dict[Any, Expected] = {}

    def use_targets(self, which: int) -> None:
        super().use_targets(which)
        self.which = which

    def inputs(self) -> tuple[Tensor, ...]:
        return self.hidden, self.matrix

    def others(self) -> tuple[Tensor, ...]:
        return self.target, *self.row_tensors()

    def row_tensors(self) -> tuple[Tensor, ...]:
        """A function's arguments after hidden states, matrix and targets."""
        return ()

    def share(self, options: Options) -> check.Share:
        """The loss as a function of float64 logits."""
        return check.cross_entropy(self.target, self.weight, options)

    def logits_at_once(self) -> int:
        return CHUNK.get(self.device.type, check.CHUNK)

    def check(self, outputs: Outputs, contestant: Contestant) -> check.Verdict:
        """Compare gradients in the 2-norm. The limit of a row of hidden's gradient is relative to a typical row.

        The rounding errors of rows are independent. So the tolerance of their mean is smaller, plus four roundings to
        the dtype of the returned loss.
        """
        # 1e-4 for float32: exp enlarges the rounding of the products
        limit = contestant.slack * self.slack * max(check.tolerance(self.dtype), 1e-4)
        loss_limit = (
            contestant.slack * self.loss_slack * max(torch.finfo(self.dtype).eps / math.sqrt(self.shape.rows), 3e-5)
        )
        loss_limit += 4 * torch.finfo(outputs.loss.dtype).eps
        rows_limit = limit
        if contestant.in_8_bits is not None:
            limit, loss_limit = contestant.in_8_bits[0], loss_limit + contestant.in_8_bits[1]
            rows_limit = 3 * limit  # errors of 8-bit numbers are those of many terms
        expected = self.expected(contestant.options)
        errors = {"loss": check.worst((outputs.loss.detach().double() - expected.loss).abs() / expected.loss.abs())}
        limits = {"loss": loss_limit, "dH": limit, "dH of a row": rows_limit, "dW": limit}
        if outputs.loss.shape != ():
            errors["loss"] = math.inf
        if outputs.grads:  # without gradients it is a forward alone
            hidden, matrix = outputs.grads
            errors["dH"] = check.worst(check.relative_error(hidden, expected.hidden))
            if math.isfinite(errors["dH"]):
                errors["dH of a row"] = check.worst(self._row_errors(hidden, expected.hidden))
            errors["dW"] = check.worst(check.relative_error(matrix, expected.matrix))
        return check.Verdict(errors, limits)

    def _row_errors(self, grad: Tensor, expected: Tensor) -> Tensor:
        """The error of each row, (rows,). An ignored row must be zeros."""
        size, counted = expected.norm(dim=1), self.target != check.IGNORE_INDEX
        common = size.square().sum().div(counted.sum()).sqrt()
        errors = (grad.double() - expected).norm(dim=1) / size.clamp(min=common)
        zero = (grad == 0).all(dim=1)
        return torch.where(counted, errors, torch.where(zero, 0.0, math.inf))

    def expected(self, options: Options = PLAIN) -> Expected:
        key = self.which, options
        if key not in self._expected:
            self._expected[key] = self._reference(options)
        return self._expected[key]

    def _reference(self, options: Options) -> Expected:
        """The expected results in float64, by chunks of rows."""
        share, matrix = self.share(options), self.matrix.double()
        grad_matrix = torch.zeros_like(matrix)
        grad_hidden = torch.empty(self.hidden.shape, dtype=torch.float64, device=self.device)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for part in check.chunks(*self.shape, self.logits_at_once()):
            hidden = self.hidden[part].double()
            value, grad = check.differentiated(share, hidden @ matrix.T, part)
            total += value
            torch.mm(grad, matrix, out=grad_hidden[part])
            grad_matrix.addmm_(grad.T, hidden)
        return Expected(total, grad_hidden, grad_matrix)
