"""Training with DeepSpeed's ZeRO, with our loss and with torch's; started by torchrun from test_deepspeed.py."""

import os
import sys

import deepspeed
import tiny
import torch
import torch.nn.functional as F
from torch import nn

import xent_ops
from xent_ops.integrations.transformers import use_xent

CLASSES, FEATURES = 64, 16


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


def engine_of(model, stage):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    }
    return deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[0]


def losses(model, stage, step):
    engine = engine_of(model, stage)
    draws, found = torch.Generator().manual_seed(1 + int(os.environ["RANK"])), []
    for _ in range(5):
        loss = step(engine, torch.randint(CLASSES, (2, 9), generator=draws))
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def of_language_model(engine, ids):
    return engine(input_ids=ids, labels=ids).loss


def refusal(function, *args):
    """The words of its TypeError or RuntimeError."""
    try:
        function(*args)
    except (TypeError, RuntimeError) as error:
        return str(error)
    raise AssertionError("nothing was refused")


def with_use_xent(stage):
    """ZeRO 2 leaves the head as it is. ZeRO 3 wants the head's output for its hooks: refused before and after."""
    if stage == 2:
        want = losses(language_model(), stage, of_language_model)
        model = language_model()
        use_xent(model)
        torch.testing.assert_close(losses(model, stage, of_language_model), want, rtol=1e-5, atol=1e-6)
        return
    model = language_model()
    use_xent(model)
    engine, ids = engine_of(model, stage), torch.zeros(2, 9, dtype=torch.int64)
    assert "was registered on the head after use_xent" in refusal(of_language_model, engine, ids)
    after = engine_of(language_model(), stage)
    assert "a xent_ops.LinearCrossEntropyLoss" in refusal(use_xent, after.module)


if __name__ == "__main__":
    case, stage = sys.argv[1], int(sys.argv[2])
    deepspeed.init_distributed("gloo")
    if case == "use_xent":
        with_use_xent(stage)
    else:
        want, found = (losses(Model(ours, case == "tied"), stage, lambda engine, ids: engine(ids)) for ours in (0, 1))
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)
    print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}: right\n", end="")
    torch.distributed.destroy_process_group()
