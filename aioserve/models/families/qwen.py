"""Qwen 2 and 3 (Yang et al., "Qwen2 technical report", 2024; "Qwen3 technical report", 2025).

Llama with biases on queries, keys and values (2) or RMS norms on each query and key head (3), and
sliding windows in the upper layers where config.json asks for them.
"""

from __future__ import annotations

from aioserve.models.architecture import MLP, Architecture, Attention, Layer, linear, rms_norm
from aioserve.models.families.common import (
    Shape,
    activation,
    frame,
    layer_types,
    read_shape,
    windows,
)
from aioserve.models.fields import Fields
from aioserve.models.rope import read_rope

__all__ = ["qwen2", "qwen3"]


def qwen2(config: Fields) -> Architecture:
    if config.has("use_mrope") and config.flag("use_mrope", False):
        config.unsupported("use_mrope", "positions of several axes are not implemented")
    return _qwen(config, read_shape(config), head_norms=False, qkv_bias=True, output_bias=False)


def qwen3(config: Fields) -> Architecture:
    shape = read_shape(config, default_head_dim=128)
    bias = config.flag("attention_bias", False)
    return _qwen(config, shape, head_norms=True, qkv_bias=bias, output_bias=bias)


def _qwen(
    config: Fields, shape: Shape, *, head_norms: bool, qkv_bias: bool, output_bias: bool
) -> Architecture:
    hidden, inner, heads, eps = shape.hidden, shape.inner, shape.heads, shape.eps
    rope = read_rope(config, heads.dim, shape.max_positions)
    layer_windows = _windows(config, shape.num_layers)
    gate = activation(config, "hidden_act", "silu")

    def layer(at: str, index: int) -> Layer:
        attention = f"{at}.self_attn"
        qkv = {"q_proj": heads.query_size, "k_proj": heads.kv_size, "v_proj": heads.kv_size}
        return Layer(
            attention_norm=rms_norm(f"{at}.input_layernorm", hidden, eps),
            attention=Attention(
                heads=heads,
                qkv=linear(attention, hidden, qkv_bias, **qkv),
                query_norm=rms_norm(f"{attention}.q_norm", heads.dim, eps) if head_norms else None,
                key_norm=rms_norm(f"{attention}.k_norm", heads.dim, eps) if head_norms else None,
                output=linear(attention, heads.query_size, output_bias, o_proj=hidden),
                scale=heads.dim**-0.5,
                rope=rope,
                window=layer_windows[index],
            ),
            mlp_norm=rms_norm(f"{at}.post_attention_layernorm", hidden, eps),
            mlp=MLP(
                up=linear(f"{at}.mlp", hidden, gate_proj=inner, up_proj=inner),
                down=linear(f"{at}.mlp", inner, down_proj=hidden),
                activation=gate,
            ),
        )

    return frame(shape, layer)


def _windows(config: Fields, num_layers: int) -> list[int]:
    """Layers from `max_window_layers` on slide, if `use_sliding_window` says so."""
    slides = config.flag("use_sliding_window", False)
    first = num_layers
    if slides and config.has("sliding_window"):
        first = min(config.integer("max_window_layers", 28, least=0), num_layers)
    default = ["full_attention"] * first + ["sliding_attention"] * (num_layers - first)
    kinds = layer_types(config, default)
    if not slides and "sliding_attention" in kinds:
        config.unsupported("layer_types", "sliding layers need use_sliding_window = true")
    return windows(config, kinds)
