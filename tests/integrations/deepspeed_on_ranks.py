"""Training with DeepSpeed's ZeRO, with our loss and with torch's; started by torchrun from test_deepspeed.py."""

import os
import sys
import tempfile
from unittest import mock

import deepspeed
import peft
import pytest
import tiny
import torch
import torch.nn.functional as F
from deepspeed.runtime.zero import partition_parameters
from torch import nn
from transformers.integrations import HfDeepSpeedConfig

import xent_ops
from xent_ops.integrations.transformers import use_xent

CLASSES, FEATURES = 64, 16
# Weights of any size are in parts, and gathered only where they are used.
LIMITS = ("param_persistence_threshold", "prefetch_bucket_size", "max_live_parameters", "max_reuse_distance")
SMALL = {2: {}, 3: {f"stage3_{name}": 0 for name in LIMITS}}


class Model(nn.Module):
    def __init__(self, ours, tied):
        super().__init__()
        torch.manual_seed(0)
        self.ours = ours
        self.embedding, self.body = nn.Embedding(CLASSES, FEATURES), nn.Linear(FEATURES, FEATURES)
        head = nn.Linear(FEATURES, CLASSES, bias=False)
        self.head = xent_ops.LinearCrossEntropyLoss(FEATURES, CLASSES) if ours else head
        self.head.load_state_dict(head.state_dict())
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids):
        hidden, target = torch.tanh(self.body(self.embedding(ids[:, :-1]))), ids[:, 1:]
        if self.ours:
            return self.head(hidden, target)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), target.flatten())


def language_model():
    torch.manual_seed(0)
    return tiny.make()


def engine_of(model, stage, **options):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, **SMALL[stage]},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    }
    return deepspeed.initialize(model=model, config=config | options, model_parameters=model.parameters())[0]


def batches(number):
    draws = torch.Generator().manual_seed(1 + int(os.environ["RANK"]))
    return [torch.randint(CLASSES, (2, 9), generator=draws) for _ in range(number)]


def losses(model, stage, step, on_engine=lambda engine: None):
    engine, found = engine_of(model, stage), []
    on_engine(engine)
    for ids in batches(5):
        loss = step(engine, ids)
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def of_language_model(engine, ids):
    return engine(input_ids=ids, labels=ids).loss


def with_use_xent(stage):
    want = losses(language_model(), stage, of_language_model)
    model = language_model()
    use_xent(model)
    torch.testing.assert_close(losses(model, stage, of_language_model), want, rtol=1e-5, atol=1e-6)
    after = losses(language_model(), stage, of_language_model, lambda engine: use_xent(engine.module))
    torch.testing.assert_close(after, want, rtol=1e-5, atol=1e-6)


SGD = {"type": "SGD", "params": {"lr": 0.1}}


def of_trainer(stage):
    """Trainer with accelerate makes a model that is partitioned from the beginning, and gives num_items_in_batch."""
    config = {"zero_optimization": {"stage": 3, **SMALL[3]}, "zero_allow_untested_optimizer": True}
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    histories = []
    for used in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            arguments = tiny.transformers.TrainingArguments(
                folder, deepspeed=config | dict.fromkeys(names, "auto"), max_steps=4, per_device_train_batch_size=2,
                gradient_accumulation_steps=2, optim="sgd", learning_rate=0.1, report_to=[], disable_tqdm=True,
                logging_steps=1, save_strategy="no", bf16=False,
            )  # fmt: skip
            torch.manual_seed(0)
            kind, sizes, *_ = tiny.MODELS["Llama"]
            config_of_model = getattr(tiny.transformers, kind)(**sizes, **tiny.TOKENS)
            model = tiny.transformers.AutoModelForCausalLM.from_config(config_of_model)
            assert hasattr(model.lm_head.weight, "ds_id")
            if used:
                use_xent(model)
            draws = torch.Generator().manual_seed(3)
            rows = [torch.randint(CLASSES, (9,), generator=draws) for _ in range(32)]
            data = [{"input_ids": row, "labels": row.masked_fill(row % 3 == 0, -100)} for row in rows]
            trainer = tiny.transformers.Trainer(model, arguments, train_dataset=data)
            trainer.train()
            assert trainer.is_deepspeed_enabled
            histories.append([(step["loss"], float(step["grad_norm"])) for step in trainer.state.log_history[:4]])
    torch.testing.assert_close(*histories, rtol=1e-5, atol=1e-6)


