"""Granite 3 and the dense models of Granite 4 (Granite Team, IBM, "Granite 3.0 language models",
2024; ibm-granite/granite-4.0-micro, 2025).

It is Llama with factors on embeddings, on scores and on the outputs of each block, and with a
divisor of logits. Granite 4 fuses gate and up, and may have no rotation.
"""

from __future__ import annotations

from dataclasses import replace

from aioserve.models.architecture import Architecture
from aioserve.models.families.common import (
    LLAMA_NAMES,
    Names,
    Shape,
    activation,
    llama_like,
    read_shape,
)
from aioserve.models.fields import Fields
from aioserve.models.rope import RopeConfig, read_rope

__all__ = ["granite", "granite_hybrid"]

_FUSED = Names(mlp="shared_mlp", up=("input_linear",), down="output_linear")


def granite(config: Fields) -> Architecture:
    shape = read_shape(config)
    rope = read_rope(config, shape.heads.dim, shape.max_positions)
    return _granite(config, shape, rope, LLAMA_NAMES, mlp_bias=config.flag("mlp_bias", False))


def granite_hybrid(config: Fields) -> Architecture:
    """Read a Granite 4 that has neither experts nor layers with a recurrent state."""
    if config.integer("num_local_experts", 8, least=0):
        config.unsupported("num_local_experts", "experts are not implemented: it must be 0")
    kinds = config.values.get("layer_types", config.values.get("layers_block_type"))
    attends = ("attention", "full_attention")
    if not isinstance(kinds, list) or any(kind not in attends for kind in kinds):
        config.unsupported("layer_types", "layers with a recurrent state are not implemented")
    shape = read_shape(config)
    if len(kinds) != shape.num_layers:
        config.invalid(
            "layer_types", f"a list with one entry for each of {shape.num_layers} layers"
        )
    inner = config.integer("shared_intermediate_size", 1024)
    rope = None
    if config.has("position_embedding_type"):
        if config.values["position_embedding_type"] not in ("rope", "nope"):
            config.unsupported("position_embedding_type", "positions are by rope, or not at all")
        if config.values["position_embedding_type"] == "rope":
            rope = read_rope(config, shape.heads.dim, shape.max_positions)
    return _granite(config, replace(shape, inner=inner), rope, _FUSED)


def _granite(
    config: Fields, shape: Shape, rope: RopeConfig | None, names: Names, *, mlp_bias: bool = False
) -> Architecture:
    bias = config.flag("attention_bias", False)
    return llama_like(
        shape,
        activation=activation(config, "hidden_act", "silu"),
        ropes=[rope] * shape.num_layers,
        windows=[0] * shape.num_layers,
        names=names,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=mlp_bias,
        scale=config.number("attention_multiplier", 1.0),
        residual_scale=config.number("residual_multiplier", 1.0),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        logit_scale=1.0 / config.number("logits_scaling", 1.0),
    )
