"""What the loss over a split vocabulary refuses, and what check=True compares; run on every rank by test_vocab_parallel.py."""

import contextlib
import inspect

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
from vocab_parallel_cases import Collectives, V, same_bits_everywhere, split

from xent_ops.distributed import vocab_parallel_cross_entropy


def refused(device):
    """A right call, and (arguments that a rank refuses by itself, the error, its text)."""
    world, size = dist.get_world_size(), 32
    classes = world * size
    whole, target = torch.randn(4, classes, device=device), torch.tensor([1, 2, 3, -100], device=device)
    x, weight = whole[:, :size], torch.ones(size, device=device)
    learned = torch.ones((), requires_grad=True)
    dtensor = DTensor.from_local(x, init_device_mesh(device, (world,)), [Replicate()], run_check=False)
    return {"logits_shard": x, "target": target, "num_classes": classes}, [
        ({"logits_shard": whole}, ValueError, f"the shard has {classes} columns, which is the whole vocabulary of num_classes={classes}"),
        ({"logits_shard": x[:, 1:]}, ValueError, rf"the shard of rank \d has {size - 1} columns; .* DTensor's chunk rule gives it {size} "),
        ({"logits_shard": x[:3]}, ValueError, r"target has shape \(4,\)"),
        ({"logits_shard": x[0, 0]}, ValueError, "logits_shard has no dimension"),
        ({"logits_shard": x.tolist()}, TypeError, "logits_shard must be a torch.Tensor, got list"),
        ({"logits_shard": x.to_sparse()}, TypeError, "logits_shard has layout torch.sparse_coo"),
        ({"logits_shard": dtensor}, TypeError, r"logits_shard is a DTensor: pass logits_shard.to_local\(\)"),
        ({"logits_shard": x.long()}, TypeError, "logits_shard has dtype torch.int64"),
        ({"logits_shard": target, "target": x}, TypeError, "logits_shard has dtype torch.int64; .*: logits_shard and target seem to be swapped"),
        ({"target": target.float()}, TypeError, "target has dtype torch.float32"),
        ({"target": None}, TypeError, "target must be a torch.Tensor, got None"),
        ({"num_classes": float(classes)}, TypeError, f"num_classes must be an integer, got {classes}.0"),
        ({"num_classes": None}, TypeError, "num_classes must be an integer, got None"),
        ({"num_classes": True}, TypeError, "num_classes must be an integer, got True"),
        ({"num_classes": 0}, ValueError, "num_classes must be at least 1"),
        ({"num_classes": 2**63, "class_start": 0}, ValueError, "num_classes must fit into 64 bits"),
        ({"class_start": 0.5}, TypeError, "class_start must be an integer, got 0.5"),
        ({"class_start": -1}, ValueError, "class_start=-1"),
        ({"class_start": classes}, ValueError, f"class_start={classes} with {size} columns lies beyond num_classes={classes}"),
        ({"weight": weight.clone().requires_grad_()}, RuntimeError, "weight requires grad"),
        ({"weight": whole[0]}, ValueError, rf"weight has shape \({classes},\)"),
        ({"weight": weight.tolist()}, TypeError, "weight must be a torch.Tensor, got list"),
        ({"ignore_index": -100.0}, TypeError, "ignore_index must be an integer, got -100.0"),
        ({"ignore_index": True}, TypeError, "ignore_index must be an integer, got True"),
        ({"softcap": 0.0}, ValueError, "softcap must be a finite number above 0"),
        ({"softcap": "30"}, TypeError, "softcap must be a number, got '30'"),
        ({"softcap": learned}, RuntimeError, "softcap is a tensor that requires grad"),
        ({"logit_scale": learned}, RuntimeError, "logit_scale is a tensor that requires grad"),
        ({"logit_scale": 1e39}, ValueError, "logit_scale must be at most"),
        ({"label_smoothing": 2.0}, ValueError, "label_smoothing must be between"),
        ({"lse_square_scale": 1e39}, ValueError, "lse_square_scale must be at most"),
        ({"lse_square_scale": float("inf")}, ValueError, "lse_square_scale must be finite"),
        ({"lse_square_scale": -1}, ValueError, "lse_square_scale must be at least 0, got -1.0"),
        ({"batch_invariant": 1}, TypeError, "batch_invariant must be True or False"),
        ({"reduction": "avg"}, ValueError, "'avg' is not a valid value for reduction"),
    ]  # fmt: skip


