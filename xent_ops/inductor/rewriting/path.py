"""The path from the logits, or their head, to a loss: what our operator replaces together with the loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from ...kernels.options import Activation
from .links import Link, activation_of, walk
from .losses import Loss, Start
from .nodes import value_of
from .products import Product


@dataclass
class Path:
    loss: Loss
    start: Start
    links: list[Link]  # from the loss back to the source
    source: fx.Node  # the logits that the first link reads
    product: Product | None = None  # the head that computes them, if our operator replaces it too
    products: str | None = None  # the 8-bit mode of the head

    @property
    def nodes(self) -> list[fx.Node]:
        """The nodes that are dead once our operator replaces the loss, the last one first."""
        head = [] if self.product is None else self.product.nodes
        return [*reversed(self.start.behind), *(link.node for link in self.links), *head]

    @property
    def views(self) -> list[fx.Node]:
        """The views from the source to the loss, in order."""
        return [link.node for link in reversed(self.links) if link.kind == "view"] + self.start.views

    @property
    def upcast(self) -> bool:
        return self.start.upcast or any(link.kind == "upcast" for link in self.links)

    @property
    def activation(self) -> Activation:
        return activation_of(self.links, self.loss.call_args)

    @property
    def logits_dtype(self) -> torch.dtype | None:
        """The logits' dtype, if the head casts its operands to it."""
        return value_of(self.product.node).dtype if self.product is not None and self.product.casts else None

    @property
    def reads(self) -> list[tuple[str, fx.Node]]:
        """The inputs of our operator, by their names in the report."""
        first = [("logits", self.source)] if self.product is None else self.product.reads
        others = [(name, self.loss.call_args.get(name)) for name in ("target", "weight")]
        return [*first, *((name, node) for name, node in others if node is not None)]

    @property
    def past(self) -> tuple[fx.Node, ...]:
        """Casts and views that our operator does not read. They stay for other readers."""
        return () if self.product is None else self.product.past


def path_to(loss: Loss) -> Path:
    """The longest path to the loss. Raises LeftAlone."""
    start = loss.start()
    return Path(loss, start, *walk(start.logits, start.readers))
