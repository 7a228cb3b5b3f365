"""Inputs, what is run on them, and the check of its outcome: a loss on given logits, or a step from hidden states.

Tensors of a problem are allocated once, so that a captured CUDA graph can be replayed on other values.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import check
from .cases import Variant
from .check import Options, Reference
from .outputs import Outputs, Run
from .sizes import HeadShape, ModelShape, Shape


class Problem:
    """Base: targets, class weights, and the logits' size in bytes, which is the unit.

    ``ignored``: the fraction of rows, here and there, that are ignored; None for every 17th.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device, *, ignored: float | None = None) -> None:
        self.shape, self.dtype, self.device, self.ignored = shape, dtype, device, ignored
        # A generator of our own: a CUDA graph whose capture failed leaves the default one unusable.
        self.generator = torch.Generator(device).manual_seed(0)
        self.unit = shape.rows * shape.classes * dtype.itemsize
        self.targets = (self._random_target(), self._random_target())
        self.target = self.targets[0].clone()
        self.weight = torch.rand(shape.classes, generator=self.generator, device=device) + 0.5

    def _random_target(self) -> Tensor:
        shape = self.shape
        target = torch.randint(shape.classes, (shape.rows,), generator=self.generator, device=self.device)
        # Not the first row: a single row that is ignored has a mean of nothing, NaN.
        if self.ignored is None:
            target[16::17] = check.IGNORE_INDEX
        else:
            order = torch.randperm(shape.rows - 1, generator=self.generator, device=self.device) + 1
            target[order[: round(self.ignored * shape.rows)]] = check.IGNORE_INDEX
        return target

    def random(self, *size: int, std: float) -> Tensor:
        values = torch.randn(size, generator=self.generator, device=self.device, dtype=self.dtype)
        return values.mul_(std)

    @property
    def reported_shape(self) -> Shape | HeadShape | ModelShape:
        return self.shape

    def use_targets(self, which: int) -> None:
        self.target.copy_(self.targets[which])

    def inputs(self) -> tuple[Tensor, ...]:
        """What the gradients are taken of."""
        raise NotImplementedError

    def restore(self) -> None:
        """Undo what a variant did to the inputs."""

    def overwritten(self) -> bool:
        return False

    def bind(self, variant: Variant) -> Run:
        raise NotImplementedError

    def check(self, outputs: Outputs, variant: Variant) -> check.Verdict:
        raise NotImplementedError


class _Produced(torch.autograd.Function):
    """The same memory as what a layer would return: no leaf, so that its gradient may be written over it.

    Nor a view: autograd gives a view that was written another place in the graph, where no gradient is asked for.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits.new_empty(0).set_(
            logits.untyped_storage(), logits.storage_offset(), logits.shape, logits.stride()
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class LossProblem(Problem):
    """Forward and backward of the loss alone, from logits."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device, *, ignored: float | None = None) -> None:
        super().__init__(shape, dtype, device, ignored=ignored)
        self.source = self.random(*shape, std=3.0)
        self.logits = self.source.clone()

    def inputs(self) -> tuple[Tensor, ...]:
        return (self.logits,)

    def restore(self) -> None:
        self.logits.copy_(self.source)

    def overwritten(self) -> bool:
        return not torch.equal(self.logits, self.source)

    def bind(self, variant: Variant) -> Run:
        function = variant.build()
        # Aliases of this variant alone: mark_dynamic leaves a mark on the tensor.
        logits, target, weight = self.logits.detach().requires_grad_(), self.target.detach(), self.weight
        if variant.dynamic:
            torch._dynamo.mark_dynamic(logits, 0)
            torch._dynamo.mark_dynamic(target, 0)

        def run() -> Outputs:
            if variant.gives_grad:
                loss, grad = function(logits.detach(), target, weight)
                return Outputs(loss, (grad,))
            x = _Produced.apply(logits) if variant.in_place else logits
            loss = function(x, target, weight)
            return Outputs(loss.detach(), torch.autograd.grad(loss, (x,)))

        return run

    def check(self, outputs: Outputs, variant: Variant) -> check.Verdict:
        (grad,) = outputs.grads
        return check.compare(outputs.loss, grad, self.source, self.target, self.weight, variant.options)


