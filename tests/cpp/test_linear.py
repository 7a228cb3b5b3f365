"""Linear cross entropy in C++, for processes without Python: the numbers of Python's chunk loop, shapes, packages."""

import itertools
import zipfile

import pytest
import torch
from helpers.float16_problems import NEGATIVE_WEIGHTS, PROBLEMS
from helpers.processes import run_python
from torch.export import Dim, export
from torch.fx.experimental.proxy_tensor import make_fx

import xent_ops
from xent_ops import _extension

pytestmark = pytest.mark.skipif(not _extension.LIBRARY.exists(), reason="built without C++ (XENT_OPS_BUILD_CPP=0)")

LOAD = f"""
import sys, torch
torch.ops.load_library({str(_extension.LIBRARY)!r})
ops = torch.ops.xent
"""
HEAD = "linear_cross_entropy"


def problem(dtype, shape, classes, bias, weight):
    """(input, linear_weight, target, linear_bias, weight)."""
    x, head = torch.randn(*shape, 6).to(dtype), torch.randn(classes, 6).to(dtype)
    if len(shape) == 2:
        x, head = x.transpose(0, 1).contiguous().transpose(0, 1), head.t().contiguous().t()
    target = torch.randint(classes, shape)
    target = torch.where(torch.rand(shape) < 0.2, 7, target).to(torch.uint8 if bias else torch.int64)
    class_weight = torch.rand(classes).to(torch.bfloat16 if bias else torch.float32)
    return x, head, target, torch.randn(classes).to(dtype) if bias else None, class_weight if weight else None


def calls(dtype):
    """(operator, arguments, options)."""
    rows = torch.float64 if dtype == torch.float64 else torch.float32
    sizes = ((), (7,), (2, 3), (2, 0))
    for shape, bias, weight, chunk_rows in itertools.product(sizes, (False, True), (False, True), (None, 2)):
        x, head, target, linear_bias, class_weight = problem(dtype, shape, 9, bias, weight)
        options = {"ignore_index": 7, "label_smoothing": 0.1, "softcap": 5.0, "logit_scale": 0.7}
        if not weight:
            options = {"ignore_index": 7}
        options["chunk_rows"] = chunk_rows
        if chunk_rows:
            options["skip_ignored"] = True
        sums = {"accumulate_dtype": torch.float32} if chunk_rows and dtype == torch.bfloat16 else {}
        inputs = x, head, target, linear_bias, class_weight
        for wanted in ((), (True, False), (False, True), (True, True)):
            yield f"{HEAD}_forward", (*inputs, *wanted), {**options, **sums}
        lse = torch.randn(shape, dtype=rows) + 3
        square = {"lse_square_scale": 0.1} if bias else {}
        mask = [bias, True, bias] if weight else [True, True, True]
        one, up, other = torch.tensor(0.5), torch.randn(shape), torch.randn(shape).to(dtype)
        saved = x, head, target, lse
        for grads, divisor in (((one, None), torch.tensor([3, 2])), ((up, other), None)):
            arguments = *grads, *saved, linear_bias, class_weight, divisor, None, None, None, 0, None, mask
            yield f"{HEAD}_backward", arguments, {**options, **sums, **square}
        for grads, divisor in (((up, None), None), ((one, up), torch.tensor([3, 2]))):
            of_entropy = other, lse.abs(), None, 0, None
            arguments = *grads, *saved, linear_bias, class_weight, divisor, *of_entropy, mask
            yield f"{HEAD}_backward", arguments, {**options, **sums, **square}
        for reduction, divisor in (("mean", None), ("sum", None), ("sum", torch.tensor(4))):
            options["reduction"] = reduction
            for token_weight in (None, (torch.randn(shape) + 1.0).masked_fill(target == 7, float("nan"))):
                arguments = *inputs, divisor, token_weight, mask, sums.get("accumulate_dtype")
                yield f"{HEAD}_with_grad", arguments, {**options, **square}
                yield HEAD, (*inputs, divisor, token_weight), {**options, **square, **sums}
        yield HEAD, (*inputs, None, up), {**options, **square, "reduction": "none"}
    if dtype == torch.float32:  # chunks of the default size
        arguments = problem(dtype, (2500,), 33000, True, False)
        yield f"{HEAD}_with_grad", arguments, {"ignore_index": 7, "label_smoothing": 0.1}
    yield "linear_scale_grad", (head.t(), torch.tensor(0.1)), {}
    yield "linear_scale_grad", (x.double(), lse), {}
    for x, head, class_weight, target, upstream, options in (PROBLEMS | NEGATIVE_WEIGHTS).values():
        if dtype == torch.float16:
            lse = torch.ops.xent.linear_cross_entropy_forward(x, head, target)[1]
            none = (None,) * 4
            rows = (x, head, target, lse, None, class_weight, *none, 0, None, [True, True, False])
            yield f"{HEAD}_backward", (upstream, None, *rows), options
            yield f"{HEAD}_backward", (torch.tensor(0.0), upstream, *rows), options


