"""Calls that other threads have for an event loop: made on it, together, after one wake.

A step costs the loop one wake-up. A thread puts its calls here, and wakes the loop when its own
work can do without the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from aioserve.timings import clock_of

__all__ = ["EventFdWaker", "LoopCallbacks", "settle"]

KEPT_DELAYS = 256

# A function of a PyDLL is called with the interpreter's lock held.
_eventfd_write = ctypes.PyDLL(None).eventfd_write
_eventfd_write.argtypes = (ctypes.c_int, ctypes.c_uint64)


class LoopCallbacks:
    """Bound to the event loop that it is made on, which holds what was put until it is told."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.clock: Callable[[], float] = clock_of(self.loop)
        self.wake_delays_seconds: deque[float] = deque(maxlen=KEPT_DELAYS)
        """Between `put` on a thread and its call on the loop: loop lag as the engine feels it."""
        self.calls: deque[tuple[Callable[[], None], float]] = deque()
        """Calls that the loop hasn't made yet, with when they were put."""
        self.tell: Callable[[], None] = functools.partial(
            _tell, self.calls, self.wake_delays_seconds
        )
        """On the loop: make the calls that were put."""
        waker = EventFdWaker(self.loop, self.tell)
        self.wake: Callable[[], None] = waker.wake
        """From any thread, until the end."""
        self.close_soon: Callable[[], None] = waker.close_soon
        """From any thread, after the last wake: `close` on the loop."""
        self.close: Callable[[], None] = waker.close
        """On the loop: make the calls that were put, and then no more."""

    def put(self, call: Callable[[], None]) -> None:
        """From any thread: `call`, which raises nothing, is made after the next wake."""
        self.calls.append((call, time.monotonic()))


def _tell(calls: deque[tuple[Callable[[], None], float]], delays_seconds: deque[float]) -> None:
    while calls:
        call, put_at = calls.popleft()
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


class EventFdWaker:
    """Calls `woken` on `loop` soon after `wake`, once for wakes that come close together, without
    giving away the turn of the thread that wakes.

    `call_soon_threadsafe` writes to a socket, and Python lets go of the interpreter's lock for
    that. The loop's thread, just woken, takes it and keeps it for all that it has to do, while the
    other thread, which may be about to start the next step, waits. Here the write is made with the
    lock held: the loop gets it when the thread next lets go of it, in compiled code for example.

    Made on the loop's thread. The loop holds it, and with it `woken`, until `close`. A loop that
    watches no files, such as a simulated one, is woken by `call_soon_threadsafe`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, woken: Callable[[], None]) -> None:
        self._loop = loop
        self._woken = woken
        self._file: int | None = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            loop.add_reader(self._file, self._read)
        except NotImplementedError:
            os.close(self._file)
            self._file = None

    def wake(self) -> None:
        """Wake the loop, from any thread, until `close`. A loop that is closed stays asleep."""
        if self._file is not None:
            _eventfd_write(self._file, 1)
        else:
            self._call_soon(self._woken)

    def _read(self) -> None:
        if self._file is not None:
            os.eventfd_read(self._file)
        self._woken()

    def close_soon(self) -> None:
        """From any thread, after the last wake: `close` on the loop."""
        if not self._call_soon(self.close):
            self._close_file()

    def close(self) -> None:
        """On the loop's thread: what was to be told is told now, and then never again."""
        self._woken()
        if self._file is not None:
            self._loop.remove_reader(self._file)
            self._close_file()

    def _call_soon(self, call: Callable[[], None]) -> bool:
        """Whether the loop is open."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)
            return True
        return False

    def _close_file(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
