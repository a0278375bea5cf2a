"""Fields of published clients that nothing here reads.

Each client sends them by default, or as its documentation shows.
"""

from __future__ import annotations

from typing import Any

__all__ = ["BODIES", "CHANGING", "CLIENTS", "ON_MODELS_THAT_DO_NOT_REASON"]

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
EMBEDDINGS, OLLAMA, GENERATE = "/v1/embeddings", "/api/chat", "/api/generate"
USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
FUNCTION = {"name": "f", "parameters": SCHEMA}

BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 20},
    RESPONSES: {"input": "hi", "store": False},
    MESSAGES: {"messages": [USER], "max_tokens": 50},
    COUNT: {"messages": [USER]},
    EMBEDDINGS: {"input": "hi"},
    "/tokenize": {"messages": [USER]},
    OLLAMA: {"messages": [USER], "stream": False},
    GENERATE: {"prompt": "hi", "stream": False},
}

OLLAMA_OPTIONS: dict[str, Any] = {
    **dict.fromkeys(("numa", "low_vram", "vocab_only", "use_mlock"), False),
    **dict.fromkeys(("f16_kv", "use_mmap", "penalize_newline"), True),
    **dict.fromkeys(("temperature", "typical_p"), None),
    "num_ctx": 10**6,
    "num_batch": 512,
    "num_gpu": 99,
    "main_gpu": 0,
    "num_thread": 8,
    "num_keep": 4,
    "tfs_z": 1.0,
    "repeat_last_n": 64,
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
}

Row = tuple[str, str, dict[str, Any], set[str]]
"""Client, path, fields, and the names under which they are counted."""

