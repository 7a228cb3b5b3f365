"""Every operator as core aten, for compilers that know no other: values, what is left of it, exported programs, ONNX."""

import pytest
import torch
from helpers.samples import calls_of
from torch.export import Dim, export
from torch.fx.experimental.proxy_tensor import make_fx

import xent_ops
from xent_ops.ops.library import OPERATORS

N, H, V = 40, 16, 37
ROWS = {0: Dim("rows")}
WRITERS = [name for name, op in OPERATORS.items() if op.overwrites]


def foreign(graph):
    """What calls something else than core aten; arithmetic of sizes, and what torch.export asserts, are its own."""
    targets = {node.target for node in graph.nodes if node.op == "call_function"}
    targets -= {torch.ops.aten._assert_tensor_metadata.default}
    operators = [target for target in targets if isinstance(target, torch._ops.OpOverload)]
    assert all(target.__module__ == "_operator" for target in targets.difference(operators))
    return [target for target in operators if torch.Tag.core not in target.tags]


def skipped_before(name, args, options):
    """The call as it is made where rows are skipped: with the lse of the forward, infinite in these."""
    arguments = OPERATORS[name].arguments
    if not options.get("skip_ignored") or "lse" not in arguments:
        return args
    ignored = args[arguments.index("target")] == options.get("ignore_index", -100)
    args = list(args)
    place = arguments.index("lse")
    args[place] = args[place].masked_fill(ignored, float("inf"))
    return args


def as_tuple(outputs):
    return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)


def _dtypes():
    """Of each operator float32, and a dtype of 16 bits: heads have a way of their own in float16.

    A mistake in the loop over chunks shows in the forward operators: what shards and chunks share with them is slow. So
    are two heads and linear_top_k, the slowest: test_programs and test_training_steps have them too.
    """
    for name in sorted(set(OPERATORS) - set(WRITERS)):
        like_others = any(
            word in name for word in ("backward", "grad", "shard", "chunk", "linear_divergences", "linear_top_k")
        )
        yield pytest.param(name, torch.float32, marks=pytest.mark.slow if like_others else ())
        half = torch.float16 if name.startswith("linear_") else torch.bfloat16
        yield pytest.param(name, half, marks=pytest.mark.slow)


@pytest.mark.parametrize("name, dtype", _dtypes(), ids=str)
def test_values(name, dtype):
    """Those of the CPU's kernels, with shapes, dtypes and strides."""
    table, overload = dict(xent_ops.decompositions().items()), OPERATORS[name].overload
    samples = calls_of(name, "cpu", dtype, False)
    samples = [sample for sample in samples if not sample.options.get("products")]  # core aten has no such
    if name.endswith("_shard"):  # what a rank packs of skipped rows is not read: the join has their values
        samples = [sample for sample in samples if not sample.options.get("skip_ignored")]
    assert samples
    for _, args, options in samples:
        args = skipped_before(name, args, options)
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]

        def function(*tensors, args=args, options=options):
            given = iter(tensors)
            return overload(*(next(given) if isinstance(arg, torch.Tensor) else arg for arg in args), **options)

        traced = make_fx(function, decomposition_table=table, tracing_mode="fake")(*tensors)
        assert not foreign(traced.graph), options
        results = {result.name: i for i, result in enumerate(overload._schema.returns)}
        all_made, all_expected = as_tuple(traced(*tensors)), as_tuple(function(*tensors))
        for i, (made, expected) in enumerate(zip(all_made, all_expected, strict=True)):
            if i == results.get("lse_low"):  # what rounding took from the lse: their sum is compared
                made, expected = made + all_made[results["lse"]], expected + all_expected[results["lse"]]
            largest = expected.nan_to_num(0.0, 0.0, 0.0).abs().max().item() if expected.numel() else 0.0
            close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.0, "atol": 0.02 * largest}
            torch.testing.assert_close(made, expected, equal_nan=True, check_stride=True, **close)


@pytest.mark.parametrize("name", WRITERS)
def test_writers_are_refused(name):
    table = xent_ops.decompositions()
    with pytest.raises(NotImplementedError, match=f"xent::{name} writes to .*torch.no_grad"):
        table[OPERATORS[name].overload]()


def test_nothing_else_changes():
    """A table is the caller's own, and Inductor has none of it."""
    from torch._inductor.decomposition import decompositions

    before, ours = set(decompositions), OPERATORS["cross_entropy_forward"].overload
    table = xent_ops.decompositions()
    del table[ours]
    assert set(decompositions) == before
    assert ours not in torch.export.default_decompositions() and ours in xent_ops.decompositions()


class Loss(torch.nn.Module):
    def __init__(self, function, **options):
        super().__init__()
        self.function, self.options = function, options

    def forward(self, *args, **options):
        return self.function(*args, **self.options, **options)


def outputs(x, head, target):
    made = xent_ops.linear_cross_entropy_outputs(x, head, target)
    return made.loss, made.predictions, made.accuracy, made.entropy


def top_k(input, weight, target):
    return tuple(xent_ops.linear_top_k(input, weight, 3, target))


def log_probs(x, head, target):
    made = xent_ops.linear_token_log_probs(x, head, target)
    return made.log_probs, made.entropy


def several_classes(x, head, target):
    return xent_ops.linear_token_log_probs(x, head, torch.stack([target, target.clamp(max=3)], -1)).log_probs


