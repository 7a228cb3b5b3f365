"""Mistakes whose errors once said something else: each says what it is, and what to write."""

import re

import pytest
import torch
from torch import nn

import xent_ops

N, V, H = 6, 30, 8
CLASSES = torch.arange(0, V, 3)


def heads():
    """Hidden states and a head of a student, and of its teacher."""
    torch.manual_seed(0)
    return [torch.randn(size, requires_grad=i < 2) for i, size in enumerate(((N, H), (V, H), (N, 12), (V, 12)))]


def logits():
    x, w, y, v = heads()
    return (x @ w.t()).detach().requires_grad_(), y @ v.t()


def kl(divergences):
    return divergences.kl


def log_prob(divergences):
    return -divergences.log_prob


def nll(stats):
    return -stats.log_probs


# Several classes a row, and a draft vocabulary


def calls_with_ids(ids):
    x, w, *_ = heads()
    z, probs = logits()[0], torch.full(ids.shape, 0.1)
    return {
        "linear_top_k": lambda: xent_ops.linear_top_k_distillation_loss(x, w, ids, probs),
        "top_k": lambda: xent_ops.top_k_distillation_loss(z, ids, probs, tail=True),
        "linear_log_probs": lambda: xent_ops.linear_token_log_probs(x, w, ids),
        "log_probs": lambda: xent_ops.token_log_probs(z, ids),
        "linear_token_loss": lambda: xent_ops.linear_token_loss(x, w, ids, lambda stats: -stats.log_probs.sum(-1)),
    }


@pytest.mark.parametrize("name", calls_with_ids(torch.zeros(N, 2, dtype=torch.int64)))
def test_ids_out_of_bounds(name):
    """They are no targets of a part of a head."""
    ids = torch.arange(4 * N).view(N, 4)
    ids[2, 1] = 79
    with pytest.raises(
        IndexError, match=r"^id 79 is out of .* \(1 of 24 ids .*; ids are classes of this head"
    ) as error:
        calls_with_ids(ids)[name]()
    assert "sharded" not in str(error.value)
    with pytest.raises(IndexError, match=r"^id -1 is out of .*; to ignore ids of -1, pass ignore_index=-1$"):
        calls_with_ids(ids.clamp(max=V - 1) - 1)[name]()


@pytest.mark.parametrize("form", ["hidden states", "logits"])
def test_the_id_of_a_teacher(form):
    """Beside classes= a target is the draft's."""
    x, w, y, v = heads()
    target = torch.arange(N)
    target[1] = 12
    with pytest.raises(IndexError, match=r"^target 12 is out of bounds: valid are 0 to 9 .* id of the student \(the d"):
        if form == "logits":
            xent_ops.distillation_token_loss(x @ w[:10].t(), y @ v.t(), log_prob, target=target, classes=CLASSES)
        else:
            xent_ops.linear_distillation_token_loss(x, w[:10], y, v, log_prob, target=target, classes=CLASSES)


@pytest.mark.parametrize("form", ["hidden states", "logits"])
@pytest.mark.parametrize("place", ["classes", "heads"])
def test_classes_on_another_device(form, place):
    """meta stands for a GPU."""
    x, w, y, v = [one.detach().to("meta" if place == "heads" else "cpu") for one in heads()]
    classes = CLASSES.to("meta" if place == "classes" else "cpu")
    with pytest.raises(
        RuntimeError, match=rf"^classes is on {classes.device} but .* on {x.device}; both must be on one"
    ):
        if form == "logits":
            xent_ops.distillation_token_loss(x @ w[:10].t(), y @ v.t(), kl, classes=classes)
        else:
            xent_ops.linear_distillation_token_loss(x, w[:10], y, v, kl, classes=classes)


