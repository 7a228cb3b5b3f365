"""Small configurations of any class of transformers, by rules on the names of their fields.

The variants are tried in turn until the class can be built and called.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from typing import Any

V, H, HEADS = 512, 64, 4

# (pattern of a field's name, its value if it was larger)
RULES = [
    (r"(^|_)vocab(ulary)?_size|^n_vocab|^n_words$|^emb_.*vocab|codebook_size|num_embeddings$", V),
    (r"max_(source|target)?_?position|^n_positions|^n_ctx|max_seq_len|max_sequence|^context_length|seq_length$", 256),
    (r"(^|_)(num|n)_?(hidden_|encoder_|decoder_|attention_|self_attention_|block)?(layers?|blocks)$", 2),
    (r"^(encoder|decoder)_layers$|^depth$|_num_layers$|^num_hidden_.*layers$", 2),
    (r"kv_heads|key_value_heads", 2),
    (r"(num|n)_?(attention_)?heads?$|attention_heads$|^n_head$|_num_heads$|num_heads", HEADS),
    (r"head_dim|^d_kv$|^key_length$|^attention_key_size|^d_head", H // HEADS),
    (r"lora_rank$", 16),
    (r"(intermediate|ffn|mlp|feed_?forward|inner).*(size|dim)$|ffn_dim$|^d_ff$|^n_inner$|d_inner|ffn_hidden", 96),
    (r"intermediate", 96),
    (r"^(hidden_size|d_model|n_embd|embed_dim|hidden_dim|dim|emb_dim|embedding_size|n_embed|projection_dim)$", H),
    (r"^(out_hidden_size|d_embed|embedding_dim|word_embed_proj_dim|output_dim|text_hidden_size|lru_width)$", H),
    (r"^(attention_hidden_size|hidden_sizes?|.*_hidden_size|.*_embed_dim|encoder_dim|.*_hidden_dim)$", H),
    (r"^(num|n)_(local_|routed_)?experts$|^n_routed_experts|moe_num_experts|num_.*experts$", 4),
    (r"experts_per_tok|top_?k$|moe_k$|num_selected", 2),
    (r"^n_group$|^topk_group$|num_expert_group|first_k_dense|n_shared_experts|num_shared_experts", 1),
    (r"^image_size$", 32),
    (r"^patch_size$", 8),
    (r"num_mel_bins|num_mel|feature_size|input_feat_per_channel", 80),
]
# Values that a class wants instead, because fields depend on each other.
FILLED = {
    "vocab_size": V, "head_dim": 16, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_routed_experts": 4,
    "num_key_value_heads": 4, "num_local_experts": 4, "layer_types": ["full_attention"] * 2, "feature_layer": -1,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"kv_heads": 4},
    {"rope": ROPE},
    {"rope": ROPE | {"mrope_section": [2, 3, 3]}},
    {"rope": ROPE | {"mrope_section": [1, 1, 2]}},
    {"same_lengths": True},
    {"image": True},
    {"filled": FILLED},
    {"fields": {"num_heads": 8, "mamba_num_heads": 8, "n_groups": 1}},
]
_LEFT = {
    "return_dict", "output_hidden_states", "dtype", "chunk_size_feed_forward", "is_encoder_decoder", "id2label",
    "label2id", "problem_type", "architectures", "transformers_version",
}  # fmt: skip


class Builder:
    """Makes configurations of one variant. Token ids beyond the vocabulary get the last ones, each its own."""

    def __init__(self, variant: dict[str, Any]) -> None:
        self.variant, self.next_id = variant, V

    def config(self, cls: Any) -> Any:
        parts = getattr(cls, "sub_configs", None) or {}
        fields = {name: value for name, value in _fields(cls).items() if name not in _LEFT and name not in parts}
        changed = {name: self.value(name, value) for name, value in fields.items()}
        changed = {name: value for name, value in changed.items() if value is not fields[name]}
        for name, part in parts.items():
            if part is not None and part.__name__ == "AutoConfig":
                default = getattr(cls(), name, None)
                part = None if default is None else type(default)
            if part is not None:
                changed[name] = self.config(part)
        try:
            return cls(**changed)
        except Exception:
            for name in set(changed) - set(parts):  # one field that the class does not take so small
                try:
                    return cls(**{key: value for key, value in changed.items() if key != name})
                except Exception:
                    continue
            raise

    def value(self, name: str, value: Any) -> Any:
        variant = self.variant
        if "kv_heads" in variant and re.search(r"kv_heads|key_value_heads", name):
            return variant["kv_heads"]
        if name == "rope_parameters" and value is None and "rope" in variant:
            return copy.deepcopy(variant["rope"])  # transformers writes to it
        if value is None:
            return copy.deepcopy(variant.get("filled", {}).get(name))
        if name in variant.get("fields", {}):
            return variant["fields"][name]
        if name == "axial_pos_embds_dim":
            return (H // 4, 3 * H // 4)
        if name == "axial_pos_shape":
            return (3, 4)  # the product is the length of a sequence in training
        if isinstance(value, bool):
            return value
        if isinstance(value, float) and "drop" in name:
            return 0.0
        if isinstance(value, int):
            return self.number(name, value)
        if isinstance(value, list) and value and name.endswith(("token_id", "tokens")):
            return [one if not isinstance(one, int) or one < V else V - 2 for one in value]
        if isinstance(value, dict) and "mrope_section" in value:
            return {**value, "mrope_section": [2, 3, 3]}
        return value

    def number(self, name: str, value: int) -> int:
        if name == "rotary_dim" and value:
            return H // HEADS
        if name.endswith(("token_id", "_token_index", "_tokenid", "token")) or re.search(r"_(id|index)$", name):
            if value < V:
                return value
            self.next_id -= 1
            return self.next_id
        if "drop" in name:
            return 0
        small = next((small for pattern, small in RULES if re.search(pattern, name)), value)
        return small if value > small or ("heads" in name and value) else value


def _fields(cls: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(cls):
        parameters = inspect.signature(cls.__init__).parameters.values()
        return {one.name: one.default for one in parameters if one.default is not inspect.Parameter.empty}
    found = {}
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING:
            found[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
    return found


def config_of(cls: Any, variant: dict[str, Any]) -> Any:
    """A small configuration for a class of models."""
    config = Builder(variant).config(cls.config_class)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for one in (config, text):
        for name, number in (
            ("pad_token_id", 0),
            ("bos_token_id", 0),
            ("decoder_start_token_id", 1),
            ("eos_token_id", 2),
        ):
            if getattr(one, name, None) is None:
                setattr(one, name, number)
    if cls.__name__.endswith(("LMHeadModel", "ForCausalLM", "Decoder", "LMHead")) and hasattr(config, "is_decoder"):
        config.is_decoder = True
    return config
