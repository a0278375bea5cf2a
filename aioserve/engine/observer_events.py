"""Collects events for observers: requests that came and went since the last report.

Costs nothing without observers.
"""

from __future__ import annotations

import msgspec

from aioserve.engine.requests import LiveRequest, LiveSample, RequestTable
from aioserve.plugins import Observers, RequestInfo, RequestSummary, StepInfo, StepPart, info_of
from aioserve.request import FinishReason
from aioserve.scheduling.scheduler import Scheduler
from aioserve.scheduling.speculation.verify import num_not_drafted
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.plan import ItemKind, StepPlan, WorkItem

__all__ = ["ObserverEvents"]


class StepParts(msgspec.Struct, frozen=True):
    """Requests of one step, as reported to observers of steps."""

    parts: tuple[StepPart, ...]
    computed_tokens: int
    preempted: tuple[tuple[str, int], ...]
    """Request ids and sample indices of preempted sequences."""


class ObserverEvents:
    """Events of one core loop. The loop reports each request that enters or leaves the
    scheduler."""

    def __init__(self, observers: Observers, scheduler: Scheduler, table: RequestTable) -> None:
        self.observers = observers
        self._scheduler = scheduler
        self._table = table
        self._arrived: list[RequestInfo] = []
        self._ended: list[LiveRequest] = []

    def arrived(self, live: LiveRequest) -> None:
        if self.observers and live.request is not None:
            self._arrived.append(info_of(live.request))

    def ended(self, live: LiveRequest) -> None:
        """Note the end of a request. Its mailbox may end a little later, but before `tell`."""
        if self.observers:
            self._ended.append(live)

    def parts_of(self, plan: StepPlan, outcome: StepOutcome | None) -> StepParts:
        """List the requests whose tokens a step computed. `outcome` is None if the step failed.

        Call it before the commit: a sequence that ends there is forgotten.
        """
        samples, row, parts = self._table.samples, 0, list[StepPart]()
        for item in plan.items:
            sample = samples.get(item.sequence_id)
            if sample is not None and outcome is not None and item.kind is ItemKind.VERIFY:
                parts.append(self._verified(item, sample, row, outcome))
            elif sample is not None:
                parts.append(_part(item, sample))
            row += len(item.rows)
        named = [samples[one] for one in plan.preempted if one in samples]
        preempted = [(sample.request.request_id, sample.index) for sample in named]
        computed = plan.num_tokens
        if outcome is not None:
            computed -= num_not_drafted(plan, outcome)
        return StepParts(tuple(parts), computed, tuple(preempted))

    def _verified(
        self, item: WorkItem, sample: LiveSample, row: int, outcome: StepOutcome
    ) -> StepPart:
        """Describe a verified item. The plan has its largest possible size, the outcome its true
        one."""
        return StepPart(
            sample.request.mailbox.request_id,
            sample.index,
            self._scheduler.num_known(item.sequence_id) - 1,
            1 + outcome.drafted.get(row, 0),
            outcome.token_counts.get(row, 1),
            True,
        )

    def tell_of_step(
        self,
        plan: StepPlan,
        parts: StepParts,
        *,
        failed: bool,
        began_seconds: float,
        now_seconds: float,
        num_waiting: int,
    ) -> None:
        """Report a step that was committed or has failed."""
        usage = self._scheduler.memory.usage()
        self._tell(
            StepInfo(
                step=plan.step,
                end_seconds=now_seconds,
                num_sequences=plan.num_sequences,
                computed_tokens=parts.computed_tokens,
                num_preempted=len(plan.preempted),
                failed=failed,
                num_running=self._scheduler.num_running,
                num_waiting=num_waiting,
                pages_free=usage.pages_free,
                pages_cached=usage.pages_cached,
                pages_fenced=usage.pages_fenced,
                pages_held_by_requests=usage.pages_held_by_requests,
                begin_seconds=began_seconds,
                parts=parts.parts,
                preempted=parts.preempted,
            )
        )

    def tell(self) -> None:
        """Report requests if no step is coming, or steps aren't watched."""
        if self._arrived or self._ended:
            self._tell(None)

    def _tell(self, step: StepInfo | None) -> None:
        arrived, self._arrived = self._arrived, []
        ended, self._ended = self._ended, []
        self.observers.tell(arrived, step, [_summary(live) for live in ended])


def _part(item: WorkItem, sample: LiveSample) -> StepPart:
    return StepPart(
        sample.request.mailbox.request_id,
        sample.index,
        item.start,
        item.count,
        len(item.rows),
        item.kind is not ItemKind.PREFILL,
    )


def _summary(live: LiveRequest) -> RequestSummary:
    mailbox, error, timings = live.mailbox, live.mailbox.error, live.mailbox.timings
    return RequestSummary(
        request_id=mailbox.request_id,
        tenant=None if live.request is None else live.request.hints.tenant,
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
        arrival_seconds=mailbox.started_seconds,
    )
