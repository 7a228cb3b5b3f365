"""Private imports of torch's own compile tests, in one place: record graphs, print them the same on every version."""

import re

import torch
from torch._dynamo.testing import AotEagerAndRecordGraphs, CompileCounterWithBackend, normalize_gm
from torch._inductor.utils import run_and_get_code

__all__ = [
    "AotEagerAndRecordGraphs",
    "CompileCounterWithBackend",
    "calls_of",
    "graph_text",
    "inductor_code",
    "operator_names",
    "run_and_get_code",
]


def calls_of(name: str, code: str) -> int:
    """How often Inductor's code calls an operator of ours: by its name, or on CUDA its kernel."""
    return code.count(f"xent.{name}.default(") + code.count(f"OPERATORS['{name}'].on_cuda(")


def graph_text(graph_module: torch.fx.GraphModule) -> str:
    """The body of a graph without type comments, which differ between torch versions."""
    text = normalize_gm(graph_module.print_readable(print_output=False))
    lines = [re.sub(r"\s*#.*$", "", line).rstrip() for line in text.splitlines()]
    lines = [re.sub(r";\s+\w+(, \w+)* = None(;.*)?$|(; )?\w+( = \w+)* = None$", "", line) for line in lines]
    return "\n".join(line for line in lines if line.strip()) + "\n"


def operator_names(graph_module: torch.fx.GraphModule) -> list[str]:
    """What a graph calls, in order."""
    return [str(node.target) for node in graph_module.graph.nodes if node.op == "call_function"]


def inductor_code(function, *args) -> str:
    """All code that Inductor writes for ``function`` and its backward."""
    _, code = run_and_get_code(lambda: function(*args).backward())
    return "\n".join(code)
