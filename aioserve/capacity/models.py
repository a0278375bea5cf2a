"""Decoders by name: well-known shapes as presets, others from their config.json.

No weights are needed. This module reads what a model is made of; `sizes` counts it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec

from aioserve.arguments import plain_str, shown
from aioserve.capacity.hardware import check
from aioserve.capacity.sizes import ModelSizes, count_expert, count_idle, count_parameters
from aioserve.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from aioserve.json_file import read_json_object
from aioserve.models.architecture import Experts, parts_of
from aioserve.models.config import MAX_CONFIG_BYTES, DecoderConfig
from aioserve.models.files import model_files
from aioserve.models.known import BUNDLED_KINDS, KnownKinds
from aioserve.models.resolve import expanded, resolve
from aioserve.paging.format import KV_FORMATS, KVEntry, KVFormat

__all__ = ["PRESETS", "ExpertsShape", "ModelShape", "read_model", "read_sizes"]

MAX_SIZE = 1 << 100
"""Largest count of anything: floats go on to 1 << 1023."""


class ExpertsShape(msgspec.Struct, frozen=True, kw_only=True):
    """Mixtures of experts of one kind, in some layers of a decoder.

    Raises `ConfigError` for a value that is no count.
    """

    num_layers: int
    """Layers with such a mixture."""
    num_experts: int
    """Experts of each, without those that all tokens share."""
    experts_per_token: int
    expert_params: int
    """Weights of one expert in one layer."""
    expert_bytes: int | None = None
    """Bytes of these; None: as many for each as for all other weights."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None or name != "expert_bytes":
                check(name, value, 1, MAX_SIZE)
        check("experts_per_token", self.experts_per_token, 1, self.num_experts)

    def num_read(self, num_tokens: int) -> float:
        """Return how many experts of one layer a step of so many tokens reads, on average.

        Each token is sent to k of n experts, and all are as likely. So all T tokens leave one out
        with a probability of (1 - k/n)^T.
        """
        left_out = 1 - self.experts_per_token / self.num_experts
        return self.num_experts * (1 - left_out**num_tokens)


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes that the cost of a decoder's step depends on.

    Raises `ConfigError` for a value that is no count.
    """

    layer_params: int
    """Weights of the layers that a token is multiplied with."""
    head_params: int
    """Weights of the output head, for the tokens that a step samples from."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    bytes_per_value: int = 2
    """Bytes of a weight."""
    kv_format: KVFormat = KV_FORMATS["bfloat16"]
    step_weight_bytes: int | None = None
    """Bytes of weights that every step reads, without experts; None: `bytes_per_value` of each."""
    latent_rank: int = 0
    """Numbers of the row that a token leaves in a layer which are its value too.

    The row has `head_dim` numbers. 0: tokens leave keys and values.
    """
    experts: tuple[ExpertsShape, ...] = ()
    """Mixtures of experts: steps read only the experts that their tokens are sent to."""
    windows: tuple[int, ...] = ()
    """Last positions that a token sees, including its own, in each layer that doesn't see all."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name in ("experts", "windows"):
                _check_layers(name, value, self.num_layers)
            elif name == "kv_format":
                if type(value) is not KVFormat:
                    raise ConfigError(f"{name} must be a KVFormat, got {shown(value)}")
            elif value is not None or name != "step_weight_bytes":
                check(name, value, 0 if name == "latent_rank" else 1, MAX_SIZE)
        if self._params_without_experts < 0:
            raise ConfigError(
                f"layer_params: {self.layer_params} are fewer than the experts of a token have"
            )

    @classmethod
    def of(cls, config: DecoderConfig) -> ModelShape:
        """Return the shape of a decoder in its own precision, or in bfloat16 if that isn't
        known.
        """
        count = count_parameters(config)
        windows = [layer.mixer.window for layer in config.layers]
        mixtures = Counter(
            (one.routing.experts, one.routing.top_k, count_expert(one))
            for one in parts_of(config.layers, Experts)
        )
        return cls(
            layer_params=count.matrices + count.vectors - count_idle(config),
            head_params=config.vocab_size * config.hidden_size,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            bytes_per_value=4 if config.dtype == "float32" else 2,
            kv_format=KV_FORMATS["float32" if config.dtype == "float32" else "bfloat16"],
            latent_rank=config.latent_rank,
            experts=tuple(
                ExpertsShape(
                    num_layers=num_layers,
                    num_experts=num_experts,
                    experts_per_token=per_token,
                    expert_params=params,
                )
                for (num_experts, per_token, params), num_layers in mixtures.items()
            ),
            windows=tuple(window for window in windows if window),
        )

    def with_weight_bytes(self, step_bytes: int, expert_bytes: int) -> ModelShape:
        """Return the same with weights of `step_bytes`, of which experts have `expert_bytes`.

        Each kind has its part of them by its parameters.
        """
        params = sum(one.num_layers * one.num_experts * one.expert_params for one in self.experts)
        experts = [
            msgspec.structs.replace(
                one, expert_bytes=max(1, one.expert_params * expert_bytes // params)
            )
            for one in self.experts
        ]
        return msgspec.structs.replace(
            self, step_weight_bytes=step_bytes - expert_bytes, experts=tuple(experts)
        )

    def weight_bytes(self, num_tokens: int) -> int:
        """Return the bytes of weights that a step of so many tokens reads.

        Of experts, they are those that it reads on average.
        """
        size = self.bytes_per_value
        num_bytes = self.step_weight_bytes
        if num_bytes is None:
            num_bytes = self._params_without_experts * size
        for one in self.experts:
            each = one.expert_params * size if one.expert_bytes is None else one.expert_bytes
            num_bytes += round(one.num_layers * each * one.num_read(num_tokens))
        return num_bytes

    @property
    def _params_without_experts(self) -> int:
        own = sum(e.num_layers * e.experts_per_token * e.expert_params for e in self.experts)
        return self.layer_params + self.head_params - own

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values, or latents, of one token in all layers."""
        latent = self.latent_rank > 0
        entry = KVEntry(self.kv_format, self.num_kv_heads, self.head_dim, latent)
        return self.num_layers * entry.num_bytes

    @property
    def pair_flops(self) -> int:
        """Operations of a token's attention to one other, in all layers."""
        dims = self.head_dim + (self.latent_rank or self.head_dim)
        return 2 * self.num_layers * self.num_heads * dims

    @property
    def layers_by_window(self) -> dict[int, int]:
        """Number of layers with each window; 0: they see all."""
        full = self.num_layers - len(self.windows)
        return ({0: full} if full else {}) | Counter(self.windows)


