"""Llama (Touvron et al., 2023; Grattafiori et al., "The Llama 3 herd of models", 2024), and Phi-3.

Llama has RMS norms before its blocks, rotary positions, grouped heads since version 2, and a gated
MLP. Yi, Falcon 3 and DeepSeek's dense models are Llama by name.

Phi-3 and 4 (Abdin et al., "Phi-3 technical report", 2024; "Phi-4 technical report", 2024) change a
few fields. They have fused projections in the checkpoint, a partial rotation, and long contexts by
LongRoPE (Ding et al., 2024).
"""

from __future__ import annotations

from aioserve.models.architecture import Architecture
from aioserve.models.families.common import (
    Names,
    activation,
    llama_like,
    read_shape,
    same_windows,
)
from aioserve.models.fields import Fields
from aioserve.models.rope import read_rope

__all__ = ["ORIGINAL_POSITIONS_OF_PHI3", "llama", "phi3"]

ORIGINAL_POSITIONS_OF_PHI3 = 4096
"""Context of the pretraining, in tokens, for configs without it."""


def llama(config: Fields) -> Architecture:
    shape = read_shape(config)
    rope = read_rope(config, shape.heads.dim, shape.max_positions)
    gate = activation(config, "hidden_act", "silu")
    bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    return llama_like(
        shape,
        activation=gate,
        ropes=[rope] * shape.num_layers,
        windows=[0] * shape.num_layers,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=mlp_bias,
    )


def phi3(config: Fields) -> Architecture:
    shape = read_shape(config, default_eps=1e-5)
    head_dim, positions = shape.heads.dim, shape.max_positions
    original = ORIGINAL_POSITIONS_OF_PHI3
    rope = read_rope(config, head_dim, positions, partial=1.0, default_original=original)
    windows = same_windows(config, shape.num_layers, absent=None)
    gate = activation(config, "hidden_act", "silu")
    names = Names(qkv=("qkv_proj",), up=("gate_up_proj",))
    return llama_like(
        shape, activation=gate, ropes=[rope] * shape.num_layers, windows=windows, names=names
    )
