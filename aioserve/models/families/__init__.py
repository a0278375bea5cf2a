"""Families of models: each reads a config.json into the description of a decoder.

No torch here. A setting that would change the computation and isn't implemented is refused, never
ignored. Absent fields get the defaults of transformers' config classes, because its files leave
defaults out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from aioserve.errors import UnsupportedModelError
from aioserve.isolation import shown
from aioserve.models.architecture import Architecture
from aioserve.models.families import gemma, mistral
from aioserve.models.families.cohere import cohere, cohere2
from aioserve.models.families.deepseek import deepseek_v2, deepseek_v3
from aioserve.models.families.family import ModelFamily
from aioserve.models.families.glm import glm, glm4
from aioserve.models.families.gpt2 import gpt2
from aioserve.models.families.gpt_oss import gpt_oss
from aioserve.models.families.granite import granite, granite_hybrid
from aioserve.models.families.llama import llama, phi3
from aioserve.models.families.mixtral import mixtral
from aioserve.models.families.nemotron import nemotron
from aioserve.models.families.neox import neox
from aioserve.models.families.olmo import olmo2, olmo3
from aioserve.models.families.olmoe import olmoe
from aioserve.models.families.qwen import qwen2, qwen3
from aioserve.models.families.qwen_moe import qwen2_moe, qwen3_moe
from aioserve.models.families.smollm import smollm3
from aioserve.models.families.stablelm import stablelm
from aioserve.models.fields import Fields, asks_nothing

__all__ = [
    "FAMILIES",
    "SEEING",
    "SUPPORTED_ARCHITECTURES",
    "is_described",
    "lacks_head",
    "num_labels",
    "read_family",
]

FAMILIES: Mapping[str, ModelFamily] = {
    name: ModelFamily(model_type=model_type, describe=describe)
    for name, model_type, describe in (
        ("Cohere2ForCausalLM", "cohere2", cohere2),
        ("CohereForCausalLM", "cohere", cohere),
        ("DeepseekV2ForCausalLM", "deepseek_v2", deepseek_v2),
        ("DeepseekV3ForCausalLM", "deepseek_v3", deepseek_v3),
        ("GPT2LMHeadModel", "gpt2", gpt2),
        ("GPTNeoXForCausalLM", "gpt_neox", neox),
        ("Gemma2ForCausalLM", "gemma2", gemma.gemma2),
        ("Gemma3ForCausalLM", "gemma3_text", gemma.gemma3),
        ("Gemma3ForConditionalGeneration", "gemma3", gemma.gemma3_conditional),
        ("Glm4ForCausalLM", "glm4", glm4),
        ("GlmForCausalLM", "glm", glm),
        ("GptOssForCausalLM", "gpt_oss", gpt_oss),
        ("GraniteForCausalLM", "granite", granite),
        ("GraniteMoeHybridForCausalLM", "granitemoehybrid", granite_hybrid),
        ("LlamaForCausalLM", "llama", llama),
        ("Ministral3ForCausalLM", "ministral3", mistral.ministral3),
        ("MinistralForCausalLM", "ministral", mistral.ministral),
        ("Mistral3ForConditionalGeneration", "mistral3", mistral.mistral3_conditional),
        ("MistralForCausalLM", "mistral", mistral.mistral),
        ("MixtralForCausalLM", "mixtral", mixtral),
        ("NemotronForCausalLM", "nemotron", nemotron),
        ("Olmo2ForCausalLM", "olmo2", olmo2),
        ("Olmo3ForCausalLM", "olmo3", olmo3),
        ("OlmoeForCausalLM", "olmoe", olmoe),
        ("Phi3ForCausalLM", "phi3", phi3),
        ("Qwen2ForCausalLM", "qwen2", qwen2),
        ("Qwen2MoeForCausalLM", "qwen2_moe", qwen2_moe),
        ("Qwen3ForCausalLM", "qwen3", qwen3),
        ("Qwen3MoeForCausalLM", "qwen3_moe", qwen3_moe),
        ("SmolLM3ForCausalLM", "smollm3", smollm3),
        ("StableLmForCausalLM", "stablelm", stablelm),
    )
}
"""The bundled families, by the name in `architectures`."""
_TEXTS: dict[str, Callable[[Fields], Fields]] = {
    "Gemma3ForConditionalGeneration": gemma.text_config,
    "Mistral3ForConditionalGeneration": mistral.text_config,
}

SUPPORTED_ARCHITECTURES = tuple(FAMILIES)
SEEING = tuple(_TEXTS)
"""Supported architectures that also take images. Only their text decoder is served."""


_READ_AS = {"llama": "LlamaForCausalLM"}
"""Architectures that unsupported models may be read as, by the option's value."""
_FACTORS = (
    "scale_emb", "embedding_multiplier", "residual_multiplier", "logit_scale", "logits_scaling",
    "embedding_scale", "rotary_pct", "partial_rotary_factor",
)  # fmt: skip
_SWITCHES = (
    "use_sliding_window", "use_qk_norm", "qk_norm", "qk_layernorm", "use_parallel_residual",
    "parallel_attn", "alibi", "norm_head", "use_mrope",
)  # fmt: skip
_OTHERS = (
    "scale_depth", "dim_model_base", "attention_multiplier", "attn_logit_softcapping",
    "final_logit_softcapping", "query_pre_attn_scalar", "no_rope_layer_interval", "clip_qkv",
)  # fmt: skip
_PLAIN: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(_FACTORS, (1, 1.0)),
    **dict.fromkeys(_SWITCHES, (False,)),
    **dict.fromkeys(_OTHERS, ()),
    "position_embedding_type": ("rope", "rotary"),
    "hidden_activation": ("silu", "swish"),
}
"""Fields of other families, with the values that change nothing."""


