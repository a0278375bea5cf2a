"""Mistral (Jiang et al., "Mistral 7B", 2023): Llama with a sliding window in every layer."""

from __future__ import annotations

from aioserve.models.architecture import MLP, Architecture, Attention, Layer, linear, rms_norm
from aioserve.models.families.common import activation, frame, read_shape, same_window
from aioserve.models.fields import Fields
from aioserve.models.rope import read_rope

__all__ = ["mistral"]


def mistral(config: Fields) -> Architecture:
    shape = read_shape(config, default_kv_heads=8)
    hidden, inner, heads, eps = shape.hidden, shape.inner, shape.heads, shape.eps
    rope = read_rope(config, heads.dim, shape.max_positions)
    window = same_window(config, shape.num_layers, absent=4096)
    gate = activation(config, "hidden_act", "silu")

    def layer(at: str, index: int) -> Layer:
        qkv = {"q_proj": heads.query_size, "k_proj": heads.kv_size, "v_proj": heads.kv_size}
        return Layer(
            attention_norm=rms_norm(f"{at}.input_layernorm", hidden, eps),
            attention=Attention(
                heads=heads,
                qkv=linear(f"{at}.self_attn", hidden, **qkv),
                output=linear(f"{at}.self_attn", heads.query_size, o_proj=hidden),
                scale=heads.dim**-0.5,
                rope=rope,
                window=window,
            ),
            mlp_norm=rms_norm(f"{at}.post_attention_layernorm", hidden, eps),
            mlp=MLP(
                up=linear(f"{at}.mlp", hidden, gate_proj=inner, up_proj=inner),
                down=linear(f"{at}.mlp", inner, down_proj=hidden),
                activation=gate,
            ),
        )

    return frame(shape, layer)
