"""Training of Megatron-Core's GPTModel with our loss and with its own; started by torchrun from test_megatron.py."""

import contextlib
import copy
import itertools
import os
import sys
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.utils import get_batch_on_this_cp_rank
from torch import nn

import xent_ops

V, H, B, S, STEPS = 64, 16, 2, 8, 4
SIZES = {"num_layers": 2, "hidden_size": H, "num_attention_heads": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0}
ON_A_CPU = {
    "use_cpu_initialization": True, "gradient_accumulation_fusion": False, "bias_activation_fusion": False,
    "masked_softmax_fusion": False, "bias_dropout_fusion": False,
}  # fmt: skip
VARIANTS = {
    "plain": {},
    "tied": {"tied": True},
    "sequence parallel": {"sequence_parallel": True},
    "tied, sequence parallel": {"tied": True, "sequence_parallel": True},
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


@contextlib.contextmanager
def on_a_cpu(**sizes):
    """Megatron's groups on CPUs. It asks for the GPU's number, and keeps states of the GPU's random numbers."""
    with contextlib.ExitStack() as stack:
        for owner, name, ours in (
            (torch.cuda, "current_device", lambda: "cpu"),
            (torch.Tensor, "cuda", lambda self, *args, **kwargs: self),
            (CudaRNGStatesTracker, "fork", lambda self, *args: contextlib.nullcontext()),
            (WrappedTorchNorm, "__new__", norm),
        ):
            stack.enter_context(mock.patch.object(owner, name, ours))
        parallel_state.initialize_model_parallel(**sizes)
        stack.callback(parallel_state.destroy_model_parallel)
        yield


def make(kind=GPTModel, tied=False, dtype=torch.float32, stage=None, **options):
    """The same weights in each call. ``stage`` of a pipeline of two."""
    torch.manual_seed(0)
    sizes = {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
    }
    if stage is not None:
        sizes |= {"pipeline_model_parallel_size": 2, "pipeline_dtype": dtype}
    sizes |= {"params_dtype": dtype, "bf16": dtype == torch.bfloat16}
    config = TransformerConfig(**SIZES, **ON_A_CPU, **sizes, **options)
    layer, mtp = get_gpt_layer_local_spec(), None
    if config.context_parallel_size > 1:
        layer.submodules.self_attention.submodules.core_attention = GatheringAttention
    if config.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False)
    ends = {} if stage is None else {"pre_process": stage == 0, "post_process": stage == 1}
    made = kind(
        config, layer, V, S, share_embeddings_and_output_weights=tied, mtp_block_spec=mtp,
        position_embedding_type="learned_absolute", **ends,
    )  # fmt: skip
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 2:
                parameter.mul_(5.0)  # logits that differ
    return made


def batches():
    """Steps of (arguments of the model, mask). Where a label is -1, the mask is 0."""
    draws = torch.Generator().manual_seed(1)
    attention = torch.ones(1, 1, S, S).tril() < 0.5  # True: hidden
    for _ in range(STEPS):
        ids, labels = torch.randint(V, (2, B, S), generator=draws)
        mask = (torch.rand(B, S, generator=draws) < 0.7) * torch.tensor([[1.0], [0.5]])
        labels = torch.where((mask == 0) & (torch.arange(S) % 2 == 0), -1, labels)
        yield (ids, torch.arange(S).expand(B, S), attention), labels, mask


def on_this_rank(inputs, labels, mask):
    """This rank's part of a batch with context parallelism, split by Megatron. It attends to the tokens of all ranks."""
    ids, positions, attention = inputs
    names = ("tokens", "position_ids", "attention_mask", "labels", "loss_mask")
    batch = get_batch_on_this_cp_rank(dict(zip(names, (ids, positions, attention, labels, mask), strict=True)))
    ids, positions, attention, labels, mask = (batch[name] for name in names)
    order = gather_from_sequence_parallel_region(positions[0], group=parallel_state.get_context_parallel_group())
    return (ids, positions, attention[..., order]), labels, mask


def train(model, **options):
    """(losses of each step, gradients of each step by name, weights behind the last one)"""
    optimizer, losses, gradients = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9), [], []
    for batch in batches():
        optimizer.zero_grad()
        inputs, labels, mask = on_this_rank(*batch)
        found = model(*inputs, labels=labels, loss_mask=mask, **options)
        ((found * mask).sum() / batch[2].sum()).backward()
        for parameter in model.parameters():
            if getattr(parameter, "sequence_parallel", False):  # of each rank's tokens
                dist.all_reduce(parameter.grad, group=parallel_state.get_tensor_model_parallel_group())
            dist.all_reduce(parameter.grad, group=parallel_state.get_context_parallel_group())
        optimizer.step()
        losses.append(found.detach() * mask)
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


def compare(variant, **options):
    want, model = train(make(**VARIANTS[variant])), make(**VARIANTS[variant])
    report = xent_ops.use_xent(model, **options)
    assert_close(train(model), want)
    return report


def tensor_parallel():
    with on_a_cpu(tensor_model_parallel_size=dist.get_world_size()):
        for variant, options in itertools.product(VARIANTS, ({}, {"loss_mask": True, "chunk_rows": 5})):
            report = compare(variant, **options)
            assert (report.ranks, report.classes) == (2, V)
            assert report.sequence_parallel == ("sequence" in variant) and report.tied == ("tied" in variant)
            assert report.heads == VARIANTS[variant].get("mtp_num_layers", 0) + 1


def context_parallel():
    """The sequence is split over two ranks; with four ranks the head too."""
    with on_a_cpu():  # each rank by itself
        whole, _, _ = train(make())
    with on_a_cpu(context_parallel_size=2, tensor_model_parallel_size=dist.get_world_size() // 2):
        parts = [get_batch_on_this_cp_rank({"losses": losses})["losses"] for losses in whole]
        assert_close(train(make())[0], parts)  # our attention is right
        for variant in ("plain", "multi-token prediction, tied"):
            for options in ({}, {"loss_mask": True, "chunk_rows": 3}):
                compare(variant, **options)


def train_stage(model):
    """As ``train``, of this rank's stage of a pipeline of two; the losses are those of the last."""
    stage, losses, gradients = dist.get_rank(), [], []
    optimizer, hidden = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9), torch.empty(S, B, H)
    for inputs, labels, mask in batches():
        optimizer.zero_grad()
        if stage == 0:
            passed_on = model(*inputs)
            dist.send(passed_on.detach(), 1)
            dist.recv(hidden, 1)
            passed_on.backward(hidden)
        else:
            dist.recv(hidden, 0)
            received = hidden.clone().requires_grad_()
            model.set_input_tensor(received)
            found = model(*inputs, labels=labels, loss_mask=mask)
            ((found * mask).sum() / mask.sum()).backward()
            dist.send(received.grad, 0)
            losses.append(found.detach() * mask)
        optimizer.step()
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    return losses, gradients, dict(model.named_parameters())


def pipeline():
    with on_a_cpu(pipeline_model_parallel_size=2):
        for tied, loss_mask in itertools.product((False, True), repeat=2):
            want, model = (make(tied=tied, stage=dist.get_rank()) for _ in range(2))
            report = xent_ops.use_xent(model, loss_mask=loss_mask)
            assert ("this pipeline stage has no head" in str(report)) == (dist.get_rank() == 0)
            assert_close(train_stage(model), train_stage(want))
            xent_ops.remove_xent(model)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    globals()[sys.argv[1]]()
    print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}: right\n", end="")
    dist.destroy_process_group()
