"""Names that other engines document for their arguments and options, separated by white space.

They are those of their newest releases of November 2026.
"""

from __future__ import annotations

VLLM_ENGINE = """
model enable_return_routed_experts return_sampling_mask model_weights served_model_name
tokenizer hf_config_path runner convert skip_tokenizer_init enable_prompt_embeds tokenizer_mode
trust_remote_code allowed_local_media_path allowed_media_domains download_dir
safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size
load_format config_format dtype kv_cache_dtype seed max_model_len cudagraph_capture_sizes
max_cudagraph_capture_size ir_op_priority distributed_executor_backend pipeline_parallel_size
master_addr master_port nnodes node_rank distributed_timeout_seconds
cpu_distributed_timeout_seconds numa_bind numa_bind_nodes numa_bind_cpus device_ids
tensor_parallel_size prefill_context_parallel_size decode_context_parallel_size
dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size cp_kv_cache_interleave_size
data_parallel_size data_parallel_rank data_parallel_start_rank data_parallel_size_local
data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb
data_parallel_multi_port_external_lb data_parallel_backend enable_hc_sp enable_expert_parallel
enable_batch_sharded_sampling enable_ep_weight_filter moe_backend linear_backend
sparse_indexer_topk_backend all2all_backend enable_elastic_ep elastic_ep_max_dp_size enable_dbo
ubatch_size dbo_decode_token_threshold dp_sync_interval dbo_prefill_token_threshold
disable_nccl_for_dp_synchronization eplb_config enable_eplb expert_placement_strategy
max_parallel_loading_workers block_size enable_prefix_caching prefix_caching_hash_algo
prefix_cache_retention_interval disable_sliding_window disable_cascade_attn offload_backend
cpu_offload_gb cpu_offload_params offload_group_size offload_num_in_group offload_prefetch_step
offload_params gpu_memory_utilization kv_cache_memory_bytes max_num_batched_tokens
max_num_scheduled_tokens long_prefill_token_threshold long_prefill_token_threshold_adaptive
max_num_seqs max_num_active_seqs max_num_queued_reqs max_num_queued_tokens max_logprobs
logprobs_mode use_fp64_gumbel enable_trace_replay disable_log_stats aggregate_engine_logging
revision code_revision hf_token hf_overrides model_class_overrides tokenizer_revision
quantization quantization_config allow_deprecated_quantization enforce_eager
disable_custom_all_reduce enable_shm_tensor_arena language_model_only limit_mm_per_prompt
enable_mm_embeds interleave_mm_strings media_io_kwargs mm_processor_kwargs
mm_processor_cache_gb mm_processor_cache_type mm_hasher_algorithm
mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend
mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path
mm_encoder_fp8_scale_save_margin io_processor_plugin renderer_num_workers skip_mm_profiling
video_pruning_rate video_pruning_method mm_tensor_ipc mm_processor_device mm_ipc_gpu_memory_gb
mm_device_do_normalize enable_lora max_loras max_lora_rank default_mm_loras fully_sharded_loras
max_cpu_loras lora_dtype lora_target_modules enable_tower_connector_lora specialize_active_lora
enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels ray_workers_use_nsight
num_gpu_blocks_override model_loader_extra_config ignore_patterns enable_chunked_prefill
disable_chunked_mm_input scheduler_reserve_full_isl prefill_schedule_interval watermark
disable_hybrid_kv_cache_manager structured_outputs_config aux_output_config reasoning_parser
reasoning_parser_plugin speculative_config spec_method spec_model spec_tokens watermark_config
diffusion_config show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces
per_request_spec_decode_metrics kv_cache_metrics kv_cache_metrics_sample
custom_histogram_buckets cudagraph_metrics enable_layerwise_nvtx_tracing enable_mfu_metrics
enable_logging_iteration_details jit_monitor_mode jit_monitor_verbose enable_mm_processor_stats
scheduling_policy scheduler_cls pooler_config compilation_config attention_config engram_config
mamba_config kernel_config enable_flashinfer_autotune monokernel worker_cls
worker_extension_cls profiler_config logging_config log_level log_config_file
kv_transfer_config kv_events_config ec_transfer_config ec_manager_config reasoning_config
generation_config enable_sleep_mode sleep_mode_backend sleep_mode_offload_cudagraph
sleep_preserve_parameter_names enable_cumem_allocator enable_nccl_comm_suspend
override_generation_config model_impl attention_backend kv_cache_dtype_skip_layers
mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size prefix_match_unit mamba_cache_mode
enable_mamba_shared_prefix_checkpoint replayssm_buffer_len use_replayssm mamba_backend
mamba_ssu_algorithm enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds
additional_config use_tqdm_on_load pt_load_map_location logits_processors async_scheduling
stream_interval kv_sharing_fast_prefill swa_bounded_replay optimization_level performance_mode
fault_tolerance_config enable_fault_tolerance kv_offloading_size kv_offloading_backend
tokens_only shutdown_timeout watchdog_config weight_transfer_config fail_on_environ_validation
gdn_prefill_backend kda_prefill_backend kda_decode_backend enable_log_requests
"""

