"""DeepSeek V2 (DeepSeek-AI, "DeepSeek-V2: a strong, economical, and efficient mixture-of-experts
language model", 2024), its Lite form, and V3 and R1 ("DeepSeek-V3 technical report", 2024).

Every layer has latent attention: the cache holds one low-rank vector and one rotated key for each
token, whatever the number of heads. The first layers are dense, the others mixtures of experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from aioserve.formats.routing import Routing
from aioserve.models.architecture import (
    MLP,
    Architecture,
    FeedForward,
    Heads,
    LatentAttention,
    Layer,
    Linear,
    Tensor,
    linear,
    rms_norm,
)
from aioserve.models.families.common import Shape, activation, read_shape
from aioserve.models.families.experts import mixture, read_routing
from aioserve.models.fields import Fields
from aioserve.models.rope import RopeConfig, read_rope

__all__ = ["deepseek_v2", "deepseek_v3"]

_LATENT_EPS = 1e-6
"""Epsilon of the norms of latents, which is not in configs."""


class _Defaults(NamedTuple):
    dense_layers: int
    expert_size: int
    shared_experts: int
    further_layers: int


_V2, _V3 = _Defaults(0, 1407, 2, 0), _Defaults(3, 2048, 1, 1)


def deepseek_v2(config: Fields) -> Architecture:
    return _deepseek(config, _V2, interleaved=True, routing=_routing_of_v2)


def deepseek_v3(config: Fields) -> Architecture:
    interleaved = config.flag("rope_interleave", True)
    return _deepseek(config, _V3, interleaved=interleaved, routing=_routing_of_v3)


def _deepseek(
    config: Fields,
    defaults: _Defaults,
    *,
    interleaved: bool,
    routing: Callable[[Fields], Routing],
) -> Architecture:
    shape = read_shape(config)
    if shape.heads.kv != shape.heads.query:
        config.unsupported("num_key_value_heads", "latents are shared by all heads")
    rotated = config.integer("qk_rope_head_dim", 64)
    rope = read_rope(config, rotated, shape.max_positions, interleaved=interleaved)
    gate = activation(config, "hidden_act", "silu")
    num_dense = config.integer("first_k_dense_replace", defaults.dense_layers, least=0)
    if config.integer("moe_layer_freq", 1) != 1:
        config.unsupported("moe_layer_freq", "every layer behind the dense ones is a mixture")
    routed = routing(config) if num_dense < shape.num_layers else None

    def feed_forward(at: str, index: int) -> FeedForward:
        if routed is None or index < num_dense:
            return _mlp(config, at, shape.hidden, shape.inner)
        inner = config.integer("moe_intermediate_size", defaults.expert_size)
        shared = 0
        if config.has("n_shared_experts") or "n_shared_experts" not in config.values:
            shared = config.integer("n_shared_experts", defaults.shared_experts, least=0)
        beside = _mlp(config, f"{at}.shared_experts", shape.hidden, shared * inner)
        correction = Tensor(f"{at}.gate.e_score_correction_bias", (routed.experts,), is_wide=True)
        return mixture(
            at,
            shape.hidden,
            inner,
            routed,
            gate,
            correction=correction if routed.sigmoid else None,
            shared=beside if shared else None,
        )

    def layer(at: str, index: int) -> Layer:
        return Layer(
            mixer_norm=rms_norm(f"{at}.input_layernorm", shape.hidden, shape.eps),
            mixer=_attention(config, shape, rope, f"{at}.self_attn"),
            feed_forward_norm=rms_norm(f"{at}.post_attention_layernorm", shape.hidden, shape.eps),
            feed_forward=feed_forward(f"{at}.mlp", index),
        )

    return Architecture(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        max_position_embeddings=shape.max_positions,
        embedding=Tensor("model.embed_tokens.weight", (shape.vocab, shape.hidden)),
        layers=tuple(layer(f"model.layers.{i}", i) for i in range(shape.num_layers)),
        final_norm=rms_norm("model.norm", shape.hidden, shape.eps),
        head=Tensor("lm_head.weight", (shape.vocab, shape.hidden)),
        tie_word_embeddings=shape.tied,
        ignored=_ignored(config, shape.num_layers, defaults.further_layers),
    )


def _routing_of_v2(config: Fields) -> Routing:
    """Read a softmax routing, with an optional choice of groups by their best expert."""
    _check_says(config, "scoring_func", "softmax")
    if config.flag("norm_topk_prob", False):
        config.unsupported("norm_topk_prob", "weights of DeepSeek V2 are as the softmax has them")
    scale = config.number("routed_scaling_factor", 1.0)
    method = config.text("topk_method", "greedy")
    groups = {}
    if method == "group_limited_greedy":
        groups = {"groups": config.integer("n_group"), "top_groups": config.integer("topk_group")}
    elif method != "greedy":
        config.unsupported("topk_method", "the methods are greedy and group_limited_greedy")
    top_k = config.integer("num_experts_per_tok")
    return read_routing(config, "n_routed_experts", 64, top_k, scale=scale, **groups)


def _routing_of_v3(config: Fields) -> Routing:
    """Read a sigmoid routing, with a choice of groups by their two best experts."""
    _check_says(config, "scoring_func", "sigmoid")
    _check_says(config, "topk_method", "noaux_tc")
    return read_routing(
        config,
        "n_routed_experts",
        256,
        8,
        sigmoid=True,
        normalized=config.flag("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", 2.5),
        groups=config.integer("n_group", 8, least=0) or 1,
        top_groups=config.integer("topk_group", 4, least=0) or 1,
        group_best=2,
    )


def _check_says(config: Fields, name: str, expected: str) -> None:
    if config.text(name, expected) != expected:
        config.unsupported(name, f"of this architecture it is {expected}")


def _attention(config: Fields, shape: Shape, rope: RopeConfig, at: str) -> LatentAttention:
    hidden, heads = shape.hidden, shape.heads.query
    bias = config.flag("attention_bias", False)
    rank = config.integer("kv_lora_rank", 512)
    plain, value = config.integer("qk_nope_head_dim", 128), config.integer("v_head_dim", 128)
    key = plain + rope.rotary_dim
    # Null means uncompressed queries. An absent field means the default rank.
    query_rank = 0
    if config.has("q_lora_rank") or "q_lora_rank" not in config.values:
        query_rank = config.integer("q_lora_rank", 1536)
    compressed: Linear | None = None
    if query_rank:
        compressed = linear(at, hidden, bias, q_a_proj=query_rank)
        queries = linear(at, query_rank, q_b_proj=heads * key)
    else:
        queries = linear(at, hidden, q_proj=heads * key)
    return LatentAttention(
        heads=Heads(heads, 1, rank + rope.rotary_dim),
        latent_rank=rank,
        key_dim=plain,
        value_dim=value,
        compressed_query=compressed,
        query_norm=rms_norm(f"{at}.q_a_layernorm", query_rank, _LATENT_EPS) if query_rank else None,
        query=queries,
        latent=linear(at, hidden, bias, kv_a_proj_with_mqa=rank + rope.rotary_dim),
        latent_norm=rms_norm(f"{at}.kv_a_layernorm", rank, _LATENT_EPS),
        expansion=Tensor(f"{at}.kv_b_proj.weight", (heads * (plain + value), rank)),
        output=linear(at, heads * value, bias, o_proj=hidden),
        scale=key**-0.5 * rope.score_factor,
        rope=rope,
    )


def _mlp(config: Fields, at: str, hidden: int, inner: int) -> MLP:
    bias = config.flag("mlp_bias", False)
    return MLP(
        up=linear(at, hidden, bias, gate_proj=inner, up_proj=inner),
        down=linear(at, inner, bias, down_proj=hidden),
        activation=activation(config, "hidden_act", "silu"),
    )


def _ignored(config: Fields, num_layers: int, default: int) -> re.Pattern[str]:
    """Names of tensors to ignore. Layers after the last are heads for multi-token prediction."""
    more = config.integer("num_nextn_predict_layers", default, least=0, most=64)
    names = "|".join(str(num_layers + i) for i in range(more))
    behind = rf"|^model\.layers\.({names})\." if more else ""
    return re.compile(r"rotary_emb\.inv_freq$" + behind)
