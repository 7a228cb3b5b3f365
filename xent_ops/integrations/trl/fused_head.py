"""TRL's fused head of a model, computed by our operators.

``add_fused_lm_head`` of trl.trainer.utils replaces ``model.forward``. Called with ``fused_lm_head=True``, the model
returns values for each next token instead of logits. SFT, DPO, KTO, GRPO and RLOO compute their losses and metrics from
these values. So for these trainers only this forward is replaced.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from trl.trainer.utils import FusedCausalLMOutput

from ... import linear
from ...kernels.options import Activation, Reduction
from .. import heads, tails
from .distillation import Teacher


class Asked(NamedTuple):
    """The trainer's arguments to ``add_fused_lm_head``, with the same names."""

    temperature: float
    cast_lm_head_to_fp32: bool
    outputs: tuple[str, ...]


class FusedHead:
    """Replaces the forward of one model by ours until ``remove``.

    Args:
        model: a causal language model of transformers whose forward is TRL's.
        options: options of the linear losses, for each call.
        loss_is_sum: the trainer's loss is a number times the sum of the log-probabilities. So its gradient is that of a
            cross entropy: three products instead of four.
        autocast: the context of the forward if accelerate has wrapped TRL's forward.
    """

    def __init__(
        self, model: PreTrainedModel, options: dict[str, Any], loss_is_sum: bool, autocast: Callable[[], Any]
    ) -> None:
        self.model, self.options, self.loss_is_sum = model, options, loss_is_sum
        self.asked, wrapped = _asked(model)
        self.autocast = autocast if wrapped else contextlib.nullcontext
        if self.asked.cast_lm_head_to_fp32:
            raise ValueError("cast_lm_head_to_fp32: give logits_dtype=torch.float32 to use_xent instead")
        head = model.get_output_embeddings()
        self.tail = tails.with_temperature(tails.of_logits(model, head), self.asked.temperature)
        cap, scale = self.tail
        self.what = f"{type(model).__name__}: softcap {cap}, logit_scale {scale:g}"
        self.is_on = True
        self.theirs: Any = model.forward
        self.ours = types.MethodType(self._forward(), model)
        model.forward = self.ours

    def remove(self) -> None:
        self.is_on = False  # for wrappers of our forward: accelerate wraps it to train under autocast
        if self.model.forward is self.ours:
            self.model.forward = self.theirs

    def _forward(self) -> Callable[..., Any]:
        @functools.wraps(type(self.model).forward)  # generate looks at its signature, as TRL's forward says
        def forward(model: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
            if not (fused_lm_head and self.is_on):
                return self.theirs(*args, fused_lm_head=fused_lm_head, **kwargs)
            with self.autocast():
                return self.outputs(*args, **kwargs)

        return forward

    def outputs(
        self,
        *args: Any,
        labels: Tensor | None = None,  # (B, S)
        shift_labels: Tensor | None = None,  # (B, S)
        num_items_in_batch: Any = None,
        teacher: Teacher | None = None,
        **kwargs: Any,
    ) -> FusedCausalLMOutput | Tensor:
        config = self.model.config.get_text_config()
        kwargs["use_cache"] = False
        if getattr(config, "output_router_logits", False):
            kwargs.setdefault("output_router_logits", True)
        backbone_output = self.model.base_model(*args, **kwargs)
        hidden = backbone_output.last_hidden_state  # (B, S, H)
        if shift_labels is not None:
            target = shift_labels
        elif labels is not None:
            hidden, target = hidden[:, :-1], labels[:, 1:]
        else:
            raise ValueError("fused_lm_head=True wants labels or shift_labels")
        target = target.to(hidden.device)
        if teacher is not None:  # GKD needs only its divergence
            student = heads.product(self.model.get_output_embeddings(), hidden)
            teacher = teacher._replace(hidden=teacher.hidden[:, :-1])
            return teacher.divergence(student, target, self.tail, num_items_in_batch, self.options)
        counted = target != -100
        head = self.model.get_output_embeddings()
        if heads.is_partitioned(head):
            found = heads.in_call_of(head, head, lambda rows: self._token_outputs(rows, target, counted), hidden)
        else:
            found = self._token_outputs(hidden, target, counted)
        log_probs = found["log_probs"]
        loss = -log_probs.sum() / (counted.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)
        aux_loss: Any = None
        if kwargs.get("output_router_logits"):
            experts = (config.num_experts, config.num_experts_per_tok)
            aux_loss = load_balancing_loss_func(backbone_output.router_logits, *experts, kwargs.get("attention_mask"))
            loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * aux_loss
        return FusedCausalLMOutput(loss=loss, label_mask=counted, aux_loss=aux_loss, **found)

    def _token_outputs(self, hidden: Tensor, target: Tensor, counted: Tensor) -> dict[str, Tensor]:
        """The requested outputs, each (B, S), 0 where the target is ignored."""
        head = self.model.get_output_embeddings()
        input, weight, bias = heads.product(head, hidden)
        keywords: dict[str, Any] = {"linear_bias": bias, **self.options, **self.tail._asdict()}
        requested = self.asked.outputs
        found, sum_of_losses = {}, None
        if "is_top1" in requested:
            reduction: Reduction = "sum" if self.loss_is_sum else "none"
            outputs = linear.linear_cross_entropy_outputs(input, weight, target, reduction=reduction, **keywords)
            found["log_probs"] = -(outputs.token_losses if self.loss_is_sum else outputs.loss)
            sum_of_losses = outputs.loss if self.loss_is_sum else None
            entropy, lse = outputs.entropy, outputs.lse
            found["is_top1"] = outputs.predictions == target
        else:
            found["log_probs"], entropy, lse = linear.linear_token_log_probs(input, weight, target, **keywords)
        if "entropy" in requested:
            found["entropy"] = entropy
        with torch.no_grad():
            if "mean_logits" in requested:
                found["mean_logits"] = self._mean_logits(input, weight, bias, target, lse, keywords)
            if "log_sum_sq_probs" in requested:
                # sum p^2 = sum exp(2 x) / exp(2 lse): the lse of twice the logits.
                cap, scale = self.tail
                twice = Activation(None if cap is None else 2 * cap, 2 * scale)
                lse_of_doubled = linear.linear_token_log_probs(
                    input, weight, target, **(keywords | twice._asdict())
                ).lse
                found["log_sum_sq_probs"] = lse_of_doubled - 2 * lse
        found = {name: value.masked_fill(~counted, 0) for name, value in found.items()}
        if sum_of_losses is not None:
            # The values have no gradient. The added 0 has their sum's gradient: upstream is one number for all tokens.
            zero = (sum_of_losses.detach() - sum_of_losses) / max(target.numel(), 1)
            found["log_probs"] = found["log_probs"] + zero
        return found

    def _mean_logits(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, lse: Tensor, keywords: dict[str, Any]
    ) -> Tensor:
        if self.tail.softcap is not None:  # with label smoothing of 1 a loss is lse - mean x
            smooth = linear.linear_cross_entropy(
                input, weight, target, reduction="none", label_smoothing=1.0, **keywords
            )
            return lse - smooth
        mean = input.float() @ weight.mean(0, dtype=torch.float32)
        return self.tail.logit_scale * (mean if bias is None else mean + bias.float().mean())


def _asked(model: PreTrainedModel) -> tuple[Asked, bool]:
    """(the closure variables of TRL's forward, whether accelerate has wrapped that forward)."""
    for forward, wrapped in ((model.forward, False), (vars(model).get("_original_forward"), True)):
        if inspect.ismethod(forward):
            nonlocals = inspect.getclosurevars(forward).nonlocals
            if all(name in nonlocals for name in Asked._fields):
                return Asked(**{name: nonlocals[name] for name in Asked._fields}), wrapped
    raise RuntimeError(
        f"the forward of {type(model).__name__} is not that of TRL's add_fused_lm_head: this version of TRL does it in "
        "another way, or something else replaced the forward"
    )
