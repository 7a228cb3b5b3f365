"""Random arguments of every public function against float64: values and gradients, alone, compiled and over ranks.

``--fuzz-seconds`` bounds all of it, ``--fuzz-seed`` starts elsewhere. A failure prints a program that runs by itself.
"""

import itertools
import re
import time

import fuzz_on_ranks
import pytest
import torch
from fuzz_draws import ALONE, OVER_RANKS, draw
from fuzz_heads import refused_with_shard
from fuzz_program import failure_of, parameters_of
from helpers.processes import run_python, run_with_torch
from helpers.workers import Workers

import xent_ops
from xent_ops import distributed

SHARES = {"eager": 0.3, "compiled": 0.35, "ranks": 0.35}  # of the seconds
NO_LOSSES = {
    "CrossEntropyOutputs",
    "TokenDivergences",
    "TokenLogProbs",
    "TopK",
    "Reduction",
    "check_targets",
    "decompositions",
    "library_path",
}
NO_LOSSES |= {"remove_xent", "use_xent"}


@pytest.fixture
def seeds(request):
    """Seeds until the share of the time is over; at least one."""
    first, seconds = (request.config.getoption(f"--fuzz-{name}") for name in ("seed", "seconds"))
    share = next(share for name, share in SHARES.items() if name in request.node.name)
    end = time.monotonic() + share * seconds
    return itertools.takewhile(lambda seed: seed == first or time.monotonic() < end, itertools.count(first))


def program_of(failure):
    return re.search(r"The program:\n\n(.*)\nTraceback", failure, re.DOTALL).group(1)


@pytest.mark.slow
def test_eager(device, seeds):
    for seed in seeds:
        failure = failure_of(draw(seed, device=device))
        assert failure is None, failure


@pytest.mark.slow
def test_compiled(device, seeds):
    """On a GPU by Inductor as well, which takes longer."""
    for seed in seeds:
        backend = "inductor" if device == "cuda" and seed % 4 == 0 else "aot_eager"
        failure = failure_of(draw(seed, device=device, backend=backend))
        torch.compiler.reset()
        assert failure is None, failure


@pytest.mark.slow
def test_over_ranks(device, seeds):
    """Two processes that stay run some draws at a time."""
    workers, number = Workers(2, device), 20
    try:
        for seed in seeds:
            workers.run(fuzz_on_ranks.run, number * seed, number)
    finally:
        workers.close()


def test_every_public_function_is_drawn():
    public = {name for name in xent_ops.__all__ if callable(getattr(xent_ops, name))} - NO_LOSSES
    assert public == set(ALONE) and set(distributed.__all__) - {"Shard"} <= set(OVER_RANKS)


@pytest.mark.parametrize(("name", "ranks"), [*((name, 1) for name in ALONE), *((name, 2) for name in OVER_RANKS)])
def test_every_option_is_drawn(name, ranks):
    """Whatever stands in the signature, but for what is another way to say the same, or refused."""
    draws = [draw(seed, names=(name,), ranks=ranks) for seed in range(300)]
    found = set().union(*(one.keywords for one in draws))
    tensors = {"input", "logits_shard", "linear_weight", "target", "ids", "probs", "k"}
    tensors |= {"teacher_input", "teacher_weight"}
    others = {"group", "in_features", "num_classes", "device", "dtype"} if ranks == 1 else {"group"}
    others |= {"products"}  # whose errors are of the whole: tests/operators/test_fp8.py
    others |= refused_with_shard(name) if ranks > 1 else set()
    assert set(parameters_of(name, ranks)) - tensors - others <= found


def test_a_draw_is_a_function_of_its_seed():
    assert draw(3).program == draw(3).program != draw(4).program


def test_a_failure_prints_a_program_that_fails_alike(monkeypatch):
    right, wrong = xent_ops.cross_entropy, lambda *args, **options: 1.01 * right(*args, **options)
    monkeypatch.setattr(xent_ops, "cross_entropy", wrong)
    failures = (failure_of(draw(seed, names=("cross_entropy",))) for seed in range(20))
    failure = next(failure for failure in failures if failure is not None)
    assert "AssertionError" in failure and "out of budget" in failure
    program = program_of(failure)
    with pytest.raises(AssertionError, match="out of budget"):
        exec(compile(program, "program", "exec"), {})
    monkeypatch.undo()
    run_with_torch(program)


@pytest.mark.slow
def test_the_program_of_ranks_runs_by_itself(tmp_path):
    program = tmp_path / "this.py"
    program.write_text(draw(0, names=OVER_RANKS, ranks=2).program)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    run_python(f"import subprocess, sys; subprocess.run([sys.executable, *{command}], check=True)")