def bad_input(device):
    """What a rank can see alone is an error before it communicates: no rank waits."""
    right, bad = refused(device)
    bad += [
        ({"group": [0]}, TypeError, r"group must be a ProcessGroup, .* got \[0\]: .*new_group\(\[0\]\)"),
        ({"group": bad_input}, TypeError, "group must be a ProcessGroup, .*, got bad_input$"),
        ({"check": 1}, TypeError, "check must be True or False, got 1"),
    ]
    wrong, classes = right["target"].clone(), right["num_classes"]
    wrong[2] = classes
    with Collectives() as mode:
        for arguments, error, text in bad:
            with pytest.raises(error, match=f"^{text}"):
                vocab_parallel_cross_entropy(**{**right, **arguments})
        if device == "cpu":
            with pytest.raises(IndexError, match=f"target {classes} is out of bounds: valid are 0 to {classes - 1}"):
                vocab_parallel_cross_entropy(**{**right, "target": wrong})
    assert mode.seen == []
    if device == "cuda":
        loss = vocab_parallel_cross_entropy(**{**right, "target": wrong}, reduction="none")
        assert loss.isnan().tolist() == [False, False, True, False]


def shards_that_do_not_tile(device):
    """NaN everywhere; the same with check=True is an error everywhere."""
    rank, world = dist.get_rank(), dist.get_world_size()
    target = torch.tensor([1, 2, 3, 4], device=device)
    size = V // world

    def loss(start, width, **keywords):
        x = torch.randn(4, width, device=device, requires_grad=True)
        value = vocab_parallel_cross_entropy(x, target, num_classes=V, class_start=start, **keywords)
        (grad,) = torch.autograd.grad(value, x)
        return value, grad

    cases = [
        ("an overlap", 0, size),
        ("an overlap", 0, V),
        ("the shards end at|a gap", rank * size, size - 1),
        ("an overlap|a gap", rank * (size - 1), size),
        ("a gap", rank * size + 1, size - (rank == world - 1)),
    ]
    for text, start, width in cases:
        value, grad = loss(start, width)
        assert value.isnan() and grad.isnan().all()
        with pytest.raises(ValueError, match=text):
            loss(start, width, check=True)


def check_across_ranks(device):
    last = dist.get_world_size() - 1
    start, size, _ = split("chunk", V)
    x, target = torch.randn(4, size, device=device, requires_grad=True), torch.tensor([1, 2, 3, -100], device=device)
    other, wrong = target.clone(), target.clone()
    other[1] = 50
    wrong[3] = V
    weights = torch.ones(4, device=device)
    call = {"logits_shard": x, "target": target, "num_classes": V, "check": True}
    # (what every rank passes, what the odd rank passes instead, what every rank says)
    bad = [
        ({}, {"target": other}, f"targets differ between ranks: number 1 is 2 on rank 0 but 50 on rank {last}"),
        ({}, {"target": wrong}, f"rank {last}: IndexError: target {V} is out of bounds"),
        ({}, {"logits_shard": x[:3], "target": target[:3]}, r"target.shape is \(4,\) on rank 0 but \(3,\) on rank"),
        ({}, {"logits_shard": x[:, 1:]}, f"rank {last}: ValueError: the shard of rank {last} has"),
        ({}, {"logits_shard": x.double()}, "accumulation in is float32 on rank 0 but float64"),
        ({"class_start": start}, {"num_classes": V + 1}, f"num_classes is {V} on rank 0 but {V + 1}"),
        ({}, {"class_start": start - 1}, "an overlap|a gap"),
        ({}, {"weight": torch.ones(size, device=device)}, r"weight \(class weights\) is None on rank 0 but a tensor"),
        ({}, {"ignore_index": -1}, f"rank {last}: IndexError: target -100 is out of bounds"),
        ({"target": other.abs()}, {"ignore_index": -1}, "ignore_index is -100 on rank 0 but -1"),
        ({}, {"reduction": "sum"}, "reduction is mean on rank 0 but sum"),
        ({"label_smoothing": 0.2}, {"label_smoothing": 0.1}, "label_smoothing is 0.2 on rank 0 but 0.1"),
        ({}, {"lse_square_scale": 0.1}, "lse_square_scale is 0.0 on rank 0 but 0.1"),
        ({}, {"softcap": 5.0}, "softcap is None on rank 0 but 5.0"),
        ({}, {"logit_scale": 2.0}, "logit_scale is 1.0 on rank 0 but 2.0"),
        ({}, {"batch_invariant": True}, "batch_invariant is False on rank 0 but True"),
        ({}, {"token_weight": weights}, "token_weight is None on rank 0 but a tensor"),
        (
            {"token_weight": weights},
            {"token_weight": 2 * weights},
            "token weights differ between ranks: number 0 is 1.0",
        ),
    ]
    refused_by_all(vocab_parallel_cross_entropy, call, bad)


