"""use_xent of TRL's GKDTrainer and DistillationTrainer: losses, metrics and weights are those of the untouched trainer."""

import functools
import math
import types

import pytest

for package in ("trl", "datasets", "peft"):
    pytest.importorskip(package, reason=f"{package} is not installed")

import peft  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import trainers  # noqa: E402
import trl.experimental.gkd  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from trl.trainer import distillation_trainer  # noqa: E402

from xent_ops.integrations.trl import remove_xent, use_xent  # noqa: E402
from xent_ops.integrations.trl.distillation import Divergence, Teacher  # noqa: E402
from xent_ops.kernels.options import Activation  # noqa: E402

KINDS = ("GKD", "Distillation")


@pytest.fixture
def compared(tmp_path, monkeypatch):
    """compared(kind, ...): both runs, of which the one by xent_ops must not reach TRL's divergences."""
    divergences = [(trl.experimental.gkd.GKDTrainer, "generalized_jsd_loss")]
    divergences += [(distillation_trainer, "ChunkedDivergenceFunction")]
    return functools.partial(trainers.compare, tmp_path, monkeypatch, divergences)


@pytest.mark.parametrize("beta", [0.5, *(pytest.param(beta, marks=pytest.mark.slow) for beta in (0.0, 1.0))])
@pytest.mark.parametrize("kind", KINDS)
def test_steps(kind, beta, compared):
    compared(kind, beta=beta)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_tails_of_both(kind, compared):
    compared(kind, name="Gemma2", teacher="Granite")
    compared(kind, name="Phi", teacher="Phi")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_checkpointing_and_counts(kind, compared):
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    compared(kind, peft_config=config, gradient_checkpointing=True, learning_rate=10.0)


@pytest.mark.slow
def test_a_mean_of_each_batch(compared):
    compared("GKD", average_tokens_across_devices=False, gradient_accumulation_steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_autocast(kind, compared):
    compared(kind, bf16=True, rel=2e-2)


@pytest.mark.slow
def test_compiled(compared):
    """GKD alone: DistillationTrainer of TRL calls what is in the compiled model."""
    torch.compiler.reset()
    counters.clear()
    compared("GKD", lmbda=0.0, only_ours={"torch_compile": True, "torch_compile_backend": "aot_eager"})
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_evaluation(kind, tmp_path):
    trainer = trainers.make(kind, tmp_path)
    data, losses = trainers.data(kind).select(range(4)), []
    for lean in (False, True):
        if lean:
            use_xent(trainer)
        torch.manual_seed(0)  # of the student's texts
        losses.append(trainer.evaluate(data)["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_batch_without_a_counted_token():
    """Zero, as TRL's, where a mean over nothing is NaN."""
    divergence = Teacher(torch.randn(2, 4, 6), torch.randn(11, 6), None, Activation(), 0.5).divergence
    student = torch.randn(2, 4, 8, requires_grad=True), torch.randn(11, 8), None
    loss = divergence(student, torch.full((2, 4), -100), Activation(), None, {})
    assert loss == 0 and not torch.autograd.grad(loss, student[0])[0].any()


def test_logits_where_they_are_asked_for(tmp_path):
    trainer = trainers.make("GKD", tmp_path)
    use_xent(trainer)
    inputs = trainer.data_collator([trainer.train_dataset[0]])
    loss, outputs = trainer.compute_loss(trainer.model, inputs, return_outputs=True)
    assert outputs.logits.shape[-1] == 64
    torch.testing.assert_close(trainer.compute_loss(trainer.model, inputs), loss, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_remove_xent(kind, tmp_path):
    trainer = trainers.make(kind, tmp_path)
    before = set(vars(trainer))
    assert "4 matrix multiplications" in str(use_xent(trainer))
    assert vars(trainer).keys() != before
    remove_xent(trainer)
    assert vars(trainer).keys() == before


@pytest.mark.parametrize("kind", KINDS)
def test_refusals(kind, tmp_path):
    trainer = trainers.make(kind, tmp_path)
    with pytest.raises(ValueError, match="products is not of linear_distillation_loss"):
        use_xent(trainer, products="fp8")
    trainer.is_fsdp_enabled = True
    with pytest.raises(TypeError, match=f"{kind}Trainer: FSDP or DeepSpeed's ZeRO-3 splits the heads"):
        use_xent(trainer)
    assert not vars(trainer).keys() & {"_xent", "compute_loss", "_compute_loss"}


def near(dtype, beta):
    """(hidden states, the teacher's, head, mask) of 16 bits, 2 % apart; float64's loss, gradients, sum of entropies."""
    generator = torch.Generator().manual_seed(0)
    hidden, noise = torch.randn(2, 2, 16, 64, generator=generator)
    head = (torch.randn(500, 64, generator=generator) * 3 / 8).to(dtype)
    hidden, teacher = hidden.to(dtype), (hidden + 0.02 * noise).to(dtype)
    mask = torch.rand(2, 16, generator=generator) > 0.2
    leaves = [tensor.double().requires_grad_() for tensor in (hidden, head)]
    log_s, log_t = (x @ w.T for x, w in (leaves, (teacher.double(), head.double())))
    log_s, log_t = log_s.log_softmax(-1), log_t.log_softmax(-1)
    log_m = torch.logaddexp(log_s + math.log(1 - beta or 1), log_t + math.log(beta or 1))
    rows = {
        0.0: (log_t.exp() * (log_t - log_s)).sum(-1),
        1.0: (log_s.exp() * (log_s - log_t)).sum(-1),
        0.5: (beta * log_t.exp() * (log_t - log_m) + (1 - beta) * log_s.exp() * (log_s - log_m)).sum(-1),
    }[beta]
    loss, entropy = rows[mask].mean(), -(log_s.exp() * log_s).sum(-1)[mask].sum()
    return (hidden, teacher, head, mask), (loss.detach(), *torch.autograd.grad(loss, leaves), entropy.detach())


def errors(found, wanted):
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_near_teacher_in_16_bits(kind, dtype, beta):
    """Ours is no further from float64 than what it replaces: the loss, the gradients, the entropy that is logged."""
    (hidden, teacher, head, mask), wanted = near(dtype, beta)
    options = {"accumulate_dtype": None, "chunk_rows": None, "skip_ignored": True, "logits_dtype": None}
    ours = Divergence(types.SimpleNamespace(_compute_loss=None), options).divergence
    labels = torch.where(mask, 0, -100)

    def theirs(hidden, teacher, head, teacher_head, mask, beta):
        if kind == "Distillation":
            return distillation_trainer._chunked_divergence_loss(hidden, teacher, head, teacher_head, mask, beta)
        logits = F.linear(hidden, head), F.linear(teacher, teacher_head)
        loss = trl.experimental.gkd.GKDTrainer.generalized_jsd_loss(*logits, labels=labels, beta=beta)
        return loss, wanted[-1], None  # it logs no entropy

    found = []
    for divergence in (ours, theirs):
        leaves = [tensor.clone().requires_grad_() for tensor in (hidden, head)]
        loss, entropy, _ = divergence(leaves[0], teacher, leaves[1], head, mask, beta)
        found.append(errors((loss, *torch.autograd.grad(loss, leaves), entropy), wanted))
    for one, limit in zip(*found, strict=True):
        assert one <= 1.2 * limit + 1e-4, found  # float32's rounding of log-probabilities, of a KL of 2e-3
