"""PyTorch Lightning: a LightningModule whose head and loss are one module, ``LinearCrossEntropyLoss``.

    python examples/integrations/lightning_module.py

A model of transformers in a LightningModule takes ``use_xent(model)`` instead, as with accelerate.
"""

import lightning
import torch
import torch.nn.functional as F
from common import VOCABULARY, compare, text
from torch import nn
from torch.utils.data import DataLoader

import xent_ops

WIDTH = 64


class LanguageModel(lightning.LightningModule):
    def __init__(self, with_xent: bool):
        super().__init__()
        self.losses: list[float] = []
        self.with_xent = with_xent
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.GRU(WIDTH, WIDTH, batch_first=True)
        head = nn.Linear(WIDTH, VOCABULARY)
        if with_xent:
            # The state_dict is that of the nn.Linear: checkpoints of either load into the other.
            self.head = xent_ops.LinearCrossEntropyLoss(WIDTH, VOCABULARY, bias=True, label_smoothing=0.1)
            self.head.load_state_dict(head.state_dict())
        else:
            self.head = head

    def training_step(self, ids, index):
        hidden = self.body(self.tokens(ids[:, :-1]))[0]
        if self.with_xent:
            loss = self.head(hidden, ids[:, 1:])
        else:
            loss = F.cross_entropy(self.head(hidden).flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.1)
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def run(with_xent: bool) -> list[float]:
    lightning.seed_everything(0, verbose=False)
    model = LanguageModel(with_xent)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(text(32, 65), batch_size=4))
    return model.losses


if __name__ == "__main__":
    compare(run)
