"""The home of a host and a worker that computes at once: one step thread."""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import torch

from aioserve.drafting.drafter import Drafter
from aioserve.execution.host import Host
from aioserve.execution.step_thread import StepThread
from aioserve.execution.worker import Worker
from aioserve.sampling.masks import LateMasks
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.plan import StepPlan

__all__ = ["StepThreadRunner"]


class WaitedWorker(Worker, Protocol):
    """A worker that keeps its thread for as long as a step takes."""

    leave_python: Callable[[], None]
    """Called where a step goes on without Python for a while; set by the home of the worker."""

    @property
    def idle(self) -> Callable[[], bool]:
        """A piece of work for a time when no step runs; False if there was none. It holds no
        runner, whose thread ends with it."""
        ...


class StepThreadRunner:
    """A `Runner`: the host resolves a step, and the worker computes it, when the step before is
    known. Made on the event loop that will await its steps."""

    def __init__(self, host: Host, worker: WaitedWorker, *, name: str) -> None:
        """`name`: of its thread, behind that of the library."""
        self._host = host
        self._worker = worker
        self._thread: StepThread[StepOutcome] = StepThread(
            f"aioserve-{name}", torch.inference_mode, idle=worker.idle
        )
        worker.leave_python = self._thread.tell_loop

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
        self._thread.post(self._worker.close)
        await self._thread.aclose()
