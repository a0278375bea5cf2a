"""Gemma 2 and 3 (Gemma Team, "Gemma 2", 2024; "Gemma 3 technical report", 2025).

Norms before and after each block have weights that are offsets from 1. Embeddings are scaled, and
most layers have a sliding window. Gemma 2 caps scores and logits softly. Gemma 3 has norms of query
and key heads instead, and a rotary base of its own for the sliding layers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from aioserve.models.architecture import Architecture, rms_norm
from aioserve.models.families.common import (
    BlockNorms,
    Names,
    Shape,
    activation,
    beside_towers,
    layer_types,
    llama_like,
    nested_text,
    read_shape,
    sliding_but_each,
    windows,
)
from aioserve.models.fields import Fields, asks_nothing
from aioserve.models.rope import RopeConfig, read_rope

__all__ = ["gemma2", "gemma3", "gemma3_conditional", "text_config"]


_NAMES = Names(
    norms=BlockNorms(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
)


def gemma2(config: Fields) -> Architecture:
    shape = _shape(config)
    rope = read_rope(config, shape.heads.dim, shape.max_positions)
    kinds = layer_types(config, sliding_but_each(2, shape.num_layers))
    return _gemma(
        config,
        shape,
        kinds,
        ropes=dict.fromkeys(kinds, rope),
        attention_cap=_soft_cap(config, "attn_logit_softcapping", 50.0),
        final_soft_cap=_soft_cap(config, "final_logit_softcapping", 30.0),
    )


def gemma3(config: Fields) -> Architecture:
    shape = _shape(config)
    if not asks_nothing(config.values.get("attn_logit_softcapping")):
        config.unsupported("attn_logit_softcapping", "Gemma 3 attends without a soft cap")
    pattern = config.integer("sliding_window_pattern", 6)
    kinds = layer_types(config, sliding_but_each(pattern, shape.num_layers))
    sliding = read_rope(
        config,
        shape.heads.dim,
        shape.max_positions,
        layer_type="sliding_attention",
        theta_field="rope_local_base_freq",
        scaled=False,
    )
    full = read_rope(
        config,
        shape.heads.dim,
        shape.max_positions,
        layer_type="full_attention",
        default_theta=1_000_000.0,
    )
    return _gemma(
        config,
        shape,
        kinds,
        ropes={"sliding_attention": sliding, "full_attention": full},
        final_soft_cap=_soft_cap(config, "final_logit_softcapping", 0.0),
        head_norms="each",
    )


def gemma3_conditional(config: Fields) -> Architecture:
    """Read the language model in Gemma 3's image-and-text checkpoints. Images are not served."""
    return beside_towers(gemma3(config))


def text_config(config: Fields) -> Fields:
    """Return the fields that describe the language model of an image-and-text checkpoint."""
    return nested_text(
        config,
        vocab_size=262_208,
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=26,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        max_position_embeddings=131_072,
        eos_token_id=1,
    )


def _gemma(
    config: Fields, shape: Shape, kinds: list[str], *, ropes: dict[str, RopeConfig], **other: Any
) -> Architecture:
    layer_windows = windows(config, kinds)
    gate = activation(config, "hidden_activation", "gelu_pytorch_tanh")
    bias = config.flag("attention_bias", False)
    return llama_like(
        shape,
        activation=gate,
        ropes=[ropes[kind] for kind in kinds],
        windows=layer_windows,
        qkv_bias=bias,
        output_bias=bias,
        names=_NAMES,
        norm_of=partial(rms_norm, weight_offset=1.0),
        scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
        embedding_scale=shape.hidden**0.5,
        rounds_embedding_scale=True,
        **other,
    )


def _shape(config: Fields) -> Shape:
    if config.has("use_bidirectional_attention") and config.flag(
        "use_bidirectional_attention", False
    ):
        config.unsupported("use_bidirectional_attention", "only causal attention can be served")
    return read_shape(config, default_kv_heads=4, default_head_dim=256, tied=True)


def _soft_cap(config: Fields, name: str, absent: float) -> float:
    if name in config.values and asks_nothing(config.values[name]):
        return 0.0
    return config.number(name, absent) if config.has(name) or absent else 0.0
