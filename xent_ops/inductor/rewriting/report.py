"""The report of the pass: ``last_report()``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..._private import private


@dataclass(frozen=True)
class Call:
    """One call of F.cross_entropy, F.nll_loss or F.linear_cross_entropy in a compiled graph, or code that computes the
    same (log-softmax and gather, ...); and xent_ops.cross_entropy after a head. A log-softmax over 1024 classes or
    more that belongs to no known loss is a call that is left alone, with the name of the node that reads it.

    A call is left alone if

    - a node before the loss has no matching option of our operator,
    - a scaled, capped or upcast value is returned or read elsewhere, or is computed under another autocast or inference
      mode than the loss, or without gradients,
    - something may write to the logits while they are needed,
    - it has ``size_average``, ``reduce`` or class weights that require grad, or is inside a torch.func transform,
    - there are fewer than 384 classes on a CPU, or 512 on a GPU, or they are not dense on a CPU: F.cross_entropy is
      faster there,
    - logits, targets or weights are no plain tensors, or have a dtype or device without a kernel,
    - F.nll_loss reads something other than a log_softmax of the graph that nothing else reads,
    - it is written out, and another node reads its parts as well; or it takes several classes of a row, or brackets
      with other rows, or probabilities that require grad or that Inductor fuses with it.

    A head is left alone if

    - the logits are returned or read by something else, also in a no_grad block,
    - they are too small, or the target is class probabilities,
    - product and loss run under different autocast or inference modes, or a part of the head runs without gradients,
    - something may write to input, weight or bias between them, or to input and weight after the loss,
    - the logits enter the graph as an input: after a graph break, or from a head that is not compiled,
    - a tensor scales the logits after a softcap, or something may write to it before the loss,
    - the product has another form: batches, a convolution of more than one element, tensordot, an einsum whose
      result has the classes elsewhere,
    - something else stands between them: a mask, a second bias, a view of some of the classes,
    - the logits leave a checkpointed part.
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
        outcome = "replaced" if self.replaced else "left alone"
        if self.head:
            outcome += " with the head"
        if self.products is not None:
            outcome += f", products={self.products!r}"
        if self.logits_dtype is not None:
            outcome += f", logits_dtype={self.logits_dtype}"
        if self.softcap is not None:
            outcome += f", softcap={self.softcap!r}"
        if self.logit_scale != 1.0:
            outcome += f", logit_scale={self.logit_scale!r}"
        if self.upcast_removed:
            outcome += ", float32 upcast removed"
        if self.why:
            outcome += f" ({self.why})"
        if self.head_left:
            outcome += f", head left alone ({self.head_left})"
        return f"{self.where}: {self.what}: {outcome}"


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
        lines = [f"{len(self.replaced)} replaced, {len(self.left_alone)} left alone, in {self.graphs} graphs"]
        lines += [f"  {call}" for call in self.calls] or [f"  {line}" for line in self._nothing()]
        return "\n".join(lines)

    def _nothing(self) -> list[str]:
        """Possible reasons for a report without calls, and what to do."""
        if self.graphs == 0:
            return [
                "nothing was compiled since: a model compiles at its first call, and the pass sees what is compiled",
                "with options(), after enable() or in the block; torch.compiler.reset() forgets what was before",
            ]
        return [
            "no loss is in these graphs: compile the function that computes the loss, not the model alone;",
            "or Dynamo skipped its frame, or broke the graph before it (TORCH_LOGS=graph_breaks, fullgraph=True tell);",
            "or a torch.autograd.Function of another package computes it, which no pass sees into;",
            "or it is written out in a form that the pass does not know, of fewer than 1024 classes (docs/compile.md)",
        ]


_compile_context = private(
    "torch._guards.CompileContext.try_get", lambda: None, "a graph that torch traces again is in the report twice"
)

# (compilation, attempt, calls in one graph). One compilation may have several graphs: a checkpointed part is a graph
# inside a graph.
_graphs: list[tuple[Any, Any, tuple[Call, ...]]] = []


def record(calls: Iterable[Call]) -> None:
    compilation, attempt = _current_compilation()
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


def _current_compilation() -> tuple[Any, Any]:
    context = _compile_context()
    return (None, None) if context is None else (context, context.attempt)
