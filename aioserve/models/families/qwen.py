"""Qwen 2 and 3 (Yang et al., "Qwen2 technical report", 2024; "Qwen3 technical report", 2025).

They are Llama with biases on queries, keys and values (2) or RMS norms on each query and key head
(3). The upper layers have sliding windows if config.json asks for them.
"""

from __future__ import annotations

from typing import Any

from aioserve.models.architecture import Architecture
from aioserve.models.families.common import (
    Shape,
    activation,
    layer_types,
    llama_like,
    read_shape,
    windows,
)
from aioserve.models.fields import Fields
from aioserve.models.rope import read_rope

__all__ = ["qwen2", "qwen3"]


def qwen2(config: Fields) -> Architecture:
    if config.has("use_mrope") and config.flag("use_mrope", False):
        config.unsupported("use_mrope", "positions of several axes are not implemented")
    return _qwen(config, read_shape(config), qkv_bias=True)


def qwen3(config: Fields) -> Architecture:
    shape = read_shape(config, default_head_dim=128)
    bias = config.flag("attention_bias", False)
    return _qwen(config, shape, head_norms="each", qkv_bias=bias, output_bias=bias)


def _qwen(config: Fields, shape: Shape, **other: Any) -> Architecture:
    rope = read_rope(config, shape.heads.dim, shape.max_positions)
    layer_windows = _windows(config, shape.num_layers)
    gate = activation(config, "hidden_act", "silu")
    ropes = [rope] * shape.num_layers
    return llama_like(shape, activation=gate, ropes=ropes, windows=layer_windows, **other)


def _windows(config: Fields, num_layers: int) -> list[int]:
    """Read the windows: with `use_sliding_window`, layers from `max_window_layers` on slide."""
    slides = config.flag("use_sliding_window", False)
    first = num_layers
    if slides and config.has("sliding_window"):
        first = min(config.integer("max_window_layers", 28, least=0), num_layers)
    default = ["full_attention"] * first + ["sliding_attention"] * (num_layers - first)
    kinds = layer_types(config, default)
    if not slides and "sliding_attention" in kinds:
        config.unsupported("layer_types", "sliding layers need use_sliding_window = true")
    return windows(config, kinds)
