"""Calls from other threads to an event loop, made together after one wake-up.

A step costs the loop one wake-up. A thread puts its calls here, and wakes the loop when its own
work no longer needs the interpreter's lock.
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

__all__ = ["EventFdWaker", "LoopCallbacks", "resolve"]

KEPT_DELAYS = 256

# Functions of a PyDLL are called with the interpreter's lock held.
_eventfd_write = ctypes.PyDLL(None).eventfd_write
_eventfd_write.argtypes = (ctypes.c_int, ctypes.c_uint64)


class LoopCallbacks:
    """Calls for the event loop that this object is made on. The loop makes them when it is told."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.clock: Callable[[], float] = clock_of(self.loop)
        self.wake_delays_seconds: deque[float] = deque(maxlen=KEPT_DELAYS)
        """Delays between `put` on a thread and the call on the loop: loop lag as the engine
        feels it."""
        self.calls: deque[tuple[Callable[[], None], float]] = deque()
        """Calls that the loop hasn't made yet, with the time of `put`."""
        self.tell: Callable[[], None] = functools.partial(
            _tell, self.calls, self.wake_delays_seconds
        )
        """Make the calls that were put. Call it on the loop."""
        waker = EventFdWaker(self.loop, self.tell)
        self.wake: Callable[[], None] = waker.wake
        """Wake the loop, from any thread, until the end."""
        self.close_soon: Callable[[], None] = waker.close_soon
        """Close on the loop, from any thread, after the last wake."""
        self.close: Callable[[], None] = waker.close
        """Make the calls that were put, and no more after them. Call it on the loop."""

    def put(self, call: Callable[[], None]) -> None:
        """Queue `call` for the next wake, from any thread. It must raise nothing."""
        self.calls.append((call, time.monotonic()))


def _tell(calls: deque[tuple[Callable[[], None], float]], delays_seconds: deque[float]) -> None:
    while calls:
        call, put_at = calls.popleft()
        delays_seconds.append(time.monotonic() - put_at)
        call()


def resolve(future: asyncio.Future[Any], result: Any) -> None:
    """Set a future's result, or its exception if `result` is one. Does nothing if it is done."""
    if future.done():
        return
    if isinstance(result, StopIteration | asyncio.CancelledError):
        # Futures refuse StopIteration, and awaiting a CancelledError would look like a
        # cancellation.
        future.set_exception(RuntimeError(f"the call raised {result!r}"))
    elif isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)


class EventFdWaker:
    """Calls `woken` on `loop` soon after `wake`, without giving up the waking thread's turn.

    Wakes that come close together make one call.

    `call_soon_threadsafe` writes to a socket, for which Python releases the interpreter's lock. The
    loop's thread, just woken, takes the lock and keeps it for all of its work. The other thread,
    which may be about to start the next step, has to wait. Here the write is made with the lock
    held. The loop gets the lock when the thread next releases it, for example in compiled code.

    Make it on the loop's thread. The loop holds it, and with it `woken`, until `close`. A loop that
    watches no files, like a simulated one, is woken by `call_soon_threadsafe`.
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
        """Wake the loop, from any thread, until `close`. Does nothing to a closed loop."""
        if self._file is not None:
            _eventfd_write(self._file, 1)
        else:
            self._call_soon(self._woken)

    def _read(self) -> None:
        if self._file is not None:
            os.eventfd_read(self._file)
        self._woken()

    def close_soon(self) -> None:
        """Close on the loop, from any thread, after the last wake."""
        if not self._call_soon(self.close):
            self._close_file()

    def close(self) -> None:
        """Call `woken` one last time. Call it on the loop's thread."""
        self._woken()
        if self._file is not None:
            self._loop.remove_reader(self._file)
            self._close_file()

    def _call_soon(self, call: Callable[[], None]) -> bool:
        """Schedule a call; False if the loop is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)
            return True
        return False

    def _close_file(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
