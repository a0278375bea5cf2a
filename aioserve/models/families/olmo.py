"""OLMo 2 and 3 (OLMo Team, "2 OLMo 2 Furious", 2025; "Olmo 3", 2025).

It is Llama with its norms behind attention and MLP instead of before them. It also has RMS norms
over all queries and over all keys of a token. In OLMo 3, three of four layers have a sliding
window, and only the others scale the rope.
"""

from __future__ import annotations

from collections.abc import Sequence

from aioserve.models.architecture import Architecture
from aioserve.models.families.common import (
    BlockNorms,
    Names,
    Shape,
    activation,
    layer_types,
    llama_like,
    read_shape,
    sliding_but_each,
    windows,
)
from aioserve.models.fields import Fields
from aioserve.models.rope import RopeConfig, read_rope

__all__ = ["olmo2", "olmo3"]

_NAMES = Names(
    norms=BlockNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
)


def olmo2(config: Fields) -> Architecture:
    shape = read_shape(config, default_eps=1e-5)
    rope = read_rope(config, shape.heads.dim, shape.max_positions)
    return _olmo(config, shape, [rope] * shape.num_layers, [0] * shape.num_layers)


def olmo3(config: Fields) -> Architecture:
    shape = read_shape(config, default_eps=1e-5)
    kinds = layer_types(config, sliding_but_each(4, shape.num_layers))
    ropes = {
        kind: read_rope(
            config,
            shape.heads.dim,
            shape.max_positions,
            layer_type=kind,
            default_theta=500_000.0,
            scaled=kind == "full_attention",
        )
        for kind in ("full_attention", "sliding_attention")
    }
    return _olmo(config, shape, [ropes[kind] for kind in kinds], windows(config, kinds))


def _olmo(
    config: Fields, shape: Shape, ropes: Sequence[RopeConfig], layer_windows: Sequence[int]
) -> Architecture:
    bias = config.flag("attention_bias", False)
    return llama_like(
        shape,
        activation=activation(config, "hidden_act", "silu"),
        ropes=ropes,
        windows=layer_windows,
        names=_NAMES,
        head_norms="all",
        qkv_bias=bias,
        output_bias=bias,
    )
