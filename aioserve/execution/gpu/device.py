"""The runner's view of a device: streams of work, events between them, and memory to copy from.

    main     [copy in] [ step 7 ][copy out] E7   [copy in] wait C8 [ step 8 ][copy out] E8
    copies                       wait E7 [ page copies of step 8 ] C8

Work on one stream is done in order. Between two streams, or a stream and the host, only events
create an order: recorded on the one, waited for by the other.

The real one is in `cupy_device`. Tests have one without a GPU: `tests.doubles.fake_gpu`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["Device", "DeviceMemory", "Event", "Graph", "HostMemory", "Stream"]

DeviceMemory = Any
"""Memory of a device. Only the device and the models made for it look into it."""


class HostMemory(Protocol):
    """Pinned memory of the host. A device copies from and to it while the host goes on."""

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """Its bytes."""
        ...


class Event(Protocol):
    """A point in the work of a stream. May be recorded repeatedly; the last recording counts."""

    @property
    def is_done(self) -> bool:
        """True if the work before it is done. Raises the device's failure."""
        ...

    def synchronize(self) -> None:
        """Sleep until it is done, without the interpreter's lock. Raises as `is_done` does."""
        ...

    def spin(self, seconds: float) -> bool:
        """Poll without pause for up to `seconds`, without the interpreter's lock. True if it is
        done.

        Raises as `is_done` does.
        """
        ...


class Stream(Protocol):
    """Work that is done in the order in which it is enqueued. Enqueueing never blocks."""

    def current(self) -> AbstractContextManager[object]:
        """Make a context in which this thread's launches go to this stream."""
        ...

    def copy_to_device(self, target: DeviceMemory, source: HostMemory, num_bytes: int) -> None:
        """Copy the first bytes of `source`, which must not change until the copy is done."""
        ...

    def copy_to_host(self, target: HostMemory, source: DeviceMemory, num_bytes: int) -> None:
        """Copy the first bytes of `source`. The contents of `target` are undefined until the
        copy is done."""
        ...

    def record(self, event: Event) -> None:
        """Record an event, which is done when all work enqueued here is."""
        ...

    def wait(self, event: Event) -> None:
        """Let work that is enqueued here from now on wait for the event's last recording."""
        ...

    def call_host(self, function: int, argument: int) -> None:
        """Call a C function `void (void *)` at this address when all work enqueued here is done.

        It runs on a thread of the driver. It is not called once the device has failed.
        """
        ...


class Graph(Protocol):
    """Captured work, launched by one call."""

    def replay(self) -> None:
        """Enqueue it on the current stream."""
        ...


class Device(Protocol):
    """One GPU. Its methods may be called on any thread that is inside `within`."""

    @property
    def name(self) -> str:
        """Name in logs and errors."""
        ...

    def within(self) -> AbstractContextManager[object]:
        """Make a context that each thread enters to work with the device."""
        ...

    def new_stream(self) -> Stream:
        """Make a stream without an order relative to others."""
        ...

    def new_event(self, *, timed: bool = False) -> Event:
        """Make an event that isn't recorded: waiting for it returns at once.

        A `timed` event notes when it is done, for `seconds_between`.
        """
        ...

    def seconds_between(self, earlier: Event, later: Event) -> float:
        """Return the seconds between two timed events, on the device's clock. Raises unless both
        are done."""
        ...

    def memory(self, num_bytes: int) -> DeviceMemory:
        """Allocate memory of the device. Raises `OutOfDeviceMemoryError`."""
        ...

    def host_memory(self, num_bytes: int) -> HostMemory:
        """Allocate pinned memory of the host."""
        ...

    def capture(self, enqueue: Callable[[], None]) -> Graph:
        """Capture what `enqueue` launches on the current stream, without running it.

        All graphs share one memory pool, so only one may run at a time. Raises what `enqueue`
        raises.
        """
        ...

    def synchronize(self) -> None:
        """Wait for all work on all streams, whoever enqueued it."""
        ...

    def free_cached_memory(self) -> None:
        """Free the memory that allocators cache. Waits for the device."""
        ...

    def meaning_of(self, error: Exception) -> Exception:
        """Translate an exception of a call to those of `failures`: out of memory, or failed for
        good.

        Returns other exceptions as they are.
        """
        ...
