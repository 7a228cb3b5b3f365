"""The head and the loss as one in compiled code: what is in the graph, for which sizes, below which modes."""

import pytest
import torch
from expecttest import assert_expected_inline
from helpers.graphs import AotEagerAndRecordGraphs, CompileCounterWithBackend, graph_text, operator_names
from linear_cases import AGAIN, ONE_PASS, ROWS, H, N, V, gradients, inputs, loss
from torch._dynamo.utils import counters

import xent_ops

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
pytestmark = pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")  # torch's own recording backend
PINNED = pytest.mark.skipif(TORCH != (2, 13), reason="graphs are pinned to what torch 2.13 traces")


def ours(gm):
    return [name.removeprefix("xent.").removesuffix(".default") for name in operator_names(gm) if "xent." in name]


def log_probs(x, w, b, target):
    made = xent_ops.linear_token_log_probs(x, w, target, linear_bias=b)
    return made.log_probs + made.entropy


def outputs(x, w, b, target):
    made = xent_ops.linear_cross_entropy_outputs(x, w, target, linear_bias=b, lse_square_scale=0.1)
    return made.loss, made.z_loss, made.predictions, made.accuracy, made.token_losses, made.entropy, made.lse.detach()


def outputs_and_lse(x, w, b, target):
    made = xent_ops.linear_cross_entropy_outputs(x, w, target, linear_bias=b, lse_square_scale=0.1)
    return made.loss + made.lse[target >= 0].sum()


def outputs_of_rows(x, w, b, target):
    made = xent_ops.linear_cross_entropy_outputs(x, w, target, linear_bias=b, reduction="none")
    return made.loss


def composite(x, w, b, target):
    return torch.ops.xent.linear_cross_entropy(x, w, target, b, reduction="sum")


CALLS = {
    "mean": (loss, [ONE_PASS], ["linear_scale_grad"] * 3),
    "all options": (
        lambda x, w, b, target: loss(
            x, w, b, target, weight=torch.linspace(0.5, 1.5, V, device=x.device), label_smoothing=0.1,
            lse_square_scale=0.1, softcap=5.0, logit_scale=0.5, reduction="sum", divisor=7.0, chunk_rows=32,
        ),
        [ONE_PASS],
        ["linear_scale_grad"] * 3,
    ),
    "operator": (composite, [ONE_PASS], ["linear_scale_grad"] * 3),
    "rows": (lambda *tensors: loss(*tensors, reduction="none"), [ROWS], [AGAIN]),
    "log_probs": (log_probs, [ROWS], [AGAIN]),
    "outputs": (outputs, [ONE_PASS], ["linear_scale_grad"] * 3),
    "outputs and lse": (outputs_and_lse, [ONE_PASS], [AGAIN]),
    "outputs of rows": (outputs_of_rows, [ROWS], [AGAIN]),
}  # fmt: skip
STATISTICS = {"log_probs": (False, True), "outputs of rows": (True, True)}  # with_argmax, with_entropy


@pytest.mark.parametrize("call", CALLS)
def test_one_graph_each_way(device, call):
    """fullgraph=True, no break, and in the graph the operators alone: no logits."""
    function, forward, backward = CALLS[call]
    tensors, graphs = inputs(device=device), AotEagerAndRecordGraphs()
    counters.clear()
    made = gradients(torch.compile(function, fullgraph=True, backend=graphs), tensors)
    torch.testing.assert_close(made, gradients(function, tensors))
    assert not counters["graph_break"]
    ((first,), (second,)) = graphs.fw_graphs, graphs.bw_graphs
    assert (ours(first), ours(second)) == (forward, backward)
    assert not any("mm" in name for name in operator_names(first) + operator_names(second))
    for node in first.graph.find_nodes(op="call_function", target=torch.ops.xent.linear_cross_entropy_forward.default):
        assert tuple(node.args[5:]) == STATISTICS.get(call, ()), "no statistic that the function does not return"


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)], ids=str)
def test_only_wanted_gradients_are_made(device, wanted):
    """A frozen head, a frozen input, and a bias alone: the mask says so, and nothing else is saved."""
    tensors, graphs = inputs(device=device, wanted=wanted), AotEagerAndRecordGraphs()
    made = gradients(torch.compile(loss, fullgraph=True, backend=graphs), tensors)
    torch.testing.assert_close(made, gradients(loss, tensors))
    operator = torch.ops.xent.linear_cross_entropy_with_grad.default
    (node,) = graphs.fw_graphs[0].graph.find_nodes(op="call_function", target=operator)
    assert tuple(node.args[7]) == wanted
    assert ours(graphs.bw_graphs[0]) == ["linear_scale_grad"]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("where", ["inside", "around"])
