"""use_xent on models of transformers: losses and gradients against the untouched model, in float32 at 1e-5 relative."""

import copy
import io
import pickle
import re
from pathlib import Path

import pytest
import torch
from helpers.dispatch_log import Notes
from torch.utils._pytree import tree_leaves, tree_map

import xent_ops

tiny = pytest.importorskip("tiny", reason="transformers is not installed")

from transformers.modeling_outputs import BaseModelOutputWithPast  # noqa: E402

from xent_ops.integrations.transformers import remove_xent, use_xent  # noqa: E402


def _models_by_way():
    for name in tiny.MODELS:
        yield pytest.param(name, "eager", id=f"{name}-eager")
        marks = [] if name in QUICKLY_COMPILED else [pytest.mark.slow]
        if name != "RecurrentGemma":  # Dynamo writes its F.tanh into the graph: test_use_xent_kinds.py, test_one_graph
            yield pytest.param(name, "compiled", id=f"{name}-compiled", marks=marks)


# A tail, an auxiliary loss. Tracing takes 1 to 10 s a model.
QUICKLY_COMPILED = ("Gemma2", "Mixtral")


@pytest.mark.parametrize("name, way", list(_models_by_way()))
def test_losses_and_gradients(name, way):
    model = tiny.make(name)
    ids, labels = tiny.batch()
    want = tiny.step(model, model, ids, labels)
    report = use_xent(model)
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if way == "compiled" else model
    got = tiny.step(model, call, ids, labels)
    tiny.assert_same(got, want)
    assert got[0].logits is None and "logits" not in got[0]
    assert (report.softcap, report.logit_scale) == tiny.MODELS[name][2:]
    if name == "Mixtral":  # the loss is that of the tokens and of the routers
        torch.testing.assert_close(got[0].aux_loss, want[0].aux_loss)
        assert got[0].aux_loss > 0


class Float32Product(torch.nn.Linear):
    def forward(self, input):
        return torch.nn.functional.linear(input.float(), self.weight.float())


def test_a_head_that_upcasts_its_operands():
    """The loss is that of its float32 product. The gradient of the logits has 16 bits, as without the upcast."""
    model = tiny.make("Gemma2", torch.bfloat16)
    model.lm_head.__class__ = Float32Product
    ids, labels = tiny.batch()
    want = tiny.step(model, model, ids, labels)
    report = use_xent(model)
    assert report.logits_dtype is torch.float32 and "logits in torch.float32" in str(report)
    got = tiny.step(model, model, ids, labels)
    torch.testing.assert_close(got[1], want[1], rtol=1e-6, atol=0.0)
    tiny.assert_same((got[0], want[1], got[2]), want, rtol=2e-2)
    remove_xent(model)
    model.lm_head.__class__ = torch.nn.Linear
    assert abs(tiny.step(model, model, ids, labels)[1] - want[1]) > 1e-5 * want[1]


@pytest.mark.slow  # Inductor compiles whole models with a C++ compiler
@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Mixtral"])
def test_through_inductor(name):
    model = tiny.make(name)
    ids, labels = tiny.batch()
    want = tiny.step(model, model, ids, labels)
    use_xent(model)
    got = tiny.step(model, torch.compile(model, fullgraph=True), ids, labels)
    tiny.assert_same(got, want)


def shapes(func, args, result):
    """Of tensors that have memory for their elements: one number, expanded to the logits' shape, has none."""
    tensors = [tensor for tensor in tree_leaves(result) if torch.is_tensor(tensor)]
    return [tuple(tensor.shape) for tensor in tensors if tensor.untyped_storage().nbytes() >= tensor.nbytes]


def test_no_logits_are_made():
    model = tiny.make()
    ids, labels = tiny.batch()
    of_logits = [(2, 9, tiny.V), (18, tiny.V)]
    with Notes(shapes) as untouched:
        model(input_ids=ids, labels=labels)
    assert any(shape in of_logits for shape in untouched.seen)
    use_xent(model)
    with Notes(shapes) as used:
        model(input_ids=ids, labels=labels)
    assert not any(shape in of_logits for shape in used.seen)
    assert (2, 0, tiny.V) in used.seen


