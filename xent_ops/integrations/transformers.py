"""``use_xent(model)``: a language model of transformers computes its training loss without its logits.

The model's own forward runs. Hooks on the head keep its input, pass an empty one on, and return ``UnreadLogits``. The
model scales, caps and slices them and calls its loss: F.cross_entropy of them is ``linear_cross_entropy`` with the
model's own arguments. ZeRO-3 and FSDP1 gather a weight, in the backward too, only for what a call returns: with them
the head is called once more, and that call returns the loss.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..kernels.options import Activation, HeadProducts
from ..linear import linear_cross_entropy, linear_cross_entropy_outputs
from ..ops import arguments, checks
from . import heads, tails
from .calls import RUNNING, Call, key_of, with_predictions
from .unread import Unread, UnreadLogits


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
    untried: str | None  # None: a call with four tokens showed softcap and logit_scale. Else the reason

    def __str__(self) -> str:
        details = [f"{self.features} features", f"{self.classes} classes"]
        details += ["tied to the embedding"] if self.tied else []
        details += [f"adapters {', '.join(self.adapters)}"] if self.adapters else []
        tail = f"softcap {self.softcap}, logit_scale {self.logit_scale:g}"
        tail = tail if self.untried is None else f"its first call decides, four tokens did not ({self.untried})"
        logits_detail = "" if self.logits_dtype is None else f", logits in {self.logits_dtype}"
        where = "in training and evaluation" if self.in_eval else "in training"
        lines = [
            f"{self.model}: {self.head} ({', '.join(details)}) and its loss are xent_ops.linear_cross_entropy {where}",
            f"  {tail}{logits_detail}",
            "  not replaced: " + ("evaluation without labels" if self.in_eval else "evaluation"),
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

    A call in training mode returns no logits: ``output.logits`` is None, or empty if the model returns a tuple. The
    loss and its gradients equal those of the original model, which may shift, scale and cap its logits, add a bias of
    the classes, leave rows out, and give them to F.cross_entropy with any arguments but class weights. Everything else
    raises and names itself. A tied head and LoRA adapters of peft on the head are supported. In a call without labels
    ``output.logits`` are such logits, for a loss of your own. ``remove_xent(model)`` undoes it.

    Call it after loading the weights and after peft has added adapters to the head, but before torch.compile and DDP.
    It runs the model on four tokens, on every rank where its weights are partitioned.

    Args:
        model: a language model of transformers (docs/models.md), or a PeftModel around one, or FSDP1's wrapper of one.
            Changed in place.
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
        ValueError: the model reads its logits in another way, or calls its head more than once; it is on the meta
            device. A model that takes more than tokens is decided by its first call, with RuntimeErrors.
        TypeError, ValueError: options that ``linear_cross_entropy`` refuses.
        RuntimeError: use_xent is on already. Later, from a call of the model: through DataParallel, or after the head
            got another hook. From what reads the logits of a call without labels, such as Trainer's
            ``label_smoothing_factor``.

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
    head = heads.inside(base.get_output_embeddings())
    if head is None:
        raise ValueError(f"{type(base).__name__} has no head: get_output_embeddings() is None")
    if "labels" not in inspect.signature(base.forward).parameters:
        raise ValueError(f"{type(base).__name__} computes no loss: its forward takes no labels")
    is_wrapped = heads.inside(model) is not model
    heads.refuse_sharded(head, is_wrapped)
    upcast = heads.upcasts(head)
    logits_dtype = torch.float32 if upcast else logits_dtype
    found = tails.find(base, head, upcast, model if is_wrapped else None)
    tail = Activation() if found.logits is None else found.logits.tail()
    if in_eval and found.output is not None:
        with_predictions(found.output)  # now: while Dynamo traces, transformers registers no class as pytree node
    loss = arguments.loss_options(-100, label_smoothing, *tail, lse_square_scale)
    checks.option_values(loss.row_options, head.weight.dtype)
    chunks = (accumulate_dtype, chunk_rows, skip_ignored, logits_dtype, products, batch_invariant)
    accumulate_dtype, chunking = arguments.chunks(*chunks)
    options: dict[str, Any] = {"label_smoothing": label_smoothing, "lse_square_scale": lse_square_scale}
    options |= {"accumulate_dtype": accumulate_dtype, **chunking._asdict()}
    vars(base)["_xent"] = _Hooks(base, head, upcast, options, in_eval)
    return Report(
        model=type(base).__name__,
        head=next(name for name, module in base.named_modules() if module is head),
        classes=head.out_features,  # the weight may be partitioned
        features=head.in_features,
        tied=any(isinstance(module, nn.Embedding) and module.weight is head.weight for module in base.modules()),
        adapters=heads.adapters(head),
        **tail._asdict(),
        logits_dtype=chunking.logits_dtype,
        in_eval=in_eval,
        untried=found.untried,
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
            # It runs first: other hooks are done to the unread logits, as they are done to logits.
            head.register_forward_hook(self.after_head, prepend=True),
            model.register_forward_hook(self.after_model, always_call=True),  # after an error too
        ]
        self.hook_ids = (self.handles[1].id, self.handles[2].id)
        # Dynamo guards no hooks: without an attribute that its forward reads, this model would run what was compiled
        # for an untouched one of its class. Reading it now gives its warning, which Dynamo cannot trace.
        self.had_loss_function = "_loss_function" in vars(model)
        model.loss_function = model.loss_function

    def remove(self) -> None:
        RUNNING.calls.pop(self.key, None)  # a call that was interrupted
        for handle in self.handles:
            handle.remove()
        if not self.had_loss_function:
            del self.model._loss_function

    def before_model(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        RUNNING.calls.pop(self.key, None)  # a call that was interrupted
        labels = args[self.labels_position] if len(args) > self.labels_position else kwargs.get("labels")
        if labels is None and not (model.training and torch.is_grad_enabled()):
            return
        if not (model.training or self.in_eval):
            return
        if getattr(model, "_is_replica", False):
            raise RuntimeError("use_xent does not work with torch.nn.DataParallel, whose replicas share hooks: use DDP")
        if heads.inside(self.model.get_output_embeddings()) is not self.head:
            raise RuntimeError(
                "the head is not the one that use_xent has seen: call it after peft and resize_token_embeddings"
            )
        before, behind = self.hook_ids
        # Where the loss is what another call of the head returns, a hook behind it would change the loss.
        if (other := heads.hooks_after(self.head, before, -1 if self.needs_own_call() else behind)) is not None:
            raise RuntimeError(
                f"{other} was registered on the head after use_xent, or behind a head whose weight is partitioned, and "
                "would be given zero rows, or the loss: register hooks first, and there none behind it"
            )
        if self.needs_own_call():  # other hooks on the head change what they get in the second call, and nothing before
            self.head._forward_pre_hooks.move_to_end(self.hook_ids[0], last=False)
        RUNNING.calls[self.key] = Call(labels is not None)

    def before_head(self, head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        call = RUNNING.calls.get(self.key)
        if call is None:
            return None
        if call.hidden is not None:
            raise RuntimeError("the model called its head twice; use_xent takes models that call it once")
        call.hidden = args[0]
        return (args[0][..., :0, :], *args[1:])

    def after_head(self, head: nn.Module, args: tuple[Any, ...], output: Tensor) -> UnreadLogits | None:
        call = RUNNING.calls.get(self.key)
        if call is None or call.hidden is None:
            return None
        if call.has_grad != torch.is_grad_enabled():
            raise self.refusal("its head is called under another mode of gradients than itself")
        dtype = heads.autocast_dtype(output.device.type)
        return UnreadLogits(Unread(self, call.hidden, output.shape[-1], output.dtype, dtype))

    def needs_own_call(self) -> bool:
        """Is the weight gathered only for what a call returns? In FSDP1's root group it is gathered for the model's."""
        return heads.is_partitioned(self.head) or self.model.get_output_embeddings() is not self.head

    def cross_entropy(self, logits: UnreadLogits, target: Tensor, label_smoothing: float = 0.0, **given: Any) -> Tensor:
        """In place of ``F.cross_entropy(logits, target, ...)``."""
        state, options = logits.unread, {**self.options, **logits.unread.tail()._asdict(), **given}
        if 0.0 not in (label_smoothing, options["label_smoothing"]):
            name = type(self.model).__name__
            raise ValueError(f"the loss of {name} has label_smoothing={label_smoothing}: give none to use_xent")
        options["label_smoothing"] += label_smoothing
        call = RUNNING.calls.pop(self.key, None)  # our hooks on the head leave another call of it alone
        has_outputs = call is not None and not self.model.training

        def compute(rows: Tensor) -> Any:
            input, weight, bias = heads.product(self.head, rows, self.upcast)
            if state.bias is not None:
                bias = state.bias.to(weight) if bias is None else bias + state.bias.to(weight)
            function = linear_cross_entropy_outputs if has_outputs else linear_cross_entropy
            return function(input, weight, target.to(input.device), linear_bias=bias, **options)

        with heads.autocast(state.rows.device.type, state.autocast):
            if self.needs_own_call():
                loss = heads.in_call_of(self.model.get_output_embeddings(), self.head, compute, state.rows)
            else:
                if hasattr(self.head, "unshard"):  # FSDP2 may have sharded it again. It gathers once more
                    self.head.unshard()
                loss = compute(state.rows)
        if call is None:  # after the model's call
            return loss
        call.has_loss, RUNNING.calls[self.key] = True, call
        if not has_outputs:
            return loss
        predictions = loss.predictions.view(state.grid or loss.predictions.shape)
        call.predicted = {"predictions": predictions, "accuracy": loss.accuracy}
        return loss.loss

    def refusal(self, use: str) -> Exception:
        call, name = RUNNING.calls.get(self.key), type(self.model).__name__
        if call is not None and call.has_labels:
            return RuntimeError(f"{name} reads its logits beside the loss: {use}. Call remove_xent(model)")
        return RuntimeError(
            f"the logits of {name} are read: {use}. With use_xent a call in training mode has none. Give labels to the "
            "model, or its logits to F.cross_entropy. Trainer reads them with label_smoothing_factor: "
            "give label_smoothing to use_xent instead. Or call remove_xent(model)"
        )

    def after_model(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        call = RUNNING.calls.pop(self.key, None)
        if call is None or output is None:  # no output: the model raised an error
            return None
        if call.hidden is None and call.has_labels:
            raise RuntimeError(
                "the model did not call its head: its forward is not that of transformers. For TRL's trainers, which "
                "replace it, there is xent_ops.integrations.trl.use_xent(trainer)"
            )
        if not call.has_loss:  # what reads the unread logits later is refused, or is F.cross_entropy
            return None
        if isinstance(output, tuple):
            return tuple([one.like()[..., :0, :] if isinstance(one, UnreadLogits) else one for one in output])
        fields = {name: value for name, value in output.items() if not isinstance(value, UnreadLogits)}
        kind = with_predictions(type(output)) if call.predicted else type(output)
        return kind(**fields, **call.predicted)
