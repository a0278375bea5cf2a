"""How each architecture's config.json spells the fields of `DecoderConfig`.

One function a family, from JSON to keyword arguments. The defaults of absent fields are those of
transformers' config classes, because its files leave defaults out. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aioserve.errors import UnsupportedModelError
from aioserve.models.fields import Fields
from aioserve.models.rope import RopeConfig, read_rope

__all__ = ["SUPPORTED_ARCHITECTURES", "read_family"]

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_DTYPES = ("float32", "bfloat16", "float16")


def read_family(config: Fields) -> dict[str, Any]:
    """Keyword arguments of `DecoderConfig`. Raises `UnsupportedModelError` and `ModelError`."""
    name = _architecture(config)
    if config.has("quantization_config"):
        config.unsupported("quantization_config", "only unquantised weights can be loaded")
    if config.has("is_encoder_decoder") and config.flag("is_encoder_decoder", False):
        config.unsupported("is_encoder_decoder", "only decoders can be served")
    values = _FAMILIES[name](config)
    _check_heads(config, values)
    return {
        "architecture": name,
        "dtype": _dtype(config),
        "bos_token_id": next(iter(config.token_ids("bos_token_id")), None),
        "eos_token_ids": config.token_ids("eos_token_id"),
        **values,
    }


def _architecture(config: Fields) -> str:
    names = config.values.get("architectures")
    if isinstance(names, list) and names:
        name = str(names[0])
    else:
        model_type = config.text("model_type", "")
        name = _BY_MODEL_TYPE.get(model_type, f"model_type {model_type!r}")
    if name not in _FAMILIES:
        raise UnsupportedModelError(
            f"{config.source}: architecture {name} is not supported; supported are "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    return name


def _llama(config: Fields) -> dict[str, Any]:
    values = _shape(config)
    rope = read_rope(config, values["head_dim"], values["max_position_embeddings"])
    bias = config.flag("attention_bias", False)
    return {
        **values,
        **_one_rope(values, rope),
        "windows": (0,) * values["num_layers"],
        "activation": _activation(config, "hidden_act", "silu"),
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": config.flag("mlp_bias", False),
    }


def _mistral(config: Fields) -> dict[str, Any]:
    values = _shape(config, default_kv_heads=8)
    rope = read_rope(config, values["head_dim"], values["max_position_embeddings"])
    return {
        **values,
        **_one_rope(values, rope),
        "windows": _same_window(config, values["num_layers"], absent=4096),
        "activation": _activation(config, "hidden_act", "silu"),
    }


def _qwen2(config: Fields) -> dict[str, Any]:
    values = _shape(config)
    if config.has("use_mrope") and config.flag("use_mrope", False):
        config.unsupported("use_mrope", "positions of several axes are not implemented")
    rope = read_rope(config, values["head_dim"], values["max_position_embeddings"])
    return {
        **values,
        **_one_rope(values, rope),
        "windows": _qwen_windows(config, values["num_layers"]),
        "activation": _activation(config, "hidden_act", "silu"),
        "qkv_bias": True,
    }


def _qwen3(config: Fields) -> dict[str, Any]:
    values = _shape(config, default_head_dim=128)
    rope = read_rope(config, values["head_dim"], values["max_position_embeddings"])
    bias = config.flag("attention_bias", False)
    return {
        **values,
        **_one_rope(values, rope),
        "windows": _qwen_windows(config, values["num_layers"]),
        "activation": _activation(config, "hidden_act", "silu"),
        "qk_norm": True,
        "qkv_bias": bias,
        "output_bias": bias,
    }


def _gemma2(config: Fields) -> dict[str, Any]:
    values = _gemma(config)
    rope = read_rope(config, values["head_dim"], values["max_position_embeddings"])
    return {
        **values,
        **_one_rope(values, rope),
        "windows": _layer_windows(config, _gemma_layer_types(config, values["num_layers"], 2)),
        "attention_soft_cap": _soft_cap(config, "attn_logit_softcapping", 50.0),
        "final_soft_cap": _soft_cap(config, "final_logit_softcapping", 30.0),
    }


def _gemma3(config: Fields) -> dict[str, Any]:
    values = _gemma(config)
    if config.has("attn_logit_softcapping"):
        config.unsupported("attn_logit_softcapping", "Gemma 3 attends without a soft cap")
    layer_types = _gemma_layer_types(config, values["num_layers"], 6)
    head_dim, positions = values["head_dim"], values["max_position_embeddings"]
    sliding = read_rope(
        config,
        head_dim,
        positions,
        layer_type="sliding_attention",
        theta_field="rope_local_base_freq",
        scaled=False,
    )
    full = read_rope(
        config, head_dim, positions, layer_type="full_attention", default_theta=1_000_000.0
    )
    return {
        **values,
        "ropes": (sliding, full),
        "layer_ropes": tuple(int(kind == "full_attention") for kind in layer_types),
        "windows": _layer_windows(config, layer_types),
        "final_soft_cap": _soft_cap(config, "final_logit_softcapping", 0.0),
        "qk_norm": True,
    }


def _gemma3_conditional(config: Fields) -> dict[str, Any]:
    """The language model inside Gemma 3's image-and-text checkpoints; images are not served."""
    text = config.nested("text_config")
    defaults = {
        "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216,
        "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "max_position_embeddings": 131_072, "eos_token_id": 1,
    }  # fmt: skip
    present = {name: value for name, value in text.values.items() if value is not None}
    for name in ("tie_word_embeddings", "eos_token_id", "bos_token_id", "dtype", "torch_dtype"):
        if config.has(name):
            present.setdefault(name, config.values[name])
    merged = Fields({**defaults, **present}, config.source, "text_config.")
    if merged.has("quantization_config"):
        merged.unsupported("quantization_config", "only unquantised weights can be loaded")
    return {
        **_gemma3(merged),
        "dtype": _dtype(merged),
        "bos_token_id": next(iter(merged.token_ids("bos_token_id")), None),
        "eos_token_ids": merged.token_ids("eos_token_id"),
    }


