"""Lines and settings of a bench for its tests."""

import torch

from xent_ops.bench.contestants import Contestant
from xent_ops.bench.problems import Setting

CPU = torch.device("cpu")


def setting(dtype=torch.float32, ignored=None):
    return Setting(CPU, dtype, ignored)


def probe(loss, name="probe", kind="ours", **options):
    return Contestant(name, kind, lambda: loss, **options)
