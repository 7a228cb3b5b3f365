"""use_xent in Trainer of transformers: gradient accumulation, checkpointing, evaluation, label smoothing."""

import pytest
import torch

tiny = pytest.importorskip("tiny", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed, which Trainer needs")
import transformers  # noqa: E402

from xent_ops.integrations.transformers import use_xent  # noqa: E402


class Recorded(transformers.Trainer):
    """Keeps the loss of each micro-batch, unrounded."""

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.losses = [*getattr(self, "losses", []), float(loss)]
        return loss


def trainer(model, folder, compute_loss_func=None, **options):
    ids, labels = tiny.batch(16)
    data = [{"input_ids": i, "labels": label} for i, label in zip(ids, labels, strict=True)]
    arguments = {
        "max_steps": 3,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
    }
    arguments |= {"gradient_accumulation_steps": 2, "save_strategy": "no"} | options
    metrics = arguments.pop("compute_metrics", None)
    arguments = transformers.TrainingArguments(str(folder), use_cpu=True, report_to=[], disable_tqdm=True, **arguments)
    functions = {"compute_metrics": metrics, "compute_loss_func": compute_loss_func}
    return Recorded(model, arguments, train_dataset=data, eval_dataset=data, **functions)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_checkpointing": True},
        pytest.param({"average_tokens_across_devices": False}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_losses_of_a_run(options, tmp_path):
    losses = []
    for lean in (False, True):
        torch.manual_seed(0)
        model = tiny.make("Mixtral")
        if lean:
            use_xent(model)
        run = trainer(model, tmp_path, **options)
        run.train()
        losses.append(torch.tensor(run.losses))
    assert len(losses[0]) == 6 and losses[0][0] != losses[0][-1]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0.0)


def test_label_smoothing_factor_is_refused(tmp_path):
    model = tiny.make()
    use_xent(model)
    with pytest.raises(RuntimeError, match="give label_smoothing to use_xent instead"):
        trainer(model, tmp_path, label_smoothing_factor=0.1).train()


def shifted_loss(outputs, labels, num_items_in_batch=None):
    logits = outputs.logits[:, :-1].float().reshape(-1, tiny.V)
    loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].reshape(-1), reduction="sum")
    return loss / num_items_in_batch


@pytest.mark.parametrize("bf16", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compute_loss_func(bf16, tmp_path):
    """It gets outputs with logits that were not computed, after the model's call and its autocast."""
    losses = []
    for lean in (False, True):
        torch.manual_seed(0)
        model = tiny.make("Gemma2")
        if lean:
            use_xent(model)
        run = trainer(model, tmp_path, compute_loss_func=shifted_loss, bf16=bf16)
        run.train()
        losses.append(torch.tensor(run.losses))
    torch.testing.assert_close(losses[1], losses[0], rtol=3e-2 if bf16 else 1e-5, atol=0.0)


def test_a_compute_loss_func_that_reads_logits(tmp_path):
    model = tiny.make()
    use_xent(model)
    with pytest.raises(
        RuntimeError, match=r"the logits of LlamaForCausalLM are read: log_softmax.* to F\.cross_entropy"
    ):
        trainer(model, tmp_path, compute_loss_func=lambda outputs, *_, **__: outputs.logits.log_softmax(-1)).train()


def test_label_smoothing_by_use_xent(tmp_path):
    losses = []
    for lean in (False, True):
        torch.manual_seed(0)
        model = tiny.make()
        if lean:
            use_xent(model, label_smoothing=0.1)
        run = trainer(model, tmp_path, label_smoothing_factor=0.0 if lean else 0.1)
        run.train()
        losses.append(torch.tensor(run.losses))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("in_eval", [False, True])
def test_evaluation(in_eval, tmp_path):
    """Without in_eval compute_metrics gets the logits, with it predictions and accuracy."""
    losses, seen = [], []

    def metrics(found):
        seen.append(found.predictions)
        return {}

    for lean in (False, True):
        torch.manual_seed(0)
        model = tiny.make()
        model.config.use_cache = False
        if lean:
            use_xent(model, in_eval=in_eval)
        losses.append(trainer(model, tmp_path, compute_metrics=metrics).evaluate()["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    untouched, found = seen
    assert untouched.shape == (16, 9, tiny.V)
    if in_eval:
        predictions, accuracy = found
        counted = predictions != -1
        assert counted.any() and (predictions[counted] == untouched.argmax(-1)[counted]).all()
        assert accuracy.shape == (4,) and (accuracy >= 0).all()  # one for each batch
    else:
        torch.testing.assert_close(found, untouched)
