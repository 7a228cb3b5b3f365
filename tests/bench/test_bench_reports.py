"""What a run of the benchmark shows: unsteady figures, tables that can be pasted, the comparison with an earlier run."""

import json
import re

import pytest
import torch
import torch.nn.functional as F
from helpers.processes import run_python

from xent_ops.__main__ import main
from xent_ops.bench import cases, measure, plot, report, timing
from xent_ops.bench.measure import Result
from xent_ops.bench.sizes import Shape

CPU = torch.device("cpu")
TINY = ["bench", "--device", "cpu", "--budget", "1", "--shapes", "34x64"]
STEADY, UNSTEADY = timing.Times(1.0, 0.9, 1.1), timing.Times(1.0, 0.5, 1.5)


@pytest.fixture
def clocks(monkeypatch):
    """What the clock shows: two copies, then each variant. Every variant is F.cross_entropy."""

    def set_times(names, times):
        probes = [
            cases.Variant(name, "ours", lambda: lambda x, target, weight: F.cross_entropy(x, target)) for name in names
        ]
        monkeypatch.setattr(cases, "losses", lambda *arguments: probes)
        left = iter(times)
        monkeypatch.setattr(measure, "_clock", lambda *arguments: next(left))

    return set_times


def cells(out):
    """The lines of all tables in markdown, by their first cell."""
    lines = [re.split(r" *\| *", line.strip("| \n")) for line in out.splitlines() if line.startswith("| ")]
    return {first: rest for first, *rest in lines}


def test_every_unsteady_figure_is_marked(clocks, capsys, tmp_path):
    for copy, first, ms, copies in (
        (STEADY, STEADY, "1.0000", "1.00"),
        (UNSTEADY, STEADY, "~1.0000", "~1.00"),  # the unit is, and who knows what else ran
        (STEADY, UNSTEADY, "~1.0000", "~1.00"),
    ):
        clocks(["first"], [copy, timing.Times(9.0, 9.0, 9.0), first])
        assert main([*TINY, "--markdown", "--json", str(tmp_path / "x.json")]) == 0
        out = capsys.readouterr().out
        assert cells(out)["first"][:2] == [ms, copies]
        assert ("~ unsteady: half of the samples" in out) == (copies != "1.00")
        (result,) = json.loads((tmp_path / "x.json").read_text())["results"]
        assert result["unsteady"] == ["ms"] * (ms != "1.0000") + ["copies"] * (copies != "1.00")
        assert (result["ms"], result["low_ms"], result["high_ms"]) == first
        assert ("THE COPY IS UNSTEADY" in out) == (copy == UNSTEADY)


@pytest.fixture(autouse=True)
def idle(monkeypatch):
    monkeypatch.setattr(timing.os, "getloadavg", lambda: (0.0, 0.0, 0.0))


