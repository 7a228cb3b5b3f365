"""use_xent of TRL's trainers: losses, metrics and weights of each step are those of the untouched trainer."""

import functools

import pytest
import torch

for package in ("trl", "datasets", "peft"):
    pytest.importorskip(package, reason=f"{package} is not installed")

import peft  # noqa: E402
import tiny  # noqa: E402
import trainers  # noqa: E402
import trl.trainer.utils  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from transformers.modeling_outputs import BaseModelOutputWithPast  # noqa: E402

from xent_ops.integrations.trl import remove_xent, use_xent  # noqa: E402

KINDS = ("SFT", "DPO", "KTO", "GRPO", "RLOO")
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture
def compared(tmp_path, monkeypatch):
    """compared(kind, ...): both runs, of which the one by xent_ops must not reach TRL's function."""
    return functools.partial(trainers.compare, tmp_path, monkeypatch, [(trl.trainer.utils, "_ChunkedLogProbFunction")])


@pytest.mark.parametrize("kind", ["SFT", "DPO", slow("KTO"), "GRPO", slow("RLOO")])
def test_steps(kind, compared):
    compared(kind)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SFT", {"loss_type": "dft"}),
        slow("SFT", {"label_smoothing_factor": 0.1}),
        slow("SFT", {"average_tokens_across_devices": False}),
        ("DPO", {"use_weighting": True, "loss_type": ["sigmoid", "ipo"]}),
        slow("DPO", {"precompute_ref_log_probs": True}),
        slow("GRPO", {"num_iterations": 2, "importance_sampling_level": "sequence"}),
        slow("GRPO", {"entropy_coef": 0.1, "top_entropy_quantile": 0.5, "loss_type": "cispo"}),
    ],
    ids=str,
)
def test_options_of_the_trainer(kind, options, compared):
    compared(kind, **options)


TAILS = ("Gemma2", "Cohere", "Granite", "Mixtral", "Phi", "Qwen2")


@pytest.mark.slow
@pytest.mark.parametrize("kind, name", [*(("SFT", name) for name in TAILS), *(("DPO", name) for name in TAILS[::2])])
def test_models(kind, name, compared):
    """A softcap, scales, an auxiliary loss, a bias, a tied head. DPO asks for the mean of the logits, and of p^2."""
    compared(kind, name=name, **({"use_weighting": True} if kind == "DPO" else {}))


OTHERS = [(kind, given) for kind in ("SFT", "GRPO") for given in ("shift_labels", "num_items_in_batch")]


@pytest.mark.parametrize("kind, given", [*((kind, "labels") for kind in KINDS), *OTHERS])
def test_the_outputs_of_the_forward(kind, given, tmp_path):
    """All that TRL's forward returns, and gradients of what has some."""
    trainer = trainers.make(kind, tmp_path, name="Mixtral")
    ids, labels = tiny.batch()
    options = {"input_ids": ids, "labels": labels, "output_router_logits": True}
    if given == "shift_labels":
        options = options | {"labels": None, "shift_labels": labels.roll(-1, 1)}
    elif given == "num_items_in_batch":
        options = options | {"num_items_in_batch": torch.tensor(17)}
    found = []
    for lean in (False, True):
        if lean:
            use_xent(trainer)
        trainer.model.zero_grad()
        outputs = trainer.model(**options, fused_lm_head=True)
        outputs.loss.backward(retain_graph=True)
        if kind == "GRPO":  # whose entropy has a gradient too
            (outputs.entropy * outputs.log_probs.detach()).sum().backward()
        found.append((dict(outputs), [p.grad.clone() for p in trainer.model.parameters() if p.grad is not None]))
    (theirs, their_grads), (ours, our_grads) = found
    torch.testing.assert_close(
        ours, {name: value for name, value in theirs.items() if name in ours}, rtol=1e-5, atol=1e-6
    )
    assert ours.keys() == theirs.keys()
    for got, want in zip(our_grads, their_grads, strict=True):
        assert (got - want).norm() <= 1e-5 * want.norm() + 1e-8


def test_batch_invariant(tmp_path):
    """As tests/integrations/test_use_xent.py: gradients of a sequence's hidden states, alone and beside others."""
    trainer = trainers.make("GRPO", tmp_path)
    use_xent(trainer, batch_invariant=True)
    model, width = trainer.model, trainer.model.lm_head.in_features
    hidden, labels = torch.randn(40, 2, width), torch.randint(3, tiny.V, (40, 2))

    def bits(rows):
        x = hidden[rows].requires_grad_()
        model.model.forward = lambda *args, **kwargs: BaseModelOutputWithPast(last_hidden_state=x)
        batch = {"input_ids": labels[rows], "labels": labels[rows], "num_items_in_batch": torch.tensor(7)}
        log_probs = model(**batch, fused_lm_head=True).log_probs
        return log_probs.detach(), *torch.autograd.grad(1.3 * log_probs.sum(), x)

    for alone, beside in zip(bits([3]), bits(list(range(40))), strict=True):
        assert torch.equal(alone, beside[3:4])


def lora(**options):
    return peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **options)


@pytest.mark.parametrize("kind", ["SFT", *map(slow, KINDS[1:])])
def test_adapters_and_checkpointing(kind, compared):
    got = compared(kind, peft_config=lora(), gradient_checkpointing=True, learning_rate=10.0)
    assert all("lora" in name for name in got[2])