@pytest.mark.parametrize("form", ["hidden states", "logits"])
def test_a_mask_of_bytes_as_classes(form):
    x, w, y, v = heads()
    mask = torch.zeros(V, dtype=torch.uint8).index_fill(0, CLASSES, 1)
    text = r"^classes has shape \(30,\); expected \(10,\), .*: of a mask .* pass t2d.nonzero\(\).squeeze\(-1\)$"
    for student, error, words in ((w[:10], ValueError, text), (w, ValueError, "^classes has .* of a mask .*nonzero")):
        with pytest.raises(error, match=words):
            if form == "logits":
                xent_ops.distillation_token_loss(x @ student.t(), y @ v.t(), kl, classes=mask)
            else:
                xent_ops.linear_distillation_token_loss(x, student, y, v, kl, classes=mask)


def test_logits_of_a_teacher_as_its_hidden_states():
    x, w, y, v = heads()
    for call in (
        lambda y, v: xent_ops.linear_distillation_loss(x, w, y, v),
        lambda y, v: xent_ops.linear_distillation_token_loss(x, w, y, v, kl),
    ):
        with pytest.raises(
            ValueError, match=r"^teacher_weight has shape \(30, 12\); .* If it holds logits, pass the te"
        ):
            call(y @ v.t(), v)
        with pytest.raises(ValueError, match=r"; else the weight is transposed, pass teacher_weight.t\(\)$"):
            call(y, v.t())


# Second derivatives


def losses_without_second_derivative():
    x, w, y, v = heads()
    ids, probs = torch.arange(4 * N).view(N, 4), torch.full((N, 4), 0.1)
    z, t = logits()
    summed = lambda stats: -stats.log_probs.sum(-1)  # noqa: E731
    return {
        "linear_token_loss": (lambda: xent_ops.linear_token_loss(x, w, ids[:, 0], nll), x),
        "linear_token_loss of ids": (lambda: xent_ops.linear_token_loss(x, w, ids, summed), x),
        "token_loss of ids": (lambda: xent_ops.token_loss(z, ids, summed), z),
        "linear_top_k": (lambda: xent_ops.linear_top_k(x, w, 3).log_probs.sum(), x),
        "top_k": (lambda: xent_ops.top_k(z, 3).log_probs.sum(), z),
        "linear_top_k_loss": (lambda: xent_ops.linear_top_k_distillation_loss(x, w, ids, probs), x),
        "top_k_loss": (lambda: xent_ops.top_k_distillation_loss(z, ids, probs, tail=True), z),
        "linear_two_heads": (lambda: xent_ops.linear_distillation_loss(x, w, y, v), x),
        "two logits": (lambda: xent_ops.distillation_loss(z, t), z),
        "linear_two_heads, a function": (lambda: xent_ops.linear_distillation_token_loss(x, w, y, v, kl), x),
        "two logits, a function": (lambda: xent_ops.distillation_token_loss(z, t, kl), z),
    }


@pytest.mark.parametrize("name", losses_without_second_derivative())
def test_a_second_derivative_names_no_other_function(name):
    """The same operator serves several losses, so the error says what holds for each of them."""
    loss, leaf = losses_without_second_derivative()[name]
    with pytest.raises(
        RuntimeError, match=r"^this loss has no second derivative. .*in plain torch, of the log_softmax"
    ):
        torch.autograd.grad(torch.autograd.grad(loss(), leaf, create_graph=True)[0].sum(), leaf)


