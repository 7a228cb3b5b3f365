"""DeepSpeed's ZeRO on two ranks. What runs on each is deepspeed_on_ranks.py."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = ("deepspeed", "transformers", "peft")
ABSENT = [name for name in PACKAGES if importlib.util.find_spec(name) is None]  # importing DeepSpeed asks for compilers
pytestmark = pytest.mark.skipif(bool(ABSENT), reason=f"{', '.join(ABSENT)} not installed")
CASES = [(case, stage) for stage in (2, 3) for case in ("module", "tied", "with_use_xent")]
CASES += [(case, 3) for case in ("zero_3_of_language_models", "what_is_gathered", "refusals", "of_trainer")]


@pytest.mark.parametrize("case, stage", CASES)
def test_two_ranks(case, stage):
    script = str(Path(__file__).with_name("deepspeed_on_ranks.py"))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *launcher, script, case, str(stage)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert all(f"rank {rank} of 2: right" in result.stdout for rank in range(2))
