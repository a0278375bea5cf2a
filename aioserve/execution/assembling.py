"""What was read becomes a `LoadedModel`: the decoder, KV storage and the thread of its steps.

Imports torch: `imports` does that off the event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import asdict

from aioserve.arguments import counted
from aioserve.config import EngineConfig
from aioserve.drafting.drafter import Drafter
from aioserve.errors import ConfigError
from aioserve.execution.branches import scratch_pages
from aioserve.execution.drafts.placing import Draft, draft_of, rejects
from aioserve.execution.process_memory import available_memory_bytes
from aioserve.execution.reserve import reserve
from aioserve.execution.runner import LoadedModel, ModelLimits, Runner, Text
from aioserve.execution.step_thread_runner import StepThreadRunner
from aioserve.execution.verification import RejectionSampling
from aioserve.execution.warm_up import warm_up
from aioserve.kv.pages import pages_for, pages_of_engine, pages_of_sequence, tokens_of_sequence
from aioserve.models.decoder import Decoder
from aioserve.models.loader import make_decoder
from aioserve.models.reading import ReadWeights
from aioserve.ops import KVCache, backend_named

__all__ = [
    "KVStorage",
    "decoder_of",
    "described",
    "draft_of",
    "first_steps",
    "host_pages",
    "loaded_model",
    "sizes",
    "wanted_model_len",
]

PREFAULT_STEPS = 4
"""Steps of the most tokens whose KV memory is there before they come, ..."""
PREFAULT_BYTES = 2**30
"""... as far as it takes no more than this; the last piece is a whole one."""


def decoder_of(
    weights: ReadWeights, config: EngineConfig, kept_layers: Sequence[int] = ()
) -> Decoder:
    """The decoder on the backend that is asked for. Uses up the weights."""
    backend, program = backend_named(config.backend), config.step_program
    return make_decoder(weights, backend, use_program=program, kept_layers=kept_layers)


async def loaded_model(
    name: str,
    decoder: Decoder,
    text: Text,
    config: EngineConfig,
    *,
    num_slots: int,
    seconds: dict[str, float],
    draft: Draft | None = None,
) -> LoadedModel:
    """Ready to serve; made on the event loop that will. `seconds`: what each part of loading took.
    `draft` is what its drafter guesses by.

    Raises `ConfigError` for options that the model, or this machine, can't meet.
    """
    max_branches, scratch = _branches(decoder, config)
    of_branches = ""
    if scratch:
        of_branches = f"and {counted(scratch, 'page')} for max_branches={max_branches}"
    max_model_len, num_pages = sizes(
        decoder,
        config,
        lambda: _room_bytes(decoder, config, draft, scratch),
        beside_bytes=0 if draft is None else draft.bytes_per_page,
        taken=of_branches,
    )
    page_size = config.page_size
    cache = reserve(
        "num_pages",
        num_pages,
        lambda: decoder.new_cache(num_pages + scratch, page_size),
        beside=of_branches,
    )
    follower = None
    if draft is not None:
        follower = draft.placed(num_pages, num_slots=num_slots)
        draft.guess_by(follower)
    verification = None
    if follower is not None and rejects(config):
        verification = RejectionSampling(decoder.backend, follower)
    pages = KVStorage(num_pages, cache, host_pages(decoder, config), scratch)
    processors: list[Callable[[str], Any]] = []
    runner = StepThreadRunner(
        decoder,
        pages.cache,
        host_cache=pages.host_cache,
        num_slots=num_slots,
        name=name.rstrip("/").rsplit("/", 1)[-1],
        prefault_pages=_prefault_pages(pages.cache, config),
        processors=processors,
        follower=follower,
        verification=verification,
        max_branches=max_branches,
        scratch_pages=scratch,
    )
    try:
        await first_steps(runner, pages, config, max_model_len, seconds)
    except BaseException:
        await runner.aclose()
        raise
    return described(
        name,
        decoder,
        runner,
        text,
        pages,
        max_model_len=max_model_len,
        processors=processors,
        seconds=seconds,
        take_drafter=runner.take_drafter,
        facts=None if follower is None else {"draft": follower.facts},
        max_branches=max_branches,
    )


async def first_steps(
    runner: Runner,
    pages: KVStorage,
    config: EngineConfig,
    max_model_len: int,
    seconds: dict[str, float],
) -> None:
    """`warm_up`, timed. Raises what a step raises."""
    began = time.perf_counter()
    await warm_up(
        runner,
        num_pages=pages.num_pages,
        page_size=pages.cache.page_size,
        num_groups=pages.cache.layout.num_groups,
        max_model_len=max_model_len,
        max_step_tokens=config.max_num_batched_tokens,
    )
    seconds["warm_up"] = time.perf_counter() - began


class KVStorage(NamedTuple):
    """KV pages of a model."""

    num_pages: int
    """Pages that requests may have."""
    cache: KVCache
    host_cache: KVCache | None
    scratch_pages: int = 0
    """Pages of `cache` beside those, which branches of guesses are computed in."""


def described(
    name: str,
    decoder: Decoder,
    runner: Runner,
    text: Text,
    pages: KVStorage,
    *,
    max_model_len: int,
    processors: list[Callable[[str], Any]],
    seconds: dict[str, float],
    take_drafter: Callable[[Drafter], None] | None = None,
    facts: Mapping[str, Any] | None = None,
    max_branches: int = 0,
) -> LoadedModel:
    """A model that is ready on some device, with what the engine wants to know of it. `facts` are
    more of them for `Engine.dump()`."""
    host_cache = pages.host_cache
    scratch_bytes = pages.scratch_pages * pages.cache.bytes_per_page
    return LoadedModel(
        name=name,
        runner=runner,
        limits=ModelLimits(
            vocab_size=decoder.config.vocab_size,
            max_model_len=max_model_len,
            num_pages=pages.num_pages,
            eos_token_ids=frozenset(decoder.config.eos_token_ids),
            num_window_groups=decoder.layout.num_window_groups,
            window=decoder.layout.window,
        ),
        defaults=decoder.config.generation.sampling_params(),
        says_sampling=decoder.config.generation.is_said,
        tokenizer=text.tokenizer,
        chat_template=text.chat_template,
        description={
            "architecture": decoder.config.architecture,
            "backend": decoder.backend.name,
            "device": str(decoder.backend.device),
            "step_program": decoder.program is not None,
            "dtype": str(decoder.dtype).removeprefix("torch."),
            "kv_dtype": str(decoder.kv_dtype).removeprefix("torch."),
            "weight_bytes": decoder.weight_memory.by_format(),
            "weights": [asdict(one) for one in decoder.weight_memory.formats],
            "kv_cache_bytes": pages.cache.storage.nbytes - scratch_bytes,
            "scratch_kv_cache_bytes": scratch_bytes,
            "host_kv_cache_bytes": 0 if host_cache is None else host_cache.storage.nbytes,
            "loading_seconds": dict(seconds),
            **(facts or {}),
        },
        why_no_tokenizer=text.why_no_tokenizer,
        processors=processors,
        take_drafter=take_drafter,
        max_branches=max_branches,
        generates=decoder.config.has_head,
        retrieval=text.retrieval,
        reranker=text.reranker,
    )


def host_pages(decoder: Decoder, config: EngineConfig) -> KVCache | None:
    """KV pages of the host, if any are wanted."""
    if not config.num_host_pages:
        return None
    num_pages, size = config.num_host_pages, config.page_size
    return reserve(
        "num_host_pages", num_pages, lambda: decoder.new_cache(num_pages, size, on_host=True)
    )


def _prefault_pages(cache: KVCache, config: EngineConfig) -> int:
    steps = pages_for(PREFAULT_STEPS * config.max_num_batched_tokens, config.page_size)
    return min(steps, PREFAULT_BYTES // cache.bytes_per_page)


def wanted_model_len(decoder: Decoder, config: EngineConfig) -> int:
    """What is asked for, or all that the model has. Raises `ConfigError` for more than that."""
    limit = decoder.config.max_position_embeddings
    wanted = config.max_model_len or limit
    if wanted > limit:
        raise ConfigError(f"max_model_len must be at most the model's {limit}, got {wanted}")
    return wanted


def sizes(
    decoder: Decoder,
    config: EngineConfig,
    room_bytes: Callable[[], int],
    *,
    beside_bytes: int = 0,
    taken: str = "",
) -> tuple[int, int]:
    """`max_model_len` and the number of pages that go together. `room_bytes` says what the KV cache
    may take, where the number of its pages isn't given, and `taken` what else was taken from that;
    beside each page something else takes `beside_bytes`."""
    page_size, layout = config.page_size, decoder.layout
    wanted_len = wanted_model_len(decoder, config)
    num_pages = config.num_pages
    if num_pages is None:
        one = decoder.kv_shape(1, page_size).bytes_per_page + beside_bytes
        room = room_bytes()
        most = pages_of_engine(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            wanted_len,
            page_size,
            layout.num_window_groups,
            layout.window,
        )
        num_pages = min(most, room // one)
        if num_pages < 1:
            raise ConfigError(
                f"memory_utilization={config.memory_utilization} and "
                f"num_host_pages={config.num_host_pages}{taken and f' {taken}'} leave "
                f"{max(room, 0)} bytes for the KV cache, and one page takes {one}"
            )
    holds = tokens_of_sequence(num_pages, page_size, layout.num_window_groups, layout.window)
    if min(holds, wanted_len) < 2 <= wanted_len:
        least = pages_of_sequence(2, page_size, layout.num_window_groups, layout.window)
        raise ConfigError(
            f"num_pages must be at least {least} with page_size={page_size} and "
            f"{counted(layout.num_groups, 'group')} of layers, got {num_pages}: a request has two "
            "tokens"
        )
    if config.max_model_len is not None and holds < wanted_len:
        raise ConfigError(
            f"max_model_len={wanted_len} doesn't fit the KV cache: "
            f"{counted(num_pages, 'page')} of {counted(page_size, 'token')} hold {holds}"
        )
    return min(wanted_len, holds), num_pages


def _branches(decoder: Decoder, config: EngineConfig) -> tuple[int, int]:
    """Most paths of guesses beside the first one of a sequence, and pages to compute them in."""
    if (speculation := config.speculation) is None:
        return 0, 0
    return speculation.max_branches, scratch_pages(
        speculation.max_branches,
        speculation.max_tokens,
        config.max_num_seqs,
        config.page_size,
        decoder.layout.num_groups,
    )


def _room_bytes(
    decoder: Decoder, config: EngineConfig, draft: Draft | None, scratch_pages: int
) -> int:
    """Host pages are memory of this machine as well."""
    budget = int(available_memory_bytes() * config.memory_utilization)
    one = decoder.kv_shape(1, config.page_size).bytes_per_page
    budget -= scratch_pages * one
    return budget - config.num_host_pages * (one + (draft.bytes_per_host_page if draft else 0))
