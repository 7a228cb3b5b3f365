"""One copy of the package in a process, also where it is imported under two names.

``kernels`` loads a copy under a name of its own, and the process may import the installed ``xent_ops`` besides. The
operators of the namespace ``xent`` can be defined once. So the second copy, if it is of the first one's version,
becomes another name of the first: its modules are the first's, and with them the operators, caches and reports. The
package imports this file before all that needs the operators.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch

from ._version import __version__

assert __package__ is not None
PACKAGE: str = __package__  # the name that this copy was imported by: xent_ops, or what ``kernels`` calls it

_FIRST = "python_package"  # on torch.ops.xent: the name of the copy that defined the operators


def defined() -> None:
    """This copy has defined the operators."""
    setattr(torch.ops.xent, _FIRST, PACKAGE)


def _use_first() -> None:
    """Have every later import from this copy find the first copy's module, where there is another one.

    Raises:
        ImportError: the other one is of another version.
    """
    first = sys.modules.get(getattr(torch.ops.xent, _FIRST, PACKAGE))
    if first is None or first.__name__ == PACKAGE:
        return
    if first.__version__ != __version__:
        raise ImportError(
            f"xent_ops {__version__} in {_folder(sys.modules[PACKAGE])} cannot be imported: this process has imported "
            f"xent_ops {first.__version__} from {_folder(first)}, as {first.__name__}, and operators of the namespace "
            "xent can be defined once. Import one of the two, or have both of the same version"
        )
    if not any(isinstance(finder, _Finder) and finder.copy == PACKAGE for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(PACKAGE, first.__name__))


def _folder(package: ModuleType) -> str:
    return str(package.__path__[0])


class _Finder:
    """Finds ``copy.name`` where ``first.name`` is. What the first has not, the copy imports from its own folder."""

    def __init__(self, copy: str, first: str) -> None:
        self.copy, self.first = copy, first

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith(f"{self.copy}."):
            return None
        of_first = self.first + name.removeprefix(self.copy)
        try:
            found = importlib.util.find_spec(of_first)
        except ModuleNotFoundError:  # not even the package that it is in
            found = None
        return None if found is None else ModuleSpec(name, _Loader(of_first))


class _Loader(Loader):
    """Puts a module of the first in the place of the one that is being imported, as Python lets a module do itself."""

    def __init__(self, of_first: str) -> None:
        self.of_first = of_first

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(self.of_first)


_use_first()
