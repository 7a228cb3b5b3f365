"""Eager training's plain mean and sum on a GPU: what is decided once must hold for every later call that it is used for."""

import types

import numpy as np
import pytest
import torch
from conftest import INTERPRETED
from torch.utils.flop_counter import FlopCounterMode

import xent_ops
from xent_ops.kernels import reference_shard
from xent_ops.ops import eager

pytestmark = pytest.mark.interpreter


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    if request.param == "cpu" and not INTERPRETED:
        pytest.skip("C++ serves the CPU")
    return request.param


@pytest.fixture
def parallel():
    """The module of eager losses over a split vocabulary."""
    if not torch.distributed.is_available():
        pytest.skip("this torch is built without torch.distributed")
    from xent_ops.distributed import eager as module

    return module


def inputs(device, shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(shape, generator=generator).mul(3).to(device, dtype).requires_grad_()
    target = torch.randint(0, shape[-1], shape[:-1], generator=generator).to(device)
    target.view(-1)[1::3] = -100
    return logits, target


def expected(monkeypatch, logits, target, factor=1.0, **options):
    """By the operators."""
    with monkeypatch.context() as patch:
        patch.setattr(eager, "undisturbed", lambda *tensors, **options: False)
        loss = xent_ops.cross_entropy(logits, target, dim=-1, **options)
        return loss.detach(), torch.autograd.grad(loss * factor, logits)[0]


CASES = {
    "plain": (torch.float32, {}),
    "options": (torch.float32, {"label_smoothing": 0.1, "softcap": 5.0, "logit_scale": 0.5}),
    "sum": (torch.float32, {"reduction": "sum"}),
    "bfloat16": (torch.bfloat16, {"label_smoothing": 0.1, "softcap": 5.0}),
    "float64": (torch.float64, {}),
}

SHAPES = {
    "short rows": (20, 64),
    "odd rows": (17, 1030),
    "batches": (2, 3, 200),
    "split rows": (2, 5000),
}


@pytest.mark.parametrize("dtype, options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_values(monkeypatch, device, shape, dtype, options):
    """Twice, on other numbers: the second call finds what the first one prepared."""
    for seed in range(2):
        logits, target = inputs(device, shape, dtype, seed)
        wanted, wanted_grad = expected(monkeypatch, logits, target, -2.5, **options)
        before = len(eager._PREPARED)
        loss = xent_ops.cross_entropy(logits, target, dim=-1, **options)
        assert type(loss.grad_fn).__name__ == "_PreparedLossBackward"
        assert seed == 0 or len(eager._PREPARED) == before
        torch.testing.assert_close(loss.detach(), wanted)
        torch.testing.assert_close(torch.autograd.grad(loss * -2.5, logits)[0], wanted_grad)


def test_other_layouts_are_other_preparations(monkeypatch, device):
    """The same shape elsewhere: rows of a wider tensor, a pointer off its boundary, int32 targets, another index."""
    storage, target = inputs(device, (6, 70))
    views = {
        "narrow": storage[:, :64],
        "shifted": storage[:, 3:67],
        "every other row": torch.cat([storage, storage])[::2, :64],
        "dense": storage[:, :64].contiguous(),
        "transposed": storage[:, :64].t().contiguous().t(),  # has to be copied
    }
    target = target.clamp(max=60)
    for view in views.values():
        for rows in (target, target.int(), target.repeat_interleave(2)[::2]):
            for ignore_index in (-100, 7):
                options = {"ignore_index": ignore_index}
                logits, labels = view.detach().requires_grad_(), torch.where(rows == -100, ignore_index, rows)
                if rows.stride() != (1,):
                    labels = labels.repeat_interleave(2)[::2]
                wanted, wanted_grad = expected(monkeypatch, logits, labels, **options)
                loss = xent_ops.cross_entropy(logits, labels, **options)
                torch.testing.assert_close(loss.detach(), wanted)
                torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], wanted_grad)


def test_backward_twice_and_with_a_graph(monkeypatch, device):
    logits, target = inputs(device, (6, 30), torch.float64)
    _, wanted_grad = expected(monkeypatch, logits, target)
    loss = xent_ops.cross_entropy(logits, target)
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(loss, logits, retain_graph=True)[0], wanted_grad)
    (grad,) = torch.autograd.grad(loss, logits, create_graph=True)
    torch.testing.assert_close(grad.detach(), wanted_grad)
    (second,) = torch.autograd.grad(grad.square().sum(), logits)
    assert second.abs().sum() > 0


