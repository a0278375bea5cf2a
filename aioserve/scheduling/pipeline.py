"""Pipeline: plan and launch steps while earlier ones are still being computed.

    advance ──► plan ──► launch ──┐          depth 2: while step 7 is computed, step 8 is planned
                                  ▼          and launched, so that the device never waits
    finish  ◄── commit ◄── oldest step in flight

The engine's loop, the simulator, the policy check and the tests all drive a scheduler through this
cycle. The driver decides how to wait for a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from aioserve.errors import InvariantError
from aioserve.scheduling.scheduler import Scheduler
from aioserve.scheduling.updates import SequenceUpdate
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.plan import StepPlan

__all__ = ["StepPipeline"]

Handle = TypeVar("Handle")


class StepPipeline(Generic[Handle]):
    """Steps of one scheduler in flight, oldest first and at most `depth`.

    `launch` starts a step and returns what the driver needs to wait for it.
    """

    def __init__(
        self, scheduler: Scheduler, launch: Callable[[StepPlan], Handle], *, depth: int
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        self.scheduler = scheduler
        self.depth = depth
        self._launch = launch
        self.steps: deque[tuple[StepPlan, Handle]] = deque()
        """Steps launched and not finished, oldest first, each with its handle."""
        self._is_dry = False

    @property
    def in_flight(self) -> tuple[StepPlan, ...]:
        """Plans of `steps`, oldest first."""
        return tuple([plan for plan, _ in self.steps])

    @property
    def num_in_flight(self) -> int:
        return len(self.steps)

    def advance(self, now_seconds: float) -> StepPlan | None:
        """Plan a step and launch it. Return None if `depth` steps are in flight or nothing can be
        computed now.

        Afterwards `Scheduler.take_ended_unplanned` may have ends to report.
        """
        plan = None
        if len(self.steps) < self.depth:
            plan = self.scheduler.plan(now_seconds)
            if plan is not None:
                self.steps.append((plan, self._launch(plan)))
        self._is_dry = plan is None
        return plan

    @property
    def due(self) -> Handle | None:
        """Handle of the oldest step, if the driver must wait for it before the next `advance`. That
        is so once `depth` steps are in flight, or nothing more could be planned. Otherwise None."""
        if self.steps and (self._is_dry or len(self.steps) == self.depth):
            return self.steps[0][1]
        return None

    def drain(self) -> None:
        """Plan nothing more: call it in place of `advance`. The steps in flight are then due one by
        one."""
        self._is_dry = True

    def finish(self, outcome: StepOutcome, now_seconds: float) -> list[SequenceUpdate]:
        """Commit the oldest step. Raises `UnfitOutcomeError` for the outcome of another step, which
        may then `fail`."""
        if not self.steps:
            raise InvariantError("no step is in flight")
        updates = self.scheduler.commit(self.steps[0][0], outcome, now_seconds)
        self._is_dry = False
        self.steps.popleft()
        return updates

    def fail(self, error: str) -> list[SequenceUpdate]:
        """Fail the oldest step."""
        if not self.steps:
            raise InvariantError("no step is in flight")
        self._is_dry = False
        plan, _ = self.steps.popleft()
        return self.scheduler.fail(plan, error)
