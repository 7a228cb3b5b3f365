"""Wrong calls, to Python and to libxent_ops.so in a process of its own."""

import json
import re

import pytest
import torch
from helpers.processes import run_with_torch

from xent_ops import _extension

# What Python refuses and C++ may compute with: a kernel survives it.
SURVIVED = (
    "0 classes", "softcap must be", "logit_scale must be", "lse_square_scale must be", "inference mode",
    "strides (5, 1) share memory", "lies beyond num_classes", "weight has dtype", "divisors has dtype",
    "hard_weight must be finite", "joined statistics are for",
)  # fmt: skip


def assert_refused(calls, tmp_path):
    """C++ refuses what no kernel survives by a RuntimeError that names an argument, in words of its own; a target out
    of range as Python does."""
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
            assert kind == "RuntimeError" and any(name in words for name in names), (call[0], said, got)
