"""Under torch.compile: one graph, no recompile, one buffer of logits, the same numbers, graphs as they are pinned."""

import itertools
import os
import subprocess
import sys
import textwrap
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from graphs import AotEagerAndRecordGraphs, graph_text, inductor_code, operator_names

import xent_ops
from xent_ops.inductor import reuse

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
FORWARD, BACKWARD = "xent.cross_entropy_forward.default", "xent.cross_entropy_backward.default"


def inputs(rows=8, classes=33, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, classes, generator=generator).to(device, dtype).requires_grad_()
    target = torch.randint(0, classes, (rows,), generator=generator).to(device)
    if rows > 1:
        target[1] = -100
    return x, target


def values(function, x, *args):
    loss = function(x, *args)
    return loss.detach(), *torch.autograd.grad(loss.sum(), x)


OPTIONS = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"ignore_index": 3},
    {"weight": True},
    {"weight": True, "label_smoothing": 0.1, "reduction": "none"},
    {"label_smoothing": 0.1, "softcap": 5.0, "logit_scale": 0.5, "lse_square_scale": 0.1, "weight": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_fullgraph_equals_eager(device, dtype, options):
    """Every option and reduction, forward and backward, in one graph, through Inductor."""
    x, target = inputs(dtype=dtype, device=device)
    if options.get("ignore_index") == 3:
        target = torch.where(target == -100, 3, target)
    options = dict(options)
    weight = torch.rand(33, device=device) if options.pop("weight", None) else None

    def function(x, target):
        return xent_ops.cross_entropy(x, target, weight, **options)

    compiled = torch.compile(function, fullgraph=True)
    for mine, eager in zip(values(compiled, x, target), values(function, x, target), strict=True):
        assert mine.dtype == eager.dtype
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(
            mine,
            eager,
            rtol=max(4 * eps, 1e-6 if dtype != torch.float64 else 0),
            atol=1e-7 if dtype != torch.float64 else 1e-15,
        )


@pytest.mark.parametrize("call", ["outputs", "log_probs", "soft", "module", "operator", "batched", "k_dimensional"])
def test_fullgraph_of_the_other_faces(device, call):
    x, target = inputs(device=device)
    soft = torch.rand(8, 33, device=device).softmax(-1)
    functions = {
        "outputs": lambda x: sum(v.sum() for v in xent_ops.cross_entropy_outputs(x, target, lse_square_scale=0.1)),
        "log_probs": lambda x: sum(v.sum() for v in xent_ops.token_log_probs(x, target)),
        "soft": lambda x: xent_ops.cross_entropy(x, soft, label_smoothing=0.1, softcap=3.0),
        "module": lambda x: xent_ops.CrossEntropyLoss(reduction="sum")(x, target),
        "operator": lambda x: torch.ops.xent.cross_entropy(x, target, reduction="sum"),
        "batched": lambda x: xent_ops.cross_entropy(x.view(2, 4, 33)[:, :-1], target.view(2, 4)[:, 1:], dim=-1),
        "k_dimensional": lambda x: xent_ops.cross_entropy(x.view(2, 4, 33).transpose(1, 2), target.view(2, 4)),
    }
    function = functions[call]
    for mine, eager in zip(values(torch.compile(function, fullgraph=True), x), values(function, x), strict=True):
        torch.testing.assert_close(mine, eager)


def test_no_recompile_across_sizes_patterns_and_options(device):
    """dynamic N, any ignore pattern; ignore_index becomes symbolic after its first change."""

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x, target, ignore_index):
        return xent_ops.cross_entropy(x, target, ignore_index=ignore_index, label_smoothing=0.1)

    for rows, ignore_index in [(8, -100), (16, -7)]:
        x, target = inputs(rows, device=device)
        step(x, target.clamp(min=ignore_index), ignore_index).backward()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows, ignore_index in [(5, -3), (64, -100), (31, -50), (7, -7)]:
            x, target = inputs(rows, device=device, seed=rows)
            target = torch.where(target == -100, ignore_index, target)
            target[::3] = ignore_index
            mine = values(partial(step, target=target, ignore_index=ignore_index), x)
            options = {"ignore_index": ignore_index, "label_smoothing": 0.1}
            eager = values(partial(xent_ops.cross_entropy, target=target, **options), x)
            torch.testing.assert_close(mine, eager)


