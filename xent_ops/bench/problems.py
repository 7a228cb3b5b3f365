"""A problem has inputs, a step on them, and a check of its result: a loss of logits, or of hidden states and a head.

A problem allocates its tensors once, so that a captured CUDA graph can be replayed on other values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import check
from .arguments import Shape
from .check import Options
from .contestants import COPY, THREE_MATMULS, Contestant, Outputs


@dataclass(frozen=True)
class Setting:
    """The device and the settings of all tables of a run."""

    device: torch.device
    dtype: torch.dtype
    ignored: float | None = None  # the fraction of rows that are ignored, at random positions; None: every 17th row
    budget_ms: float = 1.0  # time to measure one contestant
    graph: bool = False  # in CUDA graphs
    row: bool = False  # measure the wall time of a call in a row of calls
    busy: str = ""  # why all times are unsteady: the machine was busy before the run


class Problem:
    """Base class with targets and class weights. Subclasses set ``inputs``, which get gradients, and ``others``."""

    unit: str  # of ratios: the fastest unit whose name begins so
    memory_unit = (1 << 20, "MiB")  # of tables
    inputs: tuple[Tensor, ...]
    others: tuple[Any, ...]  # a function's further arguments

    def __init__(self, shape: Shape, setting: Setting) -> None:
        self.shape, self.dtype, self.device, self.ignored = shape, setting.dtype, setting.device, setting.ignored
        # Its own generator, because a failed capture of a CUDA graph leaves the default generator unusable.
        self.generator = torch.Generator(self.device).manual_seed(0)
        self.which, self.targets = 0, (self._random_target(), self._random_target())
        self.target = self.targets[0].clone()
        self.weight = torch.rand(shape.classes, generator=self.generator, device=self.device) + 0.5

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

    def random(self, *size: int, std: float = 1.0) -> Tensor:
        values = torch.randn(size, generator=self.generator, device=self.device, dtype=self.dtype)
        return values.mul_(std)

    def use_targets(self, which: int) -> None:
        self.which = which
        self.target.copy_(self.targets[which])

    def restore(self) -> None:
        """Undo a contestant's changes to the inputs."""

    def bind(self, contestant: Contestant) -> Callable[[], Outputs]:
        function = contestant.load()
        leaves = tuple(tensor.detach().requires_grad_() for tensor in self.inputs)
        others = (*self.others, self.weight) if "weight" in contestant.options else self.others
        # Tensors of its own: torch.compile keeps marks of dynamic sizes in them.
        others = tuple(other.detach() if isinstance(other, Tensor) else other for other in others)

        def run() -> Outputs:
            found = function(*leaves, *others)
            if isinstance(found, Outputs):
                return found
            return Outputs(found.detach(), torch.autograd.grad(found, leaves))

        return run

    def expected_rows(self, logits: Tensor, part: slice, options: Options) -> tuple[Tensor, Tensor]:
        """The part of the loss that comes from some rows of float64 logits, and the gradient of these logits."""
        value, expected = check.cross_entropy(logits, self.target, part, self.weight, options)
        return value, expected.grad

    def check(self, outputs: Outputs, contestant: Contestant) -> check.Errors:
        raise NotImplementedError

    def finish(self, results: list[Any]) -> None:
        """Add figures of this problem only."""


class Loss(Problem):
    """Forward and backward of the loss alone, from logits."""

    unit = COPY

    def __init__(self, shape: Shape, setting: Setting) -> None:
        super().__init__(shape, setting)
        self.source = self.random(*shape, std=3.0)
        self.logits = self.source.clone()
        self.memory_unit = (self.logits.nbytes, "logits")
        self.inputs, self.others = (self.logits,), (self.target,)

    def restore(self) -> None:
        self.logits.copy_(self.source)

    def check(self, outputs: Outputs, contestant: Contestant) -> check.Errors:
        limit, grad = check.tolerance(self.dtype), outputs.grads[0]
        if grad.shape != self.logits.shape or grad.dtype != self.dtype:
            return {"gradient": (math.inf, limit)}
        total, errors = torch.zeros((), dtype=torch.float64, device=self.device), []
        for part in check.chunks(*self.shape, self.device):
            row_args = self.source[part], self.target, part, self.weight
            value, expected = check.cross_entropy(*row_args, contestant.options)
            total += value
            errors.append(check.row_errors(grad[part], expected, self.target[part]))
        return {"loss": (check.loss_error(outputs.loss, total), limit), "gradient": (check.worst(*errors), limit)}


