"""``python -m tools.bench megatron`` on one rank: every line is right."""

from argparse import Namespace

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ImportError)
import megatron_models as models

from tools.bench import megatron, ranks
from xent_ops.bench.arguments import Shape
from xent_ops.bench.measure import measure
from xent_ops.bench.problems import Setting


def test_lines():
    setting = Setting(torch.device("cpu"), torch.bfloat16, row=True)
    (table,) = megatron.tables(Namespace(shapes=[Shape(34, 64)], hidden=[16]), setting)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with models.groups("cpu"):
            clock = ranks.Clock(setting.device, row=True)
            results = measure(table.name, table.make(), table.contestants, setting, clock)
    finally:
        dist.destroy_process_group()
    assert {result.status for result in results} == {"ok"}, results
    assert {"use_xent, loss_mask=True", "Megatron, fused"} <= {result.variant for result in results}
    assert sum({"dH", "dW"} <= result.errors.keys() for result in results) == 4
