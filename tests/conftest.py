"""Devices that the tests run on.

``device`` is "cpu" (the reference kernels) and "cuda" where there is a GPU. In a process started with
TRITON_INTERPRET=1 the CUDA kernels serve "cpu" tensors through Triton's interpreter instead, and only the tests
marked ``interpreter`` run: the same tests, another kernel. There a target out of range gives NaN, as on a GPU.
"""

import gc
import os
import random
import sys
import warnings

# Before torch. Where processes share the tests (pytest-xdist), a core for each: the tensors of tests are small, and
# threads of OpenMP that wait for one another spin. Tests of threads say how many they want.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# Before torch: a cached graph of an older formula would be served in place of the one under test. What the C++ compiler
# makes of equal text stays in Inductor's cache: that saves about 2.5 s a compiled step from the second run on.
os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "0")
os.environ.setdefault("TORCHINDUCTOR_AUTOGRAD_CACHE", "0")
os.environ.setdefault("TORCH_DYNAMO_AUTOMATIC_DYNAMIC_LOCAL_PGO", "0")
# Dynamo looks for garbage after each graph.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")
# Inductor tries the CPU's vector instructions for 10 s a process. One test compiles with them, in its own process.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

import pytest
import torch
from helpers import closing_line
from helpers.closing_line import pytest_sessionfinish  # noqa: F401 (pytest calls it)
from helpers.guards import leave_guards_untimed
from helpers.interpreter import INTERPRETED, patch_language_once
from helpers.workers import Workers

import xent_ops
from xent_ops import _environment
from xent_ops.kernels import sizes
from xent_ops.ops import library, transforms

if INTERPRETED:
    patch_language_once()
    warnings.filterwarnings("ignore", message="TRITON_INTERPRET is set")
    _override = torch.library.Library("xent", "IMPL")  # lives as long as the process
    for _name, _operator in library.OPERATORS.items():
        _override.impl(_name, _operator.on_triton, "CPU", allow_override=True)


def pytest_addoption(parser):
    closing_line.pytest_addoption(parser)
    parser.addoption(
        "--shuffle", type=int, metavar="SEED", help="the tests of all files in a random order, by its seed"
    )
    fuzz = parser.getgroup("fuzz", "random calls of the public functions (tests/fuzz)")
    fuzz.addoption("--fuzz-seconds", type=float, default=120.0, help="time of all its tests together (120)")
    fuzz.addoption("--fuzz-seed", type=int, default=0, help="the first draw (0); each draw has a seed of its own")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """``--numprocesses auto``: pytest-xdist counts the cores. One process where there is a GPU: tests there measure
    times and free memory, which another process would change."""
    return 0 if torch.cuda.is_available() else None


def pytest_ignore_collect(collection_path, config):
    """A run of the tests in the interpreter imports the files that have some: half of its collection is not."""
    if INTERPRETED and "interpreter" in config.option.markexpr and collection_path.match("test_*.py"):
        return "mark.interpreter" not in collection_path.read_text() or None


def pytest_collection_modifyitems(config, items):
    for item in items:
        if INTERPRETED and "interpreter" not in item.keywords:
            item.add_marker(pytest.mark.skip(reason="TRITON_INTERPRET=1 is set: only tests marked 'interpreter' run"))
        if "[cuda" in item.name or "cuda]" in item.name or "-cuda-" in item.name:
            item.add_marker(pytest.mark.gpu)
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
    if config.option.shuffle is not None:  # the same order in each process of pytest-xdist, which it wants
        random.Random(config.option.shuffle).shuffle(items)
    # First, so that no other process takes from them (--dist worksteal takes the last) and starts the same ranks again.
    items.sort(key=lambda item: "pool" not in item.fixturenames)
    if INTERPRETED:  # on a CPU, where there is a GPU too: the other run of `make test` has these
        config.hook.pytest_deselected(items=[item for item in items if "gpu" in item.keywords])
        items[:] = [item for item in items if "gpu" not in item.keywords]


def pytest_collection_finish(session):
    """What is imported stays: looking for garbage in it takes .3 s each time (2026-11-23), and the bench does so often."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def same_numbers_in_any_order():
    """A test draws the same ones whichever others run before it."""
    torch.manual_seed(0)


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    return request.param


@pytest.fixture(scope="session")
def aoti_packages():
    """For tests that load an AOTInductor package: where its C++ compiler's packages cannot be loaded, the process would
    die."""
    if problem := _environment.package_problem():
        pytest.skip(problem)


@pytest.fixture(scope="session")
def pool():
    """Processes of a process group, by (world, device), started when first asked for: ``pool(2, device).run(case)``."""
    started = {}

    def get(world, device):
        if device == "cpu" and world > 4:
            pytest.skip(f"{world} processes are for {world} GPUs: no case takes another way from 4 on")
        if (world, device) in started and started[world, device].broken:
            started.pop((world, device)).close()
        if (world, device) not in started:
            started[world, device] = Workers(world, device)
        return started[world, device]

    yield get
    for workers in started.values():
        workers.close()


@pytest.fixture
def raises_out_of_range(device):
    """Does this device raise IndexError for a target out of range (else: NaN)?"""
    return device == "cpu" and not INTERPRETED


@pytest.fixture(params=["eager", "dispatched"])
def eager_and_dispatched(request, monkeypatch):
    """The test runs twice: with the loss as one autograd node, and as the composite operator that tracers see."""
    if request.param == "dispatched":
        monkeypatch.setattr(transforms, "is_traced", lambda: True)


@pytest.fixture
def new_memory_is_nan():
    """torch.empty and its kin return NaN, so that a test sees what was read before it was written."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def cpu_as_cuda(monkeypatch):
    """Inductor's lowering for CUDA on the CPU as well, whichever kernels serve that."""
    from xent_ops.inductor.lowerings import reuse

    xent_ops.cross_entropy(torch.empty(1, 2, device="meta"), torch.empty(1, device="meta", dtype=torch.int64))
    monkeypatch.setattr(reuse, "writes_over", lambda device: device in ("cpu", "cuda"))


@pytest.fixture(autouse=True)
def _few_classes(monkeypatch):
    """The pass takes up what it would leave to F.cross_entropy on a CPU: tests have few classes."""
    monkeypatch.setattr(sizes, "FEW_CLASSES", {})


@pytest.fixture(autouse=True)
def _fresh_compiler():
    leave_guards_untimed()
    yield
    if "torch._dynamo" in sys.modules:  # else nothing was compiled, and the reset would import it
        torch.compiler.reset()
