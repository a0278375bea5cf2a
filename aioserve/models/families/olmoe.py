"""OLMoE (Muennighoff et al., "OLMoE: open mixture-of-experts language models", 2024).

It is Llama with RMS norms over all queries and over all keys of a token, and experts in each layer.
"""

from __future__ import annotations

from aioserve.models.architecture import Architecture, FeedForward
from aioserve.models.families.common import activation, llama_like, read_shape
from aioserve.models.families.experts import mixture, read_routing
from aioserve.models.fields import Fields, asks_nothing
from aioserve.models.rope import read_rope

__all__ = ["olmoe"]


def olmoe(config: Fields) -> Architecture:
    shape = read_shape(config, default_eps=1e-5)
    if not asks_nothing(config.values.get("clip_qkv")):
        config.unsupported("clip_qkv", "queries, keys and values are not clipped")
    rope = read_rope(config, shape.heads.dim, shape.max_positions)
    gate, bias = activation(config, "hidden_act", "silu"), config.flag("attention_bias", False)
    normalized = config.flag("norm_topk_prob", False)
    routing = read_routing(config, "num_experts", 64, 8, normalized=normalized)

    def experts(at: str, _: int) -> FeedForward:
        return mixture(at, shape.hidden, shape.inner, routing, gate)

    return llama_like(
        shape,
        activation=gate,
        ropes=[rope] * shape.num_layers,
        windows=[0] * shape.num_layers,
        head_norms="all",
        qkv_bias=bias,
        output_bias=bias,
        feed_forward=experts,
    )