def test_without_gradients_there_is_one_product(device, mode, where):
    tensors, graphs = inputs(device=device), AotEagerAndRecordGraphs()
    compiled = torch.compile(mode()(loss) if where == "inside" else loss, fullgraph=True, backend=graphs)
    with mode() if where == "around" else torch.enable_grad():
        value = compiled(*tensors)
    torch.testing.assert_close(value, loss(*tensors).detach())
    assert [ours(gm) for gm in graphs.fw_graphs] == [[ROWS]] and not graphs.bw_graphs
    assert not value.requires_grad


SIZES = {"dynamic=True": True, "mark_dynamic": None, "automatic": None}


@pytest.mark.parametrize("how", SIZES)
def test_any_number_of_rows(device, how):
    """One graph, with automatic sizes a second one, for more rows than a chunk has and for fewer."""
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(loss, fullgraph=True, backend=counter, dynamic=SIZES[how])
    compiled = []
    for rows in (N, 7, 100, 2500):
        *leaves, target = tensors = inputs(device=device, rows=rows)
        if how == "mark_dynamic":
            for tensor in (leaves[0], target):
                torch._dynamo.mark_dynamic(tensor, 0)
        torch.testing.assert_close(gradients(step, tensors), gradients(loss, tensors))
        compiled.append(counter.frame_count)
    assert len(set(compiled)) == (2 if how == "automatic" else 1) and compiled[1] == compiled[-1]


def test_inductor_for_any_number_of_rows(device):
    step = torch.compile(loss, fullgraph=True, dynamic=True)
    for rows in (N, 7, 2500):
        tensors = inputs(device=device, rows=rows)
        torch.testing.assert_close(gradients(step, tensors), gradients(loss, tensors))


