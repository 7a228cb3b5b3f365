"""``use_xent`` for a GPTModel of Megatron-Core: losses, gradients and weights are those of the untouched model."""

import doctest
import itertools

import pytest
import sixteen_bits
import torch
import torch.nn.functional as F

import xent_ops

pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ImportError)
import megatron_cases as cases
import megatron_models
from helpers.dispatch_log import Log
from helpers.graphs import CompileCounterWithBackend
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron_models import B, H, S, V, batches, gradients, make, make_hybrid, one_rank, one_step  # noqa: F401

from xent_ops.integrations.megatron import remove_xent, use_xent
from xent_ops.ops import transforms


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


@pytest.mark.parametrize("name, value", [("label_smoothing", 0.1), ("lse_square_scale", 1e-2)])
@pytest.mark.parametrize("loss_mask", [False, True])
def test_options(name, value, loss_mask):
    inputs, labels, mask = next(batches())
    want, model = make(), make()
    use_xent(model, loss_mask=loss_mask, **{name: value})
    labels = labels.clamp(min=0)
    theirs = xent_ops.cross_entropy(want(*inputs), labels, dim=-1, reduction="none", **{name: value})
    (theirs * mask).sum().backward()
    cases.assert_close(one_step(model), (theirs.detach(), gradients(want)))


@pytest.mark.parametrize("given", sixteen_bits.OPTIONS, ids=str)
@MASKED
def test_sixteen_bits(monkeypatch, options, given):
    """In bfloat16 losses and gradients are no further from float64 than Megatron's."""
    classes, features, rows = 1000, 64, (S, 16)
    monkeypatch.setattr(megatron_models, "V", classes)
    model = make(dtype=torch.bfloat16, hidden_size=features).bfloat16()
    hidden = torch.randn(*rows, features).bfloat16().requires_grad_()
    head = sixteen_bits.scaled(model.output_layer)
    model.decoder.final_layernorm.register_forward_hook(lambda *_: hidden)
    labels, mask = torch.randint(classes, rows[::-1]), torch.rand(rows[::-1]).round(decimals=1)
    inputs = (labels, torch.arange(S).expand(rows[::-1]), next(batches())[0][2])

    def losses_of(logits):
        losses = F.cross_entropy(logits.transpose(0, 1).flatten(0, 1), labels.flatten(), reduction="none")
        return losses.view(labels.shape) * mask

    def run():
        return model(*inputs, labels=labels, loss_mask=mask) * mask

    sixteen_bits.assert_no_further(run, lambda: use_xent(model, **options, **given), hidden, head, losses_of)


def test_remove_xent_and_what_stays():
    """Calls without labels, and all calls after remove_xent, are the untouched model's, bit for bit."""
    inputs, labels, mask = next(batches())
    want, model = make(), make()
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
    assert torch.equal(one_step(model)[0], one_step(want)[0])
    assert "forward" not in vars(model.output_layer) and not model._forward_pre_hooks and not model._forward_hooks
    with pytest.raises(RuntimeError, match="use_xent is not on for this model"):
        xent_ops.remove_xent(model)


@pytest.mark.parametrize("loss_mask", [False, True])
def test_packed_sequences(loss_mask):
    """(1, B S): the positions of each sequence, and attention within it."""
    (ids, positions, attention), labels, mask = next(batches())
    blocks = torch.block_diag(*[(~attention[0, 0]).int()] * B)[None, None] == 0
    packed = [tensor.reshape(1, -1) for tensor in (ids, positions, labels, mask)]
    model, want = make(), one_step(make())
    use_xent(model, loss_mask=loss_mask)
    losses, gradients = one_step(model, ((packed[0], packed[1], blocks), *packed[2:]))
    cases.assert_close((losses.view(B, S), gradients), want)


