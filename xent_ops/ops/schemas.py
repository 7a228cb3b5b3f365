"""The schemas of every operator of the namespace ``xent``: strings and nothing else.

This file imports nothing, so that a build step can read it where torch is not installed. docs/ops.md is the contract
behind each line. Shapes: logits are (..., V) with the classes last, target is (...), a class weight is (V,). Order of
the options: integers, then floats, then strings (DTensor's cache key starts at the first integer). Tensors come before
the ``*``: torch registers no autograd formula for keyword-only ones.

``DECLARED`` names for each operator its schema and the argument that its in-place form overwrites, or None. The name of
an in-place form ends in ``_``. It writes the operator's last output over that argument, and returns the others.
"""

SOFT_OPTIONS = "float label_smoothing=0.0, float? softcap=None, float logit_scale=1.0"
OPTIONS = f"SymInt ignore_index=-100, {SOFT_OPTIONS}"
# What rounding the lse took. Without it a softmax, exp(x - lse), is off by a factor of exp(2^-24 |lse|).
LSE_LOW = "Tensor? lse_low=None"
LSE_SQUARE = "float lse_square_scale=0.0"
REDUCTION = "str reduction='mean'"
STATISTICS = "bool with_argmax=False, bool with_entropy=False"
BATCH_INVARIANT = "bool batch_invariant=False"  # a row's bits do not depend on the other rows
# The logits of ignored rows are not read. Such a row has an infinite lse, argmax -1 and entropy 0.
SKIP_IGNORED = "bool skip_ignored=False"
SLICE = "SymInt class_start=0, SymInt? num_classes=None"

# The logits are input @ linear_weight.T + linear_bias, computed one chunk of rows at a time: input is (..., H),
# linear_weight (V, H), linear_bias (V,). The mask names the gradients that are wanted; the others have shape (0,).
LINEAR = "Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias=None, Tensor? weight=None"
DIVISOR = "Tensor? divisor=None"
TOKEN_WEIGHT = "Tensor? token_weight=None"
OUTPUT_MASK = "bool[3] output_mask=[True, True, True]"
ACCUMULATE = "ScalarType? accumulate_dtype=None"
LOGITS_DTYPE = "ScalarType? logits_dtype=None"
CHUNKS = "SymInt? chunk_rows=None, bool skip_ignored=False"
CHUNKING = f"{CHUNKS}, {LOGITS_DTYPE}, str? products=None, {BATCH_INVARIANT}"
# A 16-bit gradient for float32 logits. The in-place form writes it to the front of each row.
GRAD_DTYPE = "ScalarType? grad_dtype=None"
COUNT = "Tensor? count=None"  # (), the number of counted rows of a chunk; ignored rows follow them
# Never read. It only orders a graph: the operator runs after the one that returned this tensor, such as "done", (0,).
AFTER = "Tensor? after=None"
SHARES = "Tensor? shares=None"  # factors of rows in the gradients of the weight and the bias: head/float16.py
IDS = "Tensor? ids=None"  # several classes of each row, (..., K)
MASK_IDS = "bool mask_ids=False"  # lse is that of the classes that the ids of a row do not name
DIVERGENCES = (
    "SymInt ignore_index=-100, SymInt? num_classes=None, float beta=0.5, float temperature=1.0, "
    "float? softcap=None, float logit_scale=1.0, float? teacher_softcap=None, float teacher_logit_scale=1.0, "
    "str fields='kl'"
)
TWO_HEADS = (
    "Tensor input, Tensor linear_weight, Tensor target, Tensor teacher_input, Tensor teacher_weight, "
    "Tensor? linear_bias=None, Tensor? teacher_bias=None"
)
LINEAR_GRADS = "Tensor grad_input, Tensor grad_linear_weight, Tensor grad_linear_bias"

# These call other operators on every device, and have no kernels of their own.
COMPOSITES = ("cross_entropy", "linear_cross_entropy")

