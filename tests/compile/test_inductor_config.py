"""Inductor's side of the pass: options, configuration, uuid, caches, chaining, and whole compilations."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers.processes import run_with_torch
from rewriting import V, gradients, logits, targets
from torch import nn

import xent_ops
from xent_ops import inductor


def _model():
    model = nn.Sequential(nn.Linear(8, V), nn.Flatten(0, 1)).bfloat16()
    return model, torch.randn(2, 3, 8).bfloat16(), targets(6)


def test_options_through_inductor():
    """The step itself, loss and gradients, and Inductor's own tables: no float32 logits in the generated code."""
    model, x, t = _model()
    other = copy.deepcopy(model)

    def step(model, x, t):
        return F.cross_entropy(model(x).float(), t)

    want = step(model, x, t)
    want.backward()
    compiled = torch.compile(step, options=inductor.options({"max_autotune": False}), fullgraph=True)
    got = compiled(other, x, t)
    got.backward()
    assert "1 replaced, 0 left alone, in 1 graphs" in str(inductor.last_report())
    assert "float32 upcast removed" in str(inductor.last_report())
    torch.testing.assert_close(got, want)
    torch.testing.assert_close([p.grad for p in other.parameters()], [p.grad for p in model.parameters()])


MODES = ("default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune")


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_beside_the_pass(mode):
    """torch.compile refuses a mode beside options: the options hold what it sets for the mode, and nothing else."""
    mine, plain = inductor.options(mode), inductor.options()
    assert {name: value for name, value in mine.items() if name not in plain} == torch._inductor.list_mode_options(mode)
    torch.compile(F.cross_entropy, options=mine)  # which refuses a setting that it does not know


def test_a_mode_runs_the_pass():
    x, t = torch.randn(4, V), targets(4)
    compiled = torch.compile(lambda x, t: F.cross_entropy(x, t), options=inductor.options("reduce-overhead"))
    torch.testing.assert_close(compiled(x, t), F.cross_entropy(x, t))
    assert len(inductor.last_report().replaced) == 1


def test_what_is_no_mode_is_refused():
    with pytest.raises(
        ValueError, match="the mode 'reduce_overhead' is none that torch has; valid are 'default'"
    ) as no:
        inductor.options("reduce_overhead")
    assert all(repr(mode) in str(no.value) for mode in MODES)
    with pytest.raises(TypeError, match="a dict of Inductor's options, or the name of a mode, got list"):
        inductor.options(["max_autotune"])
    if "lite" in torch._inductor.list_mode_options():  # not in every torch
        with pytest.raises(ValueError, match="the mode 'lite' runs no passes"):
            inductor.options("lite")
        with pytest.raises(ValueError, match="use_pre_grad_passes=False keeps Inductor from running the pass"):
            inductor.options({"use_pre_grad_passes": False})


def test_a_float_that_torch_traces_twice():
    """With dynamic=True torch traces label_smoothing as an input first, and again as a constant: the report has only
    the graph that runs."""
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    x, t = torch.randn(4, V), targets(4)
    compiled = torch.compile(loss, options=inductor.options(), dynamic=True)
    torch.testing.assert_close(compiled(x, t), loss(x, t))
    (call,) = inductor.last_report().calls
    assert call.replaced and "label_smoothing=0.1" in call.what


def test_a_checkpointed_loss():
    """The loss is in a graph inside the graph, which Inductor hands to the pass as well."""
    from torch.utils.checkpoint import checkpoint

    def function(x, t):
        return checkpoint(lambda y: F.cross_entropy(y.float(), t), x * 2, use_reentrant=False)

    x, t = logits(6, V, dtype=torch.bfloat16), targets(6)
    want, want_grads = gradients(function, (x, t))
    got, got_grads = gradients(torch.compile(function, options=inductor.options(), fullgraph=True), (x, t))
    torch.testing.assert_close([got, *got_grads], [want, *want_grads])
    report = inductor.last_report()
    assert [call.upcast_removed for call in report.calls] == [True], str(report)


