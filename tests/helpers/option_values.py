"""Values of the operators' options, and values that are refused: all tests that draw options draw these.

An option that has no row in ``VALUES`` or ``REFUSED`` has the values of its type.
"""

import functools
from typing import Any

import torch

from xent_ops.kernels.options import HEAD_PRODUCTS

NAN, INF = float("nan"), float("inf")

# Of each option values that are not its default. The first is that of a call with all options. Fuzzing and tests of
# kernels draw from all of them.
VALUES: dict[str, tuple[Any, ...]] = {
    "ignore_index": (3,),
    "label_smoothing": (0.125, 1.0),
    "softcap": (2.0, 30.0),
    "logit_scale": (1.5, -2.0, 0.5),
    "lse_square_scale": (0.125, 2.0**-13),
    "reduction": ("sum", "none"),
    "beta": (0.25, 0.03, 0.875),
    "temperature": (2.0, 0.5),
    "hard_weight": (0.5, -0.25),
    "fields": ("kl,reverse_kl,mixture,overlap,log_prob", "overlap", "kl,log_prob", "mixture,log_prob"),
    "teacher_softcap": (3.0,),
    "teacher_logit_scale": (0.75, -0.75),
    "output_mask": ([True, False, False], [False, True, True]),
    "chunk_rows": (4,),
    "products": HEAD_PRODUCTS,
    "grad_dtype": (torch.bfloat16,),
    "group_name": (),  # needs ranks: tests/distributed
    "gathered_input": (),
}
BY_TYPE: dict[str, tuple[Any, ...]] = {
    "bool": (True, False),
    "float": (0.5,),
    "Optional[float]": (2.0,),
    "Optional[ScalarType]": (torch.float32,),
}
# Of each option values that every operator with it refuses.
REFUSED: dict[str, tuple[Any, ...]] = {
    "label_smoothing": (1.5, 1.0000001, -0.5, NAN),
    "softcap": (0.0, -2.25, 1e-46, 1.1754943508222873e-38, INF, 1e39, NAN),
    "logit_scale": (0.0, -0.0, 1e-46, -1.1754943508222873e-38, INF, 1e39, NAN),
    "lse_square_scale": (-0.1, INF, 1e39, NAN),
    "reduction": ("median",),
    "beta": (1.5, -0.1),
    "temperature": (0.0, INF),
    "hard_weight": (NAN,),
    "fields": ("jsd", "kl,kl", ""),
    "teacher_softcap": (0.0,),
    "teacher_logit_scale": (INF,),
    "num_classes": (0, -1),
    "class_start": (-1, 2**62),
    "chunk_rows": (0, -3),
    "accumulate_dtype": (torch.int32, torch.float64),
    "logits_dtype": (torch.int32, torch.float64),
    "grad_dtype": (torch.int32, torch.float64),
    "dtype": (torch.int32, torch.bfloat16),
    "products": ("int8",),
    "output_mask": ([True, True],),
}
REFUSED_BY_TYPE: dict[str, tuple[Any, ...]] = {
    "float": (NAN,),
    "Optional[float]": (NAN,),
    "Optional[ScalarType]": (torch.int32,),
}


@functools.cache
def arguments_of(name: str) -> dict[str, Any]:
    """Each argument of the schema, by name."""
    return {argument.name: argument for argument in getattr(torch.ops.xent, name).default._schema.arguments}


def another(name: str, default: Any) -> Any:
    """A value of a public function's parameter that is not its default; a KeyError where its type is not known."""
    if name in VALUES:
        return VALUES[name][0]
    return torch.float32 if name.endswith("dtype") else {True: False, False: True}[default]


def drawn(*schemas: str) -> dict[str, tuple[Any, ...]]:
    """Of each number that is an option of these operators its values, the default first."""
    arguments = {one.name: one for name in schemas for one in arguments_of(name).values()}
    return {
        name: (one.default_value, *VALUES.get(name, BY_TYPE.get(str(one.real_type), ())))
        for name, one in arguments.items()
        if "float" in str(one.real_type)
    }
