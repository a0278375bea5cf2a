"""Engine, model and file options of other engines, each with its answer."""

from __future__ import annotations

from typing import Final

from aioserve.other_engines.rows import Home, Row
from aioserve.unsupported import DEVICES, MACHINES, not_there

__all__ = ["ROWS"]

_ONE_DEVICE: Final = f"a model runs on one device: {not_there(DEVICES)}"
_ONE_MACHINE: Final = f"a model runs on one machine: {not_there(MACHINES)}"
_DRAFTER: Final = "it is {speculation}: ngram, suffix, model:path=PATH or a head"
_CHUNKS: Final = (
    "long prompts are always computed in chunks, of at most {max_num_batched_tokens} tokens"
)
_OFFLOAD: Final = "weights can't be offloaded; KV pages can, to {num_host_pages}"
_HUB: Final = "a model of the hub is downloaded as `hf download` has it, which takes this option"
_PAGES: Final = "it is {num_pages}, in pages of {page_size} tokens"
_FIRST: Final = "the model comes first, without an option"
_READ: Final = "files of a model are read as they are: this can't be chosen"

ROWS: Final[tuple[Row, ...]] = (
    # -- what a model may hold
    Row(
        Home.ENGINE,
        "n_ctx num_ctx ctx_size context_length context_size max_seq_len max_seq_length "
        "max_context_len max_context_tokens max_position_embeddings max_total_length "
        "max_cache_len fit_ctx max_length",
        "it is {max_model_len}",
    ),
    Row(
        Home.ENGINE,
        "max_input_tokens max_input_length max_input_len",
        "a prompt may have as many tokens as {max_model_len} leaves",
    ),
    Row(Home.PLAN, "n_ctx num_ctx ctx_size context_length max_model_len", "it is {context}"),
    Row(
        Home.ENGINE,
        "max_running_requests max_concurrent_requests max_batch_size parallel n_parallel np "
        "num_parallel decode_concurrency max_num_active_seqs max_batch sequences "
        "max_concurrent_seqs n_seq_max",
        "it is {max_num_seqs}",
    ),
    Row(
        Home.ENGINE,
        "batch_size n_batch num_batch n_ubatch ubatch_size max_chunk_size chunked_prefill_size "
        "prefill_budget prefill_step_size prefill_chunk_size max_prefill_tokens token_budget "
        "max_batch_prefill_tokens max_batch_total_tokens max_num_scheduled_tokens",
        "it is {max_num_batched_tokens}, of a step: long prompts are computed in chunks",
    ),
    Row(
        Home.ENGINE,
        "enable_chunked_prefill long_prefill_token_threshold enable_mixed_chunk "
        "long_prefill_token_threshold_adaptive enable_dynamic_chunking "
        "disable_chunked_prefix_cache prefill_max_requests prompt_concurrency "
        "max_num_partial_prefills",
        _CHUNKS,
    ),
    Row(
        Home.ENGINE,
        "gpu_memory_utilization mem_fraction_static device_memory_utilization cuda_memory_fraction "
        "fit_target",
        "it is {memory_utilization}, of the memory that the weights leave",
    ),
    Row(Home.PLAN, "gpu_memory_utilization", "it is {memory_utilization}"),
    Row(Home.ENGINE, "kv_cache_memory_bytes max_total_tokens kv_cache_memory", _PAGES),
    Row(Home.ENGINE, "num_gpu_blocks_override num_blocks num_gpu_blocks", "it is {num_pages}"),
    Row(Home.ENGINE, "block_size", "it is {page_size}"),
    Row(
        Home.ENGINE,
        "kv_cache_dtype cache_type_k cache_type_v type_k type_v kv_bits kv_group_size "
        "quantized_kv_start f16_kv kv_cache_dtype_skip_layers",
        "the KV cache has the type of {dtype}",
    ),
    Row(Home.PLAN, "kv_cache_dtype", "it is {kv_dtype}"),
    Row(Home.ENGINE, "swap_space hicache_size hicache_ratio", "it is {num_host_pages}, in pages"),
    Row(Home.ENGINE, "cache_ram prompt_cache_bytes", _PAGES),
    Row(
        Home.ENGINE,
        "torch_dtype data_type precision model_dtype",
        "it is {dtype}",
    ),
    Row(
        Home.ENGINE,
        "load_in_8bit load_in_4bit quantization_config quantize torchao_config modelopt_quant "
        "quantize_and_serve bits",
        "it is {quantization}, of int8, int4 or fp8; a model that is quantised already is read so",
    ),
    Row(
        Home.ENGINE,
        "enable_prefix_caching cache_prompt prompt_cache prompt_cache_all prompt_cache_ro "
        "cache_reuse use_cache cache_implementation cache_config prompt_cache_size "
        "enable_cache_report",
        "prefixes are cached unless {!prefix_caching} is given",
    ),
    Row(Home.ENGINE, "disable_radix_cache", "it is {!prefix_caching}"),
    Row(Home.ENGINE, "radix_eviction_policy eviction_policy", "it is {eviction}"),
    Row(
        Home.ENGINE,
        "async_scheduling",
        "steps overlap with the host's work unless {!overlap} is given",
    ),
    Row(Home.ENGINE, "disable_overlap_schedule", "it is {!overlap}"),
    Row(
        Home.ENGINE,
        "enforce_eager disable_cuda_graph disable_piecewise_cuda_graph disable_compile",
        "it is {!capture_graphs}",
    ),
    Row(
        Home.ENGINE,
        "cuda_graph_sizes cudagraph_capture_sizes cuda_graph_bs cuda_graph_max_bs cuda_graphs "
        "max_cudagraph_capture_size max_seq_len_to_capture",
        "it is {graph_sizes}",
    ),
    Row(
        Home.ENGINE,
        "attention_backend prefill_attention_backend decode_attention_backend attention_config "
        "attn_implementation flash_attn attn_impl",
        "it is {attention}",
    ),
    Row(Home.ENGINE, "scheduling_policy schedule_policy scheduler_cls scheduler", "it is {policy}"),
    Row(
        Home.ENGINE,
        "enable_priority_scheduling priority_scheduling",
        "it is {policy=priority}",
    ),
    Row(Home.ENGINE, "random_seed rng_seed", "it is {seed}"),
    Row(
        Home.ENGINE,
        "max_queued_requests max_num_queued_reqs max_waiting_requests max_queue_size queue_size",
        "it is {max_waiting}",
    ),
    Row(Home.ENGINE, "max_num_queued_tokens", "it is {max_waiting_tokens}"),
    Row(
        Home.ENGINE,
        "device_map main_gpu gpu_id base_gpu_id device_ids gpu device_type",
        "it is {device}, such as cuda:1",
    ),
    Row(
        Home.ENGINE,
        "n_gpu_layers gpu_layers num_gpu offload_kqv op_offload kv_offload no_kv_offload "
        "ngpu_layers",
        "all layers are on one device, which {device} names",
    ),
    Row(Home.ENGINE, "cpu_offload_gb", _OFFLOAD),
    # -- speculation
    Row(
        Home.ENGINE,
        "speculative_config speculative_algorithm spec_method spec_type use_mtp mtp eagle3 "
        "speculation_type prompt_lookup_num_tokens speculative_model spec_default dflash "
        "speculate spec_decoding",
        _DRAFTER,
    ),
    Row(
        Home.ENGINE,
        "speculative_draft_model_path model_draft draft_model spec_model spec_draft_model "
        "assistant_model speculative_draft_model hf_repo_draft spec_draft_hf",
        "it is {speculation=model:path=PATH}",
    ),
    Row(
        Home.ENGINE,
        "speculative_num_steps speculative_num_draft_tokens num_speculative_tokens draft_max "
        "draft draft_n num_draft_tokens spec_tokens spec_draft_n_max num_assistant_tokens",
        "it is {speculation_max_tokens}",
    ),
    Row(Home.ENGINE, "speculative_eagle_topk", "it is {speculation_max_branches}"),
    # -- a model and its files
    Row(
        Home.ANY,
        "model_path model_name model_id repo_id hf_repo hf_model pretrained_model_name_or_path "
        "model_name_or_path model_url docker_repo model_tag model_weights model_dir hf_file "
        "filename local_dir ckpt_path checkpoint model_file",
        _FIRST,
    ),
    Row(
        Home.ANY,
        "tokenizer tokenizer_path tokenizer_name tokenizer_mode tokenizer_revision "
        "skip_tokenizer_init hf_config_path tokenizer_worker_num",
        "the tokenizer is the one in the model's directory or file",
    ),
    Row(
        Home.ANY,
        "revision code_revision download_dir cache_dir hf_token token use_auth_token "
        "force_download local_files_only ignore_patterns additional_files "
        "local_dir_use_symlinks offline insecure",
        _HUB,
    ),
    Row(
        Home.ANY,
        "trust_remote_code custom_weight_loader allow_remote_code",
        "code that comes with a model is never run",
    ),
    Row(
        Home.ANY,
        "load_format config_format safetensors_load_strategy model_loader_extra_config "
        "use_safetensors weights_only low_cpu_mem_usage hf_overrides kv_overrides override_kv "
        "model_impl rope_scaling rope_scaling_type rope_freq_base rope_freq_scale rope_scale "
        "rope_theta yarn_ext_factor yarn_attn_factor yarn_beta_fast yarn_beta_slow "
        "yarn_orig_ctx json_model_override_args vocab_only use_mmap use_mlock low_vram mmap mlock "
        "no_mmap repack no_repack check_tensors use_tqdm_on_load pt_load_map_location "
        "model_class_overrides pooling_type attention_type swa_full load_mode config "
        "disable_sliding_window logits_soft_cap warmup no_warmup no_perf numa "
        "delete_ckpt_after_loading disable_mmap fusion_config ignore_mismatched_sizes",
        _READ,
    ),
    Row(
        Home.ANY,
        "task runner convert is_embedding embedding embeddings embedding_only rerank reranking "
        "pooling pooler_config embd_normalize",
        "the same engine generates, embeds and scores",
    ),
    Row(Home.ANY, "dimensions", "vectors have all their dimensions: cut them and normalise anew"),
    # -- computing
    Row(
        Home.ANY,
        "threads n_threads num_thread num_threads threads_batch n_threads_batch nthreads "
        "cpu_threads",
        "the environment variable AIOSERVE_NUM_THREADS says how many threads compute",
    ),
    Row(Home.PLAN, "tensor_parallel_size tp tp_size num_gpu gpus num_shard", "it is {num_gpus}"),
    Row(
        Home.ANY,
        "tensor_parallel_size pipeline_parallel_size data_parallel_size tp dp pp tp_size dp_size "
        "pp_size ep ep_size enable_expert_parallel distributed_executor_backend world_size "
        "num_gpus tensor_split split_mode num_shard sharded pipeline gpu_ids",
        _ONE_DEVICE,
    ),
    Row(
        Home.ANY,
        "nnodes node_rank master_addr master_port dist_init_addr nccl_port rpc "
        "nccl_init_addr dist_timeout distributed_timeout_seconds use_ray worker_use_ray",
        _ONE_MACHINE,
    ),
    Row(
        Home.ANY,
        "engine_use_ray disable_frontend_multiprocessing "
        "enable_torch_compile compilation_config optimization_level compile_config",
        "an engine runs in the process that makes it, and compiles what it needs by itself",
    ),
)
