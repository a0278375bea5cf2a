"""SmolLM3 (Hugging Face, "SmolLM3: smol, multilingual, long-context reasoner", 2025).

It is Llama with grouped heads, and without a rotation in every fourth layer (Yang et al., "RoPE to
NoPE and back again", 2025).
"""

from __future__ import annotations

from aioserve.models.architecture import Architecture
from aioserve.models.families.common import (
    activation,
    layer_types,
    llama_like,
    read_shape,
    windows,
)
from aioserve.models.fields import Fields
from aioserve.models.rope import read_rope

__all__ = ["smollm3"]


def smollm3(config: Fields) -> Architecture:
    shape = read_shape(config, default_kv_heads=4, tied=True)
    rope = read_rope(config, shape.heads.dim, shape.max_positions, default_theta=2_000_000.0)
    rotated = _rotated(config, shape.num_layers)
    slides = config.flag("use_sliding_window", False)
    free = "sliding_attention" if slides and config.has("sliding_window") else "full_attention"
    kinds = layer_types(config, ["full_attention" if has_rope else free for has_rope in rotated])
    if not slides and "sliding_attention" in kinds:
        config.unsupported("layer_types", "sliding layers need use_sliding_window = true")
    bias = config.flag("attention_bias", False)
    return llama_like(
        shape,
        activation=activation(config, "hidden_act", "silu"),
        ropes=[rope if has_rope else None for has_rope in rotated],
        windows=windows(config, kinds),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
    )


def _rotated(config: Fields, num_layers: int) -> list[bool]:
    """True for each layer with a rotation, as in `no_rope_layers`, despite the field's name."""
    if not config.has("no_rope_layers"):
        interval = config.integer("no_rope_layer_interval", 4)
        return [(layer + 1) % interval > 0 for layer in range(num_layers)]
    given = config.values["no_rope_layers"]
    if (
        not isinstance(given, list)
        or len(given) < num_layers
        or not all(entry in (0, 1) and isinstance(entry, int) for entry in given)
    ):
        config.invalid("no_rope_layers", f"a list with a 0 or 1 for each of {num_layers} layers")
    return [bool(entry) for entry in given[:num_layers]]