@pytest.mark.parametrize("vocabulary", ["static", "dynamic"])
def test_dynamic_shapes_in_inductor(device, vocabulary):
    step = torch.compile(lambda x, t: xent_ops.cross_entropy(x, t, lse_square_scale=0.1), fullgraph=True)
    sizes = [(9, 40), (20, 40), (33, 40)] if vocabulary == "static" else [(9, 40), (20, 50), (33, 61)]
    for number, (rows, classes) in enumerate(sizes):
        x, target = inputs(rows, classes, device=device)
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(target, 0)
        if vocabulary == "dynamic":
            torch._dynamo.mark_dynamic(x, 1)
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            mine = values(step, x, target)
        torch.testing.assert_close(
            mine, values(lambda x, t: xent_ops.cross_entropy(x, t, lse_square_scale=0.1), x, target)
        )


def test_a_float_specialises_as_for_torch():
    """Another label_smoothing recompiles exactly as often as with F.cross_entropy."""

    def count(function):
        compiles = []

        def backend(graph, example_inputs):
            compiles.append(graph)
            return graph

        torch.compiler.reset()
        step = torch.compile(function, backend=backend, fullgraph=True)
        for smoothing in (0.1, 0.2, 0.3, 0.4):
            step(*inputs(), smoothing)
        return len(compiles)

    ours = count(lambda x, t, e: xent_ops.cross_entropy(x, t, label_smoothing=e))
    assert ours == count(lambda x, t, e: F.cross_entropy(x, t, label_smoothing=e))


