"""Reads the arguments of a loss that a model writes out, through views and casts before them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

from ...kernels.sizes import statically_true
from .links import is_view, link_of
from .nodes import is_cast, name_of, value_of, viewed_by

_IN_ORDER = {"contiguous", "flatten", "reshape", "squeeze", "unflatten", "unsqueeze", "view"}


def arguments_of(node: fx.Node, names: tuple[str, ...]) -> dict[str, Any]:
    """The arguments of the node by name, also arguments that are not in ``names``."""
    call_args = dict(zip((*names, *map(str, range(len(node.args)))), node.args, strict=False)) | node.kwargs
    return {"index" if name == "indices" else name: value for name, value in call_args.items()}


def input_of(node: fx.Node) -> Any:
    return node.args[0] if node.args else node.kwargs.get("input")


def one_dim(dim: Any) -> int | None:
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        dim = dim[0]
    return dim if type(dim) is int else None


def behind(node: Any) -> Any:
    """The node that the views and casts read."""
    while isinstance(node, fx.Node):
        through = viewed_by(node) or (node.args[0] if is_cast(node) else None)
        if through is None:
            break
        node = through
    return node


def before_upcasts(node: Any, views: Callable[[fx.Node], bool] = lambda view: False) -> tuple[fx.Node, list[fx.Node]]:
    """(the node before casts to float32 and these views, the casts and views from the last one)."""
    nodes: list[fx.Node] = []
    while (link := link_of(node)) is not None:
        if link.kind not in ("same", "upcast") and not (link.kind == "view" and views(node)):
            break
        nodes.append(node)
        node = link.source
    return node, nodes


def keeps_order(node: fx.Node) -> bool:
    if name_of(node) in _IN_ORDER:
        return True
    result, source = value_of(node), value_of(node.args[0])
    same_storage = isinstance(result, Tensor) and isinstance(source, Tensor) and is_view(node)
    return same_storage and name_of(node) == "getitem" and statically_true(result.numel() == source.numel())
