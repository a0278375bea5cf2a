"""Translation of a GGUF file's metadata into the config.json that the model was converted from.

`families` reads the result like a real config.json. Settings that the conversion dropped get the
values of llama.cpp. An unknown setting is refused, never ignored. No torch here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from aioserve.errors import UnsupportedModelError, WeightsError
from aioserve.models.families.llama import ORIGINAL_POSITIONS_OF_PHI3
from aioserve.models.fields import Fields, asks_nothing
from aioserve.models.gguf.mixtures import (
    deepseek2,
    gpt_oss,
    mixtral,
    olmoe,
    qwen2_moe,
    qwen3_moe,
)
from aioserve.models.gguf.shared import (
    FileModel,
    ReadVector,
    rope,
    scaled_rope,
    sizes,
    whole_heads,
    window_of,
)
from aioserve.models.rope import longrope_scale

__all__ = ["FAMILIES", "architecture_of", "generation_of", "read_config"]

_QUANTIZATION = 2
"""Version of the layout of blocks, the only one since 2023."""
_EVERYWHERE = frozenset(
    {
        "vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length",
        "attention.head_count", "attention.head_count_kv", "attention.causal", "expert_count",
        "expert_used_count", "tensor_data_layout", "rope.scaling.finetuned",
    }
)  # fmt: skip
_ROTARY = frozenset(
    {
        "attention.layer_norm_rms_epsilon", "attention.key_length", "attention.value_length",
        "rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.type",
        "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.attn_factor",
        "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    }
)  # fmt: skip
_ZERO_IS_NONE = (
    "rope.scaling.factor", "rope.scale_linear", "rope.scaling.original_context_length",
    "rope.scaling.attn_factor", "rope.freq_base_swa", "attention.sliding_window_pattern",
    "attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base",
    "expert_group_count", "expert_group_used_count", "expert_weights_scale", "expert_gating_func",
)  # fmt: skip
"""Known keys for which zero means that they are not set, as in llama.cpp."""
_PLAIN: Mapping[str, object] = dict.fromkeys(
    ("expert_weights_scale", "logit_scale", "residual_scale", "embedding_scale"), 1
)
"""Keys that only some families know, with the value that changes nothing in the others."""

logger: logging.Logger = logging.getLogger(__name__)


def architecture_of(metadata: Mapping[str, Any], source: str) -> str:
    """Read `general.architecture`, one of `FAMILIES`.

    Raises `UnsupportedModelError` for other architectures, and for experts in families without
    them. Files without a language model are refused, too: projectors of images, importance
    matrices, adapters, bare vocabularies.
    """
    general = Fields(metadata, source)
    kind = general.text("general.type", "model")
    if kind == "imatrix":  # it has no other metadata
        raise UnsupportedModelError(
            f"{source}: holds an importance matrix (imatrix), which quantisers read: give the file "
            f"of a model"
        )
    name = general.text("general.architecture")
    if name == "clip" or kind == "mmproj":
        raise UnsupportedModelError(
            f"{source}: holds the part of a model that sees or hears (mmproj), which is not "
            f"served: give the file of its language model"
        )
    if kind != "model":
        general.unsupported("general.type", "only whole models can be served")
    if general.integer("general.quantization_version", _QUANTIZATION) != _QUANTIZATION:
        general.unsupported(
            "general.quantization_version", f"blocks are read as version {_QUANTIZATION} has them"
        )
    if name not in FAMILIES:
        general.unsupported("general.architecture", f"supported are {', '.join(FAMILIES)}")
    count = f"{name}.expert_count"
    if name not in _MIXTURES and general.has(count) and general.integer(count, least=0):
        general.unsupported(count, f"mixtures of experts are {', '.join(_MIXTURES)}")
    return name


def read_config(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    vector: ReadVector,
    source: str,
) -> dict[str, Any]:
    """Make fields of config.json for `DecoderConfig.from_dict`, without token ids.

    - shapes: shapes of the file's tensors, by their names in the file.
    - vector: function that reads a small tensor.
    - source: name of the file in errors.

    Raises `ModelError` naming file and key.
    """
    name = architecture_of(metadata, source)
    prefix = f"{name}."
    keys = Fields(
        {key.removeprefix(prefix): v for key, v in metadata.items() if key.startswith(prefix)},
        source,
        prefix,
    )
    family = FAMILIES[name]
    keys = _known(keys, family.keys)
    if not keys.flag("attention.causal", True):
        keys.unsupported("attention.causal", "only causal attention can be served")
    if "token_embd.weight" not in shapes:
        raise WeightsError(f"{source}: the weights lack token_embd.weight")
    config = family.read(FileModel(keys, shapes, vector))
    return {
        "architectures": [family.architecture],
        "vocab_size": shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in shapes,
        **config,
    }


def _known(keys: Fields, known: frozenset[str]) -> Fields:
    """Return the keys without those that change nothing.

    Raises `UnsupportedModelError` for unknown ones."""
    left = {}
    for key, value in keys.values.items():
        plain = value.tolist() if isinstance(value, np.ndarray) else value
        if key in known:
            if key not in _ZERO_IS_NONE or not asks_nothing(plain):
                left[key] = value
                continue
        elif not (asks_nothing(plain) or plain == _PLAIN.get(key, ()) or _holds_all(keys, key)):
            keys.unsupported(key, "an unknown setting")
        logger.debug("%s: %s%s = %s changes nothing", keys.source, keys.path, key, plain)
    return Fields(left, keys.source, keys.path)


def _holds_all(keys: Fields, key: str) -> bool:
    """True if `key` is a window at least as long as the context, which changes nothing."""
    return (
        key == "attention.sliding_window"
        and not keys.has("rope.scaling.type")
        and keys.integer(key) >= keys.integer("context_length")
    )


def generation_of(metadata: Mapping[str, Any], source: str) -> dict[str, Any] | None:
    """Make fields of generation_config.json from `general.sampling`; None if there are none."""
    prefix = "general.sampling."
    fields = {
        "temp": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "penalty_repeat": "repetition_penalty",
    }
    found = {
        name: metadata[prefix + key] for key, name in fields.items() if prefix + key in metadata
    }
    return {"do_sample": found.get("temperature") != 0, **found} if found else None


def _llama(model: FileModel) -> dict[str, Any]:
    config = whole_heads(model, sizes(model))
    if model.keys.integer("expert_count", 0, least=0):
        return mixtral(model, config)
    if (window := window_of(model.keys)) is not None:
        return config | {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    biases = {"attention_bias": model.has_bias("attn_q"), "mlp_bias": model.has_bias("ffn_up")}
    return config | biases


def _qwen2(model: FileModel) -> dict[str, Any]:
    return whole_heads(model, sizes(model))


def _qwen3(model: FileModel) -> dict[str, Any]:
    return _qwen2(model) | {"attention_bias": model.has_bias("attn_q")}


def _gemma(model: FileModel, pattern: int, large: int) -> dict[str, Any]:
    """Read a Gemma. `large` is the number of layers of the 27B model.

    Its scores have another scale than those of smaller models, and files don't contain it."""
    config = whole_heads(model, sizes(model))
    keys, layers, window = model.keys, config["num_hidden_layers"], window_of(model.keys)
    scalar = config["head_dim"]
    if layers == large:
        scalar = config["hidden_size"] / config["num_attention_heads"]
    kinds = ["full_attention"] * layers
    if window is not None:
        for layer in range(layers):
            if (layer + 1) % _pattern(keys, pattern):
                kinds[layer] = "sliding_attention"
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if keys.has(name):
            config[name] = keys.number(name, least=0) or None
    return config | {
        "query_pre_attn_scalar": scalar,
        "sliding_window": window,
        "layer_types": kinds,
        "attention_bias": model.has_bias("attn_q"),
    }


