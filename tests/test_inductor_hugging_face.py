"""An unmodified Hugging Face causal language model, compiled, with our loss in the place of its own."""

import pytest
import torch
from rewriting import Rewriting

from xent_ops import inductor


@pytest.fixture(scope="module")
def causal_lm():
    """(a tiny Llama in bfloat16, inputs): the loss is the one that transformers picks, with its own upcast."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    assert model.loss_type == "ForCausalLM"
    tokens = torch.randint(0, 64, (2, 9))
    return model, tokens, tokens.masked_fill(torch.rand(2, 9) < 0.3, -100)


def _lm_step(model, call, tokens, labels, **kwargs):
    model.zero_grad()
    loss = call(input_ids=tokens, labels=labels, use_cache=False, **kwargs).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("accumulated", [False, True], ids=["mean", "num_items_in_batch"])
def test_hugging_face_causal_lm_is_equal(causal_lm, accumulated):
    """Everything but the loss runs the same eager kernels, so that equal means equal."""
    model, tokens, labels = causal_lm
    kwargs = {"num_items_in_batch": torch.tensor(20)} if accumulated else {}
    want = _lm_step(model, model, tokens, labels, **kwargs)
    backend = Rewriting()
    got = _lm_step(model, torch.compile(model, backend=backend, fullgraph=True), tokens, labels, **kwargs)
    assert [call.upcast_removed for call in inductor.last_report().replaced] == [True], str(inductor.last_report())
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.slow  # Inductor compiles the whole model with a C++ compiler
def test_hugging_face_causal_lm_through_inductor(causal_lm):
    model, tokens, labels = causal_lm
    want_loss, want = _lm_step(model, model, tokens, labels)
    compiled = torch.compile(model, options=inductor.options(), fullgraph=True)
    loss, grads = _lm_step(model, compiled, tokens, labels)
    (call,) = inductor.last_report().calls
    assert call.replaced and call.upcast_removed and "loss_utils.py" in call.where, str(inductor.last_report())
    torch.testing.assert_close(loss, want_loss, rtol=1e-3, atol=1e-3)
    for name, grad in grads.items():  # Inductor rounds the model's own activations to bfloat16 less often
        error = (grad - want[name]).float().norm() / want[name].float().norm()
        assert error < 0.02, name
