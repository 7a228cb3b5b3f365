"""``python -m xent_ops bench --linear`` on the CPU with tiny shapes: figures mean nothing, the check and reports must."""

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F

import xent_ops
from xent_ops.__main__ import main
from xent_ops.bench import distillation, linear_cases, linear_problem, timing, token_loss
from xent_ops.bench.linear_cases import LinearVariant
from xent_ops.bench.linear_problem import LinearProblem
from xent_ops.bench.outputs import Outputs
from xent_ops.bench.sizes import HeadShape

CPU = torch.device("cpu")
TINY = ["--device", "cpu", "--budget", "1", "--linear", "16"]


def bench(*arguments):
    return main(["bench", *TINY, *arguments])


def of_results(path):
    content = json.loads(path.read_text())
    return content, {result["variant"]: result for result in content["results"]}


def probe(loss, **options):
    return LinearVariant("probe", "ours", lambda: loss, **options)


def mean_over_all(hidden, matrix, target):
    return F.cross_entropy(F.linear(hidden, matrix), target, reduction="sum") / len(target)


def test_json_png_and_table(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    figures, picture, again = tmp_path / "x.json", tmp_path / "x.png", tmp_path / "again.png"
    arguments = ["--shapes", "34x64", "--dtype", "bfloat16", "--only", "xent eager,xent float32 dW,xent forward"]
    assert bench(*arguments, "--json", str(figures), "--plot", str(picture)) == 0
    content, results = of_results(figures)
    assert content["settings"]["linear"] == [16] and content["settings"]["dtype"] == "bfloat16"
    ours = ["xent eager", "xent float32 dW", "xent forward"]
    assert list(results) == ["three products", "one product", *ours, "three products again"]
    for name, result in results.items():
        assert result["status"] == "ok" and result["ms"] > 0 and result["shape"] == [34, 64, 16], result
        other = {"xent forward": "one product", "three products": None, "one product": None}.get(name, "three products")
        assert result["ratio"] == (other and result["ms"] / results[other]["ms"])
        assert (result["head_error"] is not None) == (name in ours[:2])
    assert 0 < results["xent eager"]["hidden_error"] < results["xent eager"]["tolerance"]
    assert main(["bench", "--redraw", str(figures), "--plot", str(again)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    out, err = capsys.readouterr()
    assert "34x64x16 bfloat16" in out and "dW error" in out
    assert "cut-cross-entropy" in out  # installed or not
    assert ("peak memory is not measured on cpu" in err) == (not timing.measures_memory(CPU))
    assert ("peak MiB" in out) == timing.measures_memory(CPU)


def test_chunk_rows_and_hidden_sizes(tmp_path, capsys):
    """A line for each number of rows, and in the end a table over all shapes."""
    figures = tmp_path / "x.json"
    arguments = ["--linear", "16,8", "--shapes", "18x64,9x32", "--chunk-rows", "5,18", "--only", "xent eager"]
    assert bench(*arguments, "--json", str(figures)) == 0
    content = json.loads(figures.read_text())
    assert {tuple(result["shape"]) for result in content["results"]} == {
        (rows, classes, hidden) for rows, classes in ((18, 64), (9, 32)) for hidden in (16, 8)
    }
    names = ["three products", "xent eager 5", "xent eager 18", "three products again"]
    assert [result["variant"] for result in content["results"]] == 4 * names
    lines = capsys.readouterr().out.splitlines()
    (start,) = [number for number, line in enumerate(lines) if line.replace(" ", "") == "||5|18|"]
    assert lines[start - 2].startswith("xent eager: times of the products")
    shapes = [line.split(" |")[0].rstrip() for line in lines[start + 2 : start + 6]]
    assert shapes == ["| 18x64x16", "| 9x32x16", "| 18x64x8", "| 9x32x8"]


@pytest.mark.slow  # Inductor compiles five steps with a C++ compiler
def test_compiled_and_of_torch(tmp_path):
    """auto_chunker is refused where it leaves the graph as it is."""
    only = "xent compiled,unfused,F.linear,auto_chunker 4"
    of_torch, _ = linear_cases._from_torch()
    if not any(variant.name.startswith("F.linear") for variant in of_torch):
        only = only.replace("F.linear,", "")
    assert bench("--shapes", "64x96", "--only", only, "--json", str(tmp_path / "x.json")) == 0
    _, results = of_results(tmp_path / "x.json")
    assert {"xent compiled", "unfused xent compiled", "unfused F compiled", "auto_chunker 4"} <= results.keys()
    assert {result["status"] for result in results.values()} == {"ok"}, results
    assert bench("--shapes", "1x96", "--only", "auto_chunker 4", "--json", str(tmp_path / "x.json")) == 0
    _, results = of_results(tmp_path / "x.json")
    assert results["auto_chunker 4"]["status"] == "error"


def test_wrong_variants_and_missing_peers_are_told(monkeypatch, tmp_path, capsys):
    probes = [LinearVariant("mean over all", "peer", lambda: mean_over_all), probe(linear_cases.unfused_torch)]
    monkeypatch.setattr(linear_cases, "variants", lambda *arguments: (probes, ["a-peer: not installed"]))
    assert bench("--shapes", "34x64", "--json", str(tmp_path / "x.json")) == 0
    _, results = of_results(tmp_path / "x.json")
    wrong = results["mean over all"]
    assert wrong["status"] == "wrong" and wrong["ms"] is None and wrong["ratio"] is None
    assert results["probe"]["status"] == "ok"
    out, err = capsys.readouterr()
    assert "WRONG" in out and "left out: a-peer: not installed" in err
    probes[0] = probe(mean_over_all)
    assert bench("--shapes", "34x64") == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "damage",
    [
        lambda loss, hidden, matrix: loss.mul_(1.02),
        lambda loss, hidden, matrix: hidden.mul_(1.05),
        lambda loss, hidden, matrix: hidden[20].mul_(1.5),  # one row
        lambda loss, hidden, matrix: hidden[16].add_(1e-30),  # an ignored row
        lambda loss, hidden, matrix: matrix.mul_(1.05),
        lambda loss, hidden, matrix: matrix[3, 3].fill_(float("nan")),
    ],
    ids=["loss", "hidden", "row", "ignored", "matrix", "nan"],
)
def test_the_check_sees(damage, dtype):
    problem = LinearProblem(HeadShape(34, 64, 16), dtype, CPU)
    variant = probe(linear_cases.unfused_torch)
    outputs = problem.bind(variant)()
    assert problem.check(outputs, variant).ok
    outputs = Outputs(outputs.loss.clone(), tuple(grad.clone() for grad in outputs.grads))
    damage(outputs.loss, *outputs.grads)
    assert not problem.check(outputs, variant).ok


def test_the_check_of_a_forward_alone():
    problem = LinearProblem(HeadShape(34, 64, 16), torch.float32, CPU)
    for loss, right in ((xent_ops.linear_cross_entropy, True), (mean_over_all, False)):
        variant = probe(loss, forward_alone=True)
        outputs = problem.bind(variant)()
        assert outputs.grads == () and problem.check(outputs, variant).ok == right


def test_chunks_change_nothing_and_targets_are_told_apart(monkeypatch):
    problem = LinearProblem(HeadShape(34, 64, 16), torch.float32, CPU)
    whole = problem.expected()
    problem.use_targets(1)
    assert not torch.allclose(problem.expected().matrix, whole.matrix)
    problem.use_targets(0)
    assert problem.expected() is whole
    monkeypatch.setattr(linear_problem, "CHUNK_ELSEWHERE", 5 * 64)
    parts = problem._reference()
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.skipif(not timing.measures_memory(CPU), reason="needs Linux and a writable /proc/self/clear_refs")
def test_peak_memory_on_the_cpu():
    """Freed tensors are not counted, whatever the allocator kept of them."""

    def run():
        passing = torch.ones(4 << 18)  # 4 MiB
        return Outputs(passing.sum(), (torch.ones(16 << 18), torch.ones(1)))

    run()
    memory = timing.peak_memory(run, (), CPU)
    assert 20 << 20 <= memory.beyond_inputs < 24 << 20
    assert memory.beyond_inputs - memory.beyond_gradients == (16 << 20) + 4


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--step", "8"], "leave out --step"),
        (["--tails"], "leave out --tails"),
        (["--linear", "0"], "not a whole number above 0"),
        (["--chunk-rows", "x"], "not a whole number above 0"),
        (["--only", "nothing"], "here are xent eager, xent compiled"),
        (["--token-loss", "grpo", "--chunk-rows", "8"], "leave out --chunk-rows"),
        (["--token-loss", "ppo"], "invalid choice: 'ppo'"),
        (["--distillation", "8", "--token-loss", "grpo"], "leave out --chunk-rows and --token-loss"),
        (["--distillation", "8", "--beta", "2"], "'2' is not a number from 0 to 1"),
        (["--beta", "0.5"], "--beta is for --distillation"),
    ],
)
def test_refusals(arguments, text, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench(*arguments)
    assert stopped.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    "loss", ["clip", *(pytest.param(name, marks=pytest.mark.slow) for name in ("grpo", "weights"))]
)
def test_losses_of_tokens(loss, tmp_path):
    """Each way is right; the loss of one is wrong for the other."""
    figures = tmp_path / "x.json"
    arguments = ["--token-loss", loss, "--shapes", "34x64", "--dtype", "bfloat16", "--only", "eager,log-probs"]
    assert bench(*arguments, "--json", str(figures)) == 0
    content, results = of_results(figures)
    assert content["settings"]["token_loss"] == loss
    ours = ["xent token_weight eager"] * (loss == "weights") + ["xent token loss eager", "xent log-probs compiled"]
    assert list(results) == ["three products", *ours, "three products again"]
    assert all(result["status"] == "ok" for result in results.values())

    problem = token_loss.TokenProblem(loss, HeadShape(34, 64, 16), torch.float32, CPU)
    for of in token_loss.LOSSES:
        (variant,) = [variant for variant in token_loss.variants(of)[0] if variant.name == "xent token loss eager"]
        for which in (0, 1):
            problem.use_targets(which)
            assert problem.check(problem.bind(variant)(), variant).ok == (of == loss)


