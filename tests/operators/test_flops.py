"""torch.utils.flop_counter sees the products of every operator, in steps and in the graphs that compilers cost."""

import pytest
import torch
import torch.nn.functional as F
from helpers.graphs import AotEagerAndRecordGraphs
from helpers.processes import run_python
from helpers.samples import calls
from torch.utils.flop_counter import FlopCounterMode

import xent_ops
from xent_ops.ops.flops import FLOPS
from xent_ops.ops.library import OPERATORS
from xent_ops.ops.schemas import COMPOSITES

N, H, V = 50, 8, 37


def counted(function, *args, **options):
    with FlopCounterMode(display=False) as counter:
        function(*args, **options)
    return counter.get_total_flops()


def test_formulas_count_what_the_reference_multiplies():
    seen = set()
    for name, args, options in calls("cpu", torch.float32, False):
        if name in COMPOSITES or options.get("skip_ignored"):
            continue
        operator = OPERATORS[name]
        if operator.overwrites is not None:
            args = (*args[: operator.position], args[operator.position].clone(), *args[operator.position + 1 :])
        products = counted(operator.reference, *args, **operator.keywords(options))
        assert counted(getattr(torch.ops.xent, name), *args, **options) == products, (name, args, options)
        if products:
            seen.add(name)
    assert seen == set(FLOPS)


def tensors(wanted=(True, True), dtype=torch.float32, rows=N):
    shapes = ((rows, H), (V, H))
    made = [torch.randn(shape).to(dtype).requires_grad_(grad) for shape, grad in zip(shapes, wanted, strict=True)]
    return *made, torch.randint(0, V, (rows,))


def plain(x, w, target):
    return F.cross_entropy(F.linear(x, w), target)


def one_pass(x, w, target):
    return xent_ops.linear_cross_entropy(x, w, target, chunk_rows=16)


def with_bias(x, w, target):
    return xent_ops.linear_cross_entropy(x, w, target, linear_bias=torch.zeros(V, dtype=x.dtype, requires_grad=True))


def rows(x, w, target):
    return xent_ops.linear_cross_entropy(x, w, target, reduction="none").sum()


def log_probs(x, w, target):
    return xent_ops.linear_token_log_probs(x, w, target).log_probs.sum()


def several_classes(x, w, target):
    return xent_ops.linear_token_log_probs(x, w, torch.stack([target, target.clamp(max=0), target], -1)).log_probs.sum()


def token_loss(x, w, target):
    return xent_ops.linear_token_loss(x, w, target, lambda stats: -stats.log_probs, chunk_rows=16, reduction="sum")


def of_teacher(x, w, target):
    """With a teacher of twice the features; rows of both heads behind the last class are not multiplied."""
    teacher = (torch.ones(len(x), 2 * H, dtype=x.dtype), torch.ones(V, 2 * H, dtype=x.dtype))
    return xent_ops.linear_distillation_loss(x, w, *teacher, target=target.clamp(max=V - 6), num_classes=V - 5)


def rows_of_teacher(x, w, target):
    """With a teacher of as many features, whose logits are made again too."""
    how = {"target": target, "reduction": "none"}
    return xent_ops.linear_distillation_loss(x, w, torch.ones_like(x), torch.ones_like(w), **how).sum()


def ignoring(x, w, target):
    return xent_ops.linear_cross_entropy(x, w, target.index_fill(0, torch.arange(9), -100), skip_ignored=True)


