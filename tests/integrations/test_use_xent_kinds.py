"""use_xent on a model of each kind: masked, encoder and decoder, speech, images, hybrids; what is as for causal models."""

import copy

import pytest
import torch
import torch.nn.functional as F

tiny = pytest.importorskip("tiny", reason="transformers is not installed")
import transformers  # noqa: E402

from tools.models import compare  # noqa: E402
from tools.models.configs import VARIANTS  # noqa: E402
from xent_ops import inductor  # noqa: E402
from xent_ops.inductor.rewriting.graph_pass import Heads, ReplaceCrossEntropy  # noqa: E402
from xent_ops.integrations.transformers import remove_xent, use_xent  # noqa: E402

# The mapping of each class. The other classes are those of `python -m tools.models`, docs/models.md.
QUICK = {
    "BertForMaskedLM": "masked",
    "T5ForConditionalGeneration": "seq2seq",
    "WhisperForConditionalGeneration": "speech",
}
CLASSES = QUICK | {
    "LlamaForCausalLM": "causal",
    "ModernBertForMaskedLM": "masked",  # calls loss_function, which shifts nothing
    "EsmForMaskedLM": "masked",  # adds a bias to its logits
    "BartForConditionalGeneration": "seq2seq",  # the same
    "NllbMoeForConditionalGeneration": "seq2seq",
    "MoonshineForConditionalGeneration": "speech",
    "BartForCausalLM": "causal",  # these have CrossEntropyLoss in their forward
    "XLNetLMHeadModel": "causal",
    "TrOCRForCausalLM": "causal",
    "BambaForCausalLM": "causal",
    "RecurrentGemmaForCausalLM": "causal",  # caps by F.tanh
    "LlavaForConditionalGeneration": "image-text",
    "Qwen2_5_VLForConditionalGeneration": "image-text",
    "VisionEncoderDecoderModel": "image-text",
    "UdopForConditionalGeneration": "image-text",  # these two want images or boxes: their first call decides
    "GitForCausalLM": "causal",
}


def built(name):
    """(model, arguments)."""
    for variant in VARIANTS:
        try:
            return compare.build(getattr(transformers, name), CLASSES[name], variant)
        except Exception as error:
            last = error
    raise last


def _marked(names):
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", _marked(CLASSES))
def test_equal(name):
    row = compare.of_model(*built(name))
    assert row["state"] == "equal", row


ONE_A_KIND = ["BertForMaskedLM", "T5ForConditionalGeneration", "WhisperForConditionalGeneration", "XLNetLMHeadModel"]
ONE_A_KIND += ["LlavaForConditionalGeneration"]


def steps(model, call, used=None, **options):
    """Losses and gradients without and with use_xent. ``used`` is called in place of the model then."""
    _, loss, grads = compare.step(model, call)
    report = use_xent(model, **options)
    output, found_loss, found = compare.step(used or model, call) if used is None else _step(model, used, call)
    tiny.assert_same((None, found_loss, found), (None, loss, grads))
    return output, report


