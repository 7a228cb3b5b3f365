"""The tables of docs/migrate.md: every name of theirs and of ours is a parameter, and no parameter of theirs is left out.

Signatures of other libraries are read from their sources, without importing them, where they are installed.
"""

import ast
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

import xent_ops

TEXT = (Path(__file__).parents[2] / "docs" / "migrate.md").read_text()
TABLE = re.compile(r"^\| `([\w.]+)` \| `([\w.]+)` \|\n\| --- \| --- \|\n((?:\|.*\n)+)", re.MULTILINE)
NAME = re.compile(r"`([\w.]+)=?[^`]*`")  # `group=`, `reduction="sum"`

TABLES = [
    (theirs, ours, [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.splitlines()])
    for theirs, ours, rows in TABLE.findall(TEXT)
]
BY_THEIRS = pytest.mark.parametrize("theirs, ours, rows", TABLES, ids=[theirs for theirs, *_ in TABLES])


def definition(dotted):
    """The syntax tree of a function or class; None where it is not installed."""
    top, *inner, name = dotted.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent.joinpath(*inner)
    source = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
    found = [node for node in ast.parse(source.read_text()).body if getattr(node, "name", None) == name]
    assert found or top == "torch", f"there is no {dotted}"  # torch has linear_cross_entropy since 2.13
    return found[0] if found else None


def parameters(node):
    """Of a function; of a class, those of its construction, its call, and the fields of its Config."""
    if isinstance(node, ast.FunctionDef):
        arguments = node.args
        return {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    names = set()
    for part in node.body:
        if getattr(part, "name", None) in ("__init__", "forward", "__call__"):
            names |= parameters(part)
        elif getattr(part, "name", None) == "Config":
            names |= {field.target.id for field in part.body if isinstance(field, ast.AnnAssign)}
    return names - {"self", "config", "compile_config"}


def our_parameters(function):
    if isinstance(function, type):
        return set(inspect.signature(function).parameters) | set(inspect.signature(function.forward).parameters)
    return set(inspect.signature(function).parameters)


def resolved(dotted):
    value = xent_ops
    for part in dotted.split(".")[1:]:
        value = getattr(value, part)
    return value


def test_tables_are_found():
    assert len(TABLES) == TEXT.count("| --- | --- |") >= 9


@BY_THEIRS
def test_theirs(theirs, ours, rows):
    node = definition(theirs)
    if node is None:
        pytest.skip(f"{theirs} is not installed")
    listed = [name for row in rows for name in NAME.findall(row[0])]
    assert sorted(listed) == sorted(parameters(node))


@BY_THEIRS
def test_ours(theirs, ours, rows):
    known = our_parameters(resolved(ours))
    for row in rows:
        others = [name for name in NAME.findall(row[1]) if name.startswith("xent_ops.")]
        of_others = set().union(*(our_parameters(resolved(name)) for name in others))
        for name in NAME.findall(row[1]):
            assert name in others or name in known | of_others, f"{row[1]}: {name}"
