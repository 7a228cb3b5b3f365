"""The line that a run of the tests ends in."""

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
OTHER = """
import pytest

@pytest.mark.skip(reason="tiny is not installed")
def test_one():
    pass
"""
ONE_RUN = "1 passed, 2 failed, 1 expected to fail, 6 skipped: 3: triton is not installed, 2 need a GPU, 1 needs an NPU"
BOTH_RUNS = (
    "2 passed, 4 failed, 2 expected to fail, 13 skipped: 6: triton is not installed, 4 need a GPU, 2 need an NPU, "
    "1: tiny is not installed"
)


@pytest.fixture
def run(pytester, monkeypatch):
    """pytest with the hooks of our conftest.py."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    return lambda *options: pytester.runpytest_subprocess("-q", "-rfEx", "-p", "helpers.closing_line", *options)


def test_both_runs_are_counted_in_the_last_line(pytester, run):
    """Below pytest's own. No skip has a line of its own."""
    pytester.makepyfile(test_some=MODULE)
    first = run("--add-counts=counts.json", "--numprocesses=2")
    assert first.ret == pytest.ExitCode.TESTS_FAILED and first.outlines[-1] == ONE_RUN
    assert first.outlines[-2].startswith("1 failed, 1 passed, 6 skipped, 1 xfailed, 1 error in ")
    pytester.makepyfile(test_other=OTHER)
    second = run("--add-counts=counts.json")
    assert second.outlines[-1] == BOTH_RUNS and "SKIPPED" not in second.stdout.str()


def test_a_run_without_skips(pytester, run):
    pytester.makepyfile("def test_one(): pass")
    alone = run()
    assert alone.ret == 0 and alone.outlines[-1] == "1 passed, 0 failed"


def test_our_own_runs_have_it(request):
    """Another hook of its name in conftest.py would take its place without a word."""
    assert hasattr(request.config.option, "add_counts")
    hooks = request.config.hook.pytest_sessionfinish.get_hookimpls()
    assert any(hook.function is closing_line.pytest_sessionfinish for hook in hooks)
