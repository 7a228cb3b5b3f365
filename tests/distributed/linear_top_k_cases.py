"""The k most probable classes of a head over ranks; run on every rank by test_linear_parallel.py."""

import pytest
import torch
import torch.distributed as dist
from helpers import over_ranks
from linear_parallel_cases import classes_of, head_of, leaves
from vocab_parallel_cases import Collectives, V, same_bits_everywhere

import xent_ops


def whole_numbers(dtype, rows):
    """Products without rounding, so that logits have the same bits in every split, and many ties."""
    input, head, bias, _, target = head_of(dtype, rows)
    return input.round(), head.round(), bias.round(), None, target


def equal(found, wanted, counted):
    for name, value, expected in zip(found._fields, found, wanted, strict=True):
        assert (value is None) == (expected is None), name
        if value is None:
            continue
        same_bits_everywhere(value)
        if value.dtype == torch.int64:
            assert torch.equal(value.cpu(), expected), name
        else:
            torch.testing.assert_close(value.cpu()[counted], expected[counted], rtol=1e-5, atol=1e-5)


def values(device, kind):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        problem = whole_numbers(dtype, (11,))
        input, head, bias, _, target = problem
        x, w, b, labels = (tensor.detach() for tensor in leaves(device, *problem, kind=kind))
        for k, options in (
            (1, {}),
            (V, {"chunk_rows": 4}),
            (7, {"softcap": 4.0, "logit_scale": -1.2}),
            (7, {"batch_invariant": True, "chunk_rows": 4}),
            (7, {"ignore_index": 3}),  # a class, which may be one of the 7
        ):
            ignored = options.get("ignore_index", -100)
            target, labels = (torch.where(one == -100, ignored, one) for one in (target, labels))
            wanted = xent_ops.linear_top_k(input, head, k, target, linear_bias=bias, **options)
            place = {"linear_bias": b, **classes_of(kind), **options}
            found = over_ranks.linear_top_k(x, w, k, labels, check=True, **place)
            equal(found, wanted, target != ignored)
            if "ignore_index" in options:
                continue
            without = over_ranks.linear_top_k(x, w, k, **place)
            assert torch.equal(without.ids[labels != -100], found.ids[labels != -100]) and without.target_ranks is None


def sequence_parallel(device):
    """The ranks' rows of several chunks, along both dimensions."""
    world = dist.get_world_size()
    for shape, dim in (((2 * world, 3), 0), ((3, 2 * world), 1)):
        problem = whole_numbers(torch.float32, shape)
        input, head, bias, _, target = problem
        x, w, b, labels = (tensor.detach() for tensor in leaves(device, *problem, sequence_dim=dim))
        wanted = xent_ops.linear_top_k(input, head, 5, target, linear_bias=bias)
        for options in ({"chunk_rows": world}, {"chunk_rows": 4 * world, "batch_invariant": True}):
            place = {"num_classes": V, "linear_bias": b, "sequence_parallel": True}
            equal(over_ranks.linear_top_k(x, w, 5, labels, **place, **options), wanted, target != -100)
    nothing = over_ranks.linear_top_k(x[:, :0], w, 5, labels[:, :0], num_classes=V, linear_bias=b)
    assert nothing.ids.shape == (3, 0, 5) and nothing.target_ranks.shape == (3, 0)
    with pytest.raises(ValueError, match="sequence_parallel=True splits one dimension of the target: pass target"):
        over_ranks.linear_top_k(x, w, 5, num_classes=V, sequence_parallel=True)


def behaviour(device):
    """What is sent; logits that are not finite; its ids as classes of log-probabilities; errors."""
    problem = whole_numbers(torch.float32, (6,))
    input, head, bias, _, target = problem
    input[1], bias[5], bias[6] = torch.nan, torch.inf, -torch.inf
    x, w, b, labels = (tensor.detach() for tensor in leaves(device, *problem))
    function, k, place = over_ranks.linear_top_k, 9, {"num_classes": V, "linear_bias": b}
    wanted = xent_ops.linear_top_k(input, head, k, target, linear_bias=bias)
    with Collectives() as mode:
        found = function(x, w, k, labels, **place)
    assert torch.equal(found.ids.cpu(), wanted.ids) and torch.equal(found.target_ranks.cpu(), wanted.target_ranks)
    gathers = [("all_gather_into_tensor.default", size) for size in (5 * 6 + 5, 6 * k, 6 * k)]
    assert mode.seen == [*gathers, ("all_reduce_.default", 6)]

    x, w, _, labels = leaves(device, *head_of(torch.float32, (6,)))
    place = {"num_classes": V}
    top = function(x, w, k, labels, **place)
    log_probs = over_ranks.linear_token_log_probs(x, w, top.ids, **place).log_probs
    torch.testing.assert_close(log_probs, top.log_probs, rtol=1e-5, atol=1e-5)
    assert log_probs.requires_grad and not any(value.requires_grad for value in top)
    for bad in (0, V + 1):
        with pytest.raises(ValueError, match=f"k must be from 1 to {V} classes, got {bad}"):
            function(x, w, bad, labels, **place)
    last = dist.get_world_size() - 1
    with pytest.raises(ValueError, match="k is 3 on rank 0 but 4"):
        function(x, w, 3 + (dist.get_rank() == last), labels, check=True, **place)
    if device == "cpu":
        with pytest.raises(IndexError, match=f"target {V} is out of bounds"):
            function(x, w, k, torch.full_like(labels, V), check=False, **place)
