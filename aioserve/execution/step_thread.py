"""One thread per device that runs steps in order and wakes the event loop once for each.

The loop never waits for a step and never polls: a step's end is one `call_soon_threadsafe`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from aioserve.execution.daemon import start_daemon

__all__ = ["StepThread"]

Result = TypeVar("Result")

KEPT_DELAYS = 256
EXIT_SECONDS = 30.0
"""How long an interpreter that exits without closing the engine waits for the steps in flight."""


class StepThread(Generic[Result]):
    """Runs submitted calls one after the other, off the event loop.

    Bound to the event loop that it is made on. `submit` is for that loop's thread. The thread ends
    with `aclose`, or with the last reference to this object.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[
            tuple[Callable[[], Result], asyncio.Future[Result]] | None
        ] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self.wake_delays_seconds: deque[float] = deque(maxlen=KEPT_DELAYS)
        """Between a step's end on the thread and its callback on the loop: loop lag as the engine
        feels it."""
        run = functools.partial(_run, self._calls, self._loop, self.wake_delays_seconds)
        end = functools.partial(self._calls.put, None)
        self._thread = start_daemon(name, run, end, exit_seconds=EXIT_SECONDS)

    def __del__(self) -> None:
        self._calls.put(None)

    def submit(self, call: Callable[[], Result]) -> Awaitable[Result]:
        """Queue `call`; the awaitable gives what it returns or raises."""
        future: asyncio.Future[Result] = self._loop.create_future()
        self._calls.put((call, future))
        return future

    async def aclose(self) -> None:
        """Run what is queued, then end the thread."""
        self._calls.put(None)
        while self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)


def _run(
    calls: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None],
    loop: asyncio.AbstractEventLoop,
    wake_delays_seconds: deque[float],
) -> None:
    while (entry := calls.get()) is not None:
        call, future = entry
        try:
            result: Any = call()
        except BaseException as error:
            result = error
        wake = functools.partial(_wake, future, result, time.monotonic(), wake_delays_seconds)
        # The loop may be closed when a host exits without closing the engine.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(wake)
        del entry, call, future, result, wake


def _wake(
    future: asyncio.Future[Any], result: Any, ended: float, wake_delays_seconds: deque[float]
) -> None:
    wake_delays_seconds.append(time.monotonic() - ended)
    if future.done():
        return
    if isinstance(result, StopIteration | asyncio.CancelledError):
        # Futures refuse the one, and awaiting the other would look like a cancellation.
        future.set_exception(RuntimeError(f"the call raised {result!r}"))
    elif isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)
