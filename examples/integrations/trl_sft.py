"""TRL's SFTTrainer: ``use_xent(trainer)``, then loss, entropy and token accuracy come from xent_ops.

python examples/integrations/trl_sft.py
"""

import tempfile

from common import compare, prompts_ignored, text, tiny_llama
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from xent_ops.integrations.trl import use_xent


class Recorded:
    """The loss of each micro-batch, unrounded."""

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.losses = [*getattr(self, "losses", []), float(loss)]
        return loss


class RecordedSFT(Recorded, SFTTrainer):
    pass


def run(with_xent: bool) -> list[float]:
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
        trainer = RecordedSFT(tiny_llama(), arguments, train_dataset=data, processing_class=byte_tokenizer())
        if with_xent:
            print(use_xent(trainer))
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
