"""docs/integrations.md: a loss of tokens as ``compute_loss_func`` of Trainer, and ``use_xent`` in a LightningModule."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

tiny = pytest.importorskip("tiny", reason="transformers is not installed")

import xent_ops  # noqa: E402

PAGE = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()


def focal_of_logits(output, labels, num_items_in_batch=None):
    target = F.pad(labels, (0, 1), value=-100)[:, 1:]
    log_probs = output.logits.log_softmax(-1).gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    losses = -((1 - log_probs.exp()) ** 2) * log_probs
    return losses.where(target != -100, 0.0).sum() / num_items_in_batch


def test_compute_loss_func(tmp_path):
    """The page's code gives the losses of a function of all logits."""
    pytest.importorskip("accelerate", reason="accelerate is not installed, which Trainer needs")
    from test_use_xent_trainer import trainer

    (block,) = (text for text in re.findall(r"^```py\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE) if "focal" in text)
    runs = []
    for with_ours in (False, True):
        torch.manual_seed(0)
        model, loss = tiny.make("Llama"), focal_of_logits
        if with_ours:
            names = {"model": model, "xent_ops": xent_ops, "F": F}
            exec(block.split("\n\ntrainer = ")[0], names)
            loss = names["compute_loss_func"]
        run = trainer(model, tmp_path)
        run.compute_loss_func = loss
        run.train()
        runs.append(run.losses)
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-5, atol=1e-6)


def test_use_xent_refuses_compute_loss_func(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed, which Trainer needs")
    from test_use_xent_trainer import trainer

    model = tiny.make("Llama")
    xent_ops.use_xent(model)
    run = trainer(model, tmp_path)
    run.compute_loss_func = focal_of_logits
    with pytest.raises(RuntimeError, match="logits of LlamaForCausalLM are read"):
        run.train()


def test_lightning():
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")

    class Module(lightning.LightningModule):
        def __init__(self, with_ours):
            super().__init__()
            self.model, self.losses = tiny.make("Llama"), []
            if with_ours:
                xent_ops.use_xent(self.model)

        def training_step(self, batch, index):
            output = self.model(**batch)
            self.losses.append(float(output.loss))
            return output.loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    ids, labels = tiny.batch(8)
    data = [{"input_ids": i, "labels": label} for i, label in zip(ids, labels, strict=True)]
    runs = []
    for with_ours in (False, True):
        torch.manual_seed(0)
        module, names = (
            Module(with_ours),
            ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"),
        )
        run = lightning.Trainer(max_epochs=1, accelerator="cpu", **dict.fromkeys(names, False))
        run.fit(module, torch.utils.data.DataLoader(data, batch_size=2))
        runs.append(module.losses)
    assert len(runs[0]) == 4
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-5, atol=1e-6)
