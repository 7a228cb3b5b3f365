"""use_xent with DDP and FSDP2; run on every rank by test_use_xent_parallel.py."""

import copy

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import xent_ops
from xent_ops.integrations.transformers import use_xent

V = 66


def _model(device, tied):
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to(device).train()


def _shard(model, groups, **options):
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    if groups == "head":
        fully_shard(model.lm_head, mesh=mesh, **options)
    elif groups == "norm and head":
        fully_shard([model.model.norm, model.lm_head], mesh=mesh, reshard_after_forward=False, **options)
    return fully_shard(model, mesh=mesh, **options)


WAYS = {
    "DDP": lambda model: (use_xent(model), DistributedDataParallel(model))[1],
    "FSDP, the head with the root": lambda model: (use_xent(model), _shard(model, None))[1],
    "FSDP, a head of its own": lambda model: (use_xent(model), _shard(model, "head"))[1],
    "FSDP before use_xent": lambda model: (_shard(model, "head"), use_xent(model))[0],
    "FSDP, norm and head": lambda model: (use_xent(model), _shard(model, "norm and head"))[1],
    "FSDP of a compiled model": lambda model: (
        use_xent(model),
        [layer.compile(backend="aot_eager") for layer in (*model.model.layers, model.lm_head)],
        _shard(model, "head"),
    )[2],
}


def _batch(device):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, V, (dist.get_world_size(), 2, 9), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, -100)
    return ids.to(device), labels.to(device)


def _gradients(model):
    return [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]


def equal_to_one_process(device, way):
    """Two steps: the gradients are those of one process on the whole batch, untouched."""
    ids, labels = _batch(device)
    rank, world = dist.get_rank(), dist.get_world_size()
    total = (labels[..., 1:] != -100).sum()
    tied = "root" in way or way == "DDP"
    untouched = _model(device, tied)
    model = WAYS[way](_model(device, tied))
    assert isinstance(model, FSDPModule) == way.startswith("FSDP")
    for _ in range(2):
        for each in (untouched, model):
            each.zero_grad()
        want = untouched(input_ids=ids.flatten(0, 1), labels=labels.flatten(0, 1)).loss
        want.backward()
        output = model(input_ids=ids[rank], labels=labels[rank], num_items_in_batch=total)
        assert output.logits is None
        (output.loss * world).backward()  # DDP and FSDP average over ranks
        loss = output.loss.detach().clone()
        dist.all_reduce(loss)
        torch.testing.assert_close(
            (loss, _gradients(model)), (want.detach(), _gradients(untouched)), rtol=1e-5, atol=1e-6
        )


def _wrap(model, head, use_orig_params):
    """FSDP1: each layer, and the head if asked for, in a group of its own."""
    options = {"use_orig_params": use_orig_params, "device_id": torch.device(next(model.parameters()).device)}
    layers = model.model.layers
    for i, layer in enumerate(layers):
        layers[i] = FullyShardedDataParallel(layer, **options)
    if head == "own":
        model.lm_head = FullyShardedDataParallel(model.lm_head, **options)
    return FullyShardedDataParallel(model, **options)


def fsdp1(device, head, order, use_orig_params):
    """Losses and weights of three steps are those of one process on the whole batch, untouched."""
    ids, labels = _batch(device)
    rank, world = dist.get_rank(), dist.get_world_size()
    total = (labels[..., 1:] != -100).sum()
    untouched = _model(device, tied=head == "tied")
    model = _model(device, tied=head == "tied")
    if order == "use_xent first":
        use_xent(model)
    model = _wrap(model, head, use_orig_params)
    if order == "use_xent last":
        report = xent_ops.use_xent(model)
        assert (report.classes, report.features) == (V, 16)
    both = [torch.optim.SGD(each.parameters(), 0.3) for each in (untouched, model)]
    for _ in range(3):
        for optimizer in both:
            optimizer.zero_grad()
        want = untouched(input_ids=ids.flatten(0, 1), labels=labels.flatten(0, 1)).loss
        want.backward()
        output = model(input_ids=ids[rank], labels=labels[rank], num_items_in_batch=total)
        assert output.logits is None
        (output.loss * world).backward()  # FSDP averages over ranks
        for optimizer in both:
            optimizer.step()
        loss = output.loss.detach().clone()
        dist.all_reduce(loss)
        torch.testing.assert_close(loss, want.detach(), rtol=1e-5, atol=1e-6)
    with FullyShardedDataParallel.summon_full_params(model):
        got = {name.replace("_fsdp_wrapped_module.", ""): value for name, value in model.named_parameters()}
        for name, value in untouched.named_parameters():
            torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6)


def fsdp1_refusals(device):
    """The model in FSDP1's wrapper, whose weights are gone; a head of another kind in a group of its own."""
    model = _wrap(_model(device, tied=False), "own", True)
    with pytest.raises(TypeError, match="in FSDP1's flat parameter: pass the model's FullyShardedDataParallel"):
        use_xent(model.module)
    model = _model(device, tied=False)
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head"], task_type="CAUSAL_LM"))
    use_xent(model)
    base = model.get_base_model()
    base.lm_head = FullyShardedDataParallel(base.lm_head, use_orig_params=True, device_id=torch.device(device))
    ids, labels = _batch(device)
    with pytest.raises(TypeError, match=r"the head is a peft.* is partitioned over ranks \(ZeRO-3, FSDP1\)"):
        model(input_ids=ids[0], labels=labels[0])


def mixed_precision(device):
    """FSDP's bfloat16 parameters: with and without use_xent, the head's gradient is reduced in float32.

    ``output_dtype`` is that of losses, also of the output with predictions.
    """
    ids, labels = _batch(device)
    rank = dist.get_rank()
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "output_dtype": torch.float64}
    policy = MixedPrecisionPolicy(**dtypes)
    results = []
    for lean in (False, True):
        model = copy.deepcopy(_model(device, tied=False))
        if lean:
            use_xent(model, in_eval=True)
        model = _shard(model, "head", mp_policy=policy)
        loss = model(input_ids=ids[rank], labels=labels[rank]).loss
        loss.backward()
        results.append((loss.detach(), _gradients(model)))
    (want, want_grads), (got, grads) = results
    torch.testing.assert_close(got, want, rtol=1e-2, atol=0.0)
    for grad, reference in zip(grads, want_grads, strict=True):
        assert grad.dtype == torch.float32 and (grad - reference).norm() <= 2e-2 * reference.norm()
    with torch.no_grad():
        output = model.eval()(input_ids=ids[rank], labels=labels[rank])
    assert got.dtype == output.loss.dtype == output.accuracy.dtype == torch.float64
    assert output.predictions.dtype == torch.int64 and output.predictions.shape == ids[rank].shape


def tensor_parallel(device):
    """A head that is split over ranks is refused: its weight here is a part."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model = parallelize_module(
        _model(device, tied=False), mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())}
    )
    try:
        use_xent(model)
    except (TypeError, ValueError) as error:
        assert "split over ranks" in str(error), error
    else:
        raise AssertionError("not refused")
