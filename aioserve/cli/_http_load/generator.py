"""Load generator: sends each request when it is due, and reports how late it was itself.

Each request is due at the time in the trace, or in a closed loop when its caller has thought. With
a limit on concurrent requests it is held until there is room. Requests without times run as many at
once as the limit allows, until all have been sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from aioserve.progress_bar import OnProgress
from aioserve.simulation.records import Arrivals, RequestRecord
from aioserve.simulation.served import ServedRequest
from aioserve.traces.trace_request import TraceRequest

__all__ = ["Clock", "Load", "Send", "run_load"]

Clock = Callable[[], float]
Send = Callable[[ServedRequest, bytes, Clock], Awaitable[None]]
"""Sends a body, and records the times in its first argument, by the clock."""

AHEAD_SECONDS = 0.05
"""Lead time, in seconds, in which a request's body is made: that makes no request late."""
TICK_SECONDS = 0.001
"""Shortest wait for a request, in seconds: a shorter one may be no time at all by the clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests that were sent, and the generator's own performance."""

    served: list[ServedRequest]
    """All requests of the trace, in its order, unsent ones included."""
    seconds: float
    busy_share: float
    """Processor time of this process, as a share of the time."""
    interrupted: bool
    """True if Ctrl-C ended it."""


async def run_load(
    requests: Sequence[TraceRequest],
    send: Send,
    body_of: Callable[[TraceRequest], bytes],
    *,
    closed_loop: bool = False,
    concurrency: int | None = None,
    max_seconds: float | None = None,
    on_progress: OnProgress | None = None,
    seconds_now: Clock = time.perf_counter,
) -> Load:
    """Send all requests, and wait until the last has ended. No request is sent after `max_seconds`.

    Cancelling the task ends the load, and returns the measurements so far. Raises `TraceError` if a
    request of a closed loop follows no earlier one.
    """
    run = _Run(
        requests, send, body_of, closed_loop, concurrency, max_seconds, on_progress, seconds_now
    )
    interrupted = False
    cpu_before = time.process_time()
    try:
        await run.to_the_end()
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is not None:
            task.uncancel()
        interrupted = True
    seconds = run.now()
    return Load(
        served=run.served,
        seconds=seconds if interrupted else run.ended_seconds,
        busy_share=(time.process_time() - cpu_before) / seconds if seconds else 0.0,
        interrupted=interrupted,
    )


class _Run:
    def __init__(
        self,
        requests: Sequence[TraceRequest],
        send: Send,
        body_of: Callable[[TraceRequest], bytes],
        closed_loop: bool,
        concurrency: int | None,
        max_seconds: float | None,
        on_progress: OnProgress | None,
        seconds_now: Clock,
    ) -> None:
        self._arrivals = Arrivals(
            sorted(requests, key=lambda request: request.arrival_seconds), closed_loop=closed_loop
        )
        self.served: list[ServedRequest] = list(map(ServedRequest, self._arrivals.records))
        self._served_of = {id(one.record): one for one in self.served}
        self._send = send
        self._body_of = body_of
        self._room = None if concurrency is None else asyncio.Semaphore(concurrency)
        self._room_seconds = 0.0
        """Time at which there was room again, after there had been none."""
        self._max_seconds = max_seconds
        self._on_progress = on_progress
        self._num_under_way = 0
        self._num_ended = 0
        self._changed = asyncio.Event()
        """Set when a request has ended."""
        self._seconds_now = seconds_now
        self._began = seconds_now()
        self.ended_seconds = 0.0
        """Time at which the last request ended."""

    def now(self) -> float:
        return self._seconds_now() - self._began

    async def to_the_end(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                while (record := await self._next()) is not None:
                    if not await self._has_room():
                        break
                    self._num_under_way += 1
                    group.create_task(self._one(self._served_of[id(record)], self._room_seconds))
        except BaseExceptionGroup as failures:
            # The generator itself failed; the others were cancelled by it.
            raise failures.exceptions[0] from failures

    async def _next(self) -> RequestRecord | None:
        """Return the next request shortly before it is due, or None if no further one comes."""
        while True:
            now, due = self.now(), self._arrivals.next_seconds
            if due is not None and self._max_seconds is not None and due > self._max_seconds:
                due = None
            if due is None and (not self._num_under_way or self._seconds_left(now) == 0):
                return None
            if due is not None and (record := self._arrivals.take(now + AHEAD_SECONDS)) is not None:
                return record
            self._changed.clear()
            left = self._seconds_left(now) if due is None else due - AHEAD_SECONDS - now
            with suppress(TimeoutError):
                async with asyncio.timeout(None if left is None else max(left, TICK_SECONDS)):
                    await self._changed.wait()

    def _seconds_left(self, now: float) -> float | None:
        """Return the seconds until no further request is sent; None without a time limit."""
        return None if self._max_seconds is None else max(0.0, self._max_seconds - now)

    async def _has_room(self) -> bool:
        """Wait until there is room for a request; False if the load ends before."""
        if self._room is None:
            return True
        try:
            async with asyncio.timeout(self._seconds_left(self.now())):
                await self._room.acquire()
        except TimeoutError:
            return False
        return True

    async def _one(self, served: ServedRequest, room_seconds: float) -> None:
        record = served.record
        due = record.request.arrival_seconds
        try:
            body = self._body_of(record.request)
            if (left := due - self.now()) > 0:
                await asyncio.sleep(left)
            ready = max(due, room_seconds)
            served.held_seconds = ready - due
            try:
                await self._send(served, body, self.now)
            finally:
                if served.is_sent:
                    served.late_seconds = max(0.0, record.request.arrival_seconds - ready)
        finally:
            self._num_under_way -= 1
            self._num_ended += 1
            self.ended_seconds = self.now()
            if self._room is not None:
                self._room_seconds = self.ended_seconds
                self._room.release()
            self._arrivals.ended(record, self.ended_seconds)
            self._changed.set()
            if self._on_progress is not None:
                self._on_progress(self._num_ended, len(self.served))
