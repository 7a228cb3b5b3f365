"""The head and the loss of a GPTModel of Megatron-Core: its own losses beside ``use_xent``.

    python -m torch.distributed.run --nproc-per-node 2 -m tools.bench megatron

A step is the output layer and the loss behind it, forward and backward, to the mean over the tokens of the loss mask.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import xent_ops
from xent_ops.bench import check, run
from xent_ops.bench.contestants import Contestant, Function
from xent_ops.bench.problems import Setting

from .ranks import SplitHead, units


@functools.cache
def model_class() -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.tensor_parallel import ColumnParallelLinear

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(dist.get_world_size())

    class Head(LanguageModule):
        """What a GPTModel calls behind its last layer. The weight is an argument, as that of a tied head."""

        def __init__(self, config: Any, classes: int) -> None:
            super().__init__(config)
            self.pre_process, self.post_process, self.share_embeddings_and_output_weights = False, True, True
            self.output_layer = ColumnParallelLinear(
                config.hidden_size, classes, config=config, init_method=torch.nn.init.zeros_, bias=False,
                skip_bias_add=False, skip_weight_param_allocation=True,
                tp_group=parallel_state.get_tensor_model_parallel_group(),
            )  # fmt: skip

        def forward(self, hidden: Tensor, weight: Tensor, labels: Tensor, loss_mask: Tensor) -> Tensor:
            logits, _ = self.output_layer(hidden, weight=weight)
            return self.compute_language_model_loss(labels, logits)

    return Head


def step(fused: bool, options: dict[str, Any] | None) -> Function:
    """``options`` of use_xent; None: Megatron's own loss."""
    from megatron.core.transformer import TransformerConfig

    @functools.cache
    def model(hidden: int, classes: int, dtype: torch.dtype) -> Any:
        config = TransformerConfig(
            num_layers=1, hidden_size=hidden, num_attention_heads=dist.get_world_size(), params_dtype=dtype,
            tensor_model_parallel_size=dist.get_world_size(), cross_entropy_loss_fusion=fused,
            cross_entropy_fusion_impl="native", gradient_accumulation_fusion=False,
        )  # fmt: skip
        found = model_class()(config, classes)
        if options is not None:
            xent_ops.use_xent(found, **options)
        return found

    def run(hidden: Tensor, part: Tensor, target: Tensor, classes: int) -> Tensor:
        mask = (target != check.IGNORE_INDEX).float()[None]
        losses = model(hidden.shape[1], classes, hidden.dtype)(
            hidden[:, None], part, labels=target[None], loss_mask=mask
        )
        return (losses * mask).sum() / mask.sum()

    return run


def tables(arguments: argparse.Namespace, setting: Setting) -> list[run.Table]:
    lines: dict[str, tuple[bool, dict[str, Any] | None]] = {
        "Megatron, unfused": (False, None),
        "Megatron, fused": (True, None),
        "use_xent": (False, {}),
        "use_xent, loss_mask=True": (False, {"loss_mask": True}),
    }
    known = units(None)[:2]
    for name, (fused, options) in lines.items():
        kind = "peer" if options is None else "ours"
        load = functools.partial(step, fused, options)
        known.append(Contestant(name, kind, load, needs=("megatron",), captured=False))
    return run.tables_of(SplitHead, arguments.shapes, arguments.hidden, known, setting)
