"""``output_processor``: losses of hidden states as the hook of a GPTModel of Megatron-Core."""

import doctest
import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import xent_ops

pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ImportError)
import megatron_cases as cases
import megatron_processors as processors
from helpers.graphs import CompileCounterWithBackend
from megatron.core.models.gpt import GPTModel
from megatron_models import H, batches, gradients, make, one_rank, one_step  # noqa: F401

from xent_ops.integrations.megatron import output_processor, use_xent

if "output_processor" not in inspect.signature(GPTModel.forward).parameters:
    pytest.skip("Megatron-Core before 0.18", allow_module_level=True)


@pytest.mark.parametrize("used", [False, True], ids=["alone", "use_xent"])
@pytest.mark.parametrize("options", [
    {}, {"tied": True}, {"use_mup": True, "mup_base_hidden_size": H // 4},
], ids=["plain", "tied", "mup"])  # fmt: skip
def test_values(options, used):
    batch, model = next(batches()), make(**options)
    if used:
        use_xent(model, loss_mask=True)
    cases.assert_close(processors.by_processors(model, batch), processors.by_logits(make(**options), batch), 1e-5)


def test_ranks(pool, device):
    pool(2, device).run(processors.over_ranks)


def by_the_layer(*, hidden_states, output_layer, output_weight, labels, compute_language_model_loss, **others):
    """A hook that takes logits and their loss itself."""
    logits, _ = output_layer(hidden_states, weight=output_weight)
    return compute_language_model_loss(labels, logits)


@pytest.mark.parametrize("processor", [
    by_the_layer, output_processor(xent_ops.linear_cross_entropy, reduction="none"),
], ids=["any", "ours"])  # fmt: skip
def test_multi_token_prediction(processor):
    """With use_xent the further heads are replaced, and the last hidden states are the hook's."""
    want = one_step(make(mtp_num_layers=2))
    for used in (False, True):
        model = make(mtp_num_layers=2)
        if used:
            use_xent(model, loss_mask=True)
        cases.assert_close(one_step(model, output_processor=processor), want)


def test_by_position():
    """The hook is an argument like any other."""
    inputs, labels, _ = next(batches())
    model, processor = make(), output_processor(xent_ops.linear_token_log_probs)
    use_xent(model)
    names = list(inspect.signature(model.forward).parameters)
    given = {**dict(zip(names, inputs, strict=False)), "labels": labels, "output_processor": processor}
    assert torch.equal(model(**given).log_probs, model(*inputs, labels=labels, output_processor=processor).log_probs)


def test_products():
    """Three for a loss, as a step of Megatron's own loss."""
    loss = output_processor(xent_ops.linear_token_loss, fn=processors.ppo)
    (inputs, labels, mask), flops = next(batches()), []
    for names in ({}, {"output_processor": loss, "output_processor_context": {"rows": (mask, mask)}}):
        model = make()
        with FlopCounterMode(display=False) as counter:
            model(*inputs, labels=labels.clamp(min=0), **names).sum().backward()
        flops.append(counter.get_total_flops())
    assert flops[0] == flops[1]


def test_compiled():
    want, model, backend = make(), make(), CompileCounterWithBackend("aot_eager")
    processor = output_processor(xent_ops.linear_cross_entropy, reduction="none")
    found = one_step(torch.compile(model, backend=backend), output_processor=processor)
    assert cases.our_operators(backend)
    cases.assert_close((found[0], gradients(model)), one_step(want))


def test_hooks_of_frameworks():
    """The code of docs/integrations.md with the arguments that verl, NeMo-RL and SkyRL pass."""
    page = Path(__file__).parents[2] / "docs" / "integrations.md"
    (code,) = re.findall(r"^```py\n((?:(?!^```).)*?def fused_output_processor.*?)^```$", page.read_text(), re.S | re.M)
    names = {"xent_ops": xent_ops, "output_processor": output_processor, "CausalLMOutputForPPO": SimpleNamespace}
    exec(code, names)
    inputs, labels, mask = batch = next(batches())
    (log_probs, entropy, _), _ = processors.by_logits(make(), batch)
    hook = {"output_processor": names["fused_output_processor"]}
    hook["output_processor_context"] = SimpleNamespace(temperature=0.7)
    found = make()(*inputs, labels=labels, **hook)
    cases.assert_close((found.log_probs, found.entropy), (log_probs, entropy), 1e-5)

    shifted, context = inputs[0].roll(-1, -1), {"output_processor_context": {"logit_scale": 1 / 0.7}}
    (log_probs, _, _), _ = processors.by_logits(make(), (inputs, shifted, mask))
    found = make()(*inputs, labels=inputs[0], output_processor=names["nemo_log_probs"], **context)
    cases.assert_close(found, log_probs[:, :-1], 1e-5)
    found = make()(*inputs, labels=shifted, output_processor=names["skyrl_log_probs"], **context)
    cases.assert_close(found, log_probs, 1e-5)


def test_what_is_refused():
    (inputs, labels, _), processor = next(batches()), output_processor(xent_ops.linear_token_log_probs)
    with pytest.raises(TypeError, match=r"expected labels in the call of the model, got None"):
        make()(*inputs, output_processor=processor)
    with pytest.raises(TypeError, match=r"output_processor_context must be a mapping or None, got float"):
        make()(*inputs, labels=labels, output_processor=processor, output_processor_context=0.7)
    with pytest.raises(TypeError, match=r"expected a loss of hidden states, such as linear_token_log_probs, got <func"):
        output_processor(xent_ops.cross_entropy)
    model = make()
    model.output_layer.gtp_remat_size = 2
    with pytest.raises(ValueError, match=r"output_layer has its weight in 2 parts"):
        model(*inputs, labels=labels, output_processor=processor)


def test_the_example_runs():
    inputs, labels, _ = next(batches())
    names = dict(zip(("tokens", "positions", "attention_mask"), inputs, strict=True))
    names |= {"xent_ops": xent_ops, "output_processor": output_processor, "model": make(), "labels": labels}
    test = doctest.DocTestParser().get_doctest(output_processor.__doc__, names, "", None, None)
    assert test.examples and not doctest.DocTestRunner(verbose=False).run(test).failed