CLIENTS: list[Row] = [
    ("nulls of typed clients", CHAT, {"audio": None, "tools": None, "moderation": None}, set()),
    (
        "nulls in parts",
        CHAT,
        {
            "tools": [{"type": "function", "function": {**FUNCTION, "returns": None}, "x": None}],
            "stream_options": None,
            "response_format": {"type": "text", "schema": None},
            "metadata": {"session": None},
            "chat_template_kwargs": {"enable_thinking": None, "documents_": None},
            "logit_bias": {"5": None},
        },
        set(),
    ),
    (
        "openai",
        CHAT,
        {"stream_options": {"include_obfuscation": False}, "verbosity": "low", "store": True},
        {"stream_options.include_obfuscation", "verbosity", "store"},
    ),
    (
        "openai",
        CHAT,
        {
            "prompt_cache_retention": "24h",
            "prompt_cache_options": {"mode": "implicit"},
            "service_tier": "priority",
            "functions": [],
            "function_call": "auto",
            "top_logprobs": 0,
            "prediction": {"type": "content", "content": "hi"},
            "reasoning_effort": "medium",
        },
        {
            *("prompt_cache_retention", "prompt_cache_options", "service_tier", "functions"),
            *("function_call", "prediction", "reasoning_effort"),
        },
    ),
    ("openai", COMPLETIONS, {"suffix": "", "best_of": 1}, {"suffix"}),
    (
        "openai, Codex",
        RESPONSES,
        {
            "stream_options": {"include_obfuscation": True},
            "text": {"verbosity": "low", "format": None},
            "reasoning": {"effort": "medium", "summary": "auto", "context": "auto"},
            "max_tool_calls": 5,
            "background": False,
            "moderation": None,
            "prompt_cache_retention": "in_memory",
            "tools": [{"type": "function", **FUNCTION, "strict": None, "defer_loading": False}],
        },
        {
            *("stream_options.include_obfuscation", "text.verbosity", "reasoning.effort"),
            *("reasoning.context", "max_tool_calls", "background", "prompt_cache_retention"),
            "tools.defer_loading",
        },
    ),
    (
        "anthropic, Claude Code",
        MESSAGES,
        {
            "speed": "fast",
            "diagnostics": {"previous_message_id": None},
            "inference_geo": "global",
            "mcp_servers": [],
            "container": None,
            "thread": None,
            "output_config": {"effort": "high"},
            "thinking": {"type": "adaptive", "display": "summarized"},
            "tools": [{"name": "f", "input_schema": SCHEMA, "defer_loading": False, "type": None}],
        },
        {
            *("speed", "diagnostics", "inference_geo", "mcp_servers", "output_config.effort"),
            *("thinking.display", "tools.defer_loading"),
        },
    ),
    ("anthropic", COUNT, {"speed": "standard", "mcp_servers": []}, {"speed", "mcp_servers"}),
    ("langchain", EMBEDDINGS, {"stream": False, "dimensions": None}, {"stream"}),
    ("vLLM's examples", "/tokenize", {"chat_template_kwargs": {"x": None}, "odd": None}, set()),
    (
        "vLLM, SGLang",
        CHAT,
        {
            "guided_decoding_backend": "xgrammar",
            "mm_processor_kwargs": {},
            "skip_special_tokens": True,
            "separate_reasoning": True,
            "no_stop_trim": False,
            "lora_path": None,
        },
        {
            *("guided_decoding_backend", "mm_processor_kwargs", "skip_special_tokens"),
            *("separate_reasoning", "no_stop_trim"),
        },
    ),
    (
        "llama.cpp's page",
        CHAT,
        {
            "cache_prompt": True,
            "samplers": None,
            "dynatemp_range": 0,
            "dynatemp_exponent": 1,
            "top_k": 40,
            "xtc_probability": 0,
            "xtc_threshold": 0.1,
            "repeat_last_n": 64,
            "repeat_penalty": 1,
            "dry_multiplier": 0,
            "dry_base": 1.75,
            "dry_allowed_length": 2,
            "dry_penalty_last_n": -1,
            "timings_per_token": False,
            "id_slot": -1,
            "mirostat": 0,
            "tfs_z": 1.0,
        },
        {
            *("cache_prompt", "dynatemp_range", "dynatemp_exponent", "xtc_probability"),
            *("xtc_threshold", "repeat_last_n", "repeat_penalty", "dry_multiplier", "dry_base"),
            *("dry_allowed_length", "dry_penalty_last_n", "timings_per_token", "id_slot"),
            *("mirostat", "tfs_z"),
        },
    ),
    (
        "routers",
        CHAT,
        {"provider": {}, "transforms": [], "models": [], "usage": {"include": False}, "ttl": 300},
        {"provider", "transforms", "models", "usage", "ttl"},
    ),
    (
        "routers' marks",
        CHAT,
        {"tools": [{"type": "function", "function": FUNCTION, "cache_control": {"type": "x"}}]},
        {"tools.cache_control"},
    ),
    (
        "ollama",
        OLLAMA,
        {
            "options": OLLAMA_OPTIONS,
            "truncate": True,
            "think": None,
            "messages": [USER | {"images": None, "tool_calls": None}],
        },
        {
            "truncate",
            *(f"options.{name}" for name, value in OLLAMA_OPTIONS.items() if value is not None),
        },
    ),
    (
        "ollama",
        OLLAMA,
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"function": {"name": "f", "arguments": None}}],
                },
                {"role": "tool", "content": "x"},
            ],
        },
        set(),
    ),
    (
        "openai",
        RESPONSES,
        {
            "input": [
                {"role": "user", "content": "hi", "id": None},
                {"type": "reasoning", "summary": None, "content": None},
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "x", "annotations": None}],
                },
            ],
        },
        set(),
    ),
    (
        "ollama",
        GENERATE,
        {"suffix": "", "images": [], "context": None, "template": "", "raw": False, "shift": True},
        {"shift"},
    ),
]
"""Fields that change no answer of any model."""

