"""Answers to whole families of option names, found by a word in the name; and short options.

Other engines often have many options for one subject, like `speculative_...`.
"""

from __future__ import annotations

from typing import Final

from aioserve.other_engines.rows import Home, Row
from aioserve.unsupported import ADAPTERS, DEVICES, MACHINES, MEDIA, STATE, not_there

__all__ = ["FAMILIES", "SHORT"]

FAMILIES: Final[tuple[Row, ...]] = (
    Row(
        Home.ANY,
        "fim_qwen gpt_oss embd_gemma vision_gemma",
        "the model comes first, without an option",
    ),
    Row(Home.ANY, "lora loras adapter adapters", not_there(ADAPTERS)),
    Row(
        Home.ANY,
        "mm multimodal image images audio video vision mmproj mmproj_auto mtmd media tts encoder "
        "language",
        not_there(MEDIA),
    ),
    Row(
        Home.ANY,
        "mamba ssm linear_attn gdn kda replayssm",
        f"models with {STATE} aren't supported",
    ),
    Row(
        Home.ANY,
        "disaggregation transfer connector remote mooncake bootstrap lmcache grpc fault "
        "kv_events_config nnodes node checkpoint_engine elastic supervisor load_balance pdmux "
        "modelexpress sm_group scale_out engram",
        f"a model runs in one process: {not_there(MACHINES)}",
    ),
    Row(
        Home.ANY,
        "parallel tp pp dp ep cp dcp pcp nccl mscclpp allreduce all_reduce all2all deepep eplb "
        "dbo tbo expert dist distributed ray p2p nvls shm_tensor torch_symm symm sharded "
        "two_batch single_batch hc_sp gpu_id batch_sharded",
        f"a model runs on one device: {not_there(DEVICES)}",
    ),
    Row(
        Home.ENGINE,
        "offload offloading hicache hierarchical cpu_moe n_cpu_moe ncmoe cpu_ffn override_tensor "
        "kt hisparse no_host weights_cpu_backup",
        "weights can't be offloaded; KV pages can, to {num_host_pages}",
    ),
    Row(
        Home.ENGINE,
        "spec speculative speculation draft assistant ngram lookup lookahead multi_layer_eagle "
        "lookbehind",
        "it is {speculation}: ngram, suffix, model:path=PATH or a head",
    ),
    Row(
        Home.ENGINE,
        "quant quantize quantization modelopt fp8 fp4 mxfp4",
        "it is {quantization}, of int8, int4 or fp8; a model that is quantised already is read so",
    ),
    Row(
        Home.ENGINE,
        "cuda_graph cudagraph piecewise graph graphs",
        "it is {graph_sizes}",
    ),
    Row(
        Home.ANY,
        "metric metrics trace traces otlp profile profiler nvtx log logs logging debug bucket "
        "buckets watchdog stats stat statistics histogram jit_monitor tensor_dump crash nan "
        "show_time forward_hooks",
        "what an engine does is told by Engine.stats(), observers, and /metrics of a server",
    ),
    Row(
        Home.ANY,
        "ssl tls fastapi uvicorn cors credentials methods headers middleware root_path "
        "http sse server webui mcp agent slot slots api tool_server tools_runtime response_role",
        "the server has no such setting; `aioserve serve --help` names those it has",
    ),
    Row(
        Home.ANY,
        "attention attn flashinfer triton kernel kernels gemm fused fusion backend moe compile "
        "compiler precision nsa linear ir_op cumem monokernel autotune sparse sparsity ds fp32 "
        "indexer deterministic reduce dllm",
        "kernels are chosen by the engine: there is no such option",
    ),
    Row(
        Home.ANY,
        "tokenizer",
        "the tokenizer is the one in the model's directory or file",
    ),
    Row(
        Home.ENGINE,
        "cache kv prefix swa pages radix hybrid ctx_checkpoints checkpoint_min",
        "the KV cache has {num_pages}, {page_size}, {prefix_caching} and {eviction}",
    ),
    Row(
        Home.ANY,
        "weights weight checkpoint revision download safetensors config ckpt hf rope yarn "
        "completion_template decrypted models presets",
        "a model is read as its files say: there is no such option",
    ),
    Row(
        Home.ENGINE,
        "schedule scheduler scheduling priority preemption prefill queue decode overlap continuous",
        "what runs next is up to {policy}; a step has at most {max_num_batched_tokens} tokens",
    ),
    Row(
        Home.ANY,
        "cpu numa prio poll sleep gc memory performance worker workers additional_config "
        "custom_sigquit_handler diffusion skip_server_warmup warmups numa_node",
        "an engine runs in the process that makes it: there is no such option",
    ),
)
"""Rows whose names are words, or words joined by underscores. An option gets the answer of the
first row with words that it contains."""

_SHORT: Final = """
C=cpu_mask Cb=cpu_mask_batch Cbd=spec_draft_cpu_mask_batch Cd=spec_draft_cpu_mask Cr=cpu_range
Crb=cpu_range_batch Crbd=spec_draft_cpu_range_batch Crd=spec_draft_cpu_range a=alias ag=agent
b=batch_size bf=binary_file bs=backend_sampling c=ctx_size cb=cont_batching cl=cache_list
cmoe=cpu_moe cmoed=spec_draft_cpu_moe cms=checkpoint_min_step cnv=cnv co=color cram=cache_ram
ctk=cache_type_k ctkd=spec_draft_type_k ctv=cache_type_v ctvd=spec_draft_type_v
ctxcp=ctx_checkpoints dev=device devd=spec_draft_device dp=data_parallel_size dr=docker_repo
dt=defrag_thold e=escape ep=enable_expert_parallel f=file fa=flash_attn fit=fit fitc=fit_ctx
fitp=fit_print fitt=fit_target gan=grp_attn_n gaw=grp_attn_w hf=hf_repo hfd=spec_draft_hf
hff=hf_file hfr=hf_repo hfrd=spec_draft_hf hft=hf_token i=interactive if=interactive_first
j=json_schema jf=json_schema_file kvo=kv_offload kvu=kv_unified l=logit_bias
lcd=lookup_cache_dynamic lcs=lookup_cache_static lm=load_mode lv=log_verbosity lzm=lazy_mode
m=model_path md=model_draft mg=main_gpu mli=multiline_input mm=mmproj mmdev=mmproj_device
mmu=mmproj_url mu=model_url n=n_predict ncffn=n_cpu_ffn ncmoe=n_cpu_moe
ncmoed=spec_draft_n_cpu_moe ngl=n_gpu_layers ngld=spec_draft_ngl nkvo=no_kv_offload no-ag=no_agent
no-cnv=no_conversation no-kvu=no_kv_unified nocb=no_cont_batching np=parallel nr=no_repack
o=output ot=override_tensor otd=spec_draft_override_tensor p=prompt_text pp=pipeline_parallel_size
ptc=print_token_count q=quantization r=reverse_prompt rea=reasoning s=seed sm=split_mode
sp=special sps=slot_prompt_similarity st=single_turn sys=system_prompt sysf=system_prompt_file
t=threads tb=threads_batch tbd=spec_draft_threads_batch td=spec_draft_threads to=timeout
tp=tensor_parallel_size ts=tensor_split ub=ubatch_size v=verbose
"""

SHORT: Final[dict[str, str]] = {
    f"-{short}": name for short, _, name in [pair.partition("=") for pair in _SHORT.split()]
}
"""Full names of the short options of vLLM's and llama.cpp's commands, by option, like `-ngl`."""
