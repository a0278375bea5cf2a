"""Command R and its successors (Cohere, 2024; Cohere Team, "Command A", 2025).

Attention and MLP read the same LayerNorm, which has no bias, and add to the residual together.
Rotations are of interleaved pairs, and logits are scaled. In Cohere 2, three of four layers have a
sliding window. The others have full attention and no rotation.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from aioserve.models.architecture import Architecture, layer_norm
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

__all__ = ["cohere", "cohere2"]

_NAMES = Names(norms=BlockNorms("input_layernorm", None, None, None))


def cohere(config: Fields) -> Architecture:
    if config.flag("use_qk_norm", False):
        config.unsupported("use_qk_norm", "LayerNorms of heads are not implemented")
    shape = _shape(config)
    rope = read_rope(
        config,
        shape.heads.dim,
        shape.max_positions,
        default_theta=500_000.0,
        interleaved=True,
    )
    return _cohere(config, shape, [rope] * shape.num_layers, [0] * shape.num_layers)


def cohere2(config: Fields) -> Architecture:
    shape = _shape(config)
    rope = read_rope(config, shape.heads.dim, shape.max_positions, interleaved=True)
    pattern = config.integer("sliding_window_pattern", 4)
    kinds = layer_types(config, sliding_but_each(pattern, shape.num_layers))
    ropes = [rope if kind == "sliding_attention" else None for kind in kinds]
    return _cohere(config, shape, ropes, windows(config, kinds))


def _shape(config: Fields) -> Shape:
    return read_shape(config, eps_field="layer_norm_eps", default_eps=1e-5, tied=True)


def _cohere(
    config: Fields,
    shape: Shape,
    ropes: Sequence[RopeConfig | None],
    layer_windows: Sequence[int],
) -> Architecture:
    bias = config.flag("attention_bias", False)
    return llama_like(
        shape,
        activation=activation(config, "hidden_act", "silu"),
        ropes=ropes,
        windows=layer_windows,
        names=_NAMES,
        norm_of=partial(layer_norm, bias=False),
        qkv_bias=bias,
        output_bias=bias,
        parallel=True,
        logit_scale=config.number("logit_scale", 0.0625),
    )
