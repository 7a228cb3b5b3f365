"""A training step of a Llama-like decoder, and the check of a variant's: against the plain eager step.

Not against float64: the body's own rounding, which is the same for all variants, would be all that is seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import inductor
from . import check
from .cases import Variant
from .linear_problem import chunked_by_inductor
from .llama import Llama
from .model_cases import ModelVariant
from .outputs import Outputs, Run
from .problems import Problem
from .sizes import ModelShape, Shape, Sizes

# Logits that the eager step holds at a time, about five copies of them in float32: 256 MiB each. All at once they would
# need more than the step that is measured, 134 GB for 65536 tokens and 128256 classes.
CHUNK = 1 << 26


class _Expected(NamedTuple):
    loss: Tensor  # ()
    head: Tensor  # gradient of the head's weight
    early: Tensor  # gradient of the first block's products to q, k and v: all of the backward lies before it


class ModelProblem(Problem):
    """Random tokens. The targets are the next tokens, and the last position of each sequence is ignored.

    ``ignored``: the fraction of positions, these and others here and there, that are ignored; None for these alone.
    """

    def __init__(
        self,
        sizes: Sizes,
        batch: int,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        ignored: float | None = None,
    ) -> None:
        super().__init__(Shape(batch * length, sizes.classes), dtype, device)
        self.reported = ModelShape(batch, length, sizes.layers, sizes.hidden, sizes.classes)
        with torch.device(device):
            self.model = Llama(sizes, self.generator).to(dtype)
        self.tokens = torch.randint(sizes.classes, (batch, length), generator=self.generator, device=device)
        following = self.tokens.roll(-1, 1)
        following[:, -1] = check.IGNORE_INDEX
        if ignored is not None:
            order = torch.rand((batch, length), generator=self.generator, device=device)
            order[:, -1] = -1.0
            following.view(-1)[order.flatten().argsort()[: round(ignored * batch * length)]] = check.IGNORE_INDEX
        self.targets = (following.flatten(),) * 2
        self.target = self.targets[0].clone()
        self.head = self.model.head.weight
        self.early = self.model.get_parameter("blocks.0.qkv.weight")
        checked = (self.head, self.early)
        others = (weight for weight in self.model.parameters() if not any(weight is other for other in checked))
        self.parameters = (*checked, *others)
        self._expected: _Expected | None = None

    @property
    def reported_shape(self) -> ModelShape:
        return self.reported

    def inputs(self) -> tuple[Tensor, ...]:
        return self.parameters

    def restore(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def bind(self, variant: Variant) -> Run:
        """A step leaves its gradients with the parameters, as in training."""
        assert isinstance(variant, ModelVariant)
        step = self._step(variant)
        tokens, target = self.tokens, self.target

        def run() -> Outputs:
            self.restore()
            loss = step(tokens, target)
            loss.backward()
            grads = (parameter.grad for parameter in self.parameters)
            return Outputs(loss.detach(), tuple(grad for grad in grads if grad is not None))

        return chunked_by_inductor(run) if variant.auto_chunked else run

    def _step(self, variant: ModelVariant) -> Callable[[Tensor, Tensor], Tensor]:
        loss_of, model, matrix = variant.load(), self.model, self.head
        body = model if variant.compiled else torch.compile(model, fullgraph=True)

        def step(tokens: Tensor, target: Tensor) -> Tensor:
            loss: Tensor = loss_of(body(tokens).flatten(0, 1), matrix, target)
            return loss

        if not variant.compiled:
            return step
        options = inductor.options(linear=variant.head) if variant.replaced else variant.inductor
        return torch.compile(step, fullgraph=True, options=options or None)

    def check(self, outputs: Outputs, variant: Variant) -> check.Verdict:
        """The loss, and in the 2-norm the gradients of the head and of an early weight.

        A compiled body rounds less often than an eager one, and the noise grows with the layers: in bfloat16 these
        gradients differed by 0.7 % with 2 layers of 64 and by 1.1 % with 8 of 256, and float64 was as far from either.
        The tolerance is about four times that: four roundings, and more with depth. The loss is a mean of rows whose
        noise is independent; its tolerance is that of one rounding of a row's loss (36 times the noise that was seen
        with 128 rows), and four roundings to the dtype that it is returned in.
        """
        assert isinstance(variant, ModelVariant)
        depth = math.sqrt(1 + self.reported.layers / 8)
        limit = depth * max(check.tolerance(self.dtype), 1e-4)  # float32: the products' own rounding, seen through exp
        rounding = depth * torch.finfo(self.dtype).eps / math.sqrt(self.shape.rows)
        of_loss = max(rounding, 3e-5) + 4 * torch.finfo(outputs.loss.dtype).eps
        if variant.in_8_bits is not None:
            limit, of_loss = limit + variant.in_8_bits[0], of_loss + variant.in_8_bits[1]
        if variant.body_alone:
            return check.Verdict(0.0, 0.0, limit)
        if outputs.loss.shape != () or len(outputs.grads) != len(self.parameters):
            return check.Verdict(math.inf, math.inf, limit, loss_tolerance=of_loss)
        expected = self.expected()
        head, early, *_ = outputs.grads
        loss_error = check.worst([(outputs.loss.double() - expected.loss).abs() / expected.loss.abs()])
        head_error = check.worst([check.relative_error(head, expected.head)])
        worst = max(head_error, check.worst([check.relative_error(early, expected.early)]))
        loss = float(outputs.loss)
        return check.Verdict(loss_error, worst, limit, head_error, loss_tolerance=of_loss, loss=loss)

    def expected(self) -> _Expected:
        if self._expected is None:
            self._expected = self._reference()
        return self._expected

    def _reference(self) -> _Expected:
        """The eager step on float32 logits, the loss by chunks of rows, which add up in float32."""
        self.restore()
        hidden = self.model(self.tokens).flatten(0, 1)
        counted = (self.target != check.IGNORE_INDEX).sum()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        grad_head = torch.zeros(self.head.shape, dtype=torch.float32, device=self.device)
        grad_hidden = torch.empty_like(hidden)
        for part in check.chunks(*self.shape, CHUNK):
            rows = hidden.detach()[part].requires_grad_()
            logits = F.linear(rows, self.head).float()
            loss = F.cross_entropy(logits, self.target[part], reduction="sum") / counted
            of_rows, of_head = torch.autograd.grad(loss, (rows, self.head))
            total += loss.detach()
            grad_hidden[part] = of_rows
            grad_head += of_head
        hidden.backward(grad_hidden)
        early = self.early.grad
        assert early is not None
        self.restore()
        return _Expected(total, grad_head, early.float())
