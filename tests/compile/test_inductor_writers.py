"""What may write to the logits, and that no such writer makes the numbers wrong."""

import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from rewriting import Rewriting, V, targets

from xent_ops import inductor
from xent_ops.inductor.rewriting import writers

ROWS, WIDTH = 6, 8


@torch.library.custom_op("xent_tests::double_", mutates_args={"x"})
def double_(x: torch.Tensor) -> None:
    x.mul_(2)


@torch._dynamo.allow_in_graph
def opaque(x):
    """Python that Dynamo does not look into."""
    x.mul_(2)
    return x.sum()


def _norm_weights(x):
    F.embedding(torch.tensor([0, 2]), x, max_norm=0.5)


def _bag_weights(x):
    F.embedding_bag(torch.tensor([[0, 2]]), x, max_norm=0.5)


def _running_statistics(x):
    F.batch_norm(torch.arange(2.0 * V).view(2, V), x[0].float(), x[1].float(), training=True)


def _running_statistics_of_instances(x):
    F.instance_norm(torch.arange(2.0 * 3 * V).view(2, V, 3), x[0].float(), x[1].float())


def _batch_norm_in_cpp(x):
    torch.batch_norm(torch.arange(2.0 * V).view(2, V), None, None, x[0], x[1], True, 0.1, 1e-5, False)


def _set_item(x):
    x[1] = 0.5


def _multiply_in_python(x):
    x *= 2


# Of x, a tensor without gradient that shares the memory of the logits.
WRITERS = {
    "mul_": lambda x: x.mul_(2),
    "foreach": lambda x: torch._foreach_mul_([x], 2),
    "foreach of two": lambda x: torch._foreach_add_([torch.zeros(2), x], 1.0),
    "foreach copy": lambda x: torch._foreach_copy_([x], [torch.ones_like(x)]),
    "embedding": _norm_weights,
    "embedding_bag": _bag_weights,
    "batch_norm": _running_statistics,
    "batch_norm in C++": _batch_norm_in_cpp,
    "instance_norm": _running_statistics_of_instances,
    "embedding_renorm_": lambda x: torch.embedding_renorm_(x, torch.tensor([0, 1]), 0.5, 2.0),
    "relu_": lambda x: F.relu_(x),
    "inplace=": lambda x: F.hardtanh(x, -0.1, 0.1, inplace=True),
    "dropout": lambda x: F.dropout(x, 1.0, True, True),
    "threshold": lambda x: F.threshold(x, 0.1, 0.0, True),
    "out=": lambda x: torch.neg(x.clone(), out=x),
    "two outs": lambda x: torch.max(x.clone(), 0, out=(x[0], torch.zeros(V, dtype=torch.int64))),
    "setitem": _set_item,
    "*=": _multiply_in_python,
    "index_put_": lambda x: x.index_put_((torch.tensor([1]),), torch.tensor(0.5, dtype=x.dtype)),
    "scatter_": lambda x: x.scatter_(0, torch.zeros(1, V, dtype=torch.int64), 0.5),
    "copy_": lambda x: x[2:].copy_(x[:4].clone()),
    "aten": lambda x: torch.ops.aten.mul_(x, 2),
    "aten overload": lambda x: torch.ops.aten.mul_.Scalar(x, 2),
    "custom operator": double_,
    "opaque Python": opaque,
    "addcmul_": lambda x: x.addcmul_(torch.ones_like(x), torch.ones_like(x)),
}
FLOAT32_ONLY = {
    "batch_norm",
    "batch_norm in C++",
    "instance_norm",
    "embedding",
    "embedding_bag",
    "embedding_renorm_",
    "two outs",
}
READERS = {
    "sum": lambda x: x.sum(),
    "foreach": lambda x: torch._foreach_mul([x], 2)[0].sum(),
    "embedding": lambda x: F.embedding(torch.tensor([0, 2]), x).sum(),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True).square().sum(),
    "einsum": lambda x: torch.einsum("ij->", x),
    "max_pool1d": lambda x: F.max_pool1d(x, 2).sum(),
    "topk": lambda x: torch.topk(x, 2).values.sum(),
    "special": lambda x: torch.special.expit(x).sum(),
    "linalg": lambda x: torch.linalg.norm(x.float()),
    "casts": lambda x: x.double().float().sum(),
}