def test_batch_invariant():
    """A sequence has the same gradient of its hidden states alone and beside others. With MKL it fails by default."""
    model = tiny.make("Llama", hidden_size=64, vocab_size=1003)
    use_xent(model, batch_invariant=True)
    hidden, labels = torch.randn(40, 2, 64), torch.randint(1003, (40, 2))

    def gradient(rows):
        x = hidden[rows].requires_grad_()
        model.model.forward = lambda *args, **kwargs: BaseModelOutputWithPast(last_hidden_state=x)
        return torch.autograd.grad(model(input_ids=labels[rows], labels=labels[rows], num_items_in_batch=7).loss, x)[0]

    assert torch.equal(gradient([3]), gradient(list(range(40)))[3:4])


OF_CALLS = [
    {"num_items_in_batch": torch.tensor(20)},
    {"num_items_in_batch": 20},
    {"ignore_index": 5},
    {"shift_labels": torch.arange(18).view(2, 9)},
    {"shift_labels": torch.arange(18).view(2, 9), "num_items_in_batch": torch.tensor(20.0), "ignore_index": 5},
    {"return_dict": False},
]


def _calls_by_way():
    for options in OF_CALLS:
        yield pytest.param(options, "eager", id=f"{'-'.join(options)}-eager")
        if len(options) == 3 or "return_dict" in options:  # compiled, the others are in the call with three
            yield pytest.param(options, "compiled", id=f"{'-'.join(options)}-compiled")


@pytest.mark.parametrize("options, way", list(_calls_by_way()))
def test_arguments_of_the_call(options, way):
    model = tiny.make()
    ids, labels = tiny.batch()
    labels = labels.clamp(min=5) if "ignore_index" in options else labels
    want = tiny.step(model, model, ids, labels, **options)
    use_xent(model)
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if way == "compiled" else model
    got = tiny.step(model, call, ids, labels, **options)
    tiny.assert_same(got, want)
    if options == {"return_dict": False}:
        assert got[0][1].shape == (2, 0, tiny.V)  # what comes after the logits keeps its place


def test_other_counts_do_not_recompile():
    model = tiny.make()
    ids, labels = tiny.batch()
    use_xent(model)
    with torch._dynamo.config.patch(error_on_recompile=True):
        call = torch.compile(model, backend="aot_eager", fullgraph=True)
        first, second = (tiny.step(model, call, ids, labels, num_items_in_batch=torch.tensor(n)) for n in (10, 20))
    torch.testing.assert_close(first[1], 2 * second[1])


def test_labels_by_position():
    model = tiny.make()
    ids, labels = tiny.batch()
    want = model(ids, None, None, None, None, labels).loss
    use_xent(model)
    output = model(ids, None, None, None, None, labels)
    assert output.logits is None
    torch.testing.assert_close(output.loss, want, rtol=1e-5, atol=0.0)


def test_accumulated_micro_batches_are_one_batch():
    model = tiny.make()
    ids, labels = tiny.batch(4)
    total = (labels[:, 1:] != -100).sum()
    _, want_loss, want = tiny.step(model, model, ids, labels)
    use_xent(model)
    model.zero_grad()
    loss = 0.0
    for rows in (slice(0, 1), slice(1, 4)):
        part = model(input_ids=ids[rows], labels=labels[rows], num_items_in_batch=total).loss
        part.backward()
        loss += part.detach()
    tiny.assert_same((None, loss, {name: p.grad for name, p in model.named_parameters()}), (None, want_loss, want))


def test_label_smoothing_is_that_of_trainer():
    from transformers.trainer_pt_utils import LabelSmoother

    model = tiny.make("Gemma2")
    ids, labels = tiny.batch()
    want = LabelSmoother(epsilon=0.1)(model(input_ids=ids), labels, shift_labels=True)
    use_xent(model, label_smoothing=0.1)
    torch.testing.assert_close(model(input_ids=ids, labels=labels).loss, want, rtol=1e-5, atol=0.0)