class Expected(NamedTuple):
    loss: Tensor  # ()
    hidden: Tensor  # gradient of the hidden states, (rows, H)
    matrix: Tensor  # (classes, H)


class Head(Problem):
    """Gradients of hidden states and of a head's weight, compared with float64, in which no logit is rounded.

    It keeps the float64 results of both targets for all contestants: 2 x V x H x 8 bytes.
    """

    unit = THREE_MATMULS
    slack, loss_slack = 1.0, 1.0  # factors of the tolerances

    def __init__(self, shape: Shape, hidden: int, setting: Setting) -> None:
        super().__init__(shape, setting)
        self.hidden = self.random(shape.rows, hidden)
        self.matrix = self.random(shape.classes, hidden, std=3.0 / math.sqrt(hidden))
        self.inputs, self.others = (self.hidden, self.matrix), (self.target,)
        self._expected: dict[tuple[int, str], Expected] = {}

    def limits(self, outputs: Outputs, contestant: Contestant) -> tuple[float, float]:
        """The limits of the loss and of a gradient in the 2-norm.

        The rounding errors of rows are independent. So the tolerance of their mean is smaller, plus four roundings to
        the dtype of the returned loss.
        """
        # 1e-4 for float32: exp enlarges the rounding of the products
        limit = contestant.slack * self.slack * max(check.tolerance(self.dtype), 1e-4)
        mean_limit = max(torch.finfo(self.dtype).eps / math.sqrt(self.shape.rows), 3e-5)
        loss_limit = contestant.slack * self.loss_slack * mean_limit + 4 * torch.finfo(outputs.loss.dtype).eps
        return loss_limit + contestant.in_8_bits[1], limit + contestant.in_8_bits[0]

    def check(self, outputs: Outputs, contestant: Contestant) -> check.Errors:
        expected = self.expected(contestant.options)
        loss_limit, limit = self.limits(outputs, contestant)
        errors = {"loss": (check.loss_error(outputs.loss, expected.loss), loss_limit)}
        if outputs.grads:  # without gradients it is a forward alone
            hidden, matrix = outputs.grads
            errors["dH"] = (check.norm_error(hidden, expected.hidden), limit)
            if hidden.shape == expected.hidden.shape:
                row_limit = limit + 2 * contestant.in_8_bits[0]  # errors of 8-bit numbers are those of many terms
                errors["dH of a row"] = (check.worst(self._row_errors(hidden, expected.hidden)), row_limit)
            errors["dW"] = (check.norm_error(matrix, expected.matrix), limit)
        return errors

    def _row_errors(self, grad: Tensor, expected: Tensor) -> Tensor:
        """The error of each row, (rows,), relative to a typical row at least. An ignored row must be zeros."""
        size, counted = expected.norm(dim=1), self.target != check.IGNORE_INDEX
        common = size.square().sum().div(counted.sum()).sqrt()
        errors = (grad - expected).norm(dim=1) / size.clamp(min=common)
        zero = (grad == 0).all(dim=1)
        return torch.where(counted, errors, torch.where(zero, 0.0, math.inf))

    def expected(self, options: Options) -> Expected:
        """The expected results in float64, by chunks of rows."""
        key = self.which, str(options)
        if key not in self._expected:
            matrix = self.matrix.detach().double()
            hidden_grad = torch.empty(self.hidden.shape, dtype=torch.float64, device=self.device)
            found = Expected(matrix.new_zeros(()), hidden_grad, torch.zeros_like(matrix))
            for part in check.chunks(*self.shape, self.device):
                hidden = self.hidden[part].detach().double()
                value, grad = self.expected_rows(hidden @ matrix.T, part, options)
                found.loss.add_(value)
                torch.mm(grad, matrix, out=found.hidden[part])
                found.matrix.addmm_(grad.T, hidden)
            self._expected[key] = found
        return self._expected[key]
