"""Several calls of models with use_xent: of other lengths, after an error, in several threads, with a shared head."""

import gc
import threading
import weakref

import pytest
import torch

tiny = pytest.importorskip("tiny", reason="transformers is not installed")

from xent_ops.integrations.transformers import remove_xent, use_xent  # noqa: E402


def test_other_lengths_and_counts_do_not_recompile():
    """Dynamo takes the shape of a tensor that it reaches through an nn.Linear as a constant: labels come another way."""
    model = tiny.make()
    use_xent(model)
    call = torch.compile(model, backend="eager", fullgraph=True)
    for tokens in (9, 7, 5):
        ids, labels = (values[:, :tokens].contiguous() for values in tiny.batch())
        with torch._dynamo.config.patch(error_on_recompile=tokens == 5):
            loss = call(input_ids=ids, labels=labels, num_items_in_batch=2 * tokens).loss
        torch.testing.assert_close(loss, model(input_ids=ids, labels=labels, num_items_in_batch=2 * tokens).loss)


@pytest.mark.parametrize("where", ["before the head", "in the loss"])
def test_an_error_leaves_nothing_behind(where):
    """No hidden states, with the graph behind them. The head computes logits for other callers."""
    model, (ids, labels), seen = tiny.make(), tiny.batch(), []
    hidden = torch.randn(2, 3, 16)
    want = model.lm_head(hidden)
    use_xent(model)

    def hook(module, args, output):
        seen.append(weakref.ref(output))
        if where == "before the head":
            raise KeyError("of a hook")

    model.model.norm.register_forward_hook(hook)
    with pytest.raises((KeyError, IndexError)):
        model(input_ids=ids, labels=labels.clamp(min=0) + 64)
    gc.collect()
    assert seen[0]() is None
    assert torch.equal(model.lm_head(hidden), want)


@pytest.mark.parametrize("end", [remove_xent, None])
def test_a_call_that_was_interrupted(end):
    """Ctrl-C runs no hook. The call ends with remove_xent, or with the model."""
    model, (ids, labels), seen = tiny.make(), tiny.batch(), []
    use_xent(model)

    def hook(module, args, output):
        seen.append(weakref.ref(output))
        raise KeyboardInterrupt

    model.model.norm.register_forward_hook(hook)
    with pytest.raises(KeyboardInterrupt):
        model(input_ids=ids, labels=labels)
    if end is None:
        del model
    else:
        end(model)
    gc.collect()
    assert seen[0]() is None


def test_a_call_of_another_thread_in_the_middle_of_one():
    model, (first, second), found = tiny.make(), (tiny.batch(), tiny.batch(3)), []
    want = [tiny.step(model, model, *batch)[1:] for batch in (first, second)]
    use_xent(model)

    def hook(module, args):
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=lambda: found.append(model(input_ids=second[0], labels=second[1]).loss))
            thread.start()
            thread.join()

    model.model.norm.register_forward_pre_hook(hook)
    tiny.assert_same((None, *tiny.step(model, model, *first)[1:]), (None, *want[0]))
    torch.testing.assert_close(found[0].detach(), want[1][0], rtol=1e-5, atol=0.0)


def test_two_models_with_one_head():
    models, batch = [tiny.make(), tiny.make()], tiny.batch()
    models[1].lm_head = models[0].lm_head
    want = [tiny.step(model, model, *batch) for model in models]
    for model in models:
        use_xent(model)
    for model, of_model in zip(models, want, strict=True):
        tiny.assert_same(tiny.step(model, model, *batch), of_model)
    remove_xent(models[0])
    assert models[0](input_ids=batch[0], labels=batch[1]).logits is not None
    tiny.assert_same(tiny.step(models[1], models[1], *batch), want[1])


def test_the_loss_function_that_was_set_comes_back():
    """GPT-2 made from a configuration is given this one, where its own depends on config.loss_type."""
    model = tiny.make()
    model.loss_type, of_models = "ForSequenceClassification", model.loss_function
    model.loss_function = of_models
    use_xent(model)
    remove_xent(model)
    assert model.loss_function is of_models


def test_the_default_device_is_not_the_models():
    """A head that multiplies in float32 is tried with random rows, on the CPU."""

    class Float32Product(torch.nn.Linear):
        def forward(self, input):
            return torch.nn.functional.linear(input.float(), self.weight.float())

    model = tiny.make(dtype=torch.bfloat16)
    model.lm_head.__class__ = Float32Product
    with torch.device("meta"):
        assert use_xent(model).logits_dtype is torch.float32


@pytest.mark.parametrize("in_eval", [False, True])
@pytest.mark.parametrize("strict", [True, False])
def test_export(strict, in_eval):
    """Without strict, weights are fake tensors while it traces."""
    model, (ids, labels) = tiny.make(use_cache=False).train(not in_eval), tiny.batch()
    use_xent(model, in_eval=in_eval)
    with torch.no_grad():
        program = torch.export.export(model, (), {"input_ids": ids, "labels": labels}, strict=strict).module()
        found, want = (dict(call(input_ids=ids, labels=labels)) for call in (program, model))
    assert ("predictions" in want) == in_eval
    torch.testing.assert_close(found, want)


def test_a_model_without_values():
    with torch.device("meta"):
        model = tiny.make()
    with pytest.raises(ValueError, match="LlamaForCausalLM is on the meta device, where weights have no values"):
        use_xent(model)
