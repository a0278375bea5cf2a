"""What can go wrong with a device: for one step, or for good.

Out of memory is of one step: what allocators keep is given back, the step is enqueued once more
without a graph, and fails if that doesn't help. An illegal access, a failed kernel, a lost card are
for good: CUDA gives the same error for every call that follows, until the process ends. So does a
step that doesn't end, as far as anybody can tell; `Watchdog` looks for that.
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
"""How long a step may be the oldest on the device before the device counts as hung."""
LAUNCH_SECONDS = 600.0
"""How long the host may take to launch one: kernels are compiled at their first use."""


class OutOfDeviceMemoryError(AioserveError):
    """The device has no memory left for this step."""


class DeviceFailedError(RunnerFailedError):
    """The device computes nothing any more in this process."""


class HungDeviceError(DeviceFailedError):
    """A step has not ended for so long that nobody waits for it any more."""


class Watched(Protocol):
    """A step in flight, as the watchdog sees it."""

    @property
    def enqueued_seconds(self) -> float | None:
        """When all its work was enqueued; None before that."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether the device has done it, or has failed."""
        ...


@dataclass
class Watchdog:
    """Calls `hung(seconds)` on the event loop when the oldest step in flight doesn't end.

    As long as there is a step in flight, one timer is set; when it fires, the oldest mostly is a
    younger one.
    """

    loop: asyncio.AbstractEventLoop
    oldest: Callable[[], Watched | None]
    hung: Callable[[float], None]
    hung_seconds: float = HUNG_SECONDS
    _progress_seconds: float = 0.0
    _timer: asyncio.TimerHandle | None = None

    def progress(self) -> None:
        """Another step is the oldest now, or there is none."""
        self._progress_seconds = clock_of(self.loop)()
        if self.oldest() is None:
            self.stop()
        elif self._timer is None:
            self._set(self.hung_seconds)

    def stop(self) -> None:
        """Look no more."""
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
            self._set(self.hung_seconds)  # it is the loop that was held up
        else:
            self.hung(now - since)
