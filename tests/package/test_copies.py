"""A repository of the kernels hub made from this tree, and two copies of the package in one process."""

import json
import re
import shutil
import textwrap
from pathlib import Path

import kernels_hub
import pytest
from helpers.processes import run_python

import xent_ops

PACKAGE = Path(xent_ops.__file__).parent

# As kernels 0.17 imports a folder: by its path, under the name that its metadata gives.
LOAD = """
import importlib.util, json, sys
from pathlib import Path

def load(repository):
    folder = Path(repository) / "build" / "torch-cpu"
    name = json.loads((folder / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
"""

# A loss and a head in one graph, forward and backward, beside F.cross_entropy.
TRY = """
import torch
import torch.nn.functional as F

def try_it(package, backend, device="cpu"):
    x, weight = (torch.randn(n, 8, device=device, requires_grad=True) for n in (5, 9))
    target = torch.tensor([1, 2, 8, -100, 0], device=device)
    want = F.cross_entropy(x @ weight.T, target)
    grads = torch.autograd.grad(want, (x, weight))
    for loss in (
        lambda: package.cross_entropy(x @ weight.T, target),
        lambda: package.linear_cross_entropy(x, weight, target),
    ):
        got = torch.compile(loss, fullgraph=True, backend=backend)()
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(torch.autograd.grad(got, (x, weight)), grads)
"""


def run(program, **environment):
    run_python(LOAD + TRY + textwrap.dedent(program), **environment)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "hub"
    kernels_hub.make(PACKAGE, folder)
    return folder


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """One of another version."""
    made = tmp_path_factory.mktemp("other")
    shutil.copytree(PACKAGE, made / "xent_ops", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (made / "xent_ops" / "_version.py").write_text('__version__ = "9.9.9"\n')
    kernels_hub.make(made / "xent_ops", made / "hub")
    return made


def test_the_repository(hub):
    assert 'name = "xent-ops"' in (hub / "build.toml").read_text()
    source = hub / "torch-ext" / "xent_ops"
    for name, backend in kernels_hub.BACKENDS.items():
        variant = hub / "build" / f"torch-{name}"
        metadata = json.loads((variant / "metadata.json").read_text())
        assert metadata["backend"] == {"type": backend}
        assert metadata["id"].isidentifier() and metadata["id"].startswith(f"_xent_ops_{backend}_")
        assert {**kernels_hub.digests(source), **metadata["digest"]["files"]} == metadata["digest"]["files"]
        assert set(metadata["digest"]["files"]) - set(kernels_hub.digests(source)) == {"xent_ops/__init__.py"}
    assert not [path for path in hub.rglob("*") if path.suffix in (".so", ".pyc") or path.name == "bench"]


def test_nothing_in_it_imports_the_package_by_a_name(hub):
    """Which would be another copy, or none."""
    absolute = re.compile(r"^\s*(?:from|import) xent_ops\b|(?:import_module|__import__)\(f?[\"']xent_ops", re.MULTILINE)
    sources = [path for path in (hub / "torch-ext").rglob("*.py")]
    assert len(sources) > 100
    assert [path.name for path in sources if absolute.search(path.read_text())] == []


@pytest.mark.slow
def test_it_alone(hub):
    """Compiled with fullgraph by Inductor; the pass finds a loss; what is not there says so."""
    run(f"""
        hub = load({str(hub)!r})
        assert hub.__version__ == {xent_ops.__version__!r}
        try_it(hub, "inductor")

        def plain(x, target):
            return F.cross_entropy(x, target)

        torch.compile(plain, options=hub.inductor.options())(torch.randn(5, 400), torch.tensor([1, 2, 8, 3, 0]))
        assert "1 replaced" in str(hub.inductor.last_report()), hub.inductor.last_report()
        assert hub.distributed.vocab_parallel_cross_entropy
        try:
            hub.library_path()
        except FileNotFoundError as error:
            assert "is a copy of the kernels hub" in str(error), error
        else:
            raise AssertionError("no FileNotFoundError")
        assert "xent_ops" not in sys.modules
    """)


@pytest.mark.gpu
def test_it_alone_on_a_gpu(hub):
    run(f"""
        hub = load({str(hub)!r})
        try_it(hub, "inductor", "cuda")
        assert "xent_ops" not in sys.modules
    """)


def test_what_compiled_code_calls(hub):
    """Inductor's code imports this copy by its name, and caches keep the code of another name apart."""
    run(f"""
        hub = load({str(hub)!r})
        calls = importlib.import_module(".inductor.lowerings.calls", hub.__name__)
        assert eval(calls._PACKAGE) is hub
        tag = importlib.import_module(".inductor.cache_tag", hub.__name__)
        of_hub = tag.tag()
        tag.PACKAGE = "another"
        assert tag.tag.__wrapped__() != of_hub
        assert "xent_ops" not in sys.modules
    """)


def test_its_triton_kernels_are_its_own(hub):
    pytest.importorskip("triton", reason="triton is not installed")
    run(
        f"""
        hub = load({str(hub)!r})
        kernels = hub.__name__ + ".kernels.triton."
        products = importlib.import_module(".head.products", hub.__name__)
        assert products._counting().__name__ == kernels + "launch_product"
        fp8 = importlib.import_module(".head.fp8", hub.__name__)
        assert fp8._kernels(torch.device("cuda")).__name__ == kernels + "launch_fp8"
        assert "xent_ops" not in sys.modules
    """,
        CUDA_VISIBLE_DEVICES="",
    )


@pytest.mark.parametrize("first", ["hub", pytest.param("installed", marks=pytest.mark.slow)])
def test_two_copies_of_one_version(hub, first):
    """The second is another name of the first: functions, modules and operators are the first's, in whatever order."""
    order = [f"hub = load({str(hub)!r})", "import xent_ops"]
    lines = "; ".join(order if first == "hub" else order[::-1])
    run(f"""
        import warnings
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            {lines}
        one, two = (hub, xent_ops) if {first == "hub"} else (xent_ops, hub)
        for name in xent_ops.__all__:
            assert name == "__version__" or getattr(one, name) is getattr(two, name), name
        import xent_ops.kernels.options, xent_ops.distributed.linear, xent_ops.integrations.heads
        for name, module in list(sys.modules.items()):
            if name.startswith(two.__name__ + ".") and name.split(".")[1] not in ("_copies", "_command_line", "_version"):
                assert module is sys.modules[one.__name__ + name.removeprefix(two.__name__)], name
        assert hub.ops.library.OPERATORS is xent_ops.ops.library.OPERATORS
        assert xent_ops.linear.__name__ == one.__name__ + ".linear"
        try_it(one, "aot_eager")
        try_it(two, "aot_eager")
        if one is xent_ops:  # whose C++ the hub's copy has not
            assert hub.library_path == xent_ops.library_path
        from xent_ops.bench import arguments  # of the command line, which the hub's copy has not
        assert arguments.HELP
    """)


@pytest.mark.slow
def test_two_folders_of_the_hub(hub, tmp_path):
    """Which differ in a comment, and so in their names."""
    package = tmp_path / "xent_ops"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    with (package / "linear.py").open("a") as source:
        source.write("# later\n")
    kernels_hub.make(package, tmp_path / "hub")
    run(f"""
        one, two, same = load({str(hub)!r}), load({str(tmp_path / "hub")!r}), load({str(hub)!r})
        assert one.__name__ != two.__name__
        assert one.cross_entropy is two.cross_entropy is same.cross_entropy
        try_it(two, "aot_eager")
    """)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["hub", "installed"])