def test_tensors_that_saved_tensor_hooks_bring_back(monkeypatch, device):
    """Laid out otherwise than those that were saved: the gradient is made of what they hold."""
    logits, target = inputs(device, (6, 64))
    _, wanted_grad = expected(monkeypatch, logits, target)

    def elsewhere(tensor):
        wide = torch.full((*tensor.shape, 2), 77, dtype=tensor.dtype, device=tensor.device)
        wide[..., 0] = tensor
        return wide[..., 0]

    with torch.autograd.graph.saved_tensors_hooks(elsewhere, lambda tensor: tensor):
        loss = xent_ops.cross_entropy(logits, target)
    assert type(loss.grad_fn).__name__ == "_PreparedLossBackward"
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], wanted_grad)


def test_what_hooks_bring_back_at_the_same_address(monkeypatch, device):
    """Half of the memory, other numbers: what was saved there is not what is there."""
    logits, target = inputs(device, (6, 64))
    _, wanted_grad = expected(monkeypatch, logits.bfloat16(), target)
    memory = []

    def pack(tensor):
        if tensor.dtype != torch.float32 or tensor.dim() != 2:
            return tensor
        memory.append(tensor.detach().bfloat16())
        return tensor

    def unpack(tensor):
        if tensor.dtype == torch.float32 and tensor.dim() == 2:
            place = tensor.detach().view(torch.bfloat16).view(-1)[: tensor.numel()].view(tensor.shape)
            assert place.copy_(memory[0]).data_ptr() == tensor.data_ptr()
            return place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = xent_ops.cross_entropy(logits, target)
    (grad,) = torch.autograd.grad(loss, logits)
    assert torch.equal(grad, grad.bfloat16().float())  # rounded as the gradient of what came back is
    torch.testing.assert_close(grad.bfloat16(), wanted_grad.bfloat16(), rtol=0.0, atol=1e-2)


def test_no_counted_row_and_no_row(device):
    logits, target = inputs(device, (3, 30))
    loss = xent_ops.cross_entropy(logits, torch.full_like(target, -100))
    assert loss.isnan() and torch.autograd.grad(loss, logits)[0].count_nonzero() == 0
    logits, target = inputs(device, (0, 30))
    loss = xent_ops.cross_entropy(logits, target)
    assert loss.isnan() and torch.autograd.grad(loss, logits)[0].shape == (0, 30)


def test_a_target_out_of_range_is_nan(device):
    logits, target = inputs(device, (4, 30))
    target[0] = 30
    loss = xent_ops.cross_entropy(logits, target)
    (grad,) = torch.autograd.grad(loss, logits)
    assert loss.isnan() and grad[0].isnan().all() and grad[1:].isfinite().all()


def test_errors_come_before_anything_is_prepared(device):
    logits, target = inputs(device, (4, 30))
    before = len(eager._PREPARED)
    with pytest.raises(ValueError, match="target has shape"):
        xent_ops.cross_entropy(logits, target[:3])
    with pytest.raises(TypeError, match="target has dtype"):
        xent_ops.cross_entropy(logits, target.to(torch.int16))
    with pytest.raises(ValueError, match="label_smoothing must be"):
        xent_ops.cross_entropy(logits, target, label_smoothing=1.5)
    assert len(eager._PREPARED) == before


def test_tensors_that_are_lazily_negative(monkeypatch, device):
    """Their storage holds the opposite of what they say."""
    values, target = inputs(device, (4, 30))
    logits = torch.complex(torch.zeros_like(values), values.neg()).conj().imag.detach().requires_grad_()
    assert logits.is_neg() and torch.equal(logits, values)
    wanted, wanted_grad = expected(monkeypatch, values, target)
    for options in ({}, {"grad_in_forward": True}, {"lse_square_scale": 0.0, "reduction": "mean"}):
        loss = xent_ops.cross_entropy(logits, target, **options)
        torch.testing.assert_close(loss.detach(), wanted)
        torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], wanted_grad)