def test_z_loss():
    model = tiny.make()
    ids, labels = tiny.batch()
    logits = model(input_ids=ids).logits
    want = xent_ops.cross_entropy(logits[:, :-1], labels[:, 1:], dim=-1, lse_square_scale=1e-2)
    use_xent(model, lse_square_scale=1e-2)
    torch.testing.assert_close(model(input_ids=ids, labels=labels).loss, want, rtol=1e-5, atol=0.0)


def test_chunks_and_skipped_rows():
    model = tiny.make("Gemma2")
    ids, labels = tiny.batch()
    want = tiny.step(model, model, ids, labels)
    use_xent(model, chunk_rows=5, skip_ignored=True, accumulate_dtype=torch.float32)
    tiny.assert_same(tiny.step(model, model, ids, labels), want)


SUM = {"num_items_in_batch": torch.tensor(20)}


@pytest.mark.parametrize(
    "options, way", [({}, "eager"), (SUM, "eager"), (SUM, "compiled")], ids=["mean", "sum", "sum-compiled"]
)
def test_evaluation(options, way):
    """Untouched without in_eval; with it, predictions and accuracy in the place of logits."""
    model = tiny.make("Granite").eval()
    ids, labels = tiny.batch()
    with torch.no_grad():
        want = model(input_ids=ids, labels=labels, **options)
        use_xent(model)
        same = model(input_ids=ids, labels=labels, **options)
        torch.testing.assert_close((same.loss, same.logits), (want.loss, want.logits), rtol=0.0, atol=0.0)
        remove_xent(model)
        use_xent(model, in_eval=True)
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if way == "compiled" else model
        got = call(input_ids=ids, labels=labels, **options)
        assert call(input_ids=ids).logits.shape == (2, 9, tiny.V)
    assert got.logits is None and isinstance(got, type(want))
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-5, atol=0.0)
    for twin in (tree_map(lambda leaf: leaf, got), pickle.loads(pickle.dumps(got))):
        assert type(twin) is type(got) and twin.keys() == got.keys()
        assert torch.equal(twin.predictions, got.predictions) and torch.equal(twin.accuracy, got.accuracy)
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    counted = shifted != -100
    predictions = want.logits.argmax(-1)
    assert torch.equal(got.predictions, predictions.masked_fill(~counted, -1))
    torch.testing.assert_close(got.accuracy, (predictions == shifted)[counted].float().mean())


def test_training_without_gradients_has_no_logits_either():
    model = tiny.make()
    ids, labels = tiny.batch()
    want = model(input_ids=ids, labels=labels).loss
    use_xent(model)
    with torch.no_grad():
        output = model(input_ids=ids, labels=labels)
        assert model(input_ids=ids).logits.shape == (2, 9, tiny.V)
    assert output.logits is None
    torch.testing.assert_close(output.loss, want.detach(), rtol=1e-5, atol=0.0)
    assert model.generate(ids, max_new_tokens=2, do_sample=False).shape == (2, 11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype):
    """Against float64: as near to it as the untouched model, which rounds its logits."""
    model = tiny.make("Gemma2")
    ids, labels = tiny.batch()
    exact = copy.deepcopy(model).double()(input_ids=ids, labels=labels).loss
    model.to(dtype)
    untouched = model(input_ids=ids, labels=labels).loss
    use_xent(model)
    loss = model(input_ids=ids, labels=labels).loss
    assert loss.dtype == torch.float32
    assert abs(loss - exact) <= 2 * abs(untouched - exact) + 1e-2


def test_autocast():
    model = tiny.make()
    ids, labels = tiny.batch()
    with torch.autocast("cpu", torch.bfloat16):
        want = tiny.step(model, model, ids, labels)
        use_xent(model)
        got = tiny.step(model, model, ids, labels)
    tiny.assert_same(got, want, rtol=2e-2)
    assert got[2]["lm_head.weight"].dtype == torch.float32


