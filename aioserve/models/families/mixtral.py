"""Mixtral (Jiang et al., "Mixtral of experts", 2024): Mistral with experts in each layer.

A token goes to the experts with the highest scores, weighted by the softmax of these scores."""

from __future__ import annotations

from aioserve.models.architecture import Architecture, FeedForward
from aioserve.models.families.common import (
    Names,
    activation,
    llama_like,
    read_shape,
    same_windows,
)
from aioserve.models.families.experts import mixture, read_routing
from aioserve.models.fields import Fields
from aioserve.models.rope import read_rope

__all__ = ["mixtral"]

_EXPERT = ("w1", "w3", "w2")


def mixtral(config: Fields) -> Architecture:
    shape = read_shape(config, default_kv_heads=8, default_eps=1e-5)
    rope = read_rope(config, shape.heads.dim, shape.max_positions, default_theta=1_000_000.0)
    gate = activation(config, "hidden_act", "silu")
    routing = read_routing(config, "num_local_experts", 8, 2, normalized=True)

    def experts(at: str, _: int) -> FeedForward:
        return mixture(at, shape.hidden, shape.inner, routing, gate, _EXPERT)

    return llama_like(
        shape,
        activation=gate,
        ropes=[rope] * shape.num_layers,
        windows=same_windows(config, shape.num_layers, absent=None),
        names=Names(mlp="block_sparse_moe"),
        feed_forward=experts,
    )
