"""use_xent of TRL's trainers on two ranks. What runs on each is trl_on_ranks.py."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

for package in ("trl", "datasets", "peft"):
    pytest.importorskip(package, reason=f"{package} is not installed")


KINDS = ["SFT", "DPO", "KTO", "GRPO", "RLOO", "GKD", "Distillation"]
WRAPPED = ["FSDP", "ZeRO-3", "ZeRO-2 training", "ZeRO-3 training"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS + WRAPPED)
def test_two_ranks(kind):
    if kind.startswith("ZeRO") and importlib.util.find_spec("deepspeed") is None:  # importing it asks for compilers
        pytest.skip("deepspeed is not installed")
    script = str(Path(__file__).with_name("trl_on_ranks.py"))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""} if kind.startswith("ZeRO") else {}
    result = subprocess.run([sys.executable, *launcher, script, kind], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert all(f"rank {rank} of 2: the same" in result.stdout for rank in range(2))
