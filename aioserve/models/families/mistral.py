"""Mistral (Jiang et al., "Mistral 7B", 2023), Ministral and Mistral Small 3 (Mistral AI, 2024 and
2025), and Ministral 3 (Mistral AI, 2025).

It is Llama with a sliding window in every layer, or for Ministral in the layers that the config
names. Ministral 3 stretches its rope by yarn and scales queries by position, as Llama 4 does.
Mistral Small 3 and Ministral 3 come in image-and-text checkpoints, whose language model is served.
"""

from __future__ import annotations

from collections.abc import Sequence

from aioserve.models.architecture import Architecture
from aioserve.models.families.common import (
    Shape,
    activation,
    beside_towers,
    layer_types,
    llama_like,
    nested_text,
    read_shape,
    same_windows,
    windows,
)
from aioserve.models.fields import Fields, asks_nothing
from aioserve.models.rope import RopeConfig, read_rope

__all__ = ["ministral", "ministral3", "mistral", "mistral3_conditional", "text_config"]

_MINISTRAL_3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def mistral(config: Fields) -> Architecture:
    shape = read_shape(config, default_kv_heads=8)
    rope = read_rope(config, shape.heads.dim, shape.max_positions)
    return _mistral(config, shape, rope, same_windows(config, shape.num_layers, absent=4096))


def ministral(config: Fields) -> Architecture:
    shape = read_shape(config, default_kv_heads=8)
    rope = read_rope(config, shape.heads.dim, shape.max_positions)
    slides = not asks_nothing(config.values.get("sliding_window", True))
    default = ["sliding_attention" if slides else "full_attention"] * shape.num_layers
    return _mistral(config, shape, rope, windows(config, layer_types(config, default)))


def ministral3(config: Fields) -> Architecture:
    if not config.has("rope_parameters") and not config.has("rope_scaling"):
        values = {**config.values, "rope_parameters": _MINISTRAL_3_ROPE}
        config = Fields(values, config.source, config.path)
    shape = read_shape(config, default_kv_heads=8, default_head_dim=128, default_eps=1e-5)
    rope = read_rope(config, shape.heads.dim, shape.max_positions, scales_queries=True)
    return _mistral(config, shape, rope, same_windows(config, shape.num_layers, absent=None))


def mistral3_conditional(config: Fields) -> Architecture:
    """Read the language model in Mistral's image-and-text checkpoints. Images are not served."""
    model_type = config.text("model_type", "mistral")
    texts = {"mistral": mistral, "ministral": ministral, "ministral3": ministral3}
    if model_type not in texts:
        config.unsupported("model_type", f"the language models are {', '.join(texts)}")
    return beside_towers(texts[model_type](config))


def text_config(config: Fields) -> Fields:
    """Return the fields that describe the language model of an image-and-text checkpoint."""
    text = config.nested("text_config")
    if text.values.get("model_type") == "ministral3":
        sizes = {"vocab_size": 131_072, "num_hidden_layers": 34, "max_position_embeddings": 262_144}
    else:
        sizes = {"vocab_size": 32_000, "num_hidden_layers": 32, "max_position_embeddings": 131_072}
    return nested_text(
        config,
        hidden_size=4096,
        intermediate_size=14_336,
        num_attention_heads=32,
        num_key_value_heads=8,
        eos_token_id=2,
        **sizes,
    )


def _mistral(
    config: Fields, shape: Shape, rope: RopeConfig, layer_windows: Sequence[int]
) -> Architecture:
    return llama_like(
        shape,
        activation=activation(config, "hidden_act", "silu"),
        ropes=[rope] * shape.num_layers,
        windows=layer_windows,
    )
