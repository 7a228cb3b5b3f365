"""``python -m xent_ops bench``, in this process on the CPU with tiny shapes: figures mean nothing, reports must."""

import json
import math
import re
import sys
import types

import pytest
import torch
import torch.nn.functional as F

import xent_ops
from xent_ops.__main__ import main
from xent_ops.bench import check, contestants, measure, problems, report, run, timing
from xent_ops.bench.arguments import Shape
from xent_ops.bench.contestants import COPY, Contestant, Outputs
from xent_ops.bench.problems import Head, Loss

CPU = torch.device("cpu")
TINY = ["bench", "--device", "cpu", "--budget", "1", "--shapes", "34x64"]
STEADY, UNSTEADY = timing.Times(1.0, 0.9, 1.1), timing.Times(1.0, 0.5, 1.5)


def of_results(path):
    content = json.loads(path.read_text())
    return content, {result["variant"]: result for result in content["results"]}


def cells(out):
    """The lines of all tables, by their first cell."""
    lines = [re.split(r" *\| *", line.strip("| \n")) for line in out.splitlines() if line.startswith("| ")]
    return {first: rest for first, *rest in lines}


def probe(loss, name="probe", kind="ours", **options):
    return Contestant(name, kind, lambda: loss, **options)


def mean_over_all(x, target, weight):
    return F.cross_entropy(x, target, reduction="sum") / len(target)


@pytest.fixture(autouse=True)
def idle(monkeypatch):
    monkeypatch.setattr(timing.os, "getloadavg", lambda: (0.0, 0.0, 0.0))


@pytest.fixture
def lines(monkeypatch):
    """These and no others are measured."""
    return lambda *found: monkeypatch.setattr(contestants, "losses", lambda: list(found))


@pytest.fixture
def clock(monkeypatch):
    """What the clock shows."""
    return lambda *times: monkeypatch.setattr(timing, "in_turn", lambda runs, *more: list(times)[: len(runs)])


@pytest.mark.parametrize("more, unit", [([], "copy"), (["--linear", "16"], "three matmuls")])
def test_json_picture_and_table(more, unit, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    figures, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    arguments = [*TINY, *more, "--only", "eager", "--dtype", "bfloat16"]
    assert main([*arguments, "--json", str(figures), "--plot", str(picture)]) == 0
    content, results = of_results(figures)
    assert content["environment"]["torch"] == torch.__version__ and content["settings"]["dtype"] == "bfloat16"
    assert content["environment"]["command"].startswith("python -m xent_ops bench --device cpu")
    assert {"triton", "driver", "date", "peers"} <= content["environment"].keys()
    assert {unit, "xent eager"} <= results.keys()
    units = [result["ms"] for name, result in results.items() if name.startswith(unit)]
    for name, result in results.items():
        assert result["status"] == "ok" and 0 < result["low_ms"] <= result["ms"] <= result["high_ms"], result
        assert (result["peak_bytes"] is not None) == timing.measures_memory(CPU)
        if not name.startswith(unit):
            assert result["ratio"] == result["ms"] / min(units)
            assert all(error <= result["limits"][of] for of, error in result["errors"].items()) and result["errors"]
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    out, err = capsys.readouterr()
    assert cells(out)["xent eager"][-1].startswith("ok") and "34x64" in out
    assert f"1/{len(results)}  {unit}" in err


def test_every_line_of_ours_has_the_loss():
    logits, target, weight = torch.randn(6, 40), torch.randint(40, (6,)), torch.rand(40)
    target[1] = check.IGNORE_INDEX
    for one in contestants.losses():
        if one.kind == "ours":
            torch.testing.assert_close(one.load()(logits, target, weight), F.cross_entropy(logits, target))


def test_wrong_lines_are_told_and_not_timed(lines, monkeypatch, tmp_path, capsys):
    timed = []
    in_turn = timing.in_turn
    monkeypatch.setattr(timing, "in_turn", lambda runs, *more: timed.append(len(runs)) or in_turn(runs, *more))

    def raises(logits, target, weight):
        raise NotImplementedError("needs a GPU of its own")

    right = probe(contestants.torch_loss, "right")
    lines(right, probe(mean_over_all, "mean over all"), probe(raises, "raises"))
    assert main([*TINY, "--json", str(tmp_path / "x.json")]) == 1
    _, results = of_results(tmp_path / "x.json")
    wrong, error = results["mean over all"], results["raises"]
    assert results["right"]["status"] == "ok" and timed == [1]
    assert wrong["status"] == "wrong" and wrong["ms"] is None and wrong["ratio"] is None
    assert error["status"] == "error" and error["note"] == "NotImplementedError: needs a GPU of its own"
    out = capsys.readouterr().out
    assert "WRONG: relative error of loss" in out and "needs a GPU of its own" in out
    lines(right, probe(raises, "raises", "peer"))  # whose failures are its own
    assert main(TINY) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "damage",
    [
        lambda loss, grad, target: loss.mul_(1.05),
        lambda loss, grad, target: grad.mul_(1.05),
        lambda loss, grad, target: grad[20].mul_(1.1),  # one row
        lambda loss, grad, target: grad[5].scatter_(0, target[5:6], 0.0),  # one target
        lambda loss, grad, target: grad[16].add_(1e-30),  # an ignored row
        lambda loss, grad, target: grad[3, 3].fill_(math.nan),
        lambda loss, grad, target: grad.copy_(grad.roll(1, 0)),
    ],
    ids=["loss", "scale", "row", "target", "ignored", "nan", "shifted"],
)
def test_the_check_sees(damage, dtype, monkeypatch):
    problem, one = Loss(Shape(34, 64), dtype, CPU), probe(contestants.torch_loss_upcast)
    good = problem.bind(one)()
    assert problem.check(good, one).ok
    bad = Outputs(good.loss.clone(), (good.grads[0].clone(),))
    damage(bad.loss, bad.grads[0], problem.target)
    assert not problem.check(bad, one).ok
    whole = problem.check(good, one)
    monkeypatch.setattr(check, "CHUNK", 5 * 64)
    parts = problem.check(good, one)
    assert parts.ok and math.isclose(whole.errors["gradient"], parts.errors["gradient"])


