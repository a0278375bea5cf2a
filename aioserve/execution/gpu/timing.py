"""What steps take on the device, by the device's own clock.

    main    ...done 7]•  nothing  •[copy in][ step 8 ][copy out]•[copy in][ step 9 ...
                      └─ idle ────┘└──── seconds ──────────────┘

Two events that note the time go around each step. The device is idle where it has ended all that it
was given before it is given the next step. What passes between the kernels of one step, which a
graph makes less of, is part of the step.
"""

from __future__ import annotations

from itertools import cycle
from typing import NamedTuple

from aioserve.execution.gpu.device import Device, Event, Stream

__all__ = ["StepEvents", "StepTime", "StepTimer"]


class StepTime(NamedTuple):
    """Time of one step, on the device."""

    step: int
    seconds: float
    """From its first piece of work on the main stream to its last, of which waiting for page copies
    is one."""
    idle_seconds: float | None
    """From the end of the step before to that. None: no step before it was timed."""
    graph_size: int | None
    """Number of sequences that the step was padded to, to run as a graph; None: it ran eagerly."""


class StepEvents:
    """One step's two events, which a later step uses again."""

    def __init__(self, device: Device) -> None:
        self.began: Event = device.new_event(timed=True)
        self.ended: Event = device.new_event(timed=True)
        self.before: StepEvents | None = None
        """Times of the step before."""


class StepTimer:
    """Times the steps of one runner. `begin` and `end` are called by the thread that launches,
    `note` by whoever hears of a step's end, before its successor but one is launched."""

    def __init__(self, device: Device, num_in_flight: int) -> None:
        """`num_in_flight`: so many steps are launched and not yet noted, at most."""
        self.times: list[StepTime] = []
        """Times of the steps that were noted, in their order."""
        self._device = device
        # One more than are in flight: the last one that was noted says when the next one could
        # have begun.
        self._steps = cycle([StepEvents(device) for _ in range(num_in_flight + 1)])
        self._last: StepEvents | None = None

    def begin(self, main: Stream) -> StepEvents:
        """Before anything of a step is enqueued."""
        timed = next(self._steps)
        main.record(timed.began)
        timed.before = self._last
        return timed

    def end(self, timed: StepEvents, main: Stream) -> None:
        """Record that all work of the step has been launched."""
        main.record(timed.ended)
        self._last = timed

    def note(self, timed: StepEvents, step: int, graph_size: int | None) -> None:
        """What a step took that is done."""
        between, before = self._device.seconds_between, timed.before
        idle = None if before is None else max(0.0, between(before.ended, timed.began))
        seconds = between(timed.began, timed.ended)
        self.times.append(StepTime(step, seconds, idle, graph_size))