def make(name, partitioned, checkpointing):
    """``partitioned``: as Trainer makes it, its weights in parts from the beginning."""
    torch.manual_seed(0)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3, **SMALL[3]}}
    seen = HfDeepSpeedConfig(config) if partitioned else None  # from_config looks for it while it lives
    kind, sizes, *_ = tiny.MODELS[name]
    model = tiny.transformers.AutoModelForCausalLM.from_config(getattr(tiny.transformers, kind)(**sizes, **tiny.TOKENS))
    assert hasattr(model.lm_head.weight, "ds_id") == (seen is not None)
    if checkpointing:
        model.gradient_checkpointing_enable()
    return model.train()


def assert_nothing_is_gathered(model):
    statuses = {parameter.ds_status.name for parameter in model.parameters()}
    assert statuses == {"NOT_AVAILABLE"}, f"something stays gathered: {statuses}"


def trained(name, order, partitioned=False, checkpointing=False):
    """(losses of training and of evaluations between, weights) of four steps of two micro-batches."""
    model, found = make(name, partitioned, checkpointing), []
    if order == "before":
        report = use_xent(model, in_eval=checkpointing)
        assert (report.classes, report.features) == (CLASSES, FEATURES)
    options = {"gradient_accumulation_steps": 2, "gradient_clipping": 1.0, "optimizer": SGD}
    options["zero_allow_untested_optimizer"] = True
    engine = engine_of(model, 3, **options)
    if order == "after":
        use_xent(engine.module)
    for i, ids in enumerate(batches(8)):
        labels = ids.masked_fill(ids % 3 == 0, -100)
        loss = engine(input_ids=ids, labels=labels).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.detach())
        if i % 3 == 1:
            engine.eval()
            with torch.no_grad():
                found.append(engine(input_ids=ids, labels=labels).loss)
            engine.train()
    assert_nothing_is_gathered(model)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return found, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def zero_3_of_language_models(stage):
    for name in ("Llama", "Qwen2"):  # its head is tied
        for options in ({}, {"partitioned": True}, {"checkpointing": True}):
            want = trained(name, None, **options)
            for order in ("before", "after"):
                torch.testing.assert_close(trained(name, order, **options), want, rtol=1e-5, atol=1e-6)


def gathered_in_a_step(used, limits):
    """How many numbers the third step gathers. In the first two DeepSpeed learns the order of the modules."""
    model = language_model()
    if used:
        use_xent(model)
    engine, sizes = engine_of(model, 3, zero_optimization={"stage": 3, **limits}), []

    def all_gather(input, output, *args):
        sizes.append(output.numel())
        return theirs(input, output, *args)

    theirs = partition_parameters._dist_allgather_fn
    with mock.patch.object(partition_parameters, "_dist_allgather_fn", all_gather):
        for ids in batches(3):
            sizes.clear()
            engine.backward(of_language_model(engine, ids))
            engine.step()
    return sum(sizes)


def what_is_gathered(stage):
    """With DeepSpeed's default the head stays for its second call; where nothing may stay, it is gathered once more."""
    default = {"stage3_param_persistence_threshold": 0}
    assert gathered_in_a_step(True, default) == gathered_in_a_step(False, default) > 0
    assert gathered_in_a_step(True, SMALL[3]) == gathered_in_a_step(False, SMALL[3]) + CLASSES * FEATURES


def refusals(stage):
    """Adapters on the head: each of its modules is gathered by itself. Refused, before the engine exists and after."""
    for partitioned in (True, False):
        model = make("Llama", partitioned, False)
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head"], task_type="CAUSAL_LM"))
        with pytest.raises(TypeError, match=r"the head is a peft.* is partitioned over ranks \(ZeRO-3, FSDP1\)"):
            if partitioned:
                use_xent(model)
            else:
                use_xent(model)
                of_language_model(engine_of(model, 3), batches(1)[0])
    model = make("Llama", partitioned=True, checkpointing=False)
    model.lm_head.register_forward_pre_hook(lambda module, args: {}["of a hook"])
    assert use_xent(model).untried == "KeyError: 'of a hook'"
    assert_nothing_is_gathered(model)


if __name__ == "__main__":
    case, stage = sys.argv[1], int(sys.argv[2])
    deepspeed.ops.__compatible_ops__ = {}  # else it compiles an operator at first, for minutes
    deepspeed.init_distributed("gloo")
    cases = {
        function.__name__: function
        for function in (with_use_xent, zero_3_of_language_models, what_is_gathered, refusals, of_trainer)
    }
    if case in cases:
        cases[case](stage)
    else:
        want, found = (losses(Model(ours, case == "tied"), stage, lambda engine, ids: engine(ids)) for ours in (0, 1))
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)
    print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}: right\n", end="")
    torch.distributed.destroy_process_group()
