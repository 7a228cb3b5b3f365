"""batch_invariant=True in compiled steps and exported programs: the bits of eager, for any number of rows."""

import pytest
import torch
from torch.export import Dim

import xent_ops

HIDDEN, CLASSES = 32, 1003
NUMBERS = (600, 7, 100, 512, 513)


def focal(stats):
    return -((1 - stats.log_probs.exp()) ** 2) * stats.log_probs


def of_tokens(x, head, target):
    return xent_ops.linear_token_loss(x, head, target, focal, reduction="sum", batch_invariant=True)


def of_log_probs(x, head, target):
    stats = xent_ops.linear_token_log_probs(x, head, target, batch_invariant=True)
    return torch.stack([-stats.log_probs, 0.5 * stats.entropy])  # no sum: Inductor fuses a product with one


def of_logits(x, head, target):
    return xent_ops.token_log_probs(x, target % HIDDEN, batch_invariant=True).log_probs


def summed(x, head, target):
    return xent_ops.linear_cross_entropy(x, head, target, reduction="sum", batch_invariant=True)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("loss", [of_log_probs, of_logits, summed, of_tokens], ids=lambda loss: loss.__name__)
def test_bits_of_eager(device, loss, backend):
    head = (torch.randn(CLASSES, HIDDEN, device=device) / 2).bfloat16()
    x, target = torch.randn(600, HIDDEN, device=device).bfloat16(), torch.randint(CLASSES, (600,), device=device)
    compiled, gradients = torch.compile(loss, fullgraph=True, backend=backend), []
    for number in NUMBERS[:3] if loss is of_tokens else NUMBERS:
        found = []
        for call in (loss, compiled):
            rows, classes = x[:number].clone().requires_grad_(), target[:number]
            if loss is not of_tokens:
                torch._dynamo.mark_dynamic(rows, 0), torch._dynamo.mark_dynamic(classes, 0)
            value = call(rows, head, classes)
            found.append((value.detach(), *torch.autograd.grad(value.sum(), rows)))
        (eager, eager_grad), (value, gradient) = found
        if value.dim():
            assert torch.equal(value, eager)
        if loss is not of_tokens:  # whose function Inductor computes in another order
            assert torch.equal(gradient, eager_grad)
        gradients.append(gradient)
    assert all(torch.equal(gradient, gradients[0][: len(gradient)]) for gradient in gradients)


def of_outputs(x, head, target):
    outputs = xent_ops.linear_cross_entropy_outputs(x, head, target, reduction="none", batch_invariant=True)
    return torch.stack([outputs.loss, outputs.entropy])


def of_several(x, head, target):
    ids = torch.stack([target, target.flip(0)], -1)
    return xent_ops.linear_token_log_probs(x, head, ids, batch_invariant=True).log_probs


class Model(torch.nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.loss, self.head = loss, torch.nn.Parameter((torch.randn(CLASSES, HIDDEN) / 2).bfloat16())

    def forward(self, x, target):
        return self.loss(x, self.head, target)


def inputs(number):
    return torch.randn(number, HIDDEN).bfloat16(), torch.randint(CLASSES, (number,))


@torch.no_grad()
def exported(model, rows):
    return torch.export.export(model, inputs(600), dynamic_shapes=({0: rows}, {0: rows}))


@torch.no_grad()
def assert_bits_of_eager(program, model):
    for number in (2, 511, 512, 513, 600, 1024):
        given = inputs(number)
        found, wanted = program(*given), model(*given)
        if model.loss is of_tokens:  # a sum over rows, which a tracer adds up in another order
            torch.testing.assert_close(found, wanted)
        else:
            assert torch.equal(found, wanted), number


@pytest.mark.parametrize("rows", [Dim("rows", min=2), Dim.DYNAMIC], ids=["named", "dynamic"])
@pytest.mark.parametrize(
    "loss", [of_log_probs, of_outputs, of_several, summed, of_tokens], ids=lambda loss: loss.__name__
)
def test_exported_for_any_number_of_rows(loss, rows):
    model = Model(loss)
    assert_bits_of_eager(exported(model, rows).module(), model)


@pytest.mark.slow  # 20 s of the C++ compiler
def test_package_for_any_number_of_rows(tmp_path, aoti_packages):
    model = Model(of_log_probs)
    path = torch._inductor.aoti_compile_and_package(exported(model, Dim.DYNAMIC), package_path=f"{tmp_path}/rows.pt2")
    assert_bits_of_eager(torch._inductor.aoti_load_package(path), model)


@torch.no_grad()
def test_core_aten():
    """A fixed number of rows has chunks of one shape there too. A dynamic number is refused."""
    model, given = Model(of_log_probs), inputs(600)

    def values(number):
        rows = tuple(tensor[:number] for tensor in given)
        program = torch.export.export(model, rows).run_decompositions(xent_ops.decompositions())
        assert not any("xent" in str(node.target) for node in program.graph.nodes)
        return program.module()(*rows)

    everything = values(600)
    torch.testing.assert_close(everything, model(*given))
    assert all(torch.equal(values(number), everything[:, :number]) for number in (7, 512))
    with pytest.raises(NotImplementedError, match="batch_invariant=True of a dynamic number of rows"):
        exported(model, Dim.DYNAMIC).run_decompositions(xent_ops.decompositions())
