"""Blocks that decoders are made of, for plugins that declare families of models.

    def describe(config: Fields) -> Architecture:
        shape = read_shape(config)
        rope = read_rope(config, shape.heads.dim, shape.max_positions)
        return llama_like(
            shape,
            activation=activation(config, "hidden_act", "silu"),
            ropes=[rope] * shape.num_layers,
            windows=[0] * shape.num_layers,
        )

All are frozen values and functions that make them. Nothing here reads files or imports torch.
"""

from __future__ import annotations

from aioserve.formats.routing import ClampedSwiglu, Routing
from aioserve.models.architecture import (
    MLP,
    Architecture,
    Attention,
    Experts,
    Heads,
    LatentAttention,
    Layer,
    Linear,
    Norm,
    Tensor,
    layer_norm,
    linear,
    rms_norm,
)
from aioserve.models.families.common import (
    BlockNorms,
    Names,
    Shape,
    activation,
    llama_like,
    read_shape,
    same_windows,
)
from aioserve.models.fields import Fields
from aioserve.models.rope import RopeConfig, read_rope
from aioserve.paging.format import KVEntry, KVFormat, KVPlane
from aioserve.paging.layout import LayerKV

__all__ = [
    "MLP",
    "Architecture",
    "Attention",
    "BlockNorms",
    "ClampedSwiglu",
    "Experts",
    "Fields",
    "Heads",
    "KVEntry",
    "KVFormat",
    "KVPlane",
    "LatentAttention",
    "Layer",
    "LayerKV",
    "Linear",
    "Names",
    "Norm",
    "RopeConfig",
    "Routing",
    "Shape",
    "Tensor",
    "activation",
    "layer_norm",
    "linear",
    "llama_like",
    "read_rope",
    "read_shape",
    "rms_norm",
    "same_windows",
]
