"""One thread per device that runs steps in order and wakes the event loop once for each.

The loop never waits for a step and never polls: a step's end is one `call_soon_threadsafe`.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

__all__ = ["StepThread"]

Result = TypeVar("Result")

KEPT_DELAYS = 256


class StepThread(Generic[Result]):
    """Runs submitted calls one after the other, off the event loop.

    Bound to the event loop that it is made on. `submit` is for that loop's thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: queue.SimpleQueue[
            tuple[Callable[[], Result], asyncio.Future[Result]] | None
        ] = queue.SimpleQueue()
        self.wake_delays_seconds: deque[float] = deque(maxlen=KEPT_DELAYS)
        """Between a step's end on the thread and its callback on the loop: loop lag as the engine
        feels it."""
        # A daemon, so that an interpreter that exits without closing the engine isn't held up.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

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

    def _run(self) -> None:
        while (entry := self._calls.get()) is not None:
            call, future = entry
            try:
                result: Result | BaseException = call()
            except BaseException as error:
                result = error
            # The loop may be closed when a host exits without closing the engine.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._wake, future, result, time.monotonic())
            del entry, call, future, result

    def _wake(
        self, future: asyncio.Future[Result], result: Result | BaseException, ended: float
    ) -> None:
        self.wake_delays_seconds.append(time.monotonic() - ended)
        if future.done():
            return
        if isinstance(result, StopIteration | asyncio.CancelledError):
            # Futures refuse the one, and awaiting the other would look like a cancellation.
            future.set_exception(RuntimeError(f"the call raised {result!r}"))
        elif isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)