def tensors(dtype):
    torch.manual_seed(3)
    h = torch.randn(ROWS, WIDTH).to(dtype).requires_grad_()
    return h, torch.randn(WIDTH, V).to(dtype).requires_grad_(), targets(ROWS)


def outcome(function, dtype, backward=True):
    """(loss and gradients, or the kind of error)."""
    h, w, t = tensors(dtype)
    try:
        loss = function(h, w, t)
        if backward:
            loss.backward()
    except RuntimeError as error:
        return "refused" if "modified by an inplace operation" in str(error) else str(error)
    return loss.detach(), h.grad, w.grad


def before_the_loss(write):
    def function(h, w, t):
        x = h @ w
        y = x.float() / 4
        write(x.detach())
        return F.cross_entropy(y, t)

    return function


def after_the_loss(write):
    def function(h, w, t):
        x = h @ w
        loss = F.cross_entropy(x / 4, t)
        write(x.detach())
        return loss

    return function


def after_the_plain_loss(write):
    def function(h, w, t):
        x = h @ w
        loss = F.cross_entropy(x.view(-1, V), t)
        write(x.detach())
        return loss

    return function


def assert_right(function, dtype, **tolerances):
    """Loss, gradients and refusals of the rewritten graph are those of torch."""
    want, got = outcome(function, dtype), outcome(torch.compile(function, backend=Rewriting()), dtype)
    assert isinstance(want, tuple) == isinstance(got, tuple), (want, got, str(inductor.last_report()))
    if isinstance(want, tuple):
        torch.testing.assert_close(got, want, **tolerances)
    return inductor.last_report()


PLACES = (before_the_loss, after_the_plain_loss)
named = {"ids": lambda case: getattr(case, "__name__", case)}


@pytest.mark.parametrize(
    "where, writer",
    [*itertools.product(PLACES, WRITERS), *((after_the_loss, one) for one in ("mul_", "setitem"))],
    **named,
)
def test_no_writer_is_missed(writer, where):
    before = where is before_the_loss and writer not in FLOAT32_ONLY
    report = assert_right(where(WRITERS[writer]), torch.bfloat16 if before else torch.float32)
    assert len(report.left_alone) == 1, f"the loss has to stay: {report}"
    assert "writes to" in report.calls[0].why or "may write to" in report.calls[0].why


@pytest.mark.parametrize("where, reader", [*itertools.product(PLACES, READERS), (after_the_loss, "embedding")], **named)
def test_readers_are_no_writers(reader, where):
    function = where(lambda x: READERS[reader](x))
    report = assert_right(function, torch.float32, rtol=1e-5, atol=1e-6)
    assert len(report.replaced) == 1, str(report)


def test_writers_of_other_memory_do_not_matter():
    def function(h, w, t):
        x = h @ w
        y = x.float()
        other = torch.zeros_like(h)
        torch._foreach_add_([other], 1.0)
        F.embedding(t.clamp(min=0) % ROWS, other, max_norm=1.0)
        return F.cross_entropy(y, t) + other.sum()

    report = assert_right(function, torch.bfloat16)
    assert report.replaced[0].upcast_removed


