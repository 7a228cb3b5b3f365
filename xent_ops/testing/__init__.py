"""A float64 oracle and error budgets, for this project's tests and for yours.

The oracle is written with torch's own float64 operators and autograd and shares no code with the kernels. A budget
is a bound for each element, derived from the formats: the largest rounding error times a small safety factor. Absolute
tolerances are useless here: with a mean over 8192 rows the gradients off the target are smaller than 1e-8.

The budgets follow the dtype of the tensor under test, so check that dtype yourself. The budget of a gradient allows one
rounding of lse: at logits of 1e6 in float32 it is larger than the gradient.
"""

from .distillation import DistillationExpected, assert_distillation, distillation_oracle
from .linear import LinearExpected, assert_linear, linear_oracle
from .rows import Expected, assert_grad, assert_loss, assert_lse, oracle, realistic_logits

__all__ = [
    "DistillationExpected",
    "Expected",
    "LinearExpected",
    "assert_distillation",
    "assert_grad",
    "assert_linear",
    "assert_loss",
    "assert_lse",
    "distillation_oracle",
    "linear_oracle",
    "oracle",
    "realistic_logits",
]
