"""``python -m xent_ops bench``, in this process on the CPU with tiny shapes: figures mean nothing, reports must."""

import json
import re
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from probes import CPU, probe, setting

import xent_ops
from xent_ops.__main__ import main
from xent_ops.bench import check, contestants, measure, problems, report, run, timing
from xent_ops.bench.arguments import Shape
from xent_ops.bench.contestants import Contestant, Outputs
from xent_ops.bench.problems import Loss

TINY = ["bench", "--device", "cpu", "--budget", "1", "--shapes", "34x64"]
STEADY, UNSTEADY = [0.9, 1.0, 1.1], [0.0, 1.0, 2.0]


def read(path):
    content = json.loads(path.read_text())
    return content, {result["variant"]: result for result in content["results"]}


def cells(out):
    """The lines of all tables: text by column, by the first cell."""
    lines = [re.split(r" *\| *", line.strip("| \n")) for line in out.splitlines() if line.startswith("| ")]
    head = lines[0] if lines else []
    return {line[0]: dict(zip(head, line, strict=True)) for line in lines}


def mean_over_all(x, target):
    return F.cross_entropy(x, target, reduction="sum") / len(target)


@pytest.fixture(autouse=True)
def idle(monkeypatch):
    monkeypatch.setattr(timing.os, "getloadavg", lambda: (0.0, 0.0, 0.0))


@pytest.fixture
def lines(monkeypatch):
    """These and no others are measured."""
    return lambda *known: monkeypatch.setattr(contestants, "losses", lambda: list(known))


@pytest.fixture
def clock(monkeypatch):
    """The samples of each line."""
    return lambda *samples: monkeypatch.setattr(timing, "in_turn", lambda runs, *more: list(samples)[: len(runs)])


