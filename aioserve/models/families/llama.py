"""Llama (Touvron et al., 2023; Grattafiori et al., "The Llama 3 herd of models", 2024).

Pre-normalised with RMS norms, rotary positions, grouped heads since Llama 2, a gated MLP.
"""

from __future__ import annotations

from aioserve.models.architecture import MLP, Architecture, Attention, Layer, linear, rms_norm
from aioserve.models.families.common import activation, frame, read_shape
from aioserve.models.fields import Fields
from aioserve.models.rope import read_rope

__all__ = ["llama"]


def llama(config: Fields) -> Architecture:
    shape = read_shape(config)
    hidden, inner, heads, eps = shape.hidden, shape.inner, shape.heads, shape.eps
    rope = read_rope(config, heads.dim, shape.max_positions)
    gate = activation(config, "hidden_act", "silu")
    bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)

    def layer(at: str, index: int) -> Layer:
        qkv = {"q_proj": heads.query_size, "k_proj": heads.kv_size, "v_proj": heads.kv_size}
        return Layer(
            attention_norm=rms_norm(f"{at}.input_layernorm", hidden, eps),
            attention=Attention(
                heads=heads,
                qkv=linear(f"{at}.self_attn", hidden, bias, **qkv),
                output=linear(f"{at}.self_attn", heads.query_size, bias, o_proj=hidden),
                scale=heads.dim**-0.5,
                rope=rope,
            ),
            mlp_norm=rms_norm(f"{at}.post_attention_layernorm", hidden, eps),
            mlp=MLP(
                up=linear(f"{at}.mlp", hidden, mlp_bias, gate_proj=inner, up_proj=inner),
                down=linear(f"{at}.mlp", inner, mlp_bias, down_proj=hidden),
                activation=gate,
            ),
        )

    return frame(shape, layer)
