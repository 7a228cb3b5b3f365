"""TRL's GRPOTrainer: log-probabilities of the completions by ``linear_token_log_probs``.

    python examples/integrations/trl_grpo.py

GRPOTrainer asks for the log-probability and the entropy of each token of a completion. ``XentGRPO`` computes both from
the hidden states, without logits. It is written for text models whose head is an nn.Linear, in one process or below
DDP: FSDP would not have gathered the head's weight, and adapters on it would not count.
"""

import tempfile

import torch
from common import compare, text, tiny_llama
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl_sft import Recorded, byte_tokenizer

import xent_ops


class XentGRPO(GRPOTrainer):
    """GRPOTrainer whose log-probabilities and entropies come from hidden states and the head's weight."""

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False, **kwargs
    ):
        if any(value is not None and value is not False for value in kwargs.values()):
            raise NotImplementedError(f"XentGRPO takes text models without an auxiliary loss, got {list(kwargs)}")
        base = self.accelerator.unwrap_model(model)
        head = base.get_output_embeddings()
        found = []
        for ids, mask in zip(
            *(t.split(batch_size or len(input_ids)) for t in (input_ids, attention_mask)), strict=True
        ):
            hidden = base.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
            target = ids.masked_fill(mask == 0, -100)[:, -logits_to_keep:]
            found.append(
                xent_ops.linear_token_log_probs(
                    hidden[:, -logits_to_keep - 1 : -1],
                    head.weight,
                    target,
                    linear_bias=head.bias,
                    logit_scale=1 / self.temperature,
                )
            )
        entropies = torch.cat([part.entropy for part in found]) if compute_entropy else None
        return torch.cat([part.log_probs for part in found]), entropies, None


class RecordedGRPO(Recorded):
    """The log-probabilities and entropies as well: GRPO's loss is 0 in the first step, and small later."""

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        log_probs, entropies, aux_loss = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        of_call = [float(log_probs.mean()), *([] if entropies is None else [float(entropies.mean())])]
        self.losses = [*getattr(self, "losses", []), *of_call]
        return log_probs, entropies, aux_loss


class Without(RecordedGRPO, GRPOTrainer):
    pass


class WithXent(RecordedGRPO, XentGRPO):
    pass


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
        trainer = (WithXent if with_xent else Without)(
            folder, reward, arguments, train_dataset=data, processing_class=tokenizer
        )
        trainer.train()
    return trainer.losses


if __name__ == "__main__":
    compare(run, atol=1e-7)
