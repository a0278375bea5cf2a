"""The host's part of a `FakeGpu` on a simulated loop: calls of the loop in place of threads."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from aioserve.execution.gpu.waiting import Expected, Within
from aioserve.execution.loop_callbacks import LoopCallbacks
from tests.doubles.fake_gpu import FakeGpu

__all__ = ["SimulatedHost"]


class SimulatedHost:
    """No threads: calls are made on the loop, each after a random while."""

    max_seconds: float = 0.0005

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu

    def start_launching(self, name: str, within: Within) -> SimulatedHandler:
        return SimulatedHandler(self._gpu, within, self.max_seconds)

    def start_waiting(
        self, name: str, stream: object, callbacks: LoopCallbacks, within: Within
    ) -> SimulatedWaiting:
        handler = SimulatedHandler(self._gpu, within, self.max_seconds)
        return SimulatedWaiting(self._gpu, callbacks, handler)


class SimulatedHandler:
    def __init__(self, gpu: FakeGpu, within: Within, max_seconds: float) -> None:
        self._gpu = gpu
        self._within = within
        self._max_seconds = max_seconds
        self._calls: deque[Callable[[], None]] = deque()
        self._ended = False

    def put(self, item: Callable[[], None]) -> None:
        self._calls.append(item)
        if len(self._calls) == 1:
            self._set()

    def end(self) -> None:
        self._ended = True

    async def aclose(self) -> None:
        while self._calls:  # noqa: ASYNC110  (in virtual time)
            await asyncio.sleep(self._max_seconds)
        self._ended = True

    def _set(self) -> None:
        self._gpu.later(self._gpu.source.uniform(0.0, self._max_seconds), self._make)

    def _make(self) -> None:
        if self._ended:
            return
        with self._within():
            self._calls[0]()
        self._calls.popleft()
        if self._calls:
            self._set()


class SimulatedWaiting:
    """Hears of events, where a thread would sleep until they are done."""

    def __init__(self, gpu: FakeGpu, callbacks: LoopCallbacks, handler: SimulatedHandler) -> None:
        self._gpu = gpu
        self._callbacks = callbacks
        self._handler = handler
        self._steps: deque[Expected] = deque()
        self._waits = False
        gpu.on_failure.append(self._wake)

    def put(self, item: Expected) -> None:
        self._steps.append(item)
        if len(self._steps) == 1:
            self._watch()

    def end(self) -> None:
        self._handler.end()

    async def aclose(self) -> None:
        while self._steps:  # noqa: ASYNC110  (in virtual time)
            await asyncio.sleep(0.001)
        await self._handler.aclose()

    def _watch(self) -> None:
        event: Any = self._steps[0].event
        self._waits = True
        if self._gpu.failure is not None or event.mark is None or event.mark.done:
            self._wake()
        else:
            event.mark.when_done.append(self._wake)

    def _wake(self) -> None:
        if self._waits:
            self._waits = False
            self._handler.put(self._end)

    def _end(self) -> None:
        self._steps.popleft().end()
        self._callbacks.wake()
        if self._steps:
            self._watch()
