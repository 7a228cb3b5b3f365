"""docs/versions.md says which private parts of torch and Triton are used; CITATION.cff which version this is."""

import inspect
import json
import os
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import private_parts
import pytest

import xent_ops
from xent_ops import distributed

ROOT = Path(__file__).parents[2]
PACKAGE = Path(xent_ops.__file__).parent
SURFACE, _, PAGE = (ROOT / "docs" / "versions.md").read_text().partition("## Private parts")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| `")]


def test_the_page_lists_the_private_parts():
    used = private_parts.of_folder(PACKAGE, without={"bench"})
    listed = [name for row in ROWS for name in re.findall(r"`([^`]+)`", row[0])]
    missing = [name for name in used if not any(fnmatch(name, pattern) for pattern in listed)]
    gone = [pattern for pattern in listed if not any(fnmatch(name, pattern) for name in used)]
    assert not missing, f"add to docs/versions.md, with a test that notices a change: {sorted(missing)}"
    assert not gone, f"remove from docs/versions.md what is not used any more: {gone}"


def test_the_page_names_tests_that_are_there():
    for names, _, tests in ROWS:
        assert tests, names
        for test in tests.split(", "):
            file, _, function = test.partition("::")
            (path,) = (ROOT / "tests").rglob(file)
            assert f"def {function}(" in path.read_text(), f"{names}: there is no {test}"


PARTS = 4  # each compiles its C++ once

# One for each kind of guard, of which one warns: a lowering, the mark, the pass, what every operator asks.
SOME = [
    "torch._inductor.lowering.register_lowering",
    "torch._functorch.compile_utils.fx_graph_cse",
    "torch._subclasses.fake_tensor.FakeTensor",
    "torch._C._get_tracing_state",
]


@pytest.mark.slow
@pytest.mark.parametrize("first", range(PARTS))
def test_without_a_private_name_numbers_stay_right(first, tmp_path):
    """Meta call, eager step, export, aot_eager, Inductor and the pass beside plain torch; one warning for each part."""
    used = sorted(name for name in private_parts.of_folder(PACKAGE, without={"bench"}) if name.startswith("torch."))
    names = used[first::PARTS]
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = str(PACKAGE.parent)
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("hidden_names.py"), "nothing", *names],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    answers = dict(map(json.loads, done.stdout.splitlines()))
    assert answers.keys() == {"nothing", *names}, done.stderr
    assert set(SOME) <= set(used)
    assert answers.pop("nothing") == {"failed": {}, "left out": {}, "warnings": []}
    for name, answer in answers.items():
        assert not answer["failed"], (name, answer)
        assert len(answer["warnings"]) == len(answer["left out"]) <= 2, (name, answer)
        assert name not in SOME or answer["warnings"], f"nothing noticed that {name} is gone"


def test_private_parts_are_found(tmp_path):
    """Below their full names, by whatever way they were imported."""
    (tmp_path / "a.py").write_text(
        "import torch, triton\nimport torch._dynamo as d\nfrom torch._inductor import config\n"
        "from torch.autograd import forward_ad\nfrom triton import next_power_of_2\nfrom .b import _own\n"
        "d.reset\nconfig.patch(x=1)\nforward_ad._level\ntorch.ops.x\ntorch.__version__\ntriton.knobs.runtime\n"
        "getattr(torch._C, '_f', None)\n_own._x\n"
    )
    assert private_parts.of_folder(tmp_path, set()) == {
        "torch._dynamo.reset",
        "torch._inductor.config.patch",
        "torch.autograd.forward_ad._level",
        "triton.knobs.runtime",
        "torch._C._f",
    }


def test_citation_and_changelog_are_of_this_version():
    assert f"\nversion: {xent_ops.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    changelog = (ROOT / "CHANGELOG.md").read_text()
    head = re.search(r"^## (.*)$", changelog, re.MULTILINE).group(1)
    assert re.match(rf"{re.escape(xent_ops.__version__)} \((unreleased|\d{{4}}-\d\d-\d\d)\)", head), head
    functions = [name for name in xent_ops.__all__ if name.islower() and not name.startswith("_")]
    assert [name for name in functions if f"{name}`" not in changelog and f"{name}(" not in changelog] == []


def test_the_page_names_the_functions_over_ranks():
    sharded = {
        name
        for name in xent_ops.__all__
        if inspect.isfunction(function := getattr(xent_ops, name)) and "shard" in inspect.signature(function).parameters
    }
    listed = re.search(r"\*\*Ranks are one argument\.\*\*(.*?) take `shard=", SURFACE, re.DOTALL).group(1)
    assert set(re.findall(r"`(\w+)`", listed)) == sharded
    assert set(distributed.__all__) == {"Shard", "vocab_parallel_cross_entropy"}
