"""``use_xent(model)``: a model of Megatron-Core computes the losses of its tokens without its logits.

The model's own forward runs. In a call with labels the output layer returns ``MegatronLogits`` in place of logits, and
``compute_language_model_loss`` calls the layer once more, with the labels. So hooks that gather the layer's weight run
around the loss, and the heads of multi-token prediction are replaced too. Written for Megatron-Core 0.16 to 0.19.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.multi_token_prediction import roll_tensor
from torch import Tensor, nn

from ..distributed.bound import bind_shard
from ..distributed.groups import ranks_of
from ..distributed.linear import losses_and_sum
from ..kernels.options import HeadProducts
from ..linear_call import bind
from ..ops import arguments, checks
from ..ops.message_values import type_name
from .megatron_logits import MegatronLogits, bias_of, shard_of


class Report(NamedTuple):
    """The parts that ``use_xent`` replaced, and the others. ``str`` of it has one line for each."""

    model: str
    classes: int | None  # None: this pipeline stage has no head
    ranks: int
    heads: int
    tied: bool
    sequence_parallel: bool
    head_products: int

    def __str__(self) -> str:
        if self.classes is None:
            return f"{self.model}: this pipeline stage has no head, so nothing is replaced"
        details = [f"{self.classes} classes over {self.ranks} ranks", f"{self.head_products} matrix multiplications"]
        details += ["sequence parallel"] if self.sequence_parallel else []
        details += ["tied to the embedding"] if self.tied else []
        details += [f"{self.heads - 1} more heads of multi-token prediction"] if self.heads > 1 else []
        return (
            f"{self.model}: output_layer ({', '.join(details)}) and its loss are xent_ops.linear_cross_entropy\n"
            "  not replaced: calls without labels, and what an output_processor computes"
        )


def use_xent(
    model: nn.Module,
    *,
    loss_mask: bool = False,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    accumulate_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    skip_ignored: bool = False,
    logits_dtype: torch.dtype | None = None,
    products: HeadProducts | None = None,
    batch_invariant: bool = False,
) -> Report:
    """Make a model of Megatron-Core compute the losses of its tokens without its logits, in training and evaluation.

    A call with labels returns losses (B, S) as before, and gradients equal those of the original model. Labels below 0
    are ignored. A call without labels is the untouched model's. Tensor, sequence, pipeline and context parallelism,
    tied embeddings, multi-token prediction and MuP are supported. ``remove_xent(model)`` undoes it.

    Call it on every rank, for each chunk of a virtual pipeline, before or after Megatron's wrappers.

    Args:
        model: a GPTModel, HybridModel or MambaModel, or a wrapper of one: Float16Module, DistributedDataParallel.
            Changed in place.
        loss_mask: promise that the trainer's loss is one number times ``(losses * loss_mask).sum()``, with the
            ``loss_mask`` that the model is called with, as in Megatron's ``pretrain_gpt.py``. Then a step takes three
            matrix multiplications of the head instead of four. Without that promise kept, all gradients are NaN. A call
            without ``loss_mask`` takes four.
        label_smoothing: as for ``cross_entropy``. For Megatron's alpha with K classes pass ``alpha * K / (K - 1)``.
        lse_square_scale: the factor of the z-loss, as for ``cross_entropy``.
        accumulate_dtype, chunk_rows, skip_ignored, logits_dtype, products, batch_invariant: as for
            ``xent_ops.linear_cross_entropy``.

    Returns:
        A ``Report`` of the replaced parts. A pipeline stage without a head is left as it is.

    Raises:
        TypeError: another kind of model; an output layer or a loss that is not Megatron's own (adapters, softcaps).
        ValueError: ``defer_embedding_wgrad_compute``; a weight that ``gtp_remat`` splits.
        RuntimeError: use_xent is on already. Later, from a call of the model: the logits are read other than by their
            loss, or only parts of the model's forward are called (``build_schedule_plan``).
        TypeError, ValueError: options that ``linear_cross_entropy`` refuses.

    Examples:
        >>> report = use_xent(model, loss_mask=True)  # a GPTModel
        >>> losses = model(tokens, positions, attention_mask, labels=labels, loss_mask=loss_mask)
        >>> ((losses * loss_mask).sum() / loss_mask.sum()).backward()
    """
    arguments.boolean("loss_mask", loss_mask)
    base = _base(model)
    if "_xent" in vars(base):
        raise RuntimeError("use_xent is on already: call remove_xent(model) first")
    if not base.post_process:
        return Report(type(base).__name__, None, 1, 0, False, False, 0)
    layer = base.output_layer
    _check(base, layer)
    options = arguments.loss_options(-100, label_smoothing, None, 1.0, lse_square_scale)
    checks.option_values(options.row_options, base.config.params_dtype)
    chunks = (accumulate_dtype, chunk_rows, skip_ignored, logits_dtype, products, batch_invariant)
    arguments.chunks(*chunks)
    uses_mask = loss_mask and not skip_ignored and products is None
    vars(base)["_xent"] = _Head(base, layer, (label_smoothing, lse_square_scale), chunks, uses_mask)
    return Report(
        model=type(base).__name__,
        classes=layer.output_size,
        ranks=layer.tp_group.size(),
        heads=1 + (base.config.mtp_num_layers or 0),
        tied=base.share_embeddings_and_output_weights,
        sequence_parallel=layer.sequence_parallel,
        head_products=3 if uses_mask else 4,
    )


def remove_xent(model: nn.Module) -> None:
    """Undo ``use_xent(model)``. Raises RuntimeError if it is not on. A stage without a head has nothing to undo.

    Examples:
        >>> report = use_xent(model)  # a GPTModel
        >>> remove_xent(model)
    """
    base = _base(model)
    head = vars(base).pop("_xent", None)
    if head is not None:
        head.remove()
    elif base.post_process:
        raise RuntimeError("use_xent is not on for this model")


def _base(model: Any) -> Any:
    base = model
    while not isinstance(base, LanguageModule) and isinstance(getattr(base, "module", None), nn.Module):
        base = base.module  # Float16Module, DistributedDataParallel
    if not isinstance(base, LanguageModule) or "labels" not in inspect.signature(base.forward).parameters:
        raise TypeError(f"expected a GPTModel or HybridModel of megatron.core, or a wrapper, got {type_name(base)}")
    return base


def _check(model: Any, layer: Any) -> None:
    """Raise if the output layer or the loss is not Megatron's own."""
    _check_layer(layer)
    _is_own(model, "compute_language_model_loss", LanguageModule)
    if model.config.defer_embedding_wgrad_compute:
        raise ValueError("defer_embedding_wgrad_compute=True is not supported: expected False")


