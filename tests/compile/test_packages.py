"""What an AOTInductor package for CUDA would launch, traced on a machine without a GPU: as much as the launcher does."""

import packed
import pytest
import torch
from helpers.covering import pairs
from helpers.samples import Problem, launched, of_launchers
from torch._inductor import ir
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim

pytest.importorskip("triton", reason="triton is not installed")

from helpers.offline import launch, recorded
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_mutation

from xent_ops.inductor.lowerings import packages
from xent_ops.kernels.divergences import STATISTICS
from xent_ops.kernels.options import RowOptions
from xent_ops.kernels.triton import flags

ROWS = {"many": 50, "few": 1}  # to two processors, as tests without a GPU have
GIVEN = {"label_smoothing": 0.1, "softcap": 30.0, "logit_scale": 0.5}


def launches(monkeypatch, sample):
    """(kernel, grid, what is passed) of each launch of the launcher."""
    found = []
    for made, args in recorded(monkeypatch, lambda: launch(*sample)):
        passed = dict(zip(made.kernel.arg_names, args, strict=False)) | made.constants
        found.append((made.kernel.__name__, made.grid, {key: described(value) for key, value in passed.items()}))
    return found


def nodes_of(graph):
    """The same, of the launches in a graph."""
    found = []
    for node in graph.graph.find_nodes(op="call_function", target=triton_kernel_wrapper_mutation):
        kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
        ((grid, one, also_one),) = node.kwargs["grid"]
        assert (one, also_one) == (1, 1)
        passed = {**node.kwargs["kwargs"], **kernel_side_table.get_constant_args(node.kwargs["constant_args_idx"])}
        passed |= {"num_warps": kernel.configs[0].num_warps, "num_stages": kernel.configs[0].num_stages}
        values = {
            key: value.meta["val"] if isinstance(value, torch.fx.Node) else value for key, value in passed.items()
        }
        grid = grid.meta["val"] if isinstance(grid, torch.fx.Node) else grid
        found.append((kernel.fn.__name__, grid, {key: described(value) for key, value in values.items()}))
    return found


def described(value):
    return (tuple(value.shape), value.stride(), value.dtype) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("rows, classes, full", pairs(ROWS.values(), [256, 5003], [False, True]), ids=str)
def test_every_launch_is_traced(monkeypatch, rows, classes, full):
    """Each with the kernel, the grid, the numbers and tensors of the same shapes."""
    problem = Problem((rows,), classes, (classes, 4 * classes), dtype=torch.bfloat16)
    options, names = {"ignore_index": 7, "lse_square_scale": 1e-2 if full else 0.0} | (GIVEN if full else {}), set()
    for sample in of_launchers(problem, options, full):
        expected = launches(monkeypatch, sample)
        assert expected, sample.name
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(arg) if isinstance(arg, torch.Tensor) else arg for arg in sample.args]
            graph = packages.traced_launches(sample.name, fakes, sample.options)
        assert nodes_of(graph) == expected, sample.name
        names.add(sample.name)
    assert names == launched()


def placeholders(module, given, dynamic):
    program = torch.export.export(module, given, dynamic_shapes=dynamic)
    fakes = [node.meta["val"] for node in program.graph.find_nodes(op="placeholder")]
    return fakes[-len(given) :]


class Loss(torch.nn.Module):
    def forward(self, logits, target):
        return packed.ops.cross_entropy_forward(logits, target)


def test_any_number_of_rows_without_a_guard():
    """Kernels are chosen by the traced size; grids, sizes and strides stay symbolic."""
    logits, target = torch.zeros(6, 50, 5000), torch.zeros(6, 50, dtype=torch.int64)
    sizes = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    fakes = placeholders(Loss(), (logits, target), (sizes, sizes))
    mode = fakes[0].fake_mode
    guards = len(mode.shape_env.guards)
    with mode:
        graph = packages.traced_launches("cross_entropy_forward", fakes, {})
    ((kernel, grid, passed),) = nodes_of(graph)
    batch, length = fakes[0].shape[:2]
    assert (kernel, grid.node.expr) == ("forward_kernel", (batch * length).node.expr)
    assert (passed["n_inner"], passed["stride_outer"]) == (1, 5000)
    assert len(mode.shape_env.guards) == guards


