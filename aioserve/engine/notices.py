"""Collects what observers are told of: requests that came and went since they were told last.

Costs nothing where there are no observers.
"""

from __future__ import annotations

from aioserve.engine.requests import LiveRequest
from aioserve.execution.plan import StepPlan
from aioserve.plugins import Observers, RequestInfo, RequestSummary, StepInfo, info_of
from aioserve.request import FinishReason
from aioserve.scheduling.scheduler import Scheduler

__all__ = ["Notices"]


class Notices:
    """Of one core loop, which says when each request enters the scheduler and leaves it."""

    def __init__(self, observers: Observers, scheduler: Scheduler) -> None:
        self.observers = observers
        self._scheduler = scheduler
        self._arrived: list[RequestInfo] = []
        self._ended: list[LiveRequest] = []

    def arrived(self, live: LiveRequest) -> None:
        if self.observers and live.request is not None:
            self._arrived.append(info_of(live.request))

    def ended(self, live: LiveRequest) -> None:
        """Its mailbox may get its end a little later, but before `tell`."""
        if self.observers:
            self._ended.append(live)

    def tell_of_step(
        self, plan: StepPlan, *, failed: bool, now_seconds: float, num_waiting: int
    ) -> None:
        """A step was committed, or failed."""
        if not self.observers:
            return
        memory = self._scheduler.memory
        self._tell(
            StepInfo(
                step=plan.step,
                end_seconds=now_seconds,
                num_sequences=plan.num_sequences,
                computed_tokens=plan.num_tokens,
                num_preempted=len(plan.preempted),
                failed=failed,
                num_running=self._scheduler.num_running,
                num_waiting=num_waiting,
                pages_free=memory.pool.num_free,
                pages_cached=memory.num_cached,
            )
        )

    def tell(self) -> None:
        """No step is to come for now."""
        if self._arrived or self._ended:
            self._tell(None)

    def _tell(self, step: StepInfo | None) -> None:
        arrived, self._arrived = self._arrived, []
        ended, self._ended = self._ended, []
        self.observers.tell(arrived, step, [_summary(live) for live in ended])


def _summary(live: LiveRequest) -> RequestSummary:
    mailbox, error, timings = live.mailbox, live.mailbox.error, live.mailbox.timings
    return RequestSummary(
        request_id=mailbox.request_id,
        tenant=None if live.request is None else live.request.tenant,
        finish_reason=mailbox.finish_reason or FinishReason.ABORT,
        error=None if error is None else f"{type(error).__name__}: {error}",
        prompt_tokens=mailbox.prompt_tokens,
        completion_tokens=mailbox.completion_tokens,
        first_token_seconds=timings.first_token_seconds,
        total_seconds=timings.total_seconds,
        cached_tokens=mailbox.usage.cached_tokens,
        encoding_seconds=timings.encoding_seconds,
        queued_seconds=timings.queued_seconds,
        inter_token_latency=timings.inter_token_latency,
        preemptions=timings.preemptions,
        device_seconds=timings.device_seconds,
    )
