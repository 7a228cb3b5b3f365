"""TRL's GKDTrainer: on-policy distillation from the hidden states of student and teacher, without their logits.

    python examples/integrations/trl_gkd.py

GKDTrainer has the student write some of the completions and draws its distribution of each token to the teacher's.
``XentGKD`` computes that divergence by ``linear_distillation_loss``; the teacher may be of another size. It is written
for text models whose head is an nn.Linear, in one process or below DDP, as trl_grpo.py.
"""

import tempfile

import torch
from common import compare, text, tiny_llama
from datasets import Dataset
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl_sft import Recorded, byte_tokenizer

import xent_ops


class XentGKD(GKDTrainer):
    """GKDTrainer whose loss comes from hidden states and the heads' weights."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        student, teacher = (self.accelerator.unwrap_model(one) for one in (model, self.teacher_model.eval()))
        given = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"], "use_cache": False}
        with torch.no_grad():
            teacher_hidden = teacher.model(**given).last_hidden_state[:, :-1]
        loss = xent_ops.linear_distillation_loss(
            student.model(**given).last_hidden_state[:, :-1],
            student.get_output_embeddings().weight,
            teacher_hidden,
            teacher.get_output_embeddings().weight.detach(),
            target=inputs["labels"][:, 1:],
            beta=self.beta,
            reduction="mean" if num_items_in_batch is None else "sum",
            divisor=num_items_in_batch,
        )
        return (loss, {}) if return_outputs else loss


class Without(Recorded, GKDTrainer):
    pass


class WithXent(Recorded, XentGKD):
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
        trainer = (WithXent if with_xent else Without)(
            tiny_llama(), teacher, arguments, train_dataset=data, processing_class=tokenizer
        )
        trainer.train()
    return trainer.losses


if __name__ == "__main__":
    compare(run)
