"""Trainers of TRL on several ranks, with use_xent and without; started by torchrun from test_trl_ranks.py."""

import os
import sys
import tempfile
from pathlib import Path

import tiny
import torch
import trainers
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from xent_ops.integrations.trl import use_xent


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


if __name__ == "__main__":
    kind = sys.argv[1]
    with tempfile.TemporaryDirectory() as name:
        below_fsdp(Path(name)) if kind == "FSDP" else below_ddp(kind, Path(name))
    print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}: the same\n", end="")
