"""F.nll_loss of log_softmax is the same loss."""

import pytest
import torch
import torch.nn.functional as F
from rewriting import V, assert_left_alone, assert_same, logits, targets, wide
from torch import nn

SAME = {
    "functions": lambda x, t, w: F.nll_loss(F.log_softmax(x, -1), t),
    "keywords": lambda x, t, w: F.nll_loss(input=F.log_softmax(input=x, dim=1), target=t, weight=w, ignore_index=5),
    "method": lambda x, t, w: F.nll_loss(x.log_softmax(1), t, w, reduction="sum"),
    "torch": lambda x, t, w: F.nll_loss(torch.log_softmax(x, dim=-1), t, reduction="none"),
    "modules": lambda x, t, w: nn.NLLLoss(ignore_index=5)(nn.LogSoftmax(-1)(x), t),
    "dtype": lambda x, t, w: F.nll_loss(F.log_softmax(x, -1, dtype=torch.float32), t),
    "views behind": lambda x, t, w: F.nll_loss(F.log_softmax(x.view(2, 3, V), -1).view(-1, V), t),
    "shifted behind": lambda x, t, w: F.nll_loss(
        F.log_softmax(x.view(2, 3, V), -1)[:, :-1].contiguous().view(-1, V), t.view(2, 3)[:, 1:].reshape(-1)
    ),
    "transposed behind": lambda x, t, w: F.nll_loss(F.log_softmax(x.view(2, 3, V), 2).transpose(1, 2), t.view(2, 3)),
    "classes in dimension 1": lambda x, t, w: F.nll_loss(F.log_softmax(x.view(2, 3, V).movedim(2, 1), 1), t.view(2, 3)),
    "one row": lambda x, t, w: F.nll_loss(F.log_softmax(x[1], 0), t[1]),
    "tail": lambda x, t, w: F.nll_loss(F.log_softmax(30 * torch.tanh(x.cumsum(0).float() / 30), -1), t),
}


@pytest.mark.parametrize("case", SAME)
def test_nll_of_log_softmax_is_replaced(case):
    function = SAME[case]
    backend, report = assert_same(function, logits(6, V), targets(6, ignored=5), torch.rand(V), rtol=1e-4, atol=1e-5)
    assert "nll_loss of float32" in report.replaced[0].what
    assert F.nll_loss not in backend.targets() and F.log_softmax not in backend.targets()
    assert report.replaced[0].softcap == (30.0 if case == "tail" else None)


@pytest.mark.parametrize("where", ["before", "as dtype", "behind"])
def test_the_upcast_goes_too(where):
    function = {
        "before": lambda x, t: F.nll_loss(F.log_softmax(x.float(), -1), t),
        "as dtype": lambda x, t: F.nll_loss(F.log_softmax(x, -1, dtype=torch.float32), t),
        "behind": lambda x, t: F.nll_loss(F.log_softmax(x, -1).float(), t),
    }[where]
    tolerances = {"rtol": 0.02, "atol": 1e-3} if where == "behind" else {"rtol": 1e-6, "atol": 1e-6}
    backend, report = assert_same(function, logits(6, V, dtype=torch.bfloat16), targets(6), **tolerances)
    assert report.replaced[0].upcast_removed
    assert not wide(backend, 6)


LEFT = {
    "other dimension": (lambda x, t: F.nll_loss(F.log_softmax(x, 0), t), "not the one of its classes"),
    "other dimension, viewed": (
        lambda x, t: F.nll_loss(F.log_softmax(x[:, :36].view(6, 6, 6), 1).transpose(1, 2), t[:, None].expand(6, 6) % 6),
        "not the one of its classes",
    ),
    "some classes": (lambda x, t: F.nll_loss(F.log_softmax(x, -1)[:, :20], t % 20), "selects classes"),
    "mixed by a view": (
        lambda x, t: F.nll_loss(F.log_softmax(x[:, :36], -1).view(12, 18), t.repeat(2) % 18),
        "does not keep the classes in one dimension",
    ),
    "no log_softmax": (lambda x, t: F.nll_loss(x.sin(), t), "no log_softmax of this graph"),
    "a shift before": (lambda x, t: F.nll_loss(F.log_softmax(x + 1, -1), t), "add stands before it"),
    "size_average": (lambda x, t: F.nll_loss(F.log_softmax(x, -1), t, size_average=False), "no argument size_average"),
}


@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
@pytest.mark.parametrize("case", LEFT)
def test_left_alone(case):
    function, why = LEFT[case]
    assert_left_alone(function, (logits(6, V), torch.randint(0, V, (6,))), why)
