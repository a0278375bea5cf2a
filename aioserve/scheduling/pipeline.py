"""The pipeline: steps are planned and launched ahead of those that are still being computed.

    advance ──► plan ──► launch ──┐          depth 2: while step 7 is computed, step 8 is planned
                                  ▼          and launched, so that the device never waits
    finish  ◄── commit ◄── oldest step in flight

One cycle for whoever drives a scheduler: the engine's loop, the simulator, the policy check and the
tests. It calls, and is called; how one waits for a step is the driver's affair.
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
    """At most `depth` steps of one scheduler in flight, oldest first.

    `launch` starts a step and gives whatever the driver needs to wait for it.
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
        """Plans of `steps`."""
        return tuple([plan for plan, _ in self.steps])

    @property
    def num_in_flight(self) -> int:
        return len(self.steps)

    def advance(self, now_seconds: float) -> StepPlan | None:
        """Plan a step and launch it; None where there is nothing to compute now, or no room.

        `Scheduler.take_ended_unplanned` may have something to tell afterwards.
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
        """The handle of the oldest step, where it has to be waited for before the next `advance`:
        as many as may be are in flight, or nothing more could be planned beside them."""
        if self.steps and (self._is_dry or len(self.steps) == self.depth):
            return self.steps[0][1]
        return None

    def drain(self) -> None:
        """In place of `advance`: plan nothing, so that the steps in flight are due one by one."""
        self._is_dry = True

    def finish(self, outcome: StepOutcome, now_seconds: float) -> list[SequenceUpdate]:
        """The oldest step is done: commit it. Raises `UnfitOutcomeError` for an outcome that isn't
        this step's, which can then `fail`."""
        if not self.steps:
            raise InvariantError("no step is in flight")
        updates = self.scheduler.commit(self.steps[0][0], outcome, now_seconds)
        self._is_dry = False
        self.steps.popleft()
        return updates

    def fail(self, error: str) -> list[SequenceUpdate]:
        """The oldest step has failed."""
        if not self.steps:
            raise InvariantError("no step is in flight")
        self._is_dry = False
        plan, _ = self.steps.popleft()
        return self.scheduler.fail(plan, error)
