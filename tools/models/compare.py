"""One class: loss and gradients of the untouched model and of the model with ``use_xent``, in float32 on the CPU."""

from __future__ import annotations

import inspect
import random
import traceback
from typing import Any

import numpy
import torch
import transformers

import xent_ops

from .configs import VARIANTS, config_of

# Both as a part of the untouched loss, or of its largest gradient. The largest seen are 2e-7 and 3e-6.
LOSS, GRADIENT = 2e-6, 1e-4
LARGEST = 40_000_000  # parameters


def compare(name: str, kind: str) -> dict[str, Any]:
    """{"state": "equal", "different", "refused", "crashed" or "not built", "why", "loss", "gradient"}."""
    cls = getattr(transformers, name, None)
    if cls is None or cls.config_class is None:
        return {"state": "not built", "why": "not in transformers" if cls is None else "has no class of configurations"}
    first = None
    for variant in VARIANTS:
        try:
            model, call = build(cls, kind, variant)
        except Exception as error:
            first = first or f"{type(error).__name__}: {error}"
            if "timm" in first:
                break
            continue
        return of_model(model, call)
    return {"state": "not built", "why": first}


def build(cls: Any, kind: str, variant: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """(a model in training mode, arguments with which it returns a loss that has gradients)."""
    config = config_of(cls, variant)
    try:
        with torch.device("meta"):
            parameters = sum(parameter.numel() for parameter in cls(config).parameters())
    except (RuntimeError, NotImplementedError):
        parameters = 0  # it makes numbers while it is built
    if parameters > LARGEST:
        raise ValueError(f"{parameters / 1e6:.0f} M parameters by the rules")
    torch.manual_seed(0)
    model = cls(config).train()
    call = arguments(model, kind, variant)
    zeros = torch.zeros(2, 12, dtype=torch.long)
    further = [{}, {"token_type_ids": zeros}, {"mm_token_type_ids": zeros}, {"attention_mask": zeros + 1}]
    further.append({"decoder_input_ids": call["labels"].clamp(min=0)})
    first = None
    for more in further:
        try:
            _, loss, _ = step(model, call | more)
            if not loss.isfinite():
                raise ValueError(f"its loss is {loss}")
            return model, call | more
        except Exception as error:
            first = first or error
    raise first


def arguments(model: Any, kind: str, variant: dict[str, Any]) -> dict[str, Any]:
    accepted = inspect.signature(model.forward).parameters
    draws = torch.Generator().manual_seed(3)
    known = min(90, getattr(model.config.get_text_config(), "vocab_size", None) or 90)
    ids = torch.randint(5, known, (2, 12), generator=draws)
    labels = ids.clone()
    if kind == "masked":
        kept = torch.rand(ids.shape, generator=draws) < 0.4
        kept[:, 0] = True
        labels = labels.masked_fill(~kept, -100)
    elif kind in ("seq2seq", "speech") and "same_lengths" not in variant:
        labels = torch.randint(5, known, (2, 9), generator=draws)
        labels[:, -2:] = -100
    else:
        labels[:, :3] = -100
    found: dict[str, Any] = {"labels": labels}
    has_kwargs = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    if "use_cache" in accepted or (has_kwargs and kind in ("causal", "image-text")):
        found["use_cache"] = False
    if "pixel_values" in accepted and "image" in variant:
        vision = getattr(model.config, "vision_config", getattr(model.config, "encoder", model.config))
        size = getattr(vision, "image_size", 32)
        size = size if isinstance(size, int) else 32
        images = (2, 1) if type(model).__name__.startswith("Idefics") else (2,)
        found["pixel_values"] = torch.randn(*images, 3, size, size, generator=draws)
        if "qformer_input_ids" in accepted:
            found["qformer_input_ids"] = ids
    if "bbox" in accepted:
        found["bbox"] = torch.zeros(2, 12, 4, dtype=torch.long)
    if hasattr(model, "set_default_language"):
        model.set_default_language("en_XX")
    if kind == "speech":
        found |= sounds(model, accepted, draws)
    if "input_ids" in accepted and not {"input_features", "input_values"} & found.keys():
        found["input_ids"] = ids
    return found


def sounds(model: Any, accepted: Any, draws: torch.Generator) -> dict[str, torch.Tensor]:
    if "input_values" in accepted and "input_features" not in accepted:
        return {"input_values": torch.randn(2, 4000, generator=draws)}
    if "input_features" not in accepted:
        return {}
    config, bins = model.config, 80
    for name in ("", "encoder_config", "audio_config", "encoder"):
        part = getattr(config, name, None) if name else config
        for field in ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim"):
            bins = getattr(part, field, None) or bins
    bins = config.d_model if type(model).__name__.startswith("Pop2Piano") else bins
    if "hisper" in type(model).__name__ or "MoonshineStreaming" in type(model).__name__:  # of one length, bins first
        frames = 2 * getattr(config, "max_source_positions", 50)
        return {"input_features": torch.randn(2, bins, frames, generator=draws)}
    return {"input_features": torch.randn(2, 60, bins, generator=draws)}


def step(model: Any, call: dict[str, Any]) -> tuple[Any, torch.Tensor, dict[str, torch.Tensor]]:
    """(output, loss, gradients by name), the same draws in each step."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    output = model(**call)
    if output.loss is None:
        raise ValueError("it returns no loss")
    output.loss.backward()
    grads = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    return output, output.loss.detach().clone(), grads


def of_model(model: Any, call: dict[str, Any]) -> dict[str, Any]:
    _, loss, grads = step(model, call)
    repeated = difference((loss, grads), step(model, call)[1:])
    try:
        xent_ops.use_xent(model)
        output, *found = step(model, call)
    except Exception as error:
        ours = "xent_ops" in traceback.extract_tb(error.__traceback__)[-1].filename
        return {"state": "refused" if ours else "crashed", "why": f"{type(error).__name__}: {error}"}
    row = dict(zip(("loss", "gradient"), difference((loss, grads), found), strict=True))
    xent_ops.remove_xent(model)
    restored = difference((loss, grads), step(model, call)[1:])
    equal = row["loss"] <= LOSS + 2 * repeated[0] and row["gradient"] <= GRADIENT + 2 * repeated[1]
    if not equal:
        return {"state": "different", "why": f"loss by {row['loss']:.1e}, gradients by {row['gradient']:.1e}", **row}
    if restored[0] > 2 * repeated[0] or restored[1] > 2 * repeated[1]:
        return {"state": "different", "why": "after remove_xent it is another model", **row}
    if any(
        getattr(value, "shape", ())[-1:] == (model.get_output_embeddings().out_features,) for value in output.values()
    ):
        return {"state": "different", "why": "its output has logits", **row}
    return {"state": "equal", **row}


def difference(want: Any, got: Any) -> tuple[float, float]:
    """(of the losses, of the gradients: the largest of an element), as parts of the loss and the largest gradient."""
    (loss, grads), (found_loss, found) = want, got
    if grads.keys() != found.keys():
        return float("inf"), float("inf")
    largest = max([float(grad.abs().max()) for grad in grads.values() if grad.numel()])
    by_name = [float((grads[name] - found[name]).abs().max()) for name in grads if grads[name].numel()]
    return float((loss - found_loss).abs() / loss.abs()), max(by_name) / max(largest, 1e-30)
