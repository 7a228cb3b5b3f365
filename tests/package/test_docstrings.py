"""The docstrings of all that docs/api.md shows: their sections are as the page reads them, and their examples run."""

import doctest
import importlib
import importlib.util
import inspect
import operator
import re
import typing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import xent_ops.testing
from xent_ops import _extension

API = Path(__file__).parents[2] / "docs" / "api.md"
REFERENCE = re.findall(r"^::: xent_ops\.([\w.]+)$", API.read_text(), re.MULTILINE)
INTEGRATIONS = {
    "integrations.transformers": ["transformers"],
    "integrations.megatron": ["megatron"],
    "integrations.trl": ["trl", "datasets"],
    "integrations.torchtitan": ["torchtitan", "spmd_types"],
}


def described():
    """(name, object) of all that the page shows: of a module its __all__, or what it defines without underscore."""
    for dotted in REFERENCE:
        if dotted in INTEGRATIONS:
            if any(importlib.util.find_spec(package) is None for package in INTEGRATIONS[dotted]):
                continue
            found = importlib.import_module(f"xent_ops.{dotted}")  # not imported with the package
        else:
            found = operator.attrgetter(dotted)(xent_ops)
        if typing.get_origin(found) is not None:  # an alias, whose text stands behind it
            continue
        if not inspect.ismodule(found):
            yield dotted, found
            continue
        own = [name for name, value in vars(found).items() if getattr(value, "__module__", "") == found.__name__]
        for name in getattr(found, "__all__", own):
            if not name.startswith("_"):
                yield f"{dotted}.{name}", getattr(found, name)


DESCRIBED = dict(described())


def has_example(value):
    """Functions, modules and what users make for them have one; results and reports come from them."""
    return (
        value is xent_ops.distributed.Shard
        or inspect.isfunction(value)
        or (inspect.isclass(value) and issubclass(value, torch.nn.Module))
    )


def test_the_page_has_everything_public():
    assert {name for name in xent_ops.__all__ if not name.startswith("__")} <= set(REFERENCE)


@pytest.mark.parametrize("name", DESCRIBED)
def test_parameters_are_named(name):
    """All of them, and no others. ("others:" stands for the rest.)"""
    text = inspect.getdoc(DESCRIBED[name])
    assert text
    arguments = re.search(r"^Args:\n((?:    .*\n|\n)*)", text + "\n", re.MULTILINE)
    if arguments is not None:
        named = {
            name for names in re.findall(r"^    (\w[\w, ]*):", arguments[1], re.MULTILINE) for name in names.split(", ")
        }
        known = set(inspect.signature(DESCRIBED[name]).parameters)
        assert named - {"others"} <= known
        assert named == known or "others" in named


@pytest.mark.parametrize("name", DESCRIBED)
def test_returns_is_a_sentence(name):
    """The page takes "float32 (float64 for float64 input): ..." for a name and a type; the signature has the type."""
    found = re.search(r"^Returns:\n    (.*)", inspect.getdoc(DESCRIBED[name]), re.MULTILINE)
    assert found is None or not re.match(r"\w*\s*(\(.+\))?:", found[1]), found[1]


@pytest.fixture
def one_rank(request):
    """A group of this process, where an example needs one."""
    if "distributed" not in request.node.name:
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", [name for name, value in DESCRIBED.items() if has_example(value)])
def test_the_example_runs(name, tmp_path, monkeypatch):
    """One section of one to six lines of code, which does and prints what it says."""
    if name == "library_path" and not _extension.LIBRARY.exists():
        pytest.skip("libxent_ops.so is not built")
    if name.startswith("integrations.megatron."):
        pytest.skip("tests/integrations/test_megatron.py runs it, with a model")
    value = DESCRIBED[name]
    text = inspect.getdoc(value)
    assert len(re.findall(r"^Examples:\n    >>> ", text, re.MULTILINE)) == 1
    assert 1 <= len(re.findall(r"^    (?:>>>|\.\.\.) ", text, re.MULTILINE)) <= 6
    names = {"torch": torch, "xent_ops": xent_ops}
    if "." in name:  # as after an import from the module
        names |= vars(inspect.getmodule(value)) | names
    if name.startswith("integrations.trl."):
        monkeypatch.syspath_prepend(Path(__file__).parents[1] / "integrations")
        names["trainer"] = importlib.import_module("trainers").make("SFT", tmp_path)
    test = doctest.DocTestParser().get_doctest(text, names, name, None, None)
    report = []
    results = doctest.DocTestRunner(verbose=False).run(test, out=report.append)
    assert results.attempted and not results.failed, "".join(report)
