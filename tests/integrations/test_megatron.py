"""``use_xent`` for a GPTModel of Megatron-Core: losses, gradients and weights are those of the untouched model."""

import doctest
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import xent_ops

pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ImportError)
import megatron_cases as cases
from helpers.dispatch_log import Log
from helpers.graphs import CompileCounterWithBackend
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.module import Float16Module

from xent_ops.integrations.megatron import remove_xent, use_xent


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with cases.groups("cpu"):
        yield
    dist.destroy_process_group()


@pytest.mark.parametrize("case, ranks", [
    (cases.tensor_parallel, 2), (cases.tensor_parallel, 4), (cases.pipeline, 2), (cases.distributed_optimizer, 2),
    (cases.context_parallel, 2), (cases.context_parallel, 4),
], ids=lambda value: getattr(value, "__name__", None))  # fmt: skip
def test_ranks(pool, device, case, ranks):
    pool(ranks, device).run(case)


MASKED = pytest.mark.parametrize("options", [{}, {"loss_mask": True}], ids=["rows", "mask"])


@MASKED
@pytest.mark.parametrize("device, ranks", [("cpu", 2), ("cuda", 2), ("cuda", 4)])
def test_compiled_over_ranks(pool, device, ranks, options):
    pool(ranks, device).run(cases.compiled_or_captured, True, False, options)


@pytest.mark.gpu
@MASKED
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_cuda_graphs(pool, ranks, compiled, options):
    pool(ranks, "cuda").run(cases.compiled_or_captured, compiled, True, options)


OPTIONS = {
    "rows": {},
    "chunks": {"chunk_rows": 5},
    "mask": {"loss_mask": True},
    "mask, chunks": {"loss_mask": True, "chunk_rows": 5},
    "mask, batch_invariant": {"loss_mask": True, "chunk_rows": 5, "batch_invariant": True},
    "mask, skip_ignored": {"loss_mask": True, "skip_ignored": True},
}


@pytest.mark.parametrize("variant, options", [*itertools.product(("plain", "tied"), OPTIONS), *itertools.product(
    ("multi-token prediction", "multi-token prediction, tied"), ("rows", "mask"))])  # fmt: skip
def test_training(variant, options):
    cases.compare(variant, **OPTIONS[options])


def step(model, batch=None, **options):
    """(losses, gradients by name)"""
    inputs, labels, mask = next(cases.batches()) if batch is None else batch
    model.zero_grad()
    found = model(*inputs, labels=labels.clamp(min=0), loss_mask=mask, **options)
    (found * mask).sum().backward()
    return found.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name, value", [("label_smoothing", 0.1), ("lse_square_scale", 1e-2)])
@pytest.mark.parametrize("loss_mask", [False, True])
def test_options(name, value, loss_mask):
    inputs, labels, mask = next(cases.batches())
    want, model = cases.make(), cases.make()
    use_xent(model, loss_mask=loss_mask, **{name: value})
    labels = labels.clamp(min=0)
    theirs = xent_ops.cross_entropy(want(*inputs), labels, dim=-1, reduction="none", **{name: value})
    (theirs * mask).sum().backward()
    ours, gradients = step(model)
    cases.assert_close(ours, theirs.detach())
    cases.assert_close(gradients, {name: p.grad for name, p in want.named_parameters()})


def test_remove_xent_and_what_stays():
    """Calls without labels, and all calls after remove_xent, are the untouched model's, bit for bit."""
    inputs, labels, mask = next(cases.batches())
    want, model = cases.make(), cases.make()
    report = xent_ops.use_xent(model)
    assert "output_layer (64 classes over 1 ranks, 4 matrix multiplications) and its loss" in str(report)
    assert torch.equal(model(*inputs), want(*inputs))
    assert model.state_dict().keys() == want.state_dict().keys()
    assert model.sharded_state_dict().keys() == want.sharded_state_dict().keys()
    model.eval()
    with torch.no_grad():
        cases.assert_close(model(*inputs, labels=labels) * mask, want(*inputs, labels=labels) * mask)
    model.train()
    xent_ops.remove_xent(model)
    assert torch.equal(step(model)[0], step(want)[0])
    assert "forward" not in vars(model.output_layer) and not model._forward_pre_hooks and not model._forward_hooks
    with pytest.raises(RuntimeError, match="use_xent is not on for this model"):
        xent_ops.remove_xent(model)


