"""Runs a host, and a worker that computes at once, on one step thread."""

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
    """A worker that occupies its thread for as long as a step takes."""

    leave_python: Callable[[], None]
    """Callback before a step goes on without Python for a while. Set by the worker's runner."""

    @property
    def idle(self) -> Callable[[], bool]:
        """Do a piece of work while no step runs; False if there was none.

        It must not hold the runner, whose thread ends with the runner.
        """
        ...


class StepThreadRunner:
    """A `Runner`: the host resolves a step, and the worker computes it, once the step before is
    known.

    Made on the event loop that will await its steps.
    """

    def __init__(self, host: Host, worker: WaitedWorker, *, name: str) -> None:
        """`name` becomes part of the thread's name."""
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
        """Launch a step. Its arrays are made here, while the step before is computed."""
        read = self._host.read(plan, masks)
        return self._thread.submit(functools.partial(self._host.step, plan, read, self._worker))

    def take_drafter(self, drafter: Drafter) -> None:
        """Let a drafter make the draft tokens that plans ask for. Call it before the first plan."""
        self._host.take_drafter(drafter, time.perf_counter)

    async def aclose(self) -> None:
        self._thread.post(self._worker.close)
        await self._thread.aclose()
