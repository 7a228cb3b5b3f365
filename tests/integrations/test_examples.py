"""Each recipe of examples/integrations: its losses are those of the same run without us, which it asserts itself. And
examples/grpo_step.py and fp8_head.py."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "examples" / "integrations"

# Recipe: the packages that it needs.
RECIPES = {
    "accelerate_loop": ("transformers", "accelerate"),
    "huggingface_trainer": ("transformers", "accelerate"),
    "lightning_module": ("lightning",),
    "nanogpt": (),
    "timm_classifier": ("timm", "torchvision"),
    "torchtitan_loss": ("torchtitan", "spmd_types"),
    "trl_gkd": ("trl", "datasets", "accelerate"),
    "trl_grpo": ("trl", "datasets", "accelerate"),
    "trl_sft": ("trl", "datasets", "accelerate"),
    "verl_log_probs": ("verl", "transformers"),
    "vision_classifier": ("transformers",),
}
QUICK = ("lightning_module", "timm_classifier", "verl_log_probs")  # what no other test runs; ten seconds each


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in RECIPES]
)
def test_losses_agree(name):
    missing = [package for package in RECIPES[name] if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}  # nothing is downloaded
    result = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py")], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "values agree to 1e-05" in result.stdout


def test_every_recipe_is_run_and_has_a_section():
    files = {path.stem for path in FOLDER.glob("*.py")} - {"common"}
    assert files == set(RECIPES)
    text = (FOLDER.parents[1] / "docs" / "integrations.md").read_text()
    for name in files:
        path = f"examples/integrations/{name}.py"
        assert f"\n\n[{path}](../{path})\n" in text  # where this stands alone, the site shows the file


def test_a_policy_learns_and_its_loss_is_that_of_plain_torch(monkeypatch, capsys, tmp_path):
    for package in ("matplotlib", "rich"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    spec = importlib.util.spec_from_file_location("grpo_step", FOLDER.parent / "grpo_step.py")
    example, reports, picture = importlib.util.module_from_spec(spec), [], tmp_path / "grpo.png"
    spec.loader.exec_module(example)
    monkeypatch.setattr(example, "report", lambda console, found: reports.append(found))
    sizes = {"vocabulary": 32, "width": 16, "prompts": 8, "length": 6, "steps": 20, "lr": 0.03, "rounds": 2}
    options = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", ["grpo_step.py", *options, "--device", "cpu", "--plot", str(picture)])
    assert example.main() == 0
    (found,) = reports
    wanted = found["plain torch"]
    for way in found.values():
        assert way.loss == pytest.approx(wanted.loss, abs=1e-6)
        torch.testing.assert_close(way.grad_hidden, wanted.grad_hidden)
    printed = capsys.readouterr().out
    (before, after), *_ = re.findall(r"mean reward (\S+) at first, (\S+) after 20 steps", printed)
    assert float(before) < 0.4 and float(after) > 0.8
    assert "20/20: mean reward" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_heads_of_8_bits_train_alike(tmp_path):
    for package in ("matplotlib", "rich", "tokenizers"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    picture = tmp_path / "picture.png"
    options = ["--device", "cpu", "--steps", "12", "--seeds", "1", "--characters", "400000", "--plot", str(picture)]
    result = subprocess.run(
        [sys.executable, str(FOLDER.parent / "fp8_head.py"), *options], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert picture.stat().st_size > 10_000
    found = dict(re.findall(r"│ (fp8\w*) .*│ ([+-]0\.\d{4}) +│", result.stdout))
    assert set(found) == {"fp8", "fp8_gradients"}
    assert all(abs(float(apart)) < 0.02 for apart in found.values())
