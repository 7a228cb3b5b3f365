"""``python -m xent_ops doctor``: the exit status and what it says."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch

import xent_ops
from xent_ops import _compile_check, _doctor, _doctor_npu, _environment, _extension, _private
from xent_ops.__main__ import main
from xent_ops.kernels import cpu
from xent_ops.ops import library

# A fresh process: Triton reads TRITON_INTERPRET when it is imported, and so do we.
SLOW_IMPORT = 300


def run(*arguments, **environment):
    inherited = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "CXX")}
    command = [sys.executable, "-m", "xent_ops", *(arguments or ["doctor"])]
    return subprocess.run(
        command, env={**inherited, **environment}, capture_output=True, text=True, timeout=SLOW_IMPORT
    )


@pytest.mark.slow  # it compiles
def test_healthy():
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert torch.__version__ in done.stdout
    assert "TRITON_INTERPRET is not set" in done.stdout
    for way in ("eager, float32", "eager, bfloat16", "torch.compile"):
        assert f"{way}: ok" in done.stdout
    if _extension.MODULE.exists():
        assert "C++ (xent_ops._C" in done.stdout and str(_extension.LIBRARY) in done.stdout
    for label in ("CPU", "CUDA / ROCm", "NPU"):
        assert label in done.stdout
    assert done.stdout.rstrip().endswith("Everything is right.") == _extension.MODULE.exists()


def test_version():
    assert run("--version").stdout == f"xent_ops {xent_ops.__version__}\n"


@pytest.fixture
def no_python_headers(tmp_path):
    """A compiler that finds every header but Python's."""
    path = tmp_path / "c++"
    path.write_text("""#!/bin/sh
for word; do
    case "$word" in --version) exec g++ "$@";; esac
done
echo "wrapper.cpp:1:10: fatal error: Python.h: No such file or directory" >&2
exit 1
""")
    path.chmod(0o755)
    return str(path)


@pytest.mark.slow  # test_what_compilers_say_in_words has the words
def test_python_headers_are_missing(monkeypatch, no_python_headers):
    monkeypatch.setenv("CXX", no_python_headers)
    problem = _compile_check.check(torch.device("cpu"))
    assert problem.startswith("ERROR: Python's C headers are missing (Debian: apt-get install python3-dev"), problem


@pytest.mark.slow
def test_no_compiler_on_the_path(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    problem = _compile_check.check(torch.device("cpu"))
    assert "torch.compile finds no C++ compiler: CXX is not set, and g++ is taken. Install one" in problem


@pytest.mark.parametrize(
    "said, words",
    [
        ("main.cpp:1:10: fatal error: omp.h: No such file or directory", "has no OpenMP"),
        ("RuntimeError: Failed to find C compiler. Please specify via CC environment variable.", "or set CC"),
        ("torch._inductor.exc.TritonMissing: Cannot find a working triton installation.", "the triton that belongs"),
        ("ImportError: libascendcl.so: cannot open shared object file: No such file or directory", "set_env.sh"),
        (
            "a.cpp:7:1: error: expected ';'\n\ntorch._inductor.exc.CppCompileError: C++ compile error",
            "It said: a.cpp:7:1",
        ),
        ("Traceback:\n  step()\nValueError: first\n\nAssertionError: Scalars differ", "ERROR: AssertionError: Scalars"),
    ],
)
def test_what_compilers_say_in_words(said, words):
    assert words in _compile_check._explain(said, 1)


def test_a_compiler_that_crashes(monkeypatch):
    monkeypatch.setattr(_compile_check.sys, "executable", "/bin/sh")
    monkeypatch.setattr(_compile_check, "_MODULE", ["-c", "kill -SEGV $$"])
    assert _compile_check.check(torch.device("cpu")) == "ERROR: the process died of signal 11"


@pytest.mark.slow  # test_no_compiler_on_the_path has the words
def test_a_missing_compiler_is_said_as_json():
    """Eager needs none; what torch.compile lacks is told, though earlier processes have compiled and cached."""
    done = run("doctor", "--json", CXX="/no/such/compiler")
    assert done.returncode == 1
    report = json.loads(done.stdout)  # and nothing else
    assert report["versions"]["torch"] == report["torch"]["torch_version"] == torch.__version__
    assert report["kernels"][0]["label"] == "CPU"
    ways = [(each["way"], bool(each["problem"])) for each in report["checks"][:3]]
    assert ways == [("eager, float32", False), ("eager, bfloat16", False), ("torch.compile", True)]
    (problem,) = report["problems"]
    assert "torch.compile finds no C++ compiler: CXX is /no/such/compiler. Install one (Debian: apt-get" in problem


TORCH_NPU = 'raise ImportError("libhccl.so: cannot open shared object file: No such file or directory")'


def test_cann_is_missing(tmp_path, monkeypatch, capsys, compiled_elsewhere):
    """torch_npu is installed, and torch was told not to import it."""
    (tmp_path / "torch_npu.py").write_text(TORCH_NPU)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["doctor"]) == 1
    assert "torch_npu is installed and cannot be imported: CANN is not found: install it" in capsys.readouterr().out