VLLM_SAMPLING = """
n presence_penalty frequency_penalty repetition_penalty temperature watermarking top_p top_k
min_p seed stop stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs
prompt_logprob_token_ids prompt_logprob_start logprob_token_ids flat_logprobs detokenize
skip_special_tokens spaces_between_special_tokens include_stop_str_in_output output_kind
stream_interval skip_clone output_text_buffer_length structured_outputs logit_bias
allowed_token_ids extra_args bad_words skip_reading_prefix_cache thinking_token_budget
repetition_detection routed_experts_prompt_start trace_decode_token_ids
"""

VLLM_BEAMS = """
beam_width max_tokens ignore_eos temperature length_penalty include_stop_str_in_output
structured_outputs skip_special_tokens watermarking allowed_token_ids
"""

VLLM_FORMS = """
json regex choice grammar json_object disable_any_whitespace disable_additional_properties
whitespace_pattern structural_tag
"""

VLLM_CALLS = """
prompts sampling_params use_tqdm lora_request priority tokenization_kwargs mm_processor_kwargs
messages chat_template chat_template_content_format add_generation_prompt
continue_final_message tools chat_template_kwargs
"""

VLLM_SERVER = """
lora_modules chat_template chat_template_content_format trust_request_chat_template
trust_request_mm_kwargs default_chat_template_kwargs reasoning_effort_map response_role
return_tokens_as_token_ids enable_auto_tool_choice exclude_tools_when_tool_choice_none
tool_call_parser tool_parser_plugin tool_strict_level tool_server max_log_len
enable_prompt_tokens_details enable_per_request_metrics enable_server_load_tracking
enable_force_include_usage sse_keep_alive_interval enable_tokenizer_info_endpoint
enable_log_outputs enable_log_deltas cohere_is_reasoning_model cohere_format
anthropic_disabled_thinking_effort log_error_stack tokens_only enable_scale_out
fingerprint_mode fingerprint_value host port grpc_port data_parallel_supervisor_port
dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s
dp_supervisor_probe_failure_threshold uds uvicorn_log_level disable_uvicorn_access_log
disable_access_log_for_endpoints allow_credentials allowed_origins allowed_methods
allowed_headers api_key ssl_keyfile ssl_certfile ssl_ca_certs enable_ssl_refresh ssl_cert_reqs
ssl_ciphers root_path middleware enable_request_id_headers disable_fastapi_docs
h11_max_incomplete_event_size h11_max_header_count enable_offline_docs
enable_flash_late_interaction
"""

LLAMA_ENGINE = """
model_path n_gpu_layers split_mode main_gpu tensor_split vocab_only use_mmap use_mlock
kv_overrides seed n_ctx n_batch n_ubatch n_threads n_threads_batch rope_scaling_type
pooling_type attention_type rope_freq_base rope_freq_scale yarn_ext_factor yarn_attn_factor
yarn_beta_fast yarn_beta_slow yarn_orig_ctx logits_all embedding offload_kqv flash_attn
op_offload swa_full no_perf last_n_tokens_size lora_base lora_scale lora_path numa chat_format
chat_handler draft_model tokenizer type_k type_v spm_infill verbose repo_id filename
additional_files local_dir local_dir_use_symlinks cache_dir
"""

LLAMA_CALLS = """
messages functions function_call tools tool_choice temperature top_p top_k min_p typical_p
stream stop seed response_format max_tokens presence_penalty frequency_penalty repeat_penalty
tfs_z mirostat_mode mirostat_tau mirostat_eta model logits_processor grammar logit_bias
logprobs top_logprobs prompt suffix echo stopping_criteria tokens temp reset penalize_nl
"""

