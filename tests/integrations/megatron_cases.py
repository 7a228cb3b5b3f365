"""Training of Megatron-Core's models with our loss and with its own; run on every rank by test_megatron.py."""

import copy
import itertools

import torch
import torch.distributed as dist
from helpers.gpu import captured
from helpers.graphs import CompileCounterWithBackend, operator_names
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron_models import STEPS, VARIANTS, B, S, V, as_on_a_gpu, batches, groups, make, split
from torch.utils._pytree import tree_map

import xent_ops


def on_this_rank(inputs, labels, mask):
    """This rank's part of a batch with context parallelism. It attends to the tokens of all ranks."""
    ids, positions, attention = inputs
    names = ("tokens", "position_ids", "attention_mask", "labels", "loss_mask")
    batch = split(dict(zip(names, (ids, positions, attention, labels, mask), strict=True)))
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
    want, logged = train(make(device=device, **VARIANTS[variant])), copy.deepcopy(values_logged())
    model = make(device=device, **VARIANTS[variant])
    report = xent_ops.use_xent(model, **options)
    assert_close(train(model), want)
    assert_close(values_logged(), logged)
    return report


def values_logged():
    """What Megatron logs of multi-token prediction: losses, since 0.19 how often the best class is the label too."""
    return {name: value for name, value in MTPLossLoggingHelper.tracker.items() if name.endswith("values")}


def tensor_parallel(device):
    ranks = dist.get_world_size()
    with groups(device, tensor_model_parallel_size=ranks):
        for variant, options in itertools.product(VARIANTS, ({}, {"loss_mask": True, "chunk_rows": 5})):
            report = compare(variant, device, **options)
            assert (report.ranks, report.classes) == (ranks, V)
            assert report.sequence_parallel == ("sequence" in variant) and report.tied == ("tied" in variant)
            assert report.heads == VARIANTS[variant].get("mtp_num_layers", 0) + 1


def acceptances(device):
    with groups(device, tensor_model_parallel_size=dist.get_world_size()):
        compare_acceptances(device, "multi-token prediction")
        compare_acceptances(device, "multi-token prediction, sequence parallel")


def compare_acceptances(device, variant):
    """How often the best class is the label, for labels of each class in turn."""
    inputs, _, mask = next(batches(device=device))
    found = []
    for used in (False, True):
        model, counts = make(device=device, **VARIANTS[variant]), []
        if used:
            xent_ops.use_xent(model, chunk_rows=5)
        for label in range(V):
            MTPLossLoggingHelper.tracker.clear()
            model(*inputs, labels=torch.full_like(inputs[0], label), loss_mask=mask)
            counts.append(MTPLossLoggingHelper.tracker["correct_values"])
        found.append(torch.stack(counts))
    assert torch.equal(*found) and torch.equal(found[0].sum(0), MTPLossLoggingHelper.tracker["total_values"])


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
        parts = [split({"losses": losses})["losses"] for losses in whole]
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
