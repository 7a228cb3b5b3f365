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


@pytest.mark.slow
def test_packages_without_python(tmp_path):
    """AOTInductor packages of an evaluation and of a training step, where neither xent_ops nor its library is loaded."""
    model, example = Model(), (torch.randn(4, 6), torch.arange(4))
    program = export(model, example, dynamic_shapes=({0: Dim.DYNAMIC}, {0: Dim.DYNAMIC}))  # with grad mode on
    program = program.run_decompositions(xent_ops.decompositions())
    torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "score.pt2"))
    bfloat16 = [value.bfloat16() for value in (torch.randn(4, 6), torch.randn(9, 6), torch.randn(9))]
    arguments = *bfloat16[:2], torch.arange(4), bfloat16[2]
    graph = make_fx(step)(*arguments)
    program = export(graph, arguments).run_decompositions(xent_ops.decompositions())
    torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "step.pt2"))
    longer = torch.randn(6, 6), torch.arange(6)
    torch.save(((longer, (model(*longer).detach(),)), (arguments, step(*arguments))), tmp_path / "expected")
    run_python(
        f"""
import sys, torch
for name, (arguments, expected) in zip(("score", "step"), torch.load({str(tmp_path / "expected")!r}), strict=True):
    results = torch._inductor.aoti_load_package(f"{tmp_path}/{{name}}.pt2")(*arguments)
    torch.testing.assert_close(tuple(results) if name == "step" else (results,), expected)
assert "xent_ops" not in sys.modules
"""
    )
