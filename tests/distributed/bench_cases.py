"""The benchmark of the head and the loss over ranks, on a small problem; run on every rank by test_linear_parallel.py."""

from xent_ops.bench import ranks_linear


def report(device):
    """A line for each contestant; ours are there and right."""
    lines = ranks_linear.run(66, 203, 16, [32, 66], 1, device)
    found = {name: next(line for line in lines if line.startswith(name)) for name in ranks_linear.CONTESTANTS}
    for name, line in found.items():
        assert "WRONG" not in line, line
        assert "xent" not in name or "left out" not in line, line
    assert any(line.startswith("xent eager, 66 ") for line in lines)
    products, *_ = (float(line.split()[-2]) for line in lines[1:4])
    assert products > 0.0


def wrong_is_seen(device):
    """Half of a gradient is called wrong."""

    def halved(problem):
        step = ranks_linear._ours(problem)

        def with_half():
            loss, grad_input, grad_head = step()
            return loss, grad_input * 0.5, grad_head

        return with_half

    problem = ranks_linear._problem(66, 203, 16, 32, device)
    rest = (problem, ranks_linear._expected(problem), 1.0, device, 1)
    assert "WRONG" in ranks_linear._measured(ranks_linear.Contestant(halved), *rest)
    assert "WRONG" not in ranks_linear._measured(ranks_linear.Contestant(ranks_linear._ours), *rest)