@pytest.mark.slow
def test_a_head_that_is_trained_beside_adapters(compared):
    got = compared("SFT", peft_config=lora(modules_to_save=["lm_head"]))
    assert any("lm_head" in name for name in got[2])


@pytest.mark.slow
def test_prompt_tuning(compared):
    """peft puts tokens before the labels."""
    compared("SFT", peft_config=peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SFT", "DPO", "GRPO"])  # 8 s to trace, and more
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(kind, backend, compared):
    torch.compiler.reset()
    counters.clear()
    compared(kind, only_ours={"torch_compile": True, "torch_compile_backend": backend})
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_evaluation(kind, compared):
    eval_data = trainers.data(kind).select(range(6))
    got = compared(kind, eval_dataset=eval_data, eval_strategy="steps", eval_steps=2)
    assert any("eval_entropy" in step for step in got[1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_bfloat16_autocast(kind, compared):
    """accelerate has wrapped the forward of the reference by then."""
    compared(kind, bf16=True, rel=2e-2)


def test_options_of_the_head(tmp_path):
    """They reach the operators: chunks of other sizes, and logits in float32 where the body is bfloat16."""
    losses = []
    for options in ({}, {"chunk_rows": 3, "skip_ignored": False}, {"logits_dtype": torch.float32}):
        trainer = trainers.make("GRPO", tmp_path)
        trainer.model.to(torch.bfloat16)
        use_xent(trainer, **options)
        torch.manual_seed(0)
        ids, labels = tiny.batch()
        losses.append(trainer.model(input_ids=ids, labels=labels, fused_lm_head=True).loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] != losses[0] and losses[2] == pytest.approx(losses[0], rel=1e-2)


@pytest.mark.slow
def test_bfloat16_compiled(compared):
    torch.compiler.reset()
    compared("DPO", bf16=True, rel=2e-2, only_ours={"torch_compile": True, "torch_compile_backend": "aot_eager"})


def test_remove_xent_below_autocast(tmp_path, monkeypatch):
    """accelerate has wrapped our forward by the end of a training."""
    trainer = trainers.make("SFT", tmp_path, bf16=True)
    use_xent(trainer)
    trainer.train()
    remove_xent(trainer)
    monkeypatch.setattr(trl.trainer.utils._ChunkedLogProbFunction, "apply", None)
    ids, labels = tiny.batch()
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        trainer.compute_loss(trainer.model, {"input_ids": ids, "labels": labels})


def test_three_products_where_the_loss_is_a_sum(tmp_path):
    trainer = trainers.make("SFT", tmp_path)
    assert use_xent(trainer).head_products == 3
    remove_xent(trainer)
    trainer.compute_loss = type(trainer).compute_loss.__get__(trainer)
    assert use_xent(trainer).head_products == 4
    assert use_xent(trainers.make("SFT", tmp_path, loss_type="dft")).head_products == 4


def test_a_loss_of_the_users_own(tmp_path):
    """One that weighs the tokens gets the gradient of each."""

    class Weighted(trainers.trl.SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            log_probs = model(**inputs, fused_lm_head=True).log_probs
            return -(log_probs * torch.arange(log_probs.shape[1])).sum()

    trainer = trainers.make("SFT", tmp_path, base=Weighted)
    ids, labels = tiny.batch()
    found = []
    for lean in (False, True):
        if lean:
            use_xent(trainer)
        trainer.model.zero_grad()
        trainer.compute_loss(trainer.model, {"input_ids": ids, "labels": labels}).backward()
        found.append(trainer.model.lm_head.weight.grad.clone())
    assert (found[1] - found[0]).norm() <= 1e-5 * found[0].norm()


def test_rows_without_a_label(tmp_path):
    """The loss is 0, and so is each gradient."""
    trainer = trainers.make("SFT", tmp_path)
    use_xent(trainer)
    ids = tiny.batch()[0]
    inputs = {"input_ids": ids, "labels": torch.full_like(ids, -100), "attention_mask": torch.ones_like(ids)}
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    assert loss == 0.0
    assert all(not p.grad.any() for p in trainer.model.parameters() if p.grad is not None)


def test_remove_xent(tmp_path):
    trainer = trainers.make("DPO", tmp_path)
    theirs = trainer.model.forward, trainer.ref_model.forward
    report = use_xent(trainer)
    assert report.replaced == [
        "LlamaForCausalLM: softcap None, logit_scale 1"
    ] * 2 and "4 matrix multiplications" in str(report)
    assert trainer.model.forward != theirs[0]
    remove_xent(trainer)
    assert (trainer.model.forward, trainer.ref_model.forward) == theirs
    with pytest.raises(RuntimeError, match="use_xent is not on for this trainer"):
        remove_xent(trainer)


def test_saving_and_generating(tmp_path):
    trainer = trainers.make("SFT", tmp_path)
    ids = tiny.batch()[0]
    want = trainer.model.generate(ids, max_new_tokens=4, do_sample=False)
    use_xent(trainer)
    assert torch.equal(trainer.model.generate(ids, max_new_tokens=4, do_sample=False), want)
    trainer.save_model(str(tmp_path / "saved"))
