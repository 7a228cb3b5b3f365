"""``python -m tools.bench`` on the CPU with tiny shapes: every line is right, and another loss is wrong."""

import importlib.util
import json
from argparse import Namespace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers.processes import run_python

import xent_ops
from tools.bench import divergences, heads, lengths, losses, model, tokens, top_k, trainers
from tools.bench.__main__ import main
from xent_ops.bench import check, contestants, timing
from xent_ops.bench.arguments import Shape
from xent_ops.bench.contestants import Contestant, Outputs
from xent_ops.bench.problems import Loss, Setting

CPU = torch.device("cpu")
SETTING = Setting(CPU, torch.float32)


def bench(tmp_path, *arguments, status=0):
    given = [*arguments, "--device", "cpu", "--budget", "1", "--json", str(tmp_path / "x.json")]
    assert main(given) == status
    return {result["variant"]: result for result in json.loads((tmp_path / "x.json").read_text())["results"]}


def right(problem, one):
    return not check.wrong(problem.check(problem.bind(one)(), one))


def statuses(results):
    return {result["status"] for result in results.values()}


def test_all_forms_of_the_loss(tmp_path):
    results = bench(tmp_path, "losses", "--shapes", "34x64", "--only", "eager,in-place", "--dtype", "bfloat16")
    assert {"xent in-place", "xent one pass in-place", "F eager float32"} <= results.keys()
    assert statuses(results) == {"ok"}


def test_a_gradient_in_place_lies_over_the_logits():
    problem = Loss(Shape(34, 64), SETTING)
    for name, over in (("in_place", True), ("plain", False)):
        loss = losses.in_place if over else xent_ops.cross_entropy
        problem.restore()
        (grad,) = problem.bind(Contestant(name, "ours", lambda loss=loss: loss))().grads
        assert (grad.data_ptr() == problem.logits.data_ptr()) == over
        assert torch.equal(problem.logits, problem.source) != over


@pytest.mark.slow
def test_compiled_forms_of_the_loss(tmp_path):
    """The options as plain torch spells them are checked against the same reference, and rows may be dynamic."""
    only = "F compiled options,xent compiled,one pass compiled,with the pass"
    results = bench(tmp_path, "losses", "--shapes", "34x64", "--dynamic", "--only", only)
    compiled = {"xent compiled options", "xent compiled dynamic", "F compiled options", "F compiled with the pass"}
    assert compiled <= results.keys()
    assert statuses(results) == {"ok"}, results


def test_options_are_checked_against_their_own_reference():
    problem = Loss(Shape(34, 64), Setting(CPU, torch.float64))
    weighted = losses.ALL_OPTIONS | {"weight": True}

    def matches(loss, options):
        return right(problem, Contestant("probe", "ours", lambda: loss, options=options))

    def own(logits, target, weight=problem.weight):
        return xent_ops.cross_entropy(logits, target, weight, **losses.ALL_OPTIONS)

    # torch_options is float32 inside, so a float64 tolerance finds it out; the plain loss is another.
    assert not matches(losses.torch_options, weighted) and matches(own, weighted)
    assert not matches(own, losses.ALL_OPTIONS) and not matches(own, {})


def test_every_tail_says_what_its_options_say():
    logits, target = 20 * torch.randn(12, 32, dtype=torch.float64), torch.randint(32, (12,))
    target[3] = check.IGNORE_INDEX
    for loss, options in losses.TAILS.values():
        own = xent_ops.cross_entropy(logits, target, **options)
        torch.testing.assert_close(own, loss(logits, target), check_dtype=False, rtol=1e-5, atol=1e-6)


@pytest.mark.slow  # Inductor compiles with a C++ compiler
def test_steps_and_tails(tmp_path):
    """With so many classes that the pass replaces a loss on a CPU."""
    sizes = ("--shapes", "34x400", "--hidden", "16", "--only")
    assert statuses(bench(tmp_path, "steps", *sizes, "xent")) == {"ok"}
    results = bench(tmp_path, "tails", *sizes, "Gemma 2,shift: pass")
    assert statuses(results) == {"ok"} and any(
        "left alone: add stands before it" in note for note in results["shift: pass"]["notes"]
    )
    assert "left alone" not in str(results["Gemma 2: pass"]["notes"]) and "Gemma 2: own call" in results