def test_parts_of_an_npu_that_do_not_fit(tmp_path, monkeypatch, capsys, compiled_elsewhere):
    """A torch_npu for another torch, a Triton without ascend backend, no CANN; then parts that fit."""
    (tmp_path / "torch_npu-2.14.0.dist-info").mkdir()
    metadata = tmp_path / "torch_npu-2.14.0.dist-info" / "METADATA"
    metadata.write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.14.0\nRequires-Dist: torch==9.9.0.*\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.delenv("ASCEND_TOOLKIT_HOME", raising=False)
    assert main(["doctor"]) == 1
    told = capsys.readouterr().out
    assert "torch_npu 2.14.0, triton-ascend not found, CANN not set; Inductor-Ascend cannot compile" in told
    assert f"torch_npu 2.14.0 belongs to torch 9.9, and this is {torch.__version__}" in told
    assert "has no ascend backend: run `pip uninstall triton`" in told and "CANN is not found: run `source" in told

    metadata.write_text(metadata.read_text().replace("9.9.0", ".".join(torch.__version__.split(".")[:2]) + ".0"))
    monkeypatch.setenv("ASCEND_HOME_PATH", "/opt/cann")
    fitting = dataclasses.replace(_doctor_npu.parts(), has_backend=True, has_cann_language=True)
    assert _doctor_npu.problems(fitting) == []
    assert "CANN /opt/cann; Inductor-Ascend compiles" in _doctor_npu.why(fitting)


@pytest.fixture
def compiled_elsewhere(monkeypatch):
    """What is compiled, and the bits of rows, which take a second, are other tests' matter."""
    monkeypatch.setattr(_compile_check, "check", lambda device: None)
    monkeypatch.setattr(_doctor, "_row_bits", lambda device: "not asked")


@pytest.mark.slow  # test_import.py has the warning of the package
def test_interpreter_is_warned_of_loudly():
    done = run(TRITON_INTERPRET="1")
    assert "WARNING: TRITON_INTERPRET is set" in done.stdout and "A THOUSAND TIMES SLOWER" in done.stdout
    # On a GPU machine it is what is wrong; without a GPU it does no harm.
    assert done.returncode == int(torch.cuda.is_available())


@pytest.fixture
def doubled_gradient():
    """The CPU's backward kernel, replaced by one that is off by a factor."""

    def wrong(*args, **kwargs):
        meta = [
            arg.to(torch.float64) if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg for arg in args
        ]
        return (2 * library.OPERATORS["cross_entropy_backward"].on_reference(*meta, **kwargs)).to(args[2].dtype)

    with torch.library._scoped_library("xent", "IMPL") as override:
        override.impl("cross_entropy_backward", wrong, "CPU", allow_override=True)
        yield