def step_code(device, rows=64, dynamic=None):
    """Inductor's code for h @ W.T -> loss -> backward with a vocabulary of 5008.

    A multiple of 8: odd ones Inductor pads on CUDA, when its timing says so, with a copy of the gradient.
    """
    h = torch.randn(rows, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(5008, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, 5008, (rows,), device=device)
    if dynamic:
        torch._dynamo.mark_dynamic(h, 0)
        torch._dynamo.mark_dynamic(target, 0)
    function = torch.compile(lambda h: xent_ops.cross_entropy(h @ w.T, target), fullgraph=True)
    return inductor_code(function, h)


def logits_sized(code):
    """Allocations of (rows, 5008) in generated code."""
    lines = [
        line
        for line in code.splitlines()
        if "empty_strided_" in line and "=" in line and "empty_strided_cuda =" not in line
    ]
    return [line for line in lines if ", 5008)" in line.split("),")[0] + ")"]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_one_buffer_of_logits(device, dynamic):
    """The gradient is written over the logits: one allocation of their size, reused, not cloned."""
    if device == "cpu" and TORCH < (2, 13):
        pytest.skip("Inductor of torch 2.11 computes a row mask apart on the CPU, and then reuses nothing")
    code = step_code(device, dynamic=dynamic)
    assert len(logits_sized(code)) == 1, logits_sized(code)
    assert "ops.xent.cross_entropy_forward.default(" in code
    assert "ops.xent.cross_entropy_backward.default(" not in code
    if device == "cuda":
        assert "ops.xent.cross_entropy_backward_.default(" in code
    else:
        assert "mm; del mm  # reuse" in code
    assert "clone" not in code and "copy_(" not in code


def test_one_pass_is_one_node_that_overwrites_a_product(monkeypatch):
    """A direct call in a graph: with the logits' memory for the gradient where nobody else reads them."""
    monkeypatch.setattr(reuse, "DEVICES", {"cpu"})
    h, w, target = torch.randn(8, 16), torch.randn(16, 33), torch.arange(8)

    def with_grad(logits, target):
        scale = 1 / (target != -100).sum().float()
        loss, lse, grad = torch.ops.xent.cross_entropy_with_grad(logits, target, scale)
        return loss.sum() * scale, lse, grad.view(8, 33) @ w.T

    def product(h):
        return with_grad(h @ w, target)

    def batched(h):
        return with_grad((h @ w).view(2, 4, 33), target.view(2, 4))

    def read_again(h):
        logits = h @ w
        return *with_grad(logits, target), logits.argmax(-1)

    def an_input(h):
        return with_grad(h, target)

    for function, argument, reused in [(product, h, 1), (batched, h, 1), (read_again, h, 0), (an_input, h @ w, 0)]:
        before = argument.clone()
        compiled = torch.compile(function, fullgraph=True)
        code = inductor_code(compiled, argument, backward=False)
        for mine, other in zip(compiled(argument), function(argument), strict=True):
            torch.testing.assert_close(mine, other)
        assert code.count("cross_entropy_with_grad_.default(") == reused, function.__name__
        assert torch.equal(argument, before)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_the_lowering_for_cuda_reuses_dead_logits(monkeypatch, dynamic):
    """The same lowering with the CPU among its devices: values, and the in-place operator on the saved logits."""
    xent_ops.cross_entropy(torch.empty(1, 2, device="meta"), torch.empty(1, device="meta", dtype=torch.int64))
    monkeypatch.setattr(reuse, "DEVICES", {"cpu"})
    code = step_code("cpu", dynamic=dynamic)
    assert len(logits_sized(code)) == 1, logits_sized(code)
    assert "ops.xent.cross_entropy_backward_.default(" in code

    h, w = (torch.randn(2, n, 16, requires_grad=True) for n in (5, 77))
    target = torch.randint(0, 77, (2, 5))

    def batched(h, w):  # the backward sees the logits through a view
        return xent_ops.cross_entropy((h[0] @ w[0].T).view(1, 5, 77), target[:1], dim=-1)

    def read_twice(h, w):  # the logits live on: their gradient needs a buffer of its own
        logits = h[0] @ w[0].T
        return xent_ops.cross_entropy(logits, target[0]) + logits.tanh().sum()

    def returned(h, w):
        logits = h[0] @ w[0].T
        return xent_ops.cross_entropy(logits, target[0]), logits

    def an_input(h, w):
        return xent_ops.cross_entropy(h[0], target[0] % 16)

    for function, reused in [(batched, True), (read_twice, False), (returned, False), (an_input, False)]:
        loss_of = lambda *args: function(*args)[0] if function is returned else function(*args)  # noqa: E731, B023
        compiled = torch.compile(function, fullgraph=True)
        seen = []

        def run(h, w):
            result = compiled(h, w)  # noqa: B023
            seen.append(result)  # noqa: B023
            return result[0] if isinstance(result, tuple) else result

        code = inductor_code(run, h, w)
        assert ("cross_entropy_backward_.default(" in code) == reused, function.__name__
        mine, h.grad, w.grad = (h.grad, w.grad), None, None
        wanted = torch.autograd.grad(loss_of(h, w), (h, w), allow_unused=True)
        for a, b in zip(mine, wanted, strict=True):
            torch.testing.assert_close(a if a is not None else torch.zeros(1), b if b is not None else torch.zeros(1))
        if function is returned:
            torch.testing.assert_close(seen[0][1], function(h, w)[1])


def test_an_opaque_backward_would_need_two(monkeypatch):
    """That the tests above can fail: where the logits cannot be reused there are two buffers of their size."""
    xent_ops.cross_entropy(torch.empty(1, 2, device="meta"), torch.empty(1, device="meta", dtype=torch.int64))
    monkeypatch.setattr(reuse, "DEVICES", {"cpu"})
    with torch._functorch.config.patch(donated_buffer=False):
        code = step_code("cpu")
    assert "ops.xent.cross_entropy_backward.default(" in code


def test_other_backends_keep_one_opaque_node_each_way(device):
    backend = AotEagerAndRecordGraphs()
    x, target = inputs(device=device)
    torch.compile(lambda x: xent_ops.cross_entropy(x * 2, target), backend=backend, fullgraph=True)(x).backward()
    (forward,), (backward,) = backend.fw_graphs, backend.bw_graphs
    assert [n for n in operator_names(forward) if n.startswith("xent.")] == [FORWARD]
    assert [n for n in operator_names(backward) if n.startswith("xent.")] == [BACKWARD]
    assert not any(
        "aten.item" in n or "_local_scalar_dense" in n for n in operator_names(forward) + operator_names(backward)
    )


def test_lowering_holds_when_something_was_compiled_before_the_import():
    """Inductor caches its table of decompositions at the first compile of a process."""
    program = """
        import sys, torch
        torch.compile(lambda x: x.sin() + 1)(torch.ones(3))
        assert "xent_ops" not in sys.modules
        import xent_ops
        from torch._inductor.utils import run_and_get_code
        h, w = (torch.randn(n, 4, requires_grad=True) for n in (8, 999))
        target = torch.randint(0, 999, (8,))
        step = torch.compile(lambda h: xent_ops.cross_entropy(h @ w.T, target), fullgraph=True)
        _, code = run_and_get_code(lambda: step(h).backward())
        code = "".join(code)
        assert "mm; del mm  # reuse" in code and "ops.xent.cross_entropy_backward" not in code
    """
    run_python(program)


def run_python(program, **environment):
    environment = {**os.environ, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", **environment}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr


PINNED = pytest.mark.skipif(TORCH != (2, 13), reason="graphs are pinned to what torch 2.13 traces")


def graphs_of(function):
    backend = AotEagerAndRecordGraphs()
    x, target = inputs()
    torch.compile(function, backend=backend, fullgraph=True)(x, target).backward()
    return graph_text(backend.fw_graphs[0]), graph_text(backend.bw_graphs[0])


@PINNED
def test_graphs_of_the_plain_loss():
    forward, backward = graphs_of(lambda x, t: xent_ops.cross_entropy(x, t))
    assert_expected_inline(
        forward,
        """\
class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[8, 33]", primals_2: "i64[8]"):
        cross_entropy_forward = torch.ops.xent.cross_entropy_forward.default(primals_1, primals_2)
        getitem: "f32[8]" = cross_entropy_forward[0]
        getitem_1: "f32[8]" = cross_entropy_forward[1]
        detach: "f32[8]" = torch.ops.aten.detach.default(getitem_1)
        ne: "b8[8]" = torch.ops.aten.ne.Scalar(primals_2, -100)
        sum_1: "i64[]" = torch.ops.aten.sum.default(ne)
        sum_2: "f32[]" = torch.ops.aten.sum.default(getitem)
        div: "f32[]" = torch.ops.aten.div.Tensor(sum_2, sum_1)
        detach_1: "f32[8]" = torch.ops.aten.detach.default(detach)
        return (div, primals_1, primals_2, sum_1, detach_1)
""",
    )
    assert_expected_inline(
        backward,
        """\
class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[8, 33]", primals_2: "i64[8]", sum_1: "i64[]", detach_1: "f32[8]", tangents_1: "f32[]"):
        div_1: "f32[]" = torch.ops.aten.div.Tensor(tangents_1, sum_1);  
        expand: "f32[8]" = torch.ops.aten.expand.default(div_1, [8])
        cross_entropy_backward: "f32[8, 33]" = torch.ops.xent.cross_entropy_backward.default(expand, None, primals_1, primals_2, detach_1);  
        return (cross_entropy_backward, None)
""",
    )


@PINNED
def test_graphs_with_weight_and_smoothing():
    weight = torch.rand(33)
    forward, backward = graphs_of(lambda x, t: xent_ops.cross_entropy(x, t, weight, label_smoothing=0.1))
    assert_expected_inline(
        forward,
        """\
class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[8, 33]", primals_2: "i64[8]", primals_3: "f32[33]"):
        cross_entropy_forward = torch.ops.xent.cross_entropy_forward.default(primals_1, primals_2, primals_3, label_smoothing = 0.1)
        getitem: "f32[8]" = cross_entropy_forward[0]
        getitem_1: "f32[8]" = cross_entropy_forward[1]
        detach: "f32[8]" = torch.ops.aten.detach.default(getitem_1)
        ne: "b8[8]" = torch.ops.aten.ne.Scalar(primals_2, -100)
        ge: "b8[8]" = torch.ops.aten.ge.Scalar(primals_2, 0)
        lt: "b8[8]" = torch.ops.aten.lt.Scalar(primals_2, 33)
        bitwise_and: "b8[8]" = torch.ops.aten.bitwise_and.Tensor(ge, lt);  
        bitwise_and_1: "b8[8]" = torch.ops.aten.bitwise_and.Tensor(ne, bitwise_and)
        scalar_tensor: "i64[]" = torch.ops.aten.scalar_tensor.default(0, dtype = torch.int64, layout = torch.strided, device = device(type='cpu'))
        where: "i64[8]" = torch.ops.aten.where.self(bitwise_and_1, primals_2, scalar_tensor);  
        bitwise_not: "b8[8]" = torch.ops.aten.bitwise_not.default(bitwise_and)
        bitwise_and_2: "b8[8]" = torch.ops.aten.bitwise_and.Tensor(ne, bitwise_not)
        bitwise_not_1: "b8[8]" = torch.ops.aten.bitwise_not.default(bitwise_and_2)
        bitwise_and_3: "b8[8]" = torch.ops.aten.bitwise_and.Tensor(ne, bitwise_not_1);  
        index: "f32[8]" = torch.ops.aten.index.Tensor(primals_3, [where])
        scalar_tensor_1: "f32[]" = torch.ops.aten.scalar_tensor.default(0.0, dtype = torch.float32, layout = torch.strided, device = device(type='cpu'))
        where_1: "f32[8]" = torch.ops.aten.where.self(bitwise_and_3, index, scalar_tensor_1);  
        sum_2: "f32[]" = torch.ops.aten.sum.default(where_1)
        sum_3: "f32[]" = torch.ops.aten.sum.default(getitem)
        div: "f32[]" = torch.ops.aten.div.Tensor(sum_3, sum_2)
        detach_1: "f32[8]" = torch.ops.aten.detach.default(detach)
        return (div, primals_1, primals_2, primals_3, sum_2, detach_1)
""",
    )
    assert_expected_inline(
        backward,
        """\
class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[8, 33]", primals_2: "i64[8]", primals_3: "f32[33]", sum_2: "f32[]", detach_1: "f32[8]", tangents_1: "f32[]"):
        div_1: "f32[]" = torch.ops.aten.div.Tensor(tangents_1, sum_2);  
        expand: "f32[8]" = torch.ops.aten.expand.default(div_1, [8])
        cross_entropy_backward: "f32[8, 33]" = torch.ops.xent.cross_entropy_backward.default(expand, None, primals_1, primals_2, detach_1, primals_3, label_smoothing = 0.1);  
        return (cross_entropy_backward, None, None)
""",
    )


@PINNED
def test_graphs_with_z_loss():
    forward, backward = graphs_of(lambda x, t: xent_ops.cross_entropy(x, t, lse_square_scale=0.5))
    assert_expected_inline(
        forward,
        """\
class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[8, 33]", primals_2: "i64[8]"):
        cross_entropy_forward = torch.ops.xent.cross_entropy_forward.default(primals_1, primals_2)
        getitem: "f32[8]" = cross_entropy_forward[0]
        getitem_1: "f32[8]" = cross_entropy_forward[1]
        ne: "b8[8]" = torch.ops.aten.ne.Scalar(primals_2, -100)
        sum_1: "i64[]" = torch.ops.aten.sum.default(ne)
        scalar_tensor: "f32[]" = torch.ops.aten.scalar_tensor.default(0.0, dtype = torch.float32, layout = torch.strided, device = device(type='cpu'))
        where: "f32[8]" = torch.ops.aten.where.self(ne, getitem_1, scalar_tensor)
        pow_1: "f32[8]" = torch.ops.aten.pow.Tensor_Scalar(where, 2)
        mul: "f32[8]" = torch.ops.aten.mul.Tensor(pow_1, 0.5)
        sum_2: "f32[]" = torch.ops.aten.sum.default(getitem)
        sum_3: "f32[]" = torch.ops.aten.sum.default(mul)
        div: "f32[]" = torch.ops.aten.div.Tensor(sum_2, sum_1)
        div_1: "f32[]" = torch.ops.aten.div.Tensor(sum_3, sum_1);  
        add: "f32[]" = torch.ops.aten.add.Tensor(div, div_1);  
        return (add, primals_1, primals_2, getitem_1, ne)
""",
    )
    assert_expected_inline(
        backward,
        """\
class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[8, 33]", primals_2: "i64[8]", getitem_1: "f32[8]", ne: "b8[8]", tangents_1: "f32[]"):
        sum_1: "i64[]" = torch.ops.aten.sum.default(ne)
        div_2: "f32[]" = torch.ops.aten.div.Tensor(tangents_1, sum_1);  
        expand: "f32[8]" = torch.ops.aten.expand.default(div_2, [8])
        mul_1: "f32[8]" = torch.ops.aten.mul.Tensor(expand, 0.5)
        scalar_tensor: "f32[]" = torch.ops.aten.scalar_tensor.default(0.0, dtype = torch.float32, layout = torch.strided, device = device(type='cpu'))
        where: "f32[8]" = torch.ops.aten.where.self(ne, getitem_1, scalar_tensor)
        pow_2: "f32[8]" = torch.ops.aten.pow.Tensor_Scalar(where, 1.0)
        mul_2: "f32[8]" = torch.ops.aten.mul.Scalar(pow_2, 2.0)
        mul_3: "f32[8]" = torch.ops.aten.mul.Tensor(mul_1, mul_2);  
        scalar_tensor_1: "f32[]" = torch.ops.aten.scalar_tensor.default(0, dtype = torch.float32, layout = torch.strided, device = device(type='cpu'))
        where_1: "f32[8]" = torch.ops.aten.where.self(ne, mul_3, scalar_tensor_1);  
        detach: "f32[8]" = torch.ops.aten.detach.default(getitem_1)
        detach_1: "f32[8]" = torch.ops.aten.detach.default(detach)
        cross_entropy_backward: "f32[8, 33]" = torch.ops.xent.cross_entropy_backward.default(expand, where_1, primals_1, primals_2, detach_1);  
        return (cross_entropy_backward, None)
""",
    )


def test_export_stays_dynamic_and_keeps_one_node(tmp_path):
    """Exported with a symbolic N, saved, loaded and run in a fresh process that imports xent_ops."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(4, 33)

        def forward(self, h, target):
            return xent_ops.cross_entropy(self.head(h), target, label_smoothing=0.1)

    model, rows = Model(), torch.export.Dim("rows", min=2)
    args = (torch.randn(8, 4), torch.randint(0, 33, (8,)))
    program = torch.export.export(model, args, dynamic_shapes=({0: rows}, {0: rows}))
    names = operator_names(program.graph_module)
    assert names.count("xent.cross_entropy.default") == 1
    h, target = torch.randn(21, 4), torch.randint(0, 33, (21,))
    torch.testing.assert_close(program.module()(h, target), model(h, target))
    decomposed = program.run_decompositions()
    assert operator_names(decomposed.graph_module).count(FORWARD) == 1
    torch.export.save(program, tmp_path / "loss.pt2")
    torch.save((h, target, model(h, target).detach()), tmp_path / "wanted.pt")
    run_python(f"""
        import torch, xent_ops
        h, target, wanted = torch.load(r"{tmp_path / "wanted.pt"}")
        loaded = torch.export.load(r"{tmp_path / "loss.pt2"}").module()
        torch.testing.assert_close(loaded(h, target), wanted)
    """)


def test_unbacked_sizes():
    """A number of rows that is only known when the graph runs."""

    class Select(torch.nn.Module):
        def forward(self, x, target, keep):
            return xent_ops.cross_entropy(x[keep.nonzero()[:, 0]], target[keep.nonzero()[:, 0]])

    x, target = inputs()
    x = x.detach()
    keep = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1]).bool()
    program = torch.export.export(Select(), (x, target, keep), strict=False)
    for k in (keep, ~keep):
        torch.testing.assert_close(program.module()(x, target, k), F.cross_entropy(x[k], target[k]))


def test_activation_checkpointing(device):
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    x, target = inputs(device=device)
    wanted = values(lambda x: xent_ops.cross_entropy(x * 2, target), x)
    seen = []

    def policy(context, op, *args, **kwargs):
        seen.append(str(op))
        name = "xent::cross_entropy_forward"
        return CheckpointPolicy.MUST_SAVE if op.name() == name else CheckpointPolicy.PREFER_RECOMPUTE

    def step(x):
        context = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(lambda x: xent_ops.cross_entropy(x * 2, target), x, use_reentrant=False, context_fn=context)

    def whole(x):
        return checkpoint(lambda x: xent_ops.cross_entropy(x * 2, target), x, use_reentrant=False)

    for function in (
        whole,
        step,
        torch.compile(whole, fullgraph=True, backend="aot_eager"),
        torch.compile(step, fullgraph=True, backend="aot_eager"),
    ):
        torch.testing.assert_close(values(function, x), wanted)
    assert FORWARD in seen


def test_a_dispatch_mode_sees_the_operators(device):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    names = []
    x, target = inputs(device=device)
    with Log():
        xent_ops.cross_entropy(x, target).backward()
    assert names.count(FORWARD) == 1 and names.count(BACKWARD) == 1


def test_autocast_inside_and_outside(device):
    h = torch.randn(8, 16, device=device, requires_grad=True)
    w = torch.randn(33, 16, device=device)
    target = torch.randint(0, 33, (8,), device=device)

    def inside(h):
        with torch.autocast(device, dtype=torch.bfloat16):
            return xent_ops.cross_entropy(h @ w.T, target)

    wanted = values(lambda h: F.cross_entropy((h.bfloat16() @ w.T.bfloat16()).float(), target), h)
    results = [values(torch.compile(inside, fullgraph=True), h)]
    with torch.autocast(device, dtype=torch.bfloat16):
        outside = torch.compile(lambda h: xent_ops.cross_entropy(h @ w.T, target), fullgraph=True)
        loss = outside(h)
    results.append((loss.detach(), *torch.autograd.grad(loss, h)))
    for mine, other in itertools.product(results, [wanted]):
        torch.testing.assert_close(mine[0], other[0], rtol=2e-2, atol=0)
        torch.testing.assert_close(mine[1], other[1], rtol=5e-2, atol=2e-3)


def test_gradient_accumulation(device):
    """Micro-batches that divide by the number of targets of all of them add up to the one big batch."""
    w = torch.randn(33, 16, device=device, requires_grad=True)
    h = torch.randn(4, 8, 16, device=device)
    target = torch.randint(0, 33, (4, 8), device=device)
    target[1, :5] = -100
    total = (target != -100).sum()
    step = torch.compile(lambda h, t: xent_ops.cross_entropy(h @ w.T, t, reduction="sum") / total, fullgraph=True)
    for micro, t in zip(h, target, strict=True):
        step(micro, t).backward()
    wanted = torch.autograd.grad(F.cross_entropy(h.flatten(0, 1) @ w.T, target.flatten()), w)[0]
    torch.testing.assert_close(w.grad, wanted)