def _step(model, used, call):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    output = used(**call)
    loss = output[0] if isinstance(output, tuple) else output.loss
    loss.backward()
    return output, loss.detach(), {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.slow  # tracing takes 5 s and more
@pytest.mark.parametrize("name", ONE_A_KIND)
def test_compiled(name):
    """Where the forward makes its own CrossEntropyLoss, the graph breaks there: Dynamo takes nothing but a tensor."""
    model, call = built(name)
    steps(model, call, torch.compile(model, backend="aot_eager"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ModernBertForMaskedLM", "LlavaForConditionalGeneration"])
def test_one_graph(name):
    """The classes that call loss_function are one graph, as causal models are."""
    model, call = built(name)
    steps(model, call, torch.compile(model, backend="aot_eager", fullgraph=True))


def the_pass(module, inputs):
    """A backend for torch.compile: what xent_ops.inductor.options(linear=True) adds to Inductor's."""
    ReplaceCrossEntropy(None, Heads(True, None))(module.graph)
    module.recompile()
    return module


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ONE_A_KIND[:-1], "BartForConditionalGeneration", "RecurrentGemmaForCausalLM"])
def test_one_graph_by_the_pass(name):
    """Dynamo writes a CrossEntropyLoss and F.tanh into the graph. Its error has the line to write, which is right."""
    model, call = built(name)
    _, loss, grads = compare.step(model, call)
    try:
        torch.compile(model, backend="eager", fullgraph=True)(**call)
    except torch._dynamo.exc.Unsupported:
        if torch.__version__ >= "2.12":
            raise
        pytest.skip("torch 2.11 makes no graph of the untouched Whisper and BART of transformers 5.17")
    use_xent(model)
    with pytest.raises(torch._dynamo.exc.Unsupported) as error:
        torch.compile(model, backend="aot_eager", fullgraph=True)(**call)
    assert "call remove_xent(model) and compile a function that returns the loss alone with" in str(error.value)
    assert "options=xent_ops.inductor.options(linear=True)" in str(error.value)
    remove_xent(model)
    inductor.rewriting.report.clear()
    loss_of = torch.compile(lambda **call: model(**call).loss, backend=the_pass, fullgraph=True)
    _, found_loss, found = _step(model, lambda **call: (loss_of(**call),), call)
    tiny.assert_same((None, found_loss, found), (None, loss, grads))
    assert "replaced with the head" in str(inductor.last_report())


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_A_KIND)
def test_tuples(name):
    model, call = built(name)
    (_, logits, *_), _ = steps(model, call, lambda **call: model(**call, return_dict=False))
    assert logits.shape[-2:] == (0, model.get_output_embeddings().out_features)


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_A_KIND)
def test_evaluation(name):
    """Predictions at each label, and their accuracy."""
    model, call = built(name)
    model.eval()
    with torch.no_grad():
        want = model(**call)
        use_xent(model, in_eval=True)
        found = model(**call)
        labels = call["labels"]
    torch.testing.assert_close(found.loss, want.loss, rtol=1e-5, atol=0.0)
    assert found.logits is None and found.predictions.shape == labels.shape
    shifted = labels
    if name.startswith("Llava"):  # the only one of them whose loss shifts
        shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
    best = want.logits.argmax(-1)
    assert torch.equal(found.predictions, best.masked_fill(shifted == -100, -1))


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_A_KIND)
@pytest.mark.parametrize("on_head", [{"modules_to_save": True}, {"target_modules": True}], ids=["all", "LoRA"])
def test_adapters_on_the_head(name, on_head):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model, call = built(name)
    head = next(key for key, module in model.named_modules() if module is model.get_output_embeddings())
    config = peft.LoraConfig(r=4, **{"target_modules": "all-linear"} | {key: [head] for key in on_head})
    model = peft.get_peft_model(model, config).train()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.normal_(0.0, 0.5)
    steps(model, call, None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_A_KIND)
def test_checkpointing_and_autocast(name):
    model, call = built(name)
    if model.supports_gradient_checkpointing:  # not XLNet
        model.gradient_checkpointing_enable({"use_reentrant": False})
    steps(model, call)
    remove_xent(model)
    with torch.autocast("cpu", torch.bfloat16):
        want = compare.step(model, call)
        use_xent(model)
        tiny.assert_same(compare.step(model, call), want, rtol=3e-2)


class Float32Product(torch.nn.Linear):
    def forward(self, input):
        bias = None if self.bias is None else self.bias.float()
        return F.linear(input.float(), self.weight.float(), bias)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LlamaForCausalLM", *ONE_A_KIND])
