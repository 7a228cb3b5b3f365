"""Trainers of TRL with tiny models and texts, and how two runs are compared."""

import contextlib
import os
import string
from unittest import mock

import pytest
import tiny
import torch
import trl
import trl.experimental.gkd
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from xent_ops.integrations.trl import use_xent

LETTERS = string.ascii_letters + string.digits
TIMES = ("runtime", "per_second", "step_time", "total_flos")  # ends of names


def tokenizer():
    """A token a letter, as many as a tiny model has classes."""
    names = ["<pad>", "<bos>", "<eos>", *LETTERS][: tiny.V]
    made = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=names[0], bos_token=names[1], eos_token=names[2], padding_side="left"
    )


def texts(rows, lengths):
    """``rows`` texts, of as many letters as the range has numbers."""
    draw = torch.Generator().manual_seed(7)
    size = tiny.V - 3

    def one(row):
        length = lengths[row % len(lengths)]
        return "".join(LETTERS[i] for i in torch.randint(size, (length,), generator=draw).tolist())

    return [one(row) for row in range(rows)]


def reward(completions, **kwargs):
    """The share of lower-case letters."""
    return [sum(letter.islower() for letter in text) / max(len(text), 1) for text in completions]


def data(kind):
    prompts, good, bad = texts(16, range(3, 9)), texts(24, range(2, 10))[8:], texts(32, range(2, 10))[16:]
    columns = {
        "SFT": {"prompt": prompts, "completion": good},
        "DPO": {"prompt": prompts, "chosen": good, "rejected": bad},
        "KTO": {"prompt": prompts, "completion": good, "label": [row % 3 > 0 for row in range(16)]},
        "GKD": {
            "prompt": prompts,
            "messages": [
                [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
                for prompt, text in zip(prompts, good, strict=True)
            ],
        },
    }
    return Dataset.from_dict(columns.get(kind, {"prompt": prompts}))


def recorded(base, seen):
    class Recorded(base):
        """Keeps the loss of each micro-batch, unrounded."""

        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            seen.append(float(loss))
            return loss

    return Recorded


def saved(folder, name, **sizes):
    """Where a model lies, which a trainer reads, and a reference of it once more."""
    path = folder / "-".join([name, *map(str, sizes.values())])
    if not path.exists():
        torch.manual_seed(len(sizes))
        tiny.make(name, **sizes).save_pretrained(path)
    return str(path)


def make(kind, folder, name="Llama", teacher="Llama", base=None, seen=None, **options):
    """A trainer of 4 steps. SGD, since Adam makes steps of rounding errors where the gradient is 0."""
    given = {
        "max_steps": 4, "learning_rate": 0.1, "optim": "sgd", "per_device_train_batch_size": 4, "logging_steps": 1,
        "gradient_accumulation_steps": 2, "save_strategy": "no", "report_to": [], "use_cpu": True, "bf16": False,
        "disable_tqdm": True, "gradient_checkpointing": False,
    }  # fmt: skip
    more = {"peft_config": options.pop("peft_config", None), "eval_dataset": options.pop("eval_dataset", None)}
    if kind in ("GRPO", "RLOO"):
        given |= {"num_generations": 4, "max_completion_length": 8, "temperature": 0.9, "beta": 0.1}
        more["reward_funcs"] = reward
    words = tokenizer()
    if kind in ("GKD", "Distillation"):
        more["teacher_model"] = saved(folder, teacher, hidden_size=24, intermediate_size=48)
        words.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    if kind == "GKD":  # half of the batches are of the student's own writing
        given |= {"lmbda": 0.5, "beta": 0.3, "max_new_tokens": 6, "max_length": 28}
    elif kind == "Distillation":
        given |= {"max_completion_length": 8, "temperature": 0.9}
        del more["eval_dataset"]
    model = saved(folder, name)
    package = trl.experimental.gkd if kind == "GKD" else trl
    arguments = getattr(package, f"{kind}Config")(str(folder / "out"), **(given | options))
    kind_of_trainer = recorded(base or getattr(package, f"{kind}Trainer"), [] if seen is None else seen)
    with mock.patch.dict(os.environ, CI="1"):  # TRL reports its use to its makers, but not that of tests
        return kind_of_trainer(model, args=arguments, train_dataset=data(kind), processing_class=words, **more)


def run(kind, folder, before_training, gathered=contextlib.nullcontext, **options):
    """(losses of micro-batches, what was logged, weights) of a run. In ``gathered(weights)`` these are whole."""
    seen = []
    trainer = make(kind, folder, seen=seen, **options)
    before_training(trainer)
    trainer.train()
    named = {name: value for name, value in trainer.model.named_parameters() if value.requires_grad}
    with gathered(list(named.values())):
        weights = {name: value.detach().clone() for name, value in named.items()}
    return seen, trainer.state.log_history, weights


def compare(folder, monkeypatch, theirs, kind, rel=1e-5, only_ours=None, **options):
    """A run of the untouched trainer and one with use_xent, which must not reach ``theirs``, [(owner, name)]."""

    def before_training(trainer):
        use_xent(trainer)
        for owner, name in theirs:
            monkeypatch.setattr(owner, name, None)

    monkeypatch.undo()
    want = run(kind, folder, lambda trainer: None, **options)
    got = run(kind, folder, before_training, **(options | (only_ours or {})))
    assert_same_run(got, want, rel)
    return got


def assert_same_run(got, want, rel=1e-5):
    assert len(got[0]) == len(want[0]) == 8 and got[0][0] != got[0][-1]
    assert_same_history(got[1], want[1], rel)
    assert got[0] == pytest.approx(want[0], rel=rel, abs=1e-6)
    for name, theirs in want[2].items():
        error, norm = (got[2][name] - theirs).norm(), theirs.norm()
        assert error <= rel * norm + 1e-8, f"{name}: {float(error):.2e} of {float(norm):.2e}"


def assert_same_history(got, want, rel=1e-5):
    """Losses and metrics of two runs, each that was logged. KL and rewards are differences of numbers about 30."""
    assert len(got) == len(want) > 0
    for step, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        assert ours.keys() == theirs.keys()
        names = {name for name in theirs if not name.endswith(TIMES)}
        if abs(theirs.get("rewards/chosen", 1.0)) < 1e-5:  # still those of the reference: signs of rounding errors
            names.discard("rewards/accuracies")
        for name in names:
            error = abs(ours[name] - theirs[name])
            assert error <= rel * abs(theirs[name]) + 1e-5, f"step {step}, {name}: {ours[name]}, wanted {theirs[name]}"
