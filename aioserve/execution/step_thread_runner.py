"""Runs steps of a decoder in one step thread, on whatever backend the decoder has."""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import torch

from aioserve.drafting.drafter import Drafter
from aioserve.execution.cpu_worker import CpuWorker
from aioserve.execution.host import Host
from aioserve.execution.prefault import Prefault
from aioserve.execution.speculation.branches import ScratchPages
from aioserve.execution.speculation.resolver import StepFollower
from aioserve.execution.speculation.verification import Verification
from aioserve.execution.step_thread import StepThread
from aioserve.models.decoder import Decoder
from aioserve.ops import KVCache
from aioserve.sampling.masks import LateMasks
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.plan import StepPlan

__all__ = ["StepThreadRunner"]


class StepThreadRunner:
    """The home of a host and its worker in one thread: the host resolves a step, and the worker
    computes it, when the step before is known. Made on the event loop that will await its steps.
    """

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        *,
        num_slots: int,
        name: str,
        host_cache: KVCache | None = None,
        prefault_pages: int = 0,
        processors: Sequence[Callable[[str], Any]] = (),
        follower: StepFollower | None = None,
        verification: Verification | None = None,
        max_branches: int = 0,
        scratch_pages: int = 0,
    ) -> None:
        """`prefault_pages`: of `cache`, as many past those in use have their memory before they
        are needed, from times when no step runs. `host_cache` and `verification` are as `CpuWorker`
        has them, `processors`, `follower` and `max_branches` as `Host`, whose scratch pages are the
        last `scratch_pages` of `cache`."""
        pool = cache.num_pages - scratch_pages
        prefault = Prefault(cache, prefault_pages, num_pages=pool)
        self._host = Host(
            cache.page_size,
            num_slots,
            cache.layout.num_groups,
            processors,
            follower=follower,
            max_branches=max_branches,
            scratch=ScratchPages(pool, cache.num_pages),
        )
        self._thread: StepThread[StepOutcome] = StepThread(
            f"aioserve-{name}", torch.inference_mode, idle=prefault.advance
        )
        self._worker = CpuWorker(
            model,
            cache,
            host_cache,
            num_slots=num_slots,
            prefault=prefault,
            verification=verification,
            leave_python=self._thread.tell_loop,
        )

    @property
    def wake_delays_seconds(self) -> Sequence[float]:
        return self._thread.wake_delays_seconds

    def launch(self, plan: StepPlan, masks: LateMasks | None = None) -> Awaitable[StepOutcome]:
        """Its arrays are made here, while the step before is computed."""
        read = self._host.read(plan, masks)
        return self._thread.submit(functools.partial(self._host.step, plan, read, self._worker))

    def take_drafter(self, drafter: Drafter) -> None:
        """Let a drafter make the draft tokens that plans ask for. To be called before the first."""
        self._host.take_drafter(drafter, time.perf_counter)

    async def aclose(self) -> None:
        await self._thread.aclose()
