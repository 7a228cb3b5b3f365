"""Hugging Face Trainer with torch_compile=True and gradient accumulation: one line, ``use_xent(model)``.

    python examples/integrations/huggingface_trainer.py

Trainer hands ``num_items_in_batch`` to the model, the number of counted tokens of all micro-batches of a step: it is
what the loss is divided by.
"""

import tempfile

from common import compare, prompts_ignored, text, tiny_llama
from transformers import Trainer, TrainingArguments

from xent_ops.integrations.transformers import use_xent


class Recorded(Trainer):
    """Trainer, with the loss of each micro-batch kept unrounded."""

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.losses = [*getattr(self, "losses", []), float(loss)]
        return loss


def run(with_xent: bool) -> list[float]:
    model = tiny_llama()
    if with_xent:
        print(use_xent(model))
    ids = text(16, 64)
    data = [{"input_ids": i, "labels": label} for i, label in zip(ids, prompts_ignored(ids), strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            torch_compile=True,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=4,
            learning_rate=1e-3,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Recorded(model, arguments, train_dataset=data)
        trainer.train()
    return trainer.losses


if __name__ == "__main__":
    compare(run)
