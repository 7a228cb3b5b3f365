"""A draw: a program that a test runs, and prints where it fails."""

import dataclasses
import inspect
import traceback
import types

import xent_ops
from xent_ops import distributed

DTYPES = ("torch.float32", "torch.bfloat16", "torch.float16", "torch.float64")
HALF = DTYPES[1:3]
SHARD = distributed.Shard._fields

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


def parameters_of(name, ranks=1):
    """Over ranks the fields of a shard are parameters too."""
    function = getattr(xent_ops, name, None) or getattr(distributed, name)
    names = list(inspect.signature(function).parameters)
    if "shard" not in names:
        return names
    names.remove("shard")
    return names if ranks == 1 else [*names, *SHARD]


class Program:
    """A draw in the making: its ``lines``, and of its call ``options``, by name, and texts of other keywords.

    ``fixed`` holds what is not drawn, by the name that ``pick``, ``maybe`` and ``option`` are given.
    """

    def __init__(self, random, seed, device, name, backend, ranks, fixed):
        self.random, self.seed, self.device, self.backend, self.ranks = random, seed, device, backend, ranks
        self.fixed, self.left = fixed, {*fixed}
        self.name, self.parameters, self.linear = name, parameters_of(name, ranks), "linear" in name.lower()
        self.path = f"xent_ops.{name}" if hasattr(xent_ops, name) else f"xent_ops.distributed.{name}"
        self.options, self.more, self.lines = {}, [], []

    def pick(self, choices, name=None):
        self.left.discard(name)
        return self.fixed[name] if name in self.fixed else self.random.choice(choices)

    def maybe(self, share=0.5, name=None):
        self.left.discard(name)
        return self.fixed[name] if name in self.fixed else self.random.random() < share

    def option(self, name, share, choices):
        """In a share of the draws, and in all where it is fixed."""
        if name in self.fixed or self.maybe(share):
            self.options[name] = self.pick(choices, name)

    def say(self, *lines):
        self.lines += lines

    def begin(self, judge):
        self.say("import torch", "", "import xent_ops", f"from {judge} import expect", "")
        self.say(f"torch.manual_seed({self.seed})")

    def compiled(self, function):
        if self.backend is None:
            return function
        dynamic = ", dynamic=True" if self.maybe(0.3) else ""
        return f"torch.compile({function}, fullgraph=True, backend={self.backend!r}{dynamic})"

    @property
    def by_name(self):
        """Those of a shard too."""
        return [*(f"{name}={value!r}" for name, value in self.options.items()), *self.more]

    @property
    def texts(self):
        if self.ranks == 1 or not self.linear:
            return self.by_name
        place = [text for text in self.by_name if text.split("=")[0] in SHARD]
        others = [text for text in self.by_name if text not in place]
        return [*others, f"shard=xent_ops.distributed.Shard({', '.join(place)})"]

    def drawn(self):
        assert not self.left, f"{self.name} has no {self.left} to fix here"
        keywords = frozenset(text.split("=")[0] for text in self.by_name)
        return Draw(self.seed, self.name, "\n".join(self.lines) + "\n", keywords, self.ranks, self.device)


def failure_of(draw):
    """The program and its error; None where it passes."""
    try:
        draw.run()
    except Exception:
        return (
            f"draw {draw.seed} of {draw.name} failed. The program:\n\n{draw.program}\n{traceback.format_exc(limit=-4)}"
        )
    return None
