"""TRL's SFTTrainer: the model's own loss, which is ours, in place of TRL's head of its own.

    python examples/integrations/trl_sft.py

SFTTrainer of TRL 1.16 gives the model another forward, with log-probabilities in chunks. ``ModelLoss`` asks the model
for its loss instead, as transformers' Trainer does. TRL's metrics of entropy and token accuracy, which come from that
head, are left out.
"""

import tempfile

from common import compare, prompts_ignored, text, tiny_llama
from datasets import Dataset
from transformers import Trainer
from trl import SFTConfig, SFTTrainer

from xent_ops.integrations.transformers import use_xent


class ModelLoss(SFTTrainer):
    """SFTTrainer with the loss that the model computes."""

    def compute_loss(self, *args, **kwargs):
        return Trainer.compute_loss(self, *args, **kwargs)


class Recorded:
    """The loss of each micro-batch, unrounded."""

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.losses = [*getattr(self, "losses", []), float(loss)]
        return loss


class Without(Recorded, SFTTrainer):
    pass


class WithXent(Recorded, ModelLoss):
    pass


def run(with_xent: bool) -> list[float]:
    model = tiny_llama()
    if with_xent:
        print(use_xent(model))
    ids = text(16, 64)
    data = Dataset.from_dict({"input_ids": ids.tolist(), "labels": prompts_ignored(ids).tolist()})
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=4,
            learning_rate=1e-3,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            dataset_kwargs={"skip_prepare_dataset": True},
        )
        trainer = (WithXent if with_xent else Without)(
            model, arguments, train_dataset=data, processing_class=byte_tokenizer()
        )
        trainer.train()
    return trainer.losses


def byte_tokenizer():
    """A tokenizer of bytes, since the trainer wants one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=alphabet[0], bos_token=alphabet[1], eos_token=alphabet[2]
    )


if __name__ == "__main__":
    compare(run)
