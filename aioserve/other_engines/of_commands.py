"""Command and server options of other engines, each with its answer."""

from __future__ import annotations

from typing import Final

from aioserve.other_engines.rows import Home, Row

__all__ = ["ROWS"]

_PERCENTILES: Final = (
    "all times have mean, p50, p90, p99 and max, and {requests} writes those of each request"
)
_TRACE: Final = (
    "a trace's file comes behind the URL, or {synthetic} names a made-up workload; without either, "
    "prompts of {input_len} tokens are drawn"
)
_LOGGED: Final = "calls are logged without what they say; {access_log=off} logs none"

ROWS: Final[tuple[Row, ...]] = (
    # -- `aioserve run`
    Row(Home.RUN, "system_prompt sys", "it is {system}"),
    Row(Home.RUN, "conversation_mode cnv", "a model with a chat template chats; {!chat} completes"),
    Row(Home.RUN, "no_conversation no_cnv no_chat_template", "it is {!chat}"),
    Row(
        Home.ANY,
        "prompt_text p_text",
        "the prompt comes behind the model: aioserve run MODEL PROMPT",
    ),
    Row(Home.RUN, "show_timings perf", "the counts and times come on stderr; {verbose} tells more"),
    Row(
        Home.ANY,
        "interactive interactive_first multiline_input single_turn in_prefix in_suffix "
        "in_prefix_bos chatml simple_io color nowordwrap keepalive keep_alive experimental "
        "experimental_yolo wordwrap",
        "aioserve run MODEL PROMPT answers once and ends, and aioserve chat MODEL talks in turns",
    ),
    Row(
        Home.ANY,
        "file system_prompt_file in_file binary_file",
        "a prompt in a file comes by the standard input: aioserve run MODEL < FILE",
    ),
    Row(
        Home.ANY,
        "escape keep context_shift n_keep num_keep",
        "a prompt is taken as it is, and an answer ends where the context does",
    ),
    Row(
        Home.ANY,
        "defrag_thold fit fit_print lazy_mode skip_chat_parsing reasoning_preserve "
        "print_token_count "
        "completion_bash list_devices reset multi_item_scoring_delimiter rl_on_policy_target "
        "enable_streaming_session file_storage_path model_checksum io_processor_plugin "
        "enable_precise_embedding_interpolation fail_on_environ_validation waiting_served_ratio "
        "disable_grammar_support reuse_port tags ngrok shard_uds_path ui_config "
        "experimental_websearch "
        "exclude_tools_when_tool_choice_none chat_template_content_format fingerprint_mode "
        "fingerprint_value cohere_format cohere_is_reasoning_model trust_request_chat_template "
        "anthropic_disabled_thinking_effort enable_flash_late_interaction enable_offline_docs "
        "enable_tokenizer_info_endpoint max_prompt_len validation_workers output output_file",
        "nothing here is like it",
    ),
    # -- a server
    Row(Home.SERVE, "served_model_name alias model_alias", "it is {served_model_names}"),
    Row(Home.SERVE, "max_client_batch_size", "it is {max_prompts}"),
    Row(Home.SERVE, "max_logprobs max_top_n_tokens", "it is {max_top_logprobs}"),
    Row(Home.SERVE, "ssl_certfile ssl_cert_file tls_cert certfile", "it is {tls_cert_file}"),
    Row(Home.SERVE, "ssl_keyfile ssl_key_file tls_key keyfile", "it is {tls_key_file}"),
    Row(
        Home.SERVE,
        "disable_log_requests no_enable_log_requests log_requests log_requests_level "
        "enable_log_requests max_log_len enable_log_outputs enable_log_deltas "
        "disable_uvicorn_access_log uvicorn_log_level log_disable",
        _LOGGED,
    ),
    Row(Home.SERVE, "disable_log_stats", "it is {!metrics}"),
    Row(Home.SERVE, "enable_metrics", "metrics are told unless {!metrics} is given"),
    Row(Home.SERVE, "cors_origins allow_origins cors_allow_origin", "it is {allowed_origins}"),
    Row(Home.SERVE, "admin_api_key", "it is {operators}, names of keys"),
    Row(
        Home.SERVE,
        "shutdown_timeout graceful_timeout graceful_termination_timeout",
        "it is {drain_seconds}",
    ),
    Row(Home.SERVE, "h11_max_header_count", "it is {max_headers}"),
    Row(Home.SERVE, "h11_max_incomplete_event_size", "it is {max_header_bytes}"),
    Row(Home.SERVE, "max_best_of", "it is {max_n}"),
    Row(Home.SERVE, "payload_limit max_request_size", "it is {max_body_bytes}"),
    Row(Home.SERVE, "prometheus_port", "metrics are at /metrics of {port}"),
    Row(
        Home.ANY,
        "enable_force_include_usage stream_response_default_include_usage",
        "a request has stream_options.include_usage",
    ),
    Row(Home.SERVE, "max_stop_sequences", "it is {max_stops}"),
    Row(Home.SERVE, "hostname bind listen address", "it is {host}"),
    Row(Home.SERVE, "unix_socket socket", "it is {uds}"),
    Row(
        Home.SERVE,
        "ui webui path no_ui no_webui",
        "a page to try it is at / unless {!page} is given",
    ),
    Row(Home.SERVE, "slots props slot_save_path", "{page} and {metrics} tell what runs"),
    Row(
        Home.ANY,
        "cont_batching kv_unified no_cont_batching",
        "requests are always batched as they come, and share one KV cache",
    ),
    Row(
        Home.ANY,
        "verbose log_level log_level_http log_file log_config_file log_verbosity verbosity "
        "log_prefix log_timestamps log_colors log_format json_output",
        "the logger named aioserve tells what goes wrong, and `aioserve serve` writes it to stderr",
    ),
    # -- load generators
    Row(Home.LOAD, "request_rate", "it is {rate}"),
    Row(
        Home.LOAD,
        "burstiness",
        "it is {arrivals} gamma:CV, where CV is 1 by the square root of the burstiness",
    ),
    Row(Home.LOAD, "max_concurrency", "it is {concurrency}"),
    Row(Home.LOAD, "num_prompts", "it is {num_requests}"),
    Row(Home.LOAD, "random_input_len", "it is {input_len}"),
    Row(Home.LOAD, "random_output_len", "it is {output_len}"),
    Row(
        Home.LOAD, "random_prefix_len", "it is {shared_prefix_len}, which is a part of {input_len}"
    ),
    Row(Home.LOAD, "goodput", "it is {ttft_target_seconds} and {tpot_target_seconds}, in seconds"),
    Row(
        Home.LOAD, "base_url", "the server's URL comes first; {endpoint} says what it is asked for"
    ),
    Row(Home.LOAD, "endpoint_type", "it is {endpoint}"),
    Row(Home.LOAD, "dataset_name dataset_path", _TRACE),
    Row(Home.LOAD, "percentile_metrics metric_percentiles", _PERCENTILES),
    Row(Home.LOAD, "save_result result_filename", "it is {json=FILE}"),
    Row(Home.LOAD, "save_detailed", "it is {requests=FILE}"),
)
