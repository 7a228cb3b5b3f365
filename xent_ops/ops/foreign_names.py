"""Names that are not ours: of other libraries, of trainers, and of our functions before 1.0. An error says which is."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn

_TOP_K = {
    "linear_weight": "use xent_ops.linear_top_k_distillation_loss(input, linear_weight, ids, probs)",
    "input": "use xent_ops.linear_top_k_distillation_loss of hidden states, or top_k_distillation_loss of logits",
}
_DIVISOR = {"tied_weight": "pass divisor= to its call", "reduction": 'divide the loss of reduction="sum" by it'}
_TARGET = {"target": "pass target=", "ids": "pass ids="}
_LABELS = {
    "target": "pass target=, of a causal model the next token of each: labels[:, 1:] of hidden_states[:, :-1]",
    "ids": "pass ids=",
}
_MASK = {
    "ids": "rows that it masks have ids of ignore_index: ids.masked_fill(~mask[..., None], -100)",
    "target": "rows that it masks have a target of ignore_index: target.masked_fill(~mask, -100)",
}
_TEMPERATURE = {"temperature": "pass temperature=", "logit_scale": "pass logit_scale=, one over it"}
_SHARD = {"shard": "pass shard=xent_ops.distributed.Shard(num_classes, group), which has all that is of ranks"}
_GROUP = {"group": "pass group=", **_SHARD}
_T2D = "pass classes=, the teacher's class of each of the student's: {} (numbers, int64)"

ARGUMENTS: dict[str, dict[str, str]] = {
    "T": _TEMPERATURE,
    "accum_dtype": {"accumulate_dtype": "pass accumulate_dtype="},
    "attention_mask": _MASK,
    "bias": {"linear_bias": "pass linear_bias="},
    "bias_shard": {"linear_bias": "pass linear_bias="},
    "ce_weight": {"class_weight": "pass class_weight=", "weight": "pass weight="},
    "chunk_size": {"chunk_rows": "pass chunk_rows="},
    "class_start": _SHARD,
    "completion_mask": _MASK,
    "d2t": {"classes": _T2D.format("torch.arange(len(d2t), device=d2t.device) + d2t of its offsets")},
    "divisor": _DIVISOR,
    "group": _SHARD,
    "hidden_states": {"input": "pass input="},
    "k": {"ids": "pass ids= and probs=, of xent_ops.linear_top_k or torch.topk of the teacher's probabilities"},
    "labels": _LABELS,
    "logits": {"input": "pass input="},
    "loss_mask": _MASK,
    "lse_square_scale": {"fn": "add factor * stats.lse ** 2 in fn"},
    "mask": _MASK,
    "mode": {"base": "pass base=, the name of the mode"},
    "num_classes": _SHARD,
    "num_items_in_batch": {"divisor": 'pass divisor=, for reduction="sum"', **_DIVISOR},
    "pipelined": _SHARD,
    "process_group": _GROUP,
    "return_z_loss": {"lse_square_scale": "cross_entropy_outputs and linear_cross_entropy_outputs have z_loss"},
    "sequence_parallel": _SHARD,
    "size_average": {"reduction": "pass reduction="},
    "t2d": {"classes": _T2D.format("t2d.nonzero().squeeze(-1) of its mask")},
    "tail": _TOP_K,
    "target": {"ids": "pass ids="},
    "target_probs": {"probs": "pass probs=", **_TOP_K},
    "targets": _TARGET,
    "temperature": {"logit_scale": "pass logit_scale=, one over it"},
    "tp_group": _GROUP,
    "weight": {"tied_weight": "pass class_weight=, or the head's as tied_weight="},
    "weight_shard": {"linear_weight": "pass linear_weight="},
    "z_loss": {"lse_square_scale": "pass lse_square_scale=, its factor", "fn": "add factor * stats.lse ** 2 in fn"},
}
"""An argument's name -> our parameter and what to write. The first parameter that the function has decides."""

