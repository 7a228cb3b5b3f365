"""``xent_ops.use_xent``: which integration an object gets."""

import pytest
import tiny
import torch

import xent_ops
from xent_ops.integrations import transformers as of_models

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def test_a_model_and_its_adapters():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = tiny.make()
    report = xent_ops.use_xent(model, skip_ignored=True)
    assert isinstance(report, of_models.Report)
    ids, labels = tiny.batch()
    assert model(input_ids=ids, labels=labels).logits is None
    xent_ops.remove_xent(model)
    assert model(input_ids=ids, labels=labels).logits is not None
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    xent_ops.use_xent(adapted)
    xent_ops.remove_xent(adapted)


def test_a_trainer(tmp_path):
    trainers = pytest.importorskip("trainers", reason="trl is not installed")
    from xent_ops.integrations import trl

    trainer = trainers.make("SFT", tmp_path)
    assert isinstance(xent_ops.use_xent(trainer), trl.Report)
    xent_ops.remove_xent(trainer)
    with pytest.raises(RuntimeError, match="not on for this trainer"):
        xent_ops.remove_xent(trainer)


@pytest.mark.parametrize("other", [torch.nn.Linear(2, 3), None, "gpt2"], ids=["module", "None", "text"])
def test_anything_else_is_refused(other):
    for function in (xent_ops.use_xent, xent_ops.remove_xent):
        with pytest.raises(TypeError, match=r"a PeftModel, .* or a trainer of TRL, got .*LinearCrossEntropyLoss"):
            function(other)


@pytest.mark.parametrize("way", ["compiled", "DataParallel", "both"])
def test_a_wrapped_model_is_refused(way):
    model = tiny.make()
    wrapped = torch.compile(model) if way != "DataParallel" else model
    wrapped = torch.nn.DataParallel(wrapped) if way != "compiled" else wrapped
    inner = type(model).__qualname__
    with pytest.raises(TypeError, match=rf": call it on the .*{inner} inside, before the model is compiled") as raised:
        xent_ops.use_xent(wrapped)
    assert ("use DistributedDataParallel" in str(raised.value)) == (way != "compiled")


def test_a_trainer_of_transformers_has_a_model():
    with pytest.raises(TypeError, match=r"pass trainer\.model"):
        xent_ops.use_xent(transformers.Trainer(tiny.make(), transformers.TrainingArguments(report_to=[])))
