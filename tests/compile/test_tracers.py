"""Every public loss under torch.export, torch.jit.trace, torch.fx.symbolic_trace; numbers and sizes that change."""

import functools
import inspect
import io
import re
from pathlib import Path

import pytest
import torch
from helpers.graphs import CompileCounterWithBackend
from helpers.public_api import FUNCTIONS

import xent_ops

V, H, N = 40, 8, 6
PAGE = (Path(__file__).parents[2] / "docs" / "compile.md").read_text()


def negative(stats, factors):
    return -factors * stats.log_probs


def few(t):
    probs = [torch.full_like(t, one, dtype=torch.float32) for one in (0.6, 0.3)]
    return torch.stack([t, (t + 1) % V], -1), torch.stack(probs, -1)


def of_few(h, w, t, **options):
    ids, probs = few(t)
    return xent_ops.linear_top_k_distillation_loss(h, w, ids, probs, **options)


# Of hidden states, a head and targets.
LOSSES = {
    "cross_entropy": lambda h, w, t, **o: xent_ops.cross_entropy(h @ w.t(), t, **o),
    "cross_entropy_outputs": lambda h, w, t, **o: xent_ops.cross_entropy_outputs(h @ w.t(), t, **o).loss,
    "token_log_probs": lambda h, w, t, **o: -xent_ops.token_log_probs(h @ w.t(), t, **o).log_probs.sum(),
    "token_loss": lambda h, w, t, **o: xent_ops.token_loss(
        h @ w.t(), t, negative, rows=(torch.ones_like(t, dtype=h.dtype),), reduction="sum", **o
    ),
    "distillation_loss": lambda h, w, t, **o: xent_ops.distillation_loss(
        h @ w.t(), h.detach() @ w.detach().t() * 0.9, **o
    ),
    "linear_cross_entropy": lambda h, w, t, **o: xent_ops.linear_cross_entropy(h, w, t, **o),
    "linear_cross_entropy_outputs": lambda h, w, t, **o: xent_ops.linear_cross_entropy_outputs(h, w, t, **o).loss,
    "linear_token_log_probs": lambda h, w, t, **o: -xent_ops.linear_token_log_probs(h, w, t, **o).log_probs.sum(),
    "linear_token_loss": lambda h, w, t, **o: xent_ops.linear_token_loss(
        h, w, t, negative, rows=(torch.ones_like(t, dtype=h.dtype),), reduction="sum", **o
    ),
    "linear_distillation_loss": lambda h, w, t, **o: xent_ops.linear_distillation_loss(
        h, w, h.detach() * 0.9, w.detach() * 0.8, **o
    ),
    "linear_top_k_distillation_loss": of_few,
    "top_k_distillation_loss": lambda h, w, t, **o: xent_ops.top_k_distillation_loss(h @ w.t(), *few(t), **o),
}
ALL = {
    **LOSSES,
    "tail": lambda h, w, t: of_few(h, w, t, tail=True),
    "tail of logits": lambda h, w, t: xent_ops.top_k_distillation_loss(h @ w.t(), *few(t), tail=True),
    "top k of rows": lambda h, w, t: of_few(h, w, t, reduction="none").sum(),
}


class Loss(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name, self.weight = name, torch.nn.Parameter(torch.randn(V, H))

    def forward(self, h, t):
        return ALL[self.name](h, self.weight, t)


def inputs(rows=N):
    return torch.randn(rows, H, requires_grad=True), torch.randint(0, V, (rows,))


def gradients(function, h, t):
    loss = function(h, t)
    return loss.detach(), torch.autograd.grad(loss, h)[0]


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("name", ALL)
def test_export(name, grad):
    """The program runs, is saved, is loaded, and has the gradients where they are wanted."""
    model, (h, t) = Loss(name), inputs()
    with torch.set_grad_enabled(grad):
        program = torch.export.export(model, (h, t))
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        for one in (program, torch.export.load(file)):
            if grad:
                torch.testing.assert_close(gradients(one.module(), h, t), gradients(model, h, t))
            else:
                torch.testing.assert_close(one.module()(h, t), model(h, t))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("name", ALL)
def test_jit_trace(name, grad):
    model, (h, t) = Loss(name), inputs()
    with torch.set_grad_enabled(grad):
        traced = torch.jit.trace(model, (h, t), check_trace=False)
        if grad:
            torch.testing.assert_close(gradients(traced, h, t), gradients(model, h, t))
        else:
            torch.testing.assert_close(traced(h, t), model(h, t))


@pytest.mark.parametrize("name", LOSSES)
def test_symbolic_trace_is_refused_in_words(name):
    with pytest.raises((TypeError, NotImplementedError), match=r"torch\.fx\.symbolic_trace calls with proxies"):
        torch.fx.symbolic_trace(Loss(name))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [name for name in ALL if name not in FUNCTIONS])  # test_unbacked_sizes has these
def test_rows_that_a_mask_picks(name, backend):
    """Their number depends on data."""
    if torch.__version__ < "2.13" and name in ("linear_token_loss", "linear_top_k_distillation_loss", "tail"):
        pytest.skip("Dynamo of torch 2.11 does not tell that a size depends on data")
    w, (h, t), mask = (
        torch.randn(V, H, requires_grad=True),
        inputs(),
        torch.tensor([1, 0, 1, 1, 0, 1], dtype=torch.bool),
    )

    def picked(h, t):
        return ALL[name](h[mask], w, t[mask])

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(picked, fullgraph=True, backend=backend)
        torch.testing.assert_close(gradients(compiled, h, t), gradients(picked, h, t))
        with torch.no_grad():
            torch.testing.assert_close(compiled(h, t), picked(h, t))


NUMBERS = {
    (name, argument)
    for name in LOSSES
    for argument, parameter in inspect.signature(getattr(xent_ops, name)).parameters.items()
    if "float" in str(parameter.annotation)
}
MOVING = {"divisor"}


def test_the_page_lists_the_constants():
    (listed,) = re.findall(r"These\s+numbers are constants of a graph:([^.]*)\.", PAGE)
    assert set(re.findall(r"`(\w+)`", listed)) == {argument for _, argument in NUMBERS} - MOVING


WITH_DIVISOR = sorted(name for name, argument in NUMBERS if argument in MOVING)


@pytest.mark.parametrize(
    "name, kind",
    [*((name, float) for name in WITH_DIVISOR), ("linear_cross_entropy", int)],
    ids=lambda case: getattr(case, "__name__", case),
)
def test_a_number_of_each_step_compiles_twice(name, kind):
    """The divisor, transformers' num_items_in_batch: as many times as ``loss / d``."""
    w, (h, t), counter = torch.randn(V, H), inputs(), CompileCounterWithBackend("aot_eager")
    how = {} if "token_loss" in name else {"reduction": "sum"}

    def step(number, h, t):
        return LOSSES[name](h, w, t, divisor=number, **how)

    compiled = torch.compile(step, backend=counter, fullgraph=True)
    for number in map(kind, (3, 4, 5, 7, 9)):
        found, wanted = (gradients(functools.partial(one, number), h, t) for one in (compiled, step))
        torch.testing.assert_close(found, wanted)
    assert counter.frame_count <= 2