class Expected(NamedTuple):
    loss: Tensor  # ()
    hidden: Tensor  # gradient of the hidden states, (rows, H)
    matrix: Tensor  # (classes, H)


class StepProblem(Problem):
    """hidden @ W.T -> loss -> gradients of hidden and W: the end of a training step; logits are an intermediate."""

    def __init__(
        self, shape: Shape, dtype: torch.dtype, device: torch.device, width: int, *, ignored: float | None = None
    ) -> None:
        super().__init__(shape, dtype, device, ignored=ignored)
        self.hidden = self.random(shape.rows, width, std=1.0).requires_grad_()
        self.matrix = self.random(shape.classes, width, std=3.0 / math.sqrt(width)).requires_grad_()

    def inputs(self) -> tuple[Tensor, ...]:
        return self.hidden, self.matrix

    def bind(self, variant: Variant) -> Run:
        hidden = self.hidden.detach().requires_grad_()
        matrix = self.matrix.detach().requires_grad_()
        target, weight = self.target.detach(), self.weight
        if variant.dynamic:
            torch._dynamo.mark_dynamic(hidden, 0)
            torch._dynamo.mark_dynamic(target, 0)
        step = variant.build_step()

        def run() -> Outputs:
            if variant.products_only:
                return step(hidden.detach(), matrix.detach(), target, weight)
            loss = step(hidden, matrix, target, weight)
            return Outputs(loss.detach(), torch.autograd.grad(loss, (hidden, matrix)))

        return run

    def check(self, outputs: Outputs, variant: Variant) -> check.Verdict:
        """Gradients in the 2-norm: of hidden by row, of W as a whole (a class that no row names is all rounding)."""
        of_dtype = max(check.tolerance(self.dtype), 1e-4)  # float32: the products' own rounding, seen through exp
        limit = variant.options.slack * of_dtype
        grad_hidden, grad_matrix = outputs.grads
        if grad_hidden.shape != self.hidden.shape or grad_matrix.shape != self.matrix.shape:
            return check.Verdict(math.inf, math.inf, limit)
        # Logits as the variants store them.
        expected = self.reference(variant.options, self.dtype, products_only=variant.products_only)
        # Ignored rows are 0 of 0, and must be.
        size = expected.hidden.norm(dim=1).clamp(min=torch.finfo(torch.float64).tiny)
        of_rows = (grad_hidden.double() - expected.hidden).norm(dim=1) / size
        head_error = check.worst([check.relative_error(grad_matrix, expected.matrix)])
        difference = (outputs.loss.double() - expected.loss).abs()
        loss_error = check.worst([difference / expected.loss.abs().clamp(min=1e-300)])
        return check.Verdict(loss_error, max(check.worst([of_rows]), head_error), limit, head_error)

    def float64(self, options: Options) -> Reference:
        """The loss of rows of logits."""
        return Reference(self.target, self.weight, options)

    def reference(
        self, options: Options, stored: torch.dtype, logits: int | None = None, products_only: bool = False
    ) -> Expected:
        """In float64, by chunks of rows with so many ``logits``, which are rounded to the dtype ``stored``."""
        reference = self.float64(options)
        matrix = self.matrix.detach().double()
        grad_matrix = torch.zeros_like(matrix)
        grad_hidden = torch.empty(self.hidden.shape, dtype=torch.float64, device=self.device)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for part in check.chunks(*self.shape, logits):
            hidden = self.hidden.detach()[part].double()
            of_rows = (hidden @ matrix.T).to(stored)
            share, grad = (0.0, of_rows.double()) if products_only else reference.rows(part, of_rows)
            total += share
            torch.mm(grad, matrix, out=grad_hidden[part])
            grad_matrix.addmm_(grad.T, hidden)
        return Expected(total, grad_hidden, grad_matrix)
