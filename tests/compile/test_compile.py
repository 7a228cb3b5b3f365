"""Under torch.compile and torch.export: one graph, no recompile, the numbers of eager."""

import pytest
import torch
import torch.nn.functional as F
from helpers.graphs import AotEagerAndRecordGraphs, CompileCounterWithBackend, operator_names
from helpers.processes import run_python, run_with_torch
from helpers.public_api import DTYPES, FUNCTIONS, bind, cases_of, gradients, inputs, together_of

import xent_ops

pytestmark = pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")  # torch's own recording backend
FORWARD, BACKWARD = "xent.cross_entropy_reduced.default", "xent.cross_entropy_backward.default"


def all_of(calls):
    """One function of the same logits for several calls; each has an intermediate of its own, as inplace_backward
    wants it. Factors near one: a softmax made from the lse is rounded by 2^-24 |lse|, one made in one pass is not."""
    return lambda x, *rest: [value for n, call in enumerate(calls, 1) for value in call(x * (1 + n / 16), *rest)]


def assert_close(mine, eager, dtype):
    """Eager sums in another order, and rounds again with grad_in_forward; gradients of several calls add up."""
    rtol = 1e-13 if dtype == torch.float64 else max(2 * torch.finfo(dtype).eps, 1e-5)
    torch.testing.assert_close(mine, eager, rtol=rtol, atol=rtol / 10)


# test_through_inductor has bfloat16.
@pytest.mark.parametrize(
    "dtype", [DTYPES[0], *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in DTYPES[1:])], ids=str
)
@pytest.mark.parametrize("entry", FUNCTIONS)
def test_every_option_reduction_and_dtype(device, entry, dtype):
    """One graph each way, which reads no value on the host."""
    tensors = inputs(entry, dtype=dtype, device=device)
    function = all_of([bind(entry, case, tensors[2]) for case in cases_of(entry, each=dtype == torch.float32)])
    backend = AotEagerAndRecordGraphs()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    assert_close(gradients(compiled, *tensors), gradients(function, *tensors), dtype)
    (forward,), (backward,) = map(operator_names, backend.fw_graphs), map(operator_names, backend.bw_graphs)
    assert not any("aten.item" in name or "_local_scalar_dense" in name for name in forward + backward)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8], ids=str)  # all others have int64
def test_every_dtype_of_targets(device, dtype):
    entries = [entry for entry in FUNCTIONS if entry != "class probabilities"]
    x, target, weight = inputs(entries[0], device=device)
    function = all_of([bind(entry, {}, weight) for entry in entries])
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    target = torch.where(target < 0, 3, target).to(dtype)
    assert_close(gradients(compiled, x, target, weight), gradients(function, x, target, weight), x.dtype)


@pytest.mark.parametrize(
    "dtype", [pytest.param(d, marks=() if d == torch.bfloat16 else pytest.mark.slow) for d in DTYPES], ids=str
)
def test_through_inductor(device, dtype):
    """All options in one graph, through Inductor's lowerings of the backward operators."""
    entries = ["cross_entropy", "class probabilities", "cross_entropy_outputs", "token_log_probs"]
    tensors = [tensor for entry in entries for tensor in inputs(entry, dtype=dtype, device=device)]
    calls = [bind(entry, together_of(entry), tensors[3 * n + 2]) for n, entry in enumerate(entries)]

    def function(*tensors):
        x, target, weight = tensors[::3], tensors[1::3], tensors[2::3]
        return [value for n, call in enumerate(calls) for value in call(x[n] * 2, target[n], weight[n])]

    compiled = torch.compile(function, fullgraph=True)
    assert_close(gradients(compiled, *tensors), gradients(function, *tensors), dtype)


