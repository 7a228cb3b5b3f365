"""What Megatron-Core does with its logits beside their loss: the same by ``use_xent``, or an error that names it."""

import pickle

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ImportError)
import megatron_cases as cases
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig, multi_token_prediction
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron_models import B, H, S, V, batches, gradients, make, one_rank, one_step  # noqa: F401

from xent_ops.integrations.megatron import use_xent

COUNTS = hasattr(multi_token_prediction, "_compute_mtp_acceptance_counts")
WITH_COUNTS = pytest.mark.skipif(not COUNTS, reason="Megatron-Core before 0.19")
MASKED = pytest.mark.parametrize("options", [{}, {"loss_mask": True}], ids=["rows", "mask"])


@MASKED
@pytest.mark.parametrize("name", ["calculate_per_token_loss", "mtp_detach_heads", "mtp_use_repeated_layer"])
def test_options_of_multi_token_prediction(name, options):
    if not hasattr(TransformerConfig, name):
        pytest.skip(f"{name} is not in this Megatron-Core")
    want, model = make(mtp_num_layers=2, **{name: True}), make(mtp_num_layers=2, **{name: True})
    use_xent(model, **options)
    cases.assert_close(one_step(model), one_step(want))


@MASKED
def test_multi_token_prediction_of_packed_sequences(monkeypatch, options):
    """Megatron shifts labels and masks within each sequence."""
    theirs = DotProductAttention.forward

    def forward(self, *args, packed_seq_params=None, **kwargs):  # in plain torch, it refuses the argument
        return theirs(self, *args, **kwargs)

    monkeypatch.setattr(DotProductAttention, "forward", forward)
    (ids, positions, attention), labels, mask = next(batches())
    ends = torch.tensor([0, 3, S - 1, S], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="sbhd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
    batch, found = ((ids[:1], positions[:1], attention), labels[:1], mask[:1] + 0.5), []
    for used in (False, True):
        model = make(mtp_num_layers=2)
        if used:
            use_xent(model, **options)
        found.append(one_step(model, batch, packed_seq_params=packed))
    cases.assert_close(found[1], found[0])


@WITH_COUNTS
def test_acceptances():
    cases.compare_acceptances("cpu", "multi-token prediction")


@WITH_COUNTS
def test_acceptances_over_ranks(pool, device):
    pool(2, device).run(cases.acceptances)


@MASKED
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("heads", [1, 3])
def test_products(options, training, heads):
    """Since 0.19 Megatron counts in training how often the best class of a further head is the label: one product."""
    flops = []
    for used in (False, True):
        model = make(mtp_num_layers=heads - 1 or None).train(training)
        if used:
            products = use_xent(model, **options).head_products
            assert products == (3 if options else 4)
        with FlopCounterMode(display=False) as counter:
            one_step(model)
        flops.append(counter.get_total_flops())
    more = heads * (products - 3) + (heads - 1) * (COUNTS and training)
    assert flops[1] - flops[0] == more * 2 * B * S * H * V


@MASKED
def test_multi_token_prediction_without_labels(options):
    """The model returns logits. Since 0.19 the further heads are trained on the next tokens of the input."""
    if not hasattr(multi_token_prediction, "process_mtp_loss"):
        pytest.skip("Megatron-Core before 0.17 raises an error")
    (inputs, _, mask), found = next(batches()), []
    for used in (False, True):
        model = make(mtp_num_layers=2)
        if used:
            use_xent(model, **options)
        logits = model(*inputs, loss_mask=mask)
        logits.square().sum().backward()
        found.append((logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    assert any("mtp" in name for name in found[0][1]) or not COUNTS
    cases.assert_close(*found, 0.0)


@MASKED
@pytest.mark.parametrize("heads", [1, 3])
def test_mup(options, heads):
    """MuP multiplies the logits by a factor."""
    if not hasattr(TransformerConfig, "use_mup"):
        pytest.skip("Megatron-Core before 0.17")
    names = {"use_mup": True, "mup_base_hidden_size": H // 4, "mtp_num_layers": heads - 1 or None}
    want, model = make(**names), make(**names)
    assert model.config.mup_output_mult == 1 / 4
    use_xent(model, **options)
    cases.assert_close(one_step(model), one_step(want))


class Changed(GPTModel):
    """Its loss is that of other logits, ``change(logits)``."""

    def _postprocess(self, *args, **kwargs):
        theirs = self.compute_language_model_loss
        self.compute_language_model_loss = lambda labels, logits: theirs(labels, self.change(logits))
        try:
            return super()._postprocess(*args, **kwargs)
        finally:
            self.compute_language_model_loss = theirs


class Scaled(Changed):
    def change(self, logits):
        return logits * 2


@MASKED
def test_a_factor_of_the_logits(options):
    want, model = one_step(make(Scaled)), make(Scaled)
    use_xent(model, **options)
    cases.assert_close(one_step(model), want)


READERS = {
    "__add__": lambda logits: logits + 1,
    "a product with a tensor": lambda logits: logits * torch.ones(V),
    "mul": lambda logits: torch.mul(logits, 2),
    "__rmul__": lambda logits: 2 * logits,
    "__imul__": lambda logits: logits.__imul__(2),
    "tanh": torch.tanh,
    "stack": lambda logits: torch.stack([logits]),
    "__getitem__": lambda logits: logits[:],
    "__eq__": lambda logits: logits == 0,
    "__len__": len,
    "__bool__": bool,
    "shape": lambda logits: logits.shape,
    "transpose": lambda logits: logits.transpose(0, 1),
    "detach": lambda logits: logits.detach(),
    r"size\(0\)": lambda logits: logits.size(0),
    r"size\(None\)": lambda logits: logits.max(),
    "argmax with dim": lambda logits: torch.argmax(logits, dim=0),
    "__reduce__": pickle.dumps,
}


@pytest.mark.parametrize("word", READERS)
def test_what_reads_logits_is_refused(word):
    class Reader(Changed):
        def change(self, logits):
            return READERS[word](logits)

    model = make(Reader)
    use_xent(model)
    with pytest.raises(RuntimeError, match=rf"the model reads its logits \({word}\), which use_xent leaves out"):
        one_step(model)


class OwnLoss(GPTModel):
    def _postprocess(self, hidden_states, **kwargs):
        return self.output_layer(hidden_states)[0].sum()


class OtherLogits(GPTModel):
    """Its loss is that of logits that the output layer did not make."""

    def _postprocess(self, hidden_states, labels, **kwargs):
        return self.compute_language_model_loss(labels, hidden_states @ self.output_layer.weight.t())


@pytest.mark.parametrize("kind, words", [
    (OwnLoss, r"the model reads its logits \(sum\)"), (OtherLogits, "OtherLogits takes the loss of other logits"),
])  # fmt: skip
def test_another_loss_is_refused(kind, words):
    model = make(kind)
    use_xent(model)
    with pytest.raises(RuntimeError, match=words):
        one_step(model)