@pytest.mark.parametrize("weighted", [False, True])
def test_terms_that_cancel_are_no_error(weighted):
    """p_j - e/V of two classes is nearly zero in some rows of many. The check still sees errors of 1e-4."""
    options = check.Options(weighted=weighted, label_smoothing=0.1)

    def loss(logits, target, weight):
        return F.cross_entropy(logits, target, weight if weighted else None, label_smoothing=0.1)

    problem, one = Loss(Shape(20000, 2), torch.float32, CPU), probe(loss, options=options)
    good = problem.bind(one)()
    assert problem.check(good, one).ok
    bad = good.grads[0].clone()
    off_target = bad.scatter(1, problem.target.clamp(min=0)[:, None], 0.0).abs()
    row = int(off_target.amax(1).argmax())
    for place in (off_target[row].argmax(), problem.target[row]):
        wrong = bad.clone()
        wrong[row, place] *= 1 + 1e-4
        assert not problem.check(Outputs(good.loss, (wrong,)), one).ok


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "damage",
    [
        lambda loss, hidden, matrix: loss.mul_(1.02),
        lambda loss, hidden, matrix: hidden.mul_(1.05),
        lambda loss, hidden, matrix: hidden[20].mul_(1.5),  # one row
        lambda loss, hidden, matrix: hidden[16].add_(1e-30),  # an ignored row
        lambda loss, hidden, matrix: matrix.mul_(1.05),
        lambda loss, hidden, matrix: matrix[3, 3].fill_(math.nan),
    ],
    ids=["loss", "hidden", "row", "ignored", "matrix", "nan"],
)
def test_the_check_of_a_head_sees(damage, dtype):
    problem, one = Head(Shape(34, 64), dtype, CPU, 16), probe(contestants.unfused_torch)
    good = problem.bind(one)()
    assert problem.check(good, one).ok
    assert problem.check(Outputs(good.loss, ()), one).ok  # a forward alone
    bad = Outputs(good.loss.clone(), tuple(grad.clone() for grad in good.grads))
    damage(bad.loss, *bad.grads)
    assert not problem.check(bad, one).ok