@pytest.mark.parametrize("more", [[], ["--linear", "16"]])
def test_a_busy_machine_is_told_first_and_in_every_row(more, monkeypatch, capsys):
    """Steady times of a machine that has other things to do, too."""
    monkeypatch.setattr(timing, "by_wall", lambda *arguments: STEADY)
    arguments = [*TINY, *more, "--only", "eager", "--markdown"]
    cores = timing.os.cpu_count()
    for load, busy in ((cores, False), (cores + 0.5, True)):
        monkeypatch.setattr(timing.os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert main(arguments) == 0
        out = capsys.readouterr().out
        first = f"THE MACHINE IS BUSY: the load is {load:.1f} on {cores} cores. Every time below has a ~"
        assert out.startswith(first) == busy
        rows = [row for name, row in cells(out).items() if "eager" in name]
        assert rows and all(row[0] == "~1.0000" and "ok: the machine was busy" in row[-1] for row in rows) == busy


def test_a_ratio_of_an_unsteady_figure_is_unsteady():
    names = ("first", "second")
    variants = [cases.Variant(name, "ours", lambda: None, against="first") for name in names]
    for unsteady, expected in (((), ()), (("first",), names), (("second",), ("second",))):
        results = [measure.Result(None, name, "ours", ms=1.0, unsteady=["ms"] * (name in unsteady)) for name in names]
        measure.set_ratios(variants, results)
        assert tuple(result.variant for result in results if "ratio" in result.unsteady) == expected


def test_a_table_can_be_pasted():
    text = report.as_markdown((["variant", "ms", "status"], [["a|b", "~1.5", "ok"], ["a long name", "-", "ERROR: no"]]))
    assert text == (
        "| variant     |   ms | status |\n"
        "| --- | ---: | --- |\n"
        "| a\\|b        | ~1.5 | ok |\n"
        "| a long name |    - | ERROR: no |\n"
    )


def test_the_title_is_one_line(capsys):
    """However narrow the figures are: the table beside it is narrower than the title."""
    pytest.importorskip("rich", reason="rich is not installed")
    title = "34x64x16 bfloat16, " + "distillation of a teacher of 12, beta 0.5; " * 2
    report.show(title, [Result(Shape(34, 64), "a", "ours", "ok")], (["variant", "ms"], [["a", "1"]]), False)
    assert capsys.readouterr().out.splitlines()[0] == title


@pytest.mark.parametrize("classes", [[64], [64, 96, 128]])  # bars, lines
def test_unsteady_figures_and_every_bar_are_named_in_the_picture(tmp_path, classes):
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    shapes = [Shape(32, size) for size in classes]
    steady = [Result(shape, "steady", "ours", "ok", copies=1.5) for shape in shapes]
    doubted = [Result(shape, "doubted", "torch", "ok", copies=0.71, unsteady=["copies"]) for shape in shapes]
    untimed = [Result(shape, "memory alone", "torch", "ok", peak_logits=1.0) for shape in shapes]

    def texts(results):
        path = tmp_path / "picture.svg"
        with matplotlib.rc_context({"svg.fonttype": "none"}):  # words stay words
            plot.draw(path, results, "title", plot.of_loss(None))
        return path.read_text()

    drawn = texts([*steady, *doubted, *untimed])
    assert "unsteady: measure it again" in drawn
    assert ("~0.71" in drawn) == (len(classes) == 1)
    assert ">memory alone<" in drawn
    assert "unsteady" not in texts([*steady, *untimed])


def test_progress_is_drawn_on_a_terminal_and_told_by_lines_elsewhere(monkeypatch, capsys):
    pytest.importorskip("rich", reason="rich is not installed")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with report.progress("1/2 34x64", 2) as step:
        step("first")
        step("second")
    out, err = capsys.readouterr()
    assert "second" in err and "1/2" in err and "\x1b[" in err and not out
    monkeypatch.setenv("FORCE_COLOR", "")
    for have in (lambda module: True, lambda module: False):
        monkeypatch.setattr(report, "have", have)
        with report.progress("1/2 34x64", 2) as step:
            step("first")
            assert capsys.readouterr().err == "1/2 34x64  1/2  first\n"  # before it is measured
            step("second")
        assert capsys.readouterr() == ("", "1/2 34x64  2/2  second\n")


def run_twice(clocks, tmp_path, before, now, *options):
    """The same variants, measured at other times."""
    names = ["faster", "same", "slower"]
    for times, more in ((before, ["--json"]), (now, [*options, "--compare"])):
        clocks(names, [STEADY, STEADY, *times])
        assert main([*TINY, *more, str(tmp_path / "before.json")]) == 0


def test_a_run_is_compared_with_an_earlier_one(clocks, tmp_path, capsys):
    before = [timing.Times(1.0, 0.9, 1.1)] * 3
    now = [timing.Times(0.8, 0.7, 0.85), timing.Times(1.05, 1.0, 1.2), timing.Times(1.3, 1.2, 1.4)]
    run_twice(clocks, tmp_path, before, now)
    out = capsys.readouterr().out
    found = cells(out[out.index("Beside ") :])
    assert found["34x64 faster"] == ["1.0000", "0.8000", "0.800", "faster"]
    assert found["34x64 same"] == ["1.0000", "1.0500", "1.050", "same"]
    assert found["34x64 slower"] == ["1.0000", "1.3000", "1.300", "slower"]
    assert "not measured alike" not in out


def test_what_was_not_measured_alike_is_said(clocks, tmp_path, capsys):
    run_twice(clocks, tmp_path, [STEADY] * 3, [UNSTEADY] * 3, "--ignored", "0.5")
    out = capsys.readouterr().out
    assert "not measured alike: ignored was None, is 0.5" in out
    assert cells(out[out.index("Beside ") :])["34x64 same"][2:] == ["~1.000", "unsteady"]
    content = json.loads((tmp_path / "before.json").read_text())
    first, second, third = content["results"]
    first["status"], second["low_ms"], third["variant"] = "wrong", None, "another"
    content["environment"]["torch"] = "2.0"
    (tmp_path / "before.json").write_text(json.dumps(content))
    clocks(["faster", "same", "slower"], [STEADY] * 5)
    assert main([*TINY, "--compare", str(tmp_path / "before.json")]) == 0
    out = capsys.readouterr().out
    found = cells(out[out.index("Beside ") :])
    verdicts = {name: rest[-1] for name, rest in found.items()}
    assert verdicts["34x64 faster"] == "was wrong, is ok"
    assert verdicts["34x64 same"] == "its spread was not written then"
    assert verdicts["34x64 slower"] == "new" and verdicts["34x64 another"] == "not measured now"
    assert f"torch was 2.0, is {torch.__version__}" in out


@pytest.mark.parametrize(
    "written, message", [(None, "No such file"), ("[]", "not what --json writes"), ("{", "not what")]
)
def test_what_cannot_be_compared_is_refused_first(written, message, tmp_path, capsys):
    if written is not None:
        (tmp_path / "before.json").write_text(written)
    with pytest.raises(SystemExit) as stopped:
        main([*TINY, "--compare", str(tmp_path / "before.json")])
    assert stopped.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    "more", [["--linear", "16", "--only", "xent eager"], ["--step", "16", "--only", "xent in-place"]]
)
def test_other_tables_compare_too(more, tmp_path, capsys):
    arguments = [*TINY, *more, "--markdown"]
    assert main([*arguments, "--json", str(tmp_path / "before.json")]) == 0
    assert main([*arguments, "--compare", str(tmp_path / "before.json")]) == 0
    out = capsys.readouterr().out
    found = cells(out[out.index("Beside ") :])
    assert any("34x64" in name for name in found)
    assert {rest[-1] for name, rest in found.items() if "34x64" in name} <= {"same", "faster", "slower", "unsteady"}


