"""What Python refuses, libxent_ops.so refuses too, in a process of its own, as far as no kernel would survive it."""

import json
import math
import re

import pytest
import torch
from helpers.processes import run_with_torch
from helpers.refusals import refusals

from xent_ops import _extension
from xent_ops.kernels.divergences import STATISTICS
from xent_ops.ops.schemas import COMPOSITES, PYTHON_ONLY, SCHEMAS

pytestmark = pytest.mark.skipif(not _extension.LIBRARY.exists(), reason="built without C++ (XENT_OPS_BUILD_CPP=0)")

# What Python refuses and C++ may compute with: a kernel survives it.
SURVIVED = (
    "0 classes", "softcap must be", "logit_scale must be", "lse_square_scale must be", "inference mode",
    "strides (5, 1) share memory", "lies beyond num_classes", "weight has dtype", "divisors has dtype",
    "divisor has dtype", "lse has dtype", "argmax has dtype",
    "hard_weight must be finite", "joined statistics are for", "grad_dtype must be",
)  # fmt: skip
# How torch says that a tensor has no memory; the last in torch 2.11.
ON_META = ("freed or was never allocated", "device", "aten::cat failed")


def combinations():
    """(operator, arguments, options): targets out of range, and arguments that do not go together."""
    x, y, t, w = torch.randn(4, 9), torch.randn(4, 9), torch.arange(4), torch.ones(9)
    rows, none, five, saved = torch.ones(4), (None,) * 5, torch.ones(5, 4), torch.ones(STATISTICS, 4)
    forward, backward, divergences = "cross_entropy_forward", "cross_entropy_backward", "divergences_forward"
    yield forward, (x, t + 6), {}
    yield forward, (x, t.to(torch.int32) - 1), {"ignore_index": 7}
    yield "cross_entropy_reduced", (x, t + 6), {}
    yield "cross_entropy_reduced", (x, t), {"reduction": "none"}
    yield "cross_entropy_shard_reduced", (x, t, torch.ones(2, 17), 0, 9), {"reduction": "none"}
    yield "cross_entropy_with_grad", (x, t + 6, rows[0]), {}
    yield "cross_entropy_shard", (x, t + 20, 0, 9), {}
    yield divergences, (x, y, t + 6), {"fields": "log_prob"}
    yield "divergences_with_grad", (x, y, t - 1, rows), {"fields": "kl,log_prob", "hard_weight": 1.0}
    yield "divergences_backward", (five, x, y, t - 1, saved), {"fields": "overlap,log_prob"}
    yield forward, (x, t.view(2, 2)), {}
    yield backward, (rows, None, x, t, rows, w, rows.view(2, 2)), {}
    yield "soft_cross_entropy_forward", (x, t), {}
    for name in (backward, f"{backward}_"):
        yield name, (rows, None, x, t, rows, None, None, rows), {}
        yield name, (rows, None, x, t, rows, None, None, None, rows), {}
        yield name, (rows, None, x, t, rows, *none, 1), {}
        yield name, (rows, None, x, t, rows, *none[1:], rows), {}
    yield backward, (rows, None, x, t, rows, w, *none[1:], 0, 9), {}
    yield backward, (rows, None, x, t, rows, *none, 9, 9), {}
    yield "cross_entropy_shard", (x, t, 9, 9), {}
    yield "cross_entropy_shard", (x, t, 2**63 - 1, 9), {}
    yield divergences, (x, y[:, :8], t), {}
    yield divergences, (x, y[:, :8], t), {"num_classes": 9}
    yield divergences, (x, y[:, :8], t, None, None, 0), {"num_classes": 18}
    yield divergences, (x, y, t, None, None, 0), {}
    yield divergences, (x, y, t, None, None, 20), {"num_classes": 18}
    yield divergences, (x, y, t, None, saved, 0), {"num_classes": 18}
    for wrong in (five, saved.T, torch.ones(7)):
        yield divergences, (x, y, t, None, wrong, 0), {"num_classes": 18, "fields": "overlap"}
        yield "divergences_backward", (five, x, y, t, wrong), {}
    yield divergences, (x, y, t, torch.ones(3)), {}
    yield "divergences_backward", (saved, x, y, t, saved), {}
    for fields in ("", "jsd", "kl,", "kl,kl", "overlap, kl"):
        yield divergences, (x, y, t), {"fields": fields}
    for wrong in ({"softcap": 0.0}, {"teacher_softcap": -1.0}, {"logit_scale": 0.0}, {"teacher_logit_scale": math.inf}):
        yield divergences, (x, y, t), {"temperature": 2.0, **wrong}
    for shared in (torch.zeros(40).unfold(0, 9, 5)[:4], x[:1].expand(4, 9)):
        yield f"{backward}_", (rows, None, shared, t, rows), {}
        yield f"{backward}_", (rows, None, shared, t, rows, *none, 0, 9), {}
        yield "cross_entropy_with_grad_", (shared, t, rows[0]), {}
        yield "divergences_with_grad_", (shared, y, t, rows), {}
        yield "scale_grad_", (shared, rows[0]), {}


def test_what_no_kernel_survives(tmp_path):
    """A RuntimeError names an argument, in words of its own; a target out of range is an IndexError as in Python."""
    operators = [name for name in SCHEMAS if name not in (*PYTHON_ONLY, *COMPOSITES)]
    calls = [tuple(found.sample) for name in operators for found in refusals(name)]
    assert {name for name, *_ in calls} == set(operators)
    calls += combinations()
    wanted = []
    for name, arguments, options in calls:
        operator = getattr(torch.ops.xent, name)
        with pytest.raises((ValueError, TypeError, IndexError, RuntimeError)) as python:
            operator(*arguments, **options)
        said = str(python.value)
        names = ["target", *(argument.name for argument in operator.default._schema.arguments)]
        wanted.append((python.type is IndexError, said, [name for name in names if re.search(rf"\b{name}\b", said)]))
    torch.save(calls, tmp_path / "calls")
    run_with_torch(
        f"""
import json, torch
torch.ops.load_library({str(_extension.LIBRARY)!r})

def error(name, arguments, options):
    try:
        getattr(torch.ops.xent, name)(*arguments, **options)
    except Exception as error:
        return type(error).__name__, str(error)

errors = [error(*call) for call in torch.load({str(tmp_path / "calls")!r})]
json.dump(errors, open({str(tmp_path / "errors")!r}, "w"))
"""
    )
    errors = json.loads((tmp_path / "errors").read_text())
    for call, got, (of_target, said, names) in zip(calls, errors, wanted, strict=True):
        if of_target:
            assert got == ["IndexError", said], call
        elif not any(words in said for words in SURVIVED):
            assert got is not None, (call[0], said)
            kind, words = got
            known = (*names, *ON_META) if " on meta " in said else names
            assert kind == "RuntimeError" and any(name in words for name in known), (call[0], said, got)