def test_many_upstream_gradients_at_once(monkeypatch, device):
    """is_grads_batched runs the backward below vmap."""
    logits, target = inputs(device, (4, 30))
    _, wanted_grad = expected(monkeypatch, logits, target)
    loss = xent_ops.cross_entropy(logits, target)
    factors = torch.tensor([1.0, -2.0], device=device)
    (grads,) = torch.autograd.grad(loss, logits, factors, is_grads_batched=True)
    torch.testing.assert_close(grads, factors[:, None, None] * wanted_grad)


def test_an_option_of_another_type_leaves_nothing_behind(monkeypatch, device):
    """Equal keys are one key to a dictionary: 3, 3.0, np.int64(3). What is kept must be good for all of them."""
    logits, target = inputs(device, (4, 30))
    target = target.clamp(min=0)
    for index, options in enumerate(({"grad_in_forward": True}, {"inplace_backward": True, "reduction": "sum"}, {})):
        wanted, _ = expected(monkeypatch, logits, target, ignore_index=index)
        xent_ops.cross_entropy(logits * 1, target, ignore_index=np.int64(index), **options).backward()
        with pytest.raises((TypeError, RuntimeError), match="ignore_index"):
            xent_ops.cross_entropy(logits * 1, target, ignore_index=float(index), **options)
        with pytest.raises((ValueError, RuntimeError), match="ignore_index"):
            xent_ops.cross_entropy(logits * 1, target, ignore_index=2**63, **options)
        loss = xent_ops.cross_entropy(logits * 1, target, ignore_index=index)
        torch.testing.assert_close(loss.detach(), wanted)
        loss.backward()
        with pytest.raises((TypeError, RuntimeError), match="ignore_index"):  # nor with what is kept now
            xent_ops.cross_entropy(logits * 1, target, ignore_index=float(index))
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            xent_ops.cross_entropy(logits * 1, target, ignore_index=[index])  # which no dictionary takes


def test_what_is_kept_steps_aside(monkeypatch, device):
    """Where a call of the same shapes and options asks for something else than eager training."""
    logits, target = inputs(device, (4, 30))
    wanted, wanted_grad = expected(monkeypatch, logits, target)
    xent_ops.cross_entropy(logits, target).backward()
    values = logits.detach()
    for loss in (xent_ops.cross_entropy(values, target), torch.no_grad()(xent_ops.cross_entropy)(logits, target)):
        assert not loss.requires_grad
        torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(torch.func.grad(xent_ops.cross_entropy)(values, target), wanted_grad)
    tangent = torch.ones_like(values)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(logits, tangent)
        derivative = torch.autograd.forward_ad.unpack_dual(xent_ops.cross_entropy(dual, target)).tangent
    torch.testing.assert_close(derivative, (wanted_grad * tangent).sum(), atol=1e-6, rtol=1e-5)
    with FlopCounterMode(display=False):
        assert type(xent_ops.cross_entropy(logits, target).grad_fn).__name__ != "_PreparedLossBackward"
    weight = torch.full((30,), 2.0, device=device)
    total = xent_ops.cross_entropy(logits, target, reduction="sum")
    torch.testing.assert_close(xent_ops.cross_entropy(logits, target, weight, reduction="sum"), 2 * total)
    torch.testing.assert_close(xent_ops.cross_entropy(logits.t(), target, dim=0).detach(), wanted)


def test_options_that_are_tensors_are_read_at_every_call(monkeypatch, device):
    logits, target = inputs(device, (4, 30))
    for name, values in {
        "lse_square_scale": (0.0, 0.5),
        "logit_scale": (2.0, -2.0),
        "label_smoothing": (0.1, 0.0),
    }.items():
        option = torch.tensor(0.0)
        for value in values:
            wanted, wanted_grad = expected(monkeypatch, logits, target, **{name: value})
            option.fill_(value)
            for one_pass in (False, True):
                loss = xent_ops.cross_entropy(logits, target, grad_in_forward=one_pass, **{name: option})
                torch.testing.assert_close(loss.detach(), wanted)
                torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], wanted_grad)


