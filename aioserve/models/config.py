"""What a decoder computes, as one frozen value read from a Hugging Face model directory.

The architectures differ in the fields of `DecoderConfig` only; `families.py` knows how each one's
config.json spells them. No torch here. A setting that would change the computation and isn't
implemented is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from aioserve.errors import ModelError
from aioserve.models.families import read_family
from aioserve.models.fields import Fields, read_json
from aioserve.models.rope import RopeConfig

__all__ = ["DecoderConfig", "GenerationDefaults"]

_CHANGE_SAMPLING = {
    # name -> the value that changes nothing
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "no_repeat_ngram_size": 0,
    "length_penalty": 1.0,
    "num_beams": 1,
    "penalty_alpha": 0.0,
}


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """How the model's authors want it sampled (generation_config.json); None: they don't say."""

    do_sample: bool = False
    """False: greedy, whatever the other fields are."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    unsupported: tuple[str, ...] = ()
    """Settings of the file that aioserve can't apply, as "name=value", for a caller to show."""


class DecoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One decoder-only transformer.

    `from_directory` and `from_dict` raise `UnsupportedModelError` for an architecture or a setting
    that isn't implemented and `ModelError` for a malformed file; both name file, field and value.
    """

    architecture: str
    """As in `architectures` of config.json, for example "Qwen3ForCausalLM"."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    """Longest context in tokens."""

    norm: str = "rms"
    """rms, or layer (LayerNorm with bias)."""
    norm_eps: float = 1e-6
    norm_weight_offset: float = 0.0
    """Added to RMS norm weights: 1.0 for Gemma."""
    sandwich_norms: bool = False
    """Norms also after attention and after the MLP, before each is added to the residual."""
    qk_norm: bool = False
    """RMS norm of each query and key head before the rotation."""

    activation: str = "silu"
    """silu or gelu_tanh."""
    gated_mlp: bool = True
    """down(activation(gate(x)) * up(x)) instead of down(activation(up(x)))."""
    qkv_bias: bool = False
    output_bias: bool = False
    """Of the attention's output projection."""
    mlp_bias: bool = False

    attention_scale: float
    attention_soft_cap: float = 0.0
    """c > 0: scores become c * tanh(score / c)."""
    final_soft_cap: float = 0.0
    """The same for logits."""
    windows: tuple[int, ...]
    """Per layer: a token sees this many last positions, its own included; 0: all."""
    ropes: tuple[RopeConfig, ...] = ()
    """The distinct rotary embeddings; empty: positions are learned."""
    layer_ropes: tuple[int, ...] = ()
    """Per layer: index into `ropes`."""
    embedding_scale: float = 1.0
    tie_word_embeddings: bool = False
    """The output head is the embedding."""

    tensors: str = "split"
    """How checkpoints name and store weights: split (q, k, v and gate, up apart), fused (Phi-3) or
    conv1d (GPT-2, transposed)."""

    dtype: str | None = None
    """Of the checkpoint: float32, bfloat16 or float16; None: not said."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Any of these ends an answer: generation_config.json's, or else config.json's."""
    generation: GenerationDefaults = GenerationDefaults()

    @classmethod
    def from_directory(cls, path: Path | str) -> DecoderConfig:
        """Read config.json and, where there is one, generation_config.json."""
        directory = Path(path)
        file = directory / "config.json"
        if not file.is_file():
            raise ModelError(f"{directory}: no config.json")
        generation = directory / "generation_config.json"
        return cls.from_dict(
            read_json(file),
            source=str(file),
            generation=read_json(generation) if generation.is_file() else None,
            generation_source=str(generation),
        )

    @classmethod
    def from_dict(
        cls,
        config: Mapping[str, Any],
        *,
        source: str = "config.json",
        generation: Mapping[str, Any] | None = None,
        generation_source: str = "generation_config.json",
    ) -> DecoderConfig:
        """The same from parsed files; the sources are names for messages."""
        values = read_family(Fields(config, source))
        if generation is not None:
            fields = Fields(generation, generation_source)
            values["generation"] = _read_generation(fields)
            values["eos_token_ids"] = fields.token_ids("eos_token_id") or values["eos_token_ids"]
        return cls(**values)


def _read_generation(fields: Fields) -> GenerationDefaults:
    unsupported = tuple(
        f"{name}={fields.values[name]!r}"
        for name, neutral in _CHANGE_SAMPLING.items()
        if fields.has(name) and fields.values[name] != neutral
    )
    # A non-positive or null value says "off" in these files.
    return GenerationDefaults(
        do_sample=fields.flag("do_sample", False),
        temperature=fields.number("temperature", above=-1) if fields.has("temperature") else None,
        top_p=fields.number("top_p") if fields.has("top_p") else None,
        top_k=fields.integer("top_k", least=0) if fields.has("top_k") else None,
        unsupported=unsupported,
    )