def test_the_reference_of_a_head(monkeypatch):
    """By chunks as at once; targets and options are told apart."""
    problem = Head(Shape(34, 64), torch.float32, CPU, 16)
    whole = problem.expected()
    problem.use_targets(1)
    assert not torch.allclose(problem.expected().matrix, whole.matrix)
    problem.use_targets(0)
    assert problem.expected() is whole
    capped = check.Options(softcap=2.0)
    assert not torch.allclose(problem.expected(capped).matrix, whole.matrix)
    loss = probe(lambda x, w, t: xent_ops.cross_entropy(x @ w.T, t, softcap=2.0), options=capped)
    assert problem.check(problem.bind(loss)(), loss).ok
    monkeypatch.setattr(check, "CHUNK", 5 * 64)
    for one, other in zip(whole, problem._reference(check.PLAIN), strict=True):
        torch.testing.assert_close(one, other)


def test_a_fraction_of_the_rows_is_ignored(tmp_path, capsys):
    for fraction, number in ((0.0, 0), (0.5, 17), (0.9, 31), (0.999, 33)):  # never the first row
        problem = Loss(Shape(34, 64), torch.float32, CPU, fraction)
        assert [int((target == check.IGNORE_INDEX).sum()) for target in problem.targets] == [number] * 2
        assert all(target[0] != check.IGNORE_INDEX for target in problem.targets)
    figures = tmp_path / "bench.json"
    for more in ([], ["--linear", "16"]):
        assert main([*TINY, "--only", "xent eager", "--ignored", "0.9", "--json", str(figures), *more]) == 0
        assert json.loads(figures.read_text())["settings"]["ignored"] == 0.9
    with pytest.raises(SystemExit):
        main([*TINY, "--ignored", "1"])
    assert "'1' is not a fraction of the rows" in capsys.readouterr().err


def test_unsteady_figures_are_marked(lines, clock, capsys, tmp_path):
    unit = probe(lambda x, *_: Outputs(x, ()), "copy", unit=COPY)
    lines(unit, probe(contestants.torch_loss, "first", against=COPY))
    for of_unit, of_first in ((STEADY, STEADY), (UNSTEADY, STEADY), (STEADY, UNSTEADY)):
        clock(of_unit, of_first)
        assert main([*TINY, "--json", str(tmp_path / "x.json")]) == 0
        out = capsys.readouterr().out
        first, marked = of_first == UNSTEADY, UNSTEADY in (of_unit, of_first)
        assert cells(out)["first"][:2] == ["~" * first + "1.0000", "~" * marked + "1.000"]
        assert ("~ unsteady: half of the samples" in out) == marked
        result = of_results(tmp_path / "x.json")[1]["first"]
        assert result["unsteady"] == ["ms"] * first + ["ratio"] * marked
        assert (result["ms"], result["low_ms"], result["high_ms"]) == of_first


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
        row = cells(out)["first"]
        assert (row[0] == "~1.0000" and "ok: the machine was busy" in row[-1]) == busy


def test_samples_that_differ_are_doubted():
    steady = timing.Times.of([1.0, 1.1, 1.0, 1.2, 1.1])
    assert not steady.unsteady and steady.doubt == ""
    times = timing.Times.of([1.0, 3.0, 1.0, 3.0, 2.0])
    assert times == (2.0, 1.0, 3.0) and times.unsteady and "1.0000 to 3.0000 ms" in times.doubt


def test_long_blocks_in_a_random_order(monkeypatch):
    """In each round every run has calls that are not timed, and then those that are. An error is that of its run."""
    monkeypatch.setattr(timing, "LEAST_CALLS", 10)
    order, restored = [], []
    error = RuntimeError("broken later")

    def breaks():
        if order.count("c") == 20:
            raise error
        order.append("c")

    runs = [
        (lambda: order.append("a"), lambda: restored.append("a")),
        (lambda: order.append("b"), None),
        (breaks, None),
    ]
    first, second, third = timing.in_turn(runs, 1e-6, timing.Clock(CPU))
    assert third is error and first.ms > 0 and second.ms > 0
    blocks = re.findall(r"a{18}|b{18}", "".join(order[18:]).replace("c", ""))
    assert [blocks.count(name * 18) for name in "ab"] == [timing.ROUNDS] * 2
    assert len({tuple(blocks[at : at + 2]) for at in range(0, len(blocks), 2)}) == 2  # both orders
    assert len(restored) == order.count("a")