SGLANG_ENGINE = """
model_path tokenizer_path tokenizer_mode tokenizer_worker_num skip_tokenizer_init load_format
model_loader_extra_config trust_remote_code context_length is_embedding enable_multimodal
revision model_impl host port fastapi_root_path grpc_mode skip_server_warmup warmups nccl_port
checkpoint_engine_wait_weights_before_ready ssl_keyfile ssl_certfile ssl_ca_certs
ssl_keyfile_password enable_ssl_refresh dtype quantization quantization_param_path
kv_cache_dtype enable_fp32_lm_head modelopt_quant modelopt_checkpoint_restore_path
modelopt_checkpoint_save_path modelopt_export_path quantize_and_serve rl_quant_profile
mem_fraction_static max_running_requests max_queued_requests max_total_tokens
chunked_prefill_size enable_dynamic_chunking max_prefill_tokens prefill_max_requests
schedule_policy enable_priority_scheduling disable_priority_preemption default_priority_value
abort_on_priority_when_disabled schedule_low_priority_values_first
priority_scheduling_preemption_threshold schedule_conservativeness page_size
swa_full_tokens_ratio disable_hybrid_swa_memory radix_eviction_policy enable_prefill_delayer
prefill_delayer_max_delay_passes prefill_delayer_token_usage_low_watermark
prefill_delayer_forward_passes_buckets prefill_delayer_wait_seconds_buckets device tp_size
pp_size pp_max_micro_batch_size pp_async_batch_depth stream_interval
stream_response_default_include_usage incremental_streaming_output enable_streaming_session
random_seed constrained_json_whitespace_pattern constrained_json_disable_any_whitespace
watchdog_timeout soft_watchdog_timeout dist_timeout download_dir model_checksum base_gpu_id
gpu_id_step sleep_on_idle use_ray custom_sigquit_handler log_level log_level_http log_requests
log_requests_level log_requests_format log_requests_target uvicorn_access_log_exclude_prefixes
crash_dump_folder show_time_cost enable_metrics enable_mfu_metrics
enable_metrics_for_all_schedulers tokenizer_metrics_custom_labels_header
tokenizer_metrics_allowed_custom_labels extra_metric_labels bucket_time_to_first_token
bucket_inter_token_latency bucket_e2e_request_latency collect_tokens_histogram
prompt_tokens_buckets generation_tokens_buckets gc_warning_threshold_secs decode_log_interval
enable_request_time_stats_logging kv_events_config enable_trace otlp_traces_endpoint
export_metrics_to_file export_metrics_to_file_dir api_key admin_api_key served_model_name
weight_version chat_template hf_chat_template_name completion_template file_storage_path
enable_cache_report reasoning_parser tool_call_parser tool_server sampling_defaults dp_size
load_balance_method attn_cp_size moe_dp_size dist_init_addr nnodes node_rank
json_model_override_args preferred_sampling_params enable_lora enable_lora_overlap_loading
max_lora_rank lora_target_modules lora_paths max_loaded_loras max_loras_per_batch
lora_eviction_policy lora_backend max_lora_chunk_size experts_shared_outer_loras
attention_backend decode_attention_backend prefill_attention_backend sampling_backend
grammar_backend mm_attention_backend fp8_gemm_runner_backend fp4_gemm_runner_backend
nsa_prefill_backend nsa_decode_backend disable_flashinfer_autotune mamba_backend
speculative_algorithm speculative_draft_model_path speculative_draft_model_revision
speculative_draft_load_format speculative_num_steps speculative_eagle_topk
speculative_num_draft_tokens speculative_accept_threshold_single
speculative_accept_threshold_acc speculative_token_map speculative_attention_mode
speculative_draft_attention_backend speculative_moe_runner_backend speculative_moe_a2a_backend
speculative_draft_model_quantization speculative_ngram_min_bfs_breadth
speculative_ngram_max_bfs_breadth speculative_ngram_match_type speculative_ngram_max_trie_depth
speculative_ngram_capacity enable_multi_layer_eagle ep_size moe_a2a_backend moe_runner_backend
flashinfer_mxfp4_moe_precision enable_flashinfer_allreduce_fusion
enforce_disable_flashinfer_allreduce_fusion enable_aiter_allreduce_fusion deepep_mode
ep_num_redundant_experts ep_dispatch_algorithm init_expert_location enable_eplb eplb_algorithm
eplb_rebalance_num_iterations eplb_rebalance_layers_per_chunk
eplb_min_rebalancing_utilization_threshold expert_distribution_recorder_mode
expert_distribution_recorder_buffer_size enable_expert_distribution_metrics deepep_config
moe_dense_tp_size elastic_ep_backend enable_elastic_expert_backup mooncake_ib_device
max_mamba_cache_size mamba_ssm_dtype mamba_full_memory_ratio mamba_scheduler_strategy
mamba_track_interval linear_attn_backend linear_attn_decode_backend linear_attn_prefill_backend
enable_hierarchical_cache hicache_ratio hicache_size hicache_write_policy hicache_io_backend
hicache_mem_layout hicache_storage_backend hicache_storage_prefetch_policy
hicache_storage_backend_extra_config enable_hisparse hisparse_config enable_lmcache
kt_weight_path kt_method kt_cpuinfer kt_threadpool_count kt_num_gpu_experts
kt_max_deferred_experts_per_token dllm_algorithm dllm_algorithm_config enable_double_sparsity
ds_channel_config_path ds_heavy_channel_num ds_heavy_token_num ds_heavy_channel_type
ds_sparse_decode_threshold cpu_offload_gb offload_group_size offload_num_in_group
offload_prefetch_step offload_mode multi_item_scoring_delimiter disable_radix_cache
cuda_graph_max_bs cuda_graph_bs disable_cuda_graph disable_cuda_graph_padding
enable_profile_cuda_graph enable_cudagraph_gc enable_layerwise_nvtx_marker enable_nccl_nvls
enable_symm_mem disable_flashinfer_cutlass_moe_fp4_allgather enable_tokenizer_batch_encode
disable_tokenizer_batch_decode disable_outlines_disk_cache disable_custom_all_reduce
enable_mscclpp enable_torch_symm_mem pre_warm_nccl disable_overlap_schedule enable_mixed_chunk
enable_dp_attention enable_dp_lm_head enable_two_batch_overlap enable_single_batch_overlap
tbo_token_distribution_threshold enable_torch_compile disable_piecewise_cuda_graph
enforce_piecewise_cuda_graph enable_torch_compile_debug_mode torch_compile_max_bs
piecewise_cuda_graph_max_tokens piecewise_cuda_graph_tokens piecewise_cuda_graph_compiler
torchao_config enable_nan_detection enable_p2p_check triton_attention_reduce_in_fp32
triton_attention_num_kv_splits triton_attention_split_tile_size num_continuous_decode_steps
delete_ckpt_after_loading enable_memory_saver enable_weights_cpu_backup
enable_draft_weights_cpu_backup allow_auto_truncate enable_custom_logit_processor
flashinfer_mla_disable_ragged disable_shared_experts_fusion disable_chunked_prefix_cache
disable_fast_image_processor keep_mm_feature_on_device enable_return_hidden_states
enable_return_routed_experts scheduler_recv_interval numa_node enable_deterministic_inference
rl_on_policy_target enable_attn_tp_input_scattered gc_threshold
enable_nsa_prefill_context_parallel nsa_prefill_cp_mode enable_fused_qk_norm_rope
enable_precise_embedding_interpolation enable_fused_moe_sum_all_reduce
enable_prefill_context_parallel prefill_cp_mode enable_dynamic_batch_tokenizer
dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout
debug_tensor_dump_output_folder debug_tensor_dump_layers debug_tensor_dump_input_file
debug_tensor_dump_inject disaggregation_mode disaggregation_transfer_backend
disaggregation_bootstrap_port disaggregation_ib_device
disaggregation_decode_enable_offload_kvcache num_reserved_decode_tokens
disaggregation_decode_polling_interval encoder_only language_only encoder_transfer_backend
encoder_urls enable_adaptive_dispatch_to_encoder custom_weight_loader
weight_loader_disable_mmap remote_instance_weight_loader_seed_instance_ip
remote_instance_weight_loader_seed_instance_service_port
remote_instance_weight_loader_send_weights_group_ports remote_instance_weight_loader_backend
remote_instance_weight_loader_start_seed_via_transfer_engine engine_info_bootstrap_port
modelexpress_config enable_pdmux pdmux_config_path sm_group_num
enable_broadcast_mm_inputs_process enable_prefix_mm_cache mm_enable_dp_encoder
mm_process_config limit_mm_data_per_request enable_mm_global_cache decrypted_config_file
decrypted_draft_config_file forward_hooks
"""