def test_wrong_kernel(doubled_gradient, compiled_elsewhere, capsys):
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "float32: WRONG: grad" in out and "Something is wrong" in out
    assert "Everything is right" not in out


def test_raising_kernel(monkeypatch, compiled_elsewhere, capsys):
    def broken(*args, **kwargs):
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr(xent_ops, "cross_entropy", broken)
    assert main(["doctor"]) == 1
    assert "ERROR: RuntimeError: the driver is too old" in capsys.readouterr().out


def test_what_torch_does_not_serve_is_said(compiled_elsewhere, monkeypatch, capsys):
    monkeypatch.setitem(_private.LEFT_OUT, "the lowerings", "a second buffer of logits")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert f"torch {torch.__version__} does not serve the lowerings: a second buffer of logits" in out
    assert "Everything is right" not in out


def test_bits_of_rows_that_hold():
    assert _doctor._row_bits(torch.device("cpu")) == "a row has the same bits in every batch"


def test_bits_of_rows_that_depend_on_the_place(monkeypatch, capsys):
    """As with a library whose products give odd rows of a chunk other bits. It is a note, not an error."""
    right = _doctor._numbers_of_rows

    def wrong(x, head, target):
        return right(x, head, target) + (torch.arange(len(x)) % 2).unsqueeze(1)

    monkeypatch.setattr(_doctor, "devices", lambda: [torch.device("cpu")])
    monkeypatch.setattr(_doctor, "_numbers_of_rows", wrong)
    monkeypatch.setattr(_compile_check, "check", lambda device: None)
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (said,) = report["batch_invariant"].values()
    assert said.startswith("NOT SO: ") and "of 100 rows in float32" in said and "of 512 rows in bfloat16" in said
    assert [note for note in report["notes"] if said in note]


def test_bits_of_rows_that_cannot_be_read(monkeypatch):
    def broken(*args):
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr(_doctor, "_numbers_of_rows", broken)
    assert _doctor._row_bits(torch.device("cpu")) == "not known: the driver is too old"


def test_the_interpreter_is_a_note(compiled_elsewhere, monkeypatch, capsys):
    monkeypatch.setattr(_doctor, "devices", lambda: [torch.device("cpu")])
    monkeypatch.setattr(_doctor, "interpreter_is_set", lambda: True)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "Everything is right" not in out and "TRITON_INTERPRET is set: a process" in out


def test_missing_triton_is_wrong_where_there_is_a_gpu(monkeypatch, compiled_elsewhere, capsys):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(_doctor, "devices", lambda: [torch.device("cuda", 0)])
    monkeypatch.setattr(_doctor, "check", lambda device, dtype: None)
    monkeypatch.setattr(_doctor, "_name", str)
    assert main(["doctor"]) == 1
    assert "install the triton that belongs" in capsys.readouterr().out


@pytest.fixture
def forget_extension():
    """Whether the extension serves the CPU is found out once a process."""
    yield cpu.problem.cache_clear()
    cpu.problem.cache_clear()


def test_stale_extension_is_wrong(forget_extension, compiled_elsewhere, monkeypatch, capsys):
    if cpu.problem() is not None:
        pytest.skip("built without C++ (XENT_OPS_BUILD_CPP=0)")
    cpu.problem.cache_clear()
    monkeypatch.setattr(_extension, "sources_hash", lambda: "0123456789abcdef")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "the slower one: the C++ extension was built from other sources" in out
    assert "libxent_ops.so was built from other sources" in out


