"""Heads that the pass finds, compiled by Inductor: one pass, any number of rows, checkpoints, caches, auto_chunker."""

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from finding_heads import H, V, ce, heads_of, inputs
from helpers.graphs import Partitioned, graph_text, run_and_get_code
from linear_cases import IN_PLACE, ONE_PASS, ROWS, counts
from rewriting import Rewriting, gradients
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from xent_ops import inductor
from xent_ops.inductor.rewriting import head

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def code_of(function, *tensors, **how):
    """Inductor's code; value and gradients are those of eager."""
    want = gradients(function, tensors)
    compiled = torch.compile(function, fullgraph=True, **(how or {"options": inductor.options(linear=True)}))
    made, code = run_and_get_code(lambda: gradients(compiled, tensors))
    torch.testing.assert_close(made, want, rtol=1e-4, atol=1e-5)
    return "\n".join(code)


def shifted(x, w, b, t):
    y = (F.linear(x, w, b) / 2).float()
    return F.cross_entropy(y[..., :-1, :].reshape(-1, V), t[..., 1:].reshape(-1))


def test_with_grad_and_no_logits():
    code = code_of(shifted, *inputs())
    assert counts(code, ONE_PASS, ROWS) == (1, 0) and counts(code, IN_PLACE) >= (1,)
    assert "mm(" not in code and f"(8, {V})" not in code
    (call,) = inductor.last_report().calls
    assert call.head and call.logit_scale == 0.5


def test_without_gradients_it_is_one_product():
    def evaluate(x, w, b, t):
        with torch.no_grad():
            return shifted(x, w, b, t)

    tensors = inputs()
    compiled = torch.compile(evaluate, fullgraph=True, options=inductor.options(linear=True))
    made, code = run_and_get_code(compiled, *tensors)
    torch.testing.assert_close(made, evaluate(*tensors))
    assert counts("\n".join(code), ONE_PASS, ROWS) == (0, 1)


class Tied(nn.Module):
    """Checkpointed blocks, and a head that is the embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(V, H)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(H, H), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(H, V, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, t):
        x = self.embedding(t.clamp(min=0))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return ce(self.head(x), t)


def test_checkpointed_blocks_and_a_tied_head():
    model, t = Tied(), inputs()[-1]
    want = torch.autograd.grad(model(t), model.parameters())
    compiled = torch.compile(model, fullgraph=True, options=inductor.options(linear=True))
    got, code = run_and_get_code(lambda: torch.autograd.grad(compiled(t), model.parameters()))
    torch.testing.assert_close(got, want)
    assert counts("\n".join(code), ONE_PASS) == (1,)


@pytest.mark.slow  # Inductor compiles two steps with a C++ compiler
def test_a_head_inside_a_checkpoint(monkeypatch):
    """It is in a graph inside the graph; Inductor's partitioner does not run the one pass again."""

    def function(x, w, b, t):
        return checkpoint(lambda *tensors: shifted(*tensors).sin(), x * 2, w, b, t, use_reentrant=False)

    assert counts(code_of(function, *inputs()), ONE_PASS) == (1,)
    # "auto" keeps no gradients of the head where the model asks for recomputation.
    monkeypatch.setattr(head, "WORTHWHILE", {"cpu": 0})
    assert counts(code_of(function, *inputs(), options=inductor.options()), ONE_PASS) == (0,)
    (call,) = inductor.last_report().calls
    assert call.replaced and "would be kept in a checkpointed part" in call.head_left


def test_a_budget_for_activations():
    backend = Partitioned()

    def after_the_pass(gm, example_inputs):
        rewrite(gm, example_inputs)
        return backend(gm, example_inputs)

    rewrite = Rewriting(linear=True)
    with torch._functorch.config.patch(activation_memory_budget=0.1):
        compiled = torch.compile(lambda x, *rest: shifted(x.sin() @ torch.eye(H), *rest), backend=after_the_pass)
        compiled(*inputs()).backward()
    assert backend.calls(ONE_PASS) == [1, 0]


def compilations(function, sizes, **options):
    """How often torch compiles ``function`` for these numbers of rows."""
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(function, fullgraph=True, **options)
    _, w, b, _ = inputs()
    for rows in sizes:
        x, t = torch.randn(rows, 7, H), torch.randint(0, V, (rows, 7))
        torch.testing.assert_close(compiled(x, w, b, t), function(x, w, b, t))
    return counters["stats"]["unique_graphs"]


def of_its_sizes(x, w, b, t):
    y = F.linear(x, w, b)
    rows, length, classes = y.shape
    return F.cross_entropy(y.view(rows * length, classes), t.view(rows * length))


@pytest.mark.parametrize("function", [shifted, of_its_sizes], ids=lambda function: function.__name__)
@pytest.mark.parametrize("dynamic", [None, True])
def test_no_more_compilations_than_without_it(function, dynamic):
    """Static for the first number of rows, for any number of rows from the second on; or for any at once."""
    sizes = (6, 3, 11, 4, 8)
    without = compilations(function, sizes, backend=Rewriting(linear=False), dynamic=dynamic)
    backend = Rewriting(linear=True)
    assert compilations(function, sizes, backend=backend, dynamic=dynamic) == without <= 2
    (head,) = heads_of(backend.graph)
    assert isinstance(head.args[0].meta["example_value"].shape[0], torch.SymInt)
    assert all(call.head for call in inductor.last_report().calls)


