"""``bench --linear`` beside other packages, here stubs of them, and a sample of each in turn."""

import json
import sys

import pytest
import torch

from xent_ops.__main__ import main
from xent_ops.bench import linear_cases, timing
from xent_ops.bench.linear_cases import LinearVariant

CPU = torch.device("cpu")
TINY = ["--device", "cpu", "--linear", "16", "--shapes", "34x64"]

RIGHT = "import torch.nn.functional as F\n\ndef mean(x, w, t):\n    return F.cross_entropy(F.linear(x, w), t)\n\n"
STUBS = {
    "liger_kernel/transformers/functional.py": RIGHT
    + "def liger_fused_linear_cross_entropy(x, w, t):\n    return mean(x, w, t)\n",
    "liger_kernel/ops/cutedsl/ops/fused_linear_cross_entropy_sm90.py": RIGHT
    + "import cutlass\ndef liger_fused_linear_cross_entropy_sm90(x, w, t):\n    return mean(x, w, t)\n",
    "liger_kernel/ops/cutedsl/ops/fused_linear_cross_entropy.py": RIGHT
    + "import cutlass\nclass LigerFusedLinearCrossEntropyFunction:\n"
    + "    apply = staticmethod(lambda x, w, t: (mean(x, w, t), None, None, None))\n",
    "cut_cross_entropy/__init__.py": RIGHT + "def linear_cross_entropy(x, w, t):\n    return 2 * mean(x, w, t)\n",
    "quack/linear_cross_entropy.py": RIGHT
    + "CALLS = []\ndef chunked_linear_cross_entropy(x, w, t, **how):\n    CALLS.append(how)\n    return mean(x, w, t)\n",
    "cutlass/__init__.py": "",
    "tvm_ffi/__init__.py": "",
}


NAMES = {file.split("/")[0] for file in STUBS}


def forget():
    for module in [module for module in sys.modules if module.split(".")[0] in NAMES]:
        del sys.modules[module]


@pytest.fixture
def stubs(tmp_path, monkeypatch):
    """Packages of these names, as if they were installed."""
    if imported := sorted(NAMES & sys.modules.keys()):
        pytest.skip(f"this process has imported {', '.join(imported)}")
    for file, text in STUBS.items():
        path = tmp_path / "site" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "site")
    yield tmp_path / "site"
    forget()


def peers(dtype=torch.bfloat16):
    known, missing = linear_cases.variants(dtype, [None])
    return {variant.name: variant for variant in known if variant.kind == "peer"}, missing