@pytest.mark.parametrize("more, unit", [([], "copy"), (["--linear", "16"], "three matmuls")])
def test_json_picture_and_table(more, unit, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    figures, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    arguments = [*TINY, *more, "--only", "eager", "--dtype", "bfloat16"]
    assert main([*arguments, "--json", str(figures), "--plot", str(picture)]) == 0
    content, results = read(figures)
    assert content["environment"]["torch"] == torch.__version__ and content["settings"]["dtype"] == "bfloat16"
    assert content["environment"]["command"].startswith("python -m xent_ops bench --device cpu")
    assert {"triton", "driver", "date", "peers"} <= content["environment"].keys()
    assert {unit, "xent eager"} <= results.keys()
    units = [result["ms"] for result in results.values() if result["kind"] == "unit"]
    for result in results.values():
        assert result["status"] == "ok" and 0 < result["low_ms"] <= result["ms"] <= result["high_ms"], result
        assert (result["peak_bytes"] is not None) == timing.measures_memory(CPU)
        if result["kind"] != "unit":
            assert result["ratio"] == result["ms"] / min(units)
            assert all(error <= limit for error, limit in result["errors"].values()) and result["errors"]
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    out, err = capsys.readouterr()
    assert cells(out)["xent eager"]["status"].startswith("ok") and "34x64" in out
    assert f"1/{len(results)}  {unit}" in err


def test_every_line_of_ours_has_the_loss():
    logits, target = torch.randn(6, 40), torch.randint(40, (6,))
    target[1] = check.IGNORE_INDEX
    for one in contestants.losses():
        if one.kind == "ours":
            torch.testing.assert_close(one.load()(logits, target), F.cross_entropy(logits, target))


def test_wrong_lines_are_told_and_not_timed(lines, monkeypatch, tmp_path, capsys):
    timed = []
    in_turn = timing.in_turn
    monkeypatch.setattr(timing, "in_turn", lambda runs, *more: timed.append(len(runs)) or in_turn(runs, *more))

    def raises(logits, target):
        raise NotImplementedError("needs a GPU of its own")

    lines(probe(contestants.torch_loss, "right"), probe(mean_over_all, "mean over all"), probe(raises, "raises"))
    assert main([*TINY, "--json", str(tmp_path / "x.json")]) == 1
    _, results = read(tmp_path / "x.json")
    wrong, error = results["mean over all"], results["raises"]
    assert results["right"]["status"] == "ok" and timed == [1]
    assert wrong["status"] == "wrong" and wrong["ms"] is None and wrong["ratio"] is None
    assert error["status"] == "error" and error["notes"] == ["NotImplementedError: needs a GPU of its own"]
    out = capsys.readouterr().out
    assert "WRONG; relative error of loss" in out and "needs a GPU of its own" in out
    lines(
        probe(contestants.torch_loss, "right"), probe(raises, "raises", "peer", needs=("json",))
    )  # whose failures are its own
    assert main(TINY) == 0


def test_a_fraction_of_the_rows_is_ignored(tmp_path):
    for fraction, number in ((0.0, 0), (0.5, 17), (0.9, 31), (0.999, 33)):  # never the first row
        problem = Loss(Shape(34, 64), setting(ignored=fraction))
        assert [int((target == check.IGNORE_INDEX).sum()) for target in problem.targets] == [number] * 2
        assert all(target[0] != check.IGNORE_INDEX for target in problem.targets)
    figures = tmp_path / "bench.json"
    for more in ([], ["--linear", "16"]):
        assert main([*TINY, "--only", "xent eager", "--ignored", "0.9", "--json", str(figures), *more]) == 0
        assert json.loads(figures.read_text())["settings"]["ignored"] == 0.9


def test_unsteady_figures_are_marked(lines, clock, capsys, tmp_path):
    lines(contestants.unit("copy", lambda: lambda *_: None), probe(contestants.torch_loss, "first"))
    for unit, first in ((STEADY, STEADY), (UNSTEADY, STEADY), (STEADY, UNSTEADY)):
        clock(unit, first)
        assert main([*TINY, "--json", str(tmp_path / "x.json")]) == 0
        out = capsys.readouterr().out
        marked = UNSTEADY in (unit, first)
        assert [cells(out)["first"][name] for name in ("ms", "ratio")] == [
            "~" * marked + "1.0000",
            "~" * marked + "1.000",
        ]
        assert ("unsteady: half of the samples took 0.5000 to 1.5000 ms" in out) == marked
        result = read(tmp_path / "x.json")[1]["first"]
        assert result["unsteady"] == marked and result["ms"] == 1.0


def test_a_busy_machine_is_told_first_and_in_every_line(lines, clock, monkeypatch, capsys):
    """Steady times of a machine that has other things to do, too."""
    lines(probe(contestants.torch_loss, "first"))
    clock(STEADY)
    cores = timing.os.cpu_count()
    for load, busy in ((cores, False), (cores + 0.5, True)):
        monkeypatch.setattr(timing.os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert main(TINY) == 0
        out = capsys.readouterr().out
        first = f"THE MACHINE IS BUSY: the load is {load:.1f} on {cores} cores. Every time below has a ~"
        assert out.startswith(first) == busy
        assert cells(out)["first"]["ms"] == "~" * busy + "1.0000"


def test_long_blocks_in_a_random_order():
    """In each round every run has a block. An error is that of its run. Inputs are restored before each block."""
    order = []
    error = RuntimeError("broken later")

    def breaks():
        if order.count("c") == 5:
            raise error
        order.append("c")

    runs = [lambda: order.append("a"), lambda: order.append("b"), breaks]
    first, second, third = timing.in_turn(runs, lambda: order.append("-"), 1.0, timing.Clock(CPU))
    assert third is error and min(*first, *second) > 0
    blocks = re.findall("a+|b+", re.sub("[-c]", "", "".join(order)))
    assert 7 < len(blocks) < 14  # both orders: a run may be the last of one round and the first of the next
    assert order.count("-") >= 2 * timing.ROUNDS


def test_a_row_of_calls():
    calls = []
    (ms,) = timing.Clock(CPU, row=True).block(lambda: calls.append(1), lambda: None, 0.1)
    assert len(calls) > 10 and 0 < ms < 1
    assert main([*TINY, "--eager", "--only", "xent eager"]) == 0


def test_a_run_is_compared_with_an_earlier_one(lines, clock, tmp_path, capsys):
    """Faster or slower is a time whose middle half of samples does not overlap; what was not measured alike is said."""
    names = ("faster", "same", "slower")
    lines(*(probe(contestants.torch_loss, name) for name in names))
    clock(*[STEADY] * 3)
    path = tmp_path / "before.json"
    assert main([*TINY, "--json", str(path)]) == 0
    capsys.readouterr()
    lines(*(probe(contestants.torch_loss, name) for name in (*names, "new")))
    clock([0.7, 0.8, 0.85], [1.0, 1.05, 1.2], [1.2, 1.3, 1.4], STEADY)
    assert main([*TINY, "--ignored", "0.5", "--compare", str(path)]) == 0
    out = capsys.readouterr().out
    assert "not measured alike: ignored was None, is 0.5" in out and out.count("not measured alike") == 1
    found = cells(out)
    assert found["faster"]["before, ms"] == "1.000" and found["faster"]["now / before"] == "0.800"
    assert [found[name]["status"] for name in (*names, "new")] == ["ok; faster", "ok", "ok; slower", "ok"]
    assert found["new"]["now / before"] == "-"


@pytest.mark.parametrize("written, message", [(None, "No such file"), ("[]", "not what --json"), ("{", "not what")])
def test_what_cannot_be_compared_is_refused_first(written, message, tmp_path, capsys):
    if written is not None:
        (tmp_path / "before.json").write_text(written)
    with pytest.raises(SystemExit) as stopped:
        main([*TINY, "--compare", str(tmp_path / "before.json")])
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_a_table_can_be_pasted():
    rows = [{"variant": "a|b", "ms": "~1.5", "status": "ok"}, {"variant": "a long name", "status": "ERROR; no"}]
    assert report.as_markdown(rows) == (
        "| variant     |   ms | status |\n"
        "| ---         | ---: | --- |\n"
        "| a\\|b        | ~1.5 | ok |\n"
        "| a long name |    - | ERROR; no |\n"
    )


def test_peers_that_are_missing_are_left_out(lines, capsys):
    absent = probe(mean_over_all, "a-peer", "peer", needs=("json", "no_such_module"))
    lines(probe(contestants.torch_loss, "xent eager"), absent)
    assert main([*TINY, "--only", "xent eager,a-peer"]) == 0
    out = capsys.readouterr().out
    assert "a-peer not installed (no module no_such_module)" in out and cells(out).keys() == {
        "variant",
        "---",
        "xent eager",
    }


def test_transformer_engine_is_called_without_synchronisation(monkeypatch):
    """An old one looks at the gradient on the host, unless told not to; a new one warns of being told."""
    losses = []

    def parallel(inp, target, label_smoothing, reduce_loss, dist_process_group, ignore_idx, is_cg_capturable):
        assert reduce_loss and dist_process_group is None and is_cg_capturable
        losses.append(F.cross_entropy(inp[0], target[0], ignore_index=ignore_idx, label_smoothing=label_smoothing))
        return losses[-1]

    module = types.SimpleNamespace(parallel_cross_entropy=parallel)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.cross_entropy", module)
    logits, target = torch.randn(3, 5), torch.tensor([1, check.IGNORE_INDEX, 4])
    assert contestants._transformer_engine()(logits, target) is losses[0]


@pytest.mark.parametrize("text", ["8192", "8192x", "x32000", "8192*32000", "0x64", "64x1", "-1x64", "64x64,"])
def test_shapes_that_are_none(text, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", f"--shapes={text}"])
    assert stopped.value.code == 2
    assert "expected ROWSxCLASSES" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--only", "nothing"], "here are copy, copy by a kernel, xent eager, xent compiled"),
        (["--device", "meta"], "needs cpu, cuda or xpu"),
        (["--dtype", "int8"], "bfloat16"),
        (["--json", "no/such/folder/x.json"], "invalid writable_path value"),
        (["--json", "."], "invalid writable_path value"),
        (["--plot", "figures.xyz"], "invalid picture_path value"),
        (["--shapes", f"1x{2**63}"], "is not a shape"),
        (["--linear", "0"], "invalid positives value: '0'"),
        (["--ignored", "1"], "invalid fraction value: '1'"),
    ],
)
def test_refusals(arguments, text, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*TINY, *arguments])
    assert stopped.value.code == 2
    assert text in capsys.readouterr().err