def _pattern(keys: Fields, default: int) -> int:
    """Period of layers with full attention: 6 means that every sixth layer has it."""
    return keys.integer("attention.sliding_window_pattern", default)


def _gemma2(model: FileModel) -> dict[str, Any]:
    return _gemma(model, pattern=2, large=46)


def _gemma3(model: FileModel) -> dict[str, Any]:
    sliding = model.keys.number("rope.freq_base_swa", 10_000.0)
    return _gemma(model, pattern=6, large=62) | {"rope_local_base_freq": sliding}


def _phi3(model: FileModel) -> dict[str, Any]:
    config, keys = sizes(model), model.keys
    rotated = keys.integer("rope.dimension_count", config["head_dim"])
    config["partial_rotary_factor"] = rotated / config["head_dim"]
    config["sliding_window"] = window_of(keys)
    if keys.has("rope.scaling.original_context_length"):
        original = keys.integer("rope.scaling.original_context_length")
        config["original_max_position_embeddings"] = original
    factors: dict[str, Any] = {
        f"{length}_factor": model.vector(f"rope_factors_{length}.weight")
        for length in ("short", "long")
        if f"rope_factors_{length}.weight" in model.shapes
    }
    if not factors:
        return config | scaled_rope(model)
    if keys.has("rope.scaling.attn_factor"):
        said, original = keys.number("rope.scaling.attn_factor"), _original(config)
        # Files round it to float32. The exact number follows from the lengths.
        own = longrope_scale(config["max_position_embeddings"] / original, original)
        if np.float32(said) != np.float32(own):
            factors["attention_factor"] = said
    return config | rope("longrope", **factors)


