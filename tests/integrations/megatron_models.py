"""Small models of Megatron-Core in plain torch, and what they need: process groups, batches. Also on CPUs."""

import contextlib
import copy
import inspect
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.utils import get_batch_on_this_cp_rank
from torch import nn
from torch.overrides import TorchFunctionMode

V, H, B, S, STEPS = 64, 16, 2, 8, 4
SIZES = {"num_layers": 2, "hidden_size": H, "hidden_dropout": 0.0, "attention_dropout": 0.0}
# No fused kernels. Made on the CPU, the weights are the same for any number of ranks and on any device.
IN_PLAIN_TORCH = {
    "use_cpu_initialization": True, "gradient_accumulation_fusion": False, "bias_activation_fusion": False,
    "masked_softmax_fusion": False, "bias_dropout_fusion": False,
}  # fmt: skip
VARIANTS = {
    "plain": {},
    "tied": {"tied": True},
    "sequence parallel": {"sequence_parallel": True},
    "tied, sequence parallel": {"tied": True, "sequence_parallel": True},
    "recomputed layers": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "multi-token prediction": {"mtp_num_layers": 2},
    "multi-token prediction, tied": {"mtp_num_layers": 1, "tied": True},
    "multi-token prediction, sequence parallel": {"mtp_num_layers": 2, "sequence_parallel": True},
}


def norm(cls, config, hidden_size, eps=1e-5):
    """In place of Megatron's norm in plain torch, which refuses sequence parallelism."""
    made = nn.LayerNorm(hidden_size, eps)
    for parameter in made.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return made


class GatheringAttention(DotProductAttention):
    """Megatron's attention in plain torch, which refuses context parallelism, over the keys of all ranks."""

    def __init__(self, config, *args, **kwargs):
        config = copy.copy(config)
        config.context_parallel_size = 1
        super().__init__(config, *args, **kwargs)

    def forward(self, query, key, value, *args, **kwargs):
        group = parallel_state.get_context_parallel_group()
        key, value = (gather_from_sequence_parallel_region(part, group=group) for part in (key, value))
        return super().forward(query, key, value, *args, **kwargs)


class AsOnAGpu(TorchFunctionMode):
    """Megatron's optimizers and schedules make tensors on a GPU, and ask for the types of tensors there."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*args, **kwargs)
        return result.replace("torch.", "torch.cuda.") if func is torch.Tensor.type and len(args) == 1 else result


def as_on_a_gpu(device):
    """Not around a compiled model: Dynamo breaks its graph at each call under the mode."""
    return AsOnAGpu() if device == "cpu" else contextlib.nullcontext()


@contextlib.contextmanager
def groups(device, **sizes):
    """Megatron's process groups, and its norm replaced. Its tracker of random numbers is off: no seeds are set, and a
    CUDA graph cannot set them. On CPUs its questions about the GPU are answered too."""
    patches = [
        (CudaRNGStatesTracker, "fork", lambda self, *args: contextlib.nullcontext()),
        (WrappedTorchNorm, "__new__", norm),
    ]
    if device == "cpu":
        patches += [
            (torch.cuda, "current_device", lambda: "cpu"),
            (torch.cuda, "current_stream", lambda: mock.Mock()),
            (torch.cuda, "synchronize", lambda: None),
            (torch.cuda.random, "get_rng_state", lambda **kwargs: None),
            (megatron_random, "_set_cuda_rng_state", lambda state, **kwargs: None),
        ]
    with contextlib.ExitStack() as stack:
        for owner, name, ours in patches:
            stack.enter_context(mock.patch.object(owner, name, ours))
        # One minute, as in helpers/workers.py: so long a collective waits for a rank that failed.
        parallel_state.initialize_model_parallel(distributed_timeout_minutes=1, **sizes)
        stack.callback(parallel_state.destroy_model_parallel)
        yield


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    """For the tests of a module that imports it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with groups("cpu"):
        yield
    dist.destroy_process_group()


