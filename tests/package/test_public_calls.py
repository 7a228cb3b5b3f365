"""A public function calls no other public function: arguments are checked once, in one order."""

import ast
import importlib
import inspect
import pkgutil
import textwrap
import types

import pytest

import xent_ops

PACKAGES = (xent_ops, importlib.import_module("xent_ops.distributed"))
PUBLIC = {
    value: name
    for package in PACKAGES
    for name, value in vars(package).items()
    if isinstance(value, types.FunctionType) and not name.startswith("_")
}
LOCAL_IMPORTS = {
    module.name: f"xent_ops.distributed.{module.name}" for module in pkgutil.iter_modules(PACKAGES[1].__path__)
}


def called(function):
    """Functions of this package whose names stand in the code of this one."""
    plain = inspect.unwrap(function)
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(plain)))):
        value = None
        if isinstance(node, ast.Name):
            value = plain.__globals__.get(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = plain.__globals__.get(node.value.id)
            if owner is None and node.value.id in LOCAL_IMPORTS:
                owner = importlib.import_module(LOCAL_IMPORTS[node.value.id])
            value = getattr(owner, node.attr, None) if isinstance(owner, types.ModuleType) else None
        if isinstance(value, types.FunctionType) and value.__module__.startswith("xent_ops.") and value is not function:
            yield value


def public_functions_behind(function):
    seen, waiting = set(), [function]
    while waiting:
        for value in called(waiting.pop()):
            if value in PUBLIC:
                yield PUBLIC[value]
            elif value not in seen:
                seen.add(value)
                waiting.append(value)


@pytest.mark.parametrize("function", PUBLIC, ids=PUBLIC.get)
def test_calls_no_other(function):
    assert not list(public_functions_behind(function))


def test_a_call_is_found():
    """Of a module's method, which may call what users call."""

    def caller():
        return xent_ops.cross_entropy

    assert list(public_functions_behind(caller)) == ["cross_entropy"]
