"""Other engines that serve the same work as aioserve: the same token ids, shape and lengths.

Each is used as its makers' own scripts use it for requests that come at once, with its own
defaults. Prefix caching, if an engine has it, stays on. One request runs first, for everything that
is compiled and captured when it is first needed.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from gpu_workloads import Request

__all__ = ["PEERS", "MissingPeerError", "Setup", "measure_peer"]


class MissingPeerError(Exception):
    """The engine is installed but lacks something that is needed here; the message says what."""


class Setup(NamedTuple):
    """Needs of the work that a peer is started for."""

    path: Path
    """Directory of the model."""
    dtype: str
    device: str
    max_model_len: int
    longest_prompt: int
    longest_answer: int
    most_requests: int


class Peer(Protocol):
    """Started engine."""

    facts: dict[str, str]
    """Settings that it has chosen to compute with, as far as it reports them."""

    def run(self, requests: Sequence[Request]) -> list[int]:
        """Return the lengths of the answers, when all have ended."""
        ...

    def close(self) -> None: ...


def measure_peer(
    name: str,
    setup: Setup,
    workloads: dict[str, list[list[Request]]],
    warm_up: list[Request],
) -> dict[str, Any]:
    """Return tokens a second of each workload, for the best of its runs.

    Raises `MissingPeerError`, and RuntimeError for an answer of another length than it should have.
    """
    began = time.perf_counter()
    peer = PEERS[name](setup)
    try:
        check(warm_up, peer.run(warm_up))
        result: dict[str, Any] = {
            "version": metadata.version(name),
            **peer.facts,
            "start_seconds": time.perf_counter() - began,
            "workloads": {},
        }
        for workload, runs in workloads.items():
            seconds = [timed(peer, requests) for requests in runs]
            counts = [sum(request.output_tokens for request in requests) for requests in runs]
            rates = [count / took for count, took in zip(counts, seconds, strict=True)]
            result["workloads"][workload] = {
                "seconds": seconds,
                "output_tokens": counts,
                "output_tokens_per_second": max(rates),
            }
    finally:
        peer.close()
    return result


def timed(peer: Peer, requests: Sequence[Request]) -> float:
    began = time.perf_counter()
    lengths = peer.run(requests)
    seconds = time.perf_counter() - began
    check(requests, lengths)
    return seconds


def check(requests: Sequence[Request], lengths: Sequence[int]) -> None:
    expected = [request.output_tokens for request in requests]
    if list(lengths) != expected:
        raise RuntimeError(f"answers have {list(lengths)} tokens instead of {expected}")


class Transformers:
    """Continuous batching of transformers: `ContinuousBatchingManager`, as in `generate_batch`."""

    def __init__(self, setup: Setup) -> None:
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            setup.path, dtype=getattr(torch, setup.dtype), attn_implementation="sdpa"
        )
        self._model = self._model.to(setup.device).eval()
        config: Any = transformers.GenerationConfig(
            max_new_tokens=setup.longest_answer, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        if not hasattr(self._model, "continuous_batching_context_manager"):
            raise MissingPeerError(
                f"transformers {transformers.__version__} has no continuous batching manager"
            )
        manager_of: Any = self._model.continuous_batching_context_manager
        hints: dict[str, Any] = {}
        if "workload_hints" in inspect.signature(manager_of).parameters:
            from transformers.generation.continuous_batching.utils import WorkloadHints

            # As `generate_batch` gives them.
            hints["workload_hints"] = WorkloadHints(
                max_prompt_length=setup.longest_prompt,
                max_generated_length=setup.longest_answer,
                num_requests=setup.most_requests,
            )
        self._running: Any = manager_of(generation_config=config, **hints)
        self._manager: Any = self._running.__enter__()
        self.facts: dict[str, str] = {"attention": self._model.config._attn_implementation}

    def run(self, requests: Sequence[Request]) -> list[int]:
        manager = self._manager
        ids = [
            manager.add_request(
                request.prompt, max_new_tokens=request.output_tokens, eos_token_id=-1
            )
            for request in requests
        ]
        lengths: dict[str, int] = {}
        while len(lengths) < len(ids):
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("transformers' generation thread has ended")
            elif result.error is not None:
                raise RuntimeError(f"transformers: {result.error}")
            elif result.is_finished():
                lengths[result.request_id] = len(result.generated_tokens)
        return [lengths[request_id] for request_id in ids]

    def close(self) -> None:
        self._running.__exit__(None, None, None)


class Vllm:
    def __init__(self, setup: Setup) -> None:
        from vllm import LLM  # pyright: ignore[reportMissingImports]

        self.facts: dict[str, str] = {}
        self._llm: Any = LLM(
            model=str(setup.path), dtype=setup.dtype, max_model_len=setup.max_model_len
        )

    def run(self, requests: Sequence[Request]) -> list[int]:
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

        outputs = self._llm.generate(
            [{"prompt_token_ids": request.prompt} for request in requests],
            [
                SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=request.output_tokens)
                for request in requests
            ],
            use_tqdm=False,
        )
        return [len(output.outputs[0].token_ids) for output in outputs]

    def close(self) -> None:
        del self._llm


class Sglang:
    def __init__(self, setup: Setup) -> None:
        import sglang  # pyright: ignore[reportMissingImports]

        self.facts: dict[str, str] = {}
        self._engine: Any = sglang.Engine(
            model_path=str(setup.path),
            dtype=setup.dtype,
            context_length=setup.max_model_len,
            log_level="error",
        )

    def run(self, requests: Sequence[Request]) -> list[int]:
        outputs = self._engine.generate(
            input_ids=[request.prompt for request in requests],
            sampling_params=[
                {
                    "temperature": 0.0,
                    "ignore_eos": True,
                    "max_new_tokens": request.output_tokens,
                }
                for request in requests
            ],
        )
        return [output["meta_info"]["completion_tokens"] for output in outputs]

    def close(self) -> None:
        self._engine.shutdown()


PEERS: dict[str, Callable[[Setup], Peer]] = {
    "transformers": Transformers,
    "vllm": Vllm,
    "sglang": Sglang,
}