def test_rows_that_lie_apart_when_a_size_is_dynamic():
    """A slice: two strides describe its rows, one of them for a symbolic number."""

    class Slice(torch.nn.Module):
        def forward(self, buffer, target):
            return packed.ops.cross_entropy_forward(buffer[:, : target.shape[1]], target)

    given = torch.zeros(4, 64, 5000), torch.zeros(4, 40, dtype=torch.int64)
    program = torch.export.export(Slice(), given, dynamic_shapes=({}, {1: Dim("length", min=2, max=63)}))
    (call,) = program.graph.find_nodes(op="call_function", target=packed.ops.cross_entropy_forward.default)
    fakes = [node.meta["val"] for node in call.args]
    with fakes[0].fake_mode:
        graph = packages.traced_launches("cross_entropy_forward", fakes, {})
    ((_, _, passed),) = nodes_of(graph)
    assert passed["stride_outer"] == 64 * 5000
    assert passed["n_inner"].node.expr == fakes[0].shape[1].node.expr


def test_targets_that_are_dense_for_the_traced_size_alone():
    """Of length 2 less one a transpose is dense; of any other it is not, and is copied."""

    class Shifted(torch.nn.Module):
        def forward(self, logits, target):
            return packed.ops.cross_entropy_forward(logits, target[:-1].t())

    sizes = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    given = torch.zeros(3, 1, 5000), torch.zeros(2, 3, dtype=torch.int64)
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        program = torch.export.export(Shifted(), given, dynamic_shapes=(sizes, sizes))
        (call,) = program.graph.find_nodes(op="call_function", target=packed.ops.cross_entropy_forward.default)
        fakes = [node.meta["val"] for node in call.args]
        mode = fakes[0].fake_mode
        guards = len(mode.shape_env.guards)
        with mode:
            graph = packages.traced_launches("cross_entropy_forward", fakes, {})
    assert len(graph.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)) == 1
    assert len(mode.shape_env.guards) == guards


def test_few_traced_rows_leave_large_blocks_for_the_sum():
    """Blocks for 8 rows would take 128 steps for 1024 times as many, one after the other."""

    class Mean(torch.nn.Module):
        def forward(self, logits, target):
            return packed.ops.cross_entropy_reduced(logits, target)

    rows = {0: Dim.DYNAMIC}
    for sizes, block in (((rows, rows), 4096), (({}, {}), 16)):
        fakes = placeholders(Mean(), (torch.zeros(8, 5000), torch.zeros(8, dtype=torch.int64)), sizes)
        with fakes[0].fake_mode:
            graph = packages.traced_launches("cross_entropy_reduced", fakes, {})
        (passed,) = [passed for kernel, _, passed in nodes_of(graph) if kernel == "reduce_kernel"]
        assert passed["BLOCK"] == block


def test_few_traced_rows_leave_many_programs_to_scale_a_gradient():
    """Programs for 8 rows would take 1024 tiles each, of 1024 times as many rows."""

    class Scale(torch.nn.Module):
        def forward(self, grad, factor):
            return packed.ops.linear_scale_grad(grad, factor)

    rows = {0: Dim.DYNAMIC}
    for sizes, programs in ((rows, 16), ({}, 8)):  # two processors, as tests without a GPU have
        fakes = placeholders(Scale(), (torch.zeros(8, 100), torch.ones(())), (sizes, None))
        with fakes[0].fake_mode:
            graph = packages.traced_launches("scale_grad_", fakes, {})
        ((_, grid, _),) = nodes_of(graph)
        assert grid == programs


def test_linear_has_as_many_chunks_for_every_number_of_rows():
    module = packed.Linear(100)
    rows = {0: Dim.DYNAMIC}
    fakes = placeholders(module, packed.linear_inputs(350, 101, 16, torch.bfloat16, "cpu"), (rows, None, rows, None))
    with fakes[0].fake_mode:
        graph = packages.traced_launches("linear_cross_entropy_forward", fakes, {"chunk_rows": 100})
    assert len(graph.graph.find_nodes(op="call_function", target=packed.ops.cross_entropy_forward.default)) == 4
    assert len(graph.graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.out)) == 4


