"""Compiled artifacts of another source of xent_ops are never used; those of the same source are."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import xent_ops
from xent_ops.inductor import cache_tag

PACKAGE = Path(xent_ops.__file__).parent

STEP = """
import json, os, sys, torch
import xent_ops
from torch._dynamo.utils import counters
from torch._inductor import config
# A fresh cache folder would first precompile headers and try vector instructions, for half a minute.
config.cpp_cache_precompile_headers = False
config.cpp.vec_isa_ok = False
assert xent_ops.__file__.startswith(os.environ["PYTHONPATH"]), xent_ops.__file__

@torch.compile(fullgraph=True)
def step(x, target):
    return xent_ops.cross_entropy(x, target)

x = torch.arange(12.0).view(3, 4).requires_grad_()
step(x, torch.tensor([0, 1, 2])).backward()
print(json.dumps({"grad": x.grad[0, 1].item(), "hits": counters["aot_autograd"]["autograd_cache_hit"]}))
"""


def run_step(folder, cache, step=STEP):
    """A training step in a process of its own, with the package in ``folder`` and the compile caches in ``cache``."""
    environment = {name: value for name, value in os.environ.items() if "CACHE" not in name and "_PGO" not in name}
    environment |= {
        "PYTHONPATH": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    command = [sys.executable, "-W", "ignore", "-c", step]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def changed_copy(folder, file, old, new):
    """Without the C++ extension, so that Inductor gets the decomposition."""
    shutil.copytree(PACKAGE, folder / "xent_ops", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    path = folder / "xent_ops" / file
    source = path.read_text()
    assert source.count(old) == 1, f"{old!r} is not once in {file}"
    path.write_text(source.replace(old, new))
    return folder


@pytest.mark.slow  # four processes, each of which imports and starts the compiler
def test_a_changed_formula_and_a_changed_decomposition_are_used(tmp_path):
    """Fails without the tag: with ``cache_tag.install`` made to do nothing, the changed formula and the changed
    decomposition both gave the gradient of the first process (tried on torch 2.11 and 2.13)."""
    cache = tmp_path / "cache"
    as_is = '    return {"logits": run_backward(ctx, grad_value,'
    original = changed_copy(tmp_path / "original", "ops/cross_entropy.py", as_is, as_is)
    tripled = as_is.replace("run_backward", "3 * run_backward")
    formula = changed_copy(tmp_path / "formula", "ops/cross_entropy.py", as_is, tripled)
    lowering = changed_copy(
        tmp_path / "lowering",
        "kernels/reference.py",
        "    grad = grad * activation_derivative(x, options)\n",
        "    grad = 5 * grad * activation_derivative(x, options)\n",
    )
    first = run_step(original, cache)
    again = run_step(original, cache)
    assert first["hits"] == 0 and again["hits"] == 1, "the caches work at all"
    assert again["grad"] == first["grad"] != 0
    assert run_step(formula, cache)["grad"] == pytest.approx(3 * first["grad"])
    assert run_step(lowering, cache)["grad"] == pytest.approx(5 * first["grad"])


REPLACED_TWICE = """
import json, torch
from torch._dynamo.utils import counters
from torch._inductor import config
from xent_ops import inductor
config.cpp_cache_precompile_headers = False
config.cpp.vec_isa_ok = False

seen = []
for _ in range(2):
    torch.compiler.reset()
    counters.clear()
    loss = torch.compile(torch.nn.functional.cross_entropy, options=inductor.options())
    value = loss(torch.arange(1200.0).view(3, 400), torch.tensor([0, 1, 2])).item()
    report = inductor.last_report()
    hits = counters["aot_autograd"]["autograd_cache_hit"]
    seen.append([value, hits, str(report)])
