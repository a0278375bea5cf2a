"""Families of models: how the config.json of each reads, and what its decoder is made of.

No torch here. A setting that would change the computation and isn't implemented is refused, never
ignored. The defaults of absent fields are those of transformers' config classes, because its files
leave defaults out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from aioserve.errors import UnsupportedModelError
from aioserve.isolation import shown
from aioserve.models.architecture import Architecture
from aioserve.models.families.gemma import gemma2, gemma3, gemma3_conditional, text_config
from aioserve.models.families.gpt2 import gpt2
from aioserve.models.families.llama import llama, mistral, phi3
from aioserve.models.families.qwen import qwen2, qwen3
from aioserve.models.fields import Fields

__all__ = ["SEEING", "SUPPORTED_ARCHITECTURES", "read_family"]

_FAMILIES: dict[str, Callable[[Fields], Architecture]] = {
    "GPT2LMHeadModel": gpt2,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "Gemma3ForConditionalGeneration": gemma3_conditional,
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Phi3ForCausalLM": phi3,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
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
SEEING = ("Gemma3ForConditionalGeneration",)
"""Architectures among `SUPPORTED_ARCHITECTURES` that take images as well. Their text decoder alone
is served."""


def read_family(config: Fields) -> tuple[str, Fields, Architecture]:
    """The architecture's name, the fields that describe its text decoder, and what that is.

    Raises `UnsupportedModelError` and `ModelError`.
    """
    name = _name(config)
    text = text_config(config) if name in SEEING else config
    if config.has("is_encoder_decoder") and config.flag("is_encoder_decoder", False):
        config.unsupported("is_encoder_decoder", "only decoders can be served")
    return name, text, _FAMILIES[name](text)


def _name(config: Fields) -> str:
    names = config.values.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        config.invalid("architectures", "a list of strings")
    if names:
        name = names[0]
    else:
        model_type = config.text("model_type", "")
        name = _BY_MODEL_TYPE.get(model_type, f"model_type {shown(model_type)}")
    if name not in _FAMILIES:
        name = name if len(name) <= 100 else shown(name)
        raise UnsupportedModelError(
            f"{config.source}: architecture {name} is not supported{_what_it_is(name, config)}; "
            f"supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    return name


_KINDS: Sequence[tuple[re.Pattern[str], tuple[str, ...], str]] = (
    (
        re.compile("M[oO][eE]|Mixtral|Deepseek|GptOss|Dbrx"),
        ("num_experts", "num_local_experts", "n_routed_experts"),
        "a mixture of experts",
    ),
    (
        re.compile("Bert|Electra|Deberta|MaskedLM|SequenceClassification"),
        (),
        "an encoder; embeddings and scores are made by decoders here",
    ),
    (re.compile("Mamba|Rwkv|Zamba"), (), "a model with a recurrent state"),
    (re.compile("T5|Bart|Whisper|Marian|EncoderDecoder"), (), "an encoder with a decoder"),
    (
        re.compile("VL|Llava|Vision|Audio"),
        ("vision_config", "audio_config"),
        "a model that sees or hears; text is all that is taken here",
    ),
)
"""What architectures that aren't served have in their names or their fields, and what they are."""


def _what_it_is(name: str, config: Fields) -> str:
    for pattern, fields, kind in _KINDS:
        if pattern.search(name) or any(config.values.get(field) for field in fields):
            return f": it is {kind}"
    return ""