def _check_layer(layer: Any) -> None:
    if not isinstance(getattr(vars(layer).get("forward"), "__self__", None), _Head):  # else use_xent is on
        _is_own(layer, "forward", ColumnParallelLinear)
    _is_own(layer, "_forward_impl", ColumnParallelLinear)
    if getattr(layer, "gtp_remat_size", 1) > 1:
        raise ValueError(f"output_layer has its weight in {layer.gtp_remat_size} parts (gtp_remat): expected 1")


def _is_own(one: Any, name: str, owner: type) -> None:
    if name in vars(one) or getattr(type(one), name, None) is not getattr(owner, name):
        raise TypeError(
            f"{name} of {type_name(one)} is not that of megatron.core's {owner.__name__}: adapters on the output "
            "layer, changed logits and other losses are not supported"
        )


def output_processor(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A loss of hidden states as the ``output_processor`` of a call of a GPTModel (Megatron-Core 0.18 and later).

    The call returns what ``function`` returns for the last hidden states, the output layer's weight and the labels.
    It needs no ``use_xent``, and works beside it.

    Args:
        function: ``xent_ops.linear_token_log_probs``, ``linear_token_loss``, ``linear_cross_entropy`` or another with
            a target and a ``shard``.
        options: arguments of ``function``, for all calls. Those of one call are a mapping, the call's
            ``output_processor_context``: ``logit_scale`` (one over the temperature), ``rows``, ``divisor``. The output
            layer gives ``linear_bias`` and ``shard``. MuP's factor multiplies ``logit_scale``.

    Returns:
        The hook. Labels, ``rows`` and results are (B, S), with context parallelism this rank's part of S. Labels below
        0 are ignored. In a pipeline pass it on every stage: Megatron calls it on the last one.

    Raises:
        TypeError: another function. Later, from a call of the model: no labels, a context that is no mapping, an output
            layer that is not Megatron's own.
        ValueError: from a call of the model: a weight that ``gtp_remat`` splits.

    Examples:
        >>> log_probs = output_processor(xent_ops.linear_token_log_probs)
        >>> hook = {"output_processor": log_probs, "output_processor_context": {"logit_scale": 1 / 0.7}}
        >>> log_probs, entropy, _ = model(tokens, positions, attention_mask, labels=labels, **hook)
    """
    needed = {"input", "linear_weight", "target", "shard"}
    if not callable(function) or not needed <= inspect.signature(function).parameters.keys():
        raise TypeError(f"expected a loss of hidden states, such as linear_token_log_probs, got {function!r}")

    def process(
        *,
        hidden_states: Tensor,  # (S, B, H), this rank's part of it with sequence_parallel
        output_layer: Any,
        output_weight: Tensor | None,  # of a tied model
        labels: Tensor | None,  # (B, S)
        context: Any,
        config: Any,
        **_: Any,  # what Megatron also passes
    ) -> Any:
        if labels is None:
            raise TypeError("output_processor: expected labels in the call of the model, got None")
        if not isinstance(context, Mapping | None):
            raise TypeError(f"output_processor_context must be a mapping or None, got {type_name(context)}")
        _check_layer(output_layer)
        keywords = {"logit_scale": 1.0, **options, **(context or {})}
        keywords["logit_scale"] *= config.mup_output_mult if config.use_mup else 1.0
        return function(
            input=hidden_states.transpose(0, 1),
            linear_weight=output_layer.weight if output_weight is None else output_weight,
            target=labels.where(labels >= 0, keywords.get("ignore_index", -100)),
            linear_bias=bias_of(output_layer),
            shard=shard_of(output_layer),
            **keywords,
        )

    return process


class _Head:
    """The replaced methods of one model."""

    def __init__(self, model: Any, layer: Any, options: tuple[float, float], chunks: Any, uses_mask: bool) -> None:
        self.model, self.layer, self.options, self.chunks, self.uses_mask = model, layer, options, chunks, uses_mask
        self.parameters = list(inspect.signature(model.forward).parameters)
        self.call: dict[str, Any] | None = None  # the arguments of the model's call that runs
        self.handles = [
            model.register_forward_pre_hook(self.before_model, with_kwargs=True),
            model.register_forward_hook(self.after_model, always_call=True),  # after an error too
        ]
        layer.forward = self.output_layer
        model.compute_language_model_loss = self.loss

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        del self.layer.forward, self.model.compute_language_model_loss

    def before_model(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.call = dict(zip(self.parameters, args, strict=False)) | kwargs
        self.mask = self.rolled_mask = self.call.get("loss_mask") if self.uses_mask else None
        processor = self.call.get("output_processor")
        if processor is None:
            return None
        return (), self.call | {"output_processor": functools.partial(self.process, processor)}

    def process(self, processor: Callable[..., Any], **kwargs: Any) -> Any:
        """The last hidden states are the processor's: it may call the output layer and the loss itself."""
        self.call = {}
        return processor(**kwargs)

    def after_model(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.call = self.mask = self.rolled_mask = None

    @property
    def labels(self) -> Tensor | None:
        return None if self.call is None else self.call.get("labels")

    def output_layer(
        self,
        input_: Tensor,  # (S, B, H), this rank's part of it with sequence_parallel
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        *,
        compute: Callable[[Tensor], Tensor] | None = None,  # of MegatronLogits
    ) -> tuple[Any, Tensor | None]:
        if compute is not None:
            return compute(self.layer.weight if weight is None else weight), None
        if self.labels is None:
            return type(self.layer).forward(self.layer, input_, weight, runtime_gather_output)
        return MegatronLogits(self.layer, self.chunks, input_, weight), None

    def loss(self, labels: Tensor, logits: Any) -> Tensor:
        """In place of ``compute_language_model_loss``: (B, S)."""
        if self.call is None:
            raise RuntimeError(
                f"parts of {type(self.model).__name__} were called without its forward, whose hooks use_xent needs "
                "(build_schedule_plan of overlap_moe_expert_parallel_comm does that): call remove_xent(model)"
            )
        if not isinstance(logits, MegatronLogits):
            if self.labels is None:  # heads of multi-token prediction have a loss without labels; an output_processor
                return type(self.model).compute_language_model_loss(self.model, labels, logits)
            raise RuntimeError(f"{type_name(self.model)} takes the loss of other logits: call remove_xent(model)")
        mask = self.mask_of(labels)
        mask = None if mask is None else mask.t().contiguous().float()
        # Megatron computes a number where a label is below 0, which the mask drops.
        target = logits.labels = labels.where(labels >= 0, -100).t().contiguous()
        return logits.in_layer(lambda weight: self.losses(logits, weight, target, mask)).t().contiguous()

    def mask_of(self, labels: Tensor) -> Tensor | None:
        """Each head of multi-token prediction has the mask of the one before it, shifted by a token as its labels."""
        if self.rolled_mask is None or labels is self.labels:
            return self.mask
        assert self.call is not None
        rolling = {"cp_group": self.model.cp_group, "packed_seq_params": self.call.get("packed_seq_params")}
        self.rolled_mask, _ = roll_tensor(self.rolled_mask, **rolling)
        return self.rolled_mask

    def losses(self, logits: MegatronLogits, weight: Tensor, labels: Tensor, mask: Tensor | None) -> Tensor:
        bias, shard, (label_smoothing, lse_square_scale) = bias_of(self.layer), shard_of(self.layer), self.options
        reduction = "none" if mask is None else "sum"
        options = (-100, label_smoothing, None, logits.scale, lse_square_scale, reduction)
        call = bind(logits.input, weight, labels, bias, None, options, self.chunks, None, mask)
        ranks = ranks_of(shard.group)
        losses, total = losses_and_sum(bind_shard(call, ranks, shard), ranks)
        return losses if total is None or mask is None else _OfSum.apply(total, losses, mask)


class _OfSum(torch.autograd.Function):
    """(total, losses, mask) -> losses.

    If the losses' gradient is a number times the mask, the total's gradient is this number. Otherwise it is NaN.
    """

    @staticmethod
    def forward(ctx: Any, total: Tensor, losses: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return losses.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mask = ctx.saved_tensors[0].to(grad.dtype)
        if mask.numel() == 0:  # a part of a sequence without tokens
            return grad.new_zeros(()), None, None
        # The rows of the largest factor know the number best; squares of factors could overflow or vanish.
        largest, place = mask.abs().flatten().max(0)
        # take: an index in brackets would be read into an int, for which the host waits
        number = torch.where(largest > 0, grad.take(place) / mask.take(place), 0.0)
        kept = (grad - number * mask).abs().amax() <= 1e-5 * grad.abs().amax()
        return torch.where(kept, number, float("nan")), None, None
