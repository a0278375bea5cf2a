"""Nemotron-4 and Minitron (Parmar et al., "Nemotron-4 15B technical report", 2024; Muralidharan et
al., "Compact language models via pruning and knowledge distillation", 2024).

It has LayerNorms whose weights are offsets from 1, and a rotation of half of each head. Its MLP has
no gate, and squares positive numbers.
"""

from __future__ import annotations

from functools import partial

from aioserve.models.architecture import UNGATED, Architecture, layer_norm
from aioserve.models.families.common import Names, activation, llama_like, read_shape
from aioserve.models.fields import Fields
from aioserve.models.rope import read_rope

__all__ = ["nemotron"]


def nemotron(config: Fields) -> Architecture:
    shape = read_shape(config, eps_field="norm_eps", default_eps=1e-5)
    rope = read_rope(config, shape.heads.dim, shape.max_positions, partial=0.5)
    bias = config.flag("attention_bias", False)
    return llama_like(
        shape,
        activation=activation(config, "hidden_act", "relu2", UNGATED),
        gated=False,
        ropes=[rope] * shape.num_layers,
        windows=[0] * shape.num_layers,
        names=Names(up=("up_proj",)),
        norm_of=partial(layer_norm, weight_offset=1.0),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
    )
