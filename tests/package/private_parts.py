"""The names of torch and Triton that the package uses and that their projects do not promise to keep."""

import ast

_TRITON = ("backends", "compiler", "experimental", "knobs", "runtime")  # which a user of Triton does not import


def is_private(name):
    first, *rest = name.split(".")
    if first == "triton":
        return bool(rest) and rest[0] in _TRITON
    return first == "torch" and any(part.startswith("_") and not part.startswith("__") for part in rest)


def of_file(path):
    """Full names: ``from torch._guards import A`` and then ``A.b`` is torch._guards.A.b."""
    tree = ast.parse(path.read_text())
    meant = {"torch": "torch", "triton": "triton"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            meant |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            meant |= {alias.asname: alias.name for alias in node.names if alias.asname}
    found = {name for name in meant.values() if is_private(name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "private":  # xent_ops._private
            found.add(node.args[0].value)
            continue
        parts = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            node, last = node.args[0], node.args[1]
            parts = [last.value] if isinstance(last, ast.Constant) else []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name) and node.id in meant:
            name = ".".join([meant[node.id], *reversed(parts)])
            found |= {name} if is_private(name) else set()
    return found


def of_folder(folder, without):
    """The longest names alone: torch._C._autograd is part of another."""
    files = [path for path in folder.rglob("*.py") if path.relative_to(folder).parts[0] not in without]
    found = set().union(*map(of_file, files))
    return {name for name in found if not any(other.startswith(f"{name}.") for other in found)}