NUMBERS = {
    "chunk_rows": lambda number: {"chunk_rows": number},
    "ignore_index": lambda number: {"ignore_index": -100 - number // 1000},
    "divisor": lambda number: {"divisor": number, "reduction": "sum"},
}


@pytest.mark.parametrize("option, source", [*((option, "item") for option in NUMBERS), ("divisor", "size")])
def test_numbers_that_depend_on_data(device, option, source):
    """Read from a tensor in the graph, or the size of what a mask has kept."""

    def counted(x, w, b, target):
        kept = target != -100
        number = kept.sum().item() if source == "item" else target[kept].shape[0]
        return loss(x, w, b, target, **NUMBERS[option](number))

    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        step = torch.compile(counted, fullgraph=True, backend="aot_eager")
        for rows in (N, 7):
            tensors = inputs(device=device, rows=rows)
            torch.testing.assert_close(gradients(step, tensors), gradients(counted, tensors))


@pytest.mark.parametrize("mode", ["max-autotune", "reduce-overhead"])
def test_modes(device, mode):
    """Another product stands before the loss, which max-autotune may tune."""

    def function(x, w, b, target):
        return loss(x @ w.T @ w, w, b, target)

    tensors = inputs(device=device)
    step = torch.compile(function, fullgraph=True, mode=mode)
    wanted = gradients(function, tensors)
    for _ in range(3):
        torch.testing.assert_close(gradients(step, tensors), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("where", ["inside", "around"])
def test_autocast(device, where):
    """As nn.Linear under autocast the products are of bfloat16; the loss is float32, gradients have their inputs' dtype."""
    tensors = inputs(device=device)

    def inside(*tensors):
        with torch.autocast(device, torch.bfloat16):
            return loss(*tensors)

    def around(*tensors):
        with torch.autocast(device, torch.bfloat16):
            return compiled(*tensors)

    compiled = torch.compile(inside if where == "inside" else loss, fullgraph=True, backend="aot_eager")
    value, grads = made = gradients(compiled if where == "inside" else around, tensors)
    torch.testing.assert_close(made, gradients(inside, tensors))
    assert value.dtype == torch.float32 and all(grad.dtype == torch.float32 for grad in grads)
    exact = gradients(loss, tensors)
    assert not torch.equal(grads[0], exact[1][0]), "autocast did nothing"
    for grad, wanted in zip(grads, exact[1], strict=True):
        torch.testing.assert_close(grad, wanted, rtol=0.0, atol=0.02 * wanted.abs().max().item())


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_export(device, strict, training):
    """The program keeps the composite; decomposed it holds one product. Loaded into training it has gradients."""
    model = xent_ops.LinearCrossEntropyLoss(H, V, bias=True, device=device).requires_grad_(training)
    x, _, _, target = inputs(device=device)
    rows = {0: torch.export.Dim("rows")}
    with torch.set_grad_enabled(training):
        program = torch.export.export(model, (x, target), dynamic_shapes=(rows, rows), strict=strict)
    assert ours(program) == ["linear_cross_entropy"]
    assert ours(program.run_decompositions()) == [ROWS]
    *_, fewer = inputs(device=device, rows=N - 9)
    value = program.module()(x[:-9], fewer)
    torch.testing.assert_close(value, model(x[:-9], fewer))
    if training:
        wanted = torch.autograd.grad(model(x[:-9], fewer), list(model.parameters()))
        value.backward()
        torch.testing.assert_close([parameter.grad for parameter in model.parameters()], list(wanted))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_jit_trace(device):
    traced = torch.jit.trace(loss, inputs(device=device), check_trace=False)
    for rows in (N, 7):
        tensors = inputs(device=device, rows=rows)
        torch.testing.assert_close(gradients(traced, tensors), gradients(loss, tensors))


def graphs_of(function):
    x, w, _, target = inputs()
    backend = AotEagerAndRecordGraphs()
    torch.compile(function, backend=backend, fullgraph=True)(x, w, target).backward()
    return graph_text(backend.fw_graphs[0]), graph_text(backend.bw_graphs[0])


@PINNED
def test_graphs_of_the_mean():
    forward, backward = graphs_of(xent_ops.linear_cross_entropy)
    assert_expected_inline(
        forward,
        """\
class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[48, 16]", primals_2: "i64[48]", primals_3: "f32[40, 16]"):
        linear_cross_entropy_with_grad = torch.ops.xent.linear_cross_entropy_with_grad.default(primals_1, primals_3, primals_2, None, None, None, None, [True, True, False]);  
        getitem: "f32[]" = linear_cross_entropy_with_grad[0]
        getitem_8: "f32[48, 16]" = linear_cross_entropy_with_grad[8]
        getitem_9: "f32[40, 16]" = linear_cross_entropy_with_grad[9]
        return (getitem, getitem_8, getitem_9)
""",
    )
    assert_expected_inline(
        backward,
        """\
class GraphModule(torch.nn.Module):
    def forward(self, getitem_8: "f32[48, 16]", getitem_9: "f32[40, 16]", tangents_1: "f32[]"):
        linear_scale_grad: "f32[48, 16]" = torch.ops.xent.linear_scale_grad.default(getitem_8, tangents_1)
        linear_scale_grad_1: "f32[40, 16]" = torch.ops.xent.linear_scale_grad.default(getitem_9, tangents_1);  
        return (linear_scale_grad, None, linear_scale_grad_1)
""",
    )


@PINNED
def test_graphs_of_rows():
    forward, backward = graphs_of(lambda x, w, t: xent_ops.linear_cross_entropy(x, w, t, reduction="none").sum())
    assert_expected_inline(
        forward,
        """\
class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[48, 16]", primals_2: "i64[48]", primals_3: "f32[40, 16]"):
        linear_cross_entropy_forward = torch.ops.xent.linear_cross_entropy_forward.default(primals_1, primals_3, primals_2)
        getitem: "f32[48]" = linear_cross_entropy_forward[0]
        getitem_1: "f32[48]" = linear_cross_entropy_forward[1]
        getitem_4: "f32[48]" = linear_cross_entropy_forward[4]
        detach: "f32[48]" = torch.ops.aten.detach.default(getitem_1)
        sum_1: "f32[]" = torch.ops.aten.sum.default(getitem)
        detach_1: "f32[48]" = torch.ops.aten.detach.default(detach)
        return (sum_1, primals_1, primals_2, primals_3, getitem_4, detach_1)
""",
    )
    assert_expected_inline(
        backward,
        """\
class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[48, 16]", primals_2: "i64[48]", primals_3: "f32[40, 16]", getitem_4: "f32[48]", detach_1: "f32[48]", tangents_1: "f32[]"):
        expand: "f32[48]" = torch.ops.aten.expand.default(tangents_1, [48])
        linear_cross_entropy_backward = torch.ops.xent.linear_cross_entropy_backward.default(expand, None, primals_1, primals_3, primals_2, detach_1, None, None, None, None, None, None, 0, None, [True, True, False], getitem_4);  
        getitem_6: "f32[48, 16]" = linear_cross_entropy_backward[0]
        getitem_7: "f32[40, 16]" = linear_cross_entropy_backward[1]
        return (getitem_6, None, getitem_7)
""",
    )