@pytest.mark.parametrize("options", [{}, {"loss_mask": True}])
def test_no_value_is_read(monkeypatch, options):
    """For which the host would wait for a GPU. On a CPU the values of targets are read."""
    monkeypatch.setattr(transforms, "can_read", lambda tensor: False)
    model = make()
    use_xent(model, **options)
    with Log() as log:
        one_step(model)
    assert log.seen and "aten._local_scalar_dense.default" not in log.seen


def test_no_mask_in_a_call():
    """Without ``loss_mask`` any gradient is right, also in a model with loss_mask=True."""
    inputs, labels, _ = next(batches())
    want, model = make(), make()
    use_xent(model, loss_mask=True)
    upstream = torch.rand(B, S)
    for one in (want, model):
        one(*inputs, labels=labels.clamp(min=0)).backward(upstream)
    cases.assert_close(gradients(model), gradients(want))


def test_a_broken_promise_gives_nan():
    inputs, labels, mask = next(batches())
    model = make()
    use_xent(model, loss_mask=True)
    losses = model(*inputs, labels=labels, loss_mask=mask)
    (losses * mask * torch.rand_like(losses)).sum().backward()
    assert all(parameter.grad.isnan().all() for parameter in model.output_layer.parameters())
    assert all(parameter.grad.isnan().any() for parameter in model.parameters())


def test_a_mask_of_zeros():
    inputs, labels, mask = next(batches())
    model = make()
    use_xent(model, loss_mask=True)
    _, gradients = one_step(model, (inputs, labels, torch.zeros_like(mask)))
    assert all(gradient.count_nonzero() == 0 for gradient in gradients.values())


def accumulated(model, wrapped):
    for inputs, labels, mask in batches():
        losses = wrapped(*inputs, labels=labels.clamp(min=0), loss_mask=mask)
        ((losses * mask).sum() / mask.sum()).backward()
    return model.named_parameters()


@pytest.mark.parametrize("loss_mask", [False, True])
def test_main_grad(loss_mask):
    """Megatron's DDP adds each micro-batch's gradients to ``main_grad`` in float32: with rows, the same bits."""
    found = []
    for used in (False, True):
        model = make(dtype=torch.bfloat16)
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
    exact = make()
    exact.load_state_dict(model.state_dict())
    wanted = [(name, parameter.grad) for name, parameter in accumulated(exact, exact)]
    error, their_error = (
        sum((one[name] - grad).square().sum() for name, grad in wanted).sqrt() for one in (ours, theirs)
    )
    assert error <= 1.5 * their_error, f"{error:.1e}, Megatron's {their_error:.1e}"


@pytest.mark.parametrize("function", [use_xent, remove_xent])
def test_the_example_runs(function):
    inputs, labels, loss_mask = next(batches())
    names = dict(zip(("tokens", "positions", "attention_mask"), inputs, strict=True))
    names |= {"use_xent": use_xent, "model": make(), "labels": labels, "loss_mask": loss_mask}
    test = doctest.DocTestParser().get_doctest(function.__doc__, names | {"remove_xent": remove_xent}, "", None, None)
    assert test.examples and not doctest.DocTestRunner(verbose=False).run(test).failed


def test_compiled():
    want, model = make(), make()
    use_xent(model, loss_mask=True)
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=backend)
    cases.assert_close(one_step(compiled)[0], one_step(want)[0])
    assert cases.our_operators(backend)
    cases.assert_close(gradients(model), gradients(want))


@pytest.mark.parametrize("options", [{}, {"loss_mask": True}])
def test_hybrid_model(monkeypatch, options):
    """The model of attention, MLP and state-space layers that Megatron-Core 0.19 recommends in place of GPTModel."""
    blocks = pytest.importorskip("megatron.core.models.hybrid.hybrid_block", reason="Megatron-Core before 0.18")
    monkeypatch.setattr(blocks, "TENorm", WrappedTorchNorm)
    want, model = one_step(make_hybrid(blocks)), make_hybrid(blocks)
    assert str(xent_ops.use_xent(model, **options)).startswith("HybridModel: output_layer (64 classes over 1 ranks")
    cases.assert_close(one_step(model), want)