@pytest.mark.parametrize("loss_mask", [False, True])
def test_packed_sequences(loss_mask):
    """(1, B S): the positions of each sequence, and attention within it."""
    (ids, positions, attention), labels, mask = next(cases.batches())
    blocks = torch.block_diag(*[(~attention[0, 0]).int()] * cases.B)[None, None] == 0
    packed = [tensor.reshape(1, -1) for tensor in (ids, positions, labels, mask)]
    model, want = cases.make(), step(cases.make())
    use_xent(model, loss_mask=loss_mask)
    losses, gradients = step(model, ((packed[0], packed[1], blocks), *packed[2:]))
    cases.assert_close((losses.view(cases.B, cases.S), gradients), want)


@pytest.mark.parametrize("options, products", [({}, 4), ({"loss_mask": True}, 3)])
def test_products(options, products):
    flops = []
    for used in (False, True):
        model = cases.make()
        if used:
            assert use_xent(model, **options).head_products == products
        with FlopCounterMode(display=False) as counter:
            step(model)
        flops.append(counter.get_total_flops())
    assert flops[1] - flops[0] == (products - 3) * 2 * cases.B * cases.S * cases.H * cases.V


@pytest.mark.parametrize("options", [{}, {"loss_mask": True}])
def test_no_value_is_read(options):
    """For which the host would wait for a GPU."""
    model = cases.make()
    use_xent(model, **options)
    with Log() as log:
        step(model)
    assert log.seen and "aten._local_scalar_dense.default" not in log.seen


def test_no_mask_in_a_call():
    """Without ``loss_mask`` any gradient is right, also in a model with loss_mask=True."""
    inputs, labels, _ = next(cases.batches())
    want, model = cases.make(), cases.make()
    use_xent(model, loss_mask=True)
    upstream = torch.rand(cases.B, cases.S)
    for one in (want, model):
        one(*inputs, labels=labels.clamp(min=0)).backward(upstream)
    cases.assert_close(*({name: p.grad for name, p in one.named_parameters()} for one in (model, want)))


def test_a_broken_promise_gives_nan():
    inputs, labels, mask = next(cases.batches())
    model = cases.make()
    use_xent(model, loss_mask=True)
    losses = model(*inputs, labels=labels, loss_mask=mask)
    (losses * mask * torch.rand_like(losses)).sum().backward()
    assert all(parameter.grad.isnan().all() for parameter in model.output_layer.parameters())
    assert all(parameter.grad.isnan().any() for parameter in model.parameters())


def test_a_mask_of_zeros():
    inputs, labels, mask = next(cases.batches())
    model = cases.make()
    use_xent(model, loss_mask=True)
    _, gradients = step(model, (inputs, labels, torch.zeros_like(mask)))
    assert all(gradient.count_nonzero() == 0 for gradient in gradients.values())


def accumulated(model, wrapped):
    for inputs, labels, mask in cases.batches():
        losses = wrapped(*inputs, labels=labels.clamp(min=0), loss_mask=mask)
        ((losses * mask).sum() / mask.sum()).backward()
    return model.named_parameters()


@pytest.mark.parametrize("loss_mask", [False, True])
def test_main_grad(loss_mask):
    """Megatron's DDP adds each micro-batch's gradients to ``main_grad`` in float32: with rows, the same bits."""
    found = []
    for used in (False, True):
        model = cases.make(dtype=torch.bfloat16)
        data_parallel = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        wrapped = DistributedDataParallel(model.config, data_parallel, Float16Module(model.config, model))
        if used:
            xent_ops.use_xent(wrapped, loss_mask=loss_mask)
        found.append({name: parameter.main_grad for name, parameter in accumulated(model, wrapped)})
        assert all(parameter.grad is None for parameter in model.parameters())
    theirs, ours = found
    assert all(gradient.dtype == torch.float32 for gradient in ours.values())
    if not loss_mask:
        cases.assert_close(ours, theirs, 0.0)
        return
    exact = cases.make()
    exact.load_state_dict(model.state_dict())
    wanted = [(name, parameter.grad) for name, parameter in accumulated(exact, exact)]
    error, their_error = (
        sum((one[name] - grad).square().sum() for name, grad in wanted).sqrt() for one in (ours, theirs)
    )
    assert error <= 1.5 * their_error, f"{error:.1e}, Megatron's {their_error:.1e}"


