"""``python -m xent_ops bench``, in this process on the CPU with tiny shapes: figures mean nothing, reports must."""

import json
import math
import subprocess
import sys
import types

import pytest
import torch
import torch.nn.functional as F

from xent_ops.__main__ import main
from xent_ops.bench import cases, check, plot, report, timing
from xent_ops.bench.outputs import Outputs
from xent_ops.bench.problems import LossProblem, StepProblem
from xent_ops.bench.sizes import Shape

CPU = torch.device("cpu")
TINY = ["--device", "cpu", "--budget", "1"]


def bench(*arguments):
    return main(["bench", *TINY, *arguments])


def variant(function, **options):
    return cases.Variant("probe", "peer", lambda: function, **options)


def of_results(path):
    content = json.loads(path.read_text())
    return content, {(*result["shape"], result["variant"]): result for result in content["results"]}


def test_json_png_and_table(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    figures, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    arguments = ["--shapes", "34x64,20x96,18x128", "--only", "eager,in-place", "--dtype", "bfloat16"]
    assert bench(*arguments, "--json", str(figures), "--plot", str(picture)) == 0
    content, results = of_results(figures)
    assert content["environment"]["torch"] == torch.__version__
    assert content["environment"]["command"].startswith("python -m xent_ops bench --device cpu")
    assert {"triton", "driver", "date", "peers"} <= content["environment"].keys()
    names = {"xent eager", "xent in-place", "xent one pass in-place", "F eager", "F eager float32"}
    assert results.keys() == {(n, v, name) for n, v in ((34, 64), (20, 96), (18, 128)) for name in names}
    for result in results.values():
        assert result["status"] == "ok", result
        assert 0 < result["low_ms"] <= result["ms"] <= result["high_ms"] and result["copies"] > 0
        assert result["grad_error"] <= result["tolerance"]
    copy = {tuple(entry["shape"]): entry["ms"] for entry in content["copies"]}
    one = results[34, 64, "F eager"]
    assert math.isclose(one["copies"], one["ms"] / copy[34, 64])
    assert results[34, 64, "xent in-place"]["overwrites_input"] and not one["overwrites_input"]
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    out, err = capsys.readouterr()
    assert "34x64 bfloat16" in out and "xent in-place" in out
    assert err.startswith("15 measurements: about 30 s")  # five variants of three shapes, said first


@pytest.mark.parametrize("shapes", ["34x64,20x96,18x128", "34x64"])  # lines, bars
def test_a_run_is_drawn_again(capsys, tmp_path, shapes):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    figures, first, again, taller = (tmp_path / name for name in ("f.json", "1.png", "2.png", "3.png"))
    only = ["--shapes", shapes, "--only", "xent eager,F eager"]
    assert bench(*only, "--json", str(figures), "--plot", str(first)) == 0
    assert main(["bench", "--redraw", str(figures), "--plot", str(again)]) == 0
    assert first.read_bytes() == again.read_bytes()
    content = json.loads(figures.read_text())
    for result in content["results"]:
        result["peak_logits"] = 1.0
    figures.write_text(json.dumps(content))
    assert main(["bench", "--redraw", str(figures), "--plot", str(taller)]) == 0

    def height(path):
        return int.from_bytes(path.read_bytes()[20:24], "big")

    assert height(taller) > 1.5 * height(again)  # the memory below the times
    for arguments, message in (
        (["--redraw", str(figures)], "add --plot FILE.png"),
        (["--redraw", str(first), "--plot", str(again)], "not what --json writes"),
        (["--redraw", str(tmp_path / "none"), "--plot", str(again)], "none: No such file or directory"),
        (["--redraw", str(figures), "--plot", str(again), "--memory"], "leave out --memory"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["bench", *arguments])
        assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_no_two_lines_look_alike():
    variants = [(variant.name, variant.kind) for variant in cases.losses(torch.bfloat16, CPU, True)]
    variants += [(f"peer {index}", "peer") for index in range(12)]
    looks = [tuple(style.values()) for style in plot._styles(variants).values()]
    assert len(set(looks)) == len(looks) == len(variants)


def test_peers_that_are_missing_are_left_out(monkeypatch, capsys):
    monkeypatch.setattr(cases, "PEERS", (cases.Peer(("a-peer",), "no_such_module", lambda: None),))
    assert bench("--shapes", "34x64", "--only", "xent eager,a-peer") == 0
    assert "a-peer is not installed, and left out" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench("--shapes", "34x64", "--only", "a-peer")
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
    assert cases._transformer_engine()(logits, target, None) is losses[0]
    torch.testing.assert_close(losses[0], F.cross_entropy(logits, target, ignore_index=check.IGNORE_INDEX))


def test_a_fraction_of_the_rows_is_ignored(tmp_path, capsys):
    for fraction, number in ((0.0, 0), (0.5, 17), (0.9, 31), (0.999, 33)):  # never the first row
        problem = LossProblem(Shape(34, 64), torch.float32, CPU, ignored=fraction)
        assert [int((target == check.IGNORE_INDEX).sum()) for target in problem.targets] == [number] * 2
        assert all(target[0] != check.IGNORE_INDEX for target in problem.targets)
    figures = tmp_path / "bench.json"
    for name, *more in (("xent eager",), ("xent in-place", "--step", "16"), ("xent eager", "--linear", "16")):
        arguments = ("--shapes", "34x64", "--only", name, "--ignored", "0.9", "--json", str(figures))
        assert bench(*arguments, *more) == 0
        assert json.loads(figures.read_text())["settings"]["ignored"] == 0.9
    with pytest.raises(SystemExit):
        bench("--ignored", "1")
    assert "'1' is not a fraction of the rows" in capsys.readouterr().err


def test_samples_that_differ_are_doubted():
    steady = timing.Times.of([1.0, 1.1, 1.0, 1.2, 1.1])
    assert not steady.unsteady and steady.doubt == ""
    times = timing.Times.of([1.0, 3.0, 1.0, 3.0, 2.0])
    assert times == (2.0, 1.0, 3.0) and times.unsteady and "1.0000 to 3.0000 ms" in times.doubt


@pytest.mark.slow
def test_compiled_variants(tmp_path):
    """The options as plain torch spells them are checked against the same reference, and rows may be dynamic."""
    figures = tmp_path / "bench.json"
    only = "F compiled options,xent compiled dynamic"
    assert bench("--shapes", "34x64", "--only", only, "--dynamic", "--json", str(figures)) == 0
    _, results = of_results(figures)
    names = {"F compiled options", "xent compiled dynamic"}
    assert {name: results[34, 64, name]["status"] for name in names} == dict.fromkeys(names, "ok")


@pytest.mark.slow  # Inductor compiles four steps with a C++ compiler
def test_tails(tmp_path, capsys):
    """Steps with softcap and scale before the loss; the pass says what it left alone."""
    figures = tmp_path / "tails.json"
    only = "Gemma 2,shift: pass"
    assert bench("--tails", "--shapes", "34x64", "--step", "8", "--only", only, "--json", str(figures)) == 0
    content, results = of_results(figures)
    assert content["settings"]["tails"] and content["settings"]["dtype"] == "bfloat16"
    names = ["Gemma 2: F compiled", "Gemma 2: pass", "Gemma 2: own call", "shift: pass"]
    assert [name for *_, name in results] == names
    for result in results.values():
        assert result["status"] == "ok" and 0 < result["head_error"] <= result["tolerance"], result
    assert "left alone: add stands before it" in results[34, 64, "shift: pass"]["note"]
    assert "left alone" not in results[34, 64, "Gemma 2: pass"]["note"]
    assert "x Gemma 2: F compiled" in results[34, 64, "Gemma 2: pass"]["note"]
    assert "head error" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        bench("--tails", "--dynamic")
    assert "leave out --plot and --dynamic" in capsys.readouterr().err


def test_every_tail_says_what_its_options_say():
    from xent_ops.bench import tails

    logits, target = 20 * torch.randn(12, 32, dtype=torch.float64), torch.randint(32, (12,))
    target[3] = check.IGNORE_INDEX
    for tail in tails.TAILS:
        ours = cases.own(softcap=tail.softcap, logit_scale=tail.logit_scale)
        want, own = tail.loss(logits, target), ours(logits, target, None)
        torch.testing.assert_close(own, want, check_dtype=False, rtol=1e-5, atol=1e-6)


def test_plain_text_without_rich(monkeypatch, capsys):
    monkeypatch.setattr(report, "have", lambda module: module != "rich")
    assert bench("--shapes", "34x64", "--only", "F eager") == 0
    out, err = capsys.readouterr()
    assert "rich is not installed" in err and err.endswith("1/1 34x64  1/1  F eager\n")
    assert [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("| F")] == ["F eager"]


def test_plot_without_matplotlib_is_refused_first(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(report, "have", lambda module: module != "matplotlib")
    with pytest.raises(SystemExit) as stopped:
        bench("--plot", str(tmp_path / "x.png"))
    assert stopped.value.code == 2
    assert plot.MISSING in capsys.readouterr().err


def test_wrong_variants_are_told_and_not_timed(monkeypatch, tmp_path, capsys):
    clocked = []
    from xent_ops.bench import measure

    clock = measure._clock
    monkeypatch.setattr(measure, "_clock", lambda run, *rest: clocked.append(run) or clock(run, *rest))

    def raises(logits, target, weight):
        raise NotImplementedError("needs a GPU of its own")

    losses = {
        "right": lambda logits, target, weight: F.cross_entropy(logits, target),
        "mean over all": lambda logits, target, weight: F.cross_entropy(logits, target, reduction="sum") / len(target),
        "raises": raises,
    }
    probes = [cases.Variant(name, "ours", lambda loss=loss: loss) for name, loss in losses.items()]
    monkeypatch.setattr(cases, "losses", lambda *arguments: probes)
    assert bench("--shapes", "34x64", "--json", str(tmp_path / "x.json")) == 1
    _, results = of_results(tmp_path / "x.json")
    wrong, error = results[34, 64, "mean over all"], results[34, 64, "raises"]
    assert results[34, 64, "right"]["status"] == "ok"
    assert wrong["status"] == "wrong" and wrong["ms"] is None and wrong["copies"] is None
    assert error["status"] == "error" and error["note"] == "NotImplementedError: needs a GPU of its own"
    assert len(clocked) == 3  # two ways to copy, and what is right
    out = capsys.readouterr().out
    assert "WRONG" in out and "needs a GPU of its own" in out


def test_failing_peers_do_not_fail_the_command(monkeypatch):
    def broken():
        raise ImportError("no module named cutlass")

    monkeypatch.setattr(cases, "losses", lambda *arguments: [cases.Variant("a peer", "peer", broken)])
    assert bench("--shapes", "34x64") == 0


@pytest.mark.parametrize("text", ["8192", "8192x", "x32000", "8192*32000", "0x64", "64x1", "-1x64", "64x64,"])
def test_shapes_that_are_none(text, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench(f"--shapes={text}")
    assert stopped.value.code == 2
    assert "expected ROWSxCLASSES" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--only", "nothing"], "here are xent eager, xent compiled"),
        (["--graph"], "CUDA graphs need a CUDA device"),
        (["--device", "meta"], "needs cpu, cuda or xpu"),
        (["--dtype", "int8"], "bfloat16"),
        (["--json", "no/such/folder/x.json"], "there is no folder"),
        (["--json", "."], "cannot be written"),
        (["--plot", "figures.xyz"], "the name has to end in one of .png"),
        (["--shapes", f"1x{2**63}"], "is not a shape"),
        (["--only", ","], "name at least one variant"),
        (["--step", "0"], "not a whole number above 0"),
    ],
)
def test_refusals(arguments, text, capsys):
    if "--plot" in arguments:
        pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    with pytest.raises(SystemExit) as stopped:
        bench(*arguments)
    assert stopped.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "damage",
    [
        lambda grad, target: grad.mul_(1.05),
        lambda grad, target: grad[20].mul_(1.1),  # one row
        lambda grad, target: grad[5].scatter_(0, target[5:6], 0.0),  # one target
        lambda grad, target: grad[16].add_(1e-30),  # an ignored row
        lambda grad, target: grad[3, 3].fill_(math.nan),
        lambda grad, target: grad.copy_(grad.roll(1, 0)),
    ],
    ids=["scale", "row", "target", "ignored", "nan", "shifted"],
)
def test_the_check_sees(damage, dtype):
    problem = LossProblem(Shape(34, 64), dtype, CPU)
    good = problem.bind(variant(lambda x, t, w: F.cross_entropy(x.float(), t)))()
    assert problem.check(good, variant(None)).ok
    bad = good.grads[0].clone()
    damage(bad, problem.target)
    assert not problem.check(Outputs(good.loss, (bad,)), variant(None)).ok
    assert not problem.check(Outputs(good.loss * 1.05, good.grads), variant(None)).ok


def test_options_are_checked_against_their_own_reference():
    problem = LossProblem(Shape(34, 64), torch.float64, CPU)
    run = problem.bind(variant(cases._torch_options, options=cases.ALL_OPTIONS))
    # _torch_options is float32 inside, so a float64 tolerance finds it out ...
    assert not problem.check(run(), variant(None, options=cases.ALL_OPTIONS)).ok
    run = problem.bind(variant(cases._ours_options, options=cases.ALL_OPTIONS))
    # ... and ours is not; the plain loss is another.
    assert problem.check(run(), variant(None, options=cases.ALL_OPTIONS)).ok
    assert not problem.check(run(), variant(None, options=check.Options())).ok


def test_chunks_change_nothing(monkeypatch):
    problem = LossProblem(Shape(34, 64), torch.float32, CPU)
    outputs = problem.bind(variant(cases._torch))()
    whole = problem.check(outputs, variant(None))
    monkeypatch.setattr(check, "CHUNK", 5 * 64)
    parts = problem.check(outputs, variant(None))
    assert whole.ok and parts.ok and math.isclose(whole.grad_error, parts.grad_error)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_step(dtype, tmp_path):
    arguments = ["--step", "16", "--shapes", "34x64", "--only", "alone,xent", "--dtype", dtype]
    assert bench(*arguments, "--json", str(tmp_path / "x.json")) == 0
    _, results = of_results(tmp_path / "x.json")
    compiled, opaque = "xent compiled", "xent opaque backward"
    names = {"products alone", "xent in-place", "xent one pass in-place", compiled, opaque}
    assert {name for *_, name in results} == names
    assert {result["status"] for result in results.values()} == {"ok"}
    ours, other = results[34, 64, compiled], results[34, 64, opaque]
    assert math.isclose(ours["ratio"], ours["ms"] / other["ms"]) and other["ratio"] is None


def test_step_check_sees_either_gradient():
    problem = StepProblem(Shape(34, 64), torch.float32, CPU, 16)
    good = problem.bind(variant(cases._torch))()
    assert problem.check(good, variant(None)).ok
    hidden, matrix = good.grads
    assert not problem.check(Outputs(good.loss, (hidden * 1.01, matrix)), variant(None)).ok
    assert not problem.check(Outputs(good.loss, (hidden, matrix * 1.01)), variant(None)).ok


def test_importing_the_package_imports_none_of_it():
    code = (
        "import sys, xent_ops; "
        "print([name for name in sys.modules if name.startswith(('xent_ops.bench', 'xent_ops._doctor', "
        "'xent_ops._environment', 'rich', 'matplotlib'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "[]"


def test_every_variant_of_ours_has_the_loss():
    logits, target, weight = torch.randn(6, 40), torch.randint(40, (6,)), torch.rand(40)
    target[1] = check.IGNORE_INDEX
    ours = [variant for variant in cases.losses(torch.float32, CPU, dynamic=True) if variant.kind == "ours"]
    for one in (variant for variant in ours if variant.options == cases.PLAIN):
        leaf = logits.clone().requires_grad_()
        expected = F.cross_entropy(leaf, target)
        (right,) = torch.autograd.grad(expected, leaf)
        loss = one.load()(leaf * 1 if one.in_place else leaf, target, weight)
        loss, gradient = loss if one.gives_grad else (loss, *torch.autograd.grad(loss, leaf))
        torch.testing.assert_close((loss, gradient), (expected, right), msg=one.name)
    assert sum(one.gives_grad for one in ours) == 1


@pytest.mark.gpu
def test_graph_memory_and_step_on_a_gpu(tmp_path):
    """In CUDA graphs by default, replayed on other targets; ours need no buffer beside the gradient."""
    common = ["bench", "--budget", "5", "--memory", "--only", "xent", "--json", str(tmp_path / "x.json")]
    assert main([*common, "--shapes", "512x32000", "--dynamic"]) == 0
    _, results = of_results(tmp_path / "x.json")
    for result in results.values():
        assert result["mode"] == "graph" and result["ms"] > 0
        assert result["extra_logits"] < 0.1, result
    assert results[512, 32000, "xent in-place"]["peak_logits"] < 0.1
    assert main([*common, "--shapes", "512x32000", "--step", "256"]) == 0


@pytest.mark.gpu
def test_what_synchronises_is_timed_by_calls(monkeypatch, tmp_path):

    def synchronises(logits, target, weight):
        return F.cross_entropy(logits.float(), target) * int((target >= 0).any().item())

    probes = [cases.Variant("probe", "peer", lambda: synchronises), cases.Variant("after", "ours", cases.own)]
    monkeypatch.setattr(cases, "losses", lambda *arguments: probes)
    assert main(["bench", "--budget", "5", "--shapes", "64x4096", "--json", str(tmp_path / "x.json")]) == 0
    _, results = of_results(tmp_path / "x.json")
    probe = results[64, 4096, "probe"]
    assert probe["status"] == "ok" and probe["mode"] == "calls" and "cannot be captured" in probe["note"]
    assert results[64, 4096, "after"]["mode"] == "graph"
