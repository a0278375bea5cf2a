"""Makes a `LoadedModel` of what was read: decoder, KV pages, drafter and runner, on any device.

Imports torch; `imports` makes that happen off the event loop. It knows no device itself; a
`Placement` does.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from msgspec.structs import asdict, replace

from aioserve.arguments import counted
from aioserve.capacity.models import ModelShape
from aioserve.config import EngineConfig
from aioserve.drafting.drafter import Drafter
from aioserve.errors import ConfigError
from aioserve.execution.reserve import reserve
from aioserve.execution.runner import LoadedModel, ModelLimits, Runner, Text
from aioserve.execution.speculation.drafts.computed_drafter import ComputedDrafter
from aioserve.execution.speculation.drafts.placing import Draft
from aioserve.execution.speculation.drafts.read import AnyReadDraft
from aioserve.execution.warm_up import warm_up
from aioserve.execution.worker import Worker
from aioserve.models.decoder import Decoder
from aioserve.models.reading import ReadWeights
from aioserve.ops import KVCache
from aioserve.paging.pages import pages_of_engine, pages_of_sequence, tokens_of_sequence

__all__ = [
    "Allocated",
    "Placement",
    "RunnerOptions",
    "SparePages",
    "allocated",
    "place_model",
    "wanted_model_len",
]


class PlacedRunner(Runner, Protocol):
    """A runner that accepts a drafter."""

    def take_drafter(self, drafter: Drafter) -> None:
        """Let a drafter make the draft tokens that plans ask for. Call it before the first plan."""
        ...


AnyRunner = TypeVar("AnyRunner", bound=PlacedRunner)
AnyWorker = TypeVar("AnyWorker", bound=Worker)


class SparePages(NamedTuple):
    """KV pages that belong to no request."""

    count: int
    max_branches: int = 0
    """Most paths of draft tokens beside the first one of a sequence. They are computed in these
    pages."""

    @property
    def scratch(self) -> int:
        """Pages for branches."""
        return self.count if self.max_branches else 0

    def __str__(self) -> str:
        """Name the option that asks for them, as part of a message; "" if none does."""
        if not self.scratch:
            return ""
        return f"and {counted(self.scratch, 'page')} for max_branches={self.max_branches}"


@dataclass(frozen=True)
class Allocated:
    """A model with its memory."""

    decoder: Decoder
    max_model_len: int
    """Longest context that fits, in tokens."""
    num_pages: int
    """KV pages for requests."""
    spare: SparePages
    """Further pages of `cache`, after those."""
    cache: KVCache
    host_cache: KVCache | None
    drafter: ComputedDrafter | None
    """Drafter with the draft model or head and its pages."""


class RunnerOptions(NamedTuple):
    """Options of every runner."""

    num_slots: int
    name: str
    """Name of its threads."""
    processors: list[Callable[[str], Any]]
    """List of `LoadedModel.processors`, which the engine fills."""


class Placement(ABC, Generic[AnyWorker, AnyRunner]):
    """Places models on one device: the parts of loading that differ by device.

    A worker is made here: its weights are loaded, the memory left for pages is measured, pages are
    allocated, and then it is made. From there on its runner drives it.

    All methods are called in a thread, one after the other, except the result of `start_of`, and
    `begin`.
    """

    def within(self) -> AbstractContextManager[object]:
        """Make a context for `choose_kernels`, `measure` and everything that allocates."""
        return nullcontext()

    @abstractmethod
    def load(
        self, weights: ReadWeights, config: EngineConfig, kept_layers: Sequence[int] = ()
    ) -> Decoder:
        """Make the decoder, with its weights on the device. Uses up what was read.

        `kept_layers` are those of `Decoder`. Raises `ConfigError` if the weights don't fit.
        """

    @abstractmethod
    def load_draft(self, read: AnyReadDraft, target: Decoder, config: EngineConfig) -> Draft:
        """Make the draft of `target`, with its weights on the device; otherwise as `load`."""

    def choose_kernels(
        self, decoder: Decoder, config: EngineConfig, seconds: dict[str, float]
    ) -> Mapping[str, Any]:
        """Choose kernels for the model, before memory is measured. Returns facts for
        `Engine.dump()`."""
        return {}

    @abstractmethod
    def spare_pages(self, decoder: Decoder, config: EngineConfig) -> SparePages: ...

    @abstractmethod
    def measure(
        self, decoder: Decoder, config: EngineConfig, draft: Draft | None, num_slots: int
    ) -> int:
        """Return the bytes for KV pages of requests, with what the draft takes beside them."""

    @abstractmethod
    def new_cache(self, decoder: Decoder, config: EngineConfig, num_pages: int) -> KVCache:
        """Make `num_pages` KV pages, and the spare ones. Raises `ConfigError` if they don't fit."""

    @abstractmethod
    def place_draft(self, draft: Draft, num_pages: int, num_slots: int) -> ComputedDrafter:
        """Allocate the draft beside `num_pages` pages of requests, and give the drafter the result.

        Raises `ConfigError` if it doesn't fit.
        """

    @abstractmethod
    def worker_of(self, model: Allocated, config: EngineConfig, num_slots: int) -> AnyWorker:
        """Make the worker that computes steps with this memory."""

    @abstractmethod
    def start_of(
        self, worker: AnyWorker, model: Allocated, options: RunnerOptions
    ) -> Callable[[], AnyRunner]:
        """Return a function that makes the runner and starts its threads. It is called on the
        event loop."""

    async def begin(
        self,
        runner: AnyRunner,
        config: EngineConfig,
        seconds: dict[str, float],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        """Let the runner prepare for its first step; on the event loop.

        `progress` is called there with amounts done and in total.
        """
        return


async def place_model(
    name: str,
    decoder: Decoder,
    text: Text,
    config: EngineConfig,
    placement: Placement[Any, Any],
    *,
    num_slots: int,
    seconds: dict[str, float],
    draft: Draft | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LoadedModel:
    """Make a model that is ready to serve, on the event loop that will serve it.

    `seconds` gets the time of each part. `draft` is the draft model of its drafter, `progress` that
    of `Placement.begin`. Raises `ConfigError` for options that the model, or this machine, can't
    meet.
    """
    last_name = name.rstrip("/").rsplit("/", 1)[-1]
    options = RunnerOptions(num_slots, last_name, processors=[])

    def prepared() -> tuple[Allocated, dict[str, Any], Callable[[], PlacedRunner]]:
        with placement.within():
            facts = dict(placement.choose_kernels(decoder, config, seconds))
            began = time.perf_counter()
            model = allocated(placement, decoder, config, num_slots, draft)
            worker = placement.worker_of(model, config, num_slots)
            start = placement.start_of(worker, model, options)
            seconds["kv_cache"] = time.perf_counter() - began
        return model, facts, start

    preparing = asyncio.ensure_future(asyncio.to_thread(prepared))
    try:
        model, facts, start = await asyncio.shield(preparing)
    except asyncio.CancelledError:
        # The thread can't be cancelled, and the next load counts the memory that it takes.
        await asyncio.wait([preparing])
        preparing.exception()  # mark as retrieved
        raise
    if model.drafter is not None:
        facts["draft"] = model.drafter.facts
    runner = start()
    try:
        await placement.begin(runner, config, seconds, progress)
        await _take_first_steps(runner, model, config, seconds)
        return _described(name, model, runner, text, options.processors, seconds, facts)
    except BaseException:
        await runner.aclose()
        raise


def allocated(
    placement: Placement[Any, Any],
    decoder: Decoder,
    config: EngineConfig,
    num_slots: int,
    draft: Draft | None,
) -> Allocated:
    """Allocate memory for pages of the model and of its draft. Raises `ConfigError` if they
    don't fit."""
    spare = placement.spare_pages(decoder, config)
    max_model_len, num_pages = _sizes(
        decoder,
        config,
        lambda: placement.measure(decoder, config, draft, num_slots),
        beside_bytes=0 if draft is None else draft.bytes_per_page,
        taken=str(spare),
    )
    cache = placement.new_cache(decoder, config, num_pages)
    host_cache = _host_cache(decoder, config)
    drafter = None
    if draft is not None:
        drafter = placement.place_draft(draft, num_pages, num_slots)
    return Allocated(decoder, max_model_len, num_pages, spare, cache, host_cache, drafter)


async def _take_first_steps(
    runner: Runner, model: Allocated, config: EngineConfig, seconds: dict[str, float]
) -> None:
    """Run `warm_up`, timed. Raises what a step raises."""
    began = time.perf_counter()
    await warm_up(
        runner,
        num_pages=model.num_pages,
        page_size=model.cache.page_size,
        num_groups=model.cache.layout.num_groups,
        max_model_len=model.max_model_len,
        max_step_tokens=config.max_num_batched_tokens,
    )
    seconds["warm_up"] = time.perf_counter() - began


def _described(
    name: str,
    model: Allocated,
    runner: PlacedRunner,
    text: Text,
    processors: list[Callable[[str], Any]],
    seconds: Mapping[str, float],
    facts: Mapping[str, Any],
) -> LoadedModel:
    """Describe the model to the engine. `facts` are further ones for `Engine.dump()`."""
    decoder, host_cache = model.decoder, model.host_cache
    scratch_bytes = model.spare.scratch * model.cache.bytes_per_page
    return LoadedModel(
        name=name,
        runner=runner,
        limits=ModelLimits(
            vocab_size=decoder.config.vocab_size,
            max_model_len=model.max_model_len,
            num_pages=model.num_pages,
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
            "kv_dtype": decoder.kv_format.name,
            "weight_bytes": decoder.weight_memory.by_format(),
            "weights": [asdict(one) for one in decoder.weight_memory.formats],
            "kv_cache_bytes": model.cache.storage.nbytes - scratch_bytes,
            "scratch_kv_cache_bytes": scratch_bytes,
            "host_kv_cache_bytes": 0 if host_cache is None else host_cache.storage.nbytes,
            "loading_seconds": dict(seconds),
            **facts,
        },
        why_no_tokenizer=text.why_no_tokenizer,
        processors=processors,
        take_drafter=runner.take_drafter,
        max_branches=model.spare.max_branches,
        generates=decoder.config.has_head,
        retrieval=text.retrieval,
        reranker=text.reranker,
        shape=_shape_of(decoder),
    )


def _shape_of(decoder: Decoder) -> ModelShape:
    """Return the sizes of a decoder, with the bytes of weights and KV that it holds."""
    memory = decoder.weight_memory
    shape = ModelShape.of(decoder.config)
    shape = shape.with_weight_bytes(memory.step_bytes, memory.expert_bytes)
    return replace(shape, kv_format=decoder.kv_format)


def _host_cache(decoder: Decoder, config: EngineConfig) -> KVCache | None:
    """Allocate the KV pages of the host, if any are wanted."""
    if not config.num_host_pages:
        return None
    num_pages, size = config.num_host_pages, config.page_size
    return reserve(
        "num_host_pages", num_pages, lambda: decoder.new_cache(num_pages, size, on_host=True)
    )


def wanted_model_len(decoder: Decoder, config: EngineConfig) -> int:
    """Return the requested context length, or else the model's. Raises `ConfigError` if that is
    exceeded."""
    limit = decoder.config.max_position_embeddings
    wanted = config.max_model_len or limit
    if wanted > limit:
        raise ConfigError(f"max_model_len must be at most the model's {limit}, got {wanted}")
    return wanted


def _sizes(
    decoder: Decoder,
    config: EngineConfig,
    room_bytes: Callable[[], int],
    *,
    beside_bytes: int = 0,
    taken: str = "",
) -> tuple[int, int]:
    """Return `max_model_len`, and a number of pages that fits it.

    If the number isn't given, `room_bytes` returns the bytes for the KV cache, and `taken` names
    what else was taken from those. Each page takes `beside_bytes` more.
    """
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