def make(kind=GPTModel, tied=False, dtype=torch.float32, chunk=0, device="cpu", **options):
    """The same weights in each call. ``chunk`` of this rank's chunks in a virtual pipeline."""
    torch.manual_seed(0)
    MTPLossLoggingHelper.tracker.clear()  # it has as many losses as the process's first model had layers for them
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    sizes = {
        "tensor_model_parallel_size": ranks, "num_attention_heads": max(2, ranks),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": virtual, "pipeline_dtype": dtype,
    }  # fmt: skip
    sizes |= {"params_dtype": dtype, "bf16": dtype == torch.bfloat16}
    config = TransformerConfig(**(SIZES | IN_PLAIN_TORCH | sizes | options))
    layer, mtp = get_gpt_layer_local_spec(), None
    if config.context_parallel_size > 1:
        layer.submodules.self_attention.submodules.core_attention = GatheringAttention
    if config.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False)
    place = {"ignore_virtual": False, "vp_stage": None if virtual is None else chunk}
    made = kind(
        config, layer, V, S, share_embeddings_and_output_weights=tied, mtp_block_spec=mtp,
        position_embedding_type="learned_absolute", vp_stage=place["vp_stage"],
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
    )  # fmt: skip
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 2:
                parameter.mul_(5.0)  # logits that differ
    return made.to(device)


def make_hybrid(blocks):
    """A HybridModel of a layer of attention and an MLP, the same weights in each call. ``blocks``: its hybrid_block."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.ssm.mlp_layer import MLPLayer

    torch.manual_seed(0)
    local = get_gpt_layer_local_spec().submodules
    attention = {name: getattr(local, name) for name in ("input_layernorm", "self_attention", "self_attn_bda")}
    mlp = {name: getattr(local, name) for name in ("pre_mlp_layernorm", "mlp", "mlp_bda")}
    layers = blocks.HybridStackSubmodules(
        attention_layer=ModuleSpec(TransformerLayer, submodules=TransformerLayerSubmodules(**attention)),
        mlp_layer=ModuleSpec(MLPLayer, submodules=TransformerLayerSubmodules(**mlp)),
    )
    config = TransformerConfig(**(SIZES | IN_PLAIN_TORCH), num_attention_heads=2)
    stack = ModuleSpec(blocks.HybridStack, submodules=layers)
    return HybridModel(config, stack, V, S, hybrid_layer_pattern="*-", position_embedding_type="none")


def batches(seed=1, device="cpu"):
    """Steps of (arguments of the model, labels, mask). Where a label is -1, the mask is 0."""
    draws = torch.Generator().manual_seed(seed)
    attention = torch.ones(1, 1, S, S).tril() < 0.5  # True: hidden
    for _ in range(STEPS):
        ids, labels = torch.randint(V, (2, B, S), generator=draws)
        mask = (torch.rand(B, S, generator=draws) < 0.7) * torch.tensor([[1.0], [0.5]])
        labels = torch.where((mask == 0) & (torch.arange(S) % 2 == 0), -1, labels)
        inputs = (ids, torch.arange(S).expand(B, S), attention)
        yield tuple(tensor.to(device) for tensor in inputs), labels.to(device), mask.to(device)


def split(batch):
    """This rank's part of tensors by name with context parallelism, split by Megatron."""
    options = {"cp_group": parallel_state.get_context_parallel_group()}
    if "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters:  # since Megatron-Core 0.19
        options["is_hybrid_cp"] = False
    return get_batch_on_this_cp_rank(batch, **options)


def one_step(model, batch=None, **options):
    """(losses, gradients by name)"""
    inputs, labels, mask = next(batches()) if batch is None else batch
    model.zero_grad()
    found = model(*inputs, labels=labels.clamp(min=0), loss_mask=mask, **options)
    (found * mask).sum().backward()
    return found.detach(), gradients(model)


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
