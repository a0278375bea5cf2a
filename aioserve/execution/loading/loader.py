"""Loads models off the event loop: files are read, and weights packed, while torch is imported.

Imports no torch itself; `Target.placement` does that in a thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from aioserve.config import EngineConfig
from aioserve.drafting.loaded import LoadedDrafter
from aioserve.execution.imports import map_torch
from aioserve.execution.loading.read import ModelReader, check_kernels
from aioserve.execution.loading.target import Target, target_of
from aioserve.execution.runner import LoadedModel
from aioserve.execution.speculation.drafts.read import AnyReadDraft
from aioserve.models.known import BUNDLED_KINDS, KnownKinds
from aioserve.models.reading import ReadWeights, ReportBytes

__all__ = ["load"]

T = TypeVar("T")
ReportGraphs = Callable[[int, int], None]


async def load(
    model: str,
    config: EngineConfig,
    *,
    num_slots: int,
    progress: ReportBytes | None = None,
    capture_progress: ReportGraphs | None = None,
    drafter: LoadedDrafter | None = None,
    known: KnownKinds = BUNDLED_KINDS,
) -> LoadedModel:
    """Load a model off the event loop.
    `known`: the kinds of models that can be read.

    - `progress`: called in a loading thread with bytes done and total bytes.
    - `capture_progress`: called on the loop with CUDA graphs done, from 0 on, and total graphs.
    - `drafter`: has a model of its own, loaded beside the other.

    Exceptions of the callbacks end the loading. Raises `ModelError` for a model that can't be
    loaded, and `ConfigError` for options that it, or this machine, can't meet.
    """
    return await _Loading(model, config, progress, capture_progress, drafter, known).load(num_slots)


@dataclass
class _Loading:
    model: str
    config: EngineConfig
    progress: ReportBytes | None
    capture_progress: ReportGraphs | None
    drafter: LoadedDrafter | None
    known: KnownKinds
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """Time of each part, by the clock; parts run at the same time."""

    async def load(self, num_slots: int) -> LoadedModel:
        target, reader = await asyncio.to_thread(self._find)
        drafter = self.drafter
        if drafter is not None:  # before anything large is read
            if self.config.speculation is not None:
                target.check(self.config.speculation)
            await asyncio.to_thread(reader.drafts.check_path, drafter)
        await self._begin("imports", map_torch)  # alone: it blocks what starts threads
        weights = self._begin("weights", lambda: reader.read_weights(self.progress))
        draft: asyncio.Future[AnyReadDraft] | None = None
        if drafter is not None:
            draft = self._begin("draft_weights", lambda: reader.drafts.read(drafter))
        try:
            return await self._load(target, reader, weights, draft, num_slots)
        finally:
            reader.stop()
            await _ended([weights] if draft is None else [weights, draft])

    async def _load(
        self,
        target: Target,
        reader: ModelReader,
        weights: asyncio.Future[ReadWeights],
        draft: asyncio.Future[AnyReadDraft] | None,
        num_slots: int,
    ) -> LoadedModel:
        reading = self._begin("tokenizer", reader.read_text)
        importing = self._begin("imports", target.placement)
        # All of them end before an error is raised: nothing goes on after a failed load.
        parts: list[asyncio.Future[Any]] = [reading, asyncio.shield(weights), importing]
        if draft is not None:
            parts.append(asyncio.shield(draft))
        await asyncio.gather(*parts, return_exceptions=True)
        text, read, placement = reading.result(), weights.result(), importing.result()
        if text.end_ids is not None:
            read.config = replace(read.config, eos_token_ids=text.end_ids)
        config, found, kept = self.config, None if draft is None else draft.result(), ()
        if found is not None:
            found.check(read.config, text.tokenizer)
            kept = found.kept_layers(read.config)
        decoder = await self._begin("decoder", lambda: placement.load(read, config, kept))
        placed_draft = None
        if found is not None:
            placed_draft = await self._begin(
                "draft_decoder", lambda: placement.load_draft(found, decoder, config)
            )
        from aioserve.execution.loading.place import place_model  # imported by the placement

        return await place_model(
            self.model,
            decoder,
            text,
            config,
            placement,
            num_slots=num_slots,
            seconds=self.seconds,
            draft=placed_draft,
            progress=self.capture_progress,
        )

    def _find(self) -> tuple[Target, ModelReader]:
        check_kernels()
        target = target_of(self.config)
        return target, ModelReader(self.model, self.config, target.formats, self.known)

    def _begin(self, part: str, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run `work` in a thread, timed."""

        def timed() -> T:
            began = time.perf_counter()
            result = work()
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - began
            return result

        return asyncio.ensure_future(asyncio.to_thread(timed))


async def _ended(futures: Sequence[asyncio.Future[Any]]) -> None:
    """Wait for abandoned futures to end."""
    await asyncio.wait(futures)
    for future in futures:
        if not future.cancelled():
            future.exception()  # mark as retrieved