def test_a_row_of_calls(monkeypatch):
    calls = []
    (ms,) = timing.Clock(CPU, row=True).block(lambda: calls.append(1), None, 7)
    assert len(calls) == 7 and 0 < ms < 1
    assert main([*TINY, "--eager", "--only", "xent eager"]) == 0


def run_twice(lines, clock, tmp_path, before, now, *options):
    """The same lines, measured at other times."""
    for times, more in ((before, ["--json"]), (now, [*options, "--compare"])):
        lines(*(probe(contestants.torch_loss, name) for name in ("faster", "same", "slower")))
        clock(*times)
        assert main([*TINY, *more, str(tmp_path / "before.json")]) == 0


def test_a_run_is_compared_with_an_earlier_one(lines, clock, tmp_path, capsys):
    before = [timing.Times(1.0, 0.9, 1.1)] * 3
    now = [timing.Times(0.8, 0.7, 0.85), timing.Times(1.05, 1.0, 1.2), timing.Times(1.3, 1.2, 1.4)]
    run_twice(lines, clock, tmp_path, before, now)
    out = capsys.readouterr().out
    found = cells(out[out.index("Beside ") :])
    assert [*found["34x64: faster"][:3], found["34x64: faster"][-1]] == ["1.0000", "0.8000", "0.800", "faster"]
    assert found["34x64: same"][-1] == "same" and found["34x64: slower"][-1] == "slower"
    assert "not measured alike" not in out


def test_what_was_not_measured_alike_is_said(lines, clock, tmp_path, capsys):
    run_twice(lines, clock, tmp_path, [STEADY] * 3, [UNSTEADY] * 3, "--ignored", "0.5")
    out = capsys.readouterr().out
    assert "not measured alike: ignored was None, is 0.5" in out
    found = cells(out[out.index("Beside ") :])["34x64: same"]
    assert found[2] == "~1.000" and found[-1] == "unsteady"
    content = json.loads((tmp_path / "before.json").read_text())
    first, _, third = content["results"]
    first["status"], third["variant"] = "wrong", "another"
    content["environment"]["torch"] = "2.0"
    (tmp_path / "before.json").write_text(json.dumps(content))
    clock(*[STEADY] * 3)
    assert main([*TINY, "--compare", str(tmp_path / "before.json")]) == 0
    out = capsys.readouterr().out
    verdicts = {name: rest[-1] for name, rest in cells(out[out.index("Beside ") :]).items()}
    assert verdicts["34x64: faster"] == "was wrong, is ok"
    assert verdicts["34x64: slower"] == "new" and verdicts["34x64: another"] == "not measured now"
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


def test_a_table_can_be_pasted():
    text = report.as_markdown(["variant", "ms", "status"], [["a|b", "~1.5", "ok"], ["a long name", "-", "ERROR: no"]])
    assert text == (
        "| variant     |   ms | status |\n"
        "| --- | ---: | --- |\n"
        "| a\\|b        | ~1.5 | ok |\n"
        "| a long name |    - | ERROR: no |\n"
    )


def test_peers_that_are_missing_are_left_out(monkeypatch, capsys):
    peers = (contestants.Peer(("a-peer",), "no_such_module", lambda: None, also=(("json", "json"),)),)
    monkeypatch.setattr(contestants, "PEERS", peers)
    assert main([*TINY, "--only", "xent eager,a-peer"]) == 0
    out, err = capsys.readouterr()
    assert "a-peer is not installed, and left out" in err and "not installed: a-peer (a-peer)" in out
    with pytest.raises(SystemExit):
        main([*TINY, "--only", "a-peer"])
    assert "none of these is installed" in capsys.readouterr().err


