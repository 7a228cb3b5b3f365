"""The dtype, shape and meaning of each tensor, by its name: text only, like schemas.py, for the same readers.

A dtype is a class of dtypes, ``=name`` the dtype of another argument, ``acc`` the accumulator's. A shape is sizes by
name: ``...`` are the rows, a number is itself, and ``| ()`` says that one number for all rows will do.

The order of this table has meaning. Arguments are checked in it. The first one that an operator has is its primary: it
gives rows, dtype and device. The first with a size gives that size. Sizes that no argument gives: ``S``, ``P`` and
``W`` (contract.DERIVED_SIZES).
"""

# name: (dtype, shape, meaning)
ARGUMENTS: dict[str, tuple[str, str, str]] = {
    # Tensors that have the rows.
    "loss": ("float", "...", "one number a row"),
    "logits": ("float", "... V", "the classes last"),
    "grad": ("float", "... columns", ""),
    "grad_logits": ("float", "... columns", "the classes last"),
    "input": ("float", "... H", "the features last"),
    # The heads.
    "linear_weight": ("=input", "V H", "one row of the input's features for each class"),
    "linear_bias": ("=input", "V", "one number a class"),
    "teacher_logits": ("float", "... T", "the rows of the logits, which are before the classes"),
    "teacher_input": ("float", "... G", "the rows of input, before the features"),
    "teacher_weight": ("=teacher_input", "T G", "one row of the teacher_input's features for each class"),
    "teacher_bias": ("=teacher_input", "T", "one number a class"),
    # The targets.
    "ids": ("index", "... K", "K classes of each row of the {primary}"),
    "target": ("index", "...", "one class index for each row of the {primary}"),
    "classes": ("index", "V", "the teacher's class of each of the student's"),
    "probabilities": ("float", "... V", "one probability for each logit"),
    "probs": ("float", "... K", "a probability for each of the ids"),
    "weight": ("float", "V", "one weight a class"),
    "token_weight": ("any", "...", "one number for each target"),
    # Computed by a forward.
    "argmax": ("index", "...", "one class index for each row of the {primary}"),
    "lse": ("float", "...", "one value for each row of the {primary}"),
    "lse_low": ("float", "...", "one value for each row of the {primary}"),
    "entropy": ("float", "...", "one value for each row of the {primary}"),
    "lse_coefficient": ("float", "...", "one value for each row of the {primary}"),
    "target_logit": ("float", "...", "one number for each target"),
    "at_ids": ("float", "... K", "one number for each of the ids"),
    "statistics": ("float", "S ...", "those that divergences_forward makes of each row"),
    "joined": ("float", "S ...", "those that divergences_forward makes of each row"),
    "teacher_lse": ("float", "L ...", "an lse for each row of the {primary}, and what its rounding took"),
    "gathered": ("acc", "ranks W", "one result of cross_entropy_shard for each rank"),
    "divisors": ("divisor", "2", "the sum of the weights and the number of counted rows"),
    "divisor": ("divisor", "", "one number"),
    "count": ("int32", "", "one number"),
    # Upstream gradients.
    "grad_loss": ("float", "... | ()", "one value for each row of the {primary}"),
    "grad_scale": ("float", "... | ()", "one value for each row of the {primary}"),
    "grad_values": ("float", "F ...", "one value for each divergence of each row of the {primary}"),
    "factor": ("float", "... | ()", "one value for each row of the {primary}"),
    "grad_lse_square": ("float", "... | ()", "one value for each row of the {primary}"),
    "grad_lse": ("float", "...", "one value for each row of the {primary}"),
    "grad_entropy": ("float", "...", "one value for each row of the {primary}"),
    "grad_ids": ("float", "... K", "one number for each of the ids"),
    "shares": ("float", "...", "one value for each row of the {primary}"),
    "row_factors": ("float", "...", "one value for each row of the {primary}"),
}

# name: (dtype, shape, the argument or the place in output_mask without which it is of shape (0,)).
RESULTS: dict[str, tuple[str, str, str]] = {
    "loss": ("acc", "...", ""),
    "lse": ("acc", "...", ""),
    "lse_low": ("acc", "...", ""),
    "argmax": ("int64", "...", "with_argmax"),
    "entropy": ("acc", "...", "with_entropy"),
    "target_weight": ("acc", "...", ""),
    "lse_coefficient": ("acc", "...", ""),
    "at_ids": ("acc", "... K", "ids"),
    "statistics": ("acc", "S ...", ""),
    "values": ("acc", "F ...", ""),
    "tops": ("acc", "2 ...", "with_tops"),
    "value": ("acc", "", ""),
    "divisors": ("acc", "2", ""),
    "z_loss": ("acc", "", "with_argmax"),
    "accuracy": ("acc", "", "with_argmax"),
    "stats": ("acc", "1 W", ""),
    "logits": ("logits_dtype", "... P", ""),
    "grad_logits": ("grad_dtype", "... V", ""),
    "grad_input": ("=input", "... H", "output_mask 0"),
    "grad_linear_weight": ("=input", "V H", "output_mask 1"),
    "grad_linear_bias": ("=input", "V", "output_mask 2"),
    # Where they are added up, before an upstream gradient is applied.
    "summed_weight": ("sum_dtype", "V H", "output_mask 1"),
    "summed_bias": ("acc", "V", "output_mask 2"),
    "done": ("=linear_weight", "0", ""),
}
