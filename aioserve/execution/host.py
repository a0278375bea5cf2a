"""The host's part of steps, the same for every device.

    read        plan -> arrays, on the event loop while the step before is computed
    resolve     draft tokens, and where their items begin, once the step before is known
    outcome     of what a worker made of the arrays

`Host.step` drives a worker that computes at once, on the worker's thread. If a device runs ahead of
the host, a `ResolvingQueue` does the same in parts.

Knows plans, arrays and drafters, but neither devices nor threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aioserve.drafting.drafter import Drafter
from aioserve.execution.speculation.branches import BranchedStep, ScratchPages
from aioserve.execution.speculation.resolver import Resolver, StepFollower
from aioserve.execution.step_arrays import PlanReader, StepArrays, UnresolvedStep
from aioserve.execution.worker import Worker
from aioserve.sampling.masks import LateMasks
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.plan import StepPlan

__all__ = ["Host", "ReadStep"]

ReadStep = StepArrays | UnresolvedStep | Exception
"""Arrays of a plan, or an error in reading it. The error fails the step when its turn comes."""


class Host:
    """Reads plans and resolves them, in the order of the steps. `read` may be called ahead of
    the other methods, on another thread."""

    def __init__(
        self,
        page_size: int,
        num_slots: int,
        num_groups: int,
        processors: Sequence[Callable[[str], Any]] = (),
        *,
        follower: StepFollower | None = None,
        max_branches: int = 0,
        scratch: ScratchPages | None = None,
    ) -> None:
        """Read plans with `processors`, as `PlanReader` does.

        - `follower`: hears of every plan from `resolver`. None if something else tells it, or if
          there is no follower.
        - `max_branches`: most paths beside the draft tokens of a sequence.
        - `scratch`: pages in which those paths are computed.
        """
        self._reader = PlanReader(page_size, num_slots, processors, num_groups=num_groups)
        self._follower = follower
        self._max_branches = max_branches
        self._scratch = scratch or ScratchPages(0, 0)
        self.resolver: Resolver = Resolver(None, follower)

    def take_drafter(self, drafter: Drafter, clock: Callable[[], float]) -> None:
        """Let a drafter make the draft tokens that plans ask for.

        Call it before the first plan. `clock`, in seconds, measures the drafter.
        """
        self.resolver = Resolver(drafter, self._follower, clock, self._max_branches)

    def read(self, plan: StepPlan, masks: LateMasks | None = None) -> ReadStep:
        """Make the arrays of a plan. An error is returned, not raised."""
        try:
            return self._reader.read_unresolved(plan, masks)
        except Exception as error:
            return error

    def step(self, plan: StepPlan, read: ReadStep, worker: Worker) -> StepOutcome:
        """Compute a plan that was read.

        Raises the error of a failed `read`, `InvariantError` for a plan that can't be resolved, and
        what the worker raises. If resolving fails, no page is copied.
        """
        resolver, is_used = self.resolver, self.resolver.is_used
        if is_used or plan.started_slots:
            resolver.take(plan)
        if isinstance(read, Exception):
            raise read
        if is_used or plan.num_verified:
            plan = resolver.resolved(plan)
        if isinstance(read, UnresolvedStep):
            if resolver.branches:
                branched = self._scratch.branched(plan, read, resolver.branches)
                if branched is not None:
                    return self._branched_step(branched, worker)
            read = read.resolved(plan)
        outcome, batch = worker.step(read).outcome(), read.batch
        if not is_used or not plan.items:
            return outcome
        locations = None if batch is None else batch.token_locations[0]
        return resolver.noted(plan, outcome, locations=locations)

    def _branched_step(self, branched: BranchedStep, worker: Worker) -> StepOutcome:
        outcome = worker.step(branched.read.resolved(branched.plan)).outcome()
        plan, rows, copies = branched.drawn(outcome)
        if len(copies):
            worker.copy(copies)
        return self.resolver.noted(plan, outcome, rows)