def measured(tmp_path, *arguments):
    assert main(["bench", *TINY, "--budget", "1", *arguments, "--json", str(tmp_path / "x.json")]) == 0
    content = json.loads((tmp_path / "x.json").read_text())
    return content, {result["variant"]: result for result in content["results"]}


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_rivals_that_are_installed(stubs, tmp_path, monkeypatch, capsys, capability):
    """Each is called as it wants to be; what is wrong is WRONG, and has no time."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    _, results = measured(tmp_path, "--only", "liger,cut-cross,quack")
    names = ["liger-kernel", "liger-kernel CuTe all logits", "quack-kernels", "quack-kernels untuned"]
    for name in [*names, "quack-kernels all logits"]:
        assert results[name]["status"] == "ok" and results[name]["ratio"], results[name]
    assert results["cut-cross-entropy"]["status"] == "wrong" and results["cut-cross-entropy"]["ms"] is None
    assert "WRONG" in capsys.readouterr().out
    calls = sys.modules["quack.linear_cross_entropy"].CALLS
    assert [dict(how) for how in sorted({tuple(how.items()) for how in calls})] == [
        {},
        {"tuned": False},
        {"use_scaled_exp": False, "chunk_size": 34},
    ]
    sm90 = "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90"
    assert (sm90 in sys.modules) == (capability == (9, 0))


def test_what_a_rival_needs_is_named(stubs, capsys):
    """Liger-Kernel without CUTLASS has its Triton kernels; quack-kernels has none."""
    assert {"liger-kernel", "liger-kernel CuTe all logits", "quack-kernels"} <= peers()[0].keys()
    (stubs / "cutlass" / "__init__.py").unlink()
    (stubs / "cutlass").rmdir()
    found, missing = peers()
    assert found.keys() == {"liger-kernel", "cut-cross-entropy"}
    assert "liger-kernel CuTe all logits: not installed (nvidia-cutlass-dsl)" in missing
    assert "quack-kernels: not installed (nvidia-cutlass-dsl)" in missing
    assert main(["bench", *TINY, "--budget", "1", "--only", "xent eager"]) == 0
    said = capsys.readouterr().out
    absent = said.split("not installed: ")[1].splitlines()[0].split(", ")
    assert absent == ["liger-kernel CuTe all logits", "quack-kernels"]


def test_a_whole_step_leaves_cutlass_out(stubs):
    from xent_ops.bench import model_cases

    assert [peer.name for peer in model_cases.PEERS] == ["liger-kernel", "cut-cross-entropy"]


def test_interleaved(monkeypatch, tmp_path, capsys):
    """Each is checked first; then a call of each in turn, less those that are wrong or raise."""
    order = []

    def named(name, loss):
        def run(*given):
            order.append(name)
            return loss(*given)

        return LinearVariant(name, "peer", lambda: run)

    def wrong(*given):
        return 2 * linear_cases.unfused_torch(*given)

    def breaks(*given):
        if order.count("breaks") > 1:
            raise RuntimeError("broken later")
        return linear_cases.unfused_torch(*given)

    right = linear_cases.unfused_torch
    probes = [named("a", right), named("wrong", wrong), named("breaks", breaks), named("b", right)]
    monkeypatch.setattr(linear_cases, "variants", lambda *arguments: (probes, []))
    content, results = measured(tmp_path, "--interleaved")
    assert content["settings"]["interleaved"] is True
    assert list(results) == ["three products", "a", "wrong", "breaks", "b", "three products again"]
    assert results["wrong"]["status"] == "wrong" and order.count("wrong") <= 2
    assert results["breaks"]["status"] == "error" and "broken later" in results["breaks"]["note"]
    unit = results["three products"]["ms"]
    for name in ("a", "b", "three products again"):
        assert results[name]["status"] == "ok" and results[name]["ratio"] == results[name]["ms"] / unit
    assert order[-20:] == ["a", "b"] * 10
    with pytest.raises(SystemExit):
        main(["bench", "--device", "cpu", "--interleaved"])
    assert "--interleaved is for --linear" in capsys.readouterr().err


@pytest.mark.gpu
def test_interleaved_graphs(tmp_path):
    arguments = ["--linear", "64", "--shapes", "256x512", "--interleaved", "--only", "xent eager,unfused xent"]
    assert main(["bench", "--device", "cuda", "--budget", "5", *arguments, "--json", str(tmp_path / "x.json")]) == 0
    results = json.loads((tmp_path / "x.json").read_text())["results"]
    assert len(results) == 4 and {result["mode"] for result in results} == {"graph"}
    assert all(result["status"] == "ok" and result["ms"] > 0 for result in results)


def test_samples_in_turn():
    """As many of each as the budgets of all have room for, and an error in the place of times."""
    error = RuntimeError("no")
    counts = [0, 0]

    def run(index):
        counts[index] += 1

    def fails():
        raise error

    found = timing.by_wall_in_turn([lambda: run(0), fails, lambda: run(1)], 0.01, CPU)
    assert found[1] is error and isinstance(found[0], timing.Times) and isinstance(found[2], timing.Times)
    assert counts[0] == counts[1] == 3 + 3 + timing.MIN_SAMPLES
    assert timing.by_wall_in_turn([fails], 0.01, CPU) == [error]
