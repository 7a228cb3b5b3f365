"""Our losses in the place of torchtitan's over ranks, against these; run on every rank by test_torchtitan_parallel.py."""

import contextlib
from unittest import mock

import spmd_types as spmd
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.distributed import parallel_dims
from torchtitan.distributed.spmd_types import set_current_spmd_mesh
from torchtitan.distributed.utils import get_spmd_backend, set_spmd_backend
from torchtitan.models.common.decoder_sharding import dense_activation_placement, dense_param_placement
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.sharding import ShardingConfig

from xent_ops.integrations.torchtitan import XentCrossEntropyLoss, XentLinearLoss

B, S, H, V = 2, 8, 16, 67  # the ranks' classes differ in number
BACKENDS = ("partial_dtensor", "full_dtensor", "spmd_types")


@contextlib.contextmanager
def _spmd_backend(backend):
    before = get_spmd_backend()
    set_spmd_backend(backend)
    try:
        yield
    finally:
        set_spmd_backend(before)


def _labels(device):
    labels = torch.randint(V, (B, S), device=device)
    labels[0, 2], labels[1, -3:] = -100, -100
    return labels, (labels != -100).sum()


def _whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def _of_logits(device, mesh, backend, loss_class):
    """(loss, gradient of this rank's logits)."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(B, S, V, device=device)
    labels, valid = _labels(device)
    shard = logits.tensor_split([(V + 1) // 2], -1)[dist.get_rank()].contiguous().requires_grad_()
    loss_of = loss_class.Config(global_vocab_size=V).build()
    with _spmd_backend(backend):
        if backend == "spmd_types":
            with set_current_spmd_mesh(mesh):
                loss, _ = loss_of(shard, labels, valid)
        else:
            pred = DTensor.from_local(shard, mesh, [Shard(2)], shape=logits.shape, stride=logits.stride())
            if backend == "full_dtensor":
                labels = DTensor.from_local(labels, mesh, [Replicate()])
            loss, _ = loss_of(pred, labels, valid)
        loss.backward()
    return _whole(loss.detach()), shard.grad


def logits_split_by_classes(device, backend):
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tp",))
    expected, made = (_of_logits(device, mesh, backend, one) for one in (CrossEntropyLoss, XentCrossEntropyLoss))
    torch.testing.assert_close(made, expected)


def _chunked(device, mesh, loss_class):
    """(loss, gradient of the hidden states, gradient of the head)."""
    torch.manual_seed(0)
    head = nn.Linear(H, V, bias=False, device=device)
    labels, valid = _labels(device)
    split = ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(head, mesh, split)
    hidden = torch.randn(B, S, H, device=device).requires_grad_()
    loss_of = ChunkedLossWrapper.Config(num_chunks=4, loss_fn=loss_class.Config(global_vocab_size=V)).build()
    loss_of.set_lm_head(head)
    with _spmd_backend("partial_dtensor"):
        loss, _ = loss_of(hidden, labels, valid)
        loss.backward()
    return loss.detach(), hidden.grad, head.weight.grad.full_tensor()


def chunks_of_a_split_head(device):
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tp",))
    expected, made = (_chunked(device, mesh, one) for one in (CrossEntropyLoss, XentCrossEntropyLoss))
    torch.testing.assert_close(made, expected)


def _split(device, backend, loss_of):
    """(loss, gradients of hidden states and head) of a head that torchtitan splits over two ranks, as its models do.

    With four ranks the rows of each part are sharded by FSDP2.
    """
    torch.manual_seed(0)
    ranks = dist.get_world_size()
    dims = parallel_dims.ParallelDims(
        dp_replicate=1, dp_shard=ranks // 2, cp=1, tp=2, pp=1, ep=1, world_size=ranks, spmd_backend=backend
    )
    with mock.patch.object(parallel_dims, "device_type", device):  # which it takes of the torch that is installed
        dims.build_mesh()
    replicated = dense_activation_placement(tp=spmd.R)
    logits = dense_activation_placement(tp=spmd.S(-1))
    sharding = ShardingConfig(
        state_shardings={"weight": dense_param_placement(tp=spmd.S(0))},
        in_src_shardings={"input": replicated},
        in_dst_shardings={"input": replicated},
        out_src_shardings=logits,
        out_dst_shardings=logits,
    )
    head = Linear.Config(in_features=H, out_features=V, sharding_config=sharding).build().to(device)
    labels, valid = _labels(device)
    hidden = torch.randn(B, S, H, device=device)
    head.parallelize(dims)
    mesh = head.weight.device_mesh
    if ranks > 2:  # all have the same tokens
        fully_shard(head, mesh=dims.get_mesh("fsdp"))
    given = hidden, labels
    if backend == "full_dtensor":
        given = [distribute_tensor(one, mesh, [Replicate()] * mesh.ndim) for one in given]
    hidden, labels = given[0].detach().requires_grad_(), given[1]
    loss_of.set_lm_head(head)
    with _spmd_backend(backend):
        loss, _ = loss_of(hidden, labels, valid)
        loss.backward()
        made = tuple(_whole(one) for one in (loss.detach(), hidden.grad, head.weight.grad))
        with torch.no_grad():
            validated, _ = loss_of(hidden.detach(), labels, valid)
    torch.testing.assert_close(_whole(validated), made[0])
    return made


def heads_that_torchtitan_splits(device, backend):
    expected = _split(device, backend, ChunkedLossWrapper.Config(num_chunks=4).build())
    made = _split(device, backend, XentLinearLoss.Config().build())
    torch.testing.assert_close(made, expected)


def split_heads_are_refused(device):
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tp",))
    head = parallelize_module(nn.Linear(H, V, bias=False, device=device), mesh, ColwiseParallel())
    loss_of = XentLinearLoss.Config().build()
    loss_of.set_lm_head(head)
    try:
        loss_of(torch.randn(B, S, H, device=device), _labels(device)[0])
    except ValueError as error:
        assert "or by parallelize_module, which" in str(error)
    else:
        raise AssertionError("a head of two ranks was taken for a whole one")


class _Decoder(nn.Module):
    """As torchtitan's: its forward returns hidden states, and the loss calls the head."""

    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(H, H), nn.RMSNorm(H), nn.Linear(H, V, bias=False)

    def forward(self, x):
        return self.norm(self.body(x))


def _sharded(device, loss_of):
    """(losses, gradients), norm and head in one group, as torchtitan has them; each rank has tokens of its own."""
    torch.manual_seed(0)
    model = _Decoder().to(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    fully_shard(model.body, mesh=mesh)
    fully_shard([model.norm, model.head], mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    loss_of.set_lm_head(model.head)
    losses = []
    for step in range(2):
        torch.manual_seed(10 * step + dist.get_rank())
        labels, valid = _labels(device)
        loss, _ = loss_of(model(torch.randn(B, S, H, device=device)), labels, valid)
        loss.backward()
        losses.append(loss.detach())
    return losses, [parameter.grad.full_tensor() for parameter in model.parameters()]


def norm_and_head_in_one_group(device):
    with _spmd_backend("partial_dtensor"):
        expected = _sharded(device, ChunkedLossWrapper.Config(num_chunks=4).build())
        made = _sharded(device, XentLinearLoss.Config().build())
    torch.testing.assert_close(made, expected)