SGLANG_SAMPLING = """
max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty
presence_penalty repetition_penalty min_new_tokens n json_schema regex ebnf structural_tag
ignore_eos skip_special_tokens spaces_between_special_tokens no_stop_trim custom_params
stream_interval logit_bias sampling_seed
"""

SGLANG_CALLS = """
prompt sampling_params input_ids image_data audio_data video_data return_logprob
logprob_start_len top_logprobs_num token_ids_logprob lora_path custom_logit_processor
return_hidden_states return_routed_experts stream bootstrap_host bootstrap_port bootstrap_room
routed_dp_rank disagg_prefill_dp_rank data_parallel_rank external_trace_header rid
session_params priority
"""

TRANSFORMERS_CALLS = """
max_length max_new_tokens min_length min_new_tokens early_stopping max_time stop_strings
do_sample num_beams use_mtp use_cache cache_implementation cache_config max_cache_len
temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff repetition_penalty
encoder_repetition_penalty length_penalty no_repeat_ngram_size bad_words_ids renormalize_logits
forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty
suppress_tokens begin_suppress_tokens sequence_bias token_healing guidance_scale
watermarking_config num_return_sequences output_attentions output_hidden_states output_scores
output_logits return_dict_in_generate pad_token_id bos_token_id eos_token_id
encoder_no_repeat_ngram_size decoder_start_token_id is_assistant num_assistant_tokens
num_assistant_tokens_schedule assistant_confidence_threshold prompt_lookup_num_tokens
max_matching_ngram_size assistant_early_exit assistant_lookbehind target_lookbehind
assistant_ensemble_weight speculation_type compile_config disable_compile
continuous_batching_config low_memory penalty_alpha dola_layers diversity_penalty
num_beam_groups constraints force_words_ids prefill_chunk_size inputs generation_config
logits_processor stopping_criteria prefix_allowed_tokens_fn synced_gpus assistant_model
streamer negative_prompt_ids negative_prompt_attention_mask custom_generate inputs_embeds
attention_mask input_ids
"""