@pytest.mark.parametrize(
    "entry", [entry for entry in FUNCTIONS if entry != "CrossEntropyLoss"]
)  # ignore_index is its own
def test_no_recompile(device, entry):
    """For another number of rows, pattern of ignored rows, targets, and from its first change on ignore_index."""
    soft = entry == "class probabilities"

    def function(x, target, ignore_index):
        keywords = {} if soft else {"ignore_index": ignore_index}
        result = FUNCTIONS[entry](x * 2, target, **keywords)
        return list(result) if isinstance(result, tuple) else [result]

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    sizes = [(8, -100), (16, -7), (5, -3), (64, -100), (31, -50), (7, -7)]
    for number, (rows, ignore_index) in enumerate(sizes):
        x, target, _ = inputs(entry, rows, device=device, seed=number)
        if not soft:
            target = target.where(target != -100, ignore_index)
            target[:: number + 1] = ignore_index
        with torch._dynamo.config.patch(error_on_recompile=number > 1):
            mine = compiled(x, target, ignore_index)
            grad = torch.autograd.grad(mine[0].sum(), x)
        eager = function(x, target, ignore_index)
        torch.testing.assert_close(mine, eager, equal_nan=True)
        torch.testing.assert_close(grad, torch.autograd.grad(eager[0].sum(), x))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_dynamic(device, backend):
    """dynamic=True: one graph for every number of rows and of classes; Inductor's kernels index with both."""
    entries = ["cross_entropy", "class probabilities"]  # test_no_recompile has the others
    calls = [bind(entry, together_of(entry), None) for entry in entries]

    def function(*tensors):
        results = [
            value for n, call in enumerate(calls) for value in call(tensors[3 * n] * 2, *tensors[3 * n + 1 :][:2])
        ]
        return [*results, xent_ops.cross_entropy(tensors[0] * 2, tensors[1])]  # without the options: a way of its own

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    for number, (rows, classes) in enumerate([(10, 40), (20, 130), (34, 61)]):
        tensors = [t for entry in entries for t in inputs(entry, rows, classes=classes, device=device, seed=number)]
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            mine = gradients(compiled, *tensors)
        assert_close(mine, gradients(function, *tensors), torch.float32)