def token_loss(x, head, target):
    return xent_ops.linear_token_loss(
        x, head, target, lambda stats: -stats.log_probs - 0.1 * stats.entropy, reduction="sum"
    )


def distillation(x, head, target):
    how = {"target": target, "beta": 0.5, "temperature": 2.0, "hard_weight": 0.5}
    how |= {"linear_bias": head[:, 0], "teacher_bias": head[:, 1].detach()}
    return xent_ops.linear_distillation_loss(x, head, x.detach().flip(1), head.detach().flip(0), **how)


OPTIONS = {"label_smoothing": 0.1, "softcap": 5.0, "logit_scale": 0.5, "lse_square_scale": 0.1}
LOSSES = {
    "mean": Loss(xent_ops.cross_entropy),
    "sum, all options": Loss(xent_ops.cross_entropy, reduction="sum", **OPTIONS),
    "rows, weights": Loss(xent_ops.cross_entropy, weight=torch.linspace(0.5, 1.5, V), reduction="none"),
    "probabilities": Loss(xent_ops.cross_entropy, label_smoothing=0.1),
    "linear": Loss(xent_ops.linear_cross_entropy),
    "linear, all options": Loss(xent_ops.linear_cross_entropy, **OPTIONS),
    "linear, chunks": Loss(xent_ops.linear_cross_entropy, chunk_rows=16, skip_ignored=True),
    "linear, rows": Loss(xent_ops.linear_cross_entropy, reduction="none"),
    "outputs": Loss(outputs),
    "log_probs": Loss(log_probs),
    "several classes": Loss(several_classes),
    "top_k": Loss(top_k),
    "token_loss": Loss(token_loss),
    "distillation": Loss(distillation),
}


def inputs(name, rows=N):
    target = torch.randint(0, V, (rows,))
    target[1::4] = -100
    if LOSSES[name].function is xent_ops.cross_entropy:
        return torch.randn(rows, V), torch.rand(rows, V) if name == "probabilities" else target
    return torch.randn(rows, H), torch.randn(V, H), target


def exported(name, dynamic):
    """The program in core aten, and what it was exported of."""
    loss, given = LOSSES[name], inputs(name)
    shapes = (tuple(ROWS if len(tensor) == N else None for tensor in given),) if dynamic else None
    with torch.no_grad():
        program = export(loss, given, dynamic_shapes=shapes)
    program = program.run_decompositions(xent_ops.decompositions())
    assert not foreign(program.graph)
    return program, given


@pytest.mark.parametrize(
    "name, dynamic", [*((name, True) for name in LOSSES), ("mean", False), ("linear, chunks", False)], ids=str
)
def test_programs(name, dynamic):
    """With sizes of their own too, where they are dynamic. test_chunks has the static graph."""
    program, given = exported(name, dynamic)
    more = [inputs(name, rows) for rows in (7, 600)] if dynamic else []
    for tensors in (given, *more):
        torch.testing.assert_close(program.module()(*tensors), LOSSES[name](*tensors))


def step(name, **options):
    """Loss and gradients, the loss times another number."""

    def function(*tensors):
        leaves = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in tensors]
        loss = LOSSES[name](*leaves, **options)
        return loss.detach(), *torch.autograd.grad(3 * loss, [leaf for leaf in leaves if leaf.requires_grad])

    return function


@pytest.mark.parametrize(
    "name, options",
    [("mean", {}), ("mean", {"grad_in_forward": True}), ("linear", {}), ("distillation", {})],
    ids=str,
)
def test_training_steps(name, options):
    """What scales a gradient is no write that functionalization hides from the table."""
    function, given = step(name, **options), inputs(name)
    program = export(make_fx(function)(*given), given).run_decompositions(xent_ops.decompositions())
    assert not foreign(program.graph)
    for made, expected in zip(program.module()(*given), function(*given), strict=True):
        torch.testing.assert_close(made, expected)


@pytest.mark.parametrize("dynamic, products", [(False, 3), (True, 1)], ids=["static", "dynamic"])
def test_chunks(dynamic, products):
    """A known number of rows is unrolled, another is one chunk."""
    program, _ = exported("linear, chunks", dynamic)
    assert len(program.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)) == products


def test_dynamic_classes():
    """No size is specialised, nor bounded."""
    shapes = ((ROWS, {0: Dim("classes")}, ROWS),)
    program = export(LOSSES["linear"], inputs("linear"), dynamic_shapes=shapes)
    program = program.run_decompositions(xent_ops.decompositions())
    assert len(program.range_constraints) == 2
    assert all(bounds.lower <= 2 and bounds.upper > 2**60 for bounds in program.range_constraints.values())


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # torch's exporter of torch
@pytest.mark.parametrize(
    "name, dynamic",
    [
        *(pytest.param(name, False, marks=() if name == "log_probs" else pytest.mark.slow) for name in LOSSES),
        ("mean", True),
        ("linear", True),
    ],
    ids=str,
)
def test_onnx(name, dynamic):
    """An evaluation loss runs in onnxruntime."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    program, given = exported(name, dynamic)
    model = torch.onnx.export(program, verbose=False)
    more = [inputs(name, 7)] if dynamic else []
    for tensors in (given, *more):
        expected = as_tuple(LOSSES[name](*tensors))
        for made, wanted in zip(model(*tensors), expected, strict=True):
            torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-5)
