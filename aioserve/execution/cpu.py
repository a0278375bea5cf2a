"""Runs steps of a decoder on the CPU, in one step thread."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

import torch

from aioserve.execution.batch import build_batch, build_copies
from aioserve.execution.plan import SlotStart, StepOutcome, StepPlan
from aioserve.execution.step_thread import StepThread
from aioserve.models.decoder import Decoder
from aioserve.ops.kv_cache import KVCache
from aioserve.sampling.sampler import sample

__all__ = ["CpuRunner"]


class CpuRunner:
    """Owns the model's KV storage. Made on the event loop that will await its steps.

    `host_cache` is where pages are copied to and from "the host": here it is the same memory.
    """

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        *,
        num_slots: int,
        name: str,
        host_cache: KVCache | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._caches = (cache,) if host_cache is None else (cache, host_cache)
        self._slots: dict[int, SlotStart] = {}
        # Token ids stay here between steps: the next step may be launched before the host has
        # seen them. One writer and one reader, both on the step thread.
        self._last_tokens = torch.zeros(num_slots, dtype=torch.int64)
        self._thread: StepThread[StepOutcome] = StepThread(f"aioserve-{name}")

    @property
    def wake_delays_seconds(self) -> Sequence[float]:
        return self._thread.wake_delays_seconds

    def launch(self, plan: StepPlan) -> Awaitable[StepOutcome]:
        return self._thread.submit(lambda: self._step(plan))

    async def aclose(self) -> None:
        await self._thread.aclose()

    @torch.inference_mode()
    def _step(self, plan: StepPlan) -> StepOutcome:
        for slot in plan.ended_slots:
            self._slots.pop(slot, None)
        for start in plan.started_slots:
            self._slots[start.slot] = start
        if plan.copies:
            self._model.ops.copy_pages(self._caches, build_copies(plan.copies))
        if not plan.items:
            return StepOutcome(step=plan.step, token_ids=())
        batch = build_batch(plan, self._cache.page_size, self._last_tokens)
        logits = self._model.forward(batch, self._cache)
        if not plan.num_rows:
            return StepOutcome(step=plan.step, token_ids=())
        rows = [(item.start + row.offset + 1, row.slot) for item in plan.items for row in item.rows]
        starts = [self._slots[slot] for _, slot in rows]
        result = sample(
            logits,
            [start.params for start in starts],
            [start.seed for start in starts],
            [position for position, _ in rows],
        )
        self._last_tokens[torch.tensor([slot for _, slot in rows])] = result.token_ids
        return StepOutcome(
            step=plan.step,
            token_ids=tuple(result.token_ids.tolist()),
            row_errors=dict(result.row_errors),
        )
