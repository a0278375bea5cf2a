"""Ways to wait for the end of a step, and the threads for the host's part of steps.

    block      a thread sleeps in the event; the driver wakes it by an interrupt
    spin       a thread asks for a while without pause, and then sleeps
    callback   no thread: the driver calls a C function behind the step, which writes to a file that
               the event loop watches

All are behind `Handler`, and all wait for steps in the order of their launch. Python in a callback
of the driver would deadlock. It would wait for the interpreter's lock while holding a lock of the
driver. The thread with the interpreter's lock may be waiting for that one.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal, Protocol, TypeVar

from aioserve import _native
from aioserve.execution.gpu.device import Event, Stream
from aioserve.execution.handler_thread import HandlerThread
from aioserve.execution.loop_callbacks import LoopCallbacks

__all__ = ["Expected", "Handler", "HostSide", "Threads", "Way"]

Way = Literal["block", "spin", "callback"]
Item = TypeVar("Item", contravariant=True)
Within = Callable[[], AbstractContextManager[object]]

SPIN_SECONDS = 0.0005
"""Time that `spin` polls before it sleeps. A decode of a small model takes about as long."""
POLL_SECONDS = 0.25
"""Time between polls of `callback`, since a device that has failed calls nothing."""


class Expected(Protocol):
    """A step that is waited for."""

    @property
    def event(self) -> Event: ...

    def end(self) -> None:
        """Wait for the event, take the results, and queue a call for the loop. Called once."""
        ...


class Handler(Protocol[Item]):
    """Takes items in the order in which they were put: makes calls, or ends steps whose events
    are done."""

    def put(self, item: Item, /) -> None:
        """Put an item, from any thread. A call must raise nothing; the event of a step must be
        recorded."""
        ...

    def end(self) -> None:
        """End after the last item, without waiting for that."""
        ...

    async def aclose(self) -> None:
        """Take the items that were put, and end."""
        ...


class HostSide(Protocol):
    """Starts the handlers for the host's part of steps."""

    def start_launching(self, name: str, within: Within) -> Handler[Callable[[], None]]:
        """Start a handler that makes its calls inside `within()`."""
        ...

    def start_waiting(
        self, name: str, stream: Stream, callbacks: LoopCallbacks, within: Within
    ) -> Handler[Expected]:
        """Start a handler for steps that end on `stream`.

        Called on the event loop of `callbacks`, which hears of each end.
        """
        ...


class Threads:
    """One thread that launches, and one that waits, if the way needs one."""

    def __init__(self, way: Way = "block") -> None:
        self._way: Way = way

    def start_launching(self, name: str, within: Within) -> Handler[Callable[[], None]]:
        return HandlerThread(name, _call, within=within)

    def start_waiting(
        self, name: str, stream: Stream, callbacks: LoopCallbacks, within: Within
    ) -> Handler[Expected]:
        if self._way == "callback":
            return HostCallback(stream, callbacks)
        spin_seconds = SPIN_SECONDS if self._way == "spin" else 0.0
        wait = functools.partial(_wait, callbacks, spin_seconds)
        return HandlerThread(name, wait, within=within, at_end=callbacks.close_soon)


def _call(call: Callable[[], None]) -> None:
    call()


def _wait(callbacks: LoopCallbacks, spin_seconds: float, step: Expected) -> None:
    if spin_seconds:
        with contextlib.suppress(Exception):  # `end` raises it
            step.event.spin(spin_seconds)
    step.end()
    callbacks.wake()


def _is_over(event: Event) -> bool:
    """True if an event is done, or never will be."""
    try:
        return event.is_done
    except Exception:  # `end` raises it
        return True


class HostCallback:
    """Lets the driver wake the event loop, by a C function that writes to an eventfd.

    It only wakes the loop; the events tell which steps are done. Must be made and closed on the
    loop, which has to watch files.
    """

    def __init__(self, stream: Stream, callbacks: LoopCallbacks) -> None:
        self._stream = stream
        self._callbacks = callbacks
        self._loop = callbacks.loop
        self._steps: deque[Expected] = deque()
        self._file = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._loop.add_reader(self._file, self._read)
        self._timer = self._loop.call_later(POLL_SECONDS, self._poll)
        self._empty: list[Callable[[], None]] = []
        self._open = True

    def put(self, item: Expected) -> None:
        self._steps.append(item)
        try:
            self._stream.call_host(_native.eventfd_writer(), self._file)
        except Exception:  # the device has failed: the step's event says how
            os.eventfd_write(self._file, 1)

    def end(self) -> None:
        if self._open:
            self._open = False
            self._timer.cancel()
            self._loop.remove_reader(self._file)
            if not self._steps:  # otherwise the driver may still write to that file number
                os.close(self._file)

    async def aclose(self) -> None:
        if self._steps:
            emptied = self._loop.create_future()
            self._empty.append(lambda: emptied.set_result(None))
            await emptied
        self.end()

    def _read(self) -> None:
        os.eventfd_read(self._file)
        self._take_ended()

    def _poll(self) -> None:
        self._timer = self._loop.call_later(POLL_SECONDS, self._poll)
        self._take_ended()

    def _take_ended(self) -> None:
        while self._steps and _is_over(self._steps[0].event):
            self._steps.popleft().end()
        self._callbacks.tell()
        if not self._steps:
            while self._empty:
                self._empty.pop()()