_OF_HEAD = "linear_cross_entropy(input, linear_weight, target)"
_OF_TOKENS = "token_log_probs(logits, target), or linear_token_log_probs(hidden, linear_weight, target)"
_OF_MODEL = "use_xent(model)"
FUNCTIONS: dict[str, str] = {
    "LigerCrossEntropyLoss": "CrossEntropyLoss",
    "LigerFusedLinearCrossEntropyLoss": "LinearCrossEntropyLoss, whose call takes input, target",
    "apply_liger_kernel_to_llama": _OF_MODEL,
    "cce_patch": _OF_MODEL,
    "entropy_from_logits": "token_log_probs(logits, target).entropy",
    "FusedCrossEntropyLoss": "CrossEntropyLoss",
    "FusedLinearCrossEntropyLoss": "LinearCrossEntropyLoss, whose call takes input, target",
    "fused_cross_entropy": "cross_entropy(logits, target)",
    "fused_linear_cross_entropy": _OF_HEAD,
    "fused_linear_jsd": "linear_distillation_loss(input, linear_weight, teacher_input, teacher_weight, beta=0.5)",
    "generalized_jsd_loss": "distillation_loss(logits, teacher_logits, beta=0.5)",
    "kl_div": "distillation_loss(logits, teacher_logits)",
    "linear_topk": "linear_top_k(input, linear_weight, k)",
    "logprobs_from_logits": _OF_TOKENS,
    "nll_loss": "cross_entropy(logits, target), of logits, not of log-probabilities",
    "patch": _OF_MODEL,
    "selective_log_softmax": _OF_TOKENS,
    "topk": "top_k(logits, k), or linear_top_k(input, linear_weight, k)",
    "vocab_parallel_cross_entropy": "distributed.vocab_parallel_cross_entropy(logits_shard, target, num_classes=...)",
}
"""A function's name -> how our function is called, without the name of the module."""

FIELDS: dict[str, tuple[str, ...]] = {
    "acceptance_rate": ("overlap",),
    "forward_kl": ("kl",),
    "indices": ("ids", "predictions"),
    "js": ("jsd",),
    "kl_div": ("kl",),
    "logp": ("log_probs", "log_prob"),
    "logprobs": ("log_probs", "log_prob"),
    "logsumexp": ("lse",),
    "losses": ("token_losses",),
    "predicted_tokens": ("predictions",),
    "token_accuracy": ("accuracy",),
    "total_variation": ("overlap, which is 1 - it",),
    "values": ("log_probs",),
}
"""A field's name -> ours. The first one that the record has is named."""

_OF_RANKS = "vocab_parallel_"  # began names before 1.0, such as vocab_parallel_linear_top_k


def refuse_argument(function: str, name: str, parameters: Iterable[str]) -> NoReturn:
    """``parameters``: those that the function has."""
    names = [parameter for parameter in parameters if parameter != "self"]
    advice = [text for parameter, text in ARGUMENTS.get(name, {}).items() if parameter in names]
    instead = advice[0] if advice else f"it has {', '.join(names)}"
    raise TypeError(f"{function}() got an unexpected keyword argument {name!r}; {instead}")


def refuse_field(record: str, name: str, fields: Sequence[str]) -> NoReturn:
    """For the ``__getattr__`` of a record of results."""
    ours = [field for field in FIELDS.get(name, ()) if field.split(",")[0] in fields]
    instead = f"use {ours[0]}" if ours else f"it has {', '.join(fields[:-1])} and {fields[-1]}"
    raise AttributeError(f"{record} has no {name!r}; {instead}")


def refuse_attribute(module: str, name: str) -> NoReturn:
    """For a module's ``__getattr__``. With ``name`` and ``obj`` Python's traceback suggests a name like this one."""
    instead = f"; use xent_ops.{FUNCTIONS[name]}" if name in FUNCTIONS else ""
    text = f"module {module!r} has no attribute {name!r}{instead}"
    raise AttributeError(text, name=name, obj=sys.modules[module])


def refuse_function_of_ranks(name: str) -> None:
    if name.startswith(f"{_OF_RANKS}linear_"):  # not an AttributeError, whose text ``from`` leaves out
        raise ImportError(
            f"{name} is an argument now: write xent_ops.{name.removeprefix(_OF_RANKS)}(..., shard=xent_ops.distributed."
            "Shard(num_classes, group)), with linear_weight= and linear_bias= for this rank's part of the head"
        )
