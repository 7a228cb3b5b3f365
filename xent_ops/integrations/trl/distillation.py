"""The divergences of TRL's distillation trainers, by ``linear_distillation_loss``.

``DistillationTrainer`` calls a function that computes the divergence from hidden states and heads. Ours replaces it
while the trainer computes its loss. ``GKDTrainer`` computes it from logits, so its ``compute_loss`` is replaced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from trl.trainer import distillation_trainer

from ... import distillation, linear
from ...kernels.options import Activation
from ...kernels.reference import accumulator
from .. import heads, tails


class Teacher(NamedTuple):
    """The teacher's outputs that a loss needs."""

    hidden: Tensor  # (..., H')
    weight: Tensor
    bias: Tensor | None
    tail: Activation
    beta: float
    temperature: float = 1.0

    def divergence(
        self,
        student: tuple[Tensor, Tensor, Tensor | None],  # input (..., H), weight, bias
        target: Tensor,  # (...)
        tail: Activation,
        num_items_in_batch: Any,
        options: dict[str, Any],
    ) -> Tensor:
        """The divergence divided by the number of this batch's tokens (at least 1), or by ``num_items_in_batch``."""
        input, weight, bias = student
        if num_items_in_batch is None:
            num_items_in_batch = (target != -100).sum().clamp(min=1)
        elif isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(input.device)
        return distillation.linear_distillation_loss(
            input,
            weight,
            self.hidden,
            self.weight.detach(),
            target=target,
            linear_bias=bias,
            teacher_bias=None if self.bias is None else self.bias.detach(),
            beta=self.beta,
            temperature=self.temperature,
            reduction="sum",
            divisor=num_items_in_batch,
            softcap=tail.softcap,
            logit_scale=tail.logit_scale,
            teacher_softcap=self.tail.softcap,
            teacher_logit_scale=self.tail.logit_scale,
            **options,
        )


class Divergence:
    """Replaces the divergence of a DistillationTrainer by ours until ``remove``."""

    def __init__(self, trainer: Any, options: dict[str, Any]) -> None:
        self.trainer, self.options, self.theirs = trainer, options, trainer._compute_loss
        self.what = f"{distillation_trainer._chunked_divergence_loss.__name__}, within the trainer's _compute_loss"
        trainer._compute_loss = self.compute_loss

    def remove(self) -> None:
        del self.trainer._compute_loss

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        with self._in_the_place_of_theirs():
            return self.theirs(*args, **kwargs)

    @contextlib.contextmanager
    def _in_the_place_of_theirs(self) -> Iterator[None]:
        theirs = distillation_trainer._chunked_divergence_loss
        distillation_trainer._chunked_divergence_loss = self.divergence
        try:
            yield
        finally:
            distillation_trainer._chunked_divergence_loss = theirs

    def divergence(
        self,
        student_hidden_states: Tensor,  # (B, K, H)
        teacher_hidden_states: Tensor,  # (B, K, H')
        student_lm_head_weight: Tensor,
        teacher_lm_head_weight: Tensor,
        completion_mask: Tensor,  # (B, K)
        beta: float,
        num_items_in_batch: Any = None,
        student_lm_head_bias: Tensor | None = None,
        teacher_lm_head_bias: Tensor | None = None,
        student_logit_scale: float = 1.0,
        teacher_logit_scale: float = 1.0,
        student_final_logit_softcapping: float | None = None,
        teacher_final_logit_softcapping: float | None = None,
        temperature: float = 1.0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(loss, sum of the student's entropies, number of counted tokens), like TRL's function of these arguments."""
        if any(isinstance(weight, DTensor) for weight in (student_lm_head_weight, teacher_lm_head_weight)):
            raise TypeError("the weight of a head is a DTensor; expected plain tensors: call remove_xent(trainer)")
        counted = completion_mask != 0
        target = torch.where(counted, 0, -100)
        student = (student_hidden_states, student_lm_head_weight, student_lm_head_bias)
        tail = Activation(student_final_logit_softcapping, student_logit_scale)
        teacher = Teacher(
            teacher_hidden_states,
            teacher_lm_head_weight,
            teacher_lm_head_bias,
            Activation(teacher_final_logit_softcapping, teacher_logit_scale),
            beta,
            temperature,
        )
        loss = teacher.divergence(student, target, tail, num_items_in_batch, self.options)
        input, weight, bias = student
        entropy_options: dict[str, Any] = {"linear_bias": bias, **tails.with_temperature(tail, temperature)._asdict()}
        entropy_options |= self.options  # TRL's logits have float32 here too
        entropy_options["logits_dtype"] = self.options["logits_dtype"] or accumulator(input)
        with torch.no_grad():
            entropy = linear.linear_token_log_probs(input, weight, target, **entropy_options).entropy
        return loss, entropy.sum(), counted.sum()


class GkdLoss:
    """Replaces a GKDTrainer's ``compute_loss`` until ``remove``. The student's fused head computes the divergence."""

    def __init__(self, trainer: Any, teacher: PreTrainedModel) -> None:
        self.trainer, self.teacher, self.theirs = trainer, teacher, trainer.compute_loss
        head = teacher.get_output_embeddings()
        self.tail = tails.of_logits(teacher, head)
        cap, scale = self.tail
        self.what = f"compute_loss; teacher {type(teacher).__name__}: softcap {cap}, logit_scale {scale:g}"
        trainer.compute_loss = self.compute_loss

    def remove(self) -> None:
        del self.trainer.compute_loss

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if return_outputs:  # evaluation with metrics needs the logits
            return self.theirs(model, inputs, return_outputs, num_items_in_batch)
        model_inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        self.teacher.eval()
        with torch.no_grad(), self.trainer.accelerator.autocast():
            hidden = self.teacher.base_model(**model_inputs, use_cache=False).last_hidden_state
            hidden, weight, bias = heads.product(self.teacher.get_output_embeddings(), hidden)
        teacher = Teacher(hidden, weight, bias, self.tail, self.trainer.beta)
        loss_inputs = {"num_items_in_batch": num_items_in_batch, "teacher": teacher, "fused_lm_head": True}
        return model(**model_inputs, labels=inputs["labels"], **loss_inputs)
