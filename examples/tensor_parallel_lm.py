"""Trains a small GPT whose embedding, blocks and head are split over ranks, compiled; no rank ever has all logits.

    torchrun --nproc-per-node 2 examples/tensor_parallel_lm.py                 # tensor parallel over 2 ranks
    torchrun --nproc-per-node 4 examples/tensor_parallel_lm.py --tensor 2      # and FSDP2 over 2 pairs of them
    torchrun --nproc-per-node 2 examples/tensor_parallel_lm.py --loss linear   # a rank computes its logits by chunks

It runs on GPUs (NCCL) if there is one for each rank, else on CPUs (gloo). At the end rank 0 trains the same model alone
on the same batches: the losses must be equal up to float32 rounding.
"""

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import xent_ops

VOCABULARY = 5003  # odd: the shards are uneven


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        # -1: a rank has only some of the heads.
        q, k, v = (
            part(normed).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, length: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads=width // 32) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, target: Tensor | None = None) -> Tensor:
        """(batch, length, vocabulary); with a target the loss, of the head and the loss as one."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        hidden = self.norm(self.blocks(self.tokens(ids) + self.positions(positions)))
        if target is None:
            return self.head(hidden)
        weight = self.head.weight
        if isinstance(weight, DTensor):  # split; every rank of its mesh has all hidden states
            hidden = DTensor.from_local(hidden, weight.device_mesh, [Replicate()], run_check=False)
        return xent_ops.linear_cross_entropy(hidden, weight, target)


PLAN = {
    "tokens": RowwiseParallel(input_layouts=Replicate()),
    # The logits stay split over the vocabulary, as a DTensor. The loss needs no other argument for that.
    "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
}
BLOCK_PLAN = {
    **{name: ColwiseParallel() for name in ("q", "k", "v", "up")},
    **{name: RowwiseParallel() for name in ("out", "down")},
}


def split(model: GPT, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh["tensor"], PLAN)
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], BLOCK_PLAN)
    if mesh["data"].size() > 1:
        # FSDP gathers parameters in hooks between the blocks: each block is compiled alone, as FSDP's authors advise.
        for block in model.blocks:
            block.compile(fullgraph=True)
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])


def loss_of(model: nn.Module, text: Tensor) -> Tensor:
    return loss_of_logits(model(text[:, :-1]), text[:, 1:])


def linear_loss_of(model: nn.Module, text: Tensor) -> Tensor:
    return model(text[:, :-1], text[:, 1:])


def loss_of_logits(logits: Tensor, target: Tensor) -> Tensor:
    return xent_ops.cross_entropy(logits, target, dim=-1)


compiled_loss_of_logits = torch.compile(loss_of_logits, fullgraph=True)


def loss_in_parts(model: nn.Module, text: Tensor) -> Tensor:
    return compiled_loss_of_logits(model(text[:, :-1]), text[:, 1:])


def train(model: GPT, batches: Tensor, lr: float, linear: bool, data: DeviceMesh | None = None) -> list[float]:
    """One loss a step, the mean over all of the batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, foreach=False)  # plain and split parameters side by side
    if data is None:
        step = torch.compile(linear_loss_of if linear else loss_of, fullgraph=True)
    else:
        step = linear_loss_of if linear else loss_in_parts
    losses = []
    for batch in batches:
        if data is not None:
            batch = batch.chunk(data.size())[data.get_local_rank()]
        loss = step(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = loss.detach()
        value = value.to_local() if isinstance(value, DTensor) else value
        if data is not None:
            dist.all_reduce(value, group=data.get_group())
            value = value / data.size()
        losses.append(value)
    return torch.stack(losses).tolist()


def text_of(steps: int, batch: int, length: int, seed: int) -> Tensor:
    """Data that can be learnt: 9 of 10 tokens are a fixed function of the one before."""
    generator = torch.Generator().manual_seed(seed)
    following = torch.randperm(VOCABULARY, generator=generator)
    tokens = [torch.randint(0, VOCABULARY, (steps, batch), generator=generator) % 97]
    for _ in range(length):
        other = torch.randint(0, VOCABULARY, (steps, batch), generator=generator) % 97
        surprise = torch.rand((steps, batch), generator=generator) < 0.1
        tokens.append(torch.where(surprise, other, following[tokens[-1]] % 97))
    return torch.stack(tokens, -1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor", type=int, help="ranks that share the vocabulary; by default all")
    for name, default in {"steps": 20, "batch": 8, "length": 64, "width": 128, "layers": 2, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument(
        "--loss", choices=("logits", "linear"), default="logits", help="linear: the head and the loss as one"
    )
    args = parser.parse_args()
    if "WORLD_SIZE" not in os.environ:
        parser.error("start this with torchrun, see --help")

    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    device = "cuda" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "cpu"
    if device == "cuda":
        torch.cuda.set_device(local)
    tensor = args.tensor or world
    heads = args.width // 32
    if world % tensor or heads % tensor or args.batch % (world // tensor):
        parser.error(
            f"--tensor {tensor} must divide the {world} ranks and the {heads} heads (--width / 32), and what is left, "
            f"{world // tensor}, the batch of {args.batch}"
        )
    mesh = init_device_mesh(device, (world // tensor, tensor), mesh_dim_names=("data", "tensor"))
    batches = text_of(args.steps, args.batch, args.length, args.seed).to(device)

    torch.manual_seed(args.seed)
    model = GPT(args.length, args.width, args.layers).to(device)
    alone = {name: value.clone() for name, value in model.state_dict().items()}
    split(model, mesh)
    sharded = world > tensor
    begin = time.perf_counter()
    linear = args.loss == "linear"
    losses = train(model, batches, args.lr, linear, data=mesh["data"] if sharded else None)
    seconds = time.perf_counter() - begin

    status = 0
    if dist.get_rank() == 0:
        reference = GPT(args.length, args.width, args.layers).to(device)
        reference.load_state_dict(alone)
        expected = train(reference, batches, args.lr, False)
        worst = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
        over = f"vocabulary over {tensor}, data over {world // tensor}"
        print(f"{world} ranks on {device}: {over}; {args.loss} loss; {seconds:.1f} s")
        for number in sorted({0, len(losses) // 2, len(losses) - 1}):
            print(f"step {number:3}: loss {losses[number]:.6f}, one process alone {expected[number]:.6f}")
        print(f"largest relative difference {worst:.1e}")
        if not worst < 1e-3 or not losses[-1] < losses[0]:
            print("the losses differ, or do not fall")
            status = 1
    dist.barrier()
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
