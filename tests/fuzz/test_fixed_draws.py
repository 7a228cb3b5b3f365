"""Values and gradients of public functions against float64: draws of which a table fixes some arguments.

A row is (functions, arguments by the name that the draw gives them). A test is a row of a function: two draws, one in
float64 unless the row fixes the dtype. What it does not fix is drawn from its number: add rows at the end.
"""

import pytest
import torch
from fuzz_draws import LAYOUTS, draw
from fuzz_program import DTYPES, HALF, failure_of

from xent_ops.ops import transforms

SHAPES = {"dtype": DTYPES[-1], "shape": (33,), "classes": 37}, {"shape": (2, 3, 2), "classes": 130}  # of the draws
CAPS = {"softcap": 2.0, "logit_scale": 0.5}
TEACHER_CAPS = {**CAPS, "teacher_softcap": 3.0, "teacher_logit_scale": -0.75}
SOME = {"index": "torch.int64", "ignored": 0.3}  # of the rows are ignored, by any number
SIZES = [{"shape": ()}, {"shape": (2, 0)}, {"classes": 1}]
REDUCTIONS = [{"reduction": "mean"}, {"reduction": "sum"}, {"reduction": "none"}]
STATISTICS = ["log_probs", "entropy", "lse"]
DIVERGENCES = ["kl", "reverse_kl", "jsd", "overlap", "log_prob"]


def each(options, rows):
    """Rows with these options as well."""
    return [{**row, **options} for row in rows]