def test_a_part_of_a_split_whose_base_is_written_to():
    """Autograd lets nobody ask it for its grad_fn then."""

    def function(h, w, t):
        x = (h @ w).tanh().exp()
        loss = F.cross_entropy(x.split(V // 2, -1)[0].contiguous(), t % 2)
        with torch.no_grad():
            x.mul_(2)
        return loss

    assert len(assert_right(function, torch.float32).calls) == 1


def test_plain_inductor_compiles_what_ours_does(monkeypatch):
    """F.embedding(max_norm=) on the logits after the loss, through Inductor."""
    function = after_the_plain_loss(_norm_weights)
    got = outcome(torch.compile(function, options=inductor.options()), torch.float32)
    torch.testing.assert_close(got, outcome(torch.compile(function), torch.float32))


def test_every_in_place_operator_of_aten_is_a_writer():
    """By the schemas, which say so of each whose name ends in one underscore."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.empty(2)
    names = {name.partition(".")[0].removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names()}
    found = [name for name in names if name.endswith("_") and not name.endswith("__") and hasattr(torch.Tensor, name)]
    assert len(found) > 100
    missed = [name for name in found if x not in writers.written_by(graph.call_method(name, (x,)))]
    assert not missed


STEPS = {
    "x * {0}": lambda x, number: x * number,
    "{0} * x": lambda x, number: number * x,
    "x / {0}": lambda x, number: x / number,
    "{0} * tanh(x / {0})": lambda x, number: number * torch.tanh(x / number),
    "x + {0}": lambda x, number: x + number,
    "x.div_({0})": lambda x, number: x.div_(number),
    "statement x.mul_({0})": lambda x, number: (x.mul_(number), x)[1],
    "two views": lambda x, number: x.view(2, 3, V).view(-1, V),
    "transposed twice": lambda x, number: x.t().t(),
    "x[:]": lambda x, number: x[:, :],
    "x.float()": lambda x, number: x.float(),
}


def random_program(seed):
    """(a function around one loss, its lines): steps, and writers to and readers of any tensor made so far."""
    draw = random.Random(seed)
    lines, parts = [], []

    def other(place):
        if draw.random() < 0.3:
            name, which = draw.choice(sorted(READERS)), draw.random()
            parts.append((place, "read", READERS[name], which))
        else:
            name, which = draw.choice(sorted(WRITERS.keys() - {"dropout", "two outs"})), draw.random()
            elsewhere = draw.random() < 0.4
            parts.append((place, "write elsewhere" if elsewhere else "write", WRITERS[name], which))
        lines.append(f"{place}: {parts[-1][1]} {name} of tensor {which:.2f}")

    for _ in range(draw.randint(0, 4)):
        name, number = draw.choice(sorted(STEPS)), draw.choice((0.5, 2.0, 4, 8.0))
        parts.append(("before", "step", STEPS[name], number))
        lines.append(name.format(number))
        if draw.random() < 0.25:
            other("before")
    nll = draw.random() < 0.3
    lines.append("nll_loss" if nll else "cross_entropy")
    while draw.random() < 0.3:
        other("after")

    def function(h, w, t):
        x = h @ w
        made, extra = [x], 0.0
        for place in ("before", "after"):
            for when, kind, apply, number in parts:
                if when != place:
                    continue
                if kind == "step":
                    x = apply(x, number)
                    made.append(x)
                    continue
                one = made[int(number * len(made))]
                if kind == "read":
                    extra = extra + apply(one)
                else:
                    apply(one.detach().clone() if kind == "write elsewhere" else one.detach())
            if place == "before":
                loss = F.nll_loss(F.log_softmax(x, -1), t) if nll else F.cross_entropy(x, t)
        return loss + extra

    return function, lines


@pytest.mark.parametrize("part", [*range(3), *(pytest.param(part, marks=pytest.mark.slow) for part in range(3, 8))])
def test_random_programs(part):
    """float32, where nothing is rounded in between: the values and gradients of eager, wherever torch has any."""
    replaced = 0
    for seed in range(10 * part, 10 * part + 10):
        function, lines = random_program(seed)
        want = outcome(function, torch.float32)
        if not isinstance(want, tuple):
            continue  # torch saves what is written here
        got = outcome(torch.compile(function, backend=Rewriting(), fullgraph=True), torch.float32)
        report = inductor.last_report()
        context = "\n".join([f"seed {seed}", *lines, str(report)])
        assert isinstance(got, tuple), f"{got}\n{context}"
        torch.testing.assert_close(
            got, want, rtol=1e-3, atol=1e-4, equal_nan=True, msg=lambda m, c=context: f"{m}\n{c}"
        )
        replaced += len(report.replaced)
        torch.compiler.reset()
    assert replaced > 0
