"""The benchmarks over ranks, on a small problem; run on every rank by test_linear_parallel.py."""

from argparse import Namespace

import torch

from tools.bench import ranks
from xent_ops.bench import check
from xent_ops.bench.arguments import Shape
from xent_ops.bench.contestants import Outputs
from xent_ops.bench.measure import measure
from xent_ops.bench.problems import Setting


def tables(device, of, **more):
    return of(Namespace(shapes=[Shape(66, 203)], **more), setting(device))


def setting(device):
    return Setting(torch.device(device), torch.bfloat16, row=True)


def report(device):
    """Every line is there and right."""
    heads = tables(device, ranks.heads, hidden=[16], chunk_rows=[32, 66])
    for table in heads + tables(device, ranks.losses, alone=None):
        clock = ranks.Clock(torch.device(device), row=True)
        results = measure(table.name, table.make(), table.contestants, setting(device), clock)
        for result in results:
            assert result.status == "ok" and result.ms > 0, result
            assert result.ratio or result.kind == "unit", result
        names = {result.variant for result in results}
        assert "xent eager, 66" in names or "eager, DTensor" in names
        assert sum(len(result.errors) > 1 for result in results) >= 4


def wrong_is_seen(device):
    """Half of a gradient is called wrong, on one rank of all too."""
    (table,) = tables(device, ranks.heads, hidden=[16], chunk_rows=None)
    problem = table.make()
    (eager,) = (one for one in table.contestants if one.name == "xent eager")
    loss, (hidden, matrix) = problem.bind(eager)()
    assert not check.wrong(problem.check(Outputs(loss, (hidden, matrix)), eager))
    assert check.wrong(problem.check(Outputs(loss, (hidden * 0.5, matrix)), eager))
    factor = 0.5 if ranks.dist.get_rank() == 1 else 1.0
    assert check.wrong(problem.check(Outputs(loss, (hidden, matrix * factor)), eager))
