"""Linear losses in packages for processes without Python: products, and chunks as core aten."""

import pytest
import torch
from helpers.processes import run_python
from torch.export import Dim, export
from torch.fx.experimental.proxy_tensor import make_fx

import xent_ops
from xent_ops import _extension

pytestmark = pytest.mark.skipif(not _extension.LIBRARY.exists(), reason="built without C++ (XENT_OPS_BUILD_CPP=0)")


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
    options = {"linear_bias": leaves[2], "chunk_rows": 2, "accumulate_dtype": torch.float32}
    loss = xent_ops.linear_cross_entropy(*leaves[:2], target, **options)
    rows = xent_ops.linear_token_log_probs(*leaves[:2], target, **options)
    total = 2 * loss + rows.log_probs.sum() + rows.entropy.sum()
    return loss.detach(), rows.log_probs.detach(), *torch.autograd.grad(total, leaves)


def distilled(x, head, target, teacher_input, teacher):
    """The same with a teacher's head."""
    leaves = [value.detach().requires_grad_() for value in (x, head)]
    given = {"target": target, "beta": 0.3, "hard_weight": 0.5, "chunk_rows": 3}
    loss = xent_ops.linear_distillation_loss(*leaves, teacher_input, teacher, **given)
    rows = xent_ops.linear_distillation_loss(*leaves, teacher_input, teacher, reduction="none", **given)
    return loss.detach(), *torch.autograd.grad(loss + rows.square().sum(), leaves)


@pytest.mark.slow
def test_packages_without_python(tmp_path, aoti_packages):
    """AOTInductor packages of an evaluation and of training steps, where neither xent_ops nor its library is loaded."""
    model, example = Model(), (torch.randn(4, 6), torch.arange(4))
    longer = torch.randn(6, 6), torch.arange(6)
    bfloat16 = [value.bfloat16() for value in (torch.randn(4, 6), torch.randn(9, 6), torch.randn(9))]
    of_step = *bfloat16[:2], torch.arange(4), bfloat16[2]
    of_teacher = torch.randn(7, 6), torch.randn(9, 6), torch.randint(9, (7,)), torch.randn(7, 4), torch.randn(9, 4)
    programs = {  # with grad mode on
        "score": (export(model, example, dynamic_shapes=({0: Dim.DYNAMIC}, {0: Dim.DYNAMIC})), longer, model),
        "step": (export(make_fx(step)(*of_step), of_step), of_step, step),
        "distilled": (export(make_fx(distilled)(*of_teacher), of_teacher), of_teacher, distilled),
    }
    expected = {}
    for name, (program, arguments, function) in programs.items():
        program = program.run_decompositions(xent_ops.decompositions())
        torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / f"{name}.pt2"))
        results = function(*arguments)
        results = results if isinstance(results, tuple) else (results.detach(),)
        expected[name] = arguments, results
    torch.save(expected, tmp_path / "expected")
    run_python(
        f"""
import sys, torch
for name, (arguments, expected) in torch.load({str(tmp_path / "expected")!r}).items():
    results = torch._inductor.aoti_load_package(f"{tmp_path}/{{name}}.pt2")(*arguments)
    for made, wanted in zip(results if isinstance(results, list | tuple) else (results,), expected, strict=True):
        close = {{"rtol": 0.016, "atol": 1e-3}} if wanted.dtype == torch.bfloat16 else {{}}
        torch.testing.assert_close(made, wanted, **close)
assert "xent_ops" not in sys.modules
"""
    )
