"""Contents of config.json and generation_config.json, as one frozen value.

`families` describes the blocks of each architecture. No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import msgspec

from aioserve.errors import InvalidSamplingError, ModelError
from aioserve.isolation import shown
from aioserve.models.architecture import Architecture
from aioserve.models.families import SEEING, lacks_head, num_labels, read_family
from aioserve.models.fields import Fields
from aioserve.models.known import BUNDLED_KINDS, KnownKinds
from aioserve.models.quantization.config import read_scheme
from aioserve.models.quantization.scheme import Scheme
from aioserve.request import SamplingParams
from aioserve.sampling_params import COLUMNS, PARAMETERS

__all__ = [
    "CLASSIFIER",
    "MAX_CONFIG_BYTES",
    "UNSAID_OF_GGUF",
    "DecoderConfig",
    "GenerationDefaults",
]

CLASSIFIER: str = "score.weight"
"""Name of a classifier's weight, [labels, hidden]."""

MAX_CONFIG_BYTES = 1 << 20
"""Most bytes of config.json or of generation_config.json. Usual files have a few thousand."""

_DTYPES = ("float32", "bfloat16", "float16")
_CHANGE_SAMPLING = {
    # name -> the value that changes nothing
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "no_repeat_ngram_size": 0,
    "length_penalty": 1.0,
    "num_beams": 1,
    "penalty_alpha": 0.0,
}


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling defaults of the model's authors (generation_config.json); None: not set."""

    do_sample: bool = False
    """True if tokens are sampled; False: greedy, whatever the other fields are."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    unsupported: tuple[str, ...] = ()
    """Settings of the file that aioserve can't apply, as "name=value", for a caller to show."""
    is_said: bool = True
    """True if the authors set them; False: these are the defaults of other programs."""

    def sampling_params(self) -> SamplingParams:
        """Return parameters with the meaning that transformers gives them: greedy by default."""
        fields = {name: getattr(self, name, None) for name in PARAMETERS}
        said = {name: value for name, value in fields.items() if value is not None}
        if not self.do_sample:
            greedy = {name: value for name, value in said.items() if name not in COLUMNS}
            return SamplingParams(temperature=0.0, **greedy)
        return SamplingParams(**said)


NOTHING_SAID = GenerationDefaults()
"""Defaults of a directory without generation_config.json: those of transformers."""
UNSAID_OF_GGUF = GenerationDefaults(
    do_sample=True, temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, is_said=False
)
"""Defaults of a GGUF file without sampling settings: those of llama.cpp."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(Architecture):
    """One decoder-only transformer: its blocks, and its authors' settings for its use.

    `from_dict` raises `UnsupportedModelError` for an architecture or a setting that isn't
    implemented and `ModelError` for a malformed file; both name file, field and value.
    """

    architecture: str
    """Name in `architectures` of config.json, for example "Qwen3ForCausalLM"."""
    dtype: str | None = None
    """Dtype of the checkpoint: float32, bfloat16 or float16; None: not set."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Ids that end a completion by generation_config.json, then those by config.json.

    `ModelFiles.ends` adds more."""
    generation: GenerationDefaults = NOTHING_SAID
    quantization: Scheme | None = None
    """Scheme of the checkpoint's quantised weights; None: all are plain."""
    has_head: bool = True
    """True if the model makes logits.

    Without a head, only its hidden states are meant to be used, and `head` is the embedding."""
    num_labels: int | None = None
    """Number of classes of a classifier on the last token's hidden state; None: no classifier."""

    @property
    def is_text_alone(self) -> bool:
        """True if the checkpoint also takes images, and only its text part is loaded."""
        return self.architecture in SEEING

    @classmethod
    def from_dict(
        cls,
        config: Mapping[str, Any],
        *,
        source: str = "config.json",
        generation: Mapping[str, Any] | None = None,
        generation_source: str = "generation_config.json",
        read_as: str | None = None,
        known: KnownKinds = BUNDLED_KINDS,
    ) -> DecoderConfig:
        """Read parsed files; the sources are their names in messages. `read_as`: "llama" for an
        architecture that isn't supported by itself. `known`: the families and formats of weights
        that may be named."""
        whole = Fields(config, source)
        name, text, architecture = read_family(whole, read_as, known.families)
        has_head = read_as is not None or not lacks_head(whole, known.families)
        if not has_head:
            architecture = _headless(architecture)
        quantization = read_scheme(whole, text, known=known.schemes)
        eos_token_ids = text.token_ids("eos_token_id")
        defaults = NOTHING_SAID
        if generation is not None:
            given = Fields(generation, generation_source)
            defaults = _read_generation(given)
            eos_token_ids = (*given.token_ids("eos_token_id"), *eos_token_ids)
        return cls(
            **{field.name: getattr(architecture, field.name) for field in fields(architecture)},
            architecture=name,
            dtype=_read_dtype(text),
            bos_token_id=next(iter(text.token_ids("bos_token_id")), None),
            eos_token_ids=tuple(dict.fromkeys(eos_token_ids)),
            generation=defaults,
            quantization=quantization,
            has_head=has_head,
            num_labels=None if has_head else num_labels(whole, known.families),
        )

    def without_head(self) -> DecoderConfig:
        """Return the same decoder for a checkpoint without a head."""
        return _headless(replace(self, has_head=False))


A = TypeVar("A", bound=Architecture)


def _headless(architecture: A) -> A:
    ignored = re.compile(rf"{architecture.ignored.pattern}|^{re.escape(CLASSIFIER)}$")
    return replace(architecture, tie_word_embeddings=True, ignored=ignored)


def _read_dtype(config: Fields) -> str | None:
    name = "dtype" if config.has("dtype") else "torch_dtype"
    if not config.has(name):
        return None
    dtype = config.text(name).removeprefix("torch.")
    if dtype == "auto":
        return None
    if dtype not in _DTYPES:
        config.unsupported(name, f"the dtypes are {', '.join(_DTYPES)}")
    return dtype


def _read_generation(fields: Fields) -> GenerationDefaults:
    unsupported = tuple(
        f"{name}={shown(fields.values[name])}"
        for name, neutral in _CHANGE_SAMPLING.items()
        if fields.has(name) and fields.values[name] != neutral
    )

    def number(name: str, **limits: float) -> float | None:
        return fields.number(name, **limits) if fields.has(name) else None

    def integer(name: str, least: int = 0) -> int | None:
        return fields.integer(name, least=least) if fields.has(name) else None

    defaults = GenerationDefaults(
        do_sample=fields.flag("do_sample", False),
        temperature=number("temperature", least=0),
        top_p=number("top_p"),
        top_k=integer("top_k", least=-1),
        min_p=number("min_p", least=0),
        typical_p=number("typical_p"),
        repetition_penalty=number("repetition_penalty"),
        min_tokens=integer("min_new_tokens"),
        max_tokens=integer("max_new_tokens"),
        unsupported=unsupported,
    )
    try:
        defaults.sampling_params()
    except InvalidSamplingError as error:
        raise ModelError(f"{fields.source}: {error}") from error
    return defaults
