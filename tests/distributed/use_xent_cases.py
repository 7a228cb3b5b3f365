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


SMALL = {"d_model": 16, "vocab_size": V, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL |= {"decoder_start_token_id": 1, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
SMALL |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "dropout": 0.0}
LAYER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
KINDS = {
    "BertForMaskedLM": SMALL | {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    "T5ForConditionalGeneration": SMALL | {"num_layers": 1, "num_heads": 2, "d_kv": 8, "d_ff": 32, "dropout_rate": 0.0},
    "WhisperForConditionalGeneration": SMALL | {"max_source_positions": 10, "num_mel_bins": 8},
    "LlavaForConditionalGeneration": {
        "text_config": LAYER | {"model_type": "llama", "vocab_size": V},
        "vision_config": LAYER | {"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4},
        "image_token_id": V - 1,
        "vision_feature_layer": -1,
    },
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "tie_word_embeddings": False}
PARALLEL = {
    "DDP": DistributedDataParallel,
    # T5 ties its head in any case: the tied weight is in the root's group.
    "FSDP2": lambda model: fully_shard(
        model
        if isinstance(model, transformers.T5PreTrainedModel)
        else (fully_shard(model.get_output_embeddings()), model)[1]
    ),
    "FSDP1": lambda model: FullyShardedDataParallel(
        model, use_orig_params=True, device_id=torch.device(next(model.parameters()).device)
    ),
}


def kinds(device, name, way):
    """Masked, encoder and decoder, speech, images: every rank has the same batch, so that gradients are those of one process."""
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    untouched = cls(cls.config_class(**KINDS[name], **NO_DROPOUT)).to(device).train()
    model = copy.deepcopy(untouched)
    ids, labels = (one[0] for one in _batch(device))
    call = {"labels": labels}
    if name.startswith("Whisper"):
        call["input_features"] = torch.randn(2, 8, 20, device=device)
    else:
        call["input_ids"] = ids
    if name.startswith("Llava"):
        ids.masked_fill_(ids == V - 1, 0)[:, :4] = V - 1
        call["pixel_values"] = torch.randn(2, 3, 8, 8, device=device)
    want = untouched(**call).loss
    want.backward()
    use_xent(model)
    model = PARALLEL[way](model)
    output = model(**call)
    assert output.logits is None
    output.loss.backward()
    torch.testing.assert_close(output.loss, want, rtol=1e-5, atol=1e-6)
    if way == "FSDP1":
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            grads = [one.grad.clone() for one in model.parameters() if one.requires_grad]
    else:
        grads = [one for one, p in zip(_gradients(model), model.parameters(), strict=True) if p.requires_grad]
    expected = [one.grad for one in untouched.parameters() if one.requires_grad]
    for grad, exact in zip(grads, expected, strict=True):
        if exact is None:  # of a layer that the loss does not use
            assert grad is None or not grad.any()
        else:
            torch.testing.assert_close(grad, exact, rtol=1e-5, atol=1e-6)


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
