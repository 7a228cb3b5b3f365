"""use_xent with peft: adapters anywhere, and on the head, against the untouched PeftModel."""

import pytest
import torch

tiny = pytest.importorskip("tiny", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

from xent_ops.integrations import heads  # noqa: E402
from xent_ops.integrations.transformers import remove_xent, use_xent  # noqa: E402


def adapted(name="Llama", dtype=torch.float32, autocast_adapter_dtype=True, **options):
    """A PeftModel whose adapters are not zero."""
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "lm_head"], "task_type": "CAUSAL_LM"} | options
    model = peft.get_peft_model(
        tiny.make(name, dtype), peft.LoraConfig(**options), autocast_adapter_dtype=autocast_adapter_dtype
    )
    model.train()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.normal_(0.0, 0.5)
    return model


def compare(model, way="eager", adapters=("default",), rtol=1e-5):
    ids, labels = tiny.batch()
    torch.manual_seed(1)  # of a dropout's mask
    want = tiny.step(model, model, ids, labels)
    report = use_xent(model)
    assert report.adapters == list(adapters)
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if way == "compiled" else model
    torch.manual_seed(1)
    got = tiny.step(model, call, ids, labels)
    tiny.assert_same(got, want, rtol)
    assert got[0].logits is None
    return got, want


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_lora_on_the_head(way):
    got, _ = compare(adapted(), way)
    assert sum("lm_head.lora" in name for name in got[2]) == 2  # A and B; the base weight is frozen


def test_the_delta_counts():
    """Without its adapter the head has another loss: what the base weight alone would give."""
    model = adapted()
    ids, labels = tiny.batch()
    use_xent(model)
    loss = model(input_ids=ids, labels=labels).loss
    with torch.no_grad():
        model.base_model.model.lm_head.lora_B["default"].weight.zero_()
    assert abs(model(input_ids=ids, labels=labels).loss - loss) > 0.05 * loss


def test_lora_elsewhere():
    compare(adapted(target_modules=["q_proj"]), adapters=())


def test_lora_below_a_softcap():
    compare(adapted("Gemma2"))


@pytest.mark.parametrize("name", ["Phi", "Llama"])  # with a bias of the head, and without one
def test_lora_with_biases(name):
    model = adapted(name, lora_bias=True)
    compare(model)
    remove_xent(model)
    model.add_adapter("other", peft.LoraConfig(lora_bias=True, target_modules=["lm_head"], task_type="CAUSAL_LM"))
    model.base_model.set_adapter(["default", "other"])
    compare(model, adapters=("default", "other"))


def test_dropout_draws_the_same_mask():
    """The adapter's input is computed by its own modules, dropout included."""
    got, _ = compare(adapted(lora_dropout=0.5))
    assert got[1] > 0


def test_two_adapters_at_once():
    model = adapted()
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM"))
    model.base_model.set_adapter(["default", "other"])
    with torch.no_grad():
        model.base_model.model.lm_head.lora_B["other"].weight.normal_()
    compare(model, adapters=("default", "other"))


def test_adapters_that_are_off_or_merged():
    model = adapted()
    ids, labels = tiny.batch()
    use_xent(model)
    on = model(input_ids=ids, labels=labels).loss.detach()
    with model.disable_adapter():
        off = model(input_ids=ids, labels=labels).loss.detach()
    model.merge_adapter()
    merged = model(input_ids=ids, labels=labels).loss.detach()
    model.unmerge_adapter()
    remove_xent(model)
    torch.testing.assert_close(model(input_ids=ids, labels=labels).loss.detach(), on, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(merged, on, rtol=1e-5, atol=0.0)
    with model.disable_adapter():
        torch.testing.assert_close(model(input_ids=ids, labels=labels).loss.detach(), off, rtol=1e-5, atol=0.0)
    assert abs(on - off) > 0.05 * on


def test_a_small_delta_survives_bfloat16():
    """W + s B A, rounded to bfloat16, would lose a delta below half a unit of W's last bit."""
    head = adapted(dtype=torch.bfloat16, autocast_adapter_dtype=False).base_model.model.lm_head
    hidden = torch.ones(3, 16, dtype=torch.bfloat16)
    base, down, up = head.base_layer.weight, head.lora_A["default"].weight, head.lora_B["default"].weight
    with torch.no_grad():
        base.copy_(torch.tensor([1.0, -1.0]).repeat(8))  # its product with hidden is 0
        down.fill_(1.0)
        up.copy_(torch.linspace(1e-6, 1e-4, 64)[:, None])
    delta = 2 * up @ down
    assert torch.equal(base + delta, base) and delta.any()
    input, weight, bias = heads.product(head, hidden)
    assert bias is None and weight.dtype == torch.bfloat16
    torch.testing.assert_close(
        input.double() @ weight.double().T, hidden.double() @ delta.double().T, rtol=1e-2, atol=0.0
    )


def test_a_head_that_is_trained_as_a_whole():
    model = adapted(target_modules=["q_proj"], modules_to_save=["lm_head"])
    got, _ = compare(model, adapters=())
    assert any("lm_head.modules_to_save" in name for name in got[2])


def test_remove_xent_from_a_peft_model():
    model = adapted()
    ids, labels = tiny.batch()
    want = model(input_ids=ids, labels=labels)
    use_xent(model)
    remove_xent(model)
    got = model(input_ids=ids, labels=labels)
    assert torch.equal(got.loss, want.loss) and torch.equal(got.logits, want.logits)


def test_dora_on_the_head_is_refused():
    with pytest.raises(TypeError, match="'default' is a DoraLinearVariant; expected plain LoRA"):
        use_xent(adapted(use_dora=True))


@pytest.mark.parametrize(
    "options",
    [{"use_dora": True}, {"target_modules": ["q_proj"], "target_parameters": ["lm_head.weight"]},
     {"target_modules": ["q_proj"], "trainable_token_indices": {"lm_head": [0, 1]}}],
    ids=["DoRA", "parameters", "tokens"],
)  # fmt: skip
def test_what_to_do_for_a_head_that_is_refused(options):
    with pytest.raises(TypeError, match=r"head.*: name the head in modules_to_save, .* leave it out of target_modules"):
        use_xent(adapted(**options))


def test_prompt_tuning():
    """peft puts -100 before the labels, one for each of its tokens."""
    config = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    compare(peft.get_peft_model(tiny.make(), config).train(), adapters=())


def test_peft_after_use_xent():
    model = tiny.make()
    use_xent(model)
    ids, labels = tiny.batch()
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")).train()
    got = tiny.step(wrapped, wrapped, ids, labels)
    assert got[0].logits is None
    remove_xent(wrapped)
    tiny.assert_same(got, tiny.step(wrapped, wrapped, ids, labels))
    use_xent(wrapped)
    model.add_adapter(peft.LoraConfig(target_modules=["lm_head"]), "on the head")
    with pytest.raises(RuntimeError, match="the head is not the one that use_xent has seen"):
        wrapped(input_ids=ids, labels=labels)
