"""Parts that families share: sizes, activations and windows as config.json spells them, and the
frame around the layers that all but GPT-2 have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aioserve.models.architecture import Architecture, Heads, Layer, Tensor, rms_norm
from aioserve.models.fields import Fields

__all__ = [
    "LEAST_POSITIONS",
    "MOST_LAYERS",
    "Shape",
    "activation",
    "frame",
    "layer_types",
    "read_shape",
    "same_window",
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
        max_positions=config.integer("max_position_embeddings", least=LEAST_POSITIONS),
        eps=config.number("rms_norm_eps", default_eps),
        tied=config.flag("tie_word_embeddings", tied),
    )


def frame(
    shape: Shape, layer: Callable[[str, int], Layer], *, norm_offset: float = 0.0, **other: Any
) -> Architecture:
    """Embedding, the layers that `layer(prefix, index)` describes, norm and head."""
    return Architecture(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        max_position_embeddings=shape.max_positions,
        embedding=Tensor("model.embed_tokens.weight", (shape.vocab, shape.hidden)),
        layers=tuple(layer(f"model.layers.{i}", i) for i in range(shape.num_layers)),
        final_norm=rms_norm("model.norm", shape.hidden, shape.eps, norm_offset),
        head=Tensor("lm_head.weight", (shape.vocab, shape.hidden)),
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


def same_window(config: Fields, num_layers: int, absent: int | None) -> int:
    """One window for all layers, or 0 for none where it is null."""
    if "sliding_window" not in config.values and absent is not None:
        window = absent
    else:
        window = config.integer("sliding_window") if config.has("sliding_window") else 0
    expected = ["sliding_attention" if window else "full_attention"] * num_layers
    if config.has("layer_types") and config.values["layer_types"] != expected:
        config.unsupported("layer_types", "this architecture treats all layers alike")
    return window


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
