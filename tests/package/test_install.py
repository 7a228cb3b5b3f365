"""The ways to install, each in an environment of its own, which takes nothing but torch from this one."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import release
import torch

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow

SMOKE = """
import sys
import torch
import xent_ops
assert xent_ops.__file__.startswith(sys.prefix), xent_ops.__file__
logits, target = torch.randn(5, 9, requires_grad=True), torch.tensor([1, 2, 8, -100, 0])
loss = torch.compile(xent_ops.cross_entropy, backend="aot_eager", fullgraph=True)(logits, target)
want = torch.nn.functional.cross_entropy(logits, target)
torch.testing.assert_close(loss, want)
torch.testing.assert_close(*(torch.autograd.grad(value, logits)[0] for value in (loss, want)))
from xent_ops.kernels import cpu
assert cpu.problem() == "this xent_ops was built without its C++ extension", cpu.problem()
"""


def run(*command, **keywords):
    """The status and all that was said."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XENT_OPS_BUILD_CPP")}
    done = subprocess.run(
        list(map(str, command)),
        env=inherited,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
        **keywords,
    )
    return done.returncode, done.stdout


@pytest.fixture
def python(tmp_path):
    return release.environment(tmp_path / "venv")


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """This tree as a commit of a repository of its own."""
    folder = tmp_path_factory.mktemp("repository")
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("this is no git checkout, or there is no git")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    for command in (["init", "--quiet"], ["add", "--all"], [*identity, "commit", "--quiet", "-m", "as it is"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


def install(*command):
    """Builds in an empty environment, which takes setuptools from a package index."""
    status, said = run(*command)
    if status and ("setuptools" in said and ("No matching distribution" in said or "Failed to fetch" in said)):
        pytest.skip("no package index can be reached")
    assert status == 0, said
    return said


def smoke(python, folder):
    status, said = run(python, "-W", "ignore", "-c", SMOKE, cwd=folder)
    assert status == 0, said


def pip(python, *arguments):
    return install(python, "-m", "pip", "install", "--verbose", "--no-deps", *arguments)


def test_a_folder(python, repository, tmp_path):
    said = pip(python, repository)
    assert said.count("xent_ops is built without the CPU kernels") == 1 and "there is no torch" in said
    smoke(python, tmp_path)


def test_the_command_of_doctor_builds_the_cpp_part(python, repository, tmp_path):
    """After an installation without it, and with whichever setuptools a new environment has. `make env` is editable."""
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "torch.pth").write_text(f"{only_torch(tmp_path)}\n")
    pip(python, f"git+file://{repository}")
    ask = "import xent_ops; print(xent_ops._extension.build_command()); from xent_ops.kernels import cpu; print(cpu.problem())"
    status, said = run(python, "-c", ask, cwd=tmp_path)
    assert status == 0, said
    command, problem = said.splitlines()[-2:]
    assert problem == "this xent_ops was built without its C++ extension"
    install("sh", "-c", command)
    status, said = run(python, "-c", ask, cwd=tmp_path)
    assert status == 0 and said.splitlines()[-1] == "None", said


def only_torch(folder):
    """A folder with the torch of this environment and what it imports, and no setuptools."""
    made = folder / "only-torch"
    made.mkdir()
    for site in dict.fromkeys([Path(torch.__file__).parents[1], Path(sysconfig.get_path("purelib"))]):
        for path in site.iterdir():
            if not path.name.startswith(("setuptools", "xent_ops", "__editable__", "pip", "wheel")):
                link = made / path.name
                link.exists() or link.symlink_to(path)
    return made


def test_a_repository(python, repository, tmp_path):
    pip(python, f"git+file://{repository}")
    smoke(python, tmp_path)


def test_a_source_distribution(python, repository, tmp_path):
    """Made with this environment's setuptools, and built in an empty one."""
    make = f"from setuptools import build_meta; print(build_meta.build_sdist({str(tmp_path)!r}))"
    status, said = run(sys.executable, "-c", make, cwd=repository)
    assert status == 0, said
    (archive,) = tmp_path.glob("xent_ops-*.tar.gz")
    pip(python, archive)
    smoke(python, tmp_path)


@pytest.mark.skipif(not shutil.which("uv"), reason="uv is not installed")
def test_uv(python, repository, tmp_path):
    said = install("uv", "pip", "install", "--no-deps", "--python", python, repository)
    assert "xent-ops" in said
    smoke(python, tmp_path)