TRANSFORMERS_LOADING = """
pretrained_model_name_or_path config cache_dir ignore_mismatched_sizes force_download
local_files_only token revision use_safetensors weights_only fusion_config disable_mmap
torch_dtype dtype device_map attn_implementation load_in_8bit load_in_4bit quantization_config
trust_remote_code low_cpu_mem_usage
"""

LLAMA_SERVER_FLAGS = """
-h --help --usage --version -cl --cache-list --completion-bash -t --threads -tb --threads-batch
-C --cpu-mask -Cr --cpu-range --cpu-strict --prio --poll -Cb --cpu-mask-batch -Crb
--cpu-range-batch --cpu-strict-batch --prio-batch --poll-batch -lcs --lookup-cache-static -lcd
--lookup-cache-dynamic -c --ctx-size --kv-unified-per-slot -n --predict --n-predict -b
--batch-size -ub --ubatch-size --keep --swa-full -ctxcp --ctx-checkpoints --swa-checkpoints
-cms --checkpoint-min-step -cram --cache-ram -kvu --kv-unified -no-kvu --no-kv-unified
--cache-idle-slots --no-cache-idle-slots --context-shift --no-context-shift -fa --flash-attn
--perf --no-perf -f --file -bf --binary-file -e --escape --no-escape -r --reverse-prompt -sp
--special --warmup --no-warmup --spm-infill --samplers -s --seed --sampler-seq --sampling-seq
--ignore-eos --temp --temperature --top-k --top-p --min-p --top-nsigma --top-n-sigma
--xtc-probability --xtc-threshold --typical --typical-p --repeat-last-n --repeat-penalty
--presence-penalty --frequency-penalty --dry-multiplier --dry-base --dry-allowed-length
--dry-penalty-last-n --dry-sequence-breaker --adaptive-target --adaptive-decay --dynatemp-range
--dynatemp-exp --mirostat --mirostat-lr --mirostat-ent -l --logit-bias --grammar --grammar-file
-j --json-schema -jf --json-schema-file -bs --backend-sampling --pooling --rope-scaling
--rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx --yarn-ext-factor
--yarn-attn-factor --yarn-beta-slow --yarn-beta-fast -kvo --kv-offload -nkvo --no-kv-offload
--repack -nr --no-repack --no-host -ctk --cache-type-k -ctv --cache-type-v -dt --defrag-thold
-np --parallel -cb --cont-batching -nocb --no-cont-batching -mm --mmproj -mmu --mmproj-url
--mmproj-auto --no-mmproj --no-mmproj-auto --mmproj-offload --no-mmproj-offload -mmdev --rpc
--mmproj-device --image-min-tokens --image-max-tokens --mtmd-batch-max-tokens --video-fps
--video-timestamp-interval --video-ffmpeg-dir -lm --load-mode -lzm --lazy-mode --numa -dev
--device --list-devices -ot --override-tensor -cmoe --cpu-moe -ncmoe --n-cpu-moe -ncffn
--n-cpu-ffn -ngl --gpu-layers --n-gpu-layers -sm --split-mode -ts --tensor-split -mg --main-gpu
-fit --fit -fitt --fit-target -fitc --fit-ctx --check-tensors --override-kv --op-offload
--no-op-offload --lora --lora-scaled --control-vector --control-vector-scaled
--control-vector-layer-range -a --alias --tags -m --model -mu --model-url -dr --docker-repo -hf
-hfr --hf-repo -hff --hf-file -hft --hf-token --embd-normalize --host --port --reuse-port
--path --cors-origins --cors-methods --cors-headers --cors-credentials --no-cors-credentials
--api-prefix --ui-config --webui-config --ui-config-file --webui-config-file --ui-mcp-proxy
--webui-mcp-proxy --no-ui-mcp-proxy --no-webui-mcp-proxy --tools --tools-runtime
--mcp-servers-config --mcp-servers-json -ag --agent -no-ag --no-agent --ui --webui --no-ui
--no-webui --embedding --embeddings --rerank --reranking --api-key --api-key-file
--ssl-key-file --ssl-cert-file --chat-template-kwargs -to --timeout --sse-ping-interval
--threads-http --cache-prompt --no-cache-prompt --cache-reuse --metrics --props --slots
--no-slots --slot-save-path --media-path --models-dir --models-preset --models-max
--models-autoload --no-models-autoload --jinja --no-jinja --reasoning-format -rea --reasoning
--reasoning-effort --reasoning-budget --reasoning-budget-message --reasoning-preserve
--no-reasoning-preserve --chat-template --chat-template-file --skip-chat-parsing
--no-skip-chat-parsing --prefill-assistant --no-prefill-assistant -sps --slot-prompt-similarity
--lora-init-without-apply --sleep-idle-seconds --log-disable --log-file --log-jsonl
--no-log-jsonl --log-prompts-dir --log-colors -v --verbose --log-verbose --offline -lv
--verbosity --log-verbosity --log-prefix --no-log-prefix --log-timestamps --no-log-timestamps
--spec-draft-hf -hfd -hfrd --hf-repo-draft --spec-draft-threads -td --threads-draft
--spec-draft-threads-batch -tbd --threads-batch-draft --spec-draft-cpu-mask -Cd
--cpu-mask-draft --spec-draft-cpu-range -Crd --cpu-range-draft --spec-draft-cpu-strict
--cpu-strict-draft --spec-draft-prio --prio-draft --spec-draft-poll --poll-draft
--spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft --spec-draft-cpu-strict-batch
--cpu-strict-batch-draft --spec-draft-prio-batch --prio-batch-draft --spec-draft-poll-batch
--poll-batch-draft --spec-draft-type-k -ctkd --cache-type-k-draft --spec-draft-type-v -ctvd
--cache-type-v-draft --spec-draft-override-tensor -otd --override-tensor-draft
--spec-draft-cpu-moe -cmoed --cpu-moe-draft --spec-draft-n-cpu-moe --spec-draft-ncmoe -ncmoed
--n-cpu-moe-draft --spec-draft-n-max --spec-draft-n-min --spec-synth-len --spec-synth-rates
--spec-draft-p-split --draft-p-split --spec-draft-p-min --draft-p-min
--spec-draft-backend-sampling --no-spec-draft-backend-sampling --spec-draft-device -devd
--device-draft --spec-draft-ngl -ngld --gpu-layers-draft --n-gpu-layers-draft
--spec-draft-model -md --model-draft --spec-type --spec-ngram-mod-n-min --spec-ngram-mod-n-max
--spec-ngram-mod-n-match --spec-ngram-simple-size-n --spec-ngram-simple-size-m
--spec-ngram-simple-min-hits --spec-ngram-map-k-size-n --spec-ngram-map-k-size-m
--spec-ngram-map-k-min-hits --spec-ngram-map-k4v-size-n --spec-ngram-map-k4v-size-m
--spec-ngram-map-k4v-min-hits --draft --draft-n --draft-max --draft-min --draft-n-min
--spec-ngram-size-n --spec-ngram-size-m --spec-ngram-min-hits --embd-gemma-default
--fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default --fim-qwen-7b-spec
--fim-qwen-14b-spec --fim-qwen-30b-default --gpt-oss-20b-default --gpt-oss-120b-default
--vision-gemma-4b-default --vision-gemma-12b-default --spec-default
"""

