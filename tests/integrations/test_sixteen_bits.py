"""In bfloat16 loss and gradients with use_xent are no further from float64 than those of the code that it replaces.

One tensor replaces the hidden states, so both see the same operands of 16 bits. float64 of these is the judge. See
test_trl_distillation.py for the trainers that compare two models, test_megatron.py for Megatron.
"""

import pytest
import sixteen_bits
import torch
import torch.nn.functional as F

tiny = pytest.importorskip("tiny", reason="transformers is not installed")
import transformers  # noqa: E402

from xent_ops.integrations.transformers import use_xent  # noqa: E402

B, S, H, V = 4, 33, 64, 1000
SIZES = {"vocab_size": V, "hidden_size": H}
BERT = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
T5 = {"d_model": H, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}

# Kind: (model, the module that returns the hidden states, shift of the labels).
MODELS = {
    "causal": (lambda: tiny.make("Llama", **SIZES), "model.norm", 1),
    "masked": (
        lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **BERT, tie_word_embeddings=False)),
        "cls.predictions.transform",
        0,
    ),
    "seq2seq": (
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=V, **T5, dropout_rate=0.0, tie_word_embeddings=False)
        ),
        "decoder.final_layer_norm",
        0,
    ),
}


def with_hidden_states(model, name, hidden):
    model.get_submodule(name).register_forward_hook(lambda *_: hidden)


@pytest.mark.parametrize("options", sixteen_bits.OPTIONS, ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_models(kind, options):
    torch.manual_seed(0)
    make, name, shift = MODELS[kind]
    model = make().to(torch.bfloat16)
    hidden = torch.randn(B, S, H).bfloat16().requires_grad_()
    head = sixteen_bits.scaled(model.get_output_embeddings())
    with_hidden_states(model, name, hidden)
    ids = torch.randint(3, V, (B, S))
    labels = torch.where(torch.rand(B, S) < 0.3, -100, ids)

    def loss_of(logits):
        return F.cross_entropy(logits[:, : S - shift].flatten(0, 1), labels[:, shift:].flatten()).reshape(1)

    def run():
        return model(input_ids=ids, labels=labels).loss.reshape(1)

    sixteen_bits.assert_no_further(run, lambda: use_xent(model, **options), hidden, head, loss_of)


@pytest.mark.parametrize("options", sixteen_bits.OPTIONS, ids=str)
@pytest.mark.parametrize("kind", ["SFT", "DPO", "KTO", "GRPO", "RLOO"])
def test_trainers(kind, options, tmp_path):
    """The values that each loss of TRL is computed from, and gradients of their weighted sum."""
    for package in ("trl", "datasets"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    import trainers

    from xent_ops.integrations.trl import use_xent

    torch.manual_seed(0)
    trainer = trainers.make(kind, tmp_path)
    model = trainer.model.to(torch.bfloat16)
    model.lm_head, model.config.vocab_size = torch.nn.Linear(H, V, bias=False, dtype=torch.bfloat16), V
    head, hidden = sixteen_bits.scaled(model.lm_head), torch.randn(B, S, H).bfloat16().requires_grad_()
    with_hidden_states(model, "model.norm", hidden)
    labels = torch.randint(V, (B, S)).masked_fill(torch.rand(B, S) < 0.3, -100)
    counted, temperature = labels[:, 1:] != -100, trainer.args.temperature if kind in ("GRPO", "RLOO") else 1.0
    advantages = torch.ones(()) if kind == "SFT" else torch.randn(B, S - 1)  # SFT's loss is their plain sum

    def values_of(logits):
        log_p = (logits[:, :-1] / temperature).log_softmax(-1)
        found = log_p.gather(-1, labels[:, 1:].clamp(min=0).unsqueeze(-1)).squeeze(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        values = found, entropy if kind == "GRPO" else entropy.detach()
        return [torch.where(counted, value, 0.0) * advantages for value in values]

    def run():
        found = model(input_ids=labels.clamp(0, 9), labels=labels, fused_lm_head=True)
        entropy = found.get("entropy", torch.zeros(B, S - 1))
        return [found.log_probs * advantages, (entropy if kind == "GRPO" else entropy.detach()) * advantages]

    def stacked(values):
        wanted = values if "entropy" in outputs else values[:1]
        return torch.cat([value.flatten() for value in wanted])

    outputs = model(input_ids=labels.clamp(0, 9), labels=labels, fused_lm_head=True)
    sixteen_bits.assert_no_further(
        lambda: stacked(run()), lambda: use_xent(trainer, **options), hidden, head, lambda x: stacked(values_of(x))
    )
