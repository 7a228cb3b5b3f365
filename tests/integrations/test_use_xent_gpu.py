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