SLOW = [pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.float32, torch.float64, torch.float16)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, *SLOW])
def test_values(dtype, tmp_path):
    """Also of inputs that require grad, and of meta tensors their shapes, dtypes and strides."""
    made = []
    for name, arguments, options in calls(dtype):
        expected = getattr(torch.ops.xent, name)(*arguments, **options)
        made.append((name, arguments, options, expected if isinstance(expected, tuple) else (expected,)))
    torch.save(made, tmp_path / "calls")
    run_python(
        LOAD
        + f"""
def mapped(function, values):
    return [function(value) if isinstance(value, torch.Tensor) else value for value in values]

def leaf(tensor):
    return tensor.detach().requires_grad_(tensor.is_floating_point())

for name, arguments, options, expected in torch.load({str(tmp_path / "calls")!r}):
    results = []
    for function in (lambda tensor: tensor, leaf, lambda tensor: tensor.to("meta")):
        got = getattr(ops, name)(*mapped(function, arguments), **options)
        results.append(got if isinstance(got, tuple) else (got,))
    for wanted, plain, of_leaf, meta in zip(expected, *results, strict=True):
        case = name, [a.shape if isinstance(a, torch.Tensor) else a for a in arguments], options
        close = dict(rtol=2e-6, atol=2e-6) if wanted.dtype in (torch.float32, torch.float64) else {{}}
        torch.testing.assert_close(plain, wanted, equal_nan=True, **close, msg=lambda text: f"{{case}} {{text}}")
        assert torch.equal(of_leaf.nan_to_num(), plain.nan_to_num()), case
        for like in (wanted, meta):
            assert (plain.shape, plain.dtype, plain.stride()) == (like.shape, like.dtype, like.stride()), case
assert "xent_ops" not in sys.modules
"""
    )


def test_a_target_out_of_range():
    """Of the chunk that holds it, in Python's words."""
    x, head, target = torch.randn(5, 6), torch.randn(9, 6), torch.tensor([0, 1, 2, 9, -1])
    with pytest.raises(IndexError) as python:
        torch.ops.xent.linear_cross_entropy_with_grad(x, head, target, chunk_rows=3)
    run_python(
        LOAD
        + f"""
forward, with_grad = ops.linear_cross_entropy_forward, ops.linear_cross_entropy_with_grad
for function, wanted in ((forward, (False, False)), (forward, (True, False)), (forward, (False, True)), (with_grad, ())):
    try:
        rows = torch.randn(5, 6), torch.randn(9, 6), torch.tensor([0, 1, 2, 9, -1])
        function(*rows, None, None, *wanted, chunk_rows=3)
    except IndexError as error:
        assert str(error) == {str(python.value)!r}, error
    else:
        raise AssertionError("no error")
"""
    )


def test_a_slice_of_a_head_is_refused():
    """It is a rank's, and a process without Python has no collectives."""
    run_python(
        LOAD
        + """
for device in ("cpu", "meta"):
    made = torch.randn(4, 6), torch.randn(9, 6), torch.arange(4), torch.ones(4)
    x, head, target, rows = (tensor.to(device) for tensor in made)
    try:
        ops.linear_cross_entropy_backward(rows, None, x, head, target, rows, num_classes=18)
    except (ValueError, RuntimeError) as error:
        assert "a head split over ranks is served from Python alone" in str(error), error
    else:
        raise AssertionError("no error")
"""
    )


