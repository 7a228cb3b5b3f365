"""A draw: a program that a test runs, and prints where it fails."""

import dataclasses
import traceback
import types

HEAD = """\
# In the root of a checkout: {command}
import sys

sys.path[:0] = ["tests", "tests/fuzz"]
{setup}
{body}"""

SETUP = """\
import torch

torch.distributed.init_process_group("gloo")
"""
SETUP_ON_GPUS = """\
import os

import torch

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group("nccl")
"""


@dataclasses.dataclass
class Draw:
    """``body`` is the program without what a test has done before it: the paths, the process group."""

    seed: int
    name: str
    body: str
    keywords: frozenset  # the options that the call is given
    ranks: int = 1
    device: str = "cpu"

    @property
    def program(self):
        command, setup = "python this.py", ""
        if self.ranks > 1:
            command = f"torchrun --nproc-per-node {self.ranks} this.py"
            setup = SETUP if self.device == "cpu" else SETUP_ON_GPUS
        return HEAD.format(command=command, setup=setup, body=self.body)

    def run(self):
        module = types.ModuleType(f"draw_{self.seed}")
        exec(compile(self.body, f"<draw {self.seed}>", "exec"), vars(module))


def failure_of(draw):
    """The program and its error; None where it passes."""
    try:
        draw.run()
    except Exception:
        return (
            f"draw {draw.seed} of {draw.name} failed. The program:\n\n{draw.program}\n{traceback.format_exc(limit=-4)}"
        )
    return None
