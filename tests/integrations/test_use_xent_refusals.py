"""What use_xent does not take: each with the reason, before a wrong number or a silent loss of the gain."""

import types

import pytest
import torch
from torch import nn

tiny = pytest.importorskip("tiny", reason="transformers is not installed")
import transformers  # noqa: E402

from xent_ops.integrations import heads  # noqa: E402
from xent_ops.integrations.transformers import remove_xent, use_xent  # noqa: E402


def patched(model, forward):
    """The model with a class of its own, whose forward is this one."""
    model.__class__ = type("Changed", (type(model),), {"forward": forward})
    return model


def test_something_else():
    trainer = types.SimpleNamespace(accelerator=None)
    with pytest.raises(TypeError, match=r"pass trainer\.model, or a trainer of TRL to xent_ops\.integrations\.trl"):
        use_xent(trainer)
    with pytest.raises(TypeError, match=r"expected a model of transformers.*got torch.nn.modules.linear.Linear"):
        use_xent(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="OptimizedModule"):
        use_xent(torch.compile(tiny.make(), backend="eager"))


@pytest.mark.parametrize(
    "options, error",
    [
        ({"label_smoothing": 2.0}, "label_smoothing"),
        ({"chunk_rows": 1.5}, "chunk_rows"),
        ({"chunk_rows": 0}, "chunk_rows must be at least 1, or None for the default, got 0"),
        ({"in_eval": "yes"}, "in_eval must be True or False, got 'yes'"),
        ({"lse_square_scale": -1}, "lse_square_scale must be at least 0, got -1.0"),
    ],
)
def test_options(options, error):
    with pytest.raises((TypeError, ValueError), match=error):
        use_xent(tiny.make(), **options)


def test_twice():
    model = tiny.make()
    use_xent(model)
    with pytest.raises(RuntimeError, match="use_xent is on already"):
        use_xent(model)


BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
BAMBA = {"mamba_n_heads": 2, "mamba_d_head": 16, "mamba_d_state": 8, "attn_layer_indices": [0]}
MODELS = {
    "LlamaModel": ("Llama", tiny.SIZES, "LlamaModel has no head"),
    "MobileBertForMaskedLM": (  # multiplies by its head's weight
        "MobileBert",
        BERT | {"embedding_size": 16, "intra_bottleneck_size": 16},
        "MobileBertForMaskedLM calls its head 0 times",
    ),
    "BambaForCausalLM": (  # adds a z-loss of its own
        "Bamba",
        tiny.SIZES | BAMBA | {"z_loss_coefficient": 1e-3},
        "BambaForCausalLM reads its logits beside the loss: logsumexp",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    """A refusal leaves the model as it was."""
    family, sizes, text = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**(sizes | tiny.TOKENS))
    model = getattr(transformers, name)(config).train()
    before = list(vars(model))
    with pytest.raises(ValueError, match=text):
        use_xent(model)
    assert list(vars(model)) == before and model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_loss_of_its_own():
    model = tiny.make()
    model.loss_function = lambda logits, labels, **kwargs: logits.logsumexp(-1).mean()
    with pytest.raises(ValueError, match="LlamaForCausalLM reads its logits beside the loss: logsumexp"):
        use_xent(model)


def test_a_criterion():
    """As the models of flash-linear-attention have it, which gives the criterion hidden states and the head."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        loss = self.criterion(self.model(input_ids=input_ids).last_hidden_state, labels, self.lm_head.weight)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss)

    model = patched(tiny.make(), forward)
    model.criterion = lambda hidden, labels, weight: hidden.sum()
    with pytest.raises(ValueError, match=r"by model\.criterion: instead of use_xent, put .*docs/migrate\.md"):
        use_xent(model)


class Int8Linear(nn.Linear):
    """As quantised heads are: a subclass with a forward of its own."""

    def forward(self, input):
        return super().forward(input)


def test_adapters_on_a_head_that_zero_3_has_partitioned():
    """DeepSpeed marks its parameters by attributes, and is not needed to see them."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = peft.get_peft_model(tiny.make(), peft.LoraConfig(target_modules=["lm_head"], task_type="CAUSAL_LM"))
    weight = model.get_base_model().lm_head.base_layer.weight
    weight.ds_id = 0
    with pytest.raises(TypeError, match=r"the head is a peft.*Linear whose weight is partitioned over ranks"):
        use_xent(model)
    del weight.ds_id
    use_xent(model)


def test_quantised_heads():
    model = tiny.make()
    model.lm_head = Int8Linear(16, 64, bias=False)
    with pytest.raises(TypeError, match=r"the head is a .*Int8Linear; expected torch.nn.Linear"):
        use_xent(model)
    head = nn.Linear(16, 64, bias=False)
    head.weight = nn.Parameter(head.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(TypeError, match=r"the head's weight is a Parameter of torch.float8_e4m3fn; expected"):
        heads.product(head, torch.ones(3, 16))
    head.weight = nn.Parameter(torch.ones(64, 16).as_subclass(type("Quantised", (torch.Tensor,), {})))
    with pytest.raises(TypeError, match="the head's weight is a Quantised"):
        heads.product(head, torch.ones(3, 16))


def test_a_head_whose_forward_is_replaced():
    model = tiny.make()
    model.lm_head.forward = model.lm_head.forward
    with pytest.raises(TypeError, match="the forward of the head is replaced"):
        use_xent(model)


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_training_without_labels(way):
    """Trainer's label_smoothing_factor takes the labels away and reads the logits."""
    model = tiny.make()
    ids, labels = tiny.batch()
    want = nn.functional.cross_entropy(model(input_ids=ids).logits.view(-1, tiny.V), labels.view(-1))
    use_xent(model)
    call = torch.compile(model, backend="eager") if way == "compiled" else model
    logits = call(input_ids=ids).logits
    with pytest.raises(
        RuntimeError, match=r"the logits of LlamaForCausalLM are read: log_softmax.*label_smoothing_factor"
    ):
        nn.functional.log_softmax(logits, dim=-1)
    torch.testing.assert_close(nn.functional.cross_entropy(logits.view(-1, tiny.V), labels.view(-1)), want)
    assert model.eval()(input_ids=ids).logits.shape == (2, 9, 64)


def test_data_parallel():
    model = tiny.make()
    ids, labels = tiny.batch()
    use_xent(model)
    replica = model._replicate_for_data_parallel()
    with pytest.raises(RuntimeError, match="use DDP"):
        replica(input_ids=ids, labels=labels)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_that_came_later(register, compiled):
    """They would be given zero rows. Those that were there before are part of the model."""

    def halve(head, *values):
        values = values[-1]
        return (values[0] / 2,) if isinstance(values, tuple) else values / 2

    model = tiny.make()
    use_xent(model)
    handle = getattr(model.lm_head, register)(halve)
    ids, labels = tiny.batch()
    call = torch.compile(model, backend="eager") if compiled else model
    with pytest.raises(RuntimeError, match="halve was registered on the head after use_xent"):
        call(input_ids=ids, labels=labels)
    remove_xent(model)
    if register == "register_forward_pre_hook":
        torch.compiler.reset()
        want = tiny.step(model, model, ids, labels)
        use_xent(model)
        tiny.assert_same(tiny.step(model, call, ids, labels), want)
    handle.remove()


def _of_the_labels(input_ids, labels):
    return transformers.modeling_outputs.CausalLMOutputWithPast(loss=labels.sum())


@pytest.mark.parametrize(
    "change, error",
    [
        (lambda model: model.resize_token_embeddings(80), "the head is not the one that use_xent has seen"),
        (
            lambda model: setattr(model, "loss_function", lambda logits, **_: logits.mean()),
            "LlamaForCausalLM reads its logits beside the loss: mean",
        ),
        (lambda model: setattr(model, "forward", _of_the_labels), "did not call its head"),  # as TRL's trainers do
    ],
    ids=["head", "loss_function", "forward"],
)
def test_what_came_later(change, error):
    model = tiny.make()
    use_xent(model)
    change(model)
    ids, labels = tiny.batch()
    with pytest.raises(RuntimeError, match=error):
        model(input_ids=ids, labels=labels)


def test_a_forward_without_hooks():
    """It is the untouched model's, with its logits."""
    model = tiny.make()
    ids, labels = tiny.batch()
    want = model(input_ids=ids, labels=labels)
    use_xent(model)
    found = model.forward(input_ids=ids, labels=labels)
    assert torch.equal(found.loss, want.loss) and torch.equal(found.logits, want.logits)


def test_arguments_that_the_model_keeps_to_itself():
    def forward(self, input_ids=None, labels=None, num_items_in_batch=None):
        output = self.model(input_ids=input_ids)
        logits = self.lm_head(output.last_hidden_state)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)

    model = patched(tiny.make(), forward)
    ids, labels = tiny.batch()
    want = tiny.step(model, model, ids, labels, num_items_in_batch=torch.tensor(9))
    use_xent(model)
    tiny.assert_same(tiny.step(model, model, ids, labels, num_items_in_batch=torch.tensor(9)), want)


def test_after_an_error_the_next_call_is_right():
    model = tiny.make()
    ids, labels = tiny.batch()
    want = tiny.step(model, model, ids, labels)
    use_xent(model)
    with pytest.raises(IndexError):
        model(input_ids=ids, labels=labels.clamp(min=0) + 64)
    tiny.assert_same(tiny.step(model, model, ids, labels), want)


def marked_as_partitioned():
    """(a model with use_xent, (what a hook of its head raises,)). Its head has DeepSpeed's mark, its weight is whole."""
    model, raised = tiny.make(), []

    def hook(module, args):
        if raised and args[0].numel():  # the call that computes the loss
            raise raised[0]

    model.lm_head.register_forward_pre_hook(hook)
    use_xent(model)
    model.lm_head.weight.ds_id = 0
    return model, raised


def test_a_hook_that_raises_leaves_the_head_as_it_was():
    """With a partitioned weight the head's forward is replaced for one call, which the hook ends before it."""
    (model, raised), batch = marked_as_partitioned(), tiny.batch()
    want = tiny.step(model, model, *batch)
    raised.append(KeyError("of a hook"))
    with pytest.raises(KeyError, match="of a hook"):
        tiny.step(model, model, *batch)
    assert "forward" not in vars(model.lm_head)
    raised.clear()
    tiny.assert_same(tiny.step(model, model, *batch), want, rtol=0.0)


def test_a_partitioned_head_whose_forward_is_replaced_later():
    (model, _), batch = marked_as_partitioned(), tiny.batch()
    model.lm_head.forward = lambda hidden: 2 * nn.functional.linear(hidden, model.lm_head.weight)
    with pytest.raises(TypeError, match="the forward of the head is replaced"):
        tiny.step(model, model, *batch)
