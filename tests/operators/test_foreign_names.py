"""Names that other libraries give to our functions and arguments: the error says which is ours."""

import inspect
import re

import pytest
import torch
import torch.nn.functional as F

import xent_ops
from xent_ops.ops import foreign_names

V, H = 9, 5


def problem():
    return torch.randn(6, H), torch.randn(V, H), torch.arange(6)


def parameters():
    """Of each public function and class, and of inductor.options."""
    modules = (xent_ops, xent_ops.distributed)
    found = [getattr(module, name) for module in modules for name in module.__all__] + [xent_ops.inductor.options]
    return [set(inspect.signature(one).parameters) for one in found if inspect.isfunction(one) or inspect.isclass(one)]


def test_arguments_by_other_names():
    """As Liger-Kernel, torch and trainers call them: the error names the argument that there is."""
    x, w, t = problem()
    logits, fn = F.linear(x, w), lambda stats: -stats.log_probs
    z_loss = r"add factor \* stats.lse \*\* 2 in fn$"
    for call, name, text in (
        (lambda **o: xent_ops.cross_entropy(logits, t, **o), "z_loss", "pass lse_square_scale=, its factor$"),
        (lambda **o: xent_ops.cross_entropy(logits, t, **o), "temperature", "pass logit_scale=, one over it$"),
        (lambda **o: xent_ops.linear_cross_entropy(x, w, t, **o), "bias", "pass linear_bias=$"),
        (lambda **o: xent_ops.linear_cross_entropy(x, w, t, **o), "num_items_in_batch", 'pass divisor=, .*"sum"$'),
        (lambda **o: xent_ops.linear_token_loss(x, w, t, fn, **o), "z_loss", z_loss),
        (lambda **o: xent_ops.token_loss(logits, t, fn, **o), "lse_square_scale", z_loss),
        (lambda **o: xent_ops.distillation_loss(logits, logits, **o), "alpha", "it has input, teacher_input, target, "),
        (lambda **o: xent_ops.token_log_probs(logits, t, **o), "reduction", "it has input, target, ignore_index, "),
        (lambda **o: xent_ops.LinearCrossEntropyLoss(H, V, **o), "weight", "pass class_weight=, .* tied_weight="),
        (lambda **o: xent_ops.CrossEntropyLoss(**o), "size_average", "pass reduction=$"),
        (lambda **o: xent_ops.cross_entropy(logits, t, **o), "divisor", 'divide the loss of reduction="sum" by it$'),
        (lambda **o: xent_ops.LinearCrossEntropyLoss(H, V, **o), "divisor", "pass divisor= to its call$"),
        (lambda **o: xent_ops.CrossEntropyLoss(**o), "num_items_in_batch", 'divide the loss of reduction="sum" by it$'),
        (lambda **o: xent_ops.cross_entropy(logits, t, **o), "return_z_loss", "cross_entropy_outputs .* have z_loss$"),
        (lambda **o: xent_ops.inductor.options(**o), "mode", "pass base=, the name of the mode$"),
        (lambda **o: xent_ops.linear_cross_entropy(x, w, t, **o), "bias_shard", "pass linear_bias=$"),
    ):
        with pytest.raises(TypeError, match=rf"\(\) got an unexpected keyword argument '{name}'; {text}"):
            call(**{name: 0.5})
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'fn'$"):
        xent_ops.token_loss(logits, t, reduction="sum")
    with pytest.raises(Exception, match="lse_square_scale=, its factor"):
        step = torch.compile(lambda x, t: xent_ops.cross_entropy(x, t, z_loss=1e-4), backend="eager", fullgraph=True)
        step(logits, t)


def test_every_entry_is_of_use():
    """A function has the parameter that is named, and not the foreign one."""
    all_parameters = parameters()
    for name, advice in foreign_names.ARGUMENTS.items():
        for parameter in advice:
            assert any(parameter in has and name not in has for has in all_parameters), (name, parameter)


def test_labels_masks_and_groups():
    x, w, t = problem()
    logits, teacher = F.linear(x, w), torch.randn(6, 20)
    linear, ranks = xent_ops.linear_cross_entropy, xent_ops.distributed.vocab_parallel_cross_entropy
    distillation = xent_ops.linear_distillation_token_loss
    for call, name, text in (
        (lambda **o: linear(x, w, **o), "labels", r"pass target=, .*labels\[:, 1:\] of "),
        (lambda **o: linear(x, w, **o), "targets", "pass target=$"),
        (lambda **o: linear(x, w, t, **o), "mask", r".*target.masked_fill\(~mask, -100\)$"),
        (lambda **o: linear(x, w, t, **o), "process_group", r"pass shard=xent_ops.distributed.Shard\("),
        (lambda **o: linear(x, w, t, **o), "group", r"pass shard=xent_ops.distributed.Shard\("),
        (lambda **o: ranks(logits, t, num_classes=V, **o), "process_group", "pass group=$"),
        (lambda **o: xent_ops.distillation_loss(logits, logits, **o), "T", "pass temperature=$"),
        (lambda **o: xent_ops.cross_entropy(logits, t, **o), "T", "pass logit_scale=, one over it$"),
        (lambda **o: distillation(x, w, teacher, teacher, len, **o), "t2d", r"pass classes=, .*t2d.nonzero\(\)"),
        (lambda **o: distillation(x, w, teacher, teacher, len, **o), "d2t", r"pass classes=, .*torch.arange\(len\(d2t\)"),
        (lambda **o: xent_ops.top_k_distillation_loss(logits, t, x, **o), "mask", r".*ids.masked_fill\(~mask\[..., None\]"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=rf"\(\) got an unexpected keyword argument '{name}'; {text}"):
            call(**{name: t})


@pytest.mark.parametrize("name", foreign_names.FUNCTIONS)
def test_functions_by_other_names(name):
    """The error names functions that exist, and calls them with arguments that they have."""
    assert not hasattr(xent_ops, name)
    with pytest.raises(AttributeError, match=f"^module 'xent_ops' has no attribute '{name}'; use xent_ops[.]") as error:
        getattr(xent_ops, name)
    text = str(error.value).split("; use xent_ops.")[1]
    for function, arguments in re.findall(r"([a-z_.]+\w)\(([^)]*)\)", text):
        ours, at = xent_ops, function.split(".")
        for part in at:
            ours = getattr(ours, part)
        given = [None if "=" in one else one for one in arguments.split(", ")]
        named = {one.split("=")[0]: None for one in arguments.split(", ") if "=" in one}
        inspect.signature(ours).bind(*[one for one in given if one], **named)


def test_a_name_that_nobody_has():
    with pytest.raises(AttributeError, match=r"^module 'xent_ops' has no attribute 'token_logprobs'$") as error:
        xent_ops.token_logprobs  # noqa: B018
    assert error.value.name == "token_logprobs"  # with these, Python says: Did you mean: 'token_log_probs'?
    assert error.value.obj is xent_ops
