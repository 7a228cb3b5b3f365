"""use_xent on a GPU: loss and gradients of the untouched model, and the memory of its logits."""

import itertools

import pytest
import torch

tiny = pytest.importorskip("tiny", reason="transformers is not installed")

import transformers  # noqa: E402

from xent_ops.integrations.transformers import use_xent  # noqa: E402

pytestmark = pytest.mark.gpu


# Compiled, Mixtral's experts want to know a number on the device (transformers 5.17, torch 2.11).
@pytest.mark.parametrize("compiled, name", [(False, "Mixtral"), *itertools.product([False, True], ["Llama", "Gemma2"])])
def test_equal_to_the_untouched_model(compiled, name):
    model = tiny.make(name).cuda()
    ids, labels = (one.cuda() for one in tiny.batch())
    want = tiny.step(model, model, ids, labels)
    use_xent(model, skip_ignored=True)
    call = torch.compile(model, fullgraph=True) if compiled else model
    tiny.assert_same(tiny.step(model, call, ids, labels), want, rtol=1e-4)


def test_memory_without_logits():
    """Logits of 8192 tokens and 32000 classes are 500 MiB in bfloat16, and the untouched loss holds float32 copies."""
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16).train()
    ids = torch.randint(0, 32000, (8, 1024), device="cuda")

    def peak():
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(input_ids=ids, labels=ids).loss.backward()
        return (torch.cuda.max_memory_allocated() - before) / 2**20

    untouched = peak()
    use_xent(model)
    assert untouched > 1500 and peak() < 700, untouched


SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4}
ENCODED = {"d_model": 256, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4}
ENCODED |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 512, "decoder_ffn_dim": 512}
KINDS = {
    "LlamaForCausalLM": SIZES,
    "BertForMaskedLM": SIZES | {"max_position_embeddings": 1024},
    "XLNetLMHeadModel": {"d_model": 256, "n_layer": 1, "n_head": 4, "d_inner": 512, "dropout": 0.0},
    "T5ForConditionalGeneration": {"d_model": 256, "d_kv": 64, "d_ff": 512, "num_layers": 1, "num_heads": 4},
    "BartForConditionalGeneration": ENCODED | {"max_position_embeddings": 1024},
    "WhisperForConditionalGeneration": ENCODED | {"max_source_positions": 100, "max_target_positions": 1024},
    "LlavaForConditionalGeneration": {"image_token_id": 31999, "image_token_index": 31999},
}


def of_kind(name):
    """(a model in bfloat16, a batch of 8192 tokens and 32000 classes)."""
    kind, tokens = getattr(transformers, name), {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    ids = torch.randint(3, 31000, (8, 1024), device="cuda")
    call = {"input_ids": ids, "labels": ids.clone()}
    options = KINDS[name] | {"vocab_size": 32000, "decoder_start_token_id": 1} | tokens
    if name.startswith("Llava"):
        text = transformers.LlamaConfig(vocab_size=32000, **SIZES, **tokens)
        options = KINDS[name] | {"text_config": text, "vision_feature_layer": -1}
        options["vision_config"] = transformers.CLIPVisionConfig(image_size=32, patch_size=8, **SIZES)
        ids[:, :16] = 31999
        call["labels"][:, :16] = -100
        call["pixel_values"] = torch.randn(8, 3, 32, 32, device="cuda", dtype=torch.bfloat16)
    torch.manual_seed(0)
    config = kind.config_class(**options)
    for dropout in [key for key in vars(config) if "dropout" in key and isinstance(getattr(config, key), float)]:
        setattr(config, dropout, 0.0)
    model = kind(config).to("cuda", torch.bfloat16).train()
    if name.startswith("Whisper"):
        call["input_features"] = torch.randn(8, 80, 200, device="cuda", dtype=torch.bfloat16)
        del call["input_ids"]
    return model, call


@pytest.mark.parametrize("name", KINDS)
def test_one_class_of_each_kind_in_bfloat16(name):
    """`pytest -s` prints losses, the difference of the gradients, and peaks beyond what was allocated before, in MiB."""
    (model, call), found = of_kind(name), []
    for used in (False, True):
        if used:
            use_xent(model)
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = model(**call).loss
        loss.backward()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        grads = torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None]).cpu()
        found.append((float(loss), grads, peak))
    (want, want_grads, untouched), (got, grads, peak) = found
    error = float((grads - want_grads).norm() / want_grads.norm())
    print(f"\n{name}: loss {want:.5f} and {got:.5f}, gradients {error:.1e}, peak {untouched:.0f} and {peak:.0f} MiB")
    assert abs(got - want) <= 1e-2 * want and error <= 3e-2 and peak < 0.6 * untouched