def read_family(
    config: Fields,
    read_as: str | None = None,
    families: Mapping[str, ModelFamily] = FAMILIES,
) -> tuple[str, Fields, Architecture]:
    """Return the architecture's name, the fields of its text decoder, and their description.

    `read_as`: "llama" reads an unsupported architecture as Llama; None: the one that `config`
    names. Raises `UnsupportedModelError` and `ModelError`.
    """
    name = _name(config, families) if read_as is None else _name_read_as(config, read_as, families)
    text = _TEXTS[name](config) if name in _TEXTS else config
    if config.has("is_encoder_decoder") and config.flag("is_encoder_decoder", False):
        config.unsupported("is_encoder_decoder", "only decoders can be served")
    return name, text, families[name].describe(text)


def is_described(config: Fields, families: Mapping[str, ModelFamily] = FAMILIES) -> bool:
    """True if the architecture that `config` names is supported. Raises `ModelError`."""
    return _with_head(_said_name(config, families), families) in families


def lacks_head(config: Fields, families: Mapping[str, ModelFamily] = FAMILIES) -> bool:
    """True if `config` names a decoder without a language-model head, or a classifier.

    Raises `ModelError`."""
    name = _said_name(config, families)
    return _with_head(name, families) != name


def num_labels(config: Fields, families: Mapping[str, ModelFamily] = FAMILIES) -> int | None:
    """Number of classes of a classifier; None for other models. Raises `ModelError`."""
    if not _said_name(config, families).endswith(_CLASSIFIES):
        return None
    if config.has("num_labels"):
        return config.integer("num_labels")
    labels = config.values.get("id2label")
    return len(labels) if isinstance(labels, dict) else 2


def _with_head(name: str, families: Mapping[str, ModelFamily]) -> str:
    """Replace the name of a bare decoder or a classifier by that of its family's causal LM."""
    for suffix in (_CLASSIFIES, _BARE):
        if (causal := name.removesuffix(suffix) + "ForCausalLM") in families:
            return causal
    return name


_CLASSIFIES = "ForSequenceClassification"
_BARE = "Model"


def _name(config: Fields, families: Mapping[str, ModelFamily]) -> str:
    name = _with_head(_said_name(config, families), families)
    if name not in families:
        name = name if len(name) <= 100 else shown(name)
        raise UnsupportedModelError(
            f"{config.source}: architecture {name} is not supported{_what_it_is(name, config)}; "
            f"supported are {', '.join(families)}"
        )
    return name


def _name_read_as(config: Fields, read_as: str, families: Mapping[str, ModelFamily]) -> str:
    name, said = _READ_AS[read_as], _said_name(config, families)
    if said in families and said != name:
        raise UnsupportedModelError(
            f"{config.source}: architecture={read_as!r} is for models that are not supported by "
            f"themselves, and {said} is"
        )
    if said != name:
        _check_says_nothing_more(config)
    return name


def _check_says_nothing_more(config: Fields) -> None:
    """Raise `UnsupportedModelError` for fields that Llama would not compute."""
    for field, plain in _PLAIN.items():
        value = config.values.get(field)
        says_nothing = value is None or (asks_nothing(value) and field not in _FACTORS)
        if not says_nothing and value not in plain:
            config.unsupported(field, "Llama has nothing like it")
    for field, plain in (("layer_types", "full_attention"), ("no_rope_layers", 1)):
        kinds = config.values.get(field) or []
        if not isinstance(kinds, list) or any(kind != plain for kind in kinds):
            config.unsupported(field, f"each layer of Llama is {plain}")
    window = config.integer("sliding_window", 0, least=0)
    if window and config.values.get("use_sliding_window") is not False:
        config.unsupported("sliding_window", "Llama has no window")


def _said_name(config: Fields, families: Mapping[str, ModelFamily]) -> str:
    names = config.values.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        config.invalid("architectures", "a list of strings")
    if names:
        return names[0]
    model_type = config.text("model_type", "")
    by_type = (name for name, family in families.items() if family.model_type == model_type)
    return next(by_type, f"model_type {shown(model_type)}")


_KINDS: Sequence[tuple[re.Pattern[str], tuple[str, ...], str]] = (
    (
        re.compile("M[oO][eE]|Mixtral|Deepseek|Dbrx"),
        ("num_experts", "num_local_experts", "n_routed_experts"),
        "a mixture of experts",
    ),
    (
        re.compile("Bert|Electra|Deberta|MaskedLM|SequenceClassification"),
        (),
        "an encoder; embeddings and scores are made by decoders here",
    ),
    (
        re.compile("Mamba|Rwkv|Zamba|Jamba|Bamba|FalconH1|NemotronH|Qwen3Next|Lfm2|RecurrentGemma"),
        ("mamba_d_state", "linear_num_value_heads", "conv_L_cache"),
        "a model with a recurrent state in some layers, which is not implemented",
    ),
    (
        re.compile("Gemma3n"),
        (),
        "a model with embeddings in each layer and several residual streams, which are not "
        "implemented",
    ),
    (re.compile("T5|Bart|Whisper|Marian|EncoderDecoder"), (), "an encoder with a decoder"),
    (
        re.compile("VL|Llava|Vision|Audio"),
        ("vision_config", "audio_config"),
        "a model that sees or hears; text is all that is taken here",
    ),
)
"""Patterns of names and fields of unsupported architectures, with what they are, for messages."""


def _what_it_is(name: str, config: Fields) -> str:
    for pattern, fields, kind in _KINDS:
        if pattern.search(name) or any(config.values.get(field) for field in fields):
            return f": it is {kind}"
    return ""
