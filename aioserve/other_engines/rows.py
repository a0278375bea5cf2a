"""Rows of the table of other engines' options.

Names are those of vLLM, SGLang, llama.cpp (and llama-cpp-python), Ollama, TGI, MLX and
transformers, with underscores. An answer has names of ours in braces: `{name}`, `{!name}` for what
is turned off, `{name=value}`. Each door writes them in its own way.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

__all__ = ["OWN", "Home", "Row"]


class Home(Enum):
    """Doors where the names of an answer are options, in words."""

    ENGINE = "Engine"
    SAMPLING = "SamplingParams"
    FORM = "StructuredOutput"
    CALL = "a call of the engine"
    SERVE = "`aioserve serve`"
    RUN = "`aioserve run`"
    LOAD = "`aioserve bench serve`"
    BENCH = "`aioserve bench throughput`"
    PLAN = "`aioserve plan`"
    ANY = ""
    """An answer without names, which is as good at every door."""

    @property
    def is_python(self) -> bool:
        """True if options there are arguments in Python, and not words of a command."""
        return self in (Home.ENGINE, Home.SAMPLING, Home.FORM, Home.CALL)


class Row(NamedTuple):
    """Names that mean the same elsewhere, and what is said of them."""

    home: Home
    names: str
    """Names with spaces between them. A name in several rows has the answer of the first whose
    options the door has, or else of the first."""
    answer: str


OWN: Final[dict[Home, str]] = {
    Home.ENGINE: "model policy plugins progress capture_progress device backend dtype architecture "
    "quantization activation_quantization page_size num_pages memory_utilization prefix_caching "
    "partial_page_reuse eviction num_host_pages preemption max_num_seqs max_num_batched_tokens "
    "max_model_len output_reserve_tokens overlap jump_forward step_program graph_sizes "
    "capture_graphs attention special_tokens_in_messages chat_template tool_parser "
    "reasoning_parser reranker speculation seed max_waiting max_waiting_tokens refuse_late "
    "max_buffered_tokens stall_timeout_seconds",
    Home.SAMPLING: "max_tokens temperature top_p top_k min_p typical_p repetition_penalty "
    "presence_penalty frequency_penalty logit_bias allowed_token_ids bad_words logits_processors "
    "min_tokens seed stop stop_token_ids include_stop_str_in_output ignore_eos logprobs "
    "prompt_logprobs structured_output thinking_token_budget n best_of max_draft_tokens prediction",
    Home.FORM: "json_schema json_object regex choice grammar structural_tag "
    "disable_any_whitespace max_whitespace",
    Home.CALL: "prompt messages params progress tools tool_parser reasoning_parser strict_tools "
    "required_tools parallel_tool_calls max_whitespace add_generation_prompt "
    "continue_final_message chat_template_kwargs truncate_prompt_tokens truncation_side request_id "
    "cache_salt tenant priority ttft_target_seconds tpot_target_seconds deadline_seconds metadata "
    "session_id predicted_output_tokens",
    Home.SERVE: "host port uds tls_cert_file tls_key_file allow_without_key drain_seconds "
    "keep_alive_seconds api_key api_key_file served_model_names max_body_bytes max_prompts "
    "max_inputs max_n max_top_logprobs max_answer_bytes max_unsent_bytes max_stops max_tools "
    "max_schema_bytes operators open_paths allowed_hosts allowed_origins max_header_bytes "
    "max_headers body_timeout_seconds max_concurrent_calls stream_interval metrics metrics_names "
    "access_log page max_live_readers max_step_age_seconds max_items max_metadata "
    "max_metadata_key_chars max_metadata_value_chars max_stored_responses max_stored_bytes "
    "stored_response_seconds",
}
"""Our own names, for one who uses them at another door. No module that has them may be imported
here: a test compares them."""
