"""Metadata of a GGUF file for a model in a directory: the other direction of `config`.

What a file would say is read again by `config`, and a model that would come out as another one is
refused: nothing that has no place in a file is left out in silence. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np

from aioserve.errors import ConfigError
from aioserve.models.architecture import Architecture
from aioserve.models.config import DecoderConfig
from aioserve.models.gguf.config import generation_of, read_config
from aioserve.models.gguf.names import stored_name
from aioserve.models.rope import RopeConfig
from aioserve.models.stored import Floats

__all__ = ["WRITTEN", "Settings", "settings_of"]

WRITTEN: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""What files call the architectures that can be written."""
_VERSION_OF_BLOCKS = 2
_DIVISORS = "rope_freqs.weight"
_SOURCE = "the GGUF file to be written"


class Settings(NamedTuple):
    """What a file says of a model beside its tokenizer."""

    family: str
    """`general.architecture`"""
    metadata: dict[str, Any]
    vectors: dict[str, Floats]
    """Tensors that belong to the settings, by their names in the file."""


def settings_of(config: DecoderConfig, file_type: int, *, own_head: bool) -> Settings:
    """Settings of a file of that type; `own_head`: the output layer is a tensor of its own.

    Raises `ConfigError` for an architecture that can't be written, and for one with a setting that
    would be another one in the file.
    """
    if (family := WRITTEN.get(config.architecture)) is None:
        raise ConfigError(
            f"model must be one of {', '.join(WRITTEN)} to be written as GGUF, got "
            f"{config.architecture}",
            argument="model",
        )
    layer, heads = config.layers[0], config.heads
    rope = layer.attention.rope
    said: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": layer.mlp.down.weights[0].columns,
        "attention.head_count": heads.query,
        "attention.head_count_kv": heads.kv,
        "attention.key_length": heads.dim,
        "attention.value_length": heads.dim,
        "attention.layer_norm_rms_epsilon": layer.attention_norm.eps,
    }
    if layer.attention.window:
        said["attention.sliding_window"] = layer.attention.window
    vectors: dict[str, Floats] = {}
    if rope is not None:
        said |= _rope(rope)
        if rope.kind == "llama3":
            vectors[_DIVISORS] = _divisors(rope)
    metadata = {
        "general.architecture": family,
        "general.type": "model",
        "general.file_type": file_type,
        "general.quantization_version": _VERSION_OF_BLOCKS,
        **_sampling(config),
        **{f"{family}.{key}": value for key, value in said.items()},
    }
    settings = Settings(family, metadata, vectors)
    _check(config, settings, own_head)
    return settings


def _rope(rope: RopeConfig) -> dict[str, Any]:
    said: dict[str, Any] = {
        "rope.dimension_count": rope.rotary_dim,
        "rope.freq_base": float(rope.theta),
    }
    if rope.kind in ("linear", "yarn"):
        said["rope.scaling.type"] = rope.kind
        said["rope.scaling.factor"] = float(rope.factor)
    if rope.kind == "yarn":
        said["rope.scaling.original_context_length"] = rope.original_max_positions
        said["rope.scaling.yarn_beta_fast"] = float(rope.beta_fast)
        said["rope.scaling.yarn_beta_slow"] = float(rope.beta_slow)
    return said


def _divisors(rope: RopeConfig) -> Floats:
    """What each frequency is divided by, as Llama 3.1 slows pairs down: see `rotary`."""
    exponents = np.arange(0, rope.rotary_dim, 2) / rope.rotary_dim
    turns = rope.original_max_positions * rope.theta**-exponents / (2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    unchanged = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - unchanged) / rope.factor + unchanged)).astype(np.float32)


def _sampling(config: DecoderConfig) -> dict[str, Any]:
    """Sampling that the model's makers want, where they want any."""
    chosen = config.generation
    if not chosen.do_sample:
        return {}
    values = {
        "temp": chosen.temperature,
        "top_p": chosen.top_p,
        "top_k": chosen.top_k,
        "min_p": chosen.min_p,
        "penalty_repeat": chosen.repetition_penalty,
    }
    return {f"general.sampling.{key}": v for key, v in values.items() if v is not None}


def _check(config: DecoderConfig, settings: Settings, own_head: bool) -> None:
    """Raise `ConfigError` unless the file says what the model is."""
    tensors = [*config.required, *([config.head] if own_head else [])]
    shapes: dict[str, tuple[int, ...]] = {name: v.shape for name, v in settings.vectors.items()}
    for tensor in tensors:
        name = stored_name(settings.family, tensor.name)
        if name is None:
            raise ConfigError(
                f"model must have tensors that a GGUF file of {settings.family} has, and has "
                f"{tensor.name}",
                argument="model",
            )
        shapes[name] = tensor.shape
    said = read_config(
        settings.metadata, shapes, lambda name: settings.vectors[name].tolist(), _SOURCE
    )
    found = DecoderConfig.from_dict(
        said, source=_SOURCE, generation=generation_of(settings.metadata, _SOURCE)
    )
    if _DIVISORS in settings.vectors:  # the same angles, told by divisors that were rounded
        found = replace(found, layers=config.layers)
    for field in fields(Architecture):
        if field.name in ("tie_word_embeddings", "prefixes", "ignored"):
            continue
        if getattr(found, field.name) != getattr(config, field.name):
            raise ConfigError(
                f"model must be what a GGUF file of {settings.family} can say, and its "
                f"{field.name} would become others",
                argument="model",
            )
