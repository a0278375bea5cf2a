"""Steps that verify guesses, on a device that runs ahead of the host.

What is guessed depends on the last token, which the host knows when the step before is done. So a
step that verifies is launched then, and those behind it wait with it; all others are launched as
soon as they come, while steps before them run.

    loop      read 8, 9    results 7, settle 8     read 10    results 8
    device    [ step 7 ]                 [ step 8 ][ step 9 ]           ..
                         8 verifies: it waits for 7, and 9 behind it

On a CPU nothing waits: the thread that computes a step knows the tokens of the one before.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from aioserve.execution.batch import HostStep, OpenStep
from aioserve.execution.guessing import Guessing
from aioserve.execution.loop_callbacks import settle
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.plan import StepPlan

__all__ = ["Settling"]

OutcomeFuture = asyncio.Future[StepOutcome]


@dataclass(slots=True)
class _Launched:
    plan: StepPlan
    is_taken: bool
    """Whether the slots of guesses have changed as it says."""


class Settling:
    """The order in which steps are launched. For the thread of the event loop."""

    def __init__(
        self, guessing: Guessing, launch: Callable[[HostStep, OutcomeFuture], object]
    ) -> None:
        """`launch` enqueues a step; `noted` and then `go_on` are to be called for each, in this
        order."""
        self._guessing = guessing
        self._launch = launch
        self._waiting: deque[tuple[StepPlan, HostStep | OpenStep, OutcomeFuture]] = deque()
        self._launched: deque[_Launched] = deque()

    def put(self, plan: StepPlan, step: HostStep | OpenStep, future: OutcomeFuture) -> None:
        """Launch a step as soon as may be."""
        self._waiting.append((plan, step, future))
        self.go_on()

    def noted(self, result: StepOutcome | Exception) -> StepOutcome | Exception:
        """The oldest step that was launched is done, or has failed; its result, with what is known
        by it of guesses that no step verified. What can't be noted is a step that failed, as on a
        CPU: whoever awaits it hears of it."""
        oldest = self._launched.popleft()
        try:
            if not oldest.is_taken:
                self._guessing.take(oldest.plan)
            if isinstance(result, StepOutcome):
                return self._guessing.noted(oldest.plan, result)
        except Exception as error:
            return error
        return result

    def fail(self, failure: Exception) -> None:
        """No step succeeds from here on, and none is launched."""
        self._launched.clear()
        waiting, self._waiting = self._waiting, deque()
        for _, _, future in waiting:
            settle(future, failure)
            if not future.cancelled():
                future.exception()  # what was told already need not be asked for

    def go_on(self) -> None:
        """Launch what waited for the last step that was done."""
        while self._waiting:
            plan, step, future = self._waiting[0]
            if isinstance(step, HostStep):
                self._waiting.popleft()
                self._launched.append(_Launched(plan, is_taken=False))
                self._launch(step, future)
                continue
            if self._launched:
                return
            self._waiting.popleft()
            self._guessing.take(plan)
            try:
                plan = self._guessing.settled(plan)
                settled = step.settled(plan, one_by_one=True)
            except Exception as error:
                settle(future, error)
                continue
            self._launched.append(_Launched(plan, is_taken=True))
            self._launch(settled, future)