ON_MODELS_THAT_DO_NOT_REASON: list[Row] = [
    *[
        (who, CHAT, {name: value}, {name})
        for who, name, value in [
            ("openai", "reasoning_effort", "low"),
            ("openai", "reasoning_effort", "none"),
            ("vLLM", "include_reasoning", False),
            ("SGLang", "separate_reasoning", False),
            ("SGLang", "stream_reasoning", False),
            ("Qwen's API", "enable_thinking", False),
            ("Qwen's API", "thinking_budget", 100),
            ("DeepSeek's and GLM's API", "thinking", {"type": "disabled"}),
            ("OpenRouter", "reasoning", {"effort": "low", "exclude": True}),
            ("Groq", "reasoning_format", "hidden"),
        ]
    ],
    *[
        (
            "vLLM",
            path,
            {"chat_template_kwargs": {name: value}},
            {f"chat_template_kwargs.{name}"},
        )
        for path in (CHAT, RESPONSES, "/tokenize")
        for name, value in [
            ("enable_thinking", False),
            ("enable_thinking", True),
            ("thinking", False),
            ("reasoning_effort", "low"),
        ]
    ],
    (
        "Codex",
        RESPONSES,
        {"reasoning": {"effort": "high", "summary": "detailed", "generate_summary": "concise"}},
        {"reasoning.effort", "reasoning.summary", "reasoning.generate_summary"},
    ),
    (
        "Claude Code",
        MESSAGES,
        {
            "thinking": {"type": "enabled", "budget_tokens": 40, "display": "omitted"},
            "output_config": {"effort": "low"},
        },
        {"thinking", "thinking.budget_tokens", "thinking.display", "output_config.effort"},
    ),
    ("anthropic", MESSAGES, {"thinking": {"type": "disabled"}}, {"thinking"}),
    ("ollama", OLLAMA, {"think": "low"}, {"think"}),
    ("ollama", OLLAMA, {"think": False}, {"think"}),
    ("ollama", GENERATE, {"think": True}, {"think"}),
]
"""Fields that change no answer of these models, and might change one of others."""

CHANGING: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"web_search_options": {}}, "web_search_options"),
    (CHAT, {"functions": [{"name": "f"}]}, "functions"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
    (CHAT, {"xtc_probability": 0.5}, "xtc_probability"),
    (CHAT, {"mirostat": 2}, "mirostat"),
    (CHAT, {"repeat_penalty": 1.1}, "repeat_penalty"),
    (CHAT, {"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
    (CHAT, {"usage": {"include": True}}, "usage"),
    (CHAT, {"enable_search": True}, "enable_search"),
    (CHAT, {"verbosity": "loud"}, "verbosity"),
    (CHAT, {"store": 1}, "store"),
    (CHAT, {"skip_special_tokens": 1}, "skip_special_tokens"),
    (CHAT, {"odd": False}, "odd"),
    (CHAT, {"odd": ""}, "odd"),
    (CHAT, {"stream_options": {"odd": 0}}, "stream_options.odd"),
    (CHAT, {"tools": [{"type": "function", "function": FUNCTION, "strict": True}]}, "tools.strict"),
    (CHAT, {"reasoning_effort": "lots"}, "reasoning_effort"),
    (CHAT, {"chat_template_kwargs": {"odd": 1}}, "chat_template_kwargs"),
    (COMPLETIONS, {"suffix": "x"}, "suffix"),
    (RESPONSES, {"background": True}, "background"),
    (RESPONSES, {"context_management": [{"type": "compaction"}]}, "context_management"),
    (RESPONSES, {"reasoning": {"mode": 5}}, "reasoning.mode"),
    (RESPONSES, {"text": {"verbosity": "loud"}}, "text.verbosity"),
    (MESSAGES, {"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
    (MESSAGES, {"inference_geo": "us"}, "inference_geo"),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": {}, "defer_loading": True}]}, "tools"),
    (EMBEDDINGS, {"stream": True}, "stream"),
    (OLLAMA, {"options": {"mirostat": 1}}, "options.mirostat"),
    (OLLAMA, {"options": {"tfs_z": 0.5}}, "options.tfs_z"),
    (OLLAMA, {"options": {"num_gpu": "all"}}, "options.num_gpu"),
    (OLLAMA, {"options": {"repeat_last_n": 32}}, "options.repeat_last_n"),
    (OLLAMA, {"options": {"rope_frequency_base": 1e6}}, "options.rope_frequency_base"),
    (OLLAMA, {"think": "much"}, "think"),
]
"""Bodies that might change an answer, with the field that is refused."""
