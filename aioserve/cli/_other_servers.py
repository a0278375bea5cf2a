"""What options of other servers and load generators are called here: a command line of vLLM, SGLang
or llama-server is answered with the equivalent, not with the option of the most similar name.
"""

from __future__ import annotations

import re

from aioserve.unsupported import ADAPTERS, DEVICES, not_there

__all__ = ["ANSWERS", "LOAD_ANSWERS", "answer_for"]

_ONE_DEVICE = f"a model runs on one device: {not_there(DEVICES)}"
_NO_ADAPTERS = not_there(ADAPTERS)
_DRAFTER = "it is --speculation DRAFTER: ngram, suffix, model:path=PATH or a head"
_MODEL_FIRST = "the model comes first, without an option"
_CHUNKS = "long prompts are always computed in chunks, of at most --max-num-batched-tokens"
_THREADS = "the environment variable AIOSERVE_NUM_THREADS says how many threads compute"

ANSWERS: dict[str, str] = {
    # vLLM
    "--enable-prefix-caching": "prefixes are cached unless --no-prefix-caching is given",
    "--gpu-memory-utilization": "it is --memory-utilization, of the memory that the weights leave",
    "--kv-cache-dtype": "the KV cache has the type of --dtype",
    "--kv-cache-memory-bytes": "it is --num-pages, in pages of --page-size tokens",
    "--num-gpu-blocks-override": "it is --num-pages",
    "--block-size": "it is --page-size",
    "--swap-space": "it is --num-host-pages, in pages",
    "--cpu-offload-gb": "weights can't be offloaded; KV pages can, to --num-host-pages",
    "--served-model-name": "it is --served-model-names",
    "--scheduling-policy": "it is --policy",
    "--enable-chunked-prefill": _CHUNKS,
    "--long-prefill-token-threshold": _CHUNKS,
    "--async-scheduling": "steps overlap with the host's work unless --no-overlap is given",
    "--enforce-eager": "it is --no-capture-graphs",
    "--cuda-graph-sizes": "it is --graph-sizes",
    "--attention-backend": "it is --attention",
    "--tool-call-parser": "it is --tool-parser",
    "--enable-auto-tool-choice": "tools are read where the chat template tells how the model calls "
    "them, or --tool-parser does",
    "--enable-reasoning": "reasoning is told apart unless --reasoning-parser none is given",
    "--max-logprobs": "it is --max-top-logprobs",
    "--ssl-certfile": "it is --tls-cert-file",
    "--ssl-keyfile": "it is --tls-key-file",
    "--disable-log-requests": "calls are logged without what they say; --access-log off logs none",
    "--no-enable-log-requests": "calls are logged without what they say; --access-log off logs "
    "none",
    "--disable-log-stats": "it is --no-metrics",
    "--trust-remote-code": "code that comes with a model is never run",
    "--task": "the same server generates, embeds and scores",
    "--runner": "the same server generates, embeds and scores",
    "--tensor-parallel-size": _ONE_DEVICE,
    "--pipeline-parallel-size": _ONE_DEVICE,
    "--data-parallel-size": _ONE_DEVICE,
    "--enable-expert-parallel": _ONE_DEVICE,
    "--distributed-executor-backend": _ONE_DEVICE,
    "--enable-lora": _NO_ADAPTERS,
    "--lora-modules": _NO_ADAPTERS,
    "--speculative-config": _DRAFTER,
    # SGLang
    "--model-path": _MODEL_FIRST,
    "--mem-fraction-static": "it is --memory-utilization, of the memory that the weights leave",
    "--context-length": "it is --max-model-len",
    "--max-running-requests": "it is --max-num-seqs",
    "--max-total-tokens": "it is --num-pages, in pages of --page-size tokens",
    "--chunked-prefill-size": _CHUNKS,
    "--schedule-policy": "it is --policy",
    "--disable-radix-cache": "it is --no-prefix-caching",
    "--disable-cuda-graph": "it is --no-capture-graphs",
    "--disable-overlap-schedule": "it is --no-overlap",
    "--tp": _ONE_DEVICE,
    "--tp-size": _ONE_DEVICE,
    "--dp": _ONE_DEVICE,
    "--dp-size": _ONE_DEVICE,
    "--speculative-algorithm": _DRAFTER,
    "--speculative-draft-model-path": "it is --speculation model:path=PATH",
    "--speculative-num-steps": "it is --speculation-max-tokens",
    "--speculative-num-draft-tokens": "it is --speculation-max-tokens",
    # llama-server
    "--ctx-size": "it is --max-model-len",
    "--parallel": "it is --max-num-seqs",
    "--batch-size": "it is --max-num-batched-tokens",
    "--threads": _THREADS,
    "--n-gpu-layers": "all layers are on one device, which --device names",
    "--model-draft": "it is --speculation model:path=PATH",
    "--draft-max": "it is --speculation-max-tokens",
    "--alias": "it is --served-model-names",
    "--jinja": "the model's chat template is always used; --chat-template names another",
    "--hf-repo": _MODEL_FIRST,
}
"""What to say of an option, with options of `aioserve serve`."""

_TRACE = (
    "a trace's file comes behind the URL, or --synthetic names a made-up workload; without either, "
    "prompts of --input-len tokens are drawn"
)
_PERCENTILES = (
    "all times have mean, p50, p90, p99 and max, and --requests writes those of each request"
)

LOAD_ANSWERS: dict[str, str] = {
    # vllm bench serve
    "--request-rate": "it is --rate",
    "--burstiness": "it is --arrivals gamma:CV, where CV is 1 by the square root of the burstiness",
    "--max-concurrency": "it is --concurrency",
    "--num-prompts": "it is --num-requests",
    "--random-input-len": "it is --input-len",
    "--random-output-len": "it is --output-len",
    "--random-prefix-len": "it is --shared-prefix-len, which is a part of --input-len",
    "--goodput": "it is --ttft-target-seconds and --tpot-target-seconds, in seconds",
    "--base-url": "the server's URL comes first; --endpoint says what it is asked for",
    "--endpoint-type": "it is --endpoint",
    "--dataset-name": _TRACE,
    "--dataset-path": _TRACE,
    "--percentile-metrics": _PERCENTILES,
    "--metric-percentiles": _PERCENTILES,
    "--save-result": "it is --json FILE",
    "--save-detailed": "it is --requests FILE",
    "--result-filename": "it is --json FILE",
}
"""What to say of an option, with options of `aioserve bench serve`."""

_OPTION = re.compile(r"--[a-z][a-z-]*")
_NO = "--no-"


def answer_for(option: str, known: set[str]) -> str | None:
    """What is said of `option`; None where it is of no other server, or the command has not all the
    options that would help. `known` are its options, with underscores and without hyphens before
    them."""
    word = option.replace("_", "-")
    answer = ANSWERS.get(word) or LOAD_ANSWERS.get(word)
    if answer is None:
        return None
    named = {one.removeprefix(_NO).removeprefix("--") for one in _OPTION.findall(answer)}
    if not named <= {name.replace("_", "-") for name in known}:
        return None
    return f"{option} isn't an option here: {answer}"