def test_all_forms_of_a_head(tmp_path):
    only = "xent eager,xent float32,xent skipping,xent forward,xent outputs"
    sizes = ("--shapes", "34x64", "--hidden", "16", "--dtype", "bfloat16")
    results = bench(tmp_path, "heads", *sizes, "--chunk-rows", "5,18", "--only", only)
    assert {"three matmuls", "one matmul", "xent eager 5", "xent eager 18", "xent forward 5"} <= results.keys()
    assert statuses(results) == {"ok"}
    forward = results["xent forward 18"]
    assert forward["ratio"] == forward["ms"] / results["one matmul"]["ms"] and forward["errors"].keys() == {"loss"}


def test_heads_of_trainers(tmp_path):
    """A head that is not there is a line that says so; the others are right, TRL's too where it is installed."""
    sizes = ("--shapes", "34x64", "--hidden", "16", "--student", "16", "--teacher", "24", "--dtype", "bfloat16")
    results = bench(tmp_path, "trainers", *sizes)
    theirs = {name: one for name, one in results.items() if one["kind"] in ("peer", "torch")}
    assert statuses({name: results[name] for name in results.keys() - theirs.keys()}) == {"ok"}
    installed = {
        name for name, package in (("TRL", "trl"), ("TRL forward", "trl")) if importlib.util.find_spec(package)
    }
    installed |= {name for name in theirs if "F.linear" in name and hasattr(torch.nn, "LinearCrossEntropyOptions")}
    for name, one in theirs.items():
        expected = "ok" if name in installed else "not run"
        assert one["status"] == expected, one
        assert name in installed or one["notes"][0].startswith(("ImportError", "ModuleNotFoundError"))
    assert {"verl", "verl forward", "Liger scaled", "Liger scaled forward"} <= theirs.keys() - installed
    assert results["xent log-probs float32 logits"]["errors"].keys() == {
        "log-probs",
        "entropy",
        "dH",
        "dH of a row",
        "dW",
    }
    assert results["xent forward"]["errors"].keys() == {"log-probs", "entropy"}


def test_a_head_of_other_entropies_is_wrong():
    problem = trainers.LogProbs(Shape(34, 64), 16, SETTING)

    def other(hidden, matrix, target, *_):
        log_probs, entropy = trainers.log_probs(hidden, matrix, target)
        return log_probs, entropy * 1.1

    for head, ok in ((trainers.log_probs, True), (other, False)):
        assert right(problem, Contestant("probe", "peer", lambda head=head: head)) == ok
        assert right(problem, Contestant("probe", "peer", lambda head=head: head, against=heads.ONE_MATMUL)) == ok


def test_rounded_logits_show_near_a_teacher():
    problem = trainers.NearTeacher(Shape(34, 64), 16, Setting(CPU, torch.bfloat16))
    errors = {}
    for dtype in (torch.bfloat16, torch.float32):
        one = Contestant("probe", "ours", partial(partial, trainers.of_tokens, logits_dtype=dtype))
        errors[dtype] = problem.check(problem.bind(one)(), one)["dH"][0]
    assert errors[torch.bfloat16] > 0.1 > 0.01 > errors[torch.float32]


def test_cost_of_batch_invariant(tmp_path):
    """One row costs the products of a whole chunk then, 512 rows on a CPU."""
    results = bench(tmp_path, "invariant", "--shapes", "1x2000", "--hidden", "16")
    names = ("xent", "xent log-probs", "xent forward")
    both = {f"{name}{end}" for name in names for end in ("", " batch_invariant")}
    assert results.keys() == {"three matmuls", "one matmul"} | both
    assert statuses(results) == {"ok"}
    for name in names:
        assert results[f"{name} batch_invariant"]["ms"] > results[name]["ms"]