TABLE = [
    ("CrossEntropyLoss LinearCrossEntropyLoss", [
        *each({"lse_square_scale": 0.125, "weight": "some", **SOME, **CAPS}, REDUCTIONS),
        {"label_smoothing": 0.125},
    ]),
    ("cross_entropy cross_entropy_outputs linear_cross_entropy linear_cross_entropy_outputs", [
        *each({"label_smoothing": 0.125, **SOME}, REDUCTIONS),
        *each({"weight": "some", **SOME, **CAPS}, REDUCTIONS),
        *each({"weight": "some", "lse_square_scale": 0.125, **SOME}, REDUCTIONS),
        {"label_smoothing": 1.0, "logit_scale": -2.0},
        {**SOME, "ignored": 1.0},
        *each({"token_weight": True, "weight": "none", **SOME}, REDUCTIONS),
        *SIZES,
    ]),
    ("cross_entropy linear_cross_entropy", [
        *({"layout": layout} for layout in LAYOUTS if layout != "stride 0"),  # which is of one class
    ]),
    ("cross_entropy cross_entropy_outputs CrossEntropyLoss token_log_probs token_loss", [{"dim": 0}, {"dim": 1}]),
    ("cross_entropy cross_entropy_outputs", [
        *each({"grad_in_forward": True, "token_weight": False, "weight": "none"}, REDUCTIONS),
        *each({"grad_in_forward": True, "weight": "some", "lse_square_scale": 0.125}, REDUCTIONS),
    ]),
    ("top_k linear_top_k", [CAPS, {"logit_scale": -2.0}, {"logit_scale": 1.0, "target": True}, {"target": False}, *SIZES]),
    ("linear_cross_entropy", [{"features": 0}, {"features": 1, "classes": 1}, {"shape": (150,), "classes": 2}]),
    ("token_log_probs token_loss linear_token_log_probs linear_token_loss", [
        *({"several": several, **caps} for several in (False, True) for caps in (CAPS, {"logit_scale": -2.0})),
        *SIZES,
    ]),
    ("token_log_probs linear_token_log_probs", [
        *({"differentiated": [name], "several": several} for name in STATISTICS for several in (False, True)),
        {"several": True, "K": 16, **SOME, "ignored": 0.9},
    ]),
    ("token_loss linear_token_loss", [
        *({"function": [name]} for name in STATISTICS),
        *({"function": STATISTICS, "several": several} for several in (False, True)),
        *each(SOME, REDUCTIONS[:2]),
        {"reduction": "sum", "divisor": 3.0, **SOME},
    ]),
    ("distillation_loss linear_distillation_loss", [
        *each({"hard_weight": 0.5, "temperature": 2.0}, [{"beta": 0.0}, {"beta": 0.25}, {"beta": 1.0}]),
        *each(TEACHER_CAPS, [{"beta": 0.0}, {"beta": 0.25}, {"beta": 1.0}]),
        *({"token_weight": weighted, "target": True, **row} for row in REDUCTIONS for weighted in (False, True)),
        {"target": False, "hard_weight": 0.0, "temperature": 0.5},
        *each({"padding": True}, [{"beta": 0.0}, {"beta": 0.25, "hard_weight": 0.5}, {"beta": 1.0}]),
        *SIZES,
    ]),
    ("distillation_token_loss linear_distillation_token_loss", [
        *({"read": [field], "draft": False} for field in DIVERGENCES),
        *({"read": DIVERGENCES, "draft": draft, "temperature": 2.0} for draft in (False, True)),
        {"read": ["jsd", "overlap"], "beta": 0.25, "draft": False, **TEACHER_CAPS},
        {"read": ["kl", "overlap"], "draft": True, **TEACHER_CAPS},
        {"reduction": "sum", "divisor": 3.0, "target": True},
        {"reduction": "mean", "target": False, "read": ["overlap", "kl"]},
        {"draft": False, "padding": True},
        *SIZES,
    ]),
    ("token_divergences linear_token_divergences", [
        *({"read": [field], "draft": False} for field in DIVERGENCES),
        *({"read": DIVERGENCES, "draft": draft, "temperature": 2.0} for draft in (False, True)),
        {"read": ["kl", "overlap"], "draft": True, **TEACHER_CAPS},
        {"draft": False, "padding": True, "target": False, "read": ["overlap", "jsd"]},
        *SIZES,
    ]),
    ("top_k_distillation_loss linear_top_k_distillation_loss", [
        *each({"tail": True, "K": 5}, REDUCTIONS),
        *each({"token_weight": True, "lse_square_scale": 0.125}, REDUCTIONS),
        {"tail": True, "lse_square_scale": 0.125, "token_weight": False, **CAPS},
        *each({"K": 1, "token_weight": False}, REDUCTIONS),
        {"K": 1, "tail": True, **CAPS},
        *SIZES,
    ]),
    ("linear_cross_entropy linear_token_log_probs linear_token_loss linear_distillation_loss "
     "linear_distillation_token_loss linear_token_divergences linear_top_k_distillation_loss", [
        {"chunk_rows": 3, "bias": True},
        {"chunk_rows": 3, "bias": False},
        {"skip_ignored": True, "chunk_rows": 16},
        *({"dtype": dtype, "accumulate_dtype": torch.float32, "chunk_rows": 3} for dtype in HALF),
    ]),
]  # fmt: skip


PAIRS = [(name, row) for names, rows in TABLE for name in names.split() for row in rows]
CASES = [(number, *pair) for number, pair in enumerate(PAIRS)]


@pytest.mark.parametrize("number, name, row", CASES, ids=str)
def test_values_and_gradients(device, number, name, row):
    for seed, sizes in enumerate(SHAPES, 2 * number):
        features = {"features": 8} if "linear" in name.lower() else {}
        fixed = {"dtype": DTYPES[seed % 3], **sizes, **features, **row}
        failure = failure_of(draw(seed, device=device, names=(name,), fixed=fixed))
        assert failure is None, failure


@pytest.mark.parametrize("number, name, row", [case for case in CASES if case[1] == "cross_entropy"], ids=str)
def test_the_composite_operator_that_tracers_see(device, monkeypatch, number, name, row):
    monkeypatch.setattr(transforms, "is_traced", lambda: True)
    test_values_and_gradients(device, number, name, row)
