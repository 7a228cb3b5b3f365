"""Inputs of a head and its loss as one, and the check: loss and both gradients against float64, by chunks of rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import check
from .cases import Variant
from .linear_cases import LinearVariant
from .outputs import Outputs, Run
from .problems import Expected, StepProblem
from .sizes import HeadShape, Shape

# Logits that are in float64 at a time, about five copies of them: 512 MiB each on a GPU, where a chunk of few rows
# would read and write all of the weight's gradient for little; 32 MiB elsewhere.
CHUNK = {"cuda": 1 << 26}
CHUNK_ELSEWHERE = check.CHUNK


class LinearProblem(StepProblem):
    """As a step, but a variant takes hidden states and weight itself, and the logits are nowhere rounded.

    The float64 outcome of both targets is kept, since all variants are compared with it: 2 x V x H x 8 bytes.
    """

    slack, loss_slack = 1.0, 1.0  # times the tolerances

    def __init__(
        self, shape: HeadShape, dtype: torch.dtype, device: torch.device, *, ignored: float | None = None
    ) -> None:
        super().__init__(Shape(shape.rows, shape.classes), dtype, device, shape.hidden, ignored=ignored)
        self.head = shape
        self.which = 0
        self._expected: dict[int, Expected] = {}

    def of_tokens(self) -> tuple[Tensor, ...]:
        """What a loss takes beside hidden states, matrix and targets."""
        return ()

    @property
    def chunk(self) -> int:
        return CHUNK.get(self.device.type, CHUNK_ELSEWHERE)

    @property
    def reported_shape(self) -> HeadShape:
        return self.head

    def use_targets(self, which: int) -> None:
        super().use_targets(which)
        self.which = which

    def bind(self, variant: Variant) -> Run:
        assert isinstance(variant, LinearVariant)
        hidden = self.hidden.detach().requires_grad_()
        matrix = self.matrix.detach().requires_grad_()
        target, products = self.target.detach(), variant.products
        if products is not None:
            return lambda: products(hidden.detach(), matrix.detach(), *self.of_tokens())
        loss_of = variant.build()

        def forward() -> Outputs:
            with torch.no_grad():
                return Outputs(loss_of(hidden, matrix, target, *self.of_tokens()), ())

        def run() -> Outputs:
            loss = loss_of(hidden, matrix, target, *self.of_tokens())
            return Outputs(loss.detach(), torch.autograd.grad(loss, (hidden, matrix)))

        if variant.auto_chunked:
            return chunked_by_inductor(run)
        return forward if variant.forward_alone else run

    def check(self, outputs: Outputs, variant: Variant) -> check.Verdict:
        """Gradients in the 2-norm. A row of hidden's may be off by the tolerance of a common row's size.

        The rounding errors of rows are independent, so that of their mean has a smaller tolerance, and four roundings
        to the dtype that the loss is returned in.
        """
        assert isinstance(variant, LinearVariant)
        rounding = torch.finfo(self.dtype).eps
        limit = self.slack * max(
            check.tolerance(self.dtype), 1e-4
        )  # float32: the products' own rounding, seen through exp
        of_loss = self.loss_slack * max(rounding / math.sqrt(self.head.rows), 3e-5)
        of_loss += 4 * torch.finfo(outputs.loss.dtype).eps
        if variant.in_8_bits is not None:
            limit, of_loss = variant.in_8_bits[0], of_loss + variant.in_8_bits[1]
        if variant.products is not None:  # torch's own, which have no loss
            return check.Verdict(0.0, 0.0, limit)
        expected = self.expected()
        difference = (outputs.loss.detach().double() - expected.loss).abs()
        loss_error = check.worst([difference / expected.loss.abs()])
        if outputs.loss.shape != ():
            loss_error = math.inf
        if variant.forward_alone:
            return check.Verdict(loss_error, 0.0, limit, loss_tolerance=of_loss)
        grad_hidden, grad_matrix = outputs.grads
        if grad_hidden.shape != self.hidden.shape or grad_matrix.shape != self.matrix.shape:
            return check.Verdict(loss_error, math.inf, limit, loss_tolerance=of_loss)
        of_rows = self._row_errors(grad_hidden, expected.hidden)
        hidden_error = check.worst([check.relative_error(grad_hidden, expected.hidden)])
        head_error = check.worst([check.relative_error(grad_matrix, expected.matrix)])
        # Errors of 8-bit numbers are those of many terms, and a row may have three times those of the whole.
        rows_slack = 1.0 if variant.in_8_bits is None else 3.0
        worst = max(check.worst([of_rows]) / rows_slack, hidden_error, head_error)
        return check.Verdict(loss_error, worst, limit, head_error, hidden_error, of_loss)

    def _row_errors(self, grad: Tensor, expected: Tensor) -> Tensor:
        """(rows,): an ignored row must be zeros."""
        size, counted = expected.norm(dim=1), self.target != check.IGNORE_INDEX
        common = size.square().sum().div(counted.sum()).sqrt()
        errors = (grad.double() - expected).norm(dim=1) / size.clamp(min=common)
        zero = (grad == 0).all(dim=1)
        return torch.where(counted, errors, torch.where(zero, 0.0, math.inf))

    def expected(self) -> Expected:
        if self.which not in self._expected:
            self._expected[self.which] = self._reference()
        return self._expected[self.which]

    def _reference(self) -> Expected:
        return self.reference(check.Options(), torch.float64, self.chunk)


def chunked_by_inductor(run: Run) -> Run:
    """Raises where Inductor compiled the step without chunks."""
    from torch._inductor import metrics

    before = metrics.num_auto_chunking

    def checked() -> Outputs:
        outputs = run()
        if metrics.num_auto_chunking == before:
            raise RuntimeError("Inductor's auto_chunker left the graph as it is")
        return outputs

    return checked