@pytest.mark.parametrize("draft", [(), ("--draft", "40")])
@pytest.mark.parametrize("loss", divergences.LOSSES)
def test_losses_of_draft_models(tmp_path, loss, draft):
    """Of two heads, of given logits and by the formulas of others the same numbers."""
    sizes = ("--shapes", "34x64", "--hidden", "16", "--teacher", "24")
    assert statuses(bench(tmp_path, "divergences", loss, *sizes, *draft, "--only", "xent eager")) == {"ok"}
    problem = divergences.Divergences(loss, 24, 40 if draft else None, Shape(34, 64), 16, SETTING)
    fn = divergences.LOSSES[loss]
    for name in ("fused", "of_logits", "in_torch"):
        by = partial(getattr(divergences, name), fn)
        assert right(problem, Contestant(name, "ours", lambda by=by: by))
    wrong = partial(divergences.in_torch, lambda d: 1.001 * fn(d))
    assert not right(problem, Contestant("another", "ours", lambda: wrong))


@pytest.mark.slow
def test_compiled_heads_and_packages(tmp_path):
    """auto_chunker is refused where it leaves the graph as it is."""
    sizes = ("--hidden", "16", "--shapes")
    assert statuses(bench(tmp_path, "heads", *sizes, "64x96", "--only", "unfused,auto_chunker 4")) == {"ok"}
    assert bench(tmp_path, "heads", *sizes, "1x96", "--only", "auto_chunker 4")["auto_chunker 4"]["status"] == "error"
    assert statuses(bench(tmp_path, "packages", *sizes, "64x96", "--only", "package,eager")) == {"ok"}


def test_what_a_rival_needs_is_named():
    missing = {peer.name: peer.needs for peer in heads.peers()}
    assert {"liger-kernel CuTe all logits", "quack-kernels untuned", "quack-kernels all logits"} <= missing.keys()
    for name, needed in missing.items():
        assert ("cutlass" in needed) == ("quack" in name or "CuTe" in name)


def eager_lines(make, arguments):
    """Of a table of heads: what has gradients, uncompiled."""
    (table,) = make(Namespace(shapes=[Shape(34, 640)], hidden=[16], **arguments), SETTING)
    return table.make(), [one for one in table.contestants if one.kind in ("ours", "torch")]


@pytest.mark.parametrize("loss", tokens.LOSSES)
def test_losses_of_tokens(loss, monkeypatch):
    """Each line is right for both targets; the loss of one is wrong for the other."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    problem, lines = eager_lines(tokens.tokens, {"loss": loss})
    others = () if loss == "topk" else tokens.LOSSES.keys() - {loss, "topk"}
    assert len(lines) == (6 if loss in ("topk", "weights") else 4)
    for which in (0, 1):
        problem.use_targets(which)
        for one in lines:
            assert right(problem, one), one.name
        for other in others:
            wrong = Contestant("wrong", "ours", tokens.partial(tokens.by_function, tokens.LOSSES[other]))
            assert not right(problem, wrong), other


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_distillation(beta, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    problem, lines = eager_lines(tokens.distillation, {"teacher": 24, "beta": beta, "chunk_rows": [16, 32]})
    assert len(lines) == 8
    names = [one.name for one in tokens.teacher_lines(beta, torch.bfloat16)]
    assert "xent float32 logits eager" in names and "xent bfloat16 logits eager" in names
    for which in (0, 1):
        problem.use_targets(which)
        for other, found in ((beta, lines), (0.25, tokens.teacher_lines(0.25, torch.float32)[1:6])):
            for one in found:
                assert right(problem, one) == (other == beta), one.name


def test_the_most_probable_classes(tmp_path, monkeypatch):
    """A line for other classes, or without its rank, is wrong."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    sizes = ("--shapes", "34x640", "--hidden", "16")
    results = bench(tmp_path, "top-k", *sizes, "--k", "3", "--only", "xent 3,torch.topk 3")
    assert len(results) == 7 and statuses(results) == {"ok"}
    problem = top_k.Classes(Shape(34, 640), 16, SETTING)
    line = partial(Contestant, "another", "ours", options={"k": 3, "ranks": True})
    for k, ranks in ((3, True), (4, True), (3, False)):
        assert right(problem, line(top_k.partial(top_k.ours, k=k, ranks=ranks))) == ((k, ranks) == (3, True))


