"""Private imports of torch's own compile tests, in one place: record graphs, print them the same on every version."""

import re

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import AotEagerAndRecordGraphs, CompileCounterWithBackend, normalize_gm
from torch._inductor.utils import run_and_get_code

__all__ = [
    "AotEagerAndRecordGraphs",
    "CompileCounterWithBackend",
    "Partitioned",
    "calls_of",
    "graph_text",
    "inductor_code",
    "operator_names",
    "run_and_get_code",
]


def calls_of(name: str, code: str) -> int:
    """How often Inductor's code calls an operator of ours: by its name, or on CUDA its kernel."""
    return code.count(f"xent.{name}.default(") + code.count(f"OPERATORS['{name}'].on_triton(")


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


class Partitioned:
    """A backend for torch.compile: Inductor's joint-graph passes and partitioner, then eager. Keeps the graphs."""

    def __init__(self):
        self.graphs = []

    def __call__(self, gm, example_inputs):
        from torch._inductor.compile_fx import partition_fn

        compile_ = aot_autograd(fw_compiler=self._keep, bw_compiler=self._keep, partition_fn=partition_fn)
        return compile_(gm, example_inputs)

    def _keep(self, gm, example_inputs):
        self.graphs.append(gm)
        return make_boxed_func(gm.forward)

    def calls(self, name):
        """How often each graph calls an operator: forward, backward."""
        return [operator_names(gm).count(f"xent.{name}.default") for gm in self.graphs]
