"""What other threads have to tell an event loop: calls that are made on it, together, after a wake.

A step costs the loop one wake-up. Whoever has something to tell puts it here, and wakes the loop
when its own work can do without the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from aioserve.execution.waker import Waker

__all__ = ["Answers", "settle"]

KEPT_DELAYS = 256


class Answers:
    """Bound to the event loop that it is made on, which holds what was put until it is told."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.wake_delays_seconds: deque[float] = deque(maxlen=KEPT_DELAYS)
        """Between `put` on a thread and its call on the loop: loop lag as the engine feels it."""
        self._told: deque[tuple[Callable[[], None], float]] = deque()
        self.tell: Callable[[], None] = functools.partial(
            _tell, self._told, self.wake_delays_seconds
        )
        """On the loop: make the calls that were put."""
        waker = Waker(self.loop, self.tell)
        self.wake: Callable[[], None] = waker.wake
        """From any thread, until the end."""
        self.close_soon: Callable[[], None] = waker.close_soon
        """From any thread, after the last wake: `close` on the loop."""
        self.close: Callable[[], None] = waker.close
        """On the loop: make the calls that were put, and then no more."""

    def __len__(self) -> int:
        """How many calls the loop hasn't made yet."""
        return len(self._told)

    def put(self, call: Callable[[], None]) -> None:
        """From any thread: `call`, which raises nothing, is made after the next wake."""
        self._told.append((call, time.monotonic()))


def _tell(told: deque[tuple[Callable[[], None], float]], delays_seconds: deque[float]) -> None:
    while told:
        call, put_at = told.popleft()
        delays_seconds.append(time.monotonic() - put_at)
        call()


def settle(future: asyncio.Future[Any], result: Any) -> None:
    """Give the future a result, or raise from it what is an exception; not one that is done."""
    if future.done():
        return
    if isinstance(result, StopIteration | asyncio.CancelledError):
        # Futures refuse the one, and awaiting the other would look like a cancellation.
        future.set_exception(RuntimeError(f"the call raised {result!r}"))
    elif isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)
