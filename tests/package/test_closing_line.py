"""The line that a run of the tests ends in."""

import json
from collections import Counter
from pathlib import Path

import pytest
from helpers import closing_line

pytest_plugins = ["pytester"]

MODULE = """
import pytest

@pytest.mark.parametrize("outcome", ["pass", "a GPU", "a GPU", "an NPU", "triton", "triton", "triton", "fail", "xfail"])
def test_one(outcome):
    if outcome in ("a GPU", "an NPU"):
        pytest.skip(f"needs {outcome}")
    if outcome == "triton":
        pytest.skip("triton is not installed")
    if outcome == "xfail":
        pytest.xfail("expected")
    assert outcome == "pass"

@pytest.fixture
def broken():
    raise ValueError

def test_of_a_broken_fixture(broken):
    pass
"""
LINE = "2 passed, 2 failed, 1 expected to fail, 8 skipped: 4 need a GPU, 3: triton is not installed, 1 needs an NPU"


def test_both_runs_are_counted_in_the_last_line(pytester, monkeypatch):
    """Below pytest's own, of processes that share the tests. No skip has a line of its own."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # some of them import torch, in each of three processes
    before = {"passed": {"": 1}, "skipped": {"needs a GPU": 2}}
    pytester.path.joinpath("counts.json").write_text(json.dumps(before))
    pytester.makepyfile(test_some=MODULE)
    options = (
        "-q",
        "-rfEx",
        "-p",
        "xdist",
        "-p",
        "helpers.closing_line",
        "--add-counts=counts.json",
        "--numprocesses=2",
    )
    done = pytester.runpytest_subprocess(*options)
    assert done.ret == pytest.ExitCode.TESTS_FAILED and done.outlines[-1] == LINE
    assert done.outlines[-2].startswith("1 failed, 1 passed, 6 skipped, 1 xfailed, 1 error in ")
    assert json.loads(pytester.path.joinpath("counts.json").read_text())["passed"] == {"": 2}
    assert "SKIPPED" not in done.stdout.str()


def test_a_run_without_skips():
    counts = {outcome: Counter() for outcome in closing_line.OUTCOMES} | {"passed": Counter([""])}
    assert closing_line.closing_line(counts) == "1 passed, 0 failed"


def test_our_own_runs_have_it(request):
    """Another hook of its name in conftest.py would take its place without a word."""
    assert hasattr(request.config.option, "add_counts")
    hooks = request.config.hook.pytest_sessionfinish.get_hookimpls()
    assert any(hook.function is closing_line.pytest_sessionfinish for hook in hooks)