def _phi3(config: Fields) -> dict[str, Any]:
    values = _shape(config, default_eps=1e-5)
    rope = read_rope(
        config,
        values["head_dim"],
        values["max_position_embeddings"],
        partial=True,
        default_original=4096,
    )
    return {
        **values,
        **_one_rope(values, rope),
        "windows": _same_window(config, values["num_layers"], absent=None),
        "activation": _activation(config, "hidden_act", "silu"),
        "tensors": "fused",
    }


def _gpt2(config: Fields) -> dict[str, Any]:
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if config.flag(name, False):
            config.unsupported(name, "not implemented")
    hidden_size, num_heads = config.integer("n_embd"), config.integer("n_head")
    if hidden_size % num_heads:
        config.invalid("n_embd", f"a multiple of n_head {num_heads}")
    num_layers, head_dim = config.integer("n_layer"), hidden_size // num_heads
    return {
        "vocab_size": config.integer("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": config.integer("n_inner", 4 * hidden_size),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": head_dim,
        "max_position_embeddings": config.integer("n_positions", 1024),
        "norm": "layer",
        "norm_eps": config.number("layer_norm_epsilon", 1e-5),
        "activation": _activation(config, "activation_function", "gelu_new", ("gelu_tanh",)),
        "gated_mlp": False,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "attention_scale": head_dim**-0.5 if config.flag("scale_attn_weights", True) else 1.0,
        "windows": (0,) * num_layers,
        "tie_word_embeddings": config.flag("tie_word_embeddings", True),
        "tensors": "conv1d",
    }


def _shape(
    config: Fields,
    *,
    default_kv_heads: int | None = None,
    default_head_dim: int | None = None,
    default_eps: float = 1e-6,
    tied: bool = False,
) -> dict[str, Any]:
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", default_head_dim or hidden_size // num_heads or None)
    if not config.has("num_key_value_heads") and "num_key_value_heads" in config.values:
        default_kv_heads = None  # an explicit null says: as many as query heads
    return {
        "vocab_size": config.integer("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": config.integer("intermediate_size"),
        "num_layers": config.integer("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": config.integer("num_key_value_heads", default_kv_heads or num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": config.integer("max_position_embeddings"),
        "norm_eps": config.number("rms_norm_eps", default_eps),
        "attention_scale": head_dim**-0.5,
        "tie_word_embeddings": config.flag("tie_word_embeddings", tied),
    }


def _gemma(config: Fields) -> dict[str, Any]:
    """What Gemma 2 and Gemma 3 share."""
    if config.has("use_bidirectional_attention") and config.flag(
        "use_bidirectional_attention", False
    ):
        config.unsupported("use_bidirectional_attention", "only causal attention can be served")
    values = _shape(config, default_kv_heads=4, default_head_dim=256, tied=True)
    bias = config.flag("attention_bias", False)
    return {
        **values,
        "norm_weight_offset": 1.0,
        "sandwich_norms": True,
        "activation": _activation(config, "hidden_activation", "gelu_pytorch_tanh"),
        "qkv_bias": bias,
        "output_bias": bias,
        "attention_scale": config.number("query_pre_attn_scalar", 256.0) ** -0.5,
        "embedding_scale": values["hidden_size"] ** 0.5,
    }


def _one_rope(values: dict[str, Any], rope: RopeConfig) -> dict[str, Any]:
    return {"ropes": (rope,), "layer_ropes": (0,) * values["num_layers"]}


def _activation(
    config: Fields, name: str, default: str, implemented: tuple[str, ...] = ("silu", "gelu_tanh")
) -> str:
    activation = _ACTIVATIONS.get(config.text(name, default))
    if activation not in implemented:
        known = [key for key, value in _ACTIVATIONS.items() if value in implemented]
        config.unsupported(name, f"the activations are {', '.join(known)}")
    return activation


def _soft_cap(config: Fields, name: str, absent: float) -> float:
    if name in config.values and config.values[name] is None:
        return 0.0
    return config.number(name, absent) if config.has(name) or absent else 0.0


def _same_window(config: Fields, num_layers: int, absent: int | None) -> tuple[int, ...]:
    """Mistral and Phi-3: one window for all layers, or none where it is null."""
    if "sliding_window" not in config.values and absent is not None:
        window = absent
    else:
        window = config.integer("sliding_window") if config.has("sliding_window") else 0
    expected = ["sliding_attention" if window else "full_attention"] * num_layers
    if config.has("layer_types") and config.values["layer_types"] != expected:
        config.unsupported("layer_types", "this architecture treats all layers alike")
    return (window,) * num_layers


def _qwen_windows(config: Fields, num_layers: int) -> tuple[int, ...]:
    if not config.flag("use_sliding_window", False):
        if config.has("layer_types") and "sliding_attention" in config.values["layer_types"]:
            config.unsupported("layer_types", "sliding layers need use_sliding_window = true")
        return _layer_windows(config, _layer_types(config, ["full_attention"] * num_layers))
    first = config.integer("max_window_layers", 28, least=0)
    sliding = config.has("sliding_window")
    default = [
        "sliding_attention" if sliding and layer >= first else "full_attention"
        for layer in range(num_layers)
    ]
    return _layer_windows(config, _layer_types(config, default))


def _gemma_layer_types(config: Fields, num_layers: int, default_pattern: int) -> list[str]:
    pattern = default_pattern
    if default_pattern == 6:
        pattern = config.integer("sliding_window_pattern", default_pattern)
    default = [
        "sliding_attention" if (layer + 1) % pattern else "full_attention"
        for layer in range(num_layers)
    ]
    return _layer_types(config, default)


def _layer_types(config: Fields, default: list[str]) -> list[str]:
    if not config.has("layer_types"):
        return default
    kinds = config.values["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != len(default):
        config.invalid("layer_types", f"a list with one entry for each of {len(default)} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            config.unsupported("layer_types", "layers are full_attention or sliding_attention")
    return kinds


def _layer_windows(config: Fields, layer_types: list[str]) -> tuple[int, ...]:
    if "sliding_attention" not in layer_types:
        return (0,) * len(layer_types)
    absent = 4096 if "sliding_window" not in config.values else None
    window = config.integer("sliding_window", absent)
    return tuple(window if kind == "sliding_attention" else 0 for kind in layer_types)


def _dtype(config: Fields) -> str | None:
    name = "dtype" if config.has("dtype") else "torch_dtype"
    if not config.has(name):
        return None
    dtype = config.text(name).removeprefix("torch.")
    if dtype not in _DTYPES:
        config.unsupported(name, f"the dtypes are {', '.join(_DTYPES)}")
    return dtype


def _check_heads(config: Fields, values: dict[str, Any]) -> None:
    heads, kv_heads = values["num_heads"], values["num_kv_heads"]
    if heads % kv_heads:
        config.invalid("num_key_value_heads", f"a divisor of num_attention_heads {heads}")


_FAMILIES: dict[str, Callable[[Fields], dict[str, Any]]] = {
    "GPT2LMHeadModel": _gpt2,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _gemma3_conditional,
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Phi3ForCausalLM": _phi3,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}
_BY_MODEL_TYPE = {
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

SUPPORTED_ARCHITECTURES = tuple(_FAMILIES)
