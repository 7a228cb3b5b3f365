"""Models and options of Megatron-Core that ``use_xent`` refuses."""

import pytest
import torch
from torch import nn

import xent_ops

pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ImportError)
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.module import Float16Module
from megatron_models import batches, make, one_rank  # noqa: F401

from xent_ops.integrations.megatron import use_xent


class Softcapped(ColumnParallelLinear):
    def forward(self, *args, **kwargs):
        logits, bias = super().forward(*args, **kwargs)
        return logits.tanh(), bias


class OtherProduct(ColumnParallelLinear):
    def _forward_impl(self, input, weight, *args, **kwargs):
        return super()._forward_impl(input, weight * 2, *args, **kwargs)


class OtherLoss(GPTModel):
    def compute_language_model_loss(self, labels, logits):
        return super().compute_language_model_loss(labels, logits) * 2


@pytest.mark.parametrize("kind", [Softcapped, OtherProduct])
def test_another_output_layer_is_refused(kind):
    model = make()
    model.output_layer.__class__ = kind
    with pytest.raises(TypeError, match=rf"{kind.__name__} is not that of megatron.core's ColumnParallelLinear"):
        use_xent(model)


def test_other_models_are_refused():
    with pytest.raises(TypeError, match=r"compute_language_model_loss of .*OtherLoss is not that of megatron.core's"):
        use_xent(make(OtherLoss))
    with pytest.raises(TypeError, match=r"expected a GPTModel or HybridModel of megatron.core, .* got .*Linear"):
        use_xent(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"use_xent takes a GPTModel .* got list: call it on each model in it"):
        xent_ops.use_xent([make()])


def test_twice_is_refused():
    model = make(dtype=torch.bfloat16)
    use_xent(model)
    with pytest.raises(RuntimeError, match="use_xent is on already"):
        use_xent(Float16Module(model.config, model))


def test_a_deferred_gradient_of_the_weight_is_refused():
    model = make()
    model.config.defer_embedding_wgrad_compute = True
    with pytest.raises(ValueError, match="defer_embedding_wgrad_compute=True is not supported: expected False"):
        use_xent(model)


def test_a_weight_in_parts_is_refused():
    """Since 0.19 Megatron can keep the weight in parts, which the layer's forward gathers (gtp_remat)."""
    model = make()
    model.output_layer.gtp_remat_size = 2
    with pytest.raises(ValueError, match=r"output_layer has its weight in 2 parts \(gtp_remat\): expected 1"):
        use_xent(model)


@pytest.mark.parametrize("options, words", [
    ({"chunk_rows": 0}, "chunk_rows"), ({"label_smoothing": 2.0}, "label_smoothing"), ({"loss_mask": 1}, "loss_mask"),
    ({"logits_dtype": "float32"}, "logits_dtype"), ({"products": "fp4"}, "products"),
])  # fmt: skip
def test_bad_options_are_refused(options, words):
    with pytest.raises((TypeError, ValueError), match=words):
        use_xent(make(), **options)


def test_parts_of_the_forward_are_refused():
    model, (inputs, labels, _) = make(), next(batches())
    use_xent(model)
    with pytest.raises(RuntimeError, match="parts of GPTModel were called without its forward"):
        model.compute_language_model_loss(labels, inputs[0])


def test_a_mask_of_another_shape_is_refused():
    model, (inputs, labels, mask) = make(), next(batches())
    use_xent(model, loss_mask=True)
    with pytest.raises(ValueError, match="token_weight"):
        model(*inputs, labels=labels, loss_mask=mask[:, :-1])