# Where the logits are made again with two gradients wanted, there is a fourth product.
AGAIN = (rows, log_probs, several_classes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("loss", [one_pass, with_bias, ignoring, token_loss, *AGAIN], ids=lambda f: f.__name__)
def test_a_step_counts_as_in_torch(loss, dtype):
    """Whatever of it is frozen; rows that are skipped count too."""
    product = 2 * N * H * V
    for wanted in ((True, True), (True, False), (False, True)):
        given = tensors(wanted, dtype)
        if loss is with_bias and wanted == (False, True):
            continue  # plain has no bias
        usual = counted(lambda: plain(*given).backward())  # noqa: B023
        assert usual == (1 + sum(wanted)) * product
        again = loss in AGAIN or (loss is token_loss and dtype == torch.float16)
        assert counted(lambda: loss(*given).backward()) == usual + again * product  # noqa: B023
    with torch.no_grad():
        assert counted(loss, *tensors(dtype=dtype)) == product


def test_a_teacher_s_product_counts():
    product, of_classes = 2 * N * H * V, 2 * N * H * (V - 5)
    assert counted(lambda: of_teacher(*tensors()).backward()) == 5 * of_classes
    assert counted(lambda: rows_of_teacher(*tensors()).backward()) == 6 * product
    with torch.no_grad():
        assert counted(of_teacher, *tensors()) == 3 * of_classes
        assert counted(rows_of_teacher, *tensors()) == 2 * product


def test_modules_of_a_model():
    """The counter names the module that the products stand in."""
    model = xent_ops.LinearCrossEntropyLoss(H, V)
    x, _, target = tensors()
    with FlopCounterMode(display=False) as counter:
        model(x, target).backward()
    (found,) = counter.get_flop_counts()["LinearCrossEntropyLoss"]
    assert found is torch.ops.xent.linear_cross_entropy_with_grad


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")  # torch's own recording backend
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("loss", [one_pass, *AGAIN], ids=lambda f: f.__name__)
def test_graphs_count_as_eager(loss, dynamic):
    """Inductor's estimate, operator by operator, of the forward and the backward.

    Not of the open loop, whose operators that write are wrapped in these graphs until Inductor lowers them.
    """
    from torch._inductor.fx_utils import count_flops_fx

    given, graphs = tensors(), AotEagerAndRecordGraphs()
    torch.compile(loss, backend=graphs, fullgraph=True, dynamic=dynamic)(*given).backward()
    nodes = [node for gm in (*graphs.fw_graphs, *graphs.bw_graphs) for node in gm.graph.nodes]
    total = sum(flops for node in nodes if (flops := count_flops_fx(node)) is not None)
    if isinstance(total, torch.SymInt):
        total = total.node.hint
    assert total == counted(lambda: loss(*given).backward())


@pytest.mark.slow
def test_the_open_loop_counts_as_it_is_lowered(monkeypatch):
    from torch._inductor.fx_utils import count_flops_fx
    from torch._inductor.graph import GraphLowering

    found, lower = [], GraphLowering.run_node

    def count(self, node):
        found.append(count_flops_fx(node) or 0)
        return lower(self, node)

    monkeypatch.setattr(GraphLowering, "run_node", count)
    given = tensors()
    torch.compile(token_loss, fullgraph=True)(*given).backward()
    assert sum(found) == 3 * 2 * N * H * V == counted(lambda: token_loss(*given).backward())


@pytest.mark.slow  # three processes
def test_nothing_imports_the_counter():
    """It takes Triton with it. The formulas are there whichever is imported first, and whoever looks for it."""
    for imports in (
        "import torch, xent_ops; assert 'torch.utils.flop_counter' not in sys.modules",
        "import torch.utils.flop_counter, xent_ops",
        "import torch, xent_ops, importlib.util as u; assert u.find_spec('torch.utils.flop_counter').loader.get_source",
    ):
        run_python(f"""
            import sys
            {imports}
            from torch.utils import flop_counter
            assert torch.ops.xent.linear_cross_entropy_with_grad in flop_counter.flop_registry
            x, head, target = torch.ones(4, 8), torch.ones(16, 8), torch.zeros(4, dtype=torch.int64)
            with flop_counter.FlopCounterMode(display=False) as counter:
                xent_ops.linear_cross_entropy(x, head, target)
            assert counter.get_total_flops() == 2 * 4 * 8 * 16
        """)