DECLARED: dict[str, tuple[str, "str | None"]] = {
    # Public functions call it. Composite: a graph shows the other operators.
    "cross_entropy": (
        f"(Tensor logits, Tensor target, Tensor? weight=None, *, {OPTIONS}, {LSE_SQUARE}, {REDUCTION}) -> Tensor loss",
        None,
    ),
    # Class indices as targets: forward and backward visit the logits once each. A reduced loss is one number. Its
    # divisors are returned too.
    "cross_entropy_reduced": (
        f"(Tensor logits, Tensor target, Tensor? weight=None, *, {OPTIONS}, {LSE_SQUARE}, {REDUCTION}) "
        "-> (Tensor value, Tensor divisors, Tensor lse, Tensor lse_low)",
        None,
    ),
    # Two flags ask for argmax and entropy. Without its flag, each has shape (0,).
    "cross_entropy_forward": (
        f"(Tensor logits, Tensor target, Tensor? weight=None, {STATISTICS}, {BATCH_INVARIANT}, {SKIP_IGNORED}, *, "
        f"{OPTIONS}) -> (Tensor loss, Tensor lse, Tensor argmax, Tensor entropy, Tensor lse_low)",
        None,
    ),
    # With num_classes (of all slices), the logits are the slice of the classes from class_start on.
    "cross_entropy_backward": (
        "(Tensor grad_loss, Tensor? grad_lse, Tensor logits, Tensor target, Tensor lse, Tensor? weight=None, "
        "Tensor? divisors=None, Tensor? grad_entropy=None, Tensor? entropy=None, Tensor? lse_coefficient=None, "
        f"{SLICE}, {GRAD_DTYPE}, {LSE_LOW}, *, {OPTIONS}, {LSE_SQUARE}) -> Tensor grad_logits",
        "logits",
    ),
    # Loss and gradient in one visit of the logits. row_divisors computes the factors of a mean's gradients before, and
    # scale_grad_ multiplies by the upstream gradient afterwards.
    "cross_entropy_with_grad": (
        "(Tensor logits, Tensor target, Tensor grad_scale, Tensor? grad_lse_square=None, Tensor? weight=None, "
        f"{STATISTICS}, {GRAD_DTYPE}, *, {OPTIONS}) "
        "-> (Tensor loss, Tensor lse, Tensor argmax, Tensor entropy, Tensor grad_logits)",
        "logits",
    ),
    "scale_grad_": ("(Tensor(a!) grad, Tensor factor) -> ()", None),
    # What a reduced loss and its z-loss are divided by, and the factors of the gradients of losses and of lse^2: one
    # number, or with token_weight one for each row. dtype None: float32.
    "row_divisors": (
        f"(Tensor target, Tensor? weight=None, {TOKEN_WEIGHT}, {DIVISOR}, *, SymInt ignore_index=-100, {LSE_SQUARE}, "
        f"{REDUCTION}, ScalarType? dtype=None) -> (Tensor divisors, Tensor grad_scale, Tensor grad_lse_square)",
        None,
    ),
    # The reduced loss of rows. With argmax also its z-loss, and the share of counted rows that argmax hits. The
    # divisors are returned if they are not given.
    "row_summary": (
        f"(Tensor loss, Tensor lse, Tensor target, Tensor? weight=None, {TOKEN_WEIGHT}, Tensor? divisors=None, "
        f"Tensor? argmax=None, *, SymInt ignore_index=-100, {LSE_SQUARE}, {REDUCTION}) "
        "-> (Tensor value, Tensor divisors, Tensor z_loss, Tensor accuracy)",
        None,
    ),
    # Several classes per row, ids (..., K): x of each. With the lse it gives their log-probabilities.
    "token_logits": (
        f"(Tensor logits, Tensor ids, bool with_entropy=False, {BATCH_INVARIANT}, {MASK_IDS}, *, {OPTIONS}) "
        "-> (Tensor at_ids, Tensor lse, Tensor entropy, Tensor lse_low)",
        None,
    ),
    "token_logits_backward": (
        "(Tensor grad_ids, Tensor? grad_lse, Tensor? grad_entropy, Tensor logits, Tensor ids, Tensor at_ids, "
        f"Tensor lse, Tensor? entropy=None, {LSE_LOW}, {MASK_IDS}, *, {OPTIONS}) -> Tensor grad_logits",
        None,
    ),
    # One of the ids, which serves as the target of their row.
    "row_targets": ("(Tensor ids, *, SymInt ignore_index=-100) -> Tensor target", None),
    "ids_forward": (f"(Tensor logits, Tensor ids, {SLICE}, *, {OPTIONS}) -> Tensor at_ids", None),
    # The same, and the columns of the ids are masked.
    "mask_ids_": (f"(Tensor(a!) logits, Tensor ids, {SLICE}, *, {OPTIONS}) -> Tensor at_ids", None),
    # Writes the columns of the ids. cross_entropy_backward has written the others before.
    "ids_grad_": (
        "(Tensor(a!) grad_logits, Tensor ids, Tensor at_ids, Tensor grad_ids, Tensor grad_lse, Tensor lse, "
        f"Tensor? grad_entropy=None, Tensor? entropy=None, {SLICE}, *, {OPTIONS}) -> ()",
        None,
    ),
    # Losses of rows whose ids have these probabilities, and their derivatives. With a tail all other classes are one
    # more, and the lse is theirs: that of mask_ids.
    "top_k_distillation": (
        f"(Tensor at_ids, Tensor lse, Tensor ids, Tensor probs, {TOKEN_WEIGHT}, bool tail=False, {LSE_LOW}, *, "
        f"SymInt ignore_index=-100, {LSE_SQUARE}) -> (Tensor loss, Tensor grad_ids, Tensor grad_lse)",
        None,
    ),
    # The k classes with the largest logits, and the rank of the target in their order. With target_logit the logits are
    # a slice of the classes, and the rank counts its columns before a target of this logit in any column.
    "top_k": (
        "(Tensor logits, int k, Tensor? target=None, Tensor? target_logit=None, *, SymInt ignore_index=-100, "
        "float logit_scale=1.0) -> (Tensor ids, Tensor rank)",
        None,
    ),
    # Class probabilities as targets, (..., V) like the logits.
    "soft_cross_entropy_forward": (
        f"(Tensor logits, Tensor probabilities, Tensor? weight=None, bool check_target=True, *, {SOFT_OPTIONS}) "
        "-> (Tensor loss, Tensor lse)",
        None,
    ),
    "soft_cross_entropy_backward": (
        "(Tensor grad_loss, Tensor? grad_lse, Tensor logits, Tensor probabilities, Tensor lse, Tensor? weight=None, *, "
        f"{SOFT_OPTIONS}) -> Tensor grad_logits",
        None,
    ),
    # A teacher's logits beside the student's: divergences of rows by name, (5, ...), what the backward needs, and the
    # gradient from an upstream gradient of each. With class_start both are a slice of num_classes, and the forward
    # returns this slice's part for a join. teacher_lse: the overlap's lse, of more classes.
    "divergences_forward": (
        "(Tensor logits, Tensor teacher_logits, Tensor target, Tensor? teacher_lse=None, Tensor? joined=None, "
        f"SymInt? class_start=None, *, {DIVERGENCES}) -> (Tensor values, Tensor statistics)",
        None,
    ),
    "divergences_backward": (
        "(Tensor grad_values, Tensor logits, Tensor teacher_logits, Tensor target, Tensor statistics, "
        f"SymInt? class_start=None, {GRAD_DTYPE}, *, {DIVERGENCES}) -> Tensor grad_logits",
        "logits",
    ),
    # In one kernel, for the loss that is one divergence plus hard_weight times the cross entropy on the target.
    "divergences_with_grad": (
        f"(Tensor logits, Tensor teacher_logits, Tensor target, Tensor grad_scale, {GRAD_DTYPE}, *, {DIVERGENCES}, "
        "float hard_weight=0.0) -> (Tensor loss, Tensor grad_logits)",
        "logits",
    ),
    # One rank's shard of the vocabulary. The caller gathers the results of cross_entropy_shard, (1, W), of all ranks to
    # (ranks, W). The other two join them: to losses of rows, or to a reduced loss.
    "cross_entropy_shard": (
        "(Tensor logits, Tensor target, SymInt class_start, SymInt num_classes, Tensor? weight=None, "
        f"{BATCH_INVARIANT}, *, {OPTIONS}) -> Tensor stats",
        None,
    ),
    "cross_entropy_shard_join": (
        "(Tensor logits, Tensor target, Tensor gathered, SymInt class_start, SymInt num_classes, "
        f"Tensor? weight=None, *, {OPTIONS}) "
        "-> (Tensor loss, Tensor lse, Tensor target_weight, Tensor lse_coefficient, Tensor lse_low)",
        None,
    ),
    "cross_entropy_shard_reduced": (
        "(Tensor logits, Tensor target, Tensor gathered, SymInt class_start, SymInt num_classes, "
        f"Tensor? weight=None, *, {OPTIONS}, {LSE_SQUARE}, {REDUCTION}) "
        "-> (Tensor value, Tensor divisors, Tensor lse, Tensor lse_coefficient, Tensor lse_low)",
        None,
    ),
    # The head and the loss as one. Composite: one pass if gradients are wanted, otherwise rows.
    "linear_cross_entropy": (
        f"({LINEAR}, {DIVISOR}, {TOKEN_WEIGHT}, *, {OPTIONS}, {LSE_SQUARE}, {REDUCTION}, {ACCUMULATE}, {CHUNKING}) "
        "-> Tensor loss",
        None,
    ),
    # Rows: one matrix multiplication in the forward, three in the backward. Beside ids the target is one of them.
    "linear_cross_entropy_forward": (
        f"({LINEAR}, {STATISTICS}, {IDS}, {MASK_IDS}, *, {OPTIONS}, {ACCUMULATE}, {CHUNKING}) "
        "-> (Tensor loss, Tensor lse, Tensor argmax, Tensor entropy, Tensor lse_low, Tensor at_ids)",
        None,
    ),
    "linear_cross_entropy_backward": (
        "(Tensor grad_loss, Tensor? grad_lse, Tensor input, Tensor linear_weight, Tensor target, Tensor lse, "
        "Tensor? linear_bias=None, Tensor? weight=None, Tensor? divisors=None, Tensor? grad_entropy=None, "
        f"Tensor? entropy=None, Tensor? lse_coefficient=None, {SLICE}, {OUTPUT_MASK}, {LSE_LOW}, {IDS}, "
        f"Tensor? at_ids=None, Tensor? grad_ids=None, {MASK_IDS}, *, {OPTIONS}, {LSE_SQUARE}, {ACCUMULATE}, "
        f"{CHUNKING}) -> ({LINEAR_GRADS})",
        None,
    ),
    # The ids are the k classes with the largest logits, and behind them the target.
    "linear_top_k": (
        "(Tensor input, Tensor linear_weight, int k, Tensor? target=None, Tensor? linear_bias=None, *, "
        f"{OPTIONS}, {ACCUMULATE}, {CHUNKING}) -> (Tensor at_ids, Tensor ids, Tensor lse, Tensor entropy, "
        "Tensor rank, Tensor lse_low)",
        None,
    ),
    # One pass with three matrix multiplications: a reduced loss, the losses and statistics of its rows, its gradients.
    # linear_scale_grad multiplies these by the upstream gradient.
    "linear_cross_entropy_with_grad": (
        f"({LINEAR}, {DIVISOR}, {TOKEN_WEIGHT}, {OUTPUT_MASK}, {ACCUMULATE}, {STATISTICS}, *, {OPTIONS}, {LSE_SQUARE}, "
        f"{REDUCTION}, {CHUNKING}) -> (Tensor value, Tensor divisors, Tensor z_loss, Tensor accuracy, Tensor loss, "
        f"Tensor lse, Tensor argmax, Tensor entropy, {LINEAR_GRADS})",
        None,
    ),
    # The same of two heads. Rows: two matrix multiplications in the forward, four in the backward. One pass: four.
    # classes: the teacher's class of each of the student's. tops: do the argmaxes agree; does the student have the
    # teacher's?
    "linear_divergences_forward": (
        f"({TWO_HEADS}, Tensor? classes=None, bool with_tops=False, *, {DIVERGENCES}, {ACCUMULATE}, {CHUNKS}, "
        f"{LOGITS_DTYPE}) -> (Tensor values, Tensor statistics, Tensor tops)",
        None,
    ),
    "linear_divergences_backward": (
        f"(Tensor grad_values, Tensor statistics, {TWO_HEADS}, Tensor? classes=None, {OUTPUT_MASK}, *, {DIVERGENCES}, "
        f"{ACCUMULATE}, {CHUNKS}, {LOGITS_DTYPE}) -> ({LINEAR_GRADS})",
        None,
    ),
    "linear_divergences_with_grad": (
        f"({TWO_HEADS}, {DIVISOR}, {TOKEN_WEIGHT}, {OUTPUT_MASK}, {ACCUMULATE}, *, {DIVERGENCES}, "
        f"float hard_weight=0.0, {REDUCTION}, {CHUNKS}, {LOGITS_DTYPE}) "
        f"-> (Tensor value, Tensor divisors, {LINEAR_GRADS})",
        None,
    ),
    "linear_scale_grad": ("(Tensor grad, Tensor factor) -> Tensor scaled", None),
    # One rank's rows of the head. The caller gathers between the first two, as above. The formula of the join sums
    # grad_input over the ranks of the group. in_rank_order: the order of this sum does not depend on the row.
    "linear_cross_entropy_shard": (
        "(Tensor input, Tensor linear_weight, Tensor target, SymInt class_start, SymInt num_classes, "
        f"Tensor? linear_bias=None, Tensor? weight=None, bool with_entropy=False, {IDS}, *, {OPTIONS}, {CHUNKING}) "
        "-> Tensor stats",
        None,
    ),
    "linear_cross_entropy_shard_join": (
        "(Tensor input, Tensor linear_weight, Tensor target, Tensor gathered, SymInt class_start, SymInt num_classes, "
        "Tensor? linear_bias=None, Tensor? weight=None, Tensor? gathered_input=None, bool with_entropy=False, "
        f"{IDS}, *, {OPTIONS}, {ACCUMULATE}, {CHUNKING}, str group_name='', bool in_rank_order=False) -> (Tensor loss, "
        "Tensor lse, Tensor target_weight, Tensor lse_coefficient, Tensor entropy, Tensor lse_low, Tensor at_ids)",
        None,
    ),
    # The matrix multiplications of one chunk of rows. Between the first two, row operators and the caller's code run.
    # The second reads the gradient that was written over the logits, in fewer bytes in the front of each row.
    "linear_logits": (
        f"(Tensor input, Tensor linear_weight, Tensor? linear_bias=None, {COUNT}, {AFTER}, {LOGITS_DTYPE}) "
        "-> Tensor logits",
        None,
    ),
    "linear_grad_input": (
        f"(Tensor logits, Tensor linear_weight, bool with_grad_input=True, {COUNT}, {AFTER}) "
        "-> (Tensor grad_input, Tensor done)",
        None,
    ),
    "linear_cross_entropy_chunk_add_": (
        "(Tensor(a!) grad_linear_weight, Tensor(b!) grad_linear_bias, Tensor grad_logits, Tensor input, "
        f"SymInt columns, bool first, {COUNT}, {SHARES}) -> ()",
        None,
    ),
    "attach_gradients": (
        f"(Tensor value, Tensor input, Tensor linear_weight, Tensor? linear_bias, {LINEAR_GRADS}, "
        "Tensor? divisor=None, Tensor? row_factors=None) -> Tensor loss",
        None,
    ),
}


def in_place_schema(schema: str, overwrites: str) -> str:
    """The schema of the operator that writes its last output over this argument."""
    arguments, outputs = schema.split(" -> ")
    written = arguments.replace(f"Tensor {overwrites},", f"Tensor(a!) {overwrites},")
    other_outputs = [output.strip() for output in outputs.strip("()").split(",")[:-1]]
    return f"{written} -> ({', '.join(other_outputs)})"


SCHEMAS: dict[str, str] = {}
for _name, (_schema, _overwrites) in DECLARED.items():
    SCHEMAS[_name] = _schema
    if _overwrites is not None:
        SCHEMAS[f"{_name}_"] = in_place_schema(_schema, _overwrites)

# Not in libxent_ops.so, and plain torch on a CPU: heads, whose loops over chunks are written in Python, and several
# classes per row. A package for a process without Python takes heads from ``xent_ops.decompositions``.
_PREFIXES = ("linear_", "token_logits", "ids_", "mask_ids", "row_targets", "top_k", "attach_")
PYTHON_ONLY = frozenset(name for name in SCHEMAS if name.startswith(_PREFIXES))