def _original(config: dict[str, Any]) -> int:
    """Longest context of a Phi-3's pretraining, in tokens."""
    return config.get("original_max_position_embeddings", ORIGINAL_POSITIONS_OF_PHI3)


def _gpt2(model: FileModel) -> dict[str, Any]:
    keys = model.keys
    return {
        "n_embd": keys.integer("embedding_length"),
        "n_head": keys.integer("attention.head_count"),
        "n_layer": keys.integer("block_count"),
        "n_positions": keys.integer("context_length"),
        "n_inner": keys.integer("feed_forward_length"),
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
    }


class _Family(NamedTuple):
    architecture: str
    """Name of the architecture in config.json."""
    read: Callable[[FileModel], dict[str, Any]]
    keys: frozenset[str]
    """Keys that files of the family may have, without the prefix."""


def _family(architecture: str, read: Callable[[FileModel], dict[str, Any]], *keys: str) -> _Family:
    return _Family(architecture, read, _EVERYWHERE | _ROTARY | set(keys))


_WINDOW = "attention.sliding_window"
_PATTERN = "attention.sliding_window_pattern"
_EXPERT_WIDTH = "expert_feed_forward_length"
_SHARED_WIDTH = "expert_shared_feed_forward_length"
_CAPS = "attn_logit_softcapping", "final_logit_softcapping"
_ROUTING = "expert_gating_func", "expert_weights_norm"
_LATENTS = (
    "attention.kv_lora_rank", "attention.q_lora_rank", "attention.key_length_mla",
    "attention.value_length_mla", "rope.scaling.yarn_log_multiplier", "leading_dense_block_count",
    "expert_shared_count", "expert_weights_scale", "expert_weights_norm", "expert_gating_func",
    "expert_group_count", "expert_group_used_count",
)  # fmt: skip

FAMILIES: Mapping[str, _Family] = {
    "llama": _family("LlamaForCausalLM", _llama, _WINDOW, *_ROUTING),
    "qwen2": _family("Qwen2ForCausalLM", _qwen2),
    "qwen3": _family("Qwen3ForCausalLM", _qwen3),
    "qwen2moe": _family("Qwen2MoeForCausalLM", qwen2_moe, _EXPERT_WIDTH, _SHARED_WIDTH, *_ROUTING),
    "qwen3moe": _family("Qwen3MoeForCausalLM", qwen3_moe, _EXPERT_WIDTH, *_ROUTING),
    "olmoe": _family("OlmoeForCausalLM", olmoe, _EXPERT_WIDTH, *_ROUTING),
    "gpt-oss": _family(
        "GptOssForCausalLM",
        gpt_oss,
        *(_EXPERT_WIDTH, _WINDOW, _PATTERN, "rope.freq_base_swa", *_ROUTING),
    ),
    "deepseek2": _family("DeepseekV2ForCausalLM", deepseek2, _EXPERT_WIDTH, *_LATENTS),
    "gemma2": _family("Gemma2ForCausalLM", _gemma2, _WINDOW, _PATTERN, *_CAPS),
    "gemma3": _family(
        "Gemma3ForCausalLM", _gemma3, _WINDOW, _PATTERN, *_CAPS, "rope.freq_base_swa"
    ),
    "phi3": _family("Phi3ForCausalLM", _phi3, _WINDOW),
    "gpt2": _Family("GPT2LMHeadModel", _gpt2, _EVERYWHERE | {"attention.layer_norm_epsilon"}),
}
"""Supported values of `general.architecture`."""
_MIXTURES = ("llama", "qwen2moe", "qwen3moe", "olmoe", "gpt-oss", "deepseek2")
"""Families that may have experts."""
