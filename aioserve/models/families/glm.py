"""GLM-4 (Team GLM, "ChatGLM: a family of large language models", 2024) and its form of 2025, GLM-4
0414.

It is Llama with biases on queries, keys and values, and with gate and up in one projection. The
first half of each head rotates, in interleaved pairs. GLM-4 0414 also has norms behind attention
and MLP.
"""

from __future__ import annotations

from aioserve.models.architecture import Architecture
from aioserve.models.families.common import (
    BlockNorms,
    Names,
    activation,
    llama_like,
    read_shape,
)
from aioserve.models.fields import Fields
from aioserve.models.rope import read_rope

__all__ = ["glm", "glm4"]

_UP = ("gate_up_proj",)
_SANDWICHED = BlockNorms(
    "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
)


def glm(config: Fields) -> Architecture:
    return _glm(config, Names(up=_UP))


def glm4(config: Fields) -> Architecture:
    return _glm(config, Names(up=_UP, norms=_SANDWICHED))


def _glm(config: Fields, names: Names) -> Architecture:
    shape = read_shape(config, default_kv_heads=2, default_head_dim=128, default_eps=0.00000015625)
    rope = read_rope(config, shape.heads.dim, shape.max_positions, partial=0.5, interleaved=True)
    return llama_like(
        shape,
        activation=activation(config, "hidden_act", "silu"),
        ropes=[rope] * shape.num_layers,
        windows=[0] * shape.num_layers,
        names=names,
        qkv_bias=config.flag("attention_bias", True),
    )