def test_dynamic_rows_by_inductor():
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = torch.compile(of_its_sizes, fullgraph=True, options=inductor.options(linear=True))
        for rows in (6, 3, 11):
            x, w, b, _ = inputs()
            x, t = torch.randn(rows, 7, H).requires_grad_(), torch.randint(0, V, (rows, 7))
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(t, 0)
            got, code = run_and_get_code(lambda x=x, t=t, w=w, b=b: gradients(compiled, (x, w, b, t)))
            torch.testing.assert_close(got, gradients(of_its_sizes, (x, w, b, t)), rtol=1e-4, atol=1e-5)
            assert rows != 6 or ("mm(" not in "\n".join(code) and counts("\n".join(code), ONE_PASS) == (1,))


@pytest.mark.skipif(TORCH != (2, 13), reason="graphs are pinned to what torch 2.13 traces")
def test_the_graph():
    backend = Rewriting(linear=True)
    torch.compile(shifted, backend=backend, fullgraph=True)(*inputs())
    assert_expected_inline(
        graph_text(backend.graph.owning_module),
        """\
class GraphModule(torch.nn.Module):
    def forward(self, L_x_: "f32[2, 5, 16]", L_w_: "f32[37, 16]", L_b_: "f32[37]", L_t_: "i64[2, 5]"):
        l_x_ = L_x_
        l_w_ = L_w_
        l_b_ = L_b_
        l_t_ = L_t_
        getitem_1: "i64[2, 4]" = l_t_[(Ellipsis, slice(1, None, None))]
        reshape_1: "i64[8]" = getitem_1.reshape(-1)
        getitem_2: "f32[2, 4, 16]" = l_x_[(Ellipsis, slice(None, -1, None), slice(None, None, None))]
        reshape_2: "f32[8, 16]" = getitem_2.reshape((-1, 16))
        linear_cross_entropy_default: "f32[]" = torch.ops.xent.linear_cross_entropy.default(reshape_2, l_w_, reshape_1, l_b_, None, ignore_index = -100, label_smoothing = 0.0, reduction = 'mean', logit_scale = 0.5);  
        return (linear_cross_entropy_default,)
""",
    )


CHUNKED = {
    "auto_chunker.enable": True,
    "auto_chunker.output_size_threshold": 0,
    "auto_chunker.amplify_ratio_threshold": 0,
}


@pytest.mark.skipif(TORCH < (2, 13), reason="auto_chunker on a CPU was tried with torch 2.13 alone")
@pytest.mark.parametrize(
    "linear",
    [pytest.param(None, marks=pytest.mark.slow), pytest.param(False, marks=pytest.mark.slow), True],
    ids=["without the pass", "linear=False", "linear=True"],
)
def test_beside_auto_chunker(linear):
    """Ours wins: auto_chunker runs after the pass, and has no rule for our operators."""
    from torch._inductor import metrics

    def function(x, w, t):
        return F.cross_entropy(F.linear(x, w), t)

    x, w, t = torch.randn(256, 16).requires_grad_(), torch.randn(4096, 16).requires_grad_(), torch.arange(256)
    before = metrics.num_auto_chunking
    code = code_of(function, x, w, t, options=CHUNKED if linear is None else inductor.options(CHUNKED, linear=linear))
    assert metrics.num_auto_chunking - before == (linear is None)
    assert counts(code, ONE_PASS) == (int(linear is True),)


def test_the_option_is_in_the_keys_of_caches():
    from xent_ops.inductor.rewriting.graph_pass import Heads, ReplaceCrossEntropy

    keys = {str(ReplaceCrossEntropy(heads=Heads(linear)).uuid()) for linear in ("auto", True, False)}
    assert len(keys) == 3 and all("linear=" in key for key in keys)
    assert ReplaceCrossEntropy(heads=Heads(True)).uuid() == ReplaceCrossEntropy(heads=Heads(True)).uuid()


def test_the_option_of_each_entry():
    """The last one counts, other passes stay, and an unknown value is refused."""
    from torch._inductor import config

    def ours():
        return config.pre_grad_custom_pass

    before = getattr(config, "pre_grad_pass_timing", None)
    inductor.enable()
    try:
        first = ours()
        assert first.heads.linear == "auto" and inductor.options()["pre_grad_custom_pass"] is first
        other = inductor.options(linear=False)["pre_grad_custom_pass"]
        assert other.heads.linear is False and other.previous is None and ours() is first
        inductor.enable(linear=True)
        assert ours().heads.linear is True and ours().previous is None
        with inductor.replace_cross_entropy(linear=False):
            assert ours().heads.linear is False
        with config.patch(pre_grad_custom_pass=[ours(), first.previous]):
            assert inductor.options(linear=False)["pre_grad_custom_pass"][0].heads.linear is False
    finally:
        inductor.disable()
    assert ours() is None and getattr(config, "pre_grad_pass_timing", None) == before
    for wrong in ("always", None, 1):
        with pytest.raises(ValueError, match="linear must be"):
            inductor.options(linear=wrong)


def test_two_heads():
    """As of multi-token prediction: two hidden states, one weight."""

    def function(x, w, b, t):
        return ce(F.linear(x, w, b), t) + 0.3 * ce(F.linear(x.tanh(), w, b), t.roll(-1, 1))

    assert counts(code_of(function, *inputs()), ONE_PASS) == (2,)
    assert [call.head for call in inductor.last_report().calls] == [True, True]
