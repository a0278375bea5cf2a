"""Parts that families share: sizes, activations and windows as config.json spells them, and Llama's
decoder, which is that of all but GPT-2 with small changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aioserve.models.architecture import (
    MLP,
    Architecture,
    Attention,
    Heads,
    Layer,
    Norm,
    Tensor,
    linear,
    rms_norm,
)
from aioserve.models.fields import Fields
from aioserve.models.rope import RopeConfig, positions_served

__all__ = [
    "LEAST_POSITIONS",
    "MOST_LAYERS",
    "Shape",
    "activation",
    "layer_types",
    "llama_like",
    "read_shape",
    "same_windows",
    "windows",
]

MOST_LAYERS = 1024
"""Most layers of a model. Each is described, which takes time, before the checkpoint can say that
it is missing. The largest model of these families has 126."""
LEAST_POSITIONS = 2
"""Fewest positions of a model: one for a prompt, one for its completion."""
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class Shape:
    vocab: int
    hidden: int
    inner: int
    num_layers: int
    heads: Heads
    max_positions: int
    eps: float
    tied: bool


def read_shape(
    config: Fields,
    *,
    default_kv_heads: int | None = None,
    default_head_dim: int | None = None,
    default_eps: float = 1e-6,
    tied: bool = False,
) -> Shape:
    hidden, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", default_head_dim or hidden // num_heads or None)
    if not config.has("num_key_value_heads") and "num_key_value_heads" in config.values:
        default_kv_heads = None  # an explicit null says: as many as query heads
    kv_heads = config.integer("num_key_value_heads", default_kv_heads or num_heads)
    if num_heads % kv_heads:
        config.invalid("num_key_value_heads", f"a divisor of num_attention_heads {num_heads}")
    return Shape(
        vocab=config.integer("vocab_size"),
        hidden=hidden,
        inner=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers", most=MOST_LAYERS),
        heads=Heads(num_heads, kv_heads, head_dim),
        max_positions=positions_served(
            config, config.integer("max_position_embeddings", least=LEAST_POSITIONS)
        ),
        eps=config.number("rms_norm_eps", default_eps),
        tied=config.flag("tie_word_embeddings", tied),
    )


def llama_like(
    shape: Shape,
    *,
    activation: str,
    ropes: Sequence[RopeConfig],
    windows: Sequence[int],
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    fused: bool = False,
    head_norms: bool = False,
    block_norms: bool = False,
    norm_offset: float = 0.0,
    scale: float | None = None,
    attention_cap: float = 0.0,
    **other: Any,
) -> Architecture:
    """Llama's decoder, and what other families change in it.

    Args:
        ropes, windows: of each layer; window 0 for none.
        fused: one projection makes queries, keys and values, and one gate and up.
        head_norms: RMS norms of each query and key head.
        block_norms: norms behind attention and MLP as well.
        norm_offset: is added to the weights of all norms.
        scale: of scores; None for 1 / sqrt(head_dim).
        other: more of the architecture's fields.
    """
    hidden, inner, heads = shape.hidden, shape.inner, shape.heads
    qkv = {"q_proj": heads.query_size, "k_proj": heads.kv_size, "v_proj": heads.kv_size}
    gate_up = {"gate_proj": inner, "up_proj": inner}
    if fused:
        qkv, gate_up = {"qkv_proj": sum(qkv.values())}, {"gate_up_proj": 2 * inner}

    def norm(name: str, size: int = hidden) -> Norm:
        return rms_norm(name, size, shape.eps, norm_offset)

    def layer(at: str, rope: RopeConfig, window: int) -> Layer:
        attention = f"{at}.self_attn"
        # Where there are more norms, this name is that of the one behind attention.
        before_mlp = "pre_feedforward" if block_norms else "post_attention"
        return Layer(
            attention_norm=norm(f"{at}.input_layernorm"),
            attention=Attention(
                heads=heads,
                qkv=linear(attention, hidden, qkv_bias, **qkv),
                query_norm=norm(f"{attention}.q_norm", heads.dim) if head_norms else None,
                key_norm=norm(f"{attention}.k_norm", heads.dim) if head_norms else None,
                output=linear(attention, heads.query_size, output_bias, o_proj=hidden),
                scale=heads.dim**-0.5 if scale is None else scale,
                rope=rope,
                window=window,
                soft_cap=attention_cap,
            ),
            attention_post_norm=norm(f"{at}.post_attention_layernorm") if block_norms else None,
            mlp_norm=norm(f"{at}.{before_mlp}_layernorm"),
            mlp=MLP(
                up=linear(f"{at}.mlp", hidden, mlp_bias, **gate_up),
                down=linear(f"{at}.mlp", inner, mlp_bias, down_proj=hidden),
                activation=activation,
            ),
            mlp_post_norm=norm(f"{at}.post_feedforward_layernorm") if block_norms else None,
        )

    return Architecture(
        vocab_size=shape.vocab,
        hidden_size=hidden,
        max_position_embeddings=shape.max_positions,
        embedding=Tensor("model.embed_tokens.weight", (shape.vocab, hidden)),
        layers=tuple(
            layer(f"model.layers.{i}", rope, window)
            for i, (rope, window) in enumerate(zip(ropes, windows, strict=True))
        ),
        final_norm=norm("model.norm"),
        head=Tensor("lm_head.weight", (shape.vocab, hidden)),
        tie_word_embeddings=shape.tied,
        **other,
    )


def activation(
    config: Fields, name: str, default: str, implemented: tuple[str, ...] = ("silu", "gelu_tanh")
) -> str:
    found = _ACTIVATIONS.get(config.text(name, default))
    if found not in implemented:
        known = [key for key, value in _ACTIVATIONS.items() if value in implemented]
        config.unsupported(name, f"the activations are {', '.join(known)}")
    return found


def same_windows(config: Fields, num_layers: int, absent: int | None) -> list[int]:
    """One window for all layers, or 0 for none where it is null."""
    if "sliding_window" not in config.values and absent is not None:
        window = absent
    else:
        window = config.integer("sliding_window") if config.has("sliding_window") else 0
    expected = ["sliding_attention" if window else "full_attention"] * num_layers
    if config.has("layer_types") and config.values["layer_types"] != expected:
        config.unsupported("layer_types", "this architecture treats all layers alike")
    return [window] * num_layers


def layer_types(config: Fields, default: list[str]) -> list[str]:
    """full_attention or sliding_attention for each layer."""
    if not config.has("layer_types"):
        return default
    kinds = config.values["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != len(default):
        config.invalid("layer_types", f"a list with one entry for each of {len(default)} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            config.unsupported("layer_types", "layers are full_attention or sliding_attention")
    return kinds


def windows(config: Fields, kinds: list[str]) -> list[int]:
    """The window of each layer of these kinds; 0: none."""
    if "sliding_attention" not in kinds:
        return [0] * len(kinds)
    absent = 4096 if "sliding_window" not in config.values else None
    window = config.integer("sliding_window", absent)
    return [window if kind == "sliding_attention" else 0 for kind in kinds]