# One program; several; as many as there may be, who go round once more.
@pytest.mark.parametrize(
    "rows, dtype", [(1, torch.float32), (8192, torch.float32), (9000, torch.float64), (270_000, torch.float32)]
)
def test_mean_of_any_number_of_rows(device, rows, dtype):
    launch_mean = pytest.importorskip(
        "xent_ops.kernels.triton.launch_mean", reason="needs triton", exc_type=ImportError
    )
    generator = torch.Generator().manual_seed(rows)
    loss, weights = torch.rand(2, rows, generator=generator, dtype=torch.float64).to(device, dtype)
    target = torch.randint(-1, 3, (rows,), generator=generator).to(device)
    number = (target != -1).sum().to(dtype)
    for row, ignore_index, divisor in (
        (target, -1, number),
        (target.int(), -1, number),
        (weights, None, weights.sum()),
    ):
        value, counted = launch_mean.mean(loss, row, ignore_index)
        torch.testing.assert_close(counted, divisor)
        torch.testing.assert_close(value, loss.sum() / divisor)
    inverse, counted = launch_mean.count(target, -1, dtype)
    assert counted == number
    torch.testing.assert_close(inverse, 1 / number)
    assert launch_mean.mean(torch.zeros_like(loss), torch.full_like(target, -1), -1)[0].isnan()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_in_place(monkeypatch, device, reduction):
    """The gradient takes the logits' memory, once; rows with gaps go through the operators."""
    options = {"reduction": reduction, "inplace_backward": True}
    for layout, prepared in ((lambda x: x * 1.0, True), (lambda x: torch.nn.functional.pad(x, (0, 8))[:, :64], False)):
        leaf, target = inputs(device, (6, 64))
        wanted, wanted_grad = expected(monkeypatch, leaf, target, -2.5, reduction=reduction)
        logits = layout(leaf)
        loss = xent_ops.cross_entropy(logits, target, **options)
        assert type(loss.grad_fn).__name__ == ("_PreparedLossBackward" if prepared else "_InPlaceBackward")
        torch.testing.assert_close(loss.detach(), wanted)
        places = []
        logits.register_hook(lambda grad, places=places: places.append(grad.data_ptr()))
        (loss * -2.5).backward(retain_graph=True)
        torch.testing.assert_close(leaf.grad, wanted_grad)
        assert places == [logits.data_ptr()]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        loss = xent_ops.cross_entropy(layout(leaf), target, **options)
        with pytest.raises(RuntimeError, match="leaves nothing to differentiate a second time"):
            torch.autograd.grad(loss, leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        xent_ops.cross_entropy(leaf.exp(), target, **options).backward()  # exp needs what the loss overwrites


@pytest.mark.parametrize("dtype, options", CASES.values(), ids=CASES)
def test_shards_of_a_vocabulary(monkeypatch, device, parallel, dtype, options):
    """Two ranks in one process: the all-gather brings what the other rank's operator made."""
    from xent_ops.distributed.groups import Place

    classes, cut = 200, 72
    reduction = options.get("reduction", "mean")
    rows = {"ignore_index": -100, "label_smoothing": 0.0, "softcap": None, "logit_scale": 1.0} | options
    rows.pop("reduction", None)
    for seed in range(2):  # the second time by what the first one prepared, and by another group of the same name
        logits, target = inputs(device, (3, 5, classes), dtype, seed)
        wanted, wanted_grad = expected(monkeypatch, logits, target, -2.5, **options)
        shards = {0: logits.detach()[..., :cut].contiguous(), cut: logits.detach()[..., cut:].contiguous()}
        everyones = [
            torch.ops.xent.cross_entropy_shard(shard, target, start, classes, **rows) for start, shard in shards.items()
        ]
        before = len(eager._PREPARED)
        for rank, (start, shard) in enumerate(shards.items()):
            gathered = []

            def all_gather(everything, own, options, everyones=everyones, rank=rank, gathered=gathered):
                torch.testing.assert_close(own, everyones[rank], rtol=0, atol=0)
                everything.copy_(torch.cat(everyones))

            def group_of(name, all_gather=all_gather, gathered=gathered, seed=seed):
                gathered.append((name, seed))
                return types.SimpleNamespace(**{parallel._GATHER: all_gather})

            place = Place("group", rank, 2)
            monkeypatch.setattr(parallel, "process_group", group_of)
            x = shard.requires_grad_()
            settings = eager.Settings(reduction, 0.0, rows)
            loss = parallel.cross_entropy(x, target, None, place, start, classes, settings)
            assert type(loss.grad_fn).__name__ == "_PreparedLossBackward" and gathered == [("group", seed)]
            torch.testing.assert_close(loss.detach(), wanted)
            (grad,) = torch.autograd.grad(loss * -2.5, x)
            torch.testing.assert_close(grad, wanted_grad[..., start : start + x.shape[-1]])
        assert len(eager._PREPARED) == before + (2 if seed == 0 else 0)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("number", [1, 129, 400])
def test_rows_are_reduced_where_they_are_joined(monkeypatch, device, number, dtype, reduction):
    """By the program that comes last, in one order: against torch's sum, and each time to the same bits."""
    launch_shard = pytest.importorskip(
        "xent_ops.kernels.triton.launch_shard", reason="needs triton", exc_type=ImportError
    )
    if device == "cuda":
        number *= 1000
    monkeypatch.setattr(launch_shard, "JOIN_PARTS", 2)  # several turns
    classes = 40 + 2 * number  # of no other test: launches are kept by it
    generator = torch.Generator().manual_seed(number)
    target = torch.randint(0, 24, (number,), generator=generator).to(device)
    target[1::3] = -100
    logits = torch.randn(number, 24, generator=generator).to(device, dtype)
    part = reference_shard.cross_entropy_shard(logits, target, 0, classes)
    rest = reference_shard.cross_entropy_shard(logits[:, :0], target, 24, classes)
    rest[:, -3:-1] = torch.tensor([0.0, classes - 24], dtype=dtype)  # the other classes are all -inf
    gathered = torch.cat([part, rest])
    loss, lse, counted, _ = torch.ops.xent.cross_entropy_shard_join(logits, target, gathered, 0, classes)
    number_counted = counted.double().sum()
    wanted = loss.double().sum() / (number_counted if reduction == "mean" else 1)
    results = [
        launch_shard.join_and_reduce(target, gathered.clone(), classes, reduction == "mean")
        for _ in range(20 if device == "cuda" else 2)
    ]
    for value, number_found, same_lse in results:
        torch.testing.assert_close(value.double(), wanted, rtol=1e-6 if dtype == torch.float32 else 1e-13, atol=0)
        assert value.dtype == dtype and number_found == number_counted and torch.equal(same_lse, lse)
        assert torch.equal(value, results[0][0])


def test_shards_that_are_prepared_and_those_that_are_not_agree_in_every_bit(device, parallel):
    """One rank's target has strides, so it takes the operators; all ranks must get the same loss."""
    from xent_ops.distributed.groups import Place

    logits, target = inputs(device, (1000 if device == "cuda" else 130, 64))
    strided = torch.stack([target, target], -1)[:, 0]
    for reduction in ("mean", "sum") if device == "cuda" else ("mean",):
        rows = {"ignore_index": -100, "label_smoothing": 0.1, "softcap": None, "logit_scale": 1.0}
        settings = eager.Settings(reduction, 0.0, rows)
        first, second = (
            parallel.cross_entropy(logits, t, None, Place("group", 0, 1), 0, 64, settings) for t in (target, strided)
        )
        assert [type(loss.grad_fn).__name__ for loss in (first, second)] == ["_PreparedLossBackward", "_LossBackward"]
        assert torch.equal(first, second)
        grads = [torch.autograd.grad(loss, logits)[0] for loss in (first, second)]
        torch.testing.assert_close(*grads)


def test_shards_that_are_not_prepared(device):
    """Padding, no class, a copy: the operators take them."""
    prepared = pytest.importorskip("xent_ops.kernels.triton.prepared", reason="needs triton", exc_type=ImportError)
    options = {"ignore_index": -100, "label_smoothing": 0.0, "softcap": None, "logit_scale": 1.0}

    def prepare(logits, start, classes):
        target = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=device)
        rest = {"world": 2, "gather": lambda part: part}
        return prepared.prepare_shard(logits, target, True, start, classes, **rest, **options)

    logits = torch.zeros(4, 64, device=device)
    assert prepare(logits, 64, 128) is not None
    assert prepare(logits, 64, 127) is None
    assert prepare(logits[:, :0], 64, 64) is None
    assert prepare(logits.t().contiguous().t(), 64, 128) is None