def test_torchs_timer_takes_the_threads_that_are_set():
    """Its default is one."""
    seen = set()
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        times = timing.by_wall(lambda: seen.add(torch.get_num_threads()), None, 1, CPU)
        wall = timing.back_to_back(lambda: seen.add(torch.get_num_threads()), 1)
    finally:
        torch.set_num_threads(threads)
    assert seen == {threads + 1}
    assert 0 < times.low <= times.ms <= times.high < 1 and 0 < wall.ms < 1


def test_inputs_are_restored_before_each_call():
    calls = []
    timing.by_wall(lambda: calls.append("run"), lambda: calls.append("restore"), 0.01, CPU)
    assert calls == ["restore", "run"] * (len(calls) // 2) and len(calls) > 2 * timing.MIN_SAMPLES


@pytest.mark.slow
def test_a_rank_alone():
    run_python(
        """
        import contextlib, io, sys
        from xent_ops.bench import ranks as bench
        sys.argv = ["bench", *"--alone 8 --rows 64 --classes 4096 --repeat 1".split()]
        with contextlib.redirect_stdout(io.StringIO()) as out:
            bench.main()
        first, *lines = out.getvalue().splitlines()
        assert first.startswith("64 x 4096 bfloat16 over 8 ranks") and first.endswith(", one of them alone"), first
        for name in ("eager", "eager, DTensor", "compiled"):
            (line,) = [line for line in lines if line.startswith(f"{name}  ")]
            assert float(line.split()[-2]) > 0, line
        assert not any(line.startswith(("all-gather", "limit")) for line in lines), lines  # nothing is sent
        sys.argv = ["bench", "--alone", "0"]
        with contextlib.redirect_stderr(io.StringIO()) as out:
            try:
                bench.main()
            except SystemExit:
                pass
        assert "--alone must be at least 1" in out.getvalue(), out.getvalue()
        """
    )