def _hooks_and_attributes(model):
    names = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
    hooks = [[dict(getattr(module, name)) for name in names] for module in model.modules()]
    return hooks, {key: value for key, value in vars(model).items() if not key.startswith("_forward")}


@pytest.mark.parametrize("training", [True, False])
def test_the_loss_of_a_second_call_of_the_head(training):
    """As with ZeRO-3, whose mark is on the weight here. Another hook changes the hidden states once."""
    found, calls, (ids, labels) = [], [], tiny.batch()
    for used in (False, True):
        torch.manual_seed(0)
        model = tiny.make("Gemma2").train(training)
        calls.clear()
        model.lm_head.register_forward_pre_hook(lambda head, args: (calls.append(args[0].shape), args[0] / 2)[1])
        if used:
            use_xent(model, in_eval=True)
            calls.clear()
            model.lm_head.weight.ds_id = 0
        found.append(tiny.step(model, model, ids, labels))
        assert [shape[:-1].numel() for shape in calls] == ([0, 18] if used else [18])
    tiny.assert_same(found[1], found[0])


def test_remove_xent_restores_everything():
    model = tiny.make()
    ids, labels = tiny.batch()
    hooks, attributes = _hooks_and_attributes(model)
    want = tiny.step(model, model, ids, labels)
    use_xent(model)
    assert _hooks_and_attributes(model)[0] != hooks
    remove_xent(model)
    after, after_attributes = _hooks_and_attributes(model)
    assert after == hooks and after_attributes.keys() == attributes.keys()
    got = tiny.step(model, model, ids, labels)
    assert torch.equal(got[1], want[1]) and torch.equal(got[0].logits, want[0].logits)
    with pytest.raises(RuntimeError, match="use_xent is not on"):
        remove_xent(model)


def test_the_probe_leaves_no_trace():
    """Modules in training and in evaluation stay so; no gradient, no random number."""
    model = tiny.make()
    model.model.layers[0].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    use_xent(model)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def _pickled(model):
    return torch.load(io.BytesIO(_bytes(model)), weights_only=False)


def _bytes(model):
    buffer = io.BytesIO()
    torch.save(model, buffer, pickle_module=pickle)
    return buffer.getvalue()


@pytest.mark.parametrize("twin", [copy.deepcopy, _pickled], ids=["deepcopy", "pickle"])
def test_a_copy_has_a_head_of_its_own(twin):
    model = tiny.make()
    ids, labels = tiny.batch()
    use_xent(model)
    other = twin(model)
    with torch.no_grad():
        other.lm_head.weight.mul_(0.5)
    loss = other(input_ids=ids, labels=labels).loss
    assert not torch.allclose(loss, model(input_ids=ids, labels=labels).loss, rtol=1e-2)
    remove_xent(other)
    torch.testing.assert_close(other(input_ids=ids, labels=labels).loss, loss, rtol=1e-5, atol=0.0)
    assert model(input_ids=ids, labels=labels).logits is None


def test_the_report():
    text = str(use_xent(tiny.make("Qwen2")))
    assert "Qwen2ForCausalLM: lm_head (16 features, 64 classes, tied to the embedding)" in text
    assert "not replaced: evaluation" in text
    report = use_xent(tiny.make("Gemma2"), in_eval=True)
    assert (report.classes, report.features, report.adapters, report.softcap) == (64, 16, [], 3.0)
    assert "in training and evaluation" in str(report) and "softcap 3" in str(report)


def test_the_blocks_of_the_documentation_run():
    text = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 3
    namespace = {}
    for block in blocks:
        exec(block, namespace)


def test_a_compiled_model_of_the_same_class_before():
    """Dynamo guards no hooks: what it compiled for an untouched model must not run for one with use_xent."""
    ids, labels = tiny.batch()
    for used in (False, True):
        model = tiny.make("Llama")
        want = tiny.step(model, model, ids, labels)
        if used:
            use_xent(model)
        found = tiny.step(model, torch.compile(model, backend="eager"), ids, labels)
        tiny.assert_same(found, want)
