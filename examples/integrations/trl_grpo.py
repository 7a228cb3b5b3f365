"""TRL's GRPOTrainer: ``use_xent(trainer)``, then log-probabilities and entropies come from xent_ops.

python examples/integrations/trl_grpo.py
"""

import tempfile

from common import compare, text, tiny_llama
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl_sft import Recorded, byte_tokenizer

from xent_ops.integrations.trl import use_xent


class RecordedGRPO(Recorded, GRPOTrainer):
    """The log-probabilities and entropies as well: GRPO's loss is 0 in the first step, and small later."""

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        log_probs, entropies, aux_loss = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        of_call = [float(log_probs.mean()), *([] if entropies is None else [float(entropies.mean())])]
        self.losses = [*getattr(self, "losses", []), *of_call]
        return log_probs, entropies, aux_loss


def reward(completions, **kwargs):
    """The share of lower-case letters."""
    return [sum(letter.islower() for letter in text) / max(len(text), 1) for text in completions]


def run(with_xent: bool) -> list[float]:
    tokenizer = byte_tokenizer()
    data = Dataset.from_dict({"prompt": ["".join(map(chr, row)) for row in text(8, 12).clamp(32, 126).tolist()]})
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=8,
            num_iterations=2,  # the second uses the log-probabilities of the first: their ratio is not 1
            temperature=0.9,
            beta=0.1,
            max_steps=4,
            learning_rate=1e-3,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
        )
        tiny_llama().save_pretrained(folder)  # the trainer loads it twice: to train, and as the reference
        trainer = RecordedGRPO(folder, reward, arguments, train_dataset=data, processing_class=tokenizer)
        if with_xent:
            print(use_xent(trainer))
        trainer.train()
    return trainer.losses


if __name__ == "__main__":
    compare(run, atol=1e-7)