def refused_by_all(function, call, bad):
    """Each case raises its text on every rank. The cases name every argument, so that a new one needs a case."""
    odd = dist.get_rank() == dist.get_world_size() - 1
    named = {name for _, differs, _ in bad for name in differs} | {"group", "check"}
    assert named == set(inspect.signature(function).parameters)
    for right, differs, text in bad:
        with pytest.raises(ValueError, match=rf"^(distributed\.)?{function.__name__}: .*({text})"):
            function(**{**call, **right, **(differs if odd else {})})
    value = function(**call)  # the group is as it was
    torch.testing.assert_close(value, function(**{**call, "check": False}), rtol=0, atol=0)


def check_raises_on_every_rank(device):
    """What one rank refuses by itself, all of them raise: none waits for it."""
    last = dist.get_world_size() - 1
    odd = dist.get_rank() == last  # the rank that is wrong
    right, bad = refused(device)

    def call(logits=right["logits_shard"], **arguments):
        return vocab_parallel_cross_entropy(**{**right, "logits_shard": logits, "check": True, **arguments})

    for arguments, error, text in bad:
        name = r"distributed\.vocab_parallel_cross_entropy"
        with pytest.raises(ValueError, match=f"^{name}: rank {last}: {error.__name__}: {text}"):
            call(**(arguments if odd else {}))

    text = f"rank {last}: NotImplementedError: .*vocab_parallel_cross_entropy inside a functorch transform"
    for transform in (torch.func.grad, torch.vmap, lambda f: lambda x: torch.func.jvp(f, (x,), (x,))):
        function = transform(call) if odd else call
        with pytest.raises(ValueError, match=text):
            function(right["logits_shard"])
    with (
        torch.autograd.forward_ad.dual_level() if odd else contextlib.nullcontext(),
        pytest.raises(ValueError, match=text),
    ):
        call()
    # The group is as it was.
    value = call(ignore_index=np.int64(-100), label_smoothing=1, softcap=torch.tensor(30.0))
    torch.testing.assert_close(value, call(check=False, label_smoothing=1.0, softcap=30.0))


def check_of_numbers_of_other_types(device):
    """Options that are equal are no difference between ranks."""
    odd = dist.get_rank() == 0
    _, size, _ = split("chunk", V)
    x, target = torch.randn(4, size, device=device), torch.tensor([1, 2, 3, -100], device=device)
    value = vocab_parallel_cross_entropy(
        x,
        target,
        num_classes=np.int64(V) if odd else V,
        ignore_index=torch.tensor(-100) if odd else -100,
        softcap=30 if odd else 30.0,
        logit_scale=torch.tensor(0.5) if odd else 0.5,
        check=True,
    )
    same_bits_everywhere(value)