def test_float32_logits_of_a_16_bit_head(name):
    """Of a head that multiplies in float32, and of a plain one by logits_dtype."""
    model, call = built(name)
    model.to(torch.bfloat16)
    if "input_features" in call:
        call["input_features"] = call["input_features"].to(torch.bfloat16)
    head = model.get_output_embeddings()
    with torch.no_grad():
        head.weight.mul_(20)
    call["labels"] = call["labels"].flip(0)  # XLNet is given its labels, and has no loss
    rounded = compare.step(model, call)[1].float()
    head.__class__ = Float32Product
    _, *want = compare.step(model, call)
    assert want[0].dtype == torch.float32 and abs(rounded - want[0]) > 1e-5 * want[0]
    for options in ({}, {"logits_dtype": torch.float32}):
        report = use_xent(model, **options)
        assert report.logits_dtype is torch.float32
        loss, gradient = compare.difference(want, compare.step(model, call)[1:])
        assert loss <= 2e-6 and gradient <= 2e-2  # the gradient of the logits has 16 bits
        remove_xent(model)
        head.__class__ = torch.nn.Linear


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "LlavaForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"]
)
def test_packed_sequences(name):
    """Two sequences in each row. Masked models, encoders and speech have no such rows."""
    model, call = built(name)
    positions, labels = torch.arange(6).repeat(2).expand(2, -1), call["labels"].clone()
    labels[:, 6] = -100
    alone = compare.step(model, call | {"labels": labels})[1]
    call |= {"labels": labels, "position_ids": positions}
    assert abs(compare.step(model, call)[1] - alone) > 1e-5 * alone
    steps(model, call)


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_A_KIND)
def test_a_partitioned_head(name):
    """With the mark of ZeRO-3, whose hooks give the weight to what a call of the head returns: it is called twice."""
    model, call = built(name)
    _, loss, grads = compare.step(model, call)
    use_xent(model)
    head = model.get_output_embeddings()
    head.weight.ds_id = 0
    _, found_loss, found = compare.step(model, call)
    tiny.assert_same((None, found_loss, found), (None, loss, grads))
    assert "forward" not in vars(head)


@pytest.mark.parametrize("name", _marked(ONE_A_KIND))
def test_a_loss_of_the_logits(name):
    """As Trainer's compute_loss_func: the call has no labels."""
    model, call = built(name)
    labels = call.pop("labels")
    if model.config.is_encoder_decoder:
        call["decoder_input_ids"] = labels.clamp(min=0)

    def loss_of(**call):
        return (torch.nn.CrossEntropyLoss()(model(**call).logits.flatten(0, 1), labels.flatten()),)

    want = _step(model, loss_of, call)
    use_xent(model)
    tiny.assert_same(_step(model, loss_of, call), want)


def test_a_model_whose_first_call_decides():
    model, call = built("WhisperForConditionalGeneration")
    assert "its first call decides, four tokens did not (" in str(use_xent(model))
    remove_xent(model)
    model.proj_out.register_forward_hook(lambda head, args, logits: logits.softmax(-1))
    use_xent(model)
    with pytest.raises(RuntimeError, match="WhisperForConditionalGeneration reads its logits beside the loss: softmax"):
        model(**call)


def loss_and_gradient(model, call, way):
    """(the loss, its gradient to the head's input). "exact": the head and what follows it in float64."""
    model, seen = copy.deepcopy(model), []
    head = model.get_output_embeddings()

    def keep(head, args):
        args[0].retain_grad()
        seen.append(args[0])
        return (args[0].double(),) if way == "exact" else None

    head.register_forward_pre_hook(keep)
    if way == "exact":
        for name, parameter in list(head.named_parameters()):
            setattr(head, name, torch.nn.Parameter(parameter.detach().double()))
    if way == "used":
        use_xent(model)
    loss = model(**call).loss
    loss.backward()
    return loss.detach(), seen[-1].grad.double()


@pytest.mark.parametrize(
    "name", _marked(["BertForMaskedLM", "T5ForConditionalGeneration", "BartForConditionalGeneration"])
)
def test_a_loss_of_16_bits(name):
    """These forwards give 16-bit logits to F.cross_entropy, whose loss then has 16 bits. Ours has 32, and is nearer."""
    model, call = built(name)
    model.to(torch.bfloat16)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)
        if name.startswith("Bart"):
            model.final_logits_bias.normal_()
    found = {way: loss_and_gradient(model, call, way) for way in ("exact", "untouched", "used")}
    assert (found["untouched"][0].dtype, found["used"][0].dtype) == (torch.bfloat16, torch.float32)
    losses, grads = (
        [float((found[way][part].double() - found["exact"][part]).norm()) for way in ("untouched", "used")]
        for part in (0, 1)
    )
    assert losses[1] <= losses[0] and grads[1] <= 1.05 * grads[0], (losses, grads)
