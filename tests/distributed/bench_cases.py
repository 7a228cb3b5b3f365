"""The benchmarks over ranks, on a small problem; run on every rank by test_linear_parallel.py."""

from argparse import Namespace

import torch

from tools.bench import ranks
from xent_ops.bench.arguments import Shape
from xent_ops.bench.contestants import Outputs
from xent_ops.bench.measure import Settings, measure
from xent_ops.bench.run import Setting


def tables(device, of, **more):
    setting = Setting(torch.device(device), torch.bfloat16, None)
    return of(Namespace(shapes=[Shape(66, 203)], **more), setting)[0]


def report(device):
    """Every line is there and right."""
    heads = tables(device, ranks.heads, hidden=[16], chunk_rows=[32, 66])
    for table in heads + tables(device, ranks.losses, alone=None):
        settings = Settings(graph=False, budget_ms=1, row=True)
        results = measure(table.name, table.make(), table.contestants, settings, ranks.Clock(torch.device(device)))
        for result in results:
            assert result.status == "ok" and result.ms > 0, result
            assert result.ratio or result.variant.startswith("copy"), result
        names = {result.variant for result in results}
        assert "xent eager, 66" in names or "eager, DTensor" in names
        assert sum(len(result.errors) > 1 for result in results) >= 4


def wrong_is_seen(device):
    """Half of a gradient is called wrong, on one rank of all too."""
    (table,) = tables(device, ranks.heads, hidden=[16], chunk_rows=None)
    problem = table.make()
    (eager,) = (one for one in table.contestants if one.name == "xent eager")
    loss, (hidden, matrix) = problem.bind(eager)()
    assert problem.check(Outputs(loss, (hidden, matrix)), eager).ok
    assert not problem.check(Outputs(loss, (hidden * 0.5, matrix)), eager).ok
    factor = 0.5 if ranks.dist.get_rank() == 1 else 1.0
    assert not problem.check(Outputs(loss, (hidden, matrix * factor)), eager).ok
