"""The pass that puts our loss in the place of F.cross_entropy: what it replaces, what not, and that numbers stay."""

import pytest
import torch
import torch.nn.functional as F
from rewriting import Rewriting, V, assert_left_alone, assert_same, logits, targets
from torch import nn

from xent_ops import inductor

CALLS = {
    "plain": lambda x, t, w: F.cross_entropy(x, t),
    "positional": lambda x, t, w: F.cross_entropy(x, t, w, None, 5, None, "sum", 0.1),
    "keywords": lambda x, t, w: F.cross_entropy(
        input=x, target=t, weight=w, ignore_index=5, reduction="mean", label_smoothing=0.1
    ),
    "none": lambda x, t, w: F.cross_entropy(x, t, reduction="none"),
    "module": lambda x, t, w: nn.CrossEntropyLoss(weight=w, ignore_index=5, label_smoothing=0.1)(x, t),
}
SHAPES = {
    "(N, C)": ((6, V), (6,)),
    "(C,)": ((V,), ()),
    "(N, C, d1)": ((2, V, 3), (2, 3)),
    "4-D": ((2, V, 3, 2), (2, 3, 2)),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("call", CALLS)
def test_keywords_and_shapes(call, shape):
    size, target_size = SHAPES[shape]
    ignored = 5 if call in ("positional", "keywords", "module") else -100
    # Where every row is ignored the gradient is torch's NaN or our 0: not the pass's business.
    target = targets(*target_size, ignored=ignored) if target_size else torch.tensor(7)
    assert_same(CALLS[call], logits(*size), target, torch.rand(V))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("size", [(6, V), (V,), (2, V, 3)], ids=str)
def test_class_probabilities(size, reduction):
    probabilities = torch.rand(size).requires_grad_()
    assert_same(
        lambda x, p, w: F.cross_entropy(x, p, w, reduction=reduction, label_smoothing=0.1),
        logits(*size), probabilities, torch.rand(V),
    )  # fmt: skip


def test_a_module_with_buffers_and_two_losses():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.CrossEntropyLoss(weight=torch.rand(V), label_smoothing=0.2)
            self.second = nn.CrossEntropyLoss(reduction="sum", ignore_index=3)

        def forward(self, x, t):
            return self.first(x, t) + 2 * self.second(x.view(2, 3, V).transpose(1, 2), t.view(2, 3))

    _, report = assert_same(Model(), logits(6, V), torch.randint(0, V, (6,)), replaced=2)
    assert all("test_inductor_pass.py" in call.where and "in forward" in call.where for call in report.calls)
    assert "float32 (6, 37), reduction='mean', label_smoothing=0.2, weight" in str(report)


def test_transposed_logits_are_not_copied():
    """(B, S, V).transpose(1, 2), the usual way to give F.cross_entropy a sequence."""
    backend, _ = assert_same(lambda x, t: F.cross_entropy(x.transpose(1, 2), t), logits(2, 3, V), targets(2, 3))
    assert "contiguous" not in backend.targets()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_the_result_keeps_the_dtype(dtype, reduction):
    # eager F.cross_entropy rounds the softmax itself to bfloat16 or float16
    tolerances = {} if dtype == torch.float64 else {"rtol": 0.03, "atol": 1e-3}
    x = logits(6, V, dtype=dtype)
    assert_same(lambda x, t: F.cross_entropy(x, t, reduction=reduction), x, targets(6), **tolerances)


def test_dynamic_sizes():
    backend = Rewriting()
    compiled = torch.compile(lambda x, t: F.cross_entropy(x, t), backend=backend, fullgraph=True, dynamic=True)
    for rows in (4, 6, 9):
        x, t = logits(rows, V), targets(rows)
        torch.testing.assert_close(compiled(x, t), F.cross_entropy(x, t))
    assert len(inductor.last_report().replaced) == 1, "compiled once"


def test_autocast_gives_float32_without_a_float32_copy():
    """F.cross_entropy is on autocast's float32 list, inside the compiled region or around it."""

    def inside(x, t):
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(x, t)

    x, t = logits(6, V, dtype=torch.bfloat16), targets(6)
    backend, _ = assert_same(inside, x, t, rtol=1e-6, atol=1e-6)
    assert "to" not in backend.targets()
    with torch.autocast("cpu", torch.bfloat16):
        backend, _ = assert_same(lambda x, t: F.cross_entropy(x, t), x, t, rtol=1e-6, atol=1e-6)
    assert "to" not in backend.targets()


def _transform(x, t):
    return torch.func.grad(lambda y: F.cross_entropy(y, t))(x)


def _no_grad_weight(x, t, w):
    with torch.no_grad():
        return F.cross_entropy(x, t, w)


LEFT = {
    "size_average": (lambda x, t, w: F.cross_entropy(x, t, size_average=False), "no argument size_average"),
    "reduce": (lambda x, t, w: F.cross_entropy(x, t, None, None, -100, False), "no argument reduce"),
    "torch.func": (lambda x, t, w: _transform(x, t), "inside a torch.func transform"),
    "weight requires grad": (_no_grad_weight, "weight requires grad"),
}


@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
@pytest.mark.parametrize("case", LEFT)
def test_left_alone_with_the_reason(case):
    function, why = LEFT[case]
    assert_left_alone(function, (torch.randn(6, V), targets(6), torch.rand(V, requires_grad=True)), why)


def test_a_transform_elsewhere_in_the_graph():
    assert_same(
        lambda x, t: F.cross_entropy(x, t) + _transform(x.detach(), t).sum(),
        logits(6, V),
        targets(6),
        replaced=1,
        left=1,
    )


def test_tensor_subclasses_are_left_alone():
    from torch.testing._internal.two_tensor import TwoTensor

    x = TwoTensor(torch.randn(6, V), torch.randn(6, V))
    compiled = torch.compile(lambda x, t: F.cross_entropy(x, t), backend=Rewriting())
    t = targets(6)
    torch.testing.assert_close(compiled(x, t).a, F.cross_entropy(x.a, t))
    (call,) = inductor.last_report().calls
    assert call.why == "input is a TwoTensor, not a plain tensor"


def test_what_is_no_loss_of_ours_is_untouched():
    def function(x, t):
        return F.kl_div(F.log_softmax(x, -1), x.softmax(-1).detach()) + F.binary_cross_entropy_with_logits(
            x, x.sigmoid().detach()
        )

    _, report = assert_same(function, logits(6, V), targets(6), replaced=0)
    assert report.calls == () and report.graphs == 1


def test_out_of_range_targets_still_raise():
    compiled = torch.compile(lambda x, t: F.cross_entropy(x, t), backend=Rewriting())
    with pytest.raises(IndexError, match="out of bounds"):
        compiled(torch.randn(2, V), torch.tensor([0, V]))


@pytest.mark.gpu
def test_few_classes_on_a_gpu_are_left_alone(monkeypatch):
    monkeypatch.undo()  # of conftest.py
    for classes in (511, 512):
        x, t = torch.randn(8, classes, device="cuda"), torch.zeros(8, dtype=torch.int64, device="cuda")
        torch.compile(lambda x, t: F.cross_entropy(x, t), backend=Rewriting(), fullgraph=True)(x, t)
        (call,) = inductor.last_report().calls
        assert call.replaced == (classes == 512) and call.why.endswith("on a GPU") == (classes == 511)


@pytest.mark.parametrize(
    "shape, why",
    [((8, 383), "with fewer than 384 classes"), ((8, 384), ""), ((2, 500, 3), "where classes are not dense")],
    ids=str,
)
def test_what_is_slower_on_a_cpu_is_left_alone(monkeypatch, shape, why):
    monkeypatch.undo()  # of conftest.py
    x, t = torch.randn(shape, requires_grad=True), torch.zeros(shape[0], *shape[2:], dtype=torch.int64)
    torch.testing.assert_close(
        torch.compile(F.cross_entropy, backend=Rewriting(), fullgraph=True)(x, t), F.cross_entropy(x, t)
    )
    (call,) = inductor.last_report().calls
    assert call.replaced == (not why) and why in call.why
