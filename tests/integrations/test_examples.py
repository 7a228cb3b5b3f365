"""Each recipe of examples/integrations: its losses are those of the same run without us, which it asserts itself."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "integrations"

# Recipe: the packages that it needs. Those marked slow compile with Inductor.
RECIPES = {
    "accelerate_loop": ("transformers", "accelerate"),
    "huggingface_trainer": ("transformers", "accelerate"),
    "lightning_module": ("lightning",),
    "nanogpt": (),
    "timm_classifier": ("timm", "torchvision"),
    "torchtitan_loss": ("torchtitan", "spmd_types"),
    "trl_grpo": ("trl", "datasets", "accelerate"),
    "trl_sft": ("trl", "datasets", "accelerate"),
    "vision_classifier": ("transformers",),
}
COMPILED = ("huggingface_trainer", "nanogpt")


def _parameter(name):
    return pytest.param(name, marks=pytest.mark.slow if name in COMPILED else ())


@pytest.mark.parametrize("name", [_parameter(name) for name in RECIPES])
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
