"""Failures of a device: for one step, or for good.

Running out of memory concerns one step. The memory that allocators cache is freed, and the step is
enqueued once more without a graph. If that doesn't help, the step fails. An illegal access, a
failed kernel or a lost GPU are for good: CUDA repeats the error for every later call, until the
process ends. So is a step that hangs, which `Watchdog` detects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from aioserve.errors import AioserveError
from aioserve.execution.runner import RunnerFailedError
from aioserve.timings import clock_of

__all__ = [
    "DeviceFailedError",
    "HungDeviceError",
    "OutOfDeviceMemoryError",
    "Watchdog",
]

HUNG_SECONDS = 60.0
"""Time that a step may be the oldest on the device before the device counts as hung."""
LAUNCH_SECONDS = 600.0
"""Time that the host may take to launch a step. Kernels are compiled at their first use."""


class OutOfDeviceMemoryError(AioserveError):
    """The device has no memory left for this step."""


class DeviceFailedError(RunnerFailedError):
    """The device can compute nothing any more in this process."""


class HungDeviceError(DeviceFailedError):
    """A step took so long that the device counts as hung."""


class Watched(Protocol):
    """A step in flight, as the watchdog sees it."""

    @property
    def enqueued_seconds(self) -> float | None:
        """Time at which all its work was enqueued; None before that."""
        ...

    @property
    def is_done(self) -> bool:
        """True if the device has finished it, or has failed."""
        ...


@dataclass
class Watchdog:
    """Calls `hung(seconds)` on the event loop when the oldest step in flight doesn't end.

    One timer is set as long as a step is in flight. Usually another step is the oldest when it
    fires.
    """

    loop: asyncio.AbstractEventLoop
    oldest: Callable[[], Watched | None]
    hung: Callable[[float], None]
    hung_seconds: float = HUNG_SECONDS
    _progress_seconds: float = 0.0
    _timer: asyncio.TimerHandle | None = None

    def progress(self) -> None:
        """Note that another step is the oldest now, or that there is none."""
        self._progress_seconds = clock_of(self.loop)()
        if self.oldest() is None:
            self.stop()
        elif self._timer is None:
            self._set(self.hung_seconds)

    def stop(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        step = self.oldest()
        if step is None:
            return
        now, enqueued_seconds = clock_of(self.loop)(), step.enqueued_seconds
        if enqueued_seconds is None:
            since, bound = self._progress_seconds, LAUNCH_SECONDS
        else:
            since, bound = max(self._progress_seconds, enqueued_seconds), self.hung_seconds
        left = since + bound - now
        if left > 0:
            self._set(min(left, self.hung_seconds))
        elif step.is_done:
            self._set(self.hung_seconds)  # the loop itself was held up
        else:
            self.hung(now - since)
