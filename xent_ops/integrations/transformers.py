"""``use_xent(model)``: a causal language model of transformers computes its training loss without its logits.

The model's own forward runs. Hooks on the head keep the head's input and pass an empty one on. The head's call computes
the loss, because there FSDP has gathered the weight, and ``model.loss_function`` returns it. So other terms that the
model adds to its loss stay, for example Mixtral's auxiliary loss. ZeRO-3 and FSDP1 gather a weight, in the backward
too, only for what a call returns: with them ``loss_function`` calls the head once more, and that call returns the loss.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from ..kernels.options import HeadProducts
from ..linear import linear_cross_entropy, linear_cross_entropy_outputs
from ..ops import arguments, checks
from ..ops.message_values import repr_for_message
from . import heads, tails
from .calls import RUNNING, Call, key_of, with_predictions


class Report(NamedTuple):
    """The parts that ``use_xent`` replaced, and the others. ``str`` of it has one line for each."""

    model: str
    head: str
    classes: int
    features: int
    tied: bool
    adapters: list[str]
    softcap: float | None
    logit_scale: float
    logits_dtype: torch.dtype | None
    in_eval: bool

    def __str__(self) -> str:
        details = [f"{self.features} features", f"{self.classes} classes"]
        details += ["tied to the embedding"] if self.tied else []
        details += [f"adapters {', '.join(self.adapters)}"] if self.adapters else []
        logits_detail = "" if self.logits_dtype is None else f", logits in {self.logits_dtype}"
        where = "in training and evaluation" if self.in_eval else "in training"
        lines = [
            f"{self.model}: {self.head} ({', '.join(details)}) and its loss are xent_ops.linear_cross_entropy {where}",
            f"  softcap {self.softcap}, logit_scale {self.logit_scale:g}" + logits_detail,
            "  not replaced: calls without labels" + ("" if self.in_eval else ", evaluation"),
        ]
        return "\n".join(lines)


def use_xent(
    model: nn.Module,
    *,
    in_eval: bool = False,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    accumulate_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    skip_ignored: bool = False,
    logits_dtype: torch.dtype | None = None,
    products: HeadProducts | None = None,
    batch_invariant: bool = False,
) -> Report:
    """Make ``model`` compute its loss by ``xent_ops.linear_cross_entropy`` in training, eager and compiled.

    A call with labels in training mode returns its loss and no logits: ``output.logits`` is None, or empty if the
    model returns a tuple. The loss and its gradients equal those of the original model. ``num_items_in_batch``,
    ``ignore_index``, ``shift_labels``, softcap, logit scale, a tied head, and LoRA adapters of peft on the head are
    supported. ``remove_xent(model)`` undoes it.

    Call it after loading the weights and after peft has added adapters to the head, but before torch.compile and DDP.
    It runs the model twice on four tokens to find the operations on the logits, on every rank where its weights are
    partitioned.

    Args:
        model: a causal language model of transformers, or a PeftModel around one, or FSDP1's wrapper of one. Changed in
            place.
        in_eval: use it in evaluation mode too. The output then has, instead of logits, ``predictions`` (B, S), int64,
            the most likely next token at each position (-1 where the label is ignored), and ``accuracy`` ().
        label_smoothing: as for ``cross_entropy``. It replaces Trainer's ``label_smoothing_factor``, which needs logits.
        lse_square_scale: the factor of the z-loss, as for ``cross_entropy``.
        logits_dtype, products: as for ``linear_cross_entropy``. If a head's own forward multiplies its 16-bit operands
            in float32, the logits are float32, computed from the 16-bit operands.
        batch_invariant: as for ``linear_cross_entropy``: the bits of a row's gradient do not depend on other rows,
            except through the number that the loss is divided by.
        accumulate_dtype, chunk_rows, skip_ignored: as for ``linear_cross_entropy``. With skip_ignored the prompts of
            fine-tuning take no time in the head.

    Returns:
        A ``Report`` of the replaced parts.

    Raises:
        TypeError: another kind of model; a head that is not nn.Linear, is quantised or has DoRA; with ZeRO-3 or FSDP1
            also a head with adapters.
        ValueError: the model has its own loss, calls its head more than once, reads its logits beside the loss, or
            changes them in another way than by a softcap or a scale; it is on the meta device.
        TypeError, ValueError: options that ``linear_cross_entropy`` refuses.
        RuntimeError: use_xent is on already. Later, from a call of the model: in training without labels (for example
            by a Trainer with ``label_smoothing_factor`` or ``compute_loss_func``), through DataParallel, or after the
            head got another hook or the model another ``loss_function``.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2)).train()
        >>> report = use_xent(model)
        >>> ids = torch.randint(64, (2, 9))
        >>> model(input_ids=ids, labels=ids).loss.backward()
    """
    arguments.boolean("in_eval", in_eval)
    base = _base(model)
    if "_xent" in vars(base):
        raise RuntimeError("use_xent is on already: call remove_xent(model) first")
    if base.loss_function is not ForCausalLMLoss:
        raise ValueError(
            f"{type(base).__name__} has a loss of its own, {repr_for_message(base.loss_function)}; expected that of "
            "causal language models, transformers.loss.loss_utils.ForCausalLMLoss"
        )
    head = heads.inside(base.get_output_embeddings())
    if head is None:
        raise ValueError(f"{type(base).__name__} has no head: get_output_embeddings() is None")
    is_wrapped = heads.inside(model) is not model
    heads.refuse_sharded(head, is_wrapped)
    upcast = heads.upcasts(head)
    logits_dtype = torch.float32 if upcast else logits_dtype
    tail, output = tails.find(base, head, upcast, model if is_wrapped else None)
    if in_eval:
        with_predictions(output)  # now: while Dynamo traces, transformers registers no class as pytree node
    loss = arguments.loss_options(-100, label_smoothing, *tail, lse_square_scale)
    checks.option_values(loss.row_options, head.weight.dtype)
    chunks = (accumulate_dtype, chunk_rows, skip_ignored, logits_dtype, products, batch_invariant)
    accumulate_dtype, chunking = arguments.chunks(*chunks)
    checks.chunk_rows(chunking.chunk_rows)
    options: dict[str, Any] = {"label_smoothing": label_smoothing, "lse_square_scale": lse_square_scale}
    options |= {"accumulate_dtype": accumulate_dtype, **chunking._asdict(), **tail._asdict()}
    vars(base)["_xent"] = _Hooks(base, head, upcast, options, in_eval)
    return Report(
        model=type(base).__name__,
        head=next(name for name, module in base.named_modules() if module is head),
        classes=head.out_features,  # the weight may be partitioned
        features=head.in_features,
        tied=head.weight is base.get_input_embeddings().weight,
        adapters=heads.adapters(head),
        **tail._asdict(),
        logits_dtype=chunking.logits_dtype,
        in_eval=in_eval,
    )


def remove_xent(model: nn.Module) -> None:
    """Undo ``use_xent(model)``. Raises RuntimeError if it is not on.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2))
        >>> report = use_xent(model)
        >>> remove_xent(model)
    """
    hooks = vars(_base(model)).pop("_xent", None)
    if hooks is None:
        raise RuntimeError("use_xent is not on for this model")
    hooks.remove()


def _base(model: Any) -> Any:
    base = heads.inside(model)
    base = base.get_base_model() if hasattr(base, "get_base_model") else base
    if not isinstance(base, PreTrainedModel):
        hint = ""
        if hasattr(model, "accelerator"):  # it is a trainer
            hint = ": pass trainer.model, or a trainer of TRL to xent_ops.integrations.trl.use_xent"
        raise TypeError(
            f"expected a model of transformers, or a PeftModel around one, before it is compiled or wrapped; got "
            f"{type(model).__module__}.{type(model).__qualname__}{hint}"
        )
    return base


class _Hooks:
    """The hooks of one model. They are methods, so that a deep copy of the model gets its own copies of the hooks."""

    def __init__(self, model: Any, head: Any, upcast: bool, options: dict[str, Any], in_eval: bool) -> None:
        self.model, self.head, self.upcast, self.options, self.in_eval = model, head, upcast, options, in_eval
        self.labels_position = list(inspect.signature(model.forward).parameters).index("labels")
        self.key = key_of(self)
        self.handles = [
            model.register_forward_pre_hook(self.before_model, with_kwargs=True),
            head.register_forward_pre_hook(self.before_head),
            # It runs first: FSDP's own hook, which frees the weight, must come after it.
            head.register_forward_hook(self.after_head, prepend=True),
            model.register_forward_hook(self.after_model, always_call=True),  # after an error too
        ]
        self.hook_ids = (self.handles[1].id, self.handles[2].id)
        self.own_loss_function = tails.replace_loss_function(model, self.loss_function)

    def remove(self) -> None:
        RUNNING.calls.pop(self.key, None)  # a call that was interrupted
        for handle in self.handles:
            handle.remove()
        tails.replace_loss_function(self.model, self.own_loss_function)

    def before_model(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        RUNNING.calls.pop(self.key, None)  # a call that was interrupted
        labels = args[self.labels_position] if len(args) > self.labels_position else kwargs.get("labels")
        if not (model.training or self.in_eval):
            return
        if labels is None:
            if model.training and torch.is_grad_enabled():
                raise RuntimeError(
                    "use_xent is on, and the model was called in training mode without labels, which needs the logits. "
                    "Trainer does this with label_smoothing_factor (give label_smoothing to use_xent instead) and with "
                    "compute_loss_func. Give labels, or call remove_xent(model)"
                )
            return
        if getattr(model, "_is_replica", False):
            raise RuntimeError("use_xent does not work with torch.nn.DataParallel, whose replicas share hooks: use DDP")
        if heads.inside(self.model.get_output_embeddings()) is not self.head:
            raise RuntimeError(
                "the head is not the one that use_xent has seen: call it after peft and resize_token_embeddings"
            )
        if (later := heads.hooks_after(self.head, *self.hook_ids)) is not None:
            raise RuntimeError(
                f"{later} was registered on the head after use_xent, and would be given zero rows: register hooks first"
            )
        if self.needs_own_call():  # other hooks on the head change what they get in the second call, and nothing before
            self.head._forward_pre_hooks.move_to_end(self.hook_ids[0], last=False)
        RUNNING.calls[self.key] = Call(labels, kwargs)

    def before_head(self, head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        call = RUNNING.calls.get(self.key)
        if call is None:
            return None
        if call.hidden is not None:
            raise RuntimeError("the model called its head twice; use_xent takes models that call it once")
        call.hidden = args[0]
        return (args[0][..., :0, :], *args[1:])

    def after_head(self, head: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        call = RUNNING.calls.get(self.key)
        if call is not None and call.hidden is not None and not self.needs_own_call():
            call.loss = self.compute(call, call.hidden)

    def needs_own_call(self) -> bool:
        """Is the weight gathered only for what a call returns? In FSDP1's root group it is gathered for the model's."""
        return heads.is_partitioned(self.head) or self.model.get_output_embeddings() is not self.head

    def compute(self, call: Call, hidden: Tensor) -> Tensor:
        head, target = self.head, call.shift_labels
        if target is None:
            target = F.pad(call.labels, (0, 1), value=call.ignore_index)[..., 1:]
        target = target.to(hidden.device)
        input, weight, bias = heads.product(head, hidden, self.upcast)
        divisor = call.num_items_in_batch
        if isinstance(divisor, Tensor):
            divisor = divisor.to(hidden.device)
        options = {"linear_bias": bias, "ignore_index": call.ignore_index, **self.options}
        options["reduction"] = "mean" if divisor is None else "sum"
        if self.model.training:
            return linear_cross_entropy(input, weight, target, divisor=divisor, **options)
        outputs = linear_cross_entropy_outputs(input, weight, target, divisor=divisor, **options)
        call.predicted = {"predictions": outputs.predictions, "accuracy": outputs.accuracy}
        return outputs.loss

    def loss_function(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        loss_arguments = (num_items_in_batch is None, ignore_index, shift_labels is None)
        call = RUNNING.calls.get(self.key)
        if call is None:
            if self.model.training and torch.is_grad_enabled():
                raise RuntimeError(
                    f"the forward of {type(self.model).__name__} was called without its hooks, which use_xent needs: "
                    "call the model itself (old versions of peft call forward)"
                )
            return ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels)
        if call.loss is None and call.hidden is not None:
            del RUNNING.calls[self.key]  # our hooks on the head leave this call of it alone
            outer = self.model.get_output_embeddings()
            call.loss = heads.in_call_of(outer, self.head, lambda hidden: self.compute(call, hidden), call.hidden)
            RUNNING.calls[self.key] = call
        seen = (call.num_items_in_batch is None, call.ignore_index, call.shift_labels is None)
        if call.loss is None or loss_arguments != seen:
            raise RuntimeError(
                f"{type(self.model).__name__} gave its loss other arguments than it was given itself: use_xent takes "
                "num_items_in_batch, ignore_index and shift_labels of the model's call"
            )
        call.returned = True
        return call.loss

    def after_model(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        call = RUNNING.calls.pop(self.key, None)
        if call is None or output is None:  # no output: the model raised an error
            return None
        if call.loss is None:
            raise RuntimeError(
                "the model did not call its head: its forward is not that of transformers. For TRL's trainers, which "
                "replace it, there is xent_ops.integrations.trl.use_xent(trainer)"
            )
        if not call.returned:
            raise RuntimeError("the model did not call its loss_function: it was replaced after use_xent")
        if isinstance(output, tuple):
            return None
        fields = {name: value for name, value in output.items() if name != "logits"}
        kind = with_predictions(type(output)) if call.predicted else type(output)
        return kind(**fields, **call.predicted)
