"""Durations of steps on the device, by the device's own clock.

    main    ...done 7]•  nothing  •[copy in][ step 8 ][copy out]•[copy in][ step 9 ...
                      └─ idle ────┘└──── seconds ──────────────┘

Two timed events go around each step. The device is idle between the end of all its work and the
start of the next step. Pauses between the kernels of one step, which a graph shortens, are part of
the step.
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
    """Seconds from its first work on the main stream to its last, which includes waiting for
    page copies."""
    idle_seconds: float | None
    """Seconds from the end of the step before to the start of this one. None if no step before
    was timed."""
    graph_size: int | None
    """Number of sequences that the step was padded to, to run as a graph; None if it ran
    eagerly."""


class StepEvents:
    """Two events of one step, which a later step reuses."""

    def __init__(self, device: Device) -> None:
        self.began: Event = device.new_event(timed=True)
        self.ended: Event = device.new_event(timed=True)
        self.before: StepEvents | None = None
        """Events of the step before."""


class StepTimer:
    """Times the steps of one runner.

    The thread that launches calls `begin` and `end`. After the end of each step, `note` must be
    called before its successor but one is launched.
    """

    def __init__(self, device: Device, num_in_flight: int) -> None:
        """`num_in_flight` is the most steps that are launched and not yet noted."""
        self.times: list[StepTime] = []
        """Times of the noted steps, in their order."""
        self._device = device
        # One more than in flight: the end of the step noted last tells when the next one could have
        # begun.
        self._steps = cycle([StepEvents(device) for _ in range(num_in_flight + 1)])
        self._last: StepEvents | None = None

    def begin(self, main: Stream) -> StepEvents:
        """Record the start of a step, before anything of it is enqueued."""
        timed = next(self._steps)
        main.record(timed.began)
        timed.before = self._last
        return timed

    def end(self, timed: StepEvents, main: Stream) -> None:
        """Record that all work of the step has been launched."""
        main.record(timed.ended)
        self._last = timed

    def note(self, timed: StepEvents, step: int, graph_size: int | None) -> None:
        """Store the times of a step that is done."""
        between, before = self._device.seconds_between, timed.before
        idle = None if before is None else max(0.0, between(before.ended, timed.began))
        seconds = between(timed.began, timed.ended)
        self.times.append(StepTime(step, seconds, idle, graph_size))
