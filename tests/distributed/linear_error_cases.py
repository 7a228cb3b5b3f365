"""What the head and the loss over ranks refuse; run on every rank by test_linear_parallel.py."""

import pytest
import torch
import torch.distributed as dist
from helpers import over_ranks
from linear_parallel_cases import H, head_of, leaves
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
from vocab_parallel_cases import Collectives, V
from vocab_parallel_error_cases import refused_by_all


def bad_input(device):
    """What a rank can see alone is an error before it communicates: no rank waits."""
    x, w, b, target = leaves(device, *head_of(torch.float32, (6,)))
    size, world = len(w), dist.get_world_size()
    mesh = init_device_mesh(device, (world,))
    whole = torch.randn(V, H, device=device)
    bad = [
        (
            {"linear_weight": whole, "linear_bias": None},
            ValueError,
            f"the shard has {V} columns, which is the whole vocabulary",
        ),
        ({"linear_weight": w[1:], "linear_bias": b[1:]}, ValueError, "DTensor's chunk rule gives it"),
        ({"class_start": V}, ValueError, f"class_start={V} with {size} columns lies beyond num_classes={V}"),
        ({"class_start": -1}, ValueError, "class_start=-1"),
        ({"class_start": 0.5}, TypeError, "class_start must be an integer, got 0.5"),
        ({"num_classes": 0}, ValueError, "num_classes must be at least 1"),
        ({"num_classes": float(V)}, TypeError, f"num_classes must be an integer, got {V}.0"),
        ({"target": target[:3]}, ValueError, r"target has shape \(3,\); expected \(6,\)"),
        ({"target": target.float()}, TypeError, "target has dtype torch.float32"),
        ({"target": None}, TypeError, "target must be a torch.Tensor, got None"),
        ({"input": x[:, 1:]}, ValueError, rf"linear_weight has shape \({size}, {H}\); expected \({size}, {H - 1}\)"),
        ({"input": x.double()}, TypeError, "linear_weight has dtype torch.float32 but input torch.float64"),
        ({"input": x.long()}, TypeError, "input has dtype torch.int64"),
        ({"linear_weight": w[0]}, ValueError, r"linear_weight has shape \(8,\); expected \(V, H\)"),
        ({"linear_bias": b[1:]}, ValueError, "linear_bias has shape"),
        ({"weight": torch.ones(V, device=device)}, ValueError, rf"weight has shape \({V},\); expected \({size},\)"),
        ({"weight": torch.ones(size, device=device, requires_grad=True)}, RuntimeError, "weight requires grad"),
        (
            {"linear_weight": torch.nn.Linear(H, size)},
            TypeError,
            "linear_weight must be .*; pass linear_weight.weight$",
        ),
        (
            {"linear_weight": w.detach().t()},
            ValueError,
            r"linear_weight has shape .*: it is transposed, .*linear_weight.t\(\)",
        ),
        ({"group": [0]}, TypeError, r"group must be a ProcessGroup, .* got \[0\]: .*new_group\(\[0\]\)"),
        ({"divisor": 0, "reduction": "sum"}, ValueError, "divisor must be a finite number above 0, got 0"),
        ({"reduction": "avg"}, ValueError, "'avg' is not a valid value for reduction"),
        ({"divisor": 3.0}, ValueError, 'expected reduction="sum"'),
        (
            {"reduction": "sum", "divisor": torch.tensor(3.0, device=device, requires_grad=True)},
            RuntimeError,
            "divisor requires grad",
        ),
        ({"chunk_rows": 0}, ValueError, "chunk_rows must be at least 1"),
        ({"check": 1}, TypeError, "check must be True or False, got 1"),
        ({"pipelined": 1}, TypeError, "pipelined must be True, False or None, got 1"),
        ({"pipelined": True, "reduction": "none"}, ValueError, "pipelined=True makes the gradients of a mean or a sum"),
        ({"pipelined": True, "skip_ignored": True}, ValueError, "without skip_ignored"),
        ({"accumulate_dtype": torch.bfloat16}, TypeError, "accumulate_dtype must be None"),
        ({"label_smoothing": 2.0}, ValueError, "label_smoothing must be between"),
        ({"softcap": 0.0}, ValueError, "softcap must be a finite number above 0"),
        ({"lse_square_scale": 1e39}, ValueError, "lse_square_scale must be at most"),
        ({"input": DTensor.from_local(x, mesh, [Replicate()], run_check=False)}, TypeError, "input is a DTensor"),
        (
            {"linear_weight": DTensor.from_local(w, mesh, [Replicate()], run_check=False)},
            TypeError,
            "linear_weight is a",
        ),
        ({"sequence_parallel": True}, ValueError, f"one dimension of the target must be {world} times as long"),
        (
            {"sequence_parallel": True, "input": x[: 6 // world], "linear_bias": b[1:]},
            ValueError,
            "linear_bias has shape|must be",  # with 4 ranks both are wrong
        ),
    ]
    call = {"input": x, "linear_weight": w, "target": target, "num_classes": V, "linear_bias": b}
    with Collectives() as mode:
        for keywords, error, text in bad:
            with pytest.raises(error, match=text):
                over_ranks.linear_cross_entropy(**{**call, **keywords})
        for function in (torch.func.grad, torch.vmap):
            with pytest.raises(NotImplementedError, match="linear_cross_entropy inside a functorch"):
                function(lambda x: over_ranks.linear_cross_entropy(**{**call, "input": x}))(x)
    assert mode.seen == []
    wrong = target.clone()
    wrong[2] = V
    if device == "cpu":
        with pytest.raises(IndexError, match=f"target {V} is out of bounds: valid are 0 to {V - 1}"):
            over_ranks.linear_cross_entropy(**{**call, "target": wrong})
    else:
        loss = over_ranks.linear_cross_entropy(**{**call, "target": wrong, "reduction": "none"})
        assert loss.isnan().tolist() == [False, False, True, False, False, False]


def check_across_ranks(device):
    """What one rank refuses by itself, and what differs between ranks, all of them raise."""
    last = dist.get_world_size() - 1
    x, w, b, target = leaves(device, *head_of(torch.float32, (6,)))
    call = {"input": x, "linear_weight": w, "target": target, "num_classes": V, "linear_bias": b, "check": True}
    weights = torch.ones(6, device=device)
    other = target.clone()
    other[4] = (other[4] + 1) % V
    narrow = {"input": x[:, 1:], "linear_weight": w[:, 1:]}  # one feature less, consistent in itself
    # (what every rank passes, what the odd rank passes instead, what every rank says)
    of_both = [
        ({}, {"linear_weight": w[1:]}, f"rank {last}: ValueError: linear_bias has shape"),
        ({}, {"linear_weight": w.tolist()}, f"rank {last}: TypeError: linear_weight must be a torch.Tensor, got list"),
        ({}, {"input": x[:, 1:]}, f"rank {last}: ValueError: linear_weight has shape"),
        ({}, {"num_classes": 0}, f"rank {last}: ValueError: num_classes must be at least 1"),
        ({}, {"num_classes": V + 1, "class_start": V - len(w)}, f"num_classes is {V} on rank 0 but {V + 1}"),
        ({}, {"target": other}, "targets differ between ranks: number 4 is"),
        ({}, {"target": other.clamp(max=V).fill_(V)}, f"rank {last}: IndexError: target {V} is out of bounds"),
        ({}, {"input": x[:3], "target": target[:3]}, r"target.shape is \(6,\) on rank 0 but \(3,\) on rank"),
        ({}, narrow, rf"input.shape is \(6, {H}\) on rank 0 but \(6, {H - 1}\)"),
        ({}, {"input": x.detach()}, "input.requires_grad is True on rank 0 but False"),
        ({}, {"linear_weight": w.detach()}, "linear_weight.requires_grad is True on rank 0 but False"),
        ({}, {"linear_bias": b.detach()}, "linear_bias.requires_grad is True on rank 0 but False"),
        ({}, {"linear_bias": None}, "linear_bias is a tensor on rank 0 but None"),
        (
            {"linear_bias": None, "accumulate_dtype": torch.float32},
            {"input": x.bfloat16(), "linear_weight": w.bfloat16()},
            "input.dtype is torch.float32 on rank 0 but torch.bfloat16",
        ),
        ({}, {"class_start": V - len(w) - 1}, "an overlap|a gap"),
        ({}, {"softcap": 5.0}, "softcap is None on rank 0 but 5.0"),
        ({}, {"logit_scale": 2.0}, "logit_scale is 1.0 on rank 0 but 2.0"),
        ({"target": target.clamp(min=0)}, {"ignore_index": -5}, "ignore_index is -100 on rank 0 but -5"),
        ({}, {"accumulate_dtype": torch.float32}, "accumulate_dtype is None on rank 0 but torch.float32"),
        ({}, {"chunk_rows": 4}, "chunk_rows is None on rank 0 but 4"),
        ({}, {"skip_ignored": True}, "skip_ignored is False on rank 0 but True"),
        ({}, {"batch_invariant": True}, "batch_invariant is False on rank 0 but True"),
        ({}, {"logits_dtype": torch.float32}, "logits_dtype is None on rank 0 but torch.float32"),
        ({}, {"products": "fp8"}, f"rank {last}: TypeError: products='fp8' makes 8-bit numbers of torch.bfloat16"),
        ({}, {"sequence_parallel": True}, f"rank {last}: ValueError: target has shape"),
    ]
    of_the_loss = [
        ({}, {"weight": torch.ones(len(w), device=device)}, r"weight \(class weights\) is None on rank 0 but a tensor"),
        ({}, {"label_smoothing": 0.1}, "label_smoothing is 0.0 on rank 0 but 0.1"),
        ({}, {"lse_square_scale": 0.1}, "lse_square_scale is 0.0 on rank 0 but 0.1"),
        ({}, {"reduction": "sum"}, "reduction is mean on rank 0 but sum"),
        ({"reduction": "sum", "divisor": 3.0}, {"divisor": 4.0}, "divisor is 3.0 on rank 0 but 4.0"),
        ({"reduction": "sum", "divisor": 3.0}, {"divisor": None}, "divisor is 3.0 on rank 0 but None"),
        ({}, {"pipelined": False}, "pipelined is True on rank 0 but False"),
        ({}, {"token_weight": weights}, "token_weight is None on rank 0 but a tensor"),
        (
            {"token_weight": weights},
            {"token_weight": 2 * weights},
            "token weights differ between ranks: number 0 is 1.0",
        ),
    ]
    focal, of_tokens = {"fn": lambda stats, *_: stats.log_probs.exp()}, [*of_both, *of_the_loss[3:7]]
    of_tokens += [
        ({}, {"fn": lambda stats: stats.entropy}, r"read is \('log_probs',\) on rank 0 but \('entropy',\)"),
        ({}, {"rows": (weights,)}, "the number of rows is 0 on rank 0 but 1"),
        ({"rows": (weights,)}, {"rows": (2 * weights,)}, r"rows\[0\] differ between ranks: number 0 is 1.0"),
        ({"rows": (weights,)}, {"rows": (weights.double(),)}, r"rows\[0\].dtype is torch.float32 on rank 0 but"),
    ]
    refused_by_all(over_ranks.linear_cross_entropy, call, [*of_both, *of_the_loss])
    pipelined = ({}, {"pipelined": True}, f"rank {last}: ValueError: pipelined=True makes the gradients of a mean")
    refused_by_all(over_ranks.linear_token_log_probs, call, [*of_both, pipelined])
    refused_by_all(over_ranks.linear_token_loss, call | focal, of_tokens)


def check_of_the_split_dimension(device):
    """Of a square target either dimension may be split; each rank alone would take its own."""
    world, rank = dist.get_world_size(), dist.get_rank()
    _, w, _, _ = leaves(device, *head_of(torch.float32, (6,)))
    target = torch.arange(world * world, device=device).reshape(world, world) % V
    part = torch.randn((1, world, H) if rank == 0 else (world, 1, H), device=device, requires_grad=True)
    call = {"linear_weight": w, "target": target, "num_classes": V, "sequence_parallel": True, "check": True}
    for function in (over_ranks.linear_cross_entropy, over_ranks.linear_token_log_probs):
        with pytest.raises(ValueError, match=r"input.shape is .* on rank 0 but"):
            function(part, **call)
        function(part.detach().reshape(1, world, H), **call)