print(json.dumps(seen))
"""


@pytest.mark.slow
def test_replacing_cross_entropy_keeps_the_caches(tmp_path):
    """A pass without uuid() would switch them off; and the report knows what is in a graph that comes from them."""
    first, again = run_step(PACKAGE.parent, tmp_path, REPLACED_TWICE)
    assert first[1] == 0 and "1 replaced, 0 left alone, in 1 graphs" in first[2]
    assert again == [first[0], 1, first[2]]


@pytest.fixture
def key():
    """torch.compiler.config with an empty cache_key_tag, which is put back afterwards."""
    with torch.compiler.config.patch(cache_key_tag=""):
        yield torch.compiler.config


def test_importing_sets_the_tag():
    assert cache_tag.tag() in torch.compiler.config.cache_key_tag


def test_the_tag_is_appended_once(key):
    key.cache_key_tag = "mine"
    cache_tag.install()
    cache_tag.install()
    assert key.cache_key_tag == f"mine+{cache_tag.tag()}"


def test_tracing_brings_the_tag_back(key):
    """The user assigned a tag after the import, or compiles in a thread, which starts from torch's defaults."""
    key.cache_key_tag = "mine"
    torch.compile(xent_ops.cross_entropy, backend="eager")(torch.randn(2, 3), torch.tensor([0, 1]))
    assert key.cache_key_tag == f"mine+{cache_tag.tag()}"


def test_the_rank_is_in_the_keys(key, monkeypatch):
    """A graph of DTensors has its rank's part of the classes, and ranks of one host share a cache folder."""
    for name, value in {"is_initialized": True, "get_rank": 1, "get_world_size": 2}.items():
        monkeypatch.setattr(cache_tag.dist, name, lambda value=value: value)
    cache_tag.install()
    cache_tag.install()
    assert key.cache_key_tag == f"{cache_tag.tag()}+rank_1_of_2_"


def test_the_tag_is_of_version_and_sources(tmp_path, monkeypatch):
    def tag_of(folder):
        monkeypatch.setattr(cache_tag, "_PACKAGE", folder / "xent_ops")
        return cache_tag.tag.__wrapped__()

    shutil.copytree(PACKAGE, tmp_path / "same" / "xent_ops")
    same = tag_of(tmp_path / "same")
    assert same == cache_tag.tag(), "where it is installed does not count"
    assert same.startswith(f"xent_ops-{xent_ops.__version__}-")
    for number, file in enumerate(["_version.py", "kernels/triton/launch.py", "ops/schemas.py"]):
        folder = tmp_path / str(number)
        shutil.copytree(PACKAGE, folder / "xent_ops")
        with (folder / "xent_ops" / file).open("a") as source:
            source.write("# changed\n")
        assert tag_of(folder) != same, file


HEADS = """
import json, sys, torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from xent_ops import inductor
config.cpp_cache_precompile_headers = False
config.cpp.vec_isa_ok = False

x, weight, target = torch.arange(12.0).view(3, 4) / 8, torch.ones(5, 4).tril(), torch.tensor([0, 1, 2])
seen = []
for linear in (False, True, True):
    torch.compiler.reset()
    counters.clear()
    base = {"pre_grad_pass_timing": "TIMING"} if hasattr(config, "pre_grad_pass_timing") else {}
    loss = torch.compile(lambda x, w, t: F.cross_entropy(x @ w.T, t), options=inductor.options(base, linear=linear))
    value, code = run_and_get_code(loss, x, weight, target)
    one = "linear_cross_entropy" in "".join(code)
    seen.append([round(value.item(), 5), one, counters["aot_autograd"]["autograd_cache_hit"]])
print(json.dumps(seen))
"""


@pytest.mark.slow
@pytest.mark.parametrize("timing", ["early", "late"])
def test_the_choice_about_heads_is_in_the_keys(tmp_path, timing):
    """Whether Inductor looks a graph up before the pass runs ("late") or behind it."""
    without, with_head, again = run_step(PACKAGE.parent, tmp_path, HEADS.replace("TIMING", timing))
    assert without[1:] == [False, 0] and with_head[1:] == [True, 0]
    assert again[2] == 1 and without[0] == with_head[0] == again[0]
