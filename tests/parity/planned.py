"""Driver of a real model by step plans, through the CPU's runner, which returns the logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch

from aioserve.execution.cpu_worker import CpuWorker
from aioserve.execution.host import Host
from aioserve.execution.step_thread_runner import StepThreadRunner
from aioserve.models.decoder import Decoder
from aioserve.ops import Batch, Drawn, KVCache, LogitEdits, SampleRows
from aioserve.paging.layout import kv_layout
from aioserve.request import SamplingParams
from aioserve.steps.pages import PageCopy
from aioserve.steps.plan import SampleRow, SlotStart, WorkItem
from tests.placed import placed_item, placed_plan

GREEDY = SamplingParams(temperature=0.0)
NUM_SLOTS = 32
EVERY_SLOT = tuple(SlotStart(slot=slot, params=GREEDY, seed=0) for slot in range(NUM_SLOTS))


class PlannedRun:
    """Runner over KV caches that begin as NaN, so that reading unwritten memory shows.

    Their pages have one group, as items name them."""

    def __init__(
        self, decoder: Decoder, page_size: int, *, num_pages: int = 256, num_host_pages: int = 256
    ) -> None:
        self.page_size = page_size
        layers = decoder.config.kv_layers(decoder.kv_format)
        decoder.layout = kv_layout(layers, decoder.max_model_len, grouped=False)
        self.cache = _poisoned(decoder, num_pages, page_size)
        self.host_cache = _poisoned(decoder, num_host_pages, page_size)
        self._model = _Recorder(decoder)
        worker = CpuWorker(cast(Any, self._model), self.cache, self.host_cache, num_slots=NUM_SLOTS)
        self._runner = StepThreadRunner(Host(page_size, NUM_SLOTS, 1), worker, name="parity")
        self._step = 0

    async def __aenter__(self) -> PlannedRun:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._runner.aclose()

    async def step(
        self, items: Sequence[WorkItem], copies: Sequence[PageCopy] = ()
    ) -> torch.Tensor:
        """Run one step; return the logits of each row, float32 [rows, vocab]."""
        self._step += 1
        started = () if self._step > 1 else EVERY_SLOT
        plan = placed_plan(
            step=self._step, started_slots=started, items=tuple(items), copies=tuple(copies)
        )
        await self._runner.launch(plan)
        return self._model.logits


def item(
    slot: int,
    start: int,
    token_ids: Sequence[int],
    pages: Sequence[int],
    *,
    samples: Sequence[int] | None = None,
    dropped: int = 0,
) -> WorkItem:
    """Make an item that computes `token_ids` from position `start`, and samples for `samples`.

    `samples` are slots, by default its own. `dropped` is the number of earlier entries that are no
    longer in the pages."""
    return placed_item(
        sequence_id=slot,
        slot=slot,
        start=start,
        index=start - dropped,
        count=len(token_ids),
        token_ids=np.array(token_ids, np.int32),
        page_ids=np.array(pages, np.int32),
        rows=tuple(
            SampleRow(offset=len(token_ids) - 1, slot=sample)
            for sample in ((slot,) if samples is None else samples)
        ),
    )


class _Recorder:
    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.backend = decoder.backend
        self.logits = torch.empty(0)

    def make_room(self, num_tokens: int) -> None:
        self._decoder.make_room(num_tokens)

    def draw(
        self,
        batch: Batch,
        kv: KVCache,
        rows: SampleRows,
        last_tokens: torch.Tensor,
        edits: LogitEdits | None,
    ) -> Drawn:
        if edits is not None:
            raise ValueError("nothing is edited here")
        self.logits = self._decoder.forward(batch, kv)
        return self.backend.draw(self.logits, rows, last_tokens)


def _poisoned(decoder: Decoder, num_pages: int, page_size: int) -> KVCache:
    cache = decoder.new_cache(num_pages, page_size)
    cache.storage.fill_(float("nan"))
    return cache
