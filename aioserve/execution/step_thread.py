"""One thread per device that runs steps in order and wakes the event loop once for each.

The loop never waits for a step and never polls: a step's end wakes it.
"""

from __future__ import annotations

import asyncio
import functools
import queue
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

from aioserve.execution.daemon import start_daemon
from aioserve.execution.waker import Waker

__all__ = ["StepThread"]

Result = TypeVar("Result")

Calls = queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None]

KEPT_DELAYS = 256
EXIT_SECONDS = 30.0
"""How long an interpreter that exits without closing the engine waits for the steps in flight."""


class StepThread(Generic[Result]):
    """Runs submitted calls one after the other, off the event loop.

    Bound to the event loop that it is made on. `submit` is for that loop's thread. The thread ends
    with `aclose`, or with the last reference to this object.

    Where the next call is queued already when one ends, it begins before the loop hears of that
    end: else the loop's thread would take its turn, and keep the interpreter's lock, just when the
    next call needs it to get the device going. A call says by `tell_loop` that it needs it no more.
    """

    def __init__(
        self, name: str, within: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        """All calls are made inside one `within()`, which is entered on the thread."""
        self._calls: Calls = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self.wake_delays_seconds: deque[float] = deque(maxlen=KEPT_DELAYS)
        """Between a step's end on the thread and its callback on the loop: loop lag as the engine
        feels it."""
        self._done: deque[_Done] = deque()
        self._waker = Waker(
            self._loop, functools.partial(_tell, self._done, self.wake_delays_seconds)
        )
        run = functools.partial(_run, self._calls, self._done, self._waker, within)
        end = functools.partial(self._calls.put, None)
        try:
            self._thread = start_daemon(name, run, end, exit_seconds=EXIT_SECONDS)
        except RuntimeError:
            self._waker.close()
            raise

    def __del__(self) -> None:
        self._calls.put(None)

    def submit(self, call: Callable[[], Result]) -> Awaitable[Result]:
        """Queue `call`; the awaitable gives what it returns or raises."""
        future: asyncio.Future[Result] = self._loop.create_future()
        self._calls.put((call, future))
        return future

    def tell_loop(self) -> None:
        """For a call that has done its part in Python, and goes on in compiled code: the loop may
        hear of the call before it, and does so at the end of this one at the latest."""
        if self._done:
            self._waker.wake()

    async def aclose(self) -> None:
        """Run what is queued, then end the thread."""
        self._calls.put(None)
        while self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
        self._waker.close()


_Done = tuple[asyncio.Future[Any], Any, float]
"""Whose call has ended, what it returned or raised, and when."""


def _run(
    calls: Calls,
    done: deque[_Done],
    waker: Waker,
    within: Callable[[], AbstractContextManager[object]],
) -> None:
    with within():
        while (entry := calls.get()) is not None:
            call, future = entry
            try:
                result: Any = call()
            except BaseException as error:
                result = error
            done.append((future, result, time.monotonic()))
            if calls.empty() or len(done) > 1:
                waker.wake()
            del entry, call, future, result
    waker.close_soon()


def _tell(done: deque[_Done], wake_delays_seconds: deque[float]) -> None:
    """On the loop: the calls that have ended."""
    while done:
        future, result, ended = done.popleft()
        wake_delays_seconds.append(time.monotonic() - ended)
        if not future.done():
            _set(future, result)


def _set(future: asyncio.Future[Any], result: Any) -> None:
    if isinstance(result, StopIteration | asyncio.CancelledError):
        # Futures refuse the one, and awaiting the other would look like a cancellation.
        future.set_exception(RuntimeError(f"the call raised {result!r}"))
    elif isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)