def test_export_stays_dynamic():
    run_python(
        LOAD
        + """
from torch.export import Dim, export

class Everything(torch.nn.Module):
    def forward(self, x, head, t, bias, w):
        loss, lse, _, entropy = ops.linear_cross_entropy_forward(x, head, t, bias, w, False, True)
        argmax = ops.linear_cross_entropy_forward(x, head, t, bias, w, True)[2]
        mask = [True, False, True]
        grads = ops.linear_cross_entropy_backward(loss, lse, x, head, t, lse, bias, w, output_mask=mask)
        of_entropy = bias, w, None, entropy, entropy
        more = ops.linear_cross_entropy_backward(loss, None, x, head, t, lse, *of_entropy)
        made = ops.linear_cross_entropy_with_grad(x, head, t, bias, w)
        scaled = ops.linear_scale_grad(made[-2], made[0])
        means = [ops.linear_cross_entropy(x, head, t, bias, w, reduction=r, lse_square_scale=0.1) for r in REDUCTIONS]
        return loss, argmax, *grads, *more, *made, scaled, *means

REDUCTIONS = ("mean", "none", "sum")

def example(n, v, h):
    return torch.randn(n, h), torch.randn(v, h), torch.randint(v, (n,)), torch.randn(v), torch.rand(v)

n = h = v = Dim.DYNAMIC
shapes = {0: n, 1: h}, {0: v, 1: h}, {0: n}, {0: v}, {0: v}
program = export(Everything(), example(4, 9, 6), dynamic_shapes=shapes)
assert len(program.range_constraints) == 3, program.range_constraints
program = program.run_decompositions()
assert len(program.range_constraints) == 3, program.range_constraints
calls = [str(node.target) for node in program.graph.nodes]
assert calls.count("xent.linear_cross_entropy_forward.default") == 5 and "xent.linear_cross_entropy.default" not in calls
arguments = example(7, 11, 3)
for got, wanted in zip(program.module()(*arguments), Everything()(*arguments), strict=True):
    torch.testing.assert_close(got, wanted)

class Mismatch(torch.nn.Module):
    def forward(self, *arguments):
        return ops.linear_cross_entropy_forward(*arguments)

x, head, t, bias, w = example(4, 9, 6)
for wrong in ((x[:, :5], head, t), (x, head, t[:3]), (x, head, t, bias[:8])):
    try:
        export(Mismatch(), wrong)
    except Exception as error:
        texts = "features for each class", "each row of the input", "one number a class"
        assert any(text in str(error) for text in texts), error
    else:
        raise AssertionError("no error")
"""
    )


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(6, 9)

    def forward(self, x, target):
        return xent_ops.linear_cross_entropy(x, self.head.weight, target, linear_bias=self.head.bias)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_an_exported_graph_holds_one_product(grad, strict):
    """Whatever the grad mode: decompositions of torch.export trace a forward alone."""
    example = torch.randn(4, 6), torch.arange(4)
    with torch.set_grad_enabled(grad):
        program = export(Model(), example, strict=strict).run_decompositions()
    ours = [str(node.target) for node in program.graph.nodes if "xent" in str(node.target)]
    assert ours == ["xent.linear_cross_entropy_forward.default"]


def step(x, head, target, bias):
    """Losses and gradients by the one pass and by rows."""
    leaves = [value.detach().requires_grad_() for value in (x, head, bias)]
    options = {"linear_bias": leaves[2], "chunk_rows": 2}
    if torch.__version__ >= "2.13":  # packages of torch 2.11 hand over float64 for float32
        options["accumulate_dtype"] = torch.float32
    loss = xent_ops.linear_cross_entropy(*leaves[:2], target, **options)
    rows = xent_ops.linear_token_log_probs(*leaves[:2], target, **options)
    total = 2 * loss + rows.log_probs.sum() + rows.entropy.sum()
    return loss.detach(), rows.log_probs.detach(), *torch.autograd.grad(total, leaves)


@pytest.mark.slow
def test_packages_without_python(tmp_path):
    """AOTInductor packages of an evaluation and of a training step, where xent_ops is never imported."""
    model, example = Model(), (torch.randn(4, 6), torch.arange(4))
    program = export(model, example, dynamic_shapes=({0: Dim.DYNAMIC}, {0: Dim.DYNAMIC}))  # with grad mode on
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "score.pt2"))
    with zipfile.ZipFile(package) as files:
        nodes = b"".join(files.read(name) for name in files.namelist() if name.endswith(".json"))
    assert b"linear_cross_entropy_forward" in nodes and b"with_grad" not in nodes

    bfloat16 = [value.bfloat16() for value in (torch.randn(4, 6), torch.randn(9, 6), torch.randn(9))]
    arguments = *bfloat16[:2], torch.arange(4), bfloat16[2]
    graph = make_fx(step)(*arguments)
    torch._inductor.aoti_compile_and_package(export(graph, arguments), package_path=str(tmp_path / "step.pt2"))
    longer = torch.randn(6, 6), torch.arange(6)
    torch.save(((longer, (model(*longer).detach(),)), (arguments, step(*arguments))), tmp_path / "expected")
    run_python(
        LOAD
        + f"""
for name, (arguments, expected) in zip(("score", "step"), torch.load({str(tmp_path / "expected")!r}), strict=True):
    results = torch._inductor.aoti_load_package(f"{tmp_path}/{{name}}.pt2")(*arguments)
    torch.testing.assert_close(tuple(results) if name == "step" else (results,), expected)
assert "xent_ops" not in sys.modules
"""
    )
