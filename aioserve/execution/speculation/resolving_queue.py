"""Steps that verify draft tokens, on a device that runs ahead of the host.

Draft tokens depend on the last token, which the host only knows once the step before is done. A
step that verifies is launched then, and later steps wait with it. All others are launched as soon
as they come, while earlier steps run.

    loop      read 8, 9    results 7, resolve 8    read 10    results 8
    device    [ step 7 ]                 [ step 8 ][ step 9 ]           ..
                         8 verifies: it waits for 7, and 9 behind it

If draft tokens are computed on the device, 8 is resolved when they are known. The loop never waits.

On a CPU nothing waits: the thread that computes a step knows the tokens of the one before.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from aioserve.execution.host import Host, ReadStep
from aioserve.execution.loop_callbacks import resolve
from aioserve.execution.speculation.resolver import DraftRequest
from aioserve.execution.step_arrays import StepArrays, UnresolvedStep
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.plan import StepPlan

__all__ = ["ResolvingQueue"]

OutcomeFuture = asyncio.Future[StepOutcome]
Launch = Callable[[StepArrays, OutcomeFuture, StepPlan | None], object]
Ask = Callable[[DraftRequest, Callable[[Exception | None], None]], None]


@dataclass(slots=True)
class _Launched:
    plan: StepPlan
    is_taken: bool
    """True if the resolver has already taken its slot changes."""


class ResolvingQueue:
    """The order in which steps are launched. Used on the event loop's thread."""

    def __init__(
        self,
        host: Host,
        launch: Launch,
        pass_by: Callable[[StepPlan], object] = lambda plan: None,
        ask: Ask | None = None,
    ) -> None:
        """`launch` enqueues a step. It also gets the plan if a follower of steps must still hear of
        it, otherwise None. `pass_by` takes the plan of a failed step. Call `noted` and then `go_on`
        for each launched step, in order.

        `ask` has draft tokens computed and tells a follower of their plan; it later calls back on
        the loop. Without it the host's drafter makes them when it is called.
        """
        self._host = host
        self._launch = launch
        self._pass_by = pass_by
        self._ask = ask
        self._waiting: deque[tuple[StepPlan, ReadStep, OutcomeFuture]] = deque()
        self._launched: deque[_Launched] = deque()
        self._asking: tuple[StepPlan, UnresolvedStep, OutcomeFuture] | None = None
        """Step whose draft tokens are being computed."""

    def put(self, plan: StepPlan, step: ReadStep, future: OutcomeFuture) -> None:
        """Launch a step as soon as possible, or fail it when its turn comes."""
        self._waiting.append((plan, step, future))
        self.go_on()

    def noted(self, result: StepOutcome | Exception) -> StepOutcome | Exception:
        """Note the result of the oldest launched step.

        Return it with the results of dry runs. An error in taking note fails the step, as on a CPU.
        The resolver hears of every step, and keeps nothing without a drafter.
        """
        oldest = self._launched.popleft()
        try:
            if not oldest.is_taken:
                self._host.resolver.take(oldest.plan)
            if isinstance(result, StepOutcome):
                return self._host.resolver.noted(oldest.plan, result)
        except Exception as error:
            return error
        return result

    def fail(self, failure: Exception) -> None:
        """Fail all waiting steps, and launch no more."""
        self._launched.clear()
        futures = [future for _, _, future in self._waiting]
        self._waiting.clear()
        if self._asking is not None:
            futures.append(self._asking[2])
            self._asking = None
        for future in futures:
            resolve(future, failure)
            if not future.cancelled():
                future.exception()  # mark as retrieved: it may have been told already

    def go_on(self) -> None:
        """Launch the steps that waited for the last finished one."""
        while self._waiting and self._asking is None:
            plan, step, future = self._waiting[0]
            if isinstance(step, StepArrays):
                self._waiting.popleft()
                self._launched.append(_Launched(plan, is_taken=False))
                self._launch(step, future, plan)
                continue
            if self._launched:
                return
            self._waiting.popleft()
            self._open(plan, step, future)

    def _open(
        self, plan: StepPlan, step: UnresolvedStep | Exception, future: OutcomeFuture
    ) -> None:
        """Launch a step whose predecessors are all done."""
        request = None
        try:
            self._host.resolver.take(plan)
            if isinstance(step, Exception):
                raise step
            if self._ask is not None:
                request = self._host.resolver.draft_request(plan)
        except Exception as error:
            self._pass_by(plan)
            resolve(future, error)
            return
        if self._ask is None or request is None or not request.slots:
            self._resolve(plan, step, future, followed=plan)
            return
        self._asking = plan, step, future
        self._ask(request, self._answered)

    def _answered(self, error: Exception | None) -> None:
        """Go on once the requested draft tokens are known or have failed."""
        if self._asking is None:
            return  # the step was given up before
        (plan, step, future), self._asking = self._asking, None
        if error is None:
            self._resolve(plan, step, future, followed=None)
        else:
            resolve(future, error)
        self.go_on()

    def _resolve(
        self, plan: StepPlan, step: UnresolvedStep, future: OutcomeFuture, followed: StepPlan | None
    ) -> None:
        try:
            plan = self._host.resolver.resolved(plan)
            resolved = step.resolved(plan, one_by_one=True)
        except Exception as error:
            if followed is not None:
                self._pass_by(followed)
            resolve(future, error)
            return
        self._launched.append(_Launched(plan, is_taken=True))
        self._launch(resolved, future, followed)
