"""Trainers of TRL on several ranks, with use_xent and without; started by torchrun from test_trl_ranks.py."""

import contextlib
import itertools
import os
import sys
import tempfile
from pathlib import Path

import pytest
import tiny
import torch
import trainers
from accelerate import PartialState
from accelerate.state import AcceleratorState
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from xent_ops.integrations.trl import use_xent

ZERO_MODELS = {"SFT": "Llama", "DPO": "Gemma2", "KTO": "Llama", "GRPO": "Qwen2", "RLOO": "Llama"}
# Weights of any size are in parts, and gathered only where they are used.
LIMITS = ("param_persistence_threshold", "prefetch_bucket_size", "max_live_parameters", "max_reuse_distance")
ZERO_3 = {"stage": 3, **{f"stage3_{name}": 0 for name in LIMITS}}


def below_ddp(kind, folder):
    """A whole run, one folder for both: with DDP a model is saved by rank 0 alone."""
    used = []

    def with_xent(trainer):
        used.append(trainer)
        use_xent(trainer)

    want = trainers.run(kind, folder, lambda trainer: None)
    trainers.assert_same_run(trainers.run(kind, folder, with_xent), want)
    assert isinstance(used[0].model_wrapped, DistributedDataParallel)


def below_fsdp(folder):
    """A step of the fused head: accelerate has no FSDP on CPUs, so it is put around the model here."""
    found = []
    for lean in (False, True):
        trainer = trainers.make("DPO", folder)
        if lean:
            use_xent(trainer)
        model = trainer.model.train()
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        torch.manual_seed(int(os.environ["RANK"]))
        ids, labels = tiny.batch()
        outputs = model(input_ids=ids, labels=labels, fused_lm_head=True)
        (outputs.log_probs * torch.arange(8)).sum().backward()
        found.append([outputs.mean_logits, *(p.grad.full_tensor() for p in model.parameters())])
    for theirs, ours in zip(*found, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm() + 1e-8


def deepspeed_for(folder):
    """The package, and the models on disk: once there is a group, rank 0 alone saves."""
    import deepspeed

    deepspeed.ops.__compatible_ops__ = {}  # else it compiles an operator at first, for minutes
    for name in ZERO_MODELS.values():
        trainers.saved(folder, name)
    trainers.saved(folder, "Llama", hidden_size=24, intermediate_size=48)  # the teacher
    return deepspeed


def training_below_zero(folder, stage):
    """Whole runs. Of stage 3 weights are in parts from the beginning: a trainer makes them so."""
    deepspeed = deepspeed_for(folder)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")  # without a GPU accelerate would count one process
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    zero = {2: {"stage": 2}, 3: ZERO_3}[stage]
    config = {"zero_optimization": zero, "zero_allow_untested_optimizer": True, **dict.fromkeys(names, "auto")}
    options = {"deepspeed": config, "use_cpu": False, "accelerator_config": {"use_configured_state": True}}

    def untouched(trainer):
        assert trainer.is_deepspeed_enabled and trainer.accelerator.num_processes == 2
        assert all(hasattr(parameter, "ds_id") == (stage == 3) for parameter in trainer.model.parameters())

    gathered = deepspeed.zero.GatheredParameters if stage == 3 else contextlib.nullcontext
    distilling = {"GKD": "Llama", "Distillation": "Llama"} if stage == 2 else {}
    for kind, name in (ZERO_MODELS | distilling).items():
        runs = []
        for before_training in (use_xent, untouched):
            AcceleratorState._reset_state()
            runs.append(trainers.run(kind, folder, before_training, gathered, name=name, **options))
        trainers.assert_same_run(*runs)


def below_zero_3(folder):
    """A step of the fused head for each of its losses, use_xent before the engine is made and after."""
    deepspeed = deepspeed_for(folder)
    deepspeed.init_distributed("gloo")
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": ZERO_3,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    }
    for kind, name in ZERO_MODELS.items():
        found = []
        for order in (None, "before", "after"):
            trainer = trainers.make(kind, folder, name)
            if order == "before":
                use_xent(trainer)
            engine = deepspeed.initialize(
                model=trainer.model, config=config, model_parameters=trainer.model.parameters()
            )[0]
            if order == "after":
                use_xent(trainer)
            torch.manual_seed(int(os.environ["RANK"]))
            ids, labels = tiny.batch()
            outputs = engine(input_ids=ids, labels=labels, fused_lm_head=True)
            engine.backward(outputs.loss if kind == "SFT" else (outputs.log_probs * torch.arange(8)).sum())
            parameters = dict(trainer.model.named_parameters())
            assert all(parameter.ds_status.name == "NOT_AVAILABLE" for parameter in parameters.values())
            gradients = {name: deepspeed.utils.safe_get_full_grad(value) for name, value in parameters.items()}
            found.append({"loss": outputs.loss.detach(), "log_probs": outputs.log_probs.detach(), **gradients})
        for ours, (field, theirs) in itertools.product(found[1:], found[0].items()):
            error = (ours[field] - theirs).norm()
            assert error <= 1e-5 * theirs.norm() + 1e-8, f"{kind}, {field}: {error:.1e} of {theirs.norm():.1e}"
    for kind in ("GKD", "Distillation"):
        trainer = trainers.make(kind, folder)
        for parameter in trainer.model.parameters():
            parameter.ds_id = 0  # DeepSpeed's mark
        with pytest.raises(TypeError, match=f"{kind}Trainer: FSDP or DeepSpeed's ZeRO-3 splits the heads"):
            use_xent(trainer)


if __name__ == "__main__":
    kind = sys.argv[1]
    with tempfile.TemporaryDirectory() as name:
        if kind in (wrapped := {"FSDP": below_fsdp, "ZeRO-3": below_zero_3}):
            wrapped[kind](Path(name))
        elif kind.endswith(" training"):
            training_below_zero(Path(name), int(kind.removeprefix("ZeRO-")[0]))
        else:
            below_ddp(kind, Path(name))
    print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}: the same\n", end="")
