"""The scheduler of the tests' engines, by which guesses are made as long as they come true."""

from __future__ import annotations

import asyncio
from typing import Any

from aioserve.scheduling.scheduler import Scheduler
from aioserve.scheduling.speculation.draft_lengths import DraftLengths
from aioserve.testing import SimLoop

__all__ = ["UnmeasuredScheduler"]


class _Unmeasured(DraftLengths):
    """Hears nothing of what steps and drafters cost."""

    def took(self, *args: Any, **options: Any) -> None:
        return


class UnmeasuredScheduler(Scheduler):
    """Scheduler that measures nothing for the number of guesses if the loop's clock is the
    machine's. With measures, the machine's other work would decide about guesses."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if not isinstance(asyncio.get_running_loop(), SimLoop):
            self.state.speculation.lengths = _Unmeasured()
