"""Fields that clients of other servers send and nothing here reads, with the values let through.

These values change no answer. Any other value is refused by the name of the field, and so is a
field in no table. The type of a body has one of these tables as its `hints`. Docs and tests read
them too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

__all__ = [
    "NO_HINTS",
    "OF_ANSWERS",
    "OF_CALLS",
    "OF_CHAT",
    "OF_CHUNK_OPTIONS",
    "OF_COMPLETIONS",
    "OF_EMBEDDINGS",
    "OF_JSON_FORMATS",
    "OF_MESSAGES",
    "OF_MESSAGE_TOOLS",
    "OF_OLLAMA",
    "OF_OLLAMA_OPTIONS",
    "OF_REASONING",
    "OF_RESPONSES",
    "OF_RESPONSE_OPTIONS",
    "OF_RESPONSE_TOOLS",
    "OF_THINKING",
    "OF_TOOLS",
    "TABLES",
    "Hint",
    "Hints",
    "is_one_of",
]


class Hint(msgspec.Struct, frozen=True):
    """Values of a field that are let through. An entry is a value, or a type with all of its
    values."""

    always: tuple[Any, ...] = ()
    without_reasoning: tuple[Any, ...] = ()
    """More entries, for a model that doesn't reason."""


Hints = Mapping[str, Hint]
"""Hints by names of fields."""


def is_one_of(value: object, values: tuple[Any, ...]) -> bool:
    """Return true if a value of JSON is among `values`, or of a type among them. True isn't a
    number, but an int is a float as well."""
    for one in values:
        if isinstance(one, type):
            kinds = (int, float) if one is float else (one,)
            if isinstance(value, kinds) and (one is bool) == isinstance(value, bool):
                return True
        elif isinstance(one, bool) == isinstance(value, bool) and value == one:
            return True
    return False


def _always(**fields: tuple[Any, ...]) -> dict[str, Hint]:
    return {name: Hint(values) for name, values in fields.items()}


NO_HINTS: Hints = {}

OF_CALLS: Hints = _always(add_special_tokens=(True,))

_OF_SAMPLERS = _always(
    # Samplers that are off, whose other numbers have no effect.
    mirostat=(0,),
    mirostat_tau=(float,),
    mirostat_eta=(float,),
    tfs_z=(1,),
    top_a=(0,),
    top_n_sigma=(0, -1),
    dry_multiplier=(0,),
    dry_base=(float,),
    dry_allowed_length=(int,),
    dry_penalty_last_n=(int,),
    dry_sequence_breakers=(list,),
    xtc_probability=(0,),
    xtc_threshold=(float,),
    dynatemp_range=(0,),
    dynatemp_exponent=(float,),
    repeat_penalty=(1,),
    repeat_last_n=(-1, 64),
    min_keep=(0,),
    n_probs=(0,),
    n_indent=(0,),
    t_max_predict_ms=(0, -1),
    logits_processors=([],),
)
_OF_CACHES = _always(
    # Prompts are always cached, and cached prefixes are always found.
    cache_prompt=(bool,),
    id_slot=(int,),
    slot_id=(int,),
    n_keep=(int,),
    ttl=(int,),
    prompt_cache_retention=("in_memory", "in-memory", "24h"),
    prompt_cache_options=(dict,),
    kv_transfer_params=({},),
)
_OF_ROUTERS = _always(
    service_tier=("auto", "default", "flex", "scale", "priority", "fast", "on_demand"),
    provider=({},),
    models=([],),
    transforms=([],),
    plugins=([],),
    route=("fallback",),
    usage=({}, {"include": False}),
    extra_body=({},),
    search_parameters=({"mode": "off"},),
    enable_search=(False,),
    deferred=(False,),
    safe_prompt=(False,),
    citation_options=("disabled",),
    data_sources=([],),
)
_OF_SHAPES = _always(
    skip_special_tokens=(True,),
    spaces_between_special_tokens=(True,),
    post_sampling_probs=(False,),
    timings_per_token=(False,),
    return_progress=(False,),
    return_tokens=(False,),
    return_hidden_states=(False,),
    no_stop_trim=(False,),
    guided_decoding_backend=(str,),
    mm_processor_kwargs=({},),
    media_io_kwargs=({},),
    vllm_xargs=({},),
    documents=([],),
    chat_template_content_format=("auto",),
)
_OF_THOUGHTS: dict[str, Hint] = {
    "include_reasoning": Hint((True,), (False,)),
    "separate_reasoning": Hint((True,), (False,)),
    "reasoning_format": Hint(("auto", "parsed", "deepseek"), (str,)),
    "enable_thinking": Hint((), (bool,)),
    "thinking_budget": Hint((), (int,)),
    "thinking": Hint(({},), (dict, bool)),
}