LLAMA_CLI_FLAGS = """
-h --help --usage --version -cl --cache-list --completion-bash --server-base --verbose-prompt
--display-prompt --no-display-prompt -co --color -t --threads -tb --threads-batch -C --cpu-mask
-Cr --cpu-range --cpu-strict --prio --poll -Cb --cpu-mask-batch -Crb --cpu-range-batch
--cpu-strict-batch --prio-batch --poll-batch -c --ctx-size -n --predict --n-predict -b
--batch-size -ub --ubatch-size --keep --swa-full -ctxcp --ctx-checkpoints --swa-checkpoints
-cram --cache-ram --context-shift --no-context-shift -fa --flash-attn -sys --system-prompt
--perf --no-perf --show-timings --no-show-timings -f --file -sysf --system-prompt-file -bf
--binary-file -e --escape --no-escape -ptc --print-token-count --prompt-cache
--prompt-cache-all --prompt-cache-ro -r --reverse-prompt -sp --special -cnv --conversation
-no-cnv --no-conversation -st --single-turn -i --interactive -if --interactive-first -mli
--multiline-input --in-prefix-bos --in-prefix --in-suffix --warmup --no-warmup --samplers -s
--seed --sampler-seq --sampling-seq --ignore-eos --temp --temperature --top-k --top-p --min-p
--top-nsigma --top-n-sigma --xtc-probability --xtc-threshold --typical --typical-p
--repeat-last-n --repeat-penalty --presence-penalty --frequency-penalty --dry-multiplier
--dry-base --dry-allowed-length --dry-penalty-last-n --dry-sequence-breaker --adaptive-target
--adaptive-decay --dynatemp-range --dynatemp-exp --mirostat --mirostat-lr --mirostat-ent -l
--logit-bias --grammar --grammar-file -j --json-schema -jf --json-schema-file -bs
--backend-sampling --rope-scaling --rope-scale --rope-freq-base --rope-freq-scale
--yarn-orig-ctx --yarn-ext-factor --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast -gan
--grp-attn-n -gaw --grp-attn-w -kvo --kv-offload -nkvo --no-kv-offload --repack -nr --no-repack
--no-host -ctk --cache-type-k -ctv --cache-type-v -dt --defrag-thold -mm --mmproj -mmu
--mmproj-url --mmproj-auto --no-mmproj --no-mmproj-auto --mmproj-offload --no-mmproj-offload
-mmdev --rpc --mmproj-device --image --audio --video --image-min-tokens --image-max-tokens
--video-fps --video-timestamp-interval --video-ffmpeg-dir -lm --load-mode -lzm --lazy-mode
--numa -dev --device --list-devices -ot --override-tensor -cmoe --cpu-moe -ncmoe --n-cpu-moe
-ncffn --n-cpu-ffn -ngl --gpu-layers --n-gpu-layers -sm --split-mode -ts --tensor-split -mg
--main-gpu -fit --fit -fitt --fit-target -fitc --fit-ctx --check-tensors --override-kv
--op-offload --no-op-offload --lora --lora-scaled --control-vector --control-vector-scaled
--control-vector-layer-range -m --model -mu --model-url -dr --docker-repo -hf -hfr --hf-repo
-hff --hf-file -hft --hf-token -o --output --output-file --chat-template-kwargs --jinja
--no-jinja --reasoning-format -rea --reasoning --reasoning-effort --reasoning-budget
--reasoning-budget-message --reasoning-preserve --no-reasoning-preserve --chat-template
--chat-template-file --skip-chat-parsing --no-skip-chat-parsing --simple-io --log-disable
--log-file --log-jsonl --no-log-jsonl --log-prompts-dir --log-colors -v --verbose --log-verbose
--offline -lv --verbosity --log-verbosity --log-prefix --no-log-prefix --log-timestamps
--no-log-timestamps --spec-draft-hf -hfd -hfrd --hf-repo-draft --spec-draft-threads -td
--threads-draft --spec-draft-threads-batch -tbd --threads-batch-draft --spec-draft-cpu-mask -Cd
--cpu-mask-draft --spec-draft-cpu-range -Crd --cpu-range-draft --spec-draft-cpu-strict
--cpu-strict-draft --spec-draft-prio --prio-draft --spec-draft-poll --poll-draft
--spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft --spec-draft-cpu-range-batch -Crbd
--cpu-range-batch-draft --spec-draft-cpu-strict-batch --cpu-strict-batch-draft
--spec-draft-prio-batch --prio-batch-draft --spec-draft-poll-batch --poll-batch-draft
--spec-draft-type-k -ctkd --cache-type-k-draft --spec-draft-type-v -ctvd --cache-type-v-draft
--spec-draft-override-tensor -otd --override-tensor-draft --spec-draft-cpu-moe -cmoed
--cpu-moe-draft --spec-draft-n-cpu-moe --spec-draft-ncmoe -ncmoed --n-cpu-moe-draft
--spec-draft-n-max --spec-draft-n-min --spec-synth-len --spec-synth-rates --spec-draft-p-split
--draft-p-split --spec-draft-p-min --draft-p-min --spec-draft-backend-sampling
--no-spec-draft-backend-sampling --spec-draft-device -devd --device-draft --spec-draft-ngl
-ngld --gpu-layers-draft --n-gpu-layers-draft --spec-draft-model -md --model-draft --spec-type
--spec-ngram-mod-n-min --spec-ngram-mod-n-max --spec-ngram-mod-n-match
--spec-ngram-simple-size-n --spec-ngram-simple-size-m --spec-ngram-simple-min-hits
--spec-ngram-map-k-size-n --spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits
--spec-ngram-map-k4v-size-n --spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits --draft
--draft-n --draft-max --draft-min --draft-n-min --gpt-oss-20b-default --gpt-oss-120b-default
--vision-gemma-4b-default --vision-gemma-12b-default --spec-default
"""