def test_tables_of_tokens(tmp_path):
    """One line of each, through the command."""
    sizes = ("--shapes", "34x640", "--hidden", "16", "--only")
    assert statuses(bench(tmp_path, "tokens", "topk", *sizes, "top k eager")) == {"ok"}
    results = bench(tmp_path, "distillation", "--teacher", "24", "--beta", "0.5", *sizes, "xent eager")
    assert statuses(results) == {"ok"}
    assert results["xent eager"]["ratio"] == results["xent eager"]["ms"] / results["four products"]["ms"]


TINY = "layers=1,hidden=32,classes=64,tokens=16"


@pytest.fixture
def uncompiled(monkeypatch):
    """Inductor takes half a minute for a line on a CPU."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


def test_whole_steps(uncompiled, tmp_path, capsys):
    pytest.importorskip("transformers", reason="transformers is not installed")
    only = "body,F compiled,F as a whole,xent linear,skipping,use_xent,transformers"
    results = bench(tmp_path, "model", TINY, "--only", only, "--ignored", "0.75")
    assert statuses(results) == {"ok"} and len(results) == 10
    for name, result in results.items():
        assert result["more"]["tokens/s"] == pytest.approx(32e3 / result["ms"])
        more = None if name == model.BODY else pytest.approx(result["ms"] - results[model.BODY]["ms"])
        assert result["more"].get("head + loss ms") == more
    assert "head + loss ms" in capsys.readouterr().out


def test_attention_of_compiled_layers_is_causal(monkeypatch):
    """One graph for all layers, whose attention has no mask. A model that is compiled as a whole has one."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    graphs, compile_ = [], torch.compile

    def record(graph, inputs):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(
        torch, "compile", lambda function, **options: compile_(function, backend=record, fullgraph=True)
    )
    problem = model.Step(model.DEFAULTS["cpu"] | model.sizes("layers=3,hidden=32,classes=64,tokens=16"), SETTING)
    masks = {}
    for function in (model.at_once, lambda loss, llama: model.step_of(contestants.compiled(lambda: loss), llama)):
        graphs.clear()
        function(contestants.linear, problem.model)(problem.tokens, problem.target)
        attentions = [
            node for graph in graphs for node in graph.graph.nodes if node.target is F.scaled_dot_product_attention
        ]
        masks[len(graphs)] = [(one.kwargs["attn_mask"] is None, one.kwargs["is_causal"]) for one in attentions]
    whole = masks.pop(1)
    assert masks == {3: [(True, True)]}, "a layer, the norm, the loss"
    assert whole == [(False, False)] * 3


