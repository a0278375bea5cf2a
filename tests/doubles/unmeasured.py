"""Scheduler of the tests' engines, which asks for draft tokens as long as they are right."""

from __future__ import annotations

import asyncio
from typing import Any

from aioserve.scheduling.scheduler import Scheduler
from aioserve.scheduling.speculation.draft_lengths import DraftLengths
from aioserve.testing import SimLoop

__all__ = ["UnmeasuredScheduler"]


class _Unmeasured(DraftLengths):
    """Ignores the costs of steps and drafters."""

    def record(self, *args: Any, **options: Any) -> None:
        return


class UnmeasuredScheduler(Scheduler):
    """Scheduler that measures nothing for the number of draft tokens if the loop's clock is the
    machine's. With measures, the machine's other work would decide about draft tokens."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if not isinstance(asyncio.get_running_loop(), SimLoop):
            self.state.speculation.lengths = _Unmeasured()
