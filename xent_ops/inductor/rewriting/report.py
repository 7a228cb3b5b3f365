"""The report of the pass: ``last_report()``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..._private import private


@dataclass(frozen=True)
class Call:
    """One loss in a compiled graph: F.cross_entropy, F.nll_loss, a log-probability that the model writes out, or
    xent_ops.cross_entropy after a head. Or a log-softmax over 1024 classes or more that belongs to no known loss.

    ``why`` and ``head_left`` name the node that keeps the loss or its head as they are.
    """

    where: str  # "file.py:12 in forward", of the innermost frame outside torch
    what: str  # "bfloat16 (128, 50257), reduction='mean'"
    replaced: bool
    upcast_removed: bool = False  # the float32 copy of the logits is gone
    softcap: float | None = None  # the options that replaced the nodes before the loss
    logit_scale: float = 1.0
    why: str = ""  # why it was not replaced
    head: bool = False  # the replacement includes the product before it
    products: str | None = None  # the requested 8-bit mode of the head
    logits_dtype: Any = None  # torch.float32 if the product's 16-bit operands were upcast
    head_left: str = ""  # why the product before it was not replaced

    def __str__(self) -> str:
        outcome = ["replaced with the head" if self.head else "replaced" if self.replaced else "left alone"]
        for name in ("products", "logits_dtype", "softcap", "logit_scale"):
            if (value := getattr(self, name)) != getattr(Call, name):
                outcome.append(f"{name}={value!r}")
        outcome += ["float32 upcast removed"] if self.upcast_removed else []
        line = f"{self.where}: {self.what}: {', '.join(outcome)}" + (f" ({self.why})" if self.why else "")
        return line + (f", head left alone ({self.head_left})" if self.head_left else "")


@dataclass(frozen=True)
class Report:
    """All graphs since the last ``options()``, ``enable()`` or ``replace_cross_entropy()``, of all threads.

    ``replaced`` and ``left_alone`` are the calls of each kind.
    """

    graphs: int  # the number of graphs that the pass saw
    calls: tuple[Call, ...]

    @property
    def replaced(self) -> tuple[Call, ...]:
        return tuple(call for call in self.calls if call.replaced)

    @property
    def left_alone(self) -> tuple[Call, ...]:
        return tuple(call for call in self.calls if not call.replaced)

    def __str__(self) -> str:
        lines = self.calls or (_NO_LOSS if self.graphs else _NO_GRAPH)
        first = f"{len(self.replaced)} replaced, {len(self.left_alone)} left alone, in {self.graphs} graphs"
        return "\n  ".join([first, *map(str, lines)])


# Possible reasons for a report without calls, and what to do.
_NO_GRAPH = (
    "nothing was compiled since: a model compiles at its first call, and the pass sees what is compiled",
    "with options(), after enable() or in the block; torch.compiler.reset() forgets what was before",
)
_NO_LOSS = (
    "no loss is in these graphs: compile the function that computes the loss, not the model alone;",
    "or Dynamo skipped its frame, or broke the graph before it (TORCH_LOGS=graph_breaks, fullgraph=True tell);",
    "or a torch.autograd.Function of another package computes it, which no pass sees into;",
    "or it is written out in a form that the pass does not know, of fewer than 1024 classes (docs/compile.md)",
)


_compile_context = private(
    "torch._guards.CompileContext.try_get", lambda: None, "a graph that torch traces again is in the report twice"
)

# (compilation, attempt, calls in one graph). One compilation may have several graphs: a checkpointed part is a graph
# inside a graph.
_graphs: list[tuple[Any, Any, tuple[Call, ...]]] = []


def record(calls: Iterable[Call]) -> None:
    compilation = _compile_context()
    attempt = None if compilation is None else compilation.attempt
    if compilation is not None:
        # torch may discard a finished graph and trace again, for example because a float must be a constant
        # (dynamic=True with label_smoothing). Only the last attempt runs, so only that one counts.
        _graphs[:] = [graph for graph in _graphs if graph[0] is not compilation or graph[1] == attempt]
    _graphs.append((compilation, attempt, tuple(calls)))


def clear() -> None:
    _graphs.clear()


def last_report() -> Report:
    """The replaced calls, and the others with the reason, since the last ``options()``, ``enable()`` or
    ``replace_cross_entropy()``. ``print`` it.

    Examples:
        >>> _ = xent_ops.inductor.options()  # a new report
        >>> print(str(xent_ops.inductor.last_report()).splitlines()[0])
        0 replaced, 0 left alone, in 0 graphs
    """
    return Report(len(_graphs), tuple(call for *_, calls in _graphs for call in calls))
