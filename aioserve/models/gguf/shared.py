"""Settings in files of most architectures: sizes, rotary positions, windows. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from aioserve.models.families.common import MOST_LAYERS
from aioserve.models.fields import Fields

__all__ = [
    "FileModel",
    "ReadVector",
    "each_layer",
    "rope",
    "scaled_rope",
    "sizes",
    "whole_heads",
    "window_of",
]

ReadVector = Callable[[str], list[float]]
"""Function that reads a small tensor of the file by name, as shortest decimals of float32."""


class FileModel(NamedTuple):
    """Keys of a file, without the prefix of the architecture, and its tensors."""

    keys: Fields
    shapes: Mapping[str, tuple[int, ...]]
    vector: ReadVector

    def has_bias(self, name: str) -> bool:
        return f"blk.0.{name}.bias" in self.shapes


def sizes(model: FileModel) -> dict[str, Any]:
    """Read the sizes of Llama and its relatives."""
    keys = model.keys
    layers = keys.integer("block_count", most=MOST_LAYERS)
    hidden, heads = keys.integer("embedding_length"), each_layer(keys, "attention.head_count")
    head_dim = keys.integer("attention.key_length", hidden // heads or None)
    if (values := keys.integer("attention.value_length", head_dim)) != head_dim:
        keys.unsupported(
            "attention.value_length", f"keys have {head_dim} dimensions, and values {values}"
        )
    return {
        "hidden_size": hidden,
        "intermediate_size": each_layer(keys, "feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": each_layer(keys, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", 10_000.0),
    }


def each_layer(keys: Fields, name: str, default: int | None = None) -> int:
    """Read an integer that all layers share, and that some files repeat for each layer."""
    value = keys.values.get(name)
    if isinstance(value, np.ndarray):
        if not len(value):
            keys.invalid(name, "an integer, or one for each layer")
        if (value != value[0]).any():
            keys.unsupported(name, "all layers must be alike")
        keys = Fields({name: value[0].item()}, keys.source, keys.path)
    return keys.integer(name, default)


def whole_heads(model: FileModel, config: dict[str, Any]) -> dict[str, Any]:
    rotated = model.keys.integer("rope.dimension_count", config["head_dim"])
    if rotated != config["head_dim"]:
        model.keys.unsupported(
            "rope.dimension_count",
            f"this architecture rotates whole heads, of {config['head_dim']} dimensions",
        )
    return config | scaled_rope(model)


def scaled_rope(model: FileModel) -> dict[str, Any]:
    """Read `rope_scaling`; {} if positions are not scaled."""
    keys = model.keys
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    kind = keys.text("rope.scaling.type", "linear" if factor != 1.0 else "none")
    if kind == "linear" and factor == 1.0:
        kind = "none"
    said = keys.number("rope.scaling.attn_factor", 1.0)
    if said != 1.0 and kind != "yarn":
        keys.unsupported("rope.scaling.attn_factor", "it scales ropes of the type yarn")
    if "rope_freqs.weight" in model.shapes:
        if kind != "none":
            keys.unsupported("rope.scaling.type", "rope_freqs.weight scales frequencies already")
        # Divisors of frequencies are LongRoPE with the same factors for all contexts.
        divisors = model.vector("rope_freqs.weight")
        return rope("longrope", short_factor=divisors, long_factor=divisors, attention_factor=1.0)
    if kind == "none":
        return {}
    if kind == "linear":
        return rope("linear", factor=factor)
    if kind != "yarn":
        keys.unsupported("rope.scaling.type", "this architecture has none, linear or yarn")
    scaling: dict[str, Any] = {"factor": factor}
    for name, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if keys.has(f"rope.scaling.{key}"):
            scaling[name] = keys.number(f"rope.scaling.{key}")
    if keys.has("rope.scaling.original_context_length"):
        original = keys.integer("rope.scaling.original_context_length")
        scaling["original_max_position_embeddings"] = original
    if said != 1.0:
        scaling["attn_factor"] = said
    return rope("yarn", **scaling)


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": kind, **fields}}


def window_of(keys: Fields) -> int | None:
    window = keys.integer("attention.sliding_window", 0, least=0)
    return window or None