def test_two_copies_of_two_versions(other, first):
    """The error names both versions and both folders; the first one works on."""
    order = [f"hub = load({str(other / 'hub')!r})", "import xent_ops"]
    begin, then = order if first == "hub" else order[::-1]
    name = "hub" if first == "hub" else "xent_ops"
    run(f"""
        {begin}
        try:
            {then}
        except ImportError as error:
            for part in ("xent_ops 9.9.9", "xent_ops {xent_ops.__version__}", {str(PACKAGE)!r}, {str(other)!r}):
                assert part in str(error), (part, error)
        else:
            raise AssertionError("no ImportError")
        try_it({name}, "aot_eager")
    """)


@pytest.mark.slow
def test_the_folder_of_earlier_kernels(hub):
    run(f"""
        sys.path.insert(0, {str(hub / "build" / "torch-cpu")!r})
        import xent_ops as within
        assert within.__file__.startswith({str(hub)!r})
        assert within.cross_entropy.__module__.startswith("_xent_ops_cpu_")
        try_it(within, "aot_eager")
    """)


def test_the_package_kernels_loads_it(hub):
    pytest.importorskip("kernels", reason="kernels is not installed")
    run(f"""
        from kernels import get_local_kernel
        hub = get_local_kernel(Path({str(hub)!r}), backend="cpu")
        assert hub.__file__.startswith({str(hub)!r})
        try_it(hub, "aot_eager")
        import xent_ops
        assert xent_ops.cross_entropy is hub.cross_entropy
    """)