@pytest.mark.parametrize("fraction, ignored", [(None, 2), (0.75, 24), (0.0, 2)])
def test_ignored_positions(fraction, ignored):
    """The last one of a sequence has no next token, and is ignored first."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    problem = model.Step(model.DEFAULTS["cpu"] | model.sizes(TINY), Setting(CPU, torch.float32, fraction))
    target, following = problem.target.view(2, 16), problem.tokens[:, 1:]
    assert (target == check.IGNORE_INDEX).sum() == ignored and (target[:, -1] == check.IGNORE_INDEX).all()
    counted = target[:, :-1] != check.IGNORE_INDEX
    assert torch.equal(target[:, :-1][counted], following[counted])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_check_of_a_whole_step_sees(dtype, uncompiled):
    pytest.importorskip("transformers", reason="transformers is not installed")
    problem = model.Step(model.DEFAULTS["cpu"] | model.sizes(TINY), Setting(CPU, dtype))
    one = Contestant("probe", "ours", contestants.partial(model.step_of, lambda: contestants.linear))
    loss, grads = problem.bind(one)()
    assert not check.wrong(problem.check(Outputs(loss, grads), one))
    assert check.wrong(problem.check(Outputs(loss, grads[:-1]), one))  # one weight has none
    assert check.wrong(problem.check(Outputs(loss * 1.01, grads), one))
    for index in (0, 1):
        damaged = [grad * (1.2 if index == number else 1.0) for number, grad in enumerate(grads)]
        assert check.wrong(problem.check(Outputs(loss, tuple(damaged)), one))
    logits = problem.model(input_ids=problem.tokens).logits.float().flatten(0, 1)
    value = F.cross_entropy(logits, problem.target)
    whole = (value, *torch.autograd.grad(value, (problem.early, problem.matrix)))  # the gradients are those of training
    for expected, actual in zip(problem.expected({}), whole, strict=True):
        torch.testing.assert_close(expected, actual, check_dtype=False, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("pieces", [1.0, 1.1, 1.4])
@pytest.mark.parametrize("limit", [2**34, 10**11])
def test_the_longest_sequence(limit, pieces):
    """Within 4 %, in a few steps, where memory is in pieces too. A step that takes too long is not tried."""
    tried = []

    def probe(tokens):
        tried.append(tokens)
        peak = 10**10 + 300_000 * tokens
        fits = 10**10 + 300_000 * tokens * pieces <= limit or len(tried) <= 2
        return lengths.Probe(tokens, peak if fits else None, 1e-5 * tokens + 1e-9 * tokens**2)

    fits = [probe(2048), probe(4096)]
    found, true = lengths.longest(probe, fits, limit, 10.0), (limit - 10**10) / 300_000
    if found.tried:
        assert 0.95 * true / pieces <= found.tokens <= true / pieces and len(tried) <= 11, tried
    else:
        assert 0.99 * true <= found.tokens <= true and 1e-9 * true**2 > 5.0
    assert found.tried == (limit == 2**34) and max(tried) < 100_000


def test_no_sequence_fits():
    fits = [lengths.Probe(2048, 2 * 10**9, 0.1), lengths.Probe(4096, 3 * 10**9, 0.1)]
    assert lengths.longest(lambda tokens: lengths.Probe(tokens, None, 0.1), fits, 10**9, 10.0) == (0, True)


def test_ways_of_a_long_sequence_have_one_loss():
    pytest.importorskip("transformers", reason="transformers is not installed")
    size = model.DEFAULTS["cpu"] | model.sizes(TINY) | {"batch": 1}
    llama, batch, found = lengths.make(size, CPU).float(), torch.randint(64, (1, 9)), {}
    for name in ("untouched", "TRL", "use_xent"):
        if name != "TRL" or importlib.util.find_spec("trl"):
            loss = lengths.WAYS[name](llama)(batch)
            found[name] = (loss, torch.autograd.grad(loss, llama.lm_head.weight)[0])
    for other in found.values():
        torch.testing.assert_close(other, found["untouched"])


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["model", "layer=4"], "invalid sizes value: 'layer=4'"),
        (["model", "layers=0"], "invalid sizes value: 'layers=0'"),
        (["model", "--dtype", "float16"], "whole steps are in bfloat16 or float32"),
        (["tokens", "ppo"], "invalid choice: 'ppo'"),
        (["heads", "--chunk-rows", "x"], "invalid positives value: 'x'"),
        (["ranks", "--alone", "0"], "invalid positive value: '0'"),
    ],
)
def test_refusals(arguments, text, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--device", "cpu"])
    assert stopped.value.code == 2 and text in capsys.readouterr().err


@pytest.mark.slow
def test_a_rank_alone_and_the_host():
    run_python(
        """
        import contextlib, io, json
        from tools.bench.__main__ import main
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert main("ranks --alone 8 --shapes 64x4096 --device cpu --budget 1 --dtype bfloat16".split()) == 0
        for name in ("eager ", "eager, DTensor", "compiled"):
            (line,) = [line for line in out.getvalue().splitlines() if line.startswith(f"| {name}")]
            assert "ok" in line, line
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert main(["host", "--budget", "20"]) == 0
        assert out.getvalue().count("| ok") == 8, out.getvalue()
        """
    )


@pytest.mark.gpu
def test_memory_of_a_step_on_a_gpu(tmp_path):
    """The logits of 16384 tokens and 32000 classes are 1000 MiB, and a chunk of the linear loss 250."""
    sizes = "layers=1,hidden=256,heads=4,kv_heads=2,feed_forward=512,classes=32000,batch=8,tokens=2048"
    assert main(["model", sizes, "--only", "F compiled,xent linear", "--json", str(tmp_path / "x.json")]) == 0
    results = {result["variant"]: result for result in json.loads((tmp_path / "x.json").read_text())["results"]}
    assert results["F compiled"]["extra_bytes"] > 900 << 20 and results["xent linear"]["extra_bytes"] < 600 << 20
    assert timing.measures_memory(torch.device("cuda"))