@pytest.mark.parametrize("function", [use_xent, remove_xent])
def test_the_example_runs(function):
    inputs, labels, loss_mask = next(cases.batches())
    names = dict(zip(("tokens", "positions", "attention_mask"), inputs, strict=True))
    names |= {"use_xent": use_xent, "model": cases.make(), "labels": labels, "loss_mask": loss_mask}
    test = doctest.DocTestParser().get_doctest(function.__doc__, names | {"remove_xent": remove_xent}, "", None, None)
    assert test.examples and not doctest.DocTestRunner(verbose=False).run(test).failed


def test_compiled():
    want, model = cases.make(), cases.make()
    use_xent(model, loss_mask=True)
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=backend)
    cases.assert_close(step(compiled)[0], step(want)[0])
    assert cases.our_operators(backend)
    cases.assert_close(*({name: p.grad for name, p in one.named_parameters()} for one in (model, want)))


class Softcapped(ColumnParallelLinear):
    def forward(self, *args, **kwargs):
        logits, bias = super().forward(*args, **kwargs)
        return logits.tanh(), bias


class OtherProduct(ColumnParallelLinear):
    def _forward_impl(self, input, weight, *args, **kwargs):
        return super()._forward_impl(input, weight * 2, *args, **kwargs)


class OtherLoss(GPTModel):
    def compute_language_model_loss(self, labels, logits):
        return super().compute_language_model_loss(labels, logits) * 2


class Scaled(GPTModel):
    def _postprocess(self, *args, **kwargs):
        theirs = self.compute_language_model_loss
        self.compute_language_model_loss = lambda labels, logits: theirs(labels, logits * 2)
        try:
            return super()._postprocess(*args, **kwargs)
        finally:
            self.compute_language_model_loss = theirs


class OwnLoss(GPTModel):
    def _postprocess(self, hidden_states, **kwargs):
        return self.output_layer(hidden_states)[0].sum()


@pytest.mark.parametrize("kind", [Softcapped, OtherProduct])
def test_another_output_layer_is_refused(kind):
    model = cases.make()
    model.output_layer.__class__ = kind
    with pytest.raises(TypeError, match=rf"{kind.__name__} is not that of megatron.core's ColumnParallelLinear"):
        use_xent(model)


def test_other_models_are_refused():
    with pytest.raises(TypeError, match=r"compute_language_model_loss of .*OtherLoss is not that of megatron.core's"):
        use_xent(cases.make(OtherLoss))
    with pytest.raises(TypeError, match=r"expected a GPTModel or MambaModel of megatron.core, .* got .*Linear"):
        use_xent(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"use_xent takes a GPTModel .* got list: call it on each model in it"):
        xent_ops.use_xent([cases.make()])


def test_twice_is_refused():
    model = cases.make(dtype=torch.bfloat16)
    use_xent(model)
    with pytest.raises(RuntimeError, match="use_xent is on already"):
        use_xent(Float16Module(model.config, model))


def test_a_deferred_gradient_of_the_weight_is_refused():
    model = cases.make()
    model.config.defer_embedding_wgrad_compute = True
    with pytest.raises(ValueError, match="defer_embedding_wgrad_compute=True is not supported: expected False"):
        use_xent(model)


@pytest.mark.parametrize("options, words", [
    ({"chunk_rows": 0}, "chunk_rows"), ({"label_smoothing": 2.0}, "label_smoothing"), ({"loss_mask": 1}, "loss_mask"),
    ({"logits_dtype": "float32"}, "logits_dtype"), ({"products": "fp4"}, "products"),
])  # fmt: skip
def test_bad_options_are_refused(options, words):
    with pytest.raises((TypeError, ValueError), match=words):
        use_xent(cases.make(), **options)


@pytest.mark.parametrize("kind, words", [
    (Scaled, "Scaled changes its logits before the loss"), (OwnLoss, "OwnLoss uses its logits without its loss"),
])  # fmt: skip
def test_a_model_that_reads_logits_is_refused(kind, words):
    model = cases.make(kind)
    use_xent(model)
    with pytest.raises(RuntimeError, match=words):
        step(model)


def test_parts_of_the_forward_are_refused():
    model, (inputs, labels, _) = cases.make(), next(cases.batches())
    use_xent(model)
    with pytest.raises(RuntimeError, match="parts of GPTModel were called without its forward"):
        model.compute_language_model_loss(labels, inputs[0])


def test_a_mask_of_another_shape_is_refused():
    model, (inputs, labels, mask) = cases.make(), next(cases.batches())
    use_xent(model, loss_mask=True)
    with pytest.raises(ValueError, match="token_weight"):
        model(*inputs, labels=labels, loss_mask=mask[:, :-1])
