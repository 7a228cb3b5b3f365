"""Data-parallel training with the loss inside the compiled model; run on every rank by test_data_parallel.py."""

import re
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import xent_ops

ROWS, WIDTH, V = 12, 16, 33


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h):
        return h + self.linear(h).tanh()


class Head(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.linear = nn.Linear(WIDTH, V, bias=False)
        self.loss = loss

    def forward(self, h, target):
        return self.loss(self.linear(h), target)


class Model(nn.Module):
    def __init__(self, make_head):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = make_head()

    def forward(self, h, target, **options):
        for block in self.blocks:
            h = block(h)
        return self.head(h, target, **options)


def _shard(model):
    # Without a mesh torch takes one of GPUs wherever the machine has any.
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    for layer in (*model.blocks, model.head, model):
        fully_shard(layer, mesh=mesh)
    return model


def _compiled_layers_sharded(model, **options):
    for layer in (*model.blocks, model.head):
        layer.compile(**options)
    return _shard(model)


# How a model is made parallel and compiled, and whether torch itself allows fullgraph=True there (2.13 does not: DDP's
# logger and FSDP's hooks break the graph, whatever the loss).
WAYS = {
    "DDP of compiled": (lambda model, **options: DistributedDataParallel(torch.compile(model, **options)), True),
    "compiled DDP": (lambda model, **options: torch.compile(DistributedDataParallel(model), **options), False),
    "FSDP of compiled layers": (_compiled_layers_sharded, True),
    "compiled FSDP": (lambda model, **options: torch.compile(_shard(model), **options), False),
}
EAGER = {"DDP": DistributedDataParallel, "FSDP": _shard}


def _batch(device, ignored):
    """(world, ROWS, ...), the same on every rank; the first ``ignored[rank]`` targets of a rank are ignored."""
    generator = torch.Generator().manual_seed(1)
    h = torch.randn(len(ignored), ROWS, WIDTH, generator=generator)
    target = torch.randint(0, V, (len(ignored), ROWS), generator=generator)
    for rank, number in enumerate(ignored):
        target[rank, :number] = -100
    return h.to(device), target.to(device)


def _step(wrap, make_head, h, target):
    """Loss and gradients of the same model on every rank."""
    torch.manual_seed(0)
    model = Model(make_head).to(h.device)
    step = wrap(model)  # its hooks average the gradients: it must live on
    value = step(h, target)
    value.backward()
    grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
    return value.detach(), grads


def _recipe():
    """``global_mean`` as docs/recipes.md has it."""
    text = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "def global_mean" in b]
    namespace = {"xent_ops": xent_ops}
    exec(block.rpartition("\n\n\n")[0], namespace)  # without the example's own check
    return namespace["global_mean"]


def equal_to_one_process(device, way, backend):
    """The mean over ranks of loss and gradients is that of one process on the whole batch: with the local mean where
    every rank counts as many targets, with the recipe's otherwise. And no more graphs or breaks than F.cross_entropy."""
    wrap, fullgraph = WAYS[way]
    rank, world = dist.get_rank(), dist.get_world_size()
    for loss, ignored in [(xent_ops.cross_entropy, [3] * world), (_recipe(), [1, ROWS, 7][:world])]:
        h, target = _batch(device, ignored)
        compiles = {}
        for name, function in (("xent", loss), ("torch", F.cross_entropy)):
            torch.compiler.reset()
            counters.clear()
            counter = CompileCounterWithBackend(backend)
            compiled = partial(wrap, backend=counter, fullgraph=fullgraph)
            value, grads = _step(compiled, partial(Head, function), h[rank], target[rank])
            compiles[name] = counter.frame_count, sum(counters["graph_break"].values())
            if name == "xent":
                _assert_mean_is_of_one_process(value, grads, h, target)
                traced = [str(node.target) for graph in counter.graphs for node in graph.graph.nodes]
                assert any("xent.cross_entropy" in target for target in traced), traced
        assert compiles["xent"] == compiles["torch"], compiles
        assert not fullgraph or compiles["xent"][1] == 0


def _assert_mean_is_of_one_process(value, grads, h, target):
    dist.all_reduce(value)
    wanted = _step(lambda model: model, partial(Head, F.cross_entropy), h.flatten(0, 1), target.flatten())
    torch.testing.assert_close((value / dist.get_world_size(), grads), wanted, rtol=1e-5, atol=1e-6)


def linear_head(device, way, backend):
    """The same with the head and the loss as one module, whose hooks FSDP2 uses; its weight is that of the linear."""
    h, target = _batch(device, [3] * dist.get_world_size())
    rank, counter = dist.get_rank(), CompileCounterWithBackend(backend)
    wrap, fullgraph = (EAGER[way], False) if backend is None else WAYS[way]
    if backend is not None:
        wrap = partial(wrap, backend=counter, fullgraph=fullgraph)
    for _ in range(2):  # the second backward of a process, too
        value, grads = _step(wrap, partial(xent_ops.LinearCrossEntropyLoss, WIDTH, V), h[rank], target[rank])
        _assert_mean_is_of_one_process(value, grads, h, target)
    traced = [str(node.target) for graph in counter.graphs for node in graph.graph.nodes]
    assert any("xent.linear_cross_entropy" in target for target in traced) == (backend is not None), traced
