"""What a device is to the runner: streams of work, events between them, and memory to copy from.

    main     [copy in] [ step 7 ][copy out] E7   [copy in] wait C8 [ step 8 ][copy out] E8
    copies                       wait E7 [ page copies of step 8 ] C8

Work on one stream is done in order. Between two streams, and between a stream and the host, nothing
has an order but by an event: recorded on the one, waited for by the other.

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
"""Memory of a device, which only the device and the models made for it look into."""


class HostMemory(Protocol):
    """Pinned memory of the host: a device copies from and to it while the host goes on."""

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """Its bytes."""
        ...


class Event(Protocol):
    """A point in the work of a stream. May be recorded again and again; the last one counts."""

    @property
    def is_done(self) -> bool:
        """Whether the work before it is done. Raises what the device failed with."""
        ...

    def synchronize(self) -> None:
        """Sleep until it is done, without the interpreter's lock. Raises as `is_done`."""
        ...

    def spin(self, seconds: float) -> bool:
        """Whether it is done. Asks without pause for so long, without the interpreter's lock.
        Raises as `is_done`."""
        ...


class Stream(Protocol):
    """Work that is done in the order in which it is enqueued. Enqueueing blocks for nothing."""

    def current(self) -> AbstractContextManager[object]:
        """Inside, what this thread launches goes to this stream."""
        ...

    def copy_to_device(self, target: DeviceMemory, source: HostMemory, num_bytes: int) -> None:
        """The first bytes of `source`, which must stay as they are until the copy is done."""
        ...

    def copy_to_host(self, target: HostMemory, source: DeviceMemory, num_bytes: int) -> None:
        """The first bytes of `source`. What `target` holds before the copy is done is anything."""
        ...

    def record(self, event: Event) -> None:
        """The event is done when all that was enqueued here is."""
        ...

    def wait(self, event: Event) -> None:
        """What is enqueued here from now on begins after the event, as it was recorded last."""
        ...

    def call_host(self, function: int, argument: int) -> None:
        """Call a C function `void (void *)` at this address when all that was enqueued here is
        done, on a thread of the driver. Not called once the device has failed."""
        ...


class Graph(Protocol):
    """Work that was captured, and is launched by one call."""

    def replay(self) -> None:
        """Enqueue it on the current stream."""
        ...


class Device(Protocol):
    """One GPU. Its methods may be called from any thread that is inside `within`."""

    @property
    def name(self) -> str:
        """As logs and errors call it."""
        ...

    def within(self) -> AbstractContextManager[object]:
        """What a thread enters that works with the device."""
        ...

    def new_stream(self) -> Stream:
        """One that has no order with any other."""
        ...

    def new_event(self, *, timed: bool = False) -> Event:
        """One that isn't recorded: waiting for it waits for nothing. `timed`: it notes when it is
        done, for `seconds_between`."""
        ...

    def seconds_between(self, earlier: Event, later: Event) -> float:
        """On the device's clock, between two timed events that are done. Raises for others."""
        ...

    def memory(self, num_bytes: int) -> DeviceMemory:
        """Memory of the device. Raises `OutOfDeviceMemoryError`."""
        ...

    def host_memory(self, num_bytes: int) -> HostMemory:
        """Pinned memory of the host."""
        ...

    def capture(self, enqueue: Callable[[], None]) -> Graph:
        """What `enqueue` launches on the current stream, which does none of it now. All graphs
        share one memory pool, so that none may run beside another. Raises what `enqueue` raises.
        """
        ...

    def synchronize(self) -> None:
        """Wait for everything that anybody has enqueued, on whatever stream."""
        ...

    def free_cached_memory(self) -> None:
        """Give back what allocators keep for later. Waits for the device."""
        ...

    def meaning_of(self, error: Exception) -> Exception:
        """What an exception of a call means, in the terms of `failures`: memory that isn't there,
        or a device that has failed for good. The exception itself where it is neither."""
        ...
