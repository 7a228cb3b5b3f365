"""The schemas of every operator of the namespace ``xent``: strings and nothing else.

This file imports nothing, so that a build step can read it where torch is not installed. docs/ops.md is
the contract behind each line. Shapes: logits are (..., V) with the classes last, target is (...), a class
weight is (V,). Order of the options: integers, then floats, then strings (DTensor's cache key starts at
the first integer). Tensors come before the ``*``: torch registers no autograd formula for keyword-only ones.
"""

_ROW = "SymInt ignore_index=-100, float label_smoothing=0.0, float? softcap=None, float logit_scale=1.0"
_SOFT = "float label_smoothing=0.0, float? softcap=None, float logit_scale=1.0"

# Made of the others for every device: no kernels of their own.
COMPOSITES = ("cross_entropy",)

SCHEMAS: dict[str, str] = {
    # What users call. Composite: a graph shows the operators below.
    "cross_entropy": (
        "(Tensor logits, Tensor target, Tensor? weight=None, *, SymInt ignore_index=-100, "
        "float label_smoothing=0.0, float lse_square_scale=0.0, float? softcap=None, "
        "float logit_scale=1.0, str reduction='mean') -> Tensor"
    ),
    # Class indices as targets: one visit of the logits each way.
    "cross_entropy_forward": (
        f"(Tensor logits, Tensor target, Tensor? weight=None, *, {_ROW}) -> (Tensor loss, Tensor lse)"
    ),
    "cross_entropy_forward_argmax": (
        f"(Tensor logits, Tensor target, Tensor? weight=None, *, {_ROW}) -> (Tensor loss, Tensor lse, Tensor argmax)"
    ),
    "cross_entropy_backward": (
        "(Tensor grad_loss, Tensor? grad_lse, Tensor logits, Tensor target, Tensor lse, "
        f"Tensor? weight=None, Tensor? divisor=None, *, {_ROW}) -> Tensor"
    ),
    "cross_entropy_backward_": (
        "(Tensor grad_loss, Tensor? grad_lse, Tensor(a!) logits, Tensor target, Tensor lse, "
        f"Tensor? weight=None, Tensor? divisor=None, *, {_ROW}) -> ()"
    ),
    # Loss and gradient in one visit of the logits, and what applies an upstream gradient afterwards.
    "cross_entropy_with_grad": (
        "(Tensor logits, Tensor target, Tensor grad_scale, Tensor? grad_lse_square=None, Tensor? weight=None, *, "
        f"{_ROW}) -> (Tensor loss, Tensor lse, Tensor grad_logits)"
    ),
    "cross_entropy_with_grad_": (
        "(Tensor(a!) logits, Tensor target, Tensor grad_scale, Tensor? grad_lse_square=None, Tensor? weight=None, *, "
        f"{_ROW}) -> (Tensor loss, Tensor lse)"
    ),
    "scale_grad_": "(Tensor(a!) grad, Tensor factor) -> ()",
    # Class probabilities as targets, (..., V) like the logits.
    "soft_cross_entropy_forward": (
        f"(Tensor logits, Tensor target, Tensor? weight=None, *, {_SOFT}) -> (Tensor loss, Tensor lse)"
    ),
    "soft_cross_entropy_backward": (
        "(Tensor grad_loss, Tensor? grad_lse, Tensor logits, Tensor target, Tensor lse, "
        f"Tensor? weight=None, *, {_SOFT}) -> Tensor"
    ),
    # Shannon entropy of the softmax beside the loss, in the same visit.
    "cross_entropy_forward_entropy": (
        f"(Tensor logits, Tensor target, Tensor? weight=None, *, {_ROW}) -> (Tensor loss, Tensor lse, Tensor entropy)"
    ),
    "cross_entropy_backward_entropy": (
        "(Tensor grad_loss, Tensor? grad_lse, Tensor? grad_entropy, Tensor logits, Tensor target, Tensor lse, "
        f"Tensor entropy, Tensor? weight=None, *, {_ROW}) -> Tensor"
    ),
    # One rank's shard of the vocabulary. Between the first two stands the caller's all-gather of (1, L) to (ranks, L).
    "cross_entropy_shard": (
        "(Tensor logits, Tensor target, SymInt class_start, SymInt num_classes, Tensor? weight=None, *, "
        f"{_ROW}) -> Tensor"
    ),
    "cross_entropy_shard_join": (
        "(Tensor logits, Tensor target, Tensor gathered, SymInt class_start, SymInt num_classes, "
        f"Tensor? weight=None, *, {_ROW}) -> (Tensor loss, Tensor lse, Tensor target_weight, Tensor coefficient)"
    ),
    "cross_entropy_shard_backward": (
        "(Tensor grad_loss, Tensor? grad_lse, Tensor logits, Tensor target, Tensor lse, SymInt class_start, "
        f"SymInt num_classes, Tensor? weight=None, Tensor? coefficient=None, *, {_ROW}) -> Tensor"
    ),
    "cross_entropy_shard_backward_": (
        "(Tensor grad_loss, Tensor? grad_lse, Tensor(a!) logits, Tensor target, Tensor lse, SymInt class_start, "
        f"SymInt num_classes, Tensor? weight=None, Tensor? coefficient=None, *, {_ROW}) -> ()"
    ),
}
