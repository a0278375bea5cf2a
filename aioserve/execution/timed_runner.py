"""A runner around another one, which reports the plan and duration of each step."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from aioserve.execution.runner import Runner
from aioserve.sampling.masks import LateMasks
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.plan import StepPlan

__all__ = ["TimedRunner", "TimedStep"]


class TimedStep(NamedTuple):
    """One step, as the event loop saw it; on the clock of `time.perf_counter`."""

    plan: StepPlan
    began: float
    """Time of its launch, or the end of the step before, if later. Steps run one after the
    other."""
    ended: float
    """Time at which the loop heard of its end."""

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class TimedRunner:
    """A `Runner`. `note` is called on the loop with each step that ends well."""

    def __init__(self, runner: Runner, note: Callable[[TimedStep], None]) -> None:
        self._runner = runner
        self._note = note
        self._ended = float("-inf")

    @property
    def wake_delays_seconds(self) -> Sequence[float]:
        return self._runner.wake_delays_seconds

    def launch(self, plan: StepPlan, masks: LateMasks | None = None) -> Awaitable[StepOutcome]:
        return self._noted(plan, time.perf_counter(), self._runner.launch(plan, masks))

    async def _noted(
        self, plan: StepPlan, launched: float, handle: Awaitable[StepOutcome]
    ) -> StepOutcome:
        outcome = await handle
        began, self._ended = max(launched, self._ended), time.perf_counter()
        self._note(TimedStep(plan, began, self._ended))
        return outcome

    async def aclose(self) -> None:
        await self._runner.aclose()
