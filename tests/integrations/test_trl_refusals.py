"""What use_xent of a trainer of TRL refuses, in words, and leaves untouched."""

import pytest

for package in ("trl", "datasets", "peft"):
    pytest.importorskip(package, reason=f"{package} is not installed")

import peft  # noqa: E402
import torch  # noqa: E402
import trainers  # noqa: E402
import trl.experimental.gmpo  # noqa: E402

from xent_ops.integrations import transformers  # noqa: E402
from xent_ops.integrations.trl import remove_xent, use_xent  # noqa: E402


def test_another_version(tmp_path, monkeypatch):
    trainer = trainers.make("SFT", tmp_path)
    monkeypatch.setattr(trl, "__version__", "2.0.0")
    with pytest.raises(RuntimeError, match=r"has not seen TRL 2\.0\.0.*but 1\.16: any_version=True tries it"):
        use_xent(trainer)
    assert use_xent(trainer, any_version=True).head_products == 3


def test_another_trainer(tmp_path):
    """One of TRL that is derived from a known one is not known."""
    bases = (trl.RewardTrainer, trl.experimental.gmpo.GMPOTrainer)
    others = [type("Other", (base,), {"__init__": lambda self: None})() for base in bases]
    for trainer in (*others, trainers.make("SFT", tmp_path).model):
        with pytest.raises(
            TypeError, match="expected a trainer of TRL, or of a subclass of one: SFTTrainer, DPOTrainer"
        ):
            use_xent(trainer)


def test_twice(tmp_path):
    trainer = trainers.make("SFT", tmp_path)
    use_xent(trainer)
    with pytest.raises(RuntimeError, match="use_xent is on already"):
        use_xent(trainer)


def test_another_forward(tmp_path):
    trainer = trainers.make("DPO", tmp_path)
    theirs, of_reference = trainer.model.forward, trainer.ref_model.forward
    trainer.ref_model.forward = lambda *args, **kwargs: of_reference(*args, **kwargs)
    with pytest.raises(RuntimeError, match="the forward of LlamaForCausalLM is not that of TRL's add_fused_lm_head"):
        use_xent(trainer)
    assert trainer.model.forward == theirs and "_xent" not in vars(trainer)


def test_a_head_in_float32(tmp_path):
    trainer = trainers.make("GRPO", tmp_path, cast_lm_head_to_fp32=True)
    with pytest.raises(ValueError, match=r"give logits_dtype=torch\.float32 to use_xent instead"):
        use_xent(trainer)


def test_a_head_that_is_no_linear(tmp_path):
    trainer = trainers.make("SFT", tmp_path)
    trainer.model.lm_head = type("Head", (torch.nn.Linear,), {"forward": lambda self, x: x @ self.weight.T})(16, 64)
    with pytest.raises(TypeError, match=r"the head is a .*Head; expected torch\.nn\.Linear"):
        use_xent(trainer)


def test_options(tmp_path):
    trainer = trainers.make("SFT", tmp_path)
    with pytest.raises(ValueError, match="chunk_rows"):
        use_xent(trainer, chunk_rows=-1)
    with pytest.raises(TypeError, match="any_version"):
        use_xent(trainer, any_version="yes")


def test_adapters_on_a_head_that_zero_3_has_partitioned(tmp_path):
    """Each module of the head is gathered by itself. test_trl_ranks.py has heads that are taken."""
    adapters = peft.LoraConfig(target_modules=["lm_head"], task_type="CAUSAL_LM")
    trainer = trainers.make("SFT", tmp_path)
    trainer.model = peft.get_peft_model(trainer.model, adapters)
    trainer.model.get_base_model().lm_head.base_layer.weight.ds_id = 0
    with pytest.raises(TypeError, match=r"the head is a peft.*Linear whose weight is partitioned over ranks \(ZeRO-3"):
        use_xent(trainer)
    assert "_xent" not in vars(trainer)


@pytest.mark.parametrize("kind, name", [("GKD", "model"), ("Distillation", "model"), ("Distillation", "teacher_model")])
def test_heads_that_zero_3_has_partitioned(tmp_path, kind, name):
    trainer = trainers.make(kind, tmp_path)
    getattr(trainer, name).get_output_embeddings().weight.ds_id = 0
    with pytest.raises(TypeError, match="FSDP or DeepSpeed's ZeRO-3 splits the heads' weights"):
        use_xent(trainer)
    assert "_xent" not in vars(trainer)


def test_a_model_that_has_a_loss_of_ours(tmp_path):
    trainer = trainers.make("SFT", tmp_path)
    transformers.use_xent(trainer.model)
    with pytest.raises(RuntimeError, match=r"use_xent\(model\) of xent_ops.integrations.transformers is on for Llama"):
        use_xent(trainer)
    transformers.remove_xent(trainer.model)
    use_xent(trainer)


def test_remove_xent_of_something_else():
    with pytest.raises(TypeError, match=r"got a builtins\.object; expected a trainer of TRL"):
        remove_xent(object())
    with pytest.raises(TypeError, match=r"for a model there is xent_ops\.integrations\.transformers\.use_xent"):
        remove_xent(torch.nn.Linear(1, 1))
