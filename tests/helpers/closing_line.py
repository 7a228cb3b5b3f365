"""What a run of the tests ends in: one line that counts them, and the skips by reason. pytest has a line for each skip.

4100 passed, 0 failed, 346 skipped: 310 need a GPU, 20 need an Ascend NPU, 16: triton is not installed
"""

import json
from collections import Counter
from pathlib import Path

import pytest

# An error of a module or a fixture fails `make test` as well.
OUTCOMES = {
    "passed": ["passed"],
    "failed": ["failed", "error"],
    "expected to fail": ["xfailed"],
    "skipped": ["skipped"],
}


def pytest_addoption(parser):
    parser.addoption(
        "--add-counts", metavar="FILE", type=Path, help="count the runs that FILE knows as well, and tell it this one"
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around pytest's own, whose closing line stays above this one
def pytest_sessionfinish(session):
    result = yield
    one_of_several = hasattr(session.config, "workerinput")  # a process of pytest-xdist, which reports to the first
    if not one_of_several and not session.config.option.collectonly:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        counts = {
            outcome: Counter(_reason(report) for key in keys for report in reporter.stats.get(key, ()))
            for outcome, keys in OUTCOMES.items()
        }
        if file := session.config.option.add_counts:
            if file.exists():
                for outcome, reasons in json.loads(file.read_text()).items():
                    counts[outcome].update(reasons)
            file.write_text(json.dumps(counts))
        reporter.write_line(closing_line(counts))
    return result


def _reason(report):
    """Why a test was skipped; nothing for another."""
    if report.outcome == "skipped" and not hasattr(report, "wasxfail"):
        return report.longrepr[2].removeprefix("Skipped: ")
    return ""


def closing_line(counts):
    """``counts``: of each of OUTCOMES, how many tests had it for which reason."""
    line = ", ".join(
        f"{reasons.total()} {outcome}"
        for outcome, reasons in counts.items()
        if reasons or outcome in ("passed", "failed")
    )
    why = ", ".join(_told(number, reason) for reason, number in counts["skipped"].most_common())
    return f"{line}: {why}" if why else line


def _told(number, reason):
    if reason.startswith("needs "):
        return f"{number} {reason}" if number == 1 else f"{number} need {reason.removeprefix('needs ')}"
    return f"{number}: {reason}"