def test_distillation_has_as_many_chunks_for_every_number_of_rows():
    module, rows = packed.Distillation(100), {0: Dim.DYNAMIC}
    given = packed.distillation_inputs(350, 101, 16, torch.bfloat16, "cpu")
    hidden, head, target, bias, upstream = placeholders(module, given, (rows, None, rows, None, rows))
    heads, dw_and_dh = [hidden, head, target, hidden, head, bias], (3, 1 + 4)  # by addmm and by mm
    with hidden.fake_mode:
        saved = [upstream.expand(5, -1), upstream.new_empty((STATISTICS, *upstream.shape))]
        for name, args, of_rows, (added, written) in (
            ("linear_divergences_with_grad", heads, packed.ops.divergences_with_grad_, dw_and_dh),
            ("linear_divergences_forward", heads, packed.ops.divergences_forward, (0, 0)),
            ("linear_divergences_backward", [*saved, *heads], packed.ops.divergences_backward_, dw_and_dh),
        ):
            graph = packages.traced_launches(name, args, {"chunk_rows": 100}).graph
            calls = [
                len(graph.find_nodes(op="call_function", target=op))
                for op in (of_rows.default, torch.ops.aten.addmm.out, torch.ops.aten.mm.out)
            ]
            assert calls == [4, 4 + added, 4 + written], name


class Gradients(torch.nn.Module):
    def forward(self, x, head, target, upstream):
        lse = packed.ops.linear_cross_entropy_forward(x, head, target, chunk_rows=16)[1]
        return packed.ops.linear_cross_entropy_backward(upstream, None, x, head, target, lse, chunk_rows=16)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_products_of_a_package_on_a_cpu(monkeypatch, tmp_path, aoti_packages, dtype):
    """Lowered as for CUDA, with row operators that stay calls. Chunks write slices of the input's gradient, and of
    float16 an in-place multiplication follows: Inductor gives the whole tensor another buffer for that."""

    def given(rows):
        x, head, upstream = torch.randn(rows, 32), 0.3 * torch.randn(50, 32), torch.rand(rows) / 100
        return x.to(dtype), head.to(dtype), torch.randint(50, (rows,)), upstream

    def multiplies(args):
        sizes = [list(arg.get_size()) for arg in args if isinstance(arg, ir.IRNode)]
        return [50, 32] in sizes and sizes[0] != [50, 32]

    monkeypatch.setattr(packages, "packs", multiplies)
    rows = {0: Dim.DYNAMIC}
    program = torch.export.export(Gradients(), given(32), dynamic_shapes=(rows, None, rows, rows))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "gradients.pt2"))
    package = torch._inductor.aoti_load_package(path)
    for number in (32, 20, 3):
        args = given(number)
        for found, expected in zip(package(*args), Gradients()(*args), strict=True):
            torch.testing.assert_close(found, expected)


def counted_rows(logits, target):
    """What the operator gets of a model that leaves rows out by an index."""

    class Counted(torch.nn.Module):
        def forward(self, logits, target):
            counted = target != -100
            return packed.ops.cross_entropy_forward(logits[counted], target[counted])

    program = torch.export.export(Counted(), (logits, target))
    (call,) = program.graph.find_nodes(op="call_function", target=packed.ops.cross_entropy_forward.default)
    return [node.meta["val"] for node in call.args]


def test_what_cannot_be_packed_is_refused():
    logits, target = torch.zeros(4, 9), torch.zeros(4, dtype=torch.int64)
    packages.refuse("cross_entropy_forward", [logits, target], {})
    with pytest.raises(NotImplementedError, match="float64"):
        packages.refuse("cross_entropy_forward", [logits.double(), target], {})
    with pytest.raises(NotImplementedError, match="with skip_ignored"):
        packages.refuse("linear_cross_entropy_forward", [logits, logits, target], {"skip_ignored": True})
    fakes = placeholders(Loss(), (logits, target), ({1: Dim.DYNAMIC}, {}))
    with pytest.raises(NotImplementedError, match="dynamic number of classes"):
        packages.refuse("cross_entropy_forward", fakes, {})
    with pytest.raises(NotImplementedError, match="number of rows that depends on data"):
        packages.refuse("cross_entropy_forward", counted_rows(logits, target), {})
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        fakes = placeholders(Loss(), (logits[:0], target[:0]), ({0: Dim.DYNAMIC}, {0: Dim.DYNAMIC}))
    with pytest.raises(NotImplementedError, match="traced without rows"):
        packages.refuse("cross_entropy_forward", fakes, {})
    several = torch._inductor.config.patch({"aot_inductor.emit_multi_arch_kernel": True})
    with several, pytest.raises(NotImplementedError, match="several architectures"):
        packages.refuse("cross_entropy_forward", [logits, target], {})


@pytest.mark.parametrize("options", [RowOptions(), RowOptions(3, 0.1, 30.0, 2.0)])
def test_flags_as_source(options):
    """Inductor writes a constant into a module's source as it prints."""
    for made in (flags.flags_of(options, True, 2), flags.SumFlags(True, False, True, True, False, False, True)):
        again = eval(repr(made), {})
        assert again == made and type(again) is type(made)
