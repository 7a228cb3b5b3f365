"""An unmodified Hugging Face causal language model, compiled, with our loss in place of its own."""

import pytest
import torch
import torch.nn.functional as F
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


# Each with its options, and with what the operator gets of them.
MODELS = {
    "Llama": ({}, None, 1.0),
    "Gemma2": ({"final_logit_softcapping": 3.0, "head_dim": 8}, 3.0, 1.0),
    "Granite": ({"logits_scaling": 8.0}, None, 1 / 8.0),
    "Cohere": ({"logit_scale": 0.0625}, None, 0.0625),
    "GPT2": ({}, None, 1.0),
}


def tiny(name, dtype):
    """(a model of random weights, tokens, labels)."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "vocab_size": 64}
    if name == "GPT2":
        config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=32, **tokens)
        model = transformers.GPT2LMHeadModel(config)
        model.loss_type = "ForCausalLM"  # as it falls back to, but without a warning, which would break the graph
    else:
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 32}
        config = getattr(transformers, f"{name}Config")(**sizes, **tokens, **MODELS[name][0])
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():  # logits large enough for the cap and the scale to show
            parameter.mul_(20.0 if parameter.dim() == 2 and parameter.shape[0] == 64 else 1.0)
    ids = torch.randint(3, 64, (2, 9))
    return model.to(dtype).eval(), ids, ids.masked_fill(torch.rand(2, 9) < 0.3, -100)


def step(model, call, ids, labels):
    model.zero_grad()
    loss = call(ids, labels)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("through", ["the pass alone", pytest.param("Inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name, linear", [("Gemma2", False), *((name, True) for name in MODELS)], ids=lambda case: str(case)
)
def test_a_model_whose_logits_are_not_returned(name, linear, through):
    """Its options in the report, its numbers those of eager float32; with the head, tied or not, whether transformers
    shifts the logits or pads the labels."""
    model, ids, labels = tiny(name, torch.float32)

    def loss_of(ids, labels):
        return model(input_ids=ids, labels=labels, use_cache=False).loss

    want, want_grads = step(model, loss_of, ids, labels)
    options = inductor.options(linear=linear) if through == "Inductor" else None
    how = {"backend": Rewriting(linear=linear)} if options is None else {"options": options}
    got, grads = step(model, torch.compile(loss_of, fullgraph=True, **how), ids, labels)
    (call,) = inductor.last_report().calls
    assert (call.replaced, call.head, call.softcap, call.logit_scale) == (True, linear, *MODELS[name][1:]), str(call)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    for key, grad in grads.items():
        largest = float(want_grads[key].abs().max())
        torch.testing.assert_close(grad, want_grads[key], rtol=1e-3, atol=1e-5 + 1e-4 * largest)


FORWARDS = {
    "BertForMaskedLM": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
    "T5ForConditionalGeneration": {"d_model": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8, "d_ff": 32},
}


@pytest.mark.parametrize("name", FORWARDS)
def test_a_forward_that_makes_its_loss(name):
    """Dynamo writes F.cross_entropy for its nn.CrossEntropyLoss, which the pass takes with the head in one graph."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    options = {"vocab_size": 64, "pad_token_id": 0, "decoder_start_token_id": 0, "dropout_rate": 0.0}
    model = kind(kind.config_class(**FORWARDS[name], **options)).eval()
    ids = torch.randint(3, 64, (2, 9))

    def loss_of(ids, labels):
        return model(input_ids=ids, labels=labels).loss

    want, want_grads = step(model, loss_of, ids, ids)
    got, grads = step(model, torch.compile(loss_of, backend=Rewriting(linear=True), fullgraph=True), ids, ids)
    (call,) = inductor.last_report().calls
    assert call.replaced and call.head, str(call)
    torch.testing.assert_close((got, grads), (want, want_grads), rtol=1e-4, atol=1e-5)


def test_the_head_of_a_model_that_returns_its_logits_stays(causal_lm):
    model, tokens, labels = causal_lm
    torch.compile(model, backend=Rewriting(linear=True), fullgraph=True)(tokens, labels=labels, use_cache=False)
    (call,) = inductor.last_report().calls
    assert call.replaced and not call.head and "logits is returned as well" in call.head_left


@pytest.mark.parametrize("name", MODELS)
def test_in_bfloat16(name):
    """The pass alone. The loss is that of the model's own bfloat16 logits in float64, before it rounds cap and scale."""
    model, ids, labels = tiny(name, torch.bfloat16)
    heads = []
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda module, args, output: heads.append(output.detach()))

    def loss_of(ids, labels):
        return model(input_ids=ids, labels=labels, use_cache=False).loss

    loss_of(ids, labels)
    _, softcap, scale = MODELS[name]
    exact = heads[0].double() * scale
    exact = exact if softcap is None else softcap * torch.tanh(exact / softcap)
    want = F.cross_entropy(exact[:, :-1].reshape(-1, 64), labels[:, 1:].reshape(-1))
    head._forward_hooks.clear()
    got = torch.compile(loss_of, backend=Rewriting(), fullgraph=True)(ids, labels)
    (call,) = inductor.last_report().calls
    assert (call.replaced, call.upcast_removed, call.softcap, call.logit_scale) == (True, True, softcap, scale)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["Gemma2", "Granite", "Cohere"])
def test_scaled_logits_that_are_returned_stay_with_inductor(name):
    model, ids, labels = tiny(name, torch.float32)
    backend = Rewriting()
    torch.compile(model, backend=backend, fullgraph=True)(input_ids=ids, labels=labels, use_cache=False)
    (call,) = inductor.last_report().calls
    assert not call.replaced and "is returned as well" in call.why, str(call)
    assert F.cross_entropy in backend.targets() and not any("xent" in str(target) for target in backend.targets())