@pytest.mark.parametrize("version", ["apply", "asks", "warns"])
def test_transformer_engine_of_every_version_is_called_without_synchronisation(monkeypatch, version):
    """An old one looks at the gradient on the host, unless told not to; a new one warns of being told."""
    losses = []

    def mean(inp, target, label_smoothing, reduce_loss, dist_process_group, ignore_idx):
        losses.append(F.cross_entropy(inp[0], target[0], ignore_index=ignore_idx, label_smoothing=label_smoothing))
        assert reduce_loss and dist_process_group is None
        return losses[-1]

    def apply(*args, **kwargs):
        assert args[6:] == (True,) and not kwargs
        return mean(*args[:6])

    def asks(inp, target, a, b, c, d, is_cg_capturable=False, *, _input=None):
        assert is_cg_capturable
        return mean(inp, target, a, b, c, d)

    def warns(inp, target, a, b, c, d, is_cg_capturable=False, *, overwrite_input=False, _input=None):
        assert not is_cg_capturable
        return mean(inp, target, a, b, c, d)

    function = {"apply": apply, "asks": asks, "warns": warns}[version]
    module = types.SimpleNamespace(parallel_cross_entropy=function)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.cross_entropy", module)
    logits, target = torch.randn(3, 5), torch.tensor([1, check.IGNORE_INDEX, 4])
    assert contestants._transformer_engine()(logits, target, None) is losses[0]


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
        (["--json", "no/such/folder/x.json"], "there is no folder"),
        (["--json", "."], "cannot be written"),
        (["--plot", "figures.xyz"], "the name has to end in one of .png"),
        (["--shapes", f"1x{2**63}"], "is not a shape"),
        (["--only", ","], "name at least one line"),
        (["--linear", "0"], "not a whole number above 0"),
    ],
)
def test_refusals(arguments, text, capsys):
    if "--plot" in arguments:
        pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    with pytest.raises(SystemExit) as stopped:
        main([*TINY, *arguments])
    assert stopped.value.code == 2
    assert text in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused_first(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stopped:
        main([*TINY, "--plot", str(tmp_path / "x.png")])
    assert stopped.value.code == 2 and "--plot needs matplotlib" in capsys.readouterr().err


@pytest.mark.skipif(not timing.measures_memory(CPU), reason="needs Linux and a writable /proc/self/clear_refs")
def test_peak_memory_on_the_cpu():
    """Freed tensors are not counted, whatever the allocator kept of them; gradients are in the one figure alone."""

    class Sized(problems.Problem):
        def inputs(self):
            return (torch.ones(1),)

        def bind(self, contestant):
            def step():
                passing = torch.ones(4 << 18)  # 4 MiB
                return Outputs(passing.sum(), (torch.ones(16 << 18), torch.ones(1)))

            step()
            return step

    result = measure.Result("", "", "")
    settings = measure.Settings(graph=False, budget_ms=1)
    measure._prepared(Sized(Shape(2, 3), torch.float32, CPU), probe(None, unit="nothing"), settings, result)
    assert 20 << 20 <= result.peak_bytes < 24 << 20
    assert result.peak_bytes - result.extra_bytes == (16 << 20) + 4


@pytest.mark.gpu
def test_graphs_and_memory_on_a_gpu(tmp_path):
    """In CUDA graphs by default, replayed on other targets; a head needs a chunk of the logits and the gradients."""
    common = ["bench", "--budget", "5", "--only", "xent", "--json", str(tmp_path / "x.json")]
    assert main([*common, "--shapes", "512x32000"]) == 0
    for result in of_results(tmp_path / "x.json")[1].values():
        assert result["mode"] == "graph" and result["ms"] > 0
        if result["kind"] == "ours":
            assert result["extra_bytes"] < 0.1 * 512 * 32000 * 2, result
    assert main([*common, "--shapes", "8192x32000", "--linear", "256"]) == 0
    for result in of_results(tmp_path / "x.json")[1].values():
        assert result["mode"] == "graph", result
        assert result["kind"] != "ours" or result["peak_bytes"] < 300 << 20, result  # all logits: 500 MiB


@pytest.mark.gpu
def test_what_synchronises_is_timed_by_calls(lines, tmp_path):
    def synchronises(logits, target, weight):
        return F.cross_entropy(logits.float(), target) * int((target >= 0).any().item())

    lines(probe(synchronises, kind="peer"), Contestant("after", "ours", contestants.own))
    assert main(["bench", "--budget", "5", "--shapes", "64x4096", "--json", str(tmp_path / "x.json")]) == 0
    _, results = of_results(tmp_path / "x.json")
    probed = results["probe"]
    assert probed["status"] == "ok" and probed["mode"] == "calls" and "cannot be captured" in probed["note"]
    assert results["after"]["mode"] == "graph"
