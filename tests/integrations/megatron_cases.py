"""Training of Megatron-Core's GPTModel with our loss and with its own; run on every rank by test_megatron.py."""

import contextlib
import copy
import itertools
from unittest import mock

import torch
import torch.distributed as dist
from helpers.gpu import captured
from helpers.graphs import CompileCounterWithBackend, operator_names
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.utils import get_batch_on_this_cp_rank
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

import xent_ops

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


def on_this_rank(inputs, labels, mask):
    """This rank's part of a batch with context parallelism, split by Megatron. It attends to the tokens of all ranks."""
    ids, positions, attention = inputs
    names = ("tokens", "position_ids", "attention_mask", "labels", "loss_mask")
    batch = get_batch_on_this_cp_rank(dict(zip(names, (ids, positions, attention, labels, mask), strict=True)))
    ids, positions, attention, labels, mask = (batch[name] for name in names)
    order = gather_from_sequence_parallel_region(positions[0], group=parallel_state.get_context_parallel_group())
    return (ids, positions, attention[..., order]), labels, mask


def step(model, inputs, labels, mask, tokens):
    """Forward and backward of the mean loss over ``tokens``. Returns the losses times the mask."""
    losses = model(*inputs, labels=labels, loss_mask=mask)
    ((losses * mask).sum() / tokens).backward()
    return losses.detach() * mask


class CapturedStep:
    """``step``, captured in a CUDA graph with the first batch. Each call copies a batch into it and replays it."""

    graph = None

    def __call__(self, model, *batch):
        parameters = list(model.parameters())
        if self.graph is None:
            self.batch = tree_map(torch.clone, batch)
            self.graph, self.losses = captured(lambda: step(model, *self.batch), model.zero_grad)
            self.gradients = [parameter.grad for parameter in parameters]
        tree_map(torch.Tensor.copy_, self.batch, batch)
        self.graph.replay()
        for parameter, gradient in zip(parameters, self.gradients, strict=True):
            parameter.grad = gradient
        return self.losses.clone()


def train(model, step=step):
    """(losses of each step, gradients of each step by name, weights behind the last one)"""
    optimizer, losses, gradients = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9), [], []
    for batch in batches(device=next(model.parameters()).device):
        optimizer.zero_grad()
        losses.append(step(model, *on_this_rank(*batch), batch[2].sum()))
        for parameter in model.parameters():
            if getattr(parameter, "sequence_parallel", False):  # of each rank's tokens
                dist.all_reduce(parameter.grad, group=parallel_state.get_tensor_model_parallel_group())
            dist.all_reduce(parameter.grad, group=parallel_state.get_context_parallel_group())
        optimizer.step()
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    return losses, gradients, dict(model.named_parameters())


def assert_close(got, want, budget=2e-6):
    """Each tensor of nested results, in norm."""
    if isinstance(want, torch.Tensor):
        error, norm = (got - want).norm().item(), want.norm().item()
        assert error <= budget * norm + 1e-9, f"{error:.1e} of {norm:.1e}"
    elif isinstance(want, dict):
        assert got.keys() == want.keys()
        for name in want:
            try:
                assert_close(got[name], want[name], budget)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None
    else:
        for one, other in zip(got, want, strict=True):
            assert_close(one, other, budget)


def compare(variant, device="cpu", **options):
    want, model = train(make(device=device, **VARIANTS[variant])), make(device=device, **VARIANTS[variant])
    report = xent_ops.use_xent(model, **options)
    assert_close(train(model), want)
    return report


def tensor_parallel(device):
    ranks = dist.get_world_size()
    with groups(device, tensor_model_parallel_size=ranks):
        for variant, options in itertools.product(VARIANTS, ({}, {"loss_mask": True, "chunk_rows": 5})):
            report = compare(variant, device, **options)
            assert (report.ranks, report.classes) == (ranks, V)
            assert report.sequence_parallel == ("sequence" in variant) and report.tied == ("tied" in variant)
            assert report.heads == VARIANTS[variant].get("mtp_num_layers", 0) + 1


def our_operators(backend):
    """Their names in the graphs that a CompileCounterWithBackend was given."""
    return [name for graph in backend.graphs for name in operator_names(graph) if name.startswith("xent.")]