def _check_layers(name: str, value: Any, num_layers: int) -> None:
    """Raise `ConfigError` for a value that doesn't describe some of so many layers."""
    if type(value) is not tuple or len(value) > num_layers:
        raise ConfigError(f"{name} must be a tuple of at most num_layers, got {shown(value)}")
    for one in value:
        if name == "windows":
            check(name, one, 1, MAX_SIZE)
        elif type(one) is not ExpertsShape:
            raise ConfigError(f"{name} must be of ExpertsShape, got {shown(one)}")
    if name == "experts" and sum(one.num_layers for one in value) > num_layers:
        raise ConfigError(
            f"{name} must have at most num_layers of {num_layers}, got {shown(value)}"
        )


def read_model(
    name: str, *, read_as: str | None = None, known: KnownKinds = BUNDLED_KINDS
) -> DecoderConfig:
    """Return the decoder that `name` stands for.

    A directory that has the name of a preset is reached with a "./" before it. `read_as` and
    `known` are as in `DecoderConfig.from_dict`. Raises `ModelError`.
    """
    values, source = _config_of(name)
    return DecoderConfig.from_dict(values, source=source, read_as=read_as, known=known)


def read_sizes(name: str, known: KnownKinds = BUNDLED_KINDS) -> ModelSizes:
    """Return the sizes of the model that `name` stands for, as in `read_model`.

    The engine may refuse it if its config.json says enough. Raises `ModelError` for all others.
    """
    values, source = _config_of(name)
    try:
        return ModelSizes.of(DecoderConfig.from_dict(values, source=source, known=known))
    except UnsupportedModelError as refusal:
        return ModelSizes.of_refused(values, source, refusal)


def _config_of(name: str) -> tuple[Mapping[str, Any], str]:
    """Return the content of a model's config.json, and its name in messages."""
    if (given := plain_str(name)) is None:
        raise ModelNotFoundError(f"a model must be named by a str, got {shown(name)}")
    name = given
    if name in PRESETS:
        return PRESETS[name], f"preset {name}"
    path = expanded(name)
    if not (path.suffix == ".json" and os.path.isfile(path)):
        try:
            directory = resolve(name)
        except ModelNotFoundError as error:
            raise ModelNotFoundError(f"{error}; presets are {', '.join(PRESETS)}") from error
        return model_files(directory).config_values()
    return read_json_object(path, MAX_CONFIG_BYTES), str(path)


def _llama(hidden: int, inner: int, layers: int, heads: int, **other: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "torch_dtype": "bfloat16",
        **other,
    }


def _qwen3(hidden: int, inner: int, layers: int, heads: int, *, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }


PRESETS: dict[str, dict[str, Any]] = {
    # Llama 3.1 and 3.2, whose contexts are longer than those of the first Llama 3.
    "llama-3-1b": _llama(2048, 8192, 16, 32, head_dim=64, tie_word_embeddings=True),
    "llama-3-3b": _llama(3072, 8192, 28, 24, head_dim=128, tie_word_embeddings=True),
    "llama-3-8b": _llama(4096, 14_336, 32, 32),
    "llama-3-70b": _llama(8192, 28_672, 80, 64),
    "llama-3-405b": _llama(16_384, 53_248, 126, 128),
    # Version 0.3; earlier ones have a vocabulary of 32,000.
    "mistral-7b": {
        "architectures": ["MistralForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32_768,
        "max_position_embeddings": 32_768,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
    },
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32_000,
        "max_position_embeddings": 32_768,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
    },
    # Without the layer that predicts a second token. Its files have weights in fp8.
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "vocab_size": 129_280,
        "max_position_embeddings": 163_840,
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    },
    # The smallest of the four, whose files have float32.
    "gpt-2": {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "vocab_size": 50_257,
        "torch_dtype": "float32",
    },
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12_288, 36, 32, tied=False),
    "qwen3-14b": _qwen3(5120, 17_408, 40, 40, tied=False),
    "qwen3-32b": _qwen3(5120, 25_600, 64, 64, tied=False),
}
"""Presets as their config.json has them, without the rotary embedding, which has no weights."""