def test_enable_disable_and_the_context_manager():
    from torch._inductor import config

    def compile_once():
        torch.compiler.reset()
        torch.compile(lambda x, t: F.cross_entropy(x, t))(torch.randn(4, V), torch.zeros(4, dtype=torch.int64))
        return len(inductor.last_report().replaced)

    settings = ["pre_grad_custom_pass", "pre_grad_pass_timing"]  # the second is not in torch 2.11
    before = [getattr(config, name, None) for name in settings]
    assert before[0] is None
    with inductor.replace_cross_entropy():
        assert compile_once() == 1
    assert [getattr(config, name, None) for name in settings] == before
    inductor.enable()
    try:
        inductor.enable()  # idempotent
        assert inductor.last_report().calls == () and compile_once() == 1
        chained = config.pre_grad_custom_pass
        assert inductor.options()["pre_grad_custom_pass"] is chained, "not twice"
    finally:
        inductor.disable()
    assert [getattr(config, name, None) for name in settings] == before
    inductor.disable()


def _with_uuid(identifier, ran=None):
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Other(CustomGraphPass):
        def __call__(self, graph):
            if ran is not None:
                ran.append([node.target for node in graph.nodes])

        def uuid(self):
            return identifier

    return Other()


def test_chains_with_passes_already_set():
    from torch._inductor import config

    ran = []
    other = _with_uuid("other", ran)
    compiled = torch.compile(
        lambda x, t: F.cross_entropy(x, t), options=inductor.options({"pre_grad_custom_pass": other})
    )
    compiled(torch.randn(4, V), torch.zeros(4, dtype=torch.int64))
    assert len(ran) == 1 and F.cross_entropy in ran[0], "the other pass sees the graph as it was"
    assert len(inductor.last_report().replaced) == 1
    with config.patch(pre_grad_custom_pass=other):
        inductor.enable()
        assert config.pre_grad_custom_pass is not other
        inductor.disable()
        assert config.pre_grad_custom_pass is other


def test_disable_takes_ours_out_of_a_list():
    from xent_ops.inductor.rewriting.graph_pass import Heads, with_ours, without_ours

    first, last = _with_uuid("first"), _with_uuid("last")
    ours = with_ours([first], Heads())
    assert with_ours([ours, last], Heads()) == [ours, last]
    assert without_ours([ours, last]) == [first, last]
    assert without_ours(ours) == [first]


def test_uuid():
    from xent_ops.inductor.rewriting.graph_pass import ReplaceCrossEntropy

    alone = ReplaceCrossEntropy().uuid()
    assert alone == ReplaceCrossEntropy().uuid() and xent_ops.__version__ in str(alone)
    with_other = ReplaceCrossEntropy(_with_uuid("other")).uuid()
    assert with_other not in (alone, ReplaceCrossEntropy([_with_uuid("another")]).uuid())
    assert with_other == ReplaceCrossEntropy((_with_uuid("other"),)).uuid()
    for without in (_with_uuid(None), lambda graph: None):
        assert ReplaceCrossEntropy(without).uuid() is None


def test_a_fresh_process():
    """The uuid is the same there. And Inductor, which caches its decompositions at the first compile, has ours before
    the pass brings the first operator of ours into a graph."""
    from xent_ops.inductor.rewriting.graph_pass import ReplaceCrossEntropy

    code = """
import torch, xent_ops
from torch._inductor.decomposition import fast_random_decomps
backward = torch.ops.xent.cross_entropy_backward.default
assert backward not in fast_random_decomps()
ours = xent_ops.inductor.options()["pre_grad_custom_pass"]
assert backward in fast_random_decomps()
print(ours.uuid())
"""
    assert run_with_torch(code).strip() == str(ReplaceCrossEntropy().uuid())