def test_no_extension_is_said(forget_extension, compiled_elsewhere, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(_extension, "MODULE", tmp_path / "_C.abi3.so")
    monkeypatch.setattr(_extension, "LIBRARY", tmp_path / "libxent_ops.so")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "built without its C++ extension" in out and "Everything is right" not in out
    verdict = out[out.index("Nothing is wrong, but:") :]
    assert "Plain torch serves the CPU" in verdict and verdict.endswith(f"    {_extension.build_command()}\n")
    assert main(["doctor", "--json"]) == 0
    (note,) = json.loads(capsys.readouterr().out)["notes"]
    assert note in verdict


ORIGINS = {
    "folder": ('{"dir_info": {}, "url": "file:///src/with%20space"}', "'/src/with space'"),
    "repository": (
        '{"url": "https://host/x.git", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}}',
        "--no-cache-dir --force-reinstall git+https://host/x.git@c0ffee",
    ),
    "sdist": ('{"archive_info": {}, "url": "https://host/x.tar.gz"}', "--force-reinstall https://host/x.tar.gz"),
    "wheel": ('{"archive_info": {}, "url": "file:///x-py3-none-any.whl"}', "<the folder with the sources of xent_ops>"),
    "index": (None, "<the folder with the sources of xent_ops>"),
}


@pytest.mark.parametrize("origin", ORIGINS)
def test_the_command_that_builds_the_cpp_part(origin, monkeypatch, tmp_path):
    """Of what pip installed, from its own record; tests/package/test_install.py runs it."""
    record, arguments = ORIGINS[origin]
    info = tmp_path / "xent_ops-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: xent-ops\nVersion: 0.1.0\n")
    if record:
        (info / "direct_url.json").write_text(record)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(_extension, "_setuptools_is_new", lambda: True)
    monkeypatch.setattr(_extension, "SOURCES", tmp_path / "none")
    pip = f"XENT_OPS_BUILD_CPP=1 {sys.executable} -m pip install --no-build-isolation --no-deps "
    command = _extension.build_command()
    assert command.startswith(pip) and command.endswith(arguments)
    monkeypatch.setattr(_extension, "SOURCES", tmp_path)  # a checkout
    assert _extension.build_command() == f"{pip}--editable {_extension.PACKAGE.parent}"


@pytest.mark.parametrize("version, enough", [("65.5.0", False), ("77.0.3", True), ("84", True), (None, False)])
def test_old_setuptools_are_replaced_first(version, enough, monkeypatch):
    """--no-build-isolation does not look at what pyproject.toml requires."""

    def installed(name):
        if version is None:
            raise _extension.importlib.metadata.PackageNotFoundError
        return version

    monkeypatch.setattr(_extension.importlib.metadata, "version", installed)
    first = f"{sys.executable} -m pip install 'setuptools>=77' && XENT_OPS_BUILD_CPP=1 "
    assert _extension.build_command().startswith(first) == (not enough)


def test_what_takes_seconds_is_named_first(compiled_elsewhere, monkeypatch, capsys):
    told = []
    for module in (_doctor, _compile_check):
        monkeypatch.setattr(module, "check", lambda *arguments: told.append(capsys.readouterr().out))
    assert main(["doctor"]) == 0
    assert [out.splitlines()[-1].split(", ", 1)[-1] for out in told[:3]] == [
        "eager, float32: ",
        "eager, bfloat16: ",
        "torch.compile: ",
    ]
    assert "torch.compile takes 10 s to a minute" in told[0]


@pytest.mark.gpu
def test_gpu_is_checked(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "cuda:0" in out and out.count("torch.compile: ok") == len(_doctor.devices())


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no libstdc++ of torch")
@pytest.mark.parametrize(
    "compiler, problem",
    [
        ("g++", None),
        ("g++ -static-libstdc++", "does not link the shared libstdc++"),
        ("g++-of-nobody", "does not compile"),
    ],
)
def test_compiler_of_packages(monkeypatch, compiler, problem):
    """A package whose compiler links libstdc++ statically would end the process as it is loaded."""
    monkeypatch.setenv("CXX", compiler)
    _environment.package_problem.cache_clear()
    try:
        found = _environment.package_problem()
    finally:
        _environment.package_problem.cache_clear()
    assert found is None if problem is None else problem in found