def compiled_or_captured(device, compiled, in_cuda_graph, options):
    """Tensor parallel, beside the untouched model in eager."""
    backend = CompileCounterWithBackend("inductor")
    with groups(device, tensor_model_parallel_size=dist.get_world_size()):
        want, model = train(make(device=device)), make(device=device)
        xent_ops.use_xent(model, **options)
        if compiled:
            model.compile(backend=backend)
        found = train(model, CapturedStep() if in_cuda_graph else step)
        assert_close(found, want, 1e-5)  # Inductor adds up in an order of its own
    assert bool(our_operators(backend)) == compiled


def context_parallel(device):
    """The sequence is split over two ranks; with four ranks the head too."""
    with groups(device):  # each rank by itself
        whole, _, _ = train(make(device=device))
    with groups(device, context_parallel_size=2, tensor_model_parallel_size=dist.get_world_size() // 2):
        parts = [get_batch_on_this_cp_rank({"losses": losses})["losses"] for losses in whole]
        assert_close(train(make(device=device))[0], parts)  # our attention is right
        for variant in ("plain", "multi-token prediction, tied"):
            for options in ({}, {"loss_mask": True, "chunk_rows": 3}):
                compare(variant, device, **options)


def forward_step(data, model):
    inputs, labels, mask = next(data)

    def loss_of(losses):
        loss = (losses * mask).sum() / mask.sum()
        return loss, {"loss": loss.detach()}

    return model(*inputs, labels=labels, loss_mask=mask), loss_of


def train_by_schedule(used, device, chunks=1, tied=False, loss_mask=False, **ddp):
    """As ``train``, by Megatron's schedule, DDP and optimizer: two steps of ``STEPS`` micro-batches, an evaluation."""
    models = [make(tied=tied, chunk=chunk, num_layers=4, device=device) for chunk in range(chunks)]
    config, ddp = models[0].config, DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=300, **ddp)
    config.finalize_model_grads_func = finalize_model_grads
    models = [DistributedDataParallel(config, ddp, model) for model in models]
    if used:
        reports = [xent_ops.use_xent(model, loss_mask=loss_mask) for model in models]
        heads = [report for report in reports if report.classes is not None]
        assert len(heads) == parallel_state.is_pipeline_last_stage()
        assert all(("has no head" in str(report)) == (report not in heads) for report in reports)
    distributed = {"use_distributed_optimizer": ddp.use_distributed_optimizer}
    options = OptimizerConfig(optimizer="adam", lr=0.03, adam_eps=1e-3, clip_grad=1.0, **distributed)
    optimizer = get_megatron_optimizer(options, models, use_gloo_process_groups=False)
    sizes = {"num_microbatches": STEPS, "seq_length": S, "micro_batch_size": B}
    losses, gradients = [], []
    for step in range(3):
        for model in models:
            model.zero_grad_buffer()
        optimizer.zero_grad()
        data = [batches(10 * step + parallel_state.get_data_parallel_rank(), device) for _ in models]
        seen = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=data, model=models, forward_only=step == 2, **sizes
        )
        losses += [each["loss"] for each in seen]
        if step < 2:
            gradients += [{name: p.main_grad.clone() for name, p in model.named_parameters()} for model in models]
            gradients.append(torch.tensor(optimizer.step()[1]))  # their norm over all ranks
    if used:
        for model in models:
            xent_ops.remove_xent(model)
    return losses, gradients, [dict(model.named_parameters()) for model in models]


def pipeline(device):
    """1F1B, and the interleaved schedule of a virtual pipeline."""
    for chunks in (1, 2):
        sizes = {"virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None}
        with groups(device, pipeline_model_parallel_size=2, **sizes), as_on_a_gpu(device):
            for options in ({}, {"tied": True, "loss_mask": True}):
                want = train_by_schedule(False, device, chunks, **options)
                assert_close(train_by_schedule(True, device, chunks, **options), want)


def distributed_optimizer(device):
    """Two replicas of the model; each updates half of the weights."""
    with groups(device), as_on_a_gpu(device):
        for options in ({}, {"tied": True, "loss_mask": True}):
            options["use_distributed_optimizer"] = True
            assert_close(train_by_schedule(True, device, **options), train_by_schedule(False, device, **options))
