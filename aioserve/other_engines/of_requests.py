"""Sampling parameters and call arguments of other engines, each with its answer."""

from __future__ import annotations

from typing import Final

from aioserve.other_engines.rows import Home, Row
from aioserve.unsupported import ADAPTERS, not_there

__all__ = ["ROWS"]

_NO_ADAPTERS: Final = not_there(ADAPTERS)
_FORM: Final = "it is {structured_output}, which takes a StructuredOutput"
_NO_SAMPLER: Final = (
    "this sampler isn't supported; there are {temperature}, {top_k}, {top_p}, {min_p} and "
    "{typical_p}"
)
_TEMPLATE_KWARGS: Final = (
    "it is a variable of the chat template, for {chat_template_kwargs}, as in "
    'chat_template_kwargs={"enable_thinking": False}'
)

ROWS: Final[tuple[Row, ...]] = (
    # -- sampling
    Row(
        Home.SAMPLING,
        "max_new_tokens n_predict num_predict predict max_completion_tokens max_output_tokens "
        "max_gen_toks max_tokens_to_sample max_gen_len num_tokens tokens max_out_len",
        "it is {max_tokens}",
    ),
    Row(
        Home.BENCH,
        "max_new_tokens n_predict num_predict predict max_tokens n_gen",
        "it is {output_len}",
    ),
    Row(Home.BENCH, "n_prompt prompt_len input_length random_input_len", "it is {input_len}"),
    Row(Home.BENCH, "random_output_len output_length", "it is {output_len}"),
    Row(Home.BENCH, "num_requests n_requests", "it is {num_prompts}"),
    Row(Home.BENCH, "random_prefix_len prefix_len", "it is {shared_prefix_len}"),
    Row(Home.BENCH, "max_concurrency", "it is {concurrency}"),
    Row(Home.SAMPLING, "max_length", "it is {max_tokens}, of the answer alone"),
    Row(Home.SAMPLING, "min_new_tokens min_length", "it is {min_tokens}"),
    Row(
        Home.SAMPLING,
        "do_sample greedy",
        "{temperature=0} is greedy, and a temperature above 0 samples",
    ),
    Row(Home.SAMPLING, "temp", "it is {temperature}"),
    Row(
        Home.SAMPLING,
        "repeat_penalty repetition_penality",
        "it is {repetition_penalty}",
    ),
    Row(Home.SAMPLING, "typical typ_p local_typical_p", "it is {typical_p}"),
    Row(
        Home.SAMPLING,
        "repeat_last_n last_n_tokens_size penalty_last_n",
        "{repetition_penalty} counts all tokens of prompt and answer",
    ),
    Row(
        Home.SAMPLING,
        "encoder_repetition_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size "
        "repetition_detection",
        "it isn't supported; there are {repetition_penalty}, {presence_penalty} and "
        "{frequency_penalty}",
    ),
    Row(
        Home.SAMPLING,
        "sampling_seed random_state generator",
        "it is {seed}",
    ),
    Row(
        Home.SAMPLING,
        "num_return_sequences num_completions n_completions candidate_count",
        "it is {n}",
    ),
    Row(
        Home.SAMPLING,
        "stop_strings stop_sequences stop_words reverse_prompt stop_sequence stop_str antiprompt",
        "it is {stop}",
    ),
    Row(
        Home.SAMPLING,
        "stop_regex stopping_criteria",
        "it isn't supported; there are {stop} and {stop_token_ids}",
    ),
    Row(
        Home.SAMPLING,
        "eos_token_id stop_ids stop_tokens forced_eos_token_id",
        "it is {stop_token_ids}; the model's own ids end an answer without being named",
    ),
    Row(
        Home.SAMPLING,
        "ignore_eos_token",
        "it is {ignore_eos}",
    ),
    Row(
        Home.SAMPLING,
        "top_logprobs top_logprobs_num n_probs top_n_tokens return_logprob output_scores "
        "output_logits num_logprobs logits_all",
        "it is {logprobs}, how many alternatives are told of each token",
    ),
    Row(
        Home.SAMPLING,
        "logprob_start_len prompt_logprob_start decoder_input_details enable_prefill_logprobs",
        "it is {prompt_logprobs}, of all tokens of the prompt",
    ),
    Row(
        Home.SAMPLING,
        "logprob_token_ids token_ids_logprob prompt_logprob_token_ids",
        "it isn't supported; {logprobs} tells the most likely ones",
    ),
    Row(
        Home.SAMPLING,
        "bad_words_ids suppress_tokens begin_suppress_tokens",
        "it is {logit_bias}, of -100 for an id, or {bad_words}, texts",
    ),
    Row(
        Home.SAMPLING,
        "sequence_bias",
        "it is {logit_bias}, of single tokens",
    ),
    Row(
        Home.SAMPLING,
        "logits_processor custom_logit_processor prefix_allowed_tokens_fn "
        "logits_processor_pattern enable_custom_logit_processor",
        "it is {logits_processors}, names of what plugins offer",
    ),
    Row(
        Home.SAMPLING,
        "structured_outputs guided_decoding guided_json guided_regex guided_choice "
        "guided_grammar response_format json_schema regex grammar ebnf format json_object "
        "structural_tag grammar_file json_schema_file choice schema guided_options "
        "constraints force_words_ids response_model output_schema",
        _FORM,
    ),
    Row(
        Home.FORM,
        "json schema guided_json",
        "it is {json_schema}",
    ),
    Row(Home.FORM, "guided_regex pattern", "it is {regex}"),
    Row(Home.FORM, "guided_choice choices enum", "it is {choice}"),
    Row(Home.FORM, "ebnf gbnf lark guided_grammar", "it is {grammar}"),
    Row(
        Home.FORM,
        "disable_additional_properties",
        "{json_schema} says so by additionalProperties",
    ),
    Row(Home.FORM, "whitespace_pattern", "it is {max_whitespace}"),
    Row(
        Home.SAMPLING,
        "whitespace_pattern constrained_json_whitespace_pattern "
        "constrained_json_disable_any_whitespace",
        "it is max_whitespace of StructuredOutput, for {structured_output}",
    ),
    Row(
        Home.ANY,
        "guided_decoding_backend grammar_backend structured_outputs_config guidance_backend "
        "disable_outlines_disk_cache",
        "llguidance holds answers to their form: no other library can be chosen",
    ),
    Row(
        Home.SAMPLING,
        "reasoning_budget thinking_budget reasoning_budget_message max_thinking_tokens",
        "it is {thinking_token_budget}",
    ),
    Row(
        Home.ANY,
        "num_beams beam_width use_beam_search length_penalty early_stopping",
        "a beam search is a call of its own: Engine.beam_search(prompt, beam_width=4), and "
        "use_beam_search of a request",
    ),
    Row(
        Home.ANY,
        "num_beam_groups diversity_penalty",
        "groups of beams aren't supported; there is Engine.beam_search",
    ),
    Row(
        Home.SAMPLING,
        "mirostat mirostat_mode mirostat_tau mirostat_eta mirostat_lr mirostat_ent tfs tfs_z "
        "top_a top_h top_n_sigma top_nsigma xtc_probability xtc_threshold dynatemp_range "
        "dynatemp_exp dynatemp_exponent epsilon_cutoff eta_cutoff penalty_alpha dola_layers "
        "guidance_scale adaptive_target adaptive_decay smoothing_factor dry_multiplier dry_base "
        "dry_allowed_length dry_penalty_last_n dry_sequence_breaker dry_sequence_breakers "
        "samplers sampler_seq sampling_seq backend_sampling min_keep "
        "exponential_decay_length_penalty negative_prompt_ids negative_prompt_attention_mask "
        "sampling_backend",
        _NO_SAMPLER,
    ),
    Row(
        Home.ANY,
        "penalize_nl penalize_newline",
        "penalties count new lines as any token",
    ),
    Row(
        Home.ANY,
        "renormalize_logits remove_invalid_values token_healing watermarking watermarking_config "
        "watermark watermark_config forced_bos_token_id logprobs_mode use_fp64_gumbel",
        "it isn't supported",
    ),
    Row(
        Home.ANY,
        "return_tokens_as_token_ids return_token_ids tokens_only enable_prompt_tokens_details "
        "skip_special_tokens spaces_between_special_tokens clean_up_tokenization_spaces "
        "no_stop_trim special detokenize flat_logprobs output_kind output_text_buffer_length "
        "skip_clone return_dict_in_generate return_tokens return_full_text return_text "
        "return_tensors display_prompt verbose_prompt parse_special",
        "an answer always has its token ids, and its text without special tokens and without the "
        "prompt",
    ),
    Row(
        Home.ANY,
        "output_attentions output_hidden_states return_hidden_states return_routed_experts "
        "enable_return_hidden_states enable_return_routed_experts routed_experts_prompt_start "
        "return_sampling_mask trace_decode_token_ids enable_trace_replay",
        "what a model computes inside isn't told; Engine.embed gives vectors of prompts",
    ),
    Row(
        Home.ANY,
        "max_time t_max_predict_ms",
        "a call has deadline_seconds, and ends with an error then",
    ),
    Row(
        Home.ANY,
        "pad_token_id pad_token bos_token_id decoder_start_token_id",
        "prompts aren't padded, and the tokenizer puts in what begins a prompt",
    ),
    Row(
        Home.ANY,
        "generation_config sampling_defaults override_generation_config preferred_sampling_params",
        "where no parameters are given, the model's generation_config.json says them",
    ),
    Row(
        Home.SAMPLING,
        "extra_args custom_params vllm_xargs",
        "what plugins read is {logits_processors}",
    ),
    Row(
        Home.CALL,
        "skip_reading_prefix_cache",
        "it is {cache_salt}, which shares no prefix with other salts",
    ),
    Row(
        Home.ANY, "echo", "an answer is never behind its prompt; a request of completions has echo"
    ),
    Row(
        Home.ANY,
        "suffix spm_infill fim",
        "Engine.filled_in(prefix, suffix) is the prompt of what stands between two texts",
    ),
    # -- prompts and answers
    Row(
        Home.ENGINE,
        "chat_template_file custom_chat_template chat_format hf_chat_template_name chat_handler "
        "use_default_chat_template",
        "it is {chat_template}, a file; without it the model's own is used",
    ),
    Row(
        Home.ENGINE,
        "jinja",
        "the model's chat template is always used; {chat_template} names another",
    ),
    Row(Home.ENGINE, "tool_call_parser tool_parser_plugin", "it is {tool_parser}"),
    Row(
        Home.ENGINE,
        "enable_auto_tool_choice",
        "tools are read where the chat template tells how the model calls them, or {tool_parser} "
        "does",
    ),
    Row(
        Home.ENGINE,
        "enable_reasoning reasoning_format reasoning reasoning_config reasoning_parser_plugin "
        "hidethinking",
        "reasoning is told apart unless {reasoning_parser=none} is given",
    ),
    # -- calls
    Row(
        Home.CALL,
        "timeout request_timeout timeout_s timeout_seconds max_request_seconds deadline "
        "generation_timeout",
        "it is {deadline_seconds}",
    ),
    Row(
        Home.CALL,
        "sampling_params sampling_parameters generation_params gen_kwargs decoding_params options",
        "it is {params}, a SamplingParams",
    ),
    Row(
        Home.CALL,
        "prompts inputs input text input_text input_ids prompt_token_ids prompt_ids "
        "input_tokens tokenized_prompt",
        "the prompt is the first argument, {prompt}: text, token ids or messages",
    ),
    Row(
        Home.CALL,
        "conversation conversations chat_history history",
        "messages are the first argument, {messages}",
    ),
    Row(Home.CALL, "functions", "it is {tools}"),
    Row(
        Home.CALL,
        "tool_choice function_call tool_strict_level",
        "it is {required_tools}, the names of what must be called; without {tools} none is",
    ),
    Row(Home.CALL, "rid req_id uid", "it is {request_id}"),
    Row(Home.CALL, "user user_id client_id", "it is {tenant}"),
    Row(Home.CALL, "conversation_id session_params", "it is {session_id}"),
    Row(
        Home.CALL,
        "use_tqdm show_progress progress_bar progress_callback",
        "it is {progress}, of a call with several prompts",
    ),
    Row(
        Home.CALL,
        "truncation truncate tokenization_kwargs allow_auto_truncate max_prompt_length",
        "it is {truncate_prompt_tokens}",
    ),
    Row(
        Home.CALL,
        "enable_thinking think thinking reasoning_effort chat_template_args "
        "default_chat_template_kwargs reasoning_effort_map template_kwargs",
        _TEMPLATE_KWARGS,
    ),
    Row(
        Home.CALL,
        "prefill_assistant response_prefix prefill",
        "it is {continue_final_message}, with a last message of the assistant",
    ),
    Row(
        Home.ANY,
        "stream streamer stream_output incremental_streaming_output",
        "engine.stream(prompt) streams, and engine.generate(prompt) doesn't",
    ),
    Row(
        Home.ANY,
        "callback callbacks on_token",
        "read the tokens: async for token in engine.stream(prompt)",
    ),
    Row(
        Home.ANY,
        "attention_mask position_ids inputs_embeds prompt_embeds token_type_ids "
        "enable_prompt_embeds past_key_values synced_gpus custom_generate generation_kwargs "
        "stop_event abort_event",
        "a prompt is text, token ids or messages, and nothing else goes with it",
    ),
    Row(
        Home.ANY,
        "lora_request lora_path lora_paths adapter_path adapter_name lora adapter "
        "adapters peft_config",
        _NO_ADAPTERS,
    ),
    Row(
        Home.ANY,
        "control_vector control_vector_scaled control_vector_layer_range",
        "control vectors aren't supported",
    ),
)