def test_strided_classes():
    """(N, C, S) on a CPU: one graph for every number of classes, also of positions whose number depends on data."""
    step = torch.compile(xent_ops.cross_entropy, fullgraph=True, backend="aot_eager")
    for number, classes in enumerate((40, 130, 61)):
        x, target = torch.randn(8, classes, 7), torch.randint(classes, (8, 7))
        torch._dynamo.mark_dynamic(x, 1)
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            torch.testing.assert_close(step(x, target), xent_ops.cross_entropy(x, target))

    def masked(x, target, mask):
        return xent_ops.cross_entropy(x[:, :, mask], target[:, mask])

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        arguments = torch.randn(8, 40, 7), torch.randint(40, (8, 7)), torch.arange(7) % 3 > 0
        step = torch.compile(masked, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(step(*arguments), masked(*arguments))


def test_a_float_specialises_as_for_torch():
    """Another label_smoothing recompiles exactly as often as with F.cross_entropy."""

    def count(function):
        torch.compiler.reset()
        backend = CompileCounterWithBackend("eager")
        step = torch.compile(lambda x, t, e: function(x, t, label_smoothing=e), backend=backend, fullgraph=True)
        x, target, _ = inputs("cross_entropy")
        for smoothing in (0.1, 0.2, 0.3, 0.4):
            step(x, target, smoothing)
        return backend.frame_count

    assert count(xent_ops.cross_entropy) == count(F.cross_entropy)


def test_other_backends_keep_one_opaque_node_each_way(device):
    backend = AotEagerAndRecordGraphs()
    x, target, _ = inputs("cross_entropy", device=device)
    torch.compile(lambda x: xent_ops.cross_entropy(x * 2, target), backend=backend, fullgraph=True)(x).backward()
    (forward,), (backward,) = map(operator_names, backend.fw_graphs), map(operator_names, backend.bw_graphs)
    assert [name for name in forward if name.startswith("xent.")] == [FORWARD]
    assert [name for name in backward if name.startswith("xent.")] == [BACKWARD]


@pytest.mark.slow
@pytest.mark.parametrize("vectors", [False, True], ids=["scalar", "vectors"])
def test_lowering_holds_when_something_was_compiled_before_the_import(vectors):
    """Inductor caches its table of decompositions at the first compile of a process. (With the CPU's vector
    instructions too, as users run it: Inductor tries them for 10 s.)"""
    program = """
        import sys, torch
        torch.compile(torch.mm)(torch.ones(3, 3), torch.ones(3, 3))
        assert "xent_ops" not in sys.modules
        import xent_ops
        from torch._inductor.utils import run_and_get_code
        h, w = (torch.randn(n, 4, requires_grad=True) for n in (8, 1000))
        target = torch.randint(0, 1000, (8,))
        def function(h):
            return xent_ops.cross_entropy(h @ w.T, target, label_smoothing=0.1, softcap=5.0, lse_square_scale=0.1)
        step = torch.compile(function, fullgraph=True)
        _, code = run_and_get_code(lambda: step(h).backward())
        code = "".join(code)
        assert "xent.cross_entropy_reduced.default(" in code and "xent.cross_entropy_backward.default(" not in code
        if torch.__version__ >= "2.13":  # Inductor of 2.11 gives the fused gradient a buffer of its own on the CPU
            assert "mm; del mm  # reuse" in code or "xent.cross_entropy_backward_.default(" in code
        mine, h.grad = h.grad, None
        function(h).backward()
        torch.testing.assert_close(mine, h.grad)
    """
    run_python(program, TORCHINDUCTOR_VEC_ISA_OK="" if vectors else "0")


class Losses(torch.nn.Module):
    """Entry points with their options over a layer, on the rows that ``keep`` selects, if given."""

    def __init__(self, entries):
        super().__init__()
        self.head = torch.nn.Linear(4, 33)
        keywords = [{name: value for name, value in together_of(entry).items() if name != "dim"} for entry in entries]
        self.calls = [bind(entry, case, inputs(entry)[2]) for entry, case in zip(entries, keywords, strict=True)]

    def forward(self, h, weight, target, keep=None):
        if keep is not None:
            rows = keep.nonzero()[:, 0]
            h, target = h[rows], target[rows]
        return [value for call in self.calls for value in call(self.head(h), target, weight)]


def test_export_stays_dynamic_and_keeps_one_node(tmp_path):
    """Exported with a symbolic N, saved, loaded and run in a fresh process that imports xent_ops."""
    model, rows = Losses(["cross_entropy"]), torch.export.Dim("rows", min=2)
    _, target, weight = inputs("cross_entropy", 21)
    h = torch.randn(21, 4)
    program = torch.export.export(
        model, (h[:8], weight, target[:8]), dynamic_shapes={"h": {0: rows}, "weight": None, "target": {0: rows}}
    )
    assert operator_names(program.graph_module).count("xent.cross_entropy.default") == 1
    decomposed = program.run_decompositions()
    assert operator_names(decomposed.graph_module).count(FORWARD) == 1
    wanted = model(h, weight, target)
    for exported in (program, decomposed):
        torch.testing.assert_close(exported.module()(h, weight, target), wanted)
    torch.export.save(program, tmp_path / "loss.pt2")
    torch.save((h, weight, target, wanted), tmp_path / "wanted.pt")
    run_with_torch(f"""
        import torch, xent_ops
        *inputs, wanted = torch.load(r"{tmp_path / "wanted.pt"}")
        loaded = torch.export.load(r"{tmp_path / "loss.pt2"}").module()
        torch.testing.assert_close(loaded(*inputs), wanted)
    """)


INDEX_FUNCTIONS = [entry for entry in FUNCTIONS if entry != "class probabilities"]


@pytest.mark.parametrize("entries", [INDEX_FUNCTIONS, ["class probabilities"]], ids=["indices", "probabilities"])
def test_unbacked_sizes(entries):
    """A number of rows that is only known when the graph runs: exported, and compiled with its backward."""
    model = Losses(entries)
    _, target, weight = inputs(entries[0])
    h = torch.randn(8, 4, requires_grad=True)
    keep = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1]).bool()
    program = torch.export.export(model, (h, weight, target, keep), strict=False).module()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        for kept in (keep, ~keep):
            wanted = gradients(lambda *tensors: model(*tensors, kept), h, weight, target)  # noqa: B023
            torch.testing.assert_close(program(h, weight, target, kept), wanted[0])
            mine = gradients(lambda *tensors: compiled(*tensors, kept), h, weight, target)  # noqa: B023
            torch.testing.assert_close(mine, wanted)
