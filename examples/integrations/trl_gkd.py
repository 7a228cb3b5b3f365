"""TRL's GKDTrainer: on-policy distillation from the hidden states of student and teacher, without their logits.

    python examples/integrations/trl_gkd.py

GKDTrainer has the student write some of the completions and draws its distribution of each token to the teacher's. With
``use_xent(trainer)`` that divergence is ``linear_distillation_loss``; the teacher may be of another size.
"""

import tempfile

from common import compare, text, tiny_llama
from datasets import Dataset
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl_sft import Recorded, byte_tokenizer

from xent_ops.integrations.trl import use_xent


class RecordedGKD(Recorded, GKDTrainer):
    pass


def run(with_xent: bool) -> list[float]:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    rows = ["".join(map(chr, row)) for row in text(16, 40).clamp(32, 126).tolist()]
    messages = [
        [{"role": "user", "content": row[:cut]}, {"role": "assistant", "content": row[cut:]}]
        for row, cut in zip(rows, range(8, 24), strict=True)
    ]
    data = Dataset.from_dict({"prompt": [row[0]["content"] for row in messages], "messages": messages})
    teacher = tiny_llama(hidden_size=96, intermediate_size=160, num_attention_heads=6)
    with tempfile.TemporaryDirectory() as folder:
        arguments = GKDConfig(
            output_dir=folder,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            lmbda=0.5,  # the share of batches that the student writes
            beta=0.5,
            max_new_tokens=8,
            max_length=64,
            max_steps=4,
            learning_rate=1e-3,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
        )
        trainer = RecordedGKD(tiny_llama(), teacher, arguments, train_dataset=data, processing_class=tokenizer)
        if with_xent:
            print(use_xent(trainer))
        trainer.train()
    return trainer.losses


if __name__ == "__main__":
    compare(run)