@pytest.mark.slow
def test_a_teachers_top_k(tmp_path):
    """Each way is right, for both targets; without the tail the loss is another."""
    figures = tmp_path / "x.json"
    arguments = ["--token-loss", "topk", "--shapes", "34x640", "--only", "eager,log-probs"]
    assert bench(*arguments, "--json", str(figures)) == 0
    _, results = of_results(figures)
    ours = ["xent target_probs eager", "xent log-probs compiled"]
    assert list(results) == ["three products", *ours, "three products again"]
    assert all(result["status"] == "ok" for result in results.values())

    problem = token_loss.problem("topk", HeadShape(34, 640, 16), torch.float32, CPU, ignored=0.2)
    (right, *_) = token_loss.variants("topk")[0]
    wrong = dataclasses.replace(
        right,
        load=lambda: (
            lambda hidden, matrix, _, ids, probs: xent_ops.linear_cross_entropy(hidden, matrix, ids, target_probs=probs)
        ),
    )
    for which in (0, 1):
        problem.use_targets(which)
        assert problem.check(problem.bind(right)(), right).ok and not problem.check(problem.bind(wrong)(), wrong).ok


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_distillation(beta, tmp_path, capsys):
    """Each way is right, for both targets, and in multiples of four products; another beta is wrong."""
    figures = tmp_path / "x.json"
    arguments = ["--distillation", "24", "--beta", str(beta), "--shapes", "34x64", "--only", "xent eager,xent skipping"]
    assert bench(*arguments, "--dtype", "bfloat16", "--json", str(figures)) == 0
    content, results = of_results(figures)
    assert content["settings"]["distillation"] == 24 and content["settings"]["beta"] == beta
    assert list(results) == ["four products", "xent eager", "xent skipping", "four products again"]
    assert all(result["status"] == "ok" for result in results.values()), results
    assert results["xent eager"]["ratio"] == results["xent eager"]["ms"] / results["four products"]["ms"]
    assert f"distillation of a teacher of 24, beta {beta}; 1 = " in capsys.readouterr().out

    problem = distillation.DistillationProblem((24, beta), HeadShape(34, 64, 16), torch.float32, CPU)
    for of in (beta, 0.25):
        for variant in distillation.variants(of)[0][:5]:
            variant = dataclasses.replace(variant, compiled=False)
            for which in (0, 1):
                problem.use_targets(which)
                assert problem.check(problem.bind(variant)(), variant).ok == (of == beta), variant.name


@pytest.mark.parametrize("argument", ["--chunk-rows", "--distillation"])
def test_what_is_of_linear(argument, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--device", "cpu", argument, "8"])
    assert "for --linear" in capsys.readouterr().err


@pytest.mark.gpu
def test_graphs_and_memory_on_a_gpu(tmp_path):
    """A chunk of the logits and the gradients, and not more: 256 x 32000 and 32000 x 256 of 2 bytes are 15.6 MiB each."""
    arguments = ["--budget", "5", "--linear", "256", "--shapes", "2048x32000", "--chunk-rows", "256"]
    only = "xent eager,xent forward"
    assert main(["bench", *arguments, "--only", only, "--json", str(tmp_path / "x.json")]) == 0
    _, results = of_results(tmp_path / "x.json")
    assert {result["mode"] for result in results.values()} == {"graph"}
    assert results["xent eager 256"]["peak_mib"] < 3 * 15.7
    assert results["xent forward 256"]["peak_mib"] < 1.5 * 15.7