def test_labels_of_bars():
    """Of one picture with the same digits."""
    assert report.labels([23.0, 7.8206, 0.0]) == ["23.00", "7.82", "0.00"]
    assert report.labels([1568.4, 7.82]) == ["1568", "8"]


def test_a_plot_without_matplotlib_is_refused_first(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stopped:
        main([*TINY, "--plot", str(tmp_path / "x.png")])
    assert stopped.value.code == 2 and "--plot needs matplotlib" in capsys.readouterr().err


@pytest.mark.skipif(not timing.measures_memory(CPU), reason="needs Linux and a writable /proc/self/clear_refs")
def test_peak_memory_on_the_cpu():
    """Freed tensors are not counted, whatever the allocator kept of them; gradients are in the one figure alone."""

    class Sized(problems.Problem):
        inputs = (torch.ones(1),)

        def bind(self, contestant):
            def step():
                passing = torch.ones(4 << 18)  # 4 MiB
                return Outputs(passing.sum(), (torch.ones(16 << 18), torch.ones(1)))

            step()
            return step

    result = measure.Result("", "", "")
    unit = probe(None, kind="unit")
    measure._prepared(Sized(Shape(2, 3), setting()), unit, setting(), result)
    assert 20 << 20 <= result.peak_bytes < 24 << 20
    assert result.peak_bytes - result.extra_bytes == (16 << 20) + 4


@pytest.mark.gpu
def test_graphs_and_memory_on_a_gpu(tmp_path):
    """In CUDA graphs by default, replayed on other targets; a head needs a chunk of the logits and the gradients."""
    common = ["bench", "--budget", "5", "--only", "xent", "--json", str(tmp_path / "x.json")]
    assert main([*common, "--shapes", "512x32000"]) == 0
    for result in read(tmp_path / "x.json")[1].values():
        assert result["mode"] == "graph" and result["ms"] > 0
        if result["kind"] == "ours":
            assert result["extra_bytes"] < 0.1 * 512 * 32000 * 2, result
    assert main([*common, "--shapes", "8192x32000", "--linear", "256"]) == 0
    for result in read(tmp_path / "x.json")[1].values():
        assert result["mode"] == "graph", result
        assert result["kind"] != "ours" or result["peak_bytes"] < 300 << 20, result  # all logits: 500 MiB


@pytest.mark.gpu
def test_inputs_are_restored_before_each_call_on_a_gpu(monkeypatch):
    """triton's do_bench has no hook for it; ours is in the tensors whose gradients it would clear."""
    calls = []
    device = torch.device("cuda")
    samples = timing.Clock(device).block(lambda: calls.append("run"), lambda: calls.append("-"), 1.0)
    assert calls.count("-") == len(samples) and calls[-2:] == ["-", "run"]


@pytest.mark.gpu
def test_what_synchronises_is_timed_by_calls(lines, tmp_path):
    def synchronises(logits, target):
        return F.cross_entropy(logits.float(), target) * int((target >= 0).any().item())

    after = Contestant("after", "ours", contestants.partial(xent_ops.cross_entropy))
    lines(probe(synchronises, kind="peer", needs=("json",)), after)
    assert main(["bench", "--budget", "5", "--shapes", "64x4096", "--json", str(tmp_path / "x.json")]) == 0
    _, results = read(tmp_path / "x.json")
    probed = results["probe"]
    assert probed["status"] == "ok" and probed["mode"] == "calls" and "cannot be captured" in probed["notes"][0]
    assert results["after"]["mode"] == "graph"