def test_what_has_a_second_derivative():
    """The functions that the error names."""
    x, w, *_ = heads()
    z, target = logits()[0], torch.arange(N)
    for loss, leaf in (
        (xent_ops.cross_entropy(z, target), z),
        (xent_ops.token_loss(z, target, nll), z),
        (xent_ops.token_log_probs(z, target).log_probs.sum(), z),
        (xent_ops.linear_token_log_probs(x, w, target).log_probs.sum(), x),
    ):
        (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
        assert torch.autograd.grad(grad.square().sum(), leaf)[0].abs().sum() > 0


# Options


def test_options_that_are_tensors():
    """A learned scale, or one a row."""
    x, w, y, v = heads()
    z, target, learned, of_rows = logits()[0], torch.arange(N), nn.Parameter(torch.ones(())), torch.ones(N, 1)
    scale = r"multiply the logits, or the hidden states of a head: in bfloat16 that rounds them once more.* \.4 %$"
    for value, error in ((learned, RuntimeError), (of_rows, TypeError)):
        for call, text in (
            (lambda s: xent_ops.linear_cross_entropy(x, w, target, logit_scale=s), scale),
            (lambda s: xent_ops.cross_entropy(z, target, logit_scale=s), scale),
            (lambda s: xent_ops.linear_distillation_loss(x, w, y, v, teacher_logit_scale=s), scale),
            (
                lambda s: xent_ops.linear_distillation_loss(x, w, y, v, temperature=s),
                "divide the logits, or the hidden",
            ),
            (lambda s: xent_ops.cross_entropy(z, target, softcap=s), r"softcap \* torch.tanh\(logits / softcap\)"),
            (lambda s: xent_ops.cross_entropy(z, target, lse_square_scale=s), "take lse of xent_ops.cross_entropy_out"),
        ):
            with pytest.raises(error, match=text):
                call(value)


def test_rounding_of_a_scale_that_is_multiplied_in():
    """What the error says: bfloat16 rounds by up to .4 %, and not at all for a power of two."""
    x = torch.randn(100_000).bfloat16()
    for scale, largest in ((1 / 0.7, 2**-8), (4.0, 0.0)):
        exact = x.double() * scale
        error = ((x * scale).double() - exact).abs() / exact.abs()
        assert largest / 2 <= error.max() <= largest


def test_reductions_of_other_libraries():
    z, y = logits()
    with pytest.raises(ValueError, match=r"^'batchmean' is not .* valid are .*: of rows .* it is .mean. here"):
        xent_ops.distillation_loss(z, y, reduction="batchmean")
    mean = xent_ops.distillation_loss(z, y)
    wanted = torch.nn.functional.kl_div(z.log_softmax(-1), y.softmax(-1), reduction="batchmean")
    torch.testing.assert_close(mean, wanted)


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_divisors(way):
    x, w, *_ = heads()
    call, target = xent_ops.linear_cross_entropy, torch.arange(N)
    if way == "compiled":
        call = torch.compile(call, backend="eager", fullgraph=True)
    for value, text in (
        (-3, "divisor must be a finite number above 0"),
        (float("nan"), "divisor must be a finite number above 0"),
        (float("inf"), "divisor must be a finite number above 0"),
        (0, r"divisor must be a finite number above 0.* \(num_items_in_batch is 0 where all labels"),
        (torch.tensor([3]), r"divisor has shape \(1,\); expected \(\), one number: pass divisor.squeeze\(\)"),
        (torch.tensor([3.0]), r"divisor has shape \(1,\); expected \(\), one number: pass divisor.squeeze\(\)"),
        (target, "as a target has: the order is"),
    ):
        with pytest.raises(ValueError if way == "eager" else Exception, match=text):
            call(x, w, target, reduction="sum", divisor=value)
    torch.testing.assert_close(call(x, w, target, reduction="sum", divisor=3), call(x, w, target, reduction="sum") / 3)


# Fields of results


def test_fields_by_other_names():
    z, target = logits()[0], torch.arange(N)
    top, stats = xent_ops.top_k(z, 3), xent_ops.token_log_probs(z, target)
    outputs = xent_ops.cross_entropy_outputs(z, target)
    for result, name, text in (
        (top, "indices", "TopK has no 'indices'; use ids"),
        (top, "values", "TopK has no 'values'; use log_probs"),
        (stats, "logprobs", "TokenLogProbs has no 'logprobs'; use log_probs"),
        (outputs, "indices", "CrossEntropyOutputs has no 'indices'; use predictions"),
        (stats, "probs", "TokenLogProbs has no 'probs'; it has log_probs, entropy and lse"),
    ):
        assert not hasattr(result, name)
        with pytest.raises(AttributeError, match=f"^{re.escape(text)}$"):
            getattr(result, name)
    with pytest.raises(
        AttributeError, match=r"^TokenDivergences has no 'total_variation'; use overlap, which is 1 - it"
    ):
        xent_ops.distillation_token_loss(*logits(), lambda divergences: divergences.total_variation)


# Functions of tokens


def closures(advantage):
    """Of hidden states and of logits, of one model and of two."""
    x, w, y, v = heads()
    z, t = logits()
    shape, target = advantage.shape, torch.arange(N).view(advantage.shape)
    x, y, z, t = (one.view(*shape, -1) for one in (x, y, z, t))
    return {
        "linear": lambda: xent_ops.linear_token_loss(x, w, target, lambda stats: -stats.log_probs * advantage),
        "logits": lambda: xent_ops.token_loss(z, target, lambda stats: -stats.log_probs * advantage.view(-1)),
        "two heads": lambda: xent_ops.linear_distillation_token_loss(x, w, y, v, lambda d: d.kl * advantage),
        "two logits": lambda: xent_ops.distillation_token_loss(z, t, lambda d: d.kl * advantage),
    }


@pytest.mark.parametrize("shape", [(2, 3), (3, 2), (N,), (1, N)], ids=str)
@pytest.mark.parametrize("form", closures(torch.ones(2, 3)))
def test_a_closure_over_all_tokens(form, shape):
    """Whether torch refuses its shape, or broadcasts it to a wrong one."""
    text = r"^fn closes over advantage, which has shape .* pass rows=\(advantage,\), and take it as a parameter, fn\(st"
    with pytest.raises(ValueError, match=text):
        closures(torch.ones(shape))[form]()


def test_other_shapes_and_tensors_of_a_closure():
    """They are not blamed."""
    x, w, *_ = heads()
    target, of_classes = torch.arange(N), torch.ones(V)
    with pytest.raises(ValueError, match=r"^fn returned shape \(2, 1\) for 2 tokens; .*: squeeze\(-1\) gives it$"):
        xent_ops.linear_token_loss(x, w, target, lambda stats: stats.log_probs.unsqueeze(-1))
    with pytest.raises(RuntimeError, match="The size of tensor a"):
        xent_ops.linear_token_loss(x, w, target, lambda stats: stats.log_probs * of_classes)
    with pytest.raises(ValueError, match=r"^fn returned shape \(\) for 2 tokens; .*must not add up"):
        xent_ops.linear_token_loss(x, w, target, lambda stats: stats.log_probs.sum())


def mul_(field):
    return field.mul_(2)


def setitem(field):
    field[field < -1] = 0.0
    return field


@pytest.mark.parametrize("write", [mul_, setitem])
def test_a_function_that_writes_to_a_field(write):
    x, w, y, v = heads()
    z, t = logits()
    ids = torch.arange(4 * N).view(N, 4)
    for call in (
        lambda: xent_ops.linear_token_loss(x, w, ids[:, 0], lambda stats: write(stats.log_probs)),
        lambda: xent_ops.linear_token_loss(x, w, ids, lambda stats: write(stats.log_probs).sum(-1)),
        lambda: xent_ops.token_loss(z, ids, lambda stats: write(stats.log_probs).sum(-1)),
        lambda: xent_ops.linear_distillation_token_loss(x, w, y, v, lambda d: write(d.kl)),
        lambda: xent_ops.distillation_token_loss(z, t, lambda d: write(d.overlap)),
    ):
        with pytest.raises(
            RuntimeError, match=r"^fn writes in place to stats\..*: make a new tensor instead, as stats"
        ):
            call()


def test_rows_beside_no_target():
    """The error names the input too: rows= may be given without a target."""
    x, w, y, v = heads()
    z, t = logits()
    for row, text in (
        (torch.ones(N, device="meta"), r"^rows\[0\] is on meta but input and target are on cpu"),
        (torch.ones(3), r"^rows\[0\] has shape \(3,\); expected \(6,\) in front, .* of the input's rows"),
    ):
        for call in (
            lambda row: xent_ops.linear_distillation_token_loss(x, w, y, v, lambda d, row: d.kl, rows=(row,)),
            lambda row: xent_ops.distillation_token_loss(z, t, lambda d, row: d.kl, rows=(row,)),
        ):
            with pytest.raises(ValueError, match=text):
                call(row)
