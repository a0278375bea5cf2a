"""Metadata of a GGUF file for a model directory: the reverse of `config`.

`config` reads the metadata again, and a model that would come out different is refused. No setting
is dropped silently because files have no place for it. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np

from aioserve.errors import ConfigError
from aioserve.models.architecture import MLP, Architecture, parts_of
from aioserve.models.config import DecoderConfig
from aioserve.models.gguf.config import FAMILIES, generation_of, read_config
from aioserve.models.gguf.file import short_decimal
from aioserve.models.gguf.names import stored_name
from aioserve.models.rope import RopeConfig
from aioserve.models.stored import Floats

__all__ = ["WRITTEN", "Settings", "settings_of"]

WRITTEN: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "GPT2LMHeadModel": "gpt2",
}
"""Architectures that can be written, with their names in files."""
_VERSION_OF_BLOCKS = 2
_DIVISORS = "rope_freqs.weight"
_SOURCE = "the GGUF file to be written"


class Settings(NamedTuple):
    """Contents of a file about a model, without its tokenizer."""

    family: str
    """Value of `general.architecture`."""
    metadata: dict[str, Any]
    vectors: dict[str, Floats]
    """Tensors that belong to the settings, by their names in the file."""


def settings_of(config: DecoderConfig, file_type: int, *, own_head: bool) -> Settings:
    """Make the settings of a file of type `file_type` (`general.file_type`).

    `own_head` is true if the output layer is a tensor of its own. Raises `ConfigError` for an
    architecture that can't be written, and for a setting that the file would change.
    """
    if (family := WRITTEN.get(config.architecture)) is None:
        raise ConfigError(
            f"model must be one of {', '.join(WRITTEN)} to be written as GGUF, got "
            f"{config.architecture}",
            argument="model",
        )
    said = _gpt2(config) if family == "gpt2" else _rotary(config, family)
    vectors = _divisors(config)
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


def _sizes(config: DecoderConfig) -> dict[str, Any]:
    """Metadata of all architectures."""
    return {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": next(parts_of(config.layers, MLP)).down.weights[0].columns,
        "attention.head_count": config.heads.query,
    }


def _gpt2(config: DecoderConfig) -> dict[str, Any]:
    return _sizes(config) | {"attention.layer_norm_epsilon": config.final_norm.eps}


def _rotary(config: DecoderConfig, family: str) -> dict[str, Any]:
    """Metadata of Llama and its relatives."""
    heads, known = config.heads, FAMILIES[family].keys
    said = _sizes(config) | {
        "attention.head_count_kv": heads.kv,
        "attention.key_length": heads.dim,
        "attention.value_length": heads.dim,
        "attention.layer_norm_rms_epsilon": config.final_norm.eps,
    }
    sliding = [layer.mixer for layer in config.layers if layer.mixer.window]
    windows = [one.window for one in sliding] or [0]
    # Readers expect zero for a Phi-3 without a window, and no such key in other files.
    if "attention.sliding_window" in known and (windows[0] or family == "phi3"):
        said["attention.sliding_window"] = windows[0]
    if "attention.sliding_window_pattern" in known and sliding:
        full = (i for i, layer in enumerate(config.layers) if not layer.mixer.window)
        said["attention.sliding_window_pattern"] = next(full, config.num_layers) + 1
    if "rope.freq_base_swa" in known and sliding and sliding[0].rope is not None:
        said["rope.freq_base_swa"] = float(sliding[0].rope.theta)
    for name, cap in (
        ("attn_logit_softcapping", config.layers[0].mixer.soft_cap),
        ("final_logit_softcapping", config.final_soft_cap),
    ):
        if name in known and cap:
            said[name] = float(cap)
    rope = _rope_of(config)
    return said if rope is None else said | _rope(rope)


def _rope_of(config: DecoderConfig) -> RopeConfig | None:
    """Rope of the layers with full attention, or if all have windows, of these."""
    layers = sorted(config.layers, key=lambda layer: layer.mixer.window > 0)
    return layers[0].mixer.rope


def _rope(rope: RopeConfig) -> dict[str, Any]:
    said: dict[str, Any] = {
        "rope.dimension_count": rope.rotary_dim,
        "rope.freq_base": float(rope.theta),
    }
    if rope.kind in ("linear", "yarn"):
        said["rope.scaling.type"] = rope.kind
        said["rope.scaling.factor"] = float(rope.factor)
    if rope.kind in ("yarn", "longrope"):
        said["rope.scaling.original_context_length"] = rope.original_max_positions
    if rope.kind == "yarn":
        said["rope.scaling.yarn_beta_fast"] = float(rope.beta_fast)
        said["rope.scaling.yarn_beta_slow"] = float(rope.beta_slow)
    if rope.kind == "longrope":
        said["rope.scaling.attn_factor"] = float(rope.attention_factor)
    return said


def _divisors(config: DecoderConfig) -> dict[str, Floats]:
    """Make the tensors with the divisors of frequencies."""
    rope = _rope_of(config)
    if rope is not None and rope.kind == "llama3":
        return {_DIVISORS: _llama3_divisors(rope)}
    if rope is not None and rope.kind == "longrope":
        return {
            "rope_factors_long.weight": np.array(rope.long_factor, np.float32),
            "rope_factors_short.weight": np.array(rope.short_factor, np.float32),
        }
    return {}


def _llama3_divisors(rope: RopeConfig) -> Floats:
    """Compute the divisors by which Llama 3.1 slows pairs down: see `rotary`."""
    exponents = np.arange(0, rope.rotary_dim, 2) / rope.rotary_dim
    turns = rope.original_max_positions * rope.theta**-exponents / (2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    unchanged = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - unchanged) / rope.factor + unchanged)).astype(np.float32)


def _sampling(config: DecoderConfig) -> dict[str, Any]:
    """Sampling settings of the model. Without them, readers would use llama.cpp's defaults."""
    chosen = config.generation
    if not chosen.do_sample:
        temperature = 0.0
    else:
        temperature = 1.0 if chosen.temperature is None else chosen.temperature
    values = {
        "temp": temperature,
        "top_p": chosen.top_p,
        "top_k": chosen.top_k,
        "min_p": chosen.min_p,
        "penalty_repeat": chosen.repetition_penalty,
    }
    return {f"general.sampling.{key}": v for key, v in values.items() if v is not None}


def _as_read(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata as a reader finds them, with numbers rounded to float32."""
    return {
        key: short_decimal(np.float32(value)) if isinstance(value, float) else value
        for key, value in metadata.items()
    }


def _check(config: DecoderConfig, settings: Settings, own_head: bool) -> None:
    """Raise `ConfigError` unless the file describes the same model."""
    if own_head and settings.family == "gemma2":
        raise ConfigError(
            f"model must have no output layer of its own to be written as GGUF of "
            f"{settings.family}, whose readers take the embedding, and has {config.head.name}",
            argument="model",
        )
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
        _as_read(settings.metadata),
        shapes,
        lambda name: [short_decimal(number) for number in settings.vectors[name]],
        _SOURCE,
    )
    found = DecoderConfig.from_dict(
        said, source=_SOURCE, generation=generation_of(_as_read(settings.metadata), _SOURCE)
    )
    if _DIVISORS in settings.vectors:  # the angles are the same, but come from rounded divisors
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