MLX_FLAGS = """
--model --adapter-path --host --port --allowed-origins --draft-model --num-draft-tokens
--trust-remote-code --log-level --chat-template --use-default-chat-template --temp --top-p
--top-k --min-p --max-tokens --chat-template-args --decode-concurrency --prompt-concurrency
--prefill-step-size --prompt-cache-size --prompt-cache-bytes --kv-bits --kv-group-size
--quantized-kv-start --pipeline
"""

SGLANG_FLAGS = """
--tp --tp-size --dp --ep --tensor-parallel-size --data-parallel-size --pipeline-parallel-size
--expert-parallel-size --model --served-model-name
"""

OLLAMA_FLAGS = """
--dimensions --experimental --experimental-websearch --experimental-yolo --format
--hidethinking --insecure --keepalive --nowordwrap --think --truncate --verbose
"""

OLLAMA_OPTIONS = """
num_ctx num_batch num_gpu main_gpu use_mmap num_thread num_keep seed num_predict top_k top_p
min_p typical_p repeat_last_n temperature repeat_penalty presence_penalty frequency_penalty
stop draft_num_predict mirostat mirostat_tau mirostat_eta tfs_z penalize_newline numa low_vram
f16_kv vocab_only use_mlock logits_all
"""

TGI_FLAGS = """
--model-id --revision --validation-workers --sharded --num-shard --quantize --speculate --dtype
--kv-cache-dtype --trust-remote-code --max-concurrent-requests --max-best-of
--max-stop-sequences --max-top-n-tokens --max-input-tokens --max-input-length
--max-total-tokens --waiting-served-ratio --max-batch-prefill-tokens --max-batch-total-tokens
--max-waiting-tokens --max-batch-size --cuda-graphs --hostname --port --prometheus-port
--shard-uds-path --master-addr --master-port --huggingface-hub-cache --weights-cache-override
--disable-custom-kernels --cuda-memory-fraction --rope-scaling --rope-factor --json-output
--otlp-endpoint --cors-allow-origin --api-key --ngrok --tokenizer-config-path
--disable-grammar-support --max-client-batch-size --lora-adapters --usage-stats --payload-limit
--enable-prefill-logprobs --graceful-termination-timeout
"""
