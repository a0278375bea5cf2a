"""Phi-3 (Abdin et al., "Phi-3 technical report", 2024): Llama with fused projections in the
checkpoint, a partial rotation, and long contexts by LongRoPE (Ding et al., 2024)."""

from __future__ import annotations

from aioserve.models.architecture import MLP, Architecture, Attention, Layer, linear, rms_norm
from aioserve.models.families.common import activation, frame, read_shape, same_window
from aioserve.models.fields import Fields
from aioserve.models.rope import read_rope

__all__ = ["phi3"]


def phi3(config: Fields) -> Architecture:
    shape = read_shape(config, default_eps=1e-5)
    hidden, inner, heads, eps = shape.hidden, shape.inner, shape.heads, shape.eps
    rope = read_rope(config, heads.dim, shape.max_positions, partial=True, default_original=4096)
    window = same_window(config, shape.num_layers, absent=None)
    gate = activation(config, "hidden_act", "silu")

    def layer(at: str, index: int) -> Layer:
        qkv_size = heads.query_size + 2 * heads.kv_size
        return Layer(
            attention_norm=rms_norm(f"{at}.input_layernorm", hidden, eps),
            attention=Attention(
                heads=heads,
                qkv=linear(f"{at}.self_attn", hidden, qkv_proj=qkv_size),
                output=linear(f"{at}.self_attn", heads.query_size, o_proj=hidden),
                scale=heads.dim**-0.5,
                rope=rope,
                window=window,
            ),
            mlp_norm=rms_norm(f"{at}.post_attention_layernorm", hidden, eps),
            mlp=MLP(
                up=linear(f"{at}.mlp", hidden, gate_up_proj=2 * inner),
                down=linear(f"{at}.mlp", inner, down_proj=hidden),
                activation=gate,
            ),
        )

    return frame(shape, layer)
