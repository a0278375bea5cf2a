"""Qwen2-MoE (Yang et al., "Qwen2 technical report", 2024) and Qwen3-MoE ("Qwen3 technical report",
2025): Qwen 2 and 3 with experts in most layers.

Qwen2-MoE also has an MLP that all tokens share, weighed by a gate of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aioserve.formats.routing import Routing
from aioserve.models.architecture import Architecture, FeedForward
from aioserve.models.families.common import (
    Shape,
    activation,
    layer_types,
    llama_like,
    read_shape,
    windows,
)
from aioserve.models.families.experts import (
    gated_mlp,
    mixture,
    read_routing,
    router,
    sparse_layers,
)
from aioserve.models.fields import Fields
from aioserve.models.rope import read_rope

__all__ = ["qwen2_moe", "qwen3_moe"]


def qwen2_moe(config: Fields) -> Architecture:
    shape = read_shape(config, default_kv_heads=16)
    shared = config.integer("shared_expert_intermediate_size", 5632)
    gate = activation(config, "hidden_act", "silu")

    def beside(at: str) -> dict[str, Any]:
        return {
            "shared": gated_mlp(f"{at}.shared_expert", shape.hidden, shared, gate),
            "shared_gate": router(f"{at}.shared_expert_gate", shape.hidden, 1),
        }

    return _qwen_moe(
        config,
        shape,
        _routing(config, experts=60, top_k=4),
        inner=config.integer("moe_intermediate_size", 1408),
        beside=beside,
        windows=_every_second(config, shape.num_layers),
        qkv_bias=config.flag("qkv_bias", True),
    )


def qwen3_moe(config: Fields) -> Architecture:
    shape = read_shape(config, default_kv_heads=4)
    bias = config.flag("attention_bias", False)
    slides = config.flag("use_sliding_window", False)
    return _qwen_moe(
        config,
        shape,
        _routing(config, experts=128, top_k=8),
        inner=config.integer("moe_intermediate_size", 768),
        beside=lambda at: {},
        windows=windows(config, ["sliding_attention" if slides else "full_attention"])
        * shape.num_layers,
        head_norms="each",
        qkv_bias=bias,
        output_bias=bias,
    )


def _routing(config: Fields, *, experts: int, top_k: int) -> Routing:
    normalized = config.flag("norm_topk_prob", False)
    return read_routing(config, "num_experts", experts, top_k, normalized=normalized)


def _every_second(config: Fields, num_layers: int) -> list[int]:
    """Read the windows: with `use_sliding_window`, even layers below `max_window_layers` slide."""
    slides = config.flag("use_sliding_window", False)
    end = config.integer("max_window_layers", 28, least=0) if slides else 0
    kinds = ("full_attention", "sliding_attention")
    default = [kinds[i < end and i % 2 == 0] for i in range(num_layers)]
    found = layer_types(config, default)
    if not slides and "sliding_attention" in found:
        config.unsupported("layer_types", "sliding layers need use_sliding_window = true")
    return windows(config, found)


def _qwen_moe(
    config: Fields,
    shape: Shape,
    routing: Routing,
    *,
    inner: int,
    beside: Callable[[str], dict[str, Any]],
    windows: Sequence[int],
    **other: Any,
) -> Architecture:
    rope = read_rope(config, shape.heads.dim, shape.max_positions)
    gate = activation(config, "hidden_act", "silu")
    sparse = sparse_layers(config, shape.num_layers)

    def feed_forward(at: str, index: int) -> FeedForward:
        if not sparse[index]:
            return gated_mlp(at, shape.hidden, shape.inner, gate)
        return mixture(at, shape.hidden, inner, routing, gate, **beside(at))

    return llama_like(
        shape,
        activation=gate,
        ropes=[rope] * shape.num_layers,
        windows=windows,
        feed_forward=feed_forward,
        **other,
    )
