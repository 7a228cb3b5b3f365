"""Losses for torchtitan's config: of the logits, and of the head and the logits as one. Written for torchtitan 0.3."""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torchtitan.components import loss as titan
from torchtitan.distributed.spmd_types import current_spmd_mesh, spmd_mesh_size

from .. import distributed
from ..functional import cross_entropy
from ..linear import linear_cross_entropy


def _of_logits(pred: Tensor, labels: Tensor, *, global_vocab_size: int | None = None) -> Tensor:
    """Like torchtitan's ``cross_entropy_loss``: pred (B, S, V); with loss parallelism, this rank's classes of it."""
    options: dict[str, Any] = {"reduction": "sum", "ignore_index": titan.IGNORE_INDEX}
    if isinstance(pred, DTensor) and not isinstance(labels, DTensor):
        if pred.placements != (Shard(pred.ndim - 1),):
            raise ValueError(
                f"logits are placed as {pred.placements}; expected (Shard({pred.ndim - 1}),), their classes"
            )
        return distributed.vocab_parallel_cross_entropy(
            pred.to_local(), labels, pred.device_mesh.get_group(), num_classes=pred.shape[-1], **options
        )
    if not isinstance(pred, DTensor) and (mesh := current_spmd_mesh()) is not None and spmd_mesh_size("tp") > 1:
        if global_vocab_size is None:
            raise ValueError("loss parallelism needs global_vocab_size in the loss's config")
        group = mesh.get_group("tp")
        return distributed.vocab_parallel_cross_entropy(pred, labels, group, num_classes=global_vocab_size, **options)
    return cross_entropy(pred, labels, dim=-1, **options)


class XentCrossEntropyLoss(titan.CrossEntropyLoss):  # type: ignore[misc, unused-ignore]
    """The sum of the losses of logits over ``global_valid_tokens``, without a float32 copy of the logits.

    It replaces torchtitan's ``CrossEntropyLoss``, alone or as ``loss_fn`` of ``ChunkedLossWrapper``, with or without
    loss parallelism.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(titan.CrossEntropyLoss.Config):  # type: ignore[misc, unused-ignore]
        pass

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        super().__init__(config)
        self.fn = _of_logits
        self._maybe_compile(compile_config)


class XentLinearLoss(titan.ChunkedLossWrapper):  # type: ignore[misc, unused-ignore]
    """The sum of the losses of hidden states over ``global_valid_tokens``: the head and the loss as one operator.

    It replaces torchtitan's ``ChunkedLossWrapper`` around a ``CrossEntropyLoss``. The trainer passes the head to it,
    and the decoder returns hidden states. The head's forward becomes the head and the loss, so that FSDP's hooks gather
    the weight for it once. A head whose classes are split over tensor-parallel ranks stays split. ``num_chunks`` is
    ignored: the operator chooses ``chunk_rows``.

    Raises:
        ValueError: the backend "spmd_types" or parallelize_module splits the head (then pass
            ``XentCrossEntropyLoss`` to ``ChunkedLossWrapper``); or ``loss_fn`` is no CrossEntropyLoss.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(titan.ChunkedLossWrapper.Config):  # type: ignore[misc, unused-ignore]
        skip_ignored: bool = False
        """As of ``xent_ops.linear_cross_entropy``: for data with many ignored labels."""

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        super().__init__(config)
        if type(self.loss_fn) not in (titan.CrossEntropyLoss, XentCrossEntropyLoss):
            raise ValueError(
                f"loss_fn is {type(self.loss_fn).__name__}; expected a CrossEntropyLoss, which this computes"
            )
        self.skip_ignored = config.skip_ignored

    def set_lm_head(self, lm_head: nn.Module) -> None:
        lm_head.forward = MethodType(_head_and_loss, lm_head)
        super().set_lm_head(lm_head)

    def __call__(
        self, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None, **loss_inputs: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """pred (B, S, H), labels (B, S). Like CrossEntropyLoss it ignores ``loss_inputs``, such as positions."""
        split = isinstance(self.lm_head.weight, DTensor)
        if (not split and spmd_mesh_size("tp") > 1) or (split and _expects_logits(self.lm_head)):
            raise ValueError(
                'the head is split by the backend "spmd_types" or by parallelize_module, which XentLinearLoss does '
                "not take; give XentCrossEntropyLoss.Config(...) as loss_fn to ChunkedLossWrapper.Config"
            )
        return self.lm_head(pred, labels, global_valid_tokens, self.skip_ignored), {}


def _expects_logits(lm_head: nn.Module) -> bool:
    """Has parallelize_module added hooks to the head that place its output?"""
    hooks = lm_head._forward_hooks.values()
    return any(getattr(hook, "__module__", "").startswith("torch.distributed.tensor") for hook in hooks)


def _head_and_loss(self: Any, hidden: Tensor, labels: Tensor, divisor: Tensor | None, skip_ignored: bool) -> Tensor:
    options: dict[str, Any] = {"ignore_index": titan.IGNORE_INDEX, "reduction": "sum", "skip_ignored": skip_ignored}
    weight, bias = self.weight, self.bias
    if not isinstance(weight, DTensor):
        return linear_cross_entropy(hidden, weight, labels, linear_bias=bias, divisor=divisor, **options)
    if isinstance(labels, DTensor):  # the backend "full_dtensor"
        loss = linear_cross_entropy(hidden, weight, labels, linear_bias=bias, **options)
        return loss if divisor is None else loss / divisor
    if isinstance(hidden, DTensor):  # the same on each rank
        hidden = hidden.to_local()
    options["shard"] = distributed.Shard(weight.shape[0], weight.device_mesh.get_group("tp"))
    bias = None if bias is None else bias.to_local()
    return linear_cross_entropy(hidden, weight.to_local(), labels, linear_bias=bias, divisor=divisor, **options)
