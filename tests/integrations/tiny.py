"""Causal language models of transformers with random weights, as small as they get, and how their steps are compared."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

V = 64
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "vocab_size": V}
SIZES = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
GPT2_SIZES = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}

# Name: (configuration's class, its options, softcap, logit_scale).
MODELS = {
    "Llama": ("LlamaConfig", SIZES, None, 1.0),
    "Mistral": ("MistralConfig", SIZES, None, 1.0),
    "Qwen2": ("Qwen2Config", SIZES | {"tie_word_embeddings": True}, None, 1.0),
    "Qwen3": ("Qwen3Config", SIZES | {"head_dim": 8}, None, 1.0),
    "Gemma2": ("Gemma2Config", SIZES | {"final_logit_softcapping": 3.0, "head_dim": 8}, 3.0, 1.0),
    "Gemma3": ("Gemma3TextConfig", SIZES | {"head_dim": 8}, None, 1.0),
    "Gemma3 with a softcap": ("Gemma3TextConfig", SIZES | {"final_logit_softcapping": 5.0, "head_dim": 8}, 5.0, 1.0),
    "RecurrentGemma": (
        "RecurrentGemmaConfig",
        SIZES | {"num_hidden_layers": 3, "lru_width": 16, "attention_window_size": 8},
        30.0,
        1.0,
    ),
    "Granite": ("GraniteConfig", SIZES | {"logits_scaling": 8.0}, None, 1 / 8.0),
    "HyperCLOVAX": ("HyperCLOVAXConfig", SIZES | {"logits_scaling": 0.125}, None, 0.125),
    "Cohere": ("CohereConfig", SIZES | {"logit_scale": 0.0625}, None, 0.0625),
    "Mixtral": ("MixtralConfig", SIZES | {"num_local_experts": 2, "output_router_logits": True}, None, 1.0),
    "OLMo2": ("Olmo2Config", SIZES, None, 1.0),
    "Phi": ("PhiConfig", SIZES, None, 1.0),  # a head with a bias
    "GPT-NeoX": ("GPTNeoXConfig", SIZES, None, 1.0),
    "GPT-2": ("GPT2Config", GPT2_SIZES, None, 1.0),
}


def make(name="Llama", dtype=torch.float32, **options):
    """The model in training mode, without dropout, its logits large enough for a softcap or a scale to show."""
    kind, sizes, *_ = MODELS[name]
    config = getattr(transformers, kind)(**(sizes | TOKENS | options))
    for dropout in [key for key in vars(config) if "dropout" in key or key.endswith("pdrop")]:
        setattr(config, dropout, 0.0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20.0)
    return model.to(dtype).train()


def batch(rows=2):
    """(tokens, labels), a third of these ignored."""
    ids = torch.randint(3, V, (rows, 9))
    return ids, ids.masked_fill(torch.rand(rows, 9) < 0.3, -100)


def step(model, call, ids, labels, **options):
    """(output, loss, gradients by name) of one training step."""
    model.zero_grad()
    output = call(input_ids=ids, labels=labels, **options)
    loss = output[0] if isinstance(output, tuple) else output.loss
    loss.backward()
    return output, loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(got, want, rtol=1e-5):
    """Losses and gradients of two steps, each gradient in norm."""
    (_, loss, grads), (_, want_loss, want_grads) = got, want
    torch.testing.assert_close(loss, want_loss, rtol=rtol, atol=0.0)
    assert grads.keys() == want_grads.keys()
    for name, grad in grads.items():
        error, norm = (grad - want_grads[name]).norm(), want_grads[name].norm()
        assert error <= rtol * norm + 1e-8, f"{name}: {float(error):.2e} of {float(norm):.2e}"
