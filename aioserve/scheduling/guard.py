"""Asks a policy and checks what it answers, so that no policy can harm the mechanism.

A policy that raises or answers nonsense is logged once for that step, by name, and first come,
first served answers for the rest of the step; where that goes on for ever the log doesn't. One that
takes long is named too, once, where there is a clock to measure it by.

Nothing that a policy raises is let through but `KeyboardInterrupt`, which isn't its own. A
`CancelledError` is: these calls await nothing, so it tells of another task than the one that asks.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import reprlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from aioserve.scheduling.policy import Refusal, SchedulingPolicy, Verdict
from aioserve.scheduling.view import RequestView, SchedulerView

__all__ = ["PolicyGuard"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

SLOW_SECONDS = 0.1
"""In one step; a policy that takes longer is said to be slow."""
FALLBACK = SchedulingPolicy()
END = object()
MAX_LOGGED_FAULTS = 10
"""Of the faults beyond, only those whose number is a power of two are logged."""


class PolicyGuard:
    """Stands between the scheduler and one policy; its answers can be used as they are."""

    def __init__(
        self,
        policy: SchedulingPolicy,
        clock: Callable[[], float] | None = None,
        *,
        name: str | None = None,
    ) -> None:
        self.policy = policy
        self.name = name or type(policy).__name__
        """For logs and errors; that of the class unless given."""
        self.faults_total = 0
        """Steps in which the policy raised or gave an answer that isn't one."""
        self.last_fault: str | None = None
        self._failed = False
        self._clock = clock
        self._step_seconds = 0.0
        self._called_slow = False

    def begin_step(self) -> None:
        """Trust the policy again."""
        self._failed = False
        self._step_seconds = 0.0

    def order(self, waiting: Sequence[RequestView], view: SchedulerView) -> Iterator[RequestView]:
        """Waiting requests to start, one by one: each is in `waiting`, none comes twice."""
        # A tuple: what the policy does with it can't change what is checked.
        waiting = tuple(waiting)
        # While answers come in the order of `waiting`, counting them is enough: thousands may wait
        # of which a few can start. A set of those that are left is for policies that reorder.
        num_first = 0
        left: set[int] | None = None
        answer = self._ask("order", lambda: iter(self.policy.order(waiting, view)))
        while answer is not None:
            try:
                request = self._timed("order", lambda answer=answer: next(answer, END))
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                self._fault("order", f"raised {reprlib.repr(error)}", error)
                break
            if request is END:
                return
            if left is None and num_first < len(waiting) and request is waiting[num_first]:
                num_first += 1
                yield waiting[num_first - 1]
                continue
            if left is None:
                left = {id(request) for request in waiting[num_first:]}
            if not isinstance(request, RequestView) or id(request) not in left:
                what = f"named {reprlib.repr(request)}, which doesn't wait or came before"
                self._fault("order", what)
                break
            left.remove(id(request))
            yield request
        for request in waiting[num_first:]:
            if left is None or id(request) in left:
                yield request

    def admit(self, request: RequestView, view: SchedulerView) -> Verdict | Refusal:
        answer = self._ask("admit", lambda: self.policy.admit(request, view))
        if isinstance(answer, Verdict | Refusal):
            return answer
        return self._nonsense("admit", answer, "a Verdict or a Refusal", Verdict.NOW)

    def chunk(self, request: RequestView, budget_tokens: int, view: SchedulerView) -> int:
        answer = self._ask("chunk", lambda: self.policy.chunk(request, budget_tokens, view))
        with contextlib.suppress(TypeError):
            tokens = operator.index(answer)  # pyright: ignore[reportArgumentType]
            if 0 <= tokens <= budget_tokens:
                return tokens
        return self._nonsense("chunk", answer, f"an int in [0, {budget_tokens}]", budget_tokens)

    def victim(
        self, running: Sequence[RequestView], need_pages: int, view: SchedulerView
    ) -> RequestView:
        running = tuple(running)
        answer = self._ask("victim", lambda: self.policy.victim(running, need_pages, view))
        for request in running:
            if request is answer:
                return request
        fallback = FALLBACK.victim(running, need_pages, view)
        return self._nonsense("victim", answer, "one of the running requests", fallback)

    def arrived(self, requests: Sequence[RequestView]) -> None:
        self._tell("arrived", lambda: self.policy.arrived(requests))

    def step_finished(self, step: int, tokens: int) -> None:
        self._tell("step_finished", lambda: self.policy.step_finished(step, tokens))

    def finished(self, requests: Sequence[RequestView]) -> None:
        self._tell("finished", lambda: self.policy.finished(requests))

    def _tell(self, notification: str, call: Callable[[], None]) -> None:
        """Also after a fault: a policy that keeps books must hear of every request's end."""
        try:
            self._timed(notification, call)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._fault(notification, f"raised {reprlib.repr(error)}", error)

    def _ask(self, question: str, call: Callable[[], T]) -> T | None:
        if self._failed:
            return None
        try:
            return self._timed(question, call)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._fault(question, f"raised {reprlib.repr(error)}", error)
            return None

    def _timed(self, question: str, call: Callable[[], T]) -> T:
        if self._clock is None:
            return call()
        began = self._clock()
        try:
            return call()
        finally:
            self._took(question, self._clock() - began)

    def _took(self, question: str, seconds: float) -> None:
        self._step_seconds += seconds
        if self._step_seconds > SLOW_SECONDS and not self._called_slow:
            self._called_slow = True
            logger.warning(
                "scheduling policy %s is slow: %s took %.3g s, of %.3g s in one step; the event "
                "loop stood still meanwhile (said once)",
                self.name,
                question,
                seconds,
                self._step_seconds,
            )

    def _nonsense(self, question: str, answer: object, wanted: str, fallback: T) -> T:
        if not self._failed:
            self._fault(question, f"answered {reprlib.repr(answer)}, not {wanted}")
        return fallback

    def _fault(self, question: str, what: str, error: BaseException | None = None) -> None:
        if self._failed:
            return
        self._failed = True
        self.faults_total += 1
        self.last_fault = f"scheduling policy {self.name}: {question} {what}"
        total = self.faults_total
        if total <= MAX_LOGGED_FAULTS or total.bit_count() == 1:
            logger.error(
                "%s; first come, first served decides this step (fault %d of this policy)",
                self.last_fault,
                total,
                exc_info=error,
            )