OF_ANSWERS: Hints = {
    **_OF_SAMPLERS,
    **_OF_CACHES,
    **_OF_ROUTERS,
    **_OF_SHAPES,
    **_OF_THOUGHTS,
    **_always(verbosity=("low", "medium", "high")),
}
"""Hints of every API of the OpenAI kind that generates."""

OF_COMPLETIONS: Hints = {
    **OF_ANSWERS,
    **OF_CALLS,
    **_always(store=(bool,)),
}
OF_CHAT: Hints = {
    **OF_ANSWERS,
    **_always(
        # The template frames messages.
        add_special_tokens=(False,),
        suffix=("",),
        store=(bool,),
        modalities=([], ["text"]),
        functions=([],),
        best_of=(1,),
        function_call=("none", "auto"),
    ),
    "stream_reasoning": Hint((True,), (False,)),
    "reasoning": Hint(({},), (dict,)),
}
OF_RESPONSES: Hints = {
    **OF_ANSWERS,
    **_always(
        add_special_tokens=(False,),
        background=(False,),
        use_beam_search=(False,),
        length_penalty=(1,),
        best_of=(1,),
        # The server has no tools of its own to call.
        max_tool_calls=(int,),
        context_management=([],),
    ),
}
OF_EMBEDDINGS: Hints = {**OF_CALLS, **_always(stream=(False,))}

OF_CHUNK_OPTIONS: Hints = _always(include_obfuscation=(bool,))
"""Hints of `stream_options`, if an answer has choices."""
OF_RESPONSE_OPTIONS: Hints = _always(
    include_obfuscation=(bool,),
    # The last event always has the counts.
    include_usage=(bool,),
)
OF_TOOLS: Hints = _always(cache_control=(dict,), strict=(False,))
"""Hints of a tool of chat, besides its function."""
OF_RESPONSE_TOOLS: Hints = _always(
    defer_loading=(False,), allowed_callers=(["direct"],), cache_control=(dict,)
)
OF_REASONING: Hints = {
    "context": Hint(("auto",), (str,)),
    "generate_summary": Hint(("auto",), (str,)),
    "mode": Hint(("standard",), (str,)),
}
"""Hints of `reasoning` of responses."""
OF_JSON_FORMATS: Hints = _always(strict=(bool,))

OF_MESSAGES: Hints = _always(
    mcp_servers=([],),
    fallbacks=([],),
    inference_geo=("global",),
    speed=("standard", "fast"),
    diagnostics=(dict,),
    billing_policy=({"type": "billing_policy", "bill_to": "self"},),
    user_profile_id=(str,),
    workspace_id=(str,),
)
OF_MESSAGE_TOOLS: Hints = _always(
    defer_loading=(False,), allowed_callers=(["direct"],), input_examples=([],)
)
OF_THINKING: Hints = {"display": Hint(("summarized",), ("omitted",))}
"""Hints of `thinking` that is enabled or adaptive."""

OF_OLLAMA: Hints = _always(
    # A prompt or an answer that is too long for the context is reported either way.
    truncate=(bool,),
    shift=(bool,),
)
OF_OLLAMA_OPTIONS: Hints = _always(
    mirostat=(0,),
    mirostat_tau=(float,),
    mirostat_eta=(float,),
    tfs_z=(1,),
    penalize_newline=(True,),
    num_batch=(int,),
    num_gpu=(int,),
    main_gpu=(int,),
    num_thread=(int,),
    num_keep=(int,),
    use_mmap=(bool,),
    use_mlock=(bool,),
    low_vram=(bool,),
    numa=(bool,),
    f16_kv=(True,),
    logits_all=(bool,),
    vocab_only=(False,),
    embedding_only=(False,),
)

TABLES: Mapping[str, Hints] = {
    "completions": OF_COMPLETIONS,
    "chat": OF_CHAT,
    "chat: `stream_options` of it and of completions": OF_CHUNK_OPTIONS,
    "chat: `tools`": OF_TOOLS,
    "responses": OF_RESPONSES,
    "responses: `stream_options`": OF_RESPONSE_OPTIONS,
    "responses: `tools`": OF_RESPONSE_TOOLS,
    "responses: `reasoning`": OF_REASONING,
    "embeddings, score, rerank": OF_EMBEDDINGS,
    "messages": OF_MESSAGES,
    "messages: `tools`": OF_MESSAGE_TOOLS,
    "messages: `thinking`": OF_THINKING,
    "messages: `output_config.format`": OF_JSON_FORMATS,
    "Ollama's": OF_OLLAMA,
    "Ollama's: `options`": OF_OLLAMA_OPTIONS,
}
"""All tables, by the API and the part of its body."""
