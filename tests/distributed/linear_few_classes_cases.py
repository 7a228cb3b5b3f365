"""Several classes a row, of a head over ranks; run on every rank by test_linear_parallel.py."""

import pytest
import torch
import torch.distributed as dist
from helpers import over_ranks
from linear_log_prob_cases import close, gradients_close
from linear_parallel_cases import classes_of, head_of, leaves
from vocab_parallel_cases import V, same_bits_everywhere, shard_of, split

import xent_ops


def problem(dtype, shape):
    """input, head, bias, ids with a tie, an ignored place and an ignored row, and their probabilities."""
    input, head, bias, _, target = head_of(dtype, shape)
    generator = torch.Generator().manual_seed(4)
    ids = torch.rand(*target.shape, V, generator=generator).topk(4).indices
    flat = ids.view(-1, 4)
    flat[0, 1], flat[1, 2], flat[2] = flat[0, 0], -100, -100
    return input, head, bias, ids, torch.rand(ids.shape, generator=generator) / 4


def one(device, kind, dtype, function, sequence_dim=None, shape=(9,)):
    """``function(over_ranks, x, w, ids, probs, ...)`` of ranks, and of one process in float64."""
    input, head, bias, ids, probs = problem(dtype, shape)
    x, w, b, own_ids = leaves(device, input, head, bias, None, ids, kind=kind, sequence_dim=sequence_dim)
    how = {"linear_bias": b, "sequence_parallel": sequence_dim is not None, **classes_of(kind)}
    loss = function(True, x, w, own_ids, probs.to(device), **how)
    assert loss.shape == ()
    whole = [tensor.double().requires_grad_() for tensor in (input, head, bias)]
    wanted = function(False, *whole[:2], ids, probs, linear_bias=whole[2])
    same_bits_everywhere(loss)
    close(loss, wanted.detach(), dtype)
    grads = torch.autograd.grad(wanted, whole)
    gradients_close(torch.autograd.grad(loss, (x, w, b)), grads, kind, dtype, sequence_dim)


def probabilities(ranks, x, w, ids, probs, **how):
    options = {"softcap": 20.0, "logit_scale": 0.8, "lse_square_scale": 0.1, "chunk_rows": 4, "tail": True}
    function = over_ranks.linear_top_k_distillation_loss if ranks else xent_ops.linear_top_k_distillation_loss
    return function(x, w, ids, probs, **options, **how)


def confident(ranks, x, w, ids, probs, **how):
    """The student gives next to nothing to the classes that are not named."""
    function = over_ranks.linear_top_k_distillation_loss if ranks else xent_ops.linear_top_k_distillation_loss
    return function(20 * x, w, ids, probs, tail=True, chunk_rows=4, **how)


def plain(ranks, x, w, ids, probs, **how):
    function = over_ranks.linear_top_k_distillation_loss if ranks else xent_ops.linear_top_k_distillation_loss
    return function(x, w, ids, probs, reduction="sum", divisor=3.0, **how)


def of_a_function(ranks, x, w, ids, probs, **how):
    function = over_ranks.linear_token_loss if ranks else xent_ops.linear_token_loss

    def fn(stats, probs):
        return (stats.log_probs * probs).square().sum(-1) - 0.1 * stats.entropy + 0.01 * stats.lse

    return function(x, w, ids, fn, rows=(probs,), chunk_rows=5, **how)


def log_probabilities(ranks, x, w, ids, probs, **how):
    function = over_ranks.linear_token_log_probs if ranks else xent_ops.linear_token_log_probs
    stats = function(x, w, ids, softcap=20.0, logit_scale=0.8, chunk_rows=4, **how)
    return (stats.log_probs * probs).square().sum() - 0.1 * stats.entropy.sum() + 0.01 * stats.lse.sum()


def one_statistic(ranks, x, w, ids, probs, **how):
    function = over_ranks.linear_token_log_probs if ranks else xent_ops.linear_token_log_probs
    return function(x, w, ids, **how).entropy.sum()


def values(device, kind):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for function in (probabilities, plain, of_a_function, log_probabilities):
            one(device, kind, dtype, function)
    one(device, kind, torch.float64, confident)
    one(device, kind, torch.float64, one_statistic)
    world = dist.get_world_size()
    for shape, dim in (((3, 2 * world), 1), ((2 * world, 3), 0)):
        one(device, kind, torch.float32, of_a_function, sequence_dim=dim, shape=shape)
        one(device, kind, torch.float32, probabilities, sequence_dim=dim, shape=shape)
        one(device, kind, torch.float32, log_probabilities, sequence_dim=dim, shape=shape)


def without_gradients_and_errors(device):
    place = split("chunk", V)
    input, head, _, ids, probs = problem(torch.float32, (9,))
    tensors = (input.to(device), shard_of(head.t(), place).t().contiguous().to(device), ids.to(device))
    function, probs = over_ranks.linear_top_k_distillation_loss, probs.to(device)
    wanted = xent_ops.linear_top_k_distillation_loss(input, head, ids, probs.cpu(), tail=True)
    how = {"num_classes": V, "check": True}
    close(function(*tensors, probs, tail=True, **how), wanted, torch.float32)
    with pytest.raises(ValueError, match=r"target 500 is out of bounds|IndexError"):
        function(tensors[0], tensors[1], torch.full_like(tensors[2], 500), probs, **how)
    last = dist.get_world_size() - 1  # one rank alone is wrong, and none waits for it
    call = dict(zip(("input", "linear_weight", "ids", "probs"), (*tensors, probs), strict=True)) | how
    for wrong, text in (
        ({"reduction": "none"}, f"rank {last}: ValueError: 'none' is not a valid value for reduction"),
        ({"tail": "yes"}, f"rank {last}: TypeError: tail must be"),
        ({"tail": True}, "tail is False on rank 0 but True"),
        ({"probs": probs / 2}, "probabilities differ between ranks: number 0 is"),
        ({"probs": probs.double()}, "probs.dtype is torch.float32 on rank 0 but torch.float64"),
        ({"ids": tensors[2].roll(1, 1)}, "ids differ between ranks|targets differ between ranks"),
        ({"lse_square_scale": 0.1}, "lse_square_scale is 0.0 on rank 0 but 0.1"),
        ({"token_weight": torch.ones(9, device=device)}, "token_weight is None on rank 0 but a tensor"),
    ):
        with pytest.raises(ValueError, match=text):
            function(**call | (wrong if dist.get_rank() == last else {}))
