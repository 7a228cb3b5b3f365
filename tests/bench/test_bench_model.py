"""``python -m xent_ops bench --model`` on the CPU with a tiny decoder: figures mean nothing, check and reports must."""

import json
import re

import pytest
import torch
import torch.nn.functional as F

import xent_ops
from xent_ops import inductor
from xent_ops.__main__ import main
from xent_ops.bench import cases, check, model, model_cases, model_problem, timing
from xent_ops.bench.model_cases import BODY, ModelVariant
from xent_ops.bench.model_problem import ModelProblem
from xent_ops.bench.outputs import Outputs
from xent_ops.bench.sizes import Sizes

CPU = torch.device("cpu")
SIZES = "layers=2,hidden=32,classes=64,tokens=16"
TINY = Sizes(layers=2, hidden=32, heads=4, kv_heads=2, feed_forward=128, classes=64)


def bench(*arguments, sizes=SIZES):
    return main(["bench", "--device", "cpu", "--budget", "1", "--model", sizes, *arguments])


def of_results(path):
    content = json.loads(path.read_text())
    return content, {result["variant"]: result for result in content["results"]}


@pytest.fixture
def eager(monkeypatch):
    """Inductor takes half a minute for a variant on a CPU."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


def mean_over_all(hidden, matrix, target):
    return F.cross_entropy(F.linear(hidden, matrix).float(), target, reduction="sum") / len(target)


def test_json_png_and_table(eager, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    figures, picture, again = tmp_path / "x.json", tmp_path / "x.png", tmp_path / "again.png"
    arguments = ["--only", "body,F compiled,xent linear", "--json", str(figures), "--plot", str(picture)]
    assert bench(*arguments, "--dtype", "bfloat16") == 0
    content, results = of_results(figures)
    assert content["settings"]["model"] == {"batch": 2, "tokens": 16, **TINY._asdict()}
    assert content["settings"]["dtype"] == "bfloat16" and content["settings"]["ignored"] is None
    qkv, out, feed_forward, norms = 32 * 64, 32 * 32, 3 * 32 * 128, 2 * 32
    assert content["parameters"] == 2 * 64 * 32 + 2 * (qkv + out + feed_forward + norms) + 32
    assert list(results) == [BODY, "F compiled", "xent linear"]
    for name, result in results.items():
        assert result["status"] == "ok" and result["shape"] == [2, 16, 2, 32, 64] and result["mode"] == "calls", result
        assert result["tokens_per_s"] == pytest.approx(32e3 / result["ms"])
        assert (result["loss"] is None) == (name == BODY)
        assert (result["extra_mib"] is None) == (not timing.measures_memory(CPU))
        head_ms = None if name == BODY else pytest.approx(result["ms"] - results[BODY]["ms"])
        assert result["head_ms"] == head_ms and result["ratio"] is None
    assert results["xent linear"]["loss"] == pytest.approx(results["F compiled"]["loss"], rel=1e-3)
    linear = results["xent linear"]
    assert 0 <= linear["head_error"] <= linear["grad_error"] <= linear["tolerance"]
    assert main(["bench", "--redraw", str(figures), "--plot", str(again)]) == 0
    assert picture.read_bytes() == again.read_bytes() and picture.read_bytes().startswith(b"\x89PNG\r\n")
    out = capsys.readouterr().out
    assert "whole step of 2 x 16 tokens, bfloat16; 2 layers of 32, 64 classes" in out and "tokens/s" in out


def test_ignored_targets_and_skipping(eager, tmp_path, capsys):
    arguments = ["--only", "body,F compiled,xent linear,skipping", "--ignored", "0.75"]
    assert bench(*arguments, "--json", str(tmp_path / "x.json")) == 0
    content, results = of_results(tmp_path / "x.json")
    assert content["settings"]["ignored"] == 0.75
    assert list(results) == [BODY, "F compiled", "xent linear", "xent skipping"]
    assert {result["status"] for result in results.values()} == {"ok"}, results
    skipping, plain = results["xent skipping"], results["xent linear"]
    assert skipping["loss"] == pytest.approx(results["F compiled"]["loss"], rel=1e-5)
    assert skipping["ratio"] == pytest.approx(skipping["head_ms"] / plain["head_ms"])
    assert re.search(r"head and loss ~?-?\d+\.\d+ x xent linear", " ".join(skipping["note"].split()))
    assert "head + loss ms" in capsys.readouterr().out
    assert bench("--only", "skipping") == 0  # without the body there is no difference
    assert "head + loss ms" not in capsys.readouterr().out


@pytest.mark.parametrize("fraction, ignored", [(None, 2), (0.75, 24), (0.0, 2)])
def test_ignored_positions(fraction, ignored):
    """The last one of a sequence has no next token, and is ignored first."""
    problem = ModelProblem(TINY, 2, 16, torch.float32, CPU, ignored=fraction)
    target, tokens = problem.target.view(2, 16), problem.tokens
    assert (target == check.IGNORE_INDEX).sum() == ignored
    assert (target[:, -1] == check.IGNORE_INDEX).all()
    counted = target[:, :-1] != check.IGNORE_INDEX
    assert torch.equal(target[:, :-1][counted], tokens[:, 1:][counted])


@pytest.mark.slow  # Inductor compiles a model with a C++ compiler
@pytest.mark.parametrize("name", ["xent pass", "xent found head"])
def test_the_pass_in_a_compiled_step(tmp_path, name):
    """Of one layer, by Inductor itself."""
    sizes = "layers=1,hidden=16,heads=2,kv_heads=1,feed_forward=16,classes=64,tokens=16"
    assert bench("--only", name, "--json", str(tmp_path / "x.json"), sizes=sizes) == 0
    _, results = of_results(tmp_path / "x.json")
    assert results[name]["status"] == "ok" and "left alone" not in results[name]["note"]
    assert [call.head for call in inductor.last_report().replaced] == [name == "xent found head"]


def test_peers_are_called_after_a_compiled_body(monkeypatch, tmp_path, capsys):
    """What is wrong has no time; of a peer, it is no failure."""
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled.append(function) or function)
    peers = [
        cases.Peer((name,), module, lambda loss=loss: loss)
        for name, module, loss in (
            ("right", "torch", model_cases.unfused_torch),
            ("wrong", "torch", mean_over_all),
            ("absent", "no_such_module", None),
        )
    ]
    monkeypatch.setattr(model_cases, "PEERS", tuple(peers))
    assert bench("--only", "right,wrong,absent", "--json", str(tmp_path / "x.json")) == 0
    _, results = of_results(tmp_path / "x.json")
    assert [type(function).__name__ for function in compiled] == ["Llama", "Llama"]
    assert results["right"]["status"] == "ok" and results["wrong"]["status"] == "wrong"
    assert results["wrong"]["ms"] is None and results["wrong"]["tokens_per_s"] is None
    out, err = capsys.readouterr()
    assert "WRONG" in out and "absent is not installed, and left out" in err
    monkeypatch.setattr(xent_ops, "linear_cross_entropy", mean_over_all)
    assert bench("--only", "xent linear") == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "damage",
    [
        lambda loss, head, early: loss.mul_(1.01),
        lambda loss, head, early: head.mul_(1.1),
        lambda loss, head, early: early.mul_(1.1),
        lambda loss, head, early: early[3, 3].fill_(float("nan")),
    ],
    ids=["loss", "head", "early", "nan"],
)
def test_the_check_sees(eager, damage, dtype):
    problem = ModelProblem(TINY, 2, 16, dtype, CPU)
    variant = ModelVariant("probe", "ours", lambda: xent_ops.linear_cross_entropy, compiled=True)
    outputs = problem.bind(variant)()
    assert problem.check(outputs, variant).ok
    assert not problem.check(outputs._replace(grads=outputs.grads[:-1]), variant).ok  # one weight has none
    damaged = Outputs(outputs.loss.clone(), outputs.grads)
    damage(damaged.loss, *outputs.grads[:2])
    assert not problem.check(damaged, variant).ok


def test_the_eager_step(monkeypatch):
    """By chunks as at once, and the gradients are those of training."""
    problem = ModelProblem(TINY, 2, 16, torch.float32, CPU)
    assert (problem.target == check.IGNORE_INDEX).sum() == 2
    assert torch.equal(problem.target[:15], problem.tokens[0, 1:])
    expected = problem.expected()
    assert problem.expected() is expected and problem.head.grad is None
    logits = problem.model.head(problem.model(problem.tokens))
    loss = F.cross_entropy(logits.flatten(0, 1), problem.target)
    whole = (loss, *torch.autograd.grad(loss, (problem.head, problem.early)))
    monkeypatch.setattr(model_problem, "CHUNK", 5 * 64)
    for parts, one, at_once in zip(problem._reference(), expected, whole, strict=True):
        torch.testing.assert_close(parts, one)
        torch.testing.assert_close(at_once, one, check_dtype=False)


@pytest.mark.parametrize(
    "arguments, sizes, text",
    [
        ([], "layer=4", "'layer=4' is not a size; expected KEY=NUMBER"),
        ([], "layer=4", "keys are batch, tokens, layers, hidden, heads, kv_heads, feed_forward, classes"),
        ([], "layers=0", "'layers=0' is not a size"),
        ([], "hidden=30", "hidden=30 is not a multiple of heads=4"),
        ([], "heads=4,kv_heads=3", "heads=4 is not a multiple of kv_heads=3"),
        ([], "hidden=12", "need an even number"),
        (["--linear", "8"], SIZES, "leave out --linear"),
        (["--shapes", "8x8", "--dynamic"], SIZES, "leave out --shapes, --dynamic"),
        (["--dtype", "float16"], SIZES, "trains in bfloat16 or float32"),
        (["--only", "nothing"], SIZES, "here are body alone, F compiled"),
    ],
)
def test_refusals(arguments, sizes, text, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench(*arguments, sizes=sizes)
    assert stopped.value.code == 2
    assert text in capsys.readouterr().err


def test_defaults_of_the_device(eager, tmp_path):
    arguments = ["--only", "body", "--budget", "1", "--json", str(tmp_path / "x.json")]
    assert main(["bench", "--device", "cpu", *arguments, "--model"]) == 0
    content, _ = of_results(tmp_path / "x.json")
    assert content["settings"]["model"] == model.DEFAULTS["cpu"].as_json()


@pytest.mark.gpu
def test_memory_of_a_step_on_a_gpu(tmp_path):
    """The logits of 16384 tokens and 32000 classes are 1000 MiB, and a chunk of the linear loss 250."""
    sizes = "layers=1,hidden=256,heads=4,kv_heads=2,feed_forward=512,classes=32000,batch=8,tokens=2048"
    only = "body,F compiled,xent linear"
    assert main(["bench", "--model", sizes, "--only", only, "--json", str(tmp_path / "x.json")]) == 0
    _, results = of_results(tmp_path / "x.json")
    assert {result["status"] for result in results.values()} == {"ok"}, results
    assert results["F compiled"]["extra_mib"] > 900 and results["xent linear"]["extra_mib"] < 600
