"""The most urgent first, with preemption of others and ageing."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Literal

from aioserve import (
    ConfigError,
    PolicySpec,
    RequestView,
    SchedulerView,
    SchedulingPolicy,
    hookimpl,
)
from aioserve_plugins._waiting_changes import WaitingChanges, by_arrival, waits

__all__ = ["Priority"]

YIELDED_STEPS = 3
"""Steps in which prompts that are being computed leave room for more urgent ones that came. By then
these have started, or wait for something else: they arrive, others give way, and their pages come
back."""


class Priority(SchedulingPolicy):
    """Serves requests by their `priority`, the lowest number first, as vLLM does. Requests of one
    priority start in order of arrival. With `first="highest"` greater numbers come first.

    With `preempt`, less urgent running requests give way to one that is next to start and has no
    sequence slot or no pages. The least urgent go first, and of those the one that loses the least
    work. Without `preempt`, they run to their end, unless one that came before them runs out of
    pages.

    A prompt that is being computed leaves room in the step for more urgent ones that have just
    come. So a long prompt doesn't delay them.

    Once `patience_tokens` tokens have been processed since a request arrived, it goes before all
    that arrived later, however urgent they are. It then gives way to none of them. With None, a
    request may starve.

    Raises `ConfigError` for an invalid `first` or `preempt`, or a `patience_tokens` below 0.
    """

    def __init__(
        self,
        *,
        first: Literal["lowest", "highest"] = "lowest",
        preempt: bool = True,
        patience_tokens: int | None = 200_000,
    ) -> None:
        if first not in ("lowest", "highest"):
            raise ConfigError(f"first must be 'lowest' or 'highest', got {first!r}")
        if not isinstance(preempt, bool):
            raise ConfigError(f"preempt must be True or False, got {preempt!r}")
        is_int = isinstance(patience_tokens, int) and not isinstance(patience_tokens, bool)
        if patience_tokens is not None and not (is_int and patience_tokens >= 0):
            raise ConfigError(
                f"patience_tokens must be an int of at least 0, or None, got {patience_tokens!r}"
            )
        self.first = first
        self._preempts = preempt
        self.patience_tokens = patience_tokens
        self._changes = WaitingChanges()
        self._queues: defaultdict[int, list[RequestView]] = defaultdict(list)
        """Waiting requests by urgency, each in order of arrival."""
        self._came: dict[RequestView, int | None] = {}
        """Requests to leave room for, with the step in which that began."""
        self._most_urgent_first: list[RequestView] = []
        """Requests to leave room for, as they were in the step `_looked_step`."""
        self._looked_step = -1

    def starvation_bound_tokens(self, request: RequestView) -> int | None:
        return self.patience_tokens

    def order(self, waiting: Sequence[RequestView], view: SchedulerView) -> Iterator[RequestView]:
        self._keep_queues(waiting)
        overdue = 0  # in order of arrival, so those that have waited longest come first
        while overdue < len(waiting) and self._is_overdue(waiting[overdue], view):
            yield waiting[overdue]
            overdue += 1
        if overdue == len(waiting):
            return
        for urgency in sorted(self._queues, reverse=True):
            queue = self._queues[urgency]
            first = bisect_left(queue, waiting[overdue].arrival_index, key=by_arrival)
            yield from islice(queue, first, None)

    def _keep_queues(self, waiting: Sequence[RequestView]) -> None:
        came, gone = self._changes.look(waiting)
        for request in gone:
            self._leave_queue(request)
        for request in came:
            insort(self._queues[self._urgency(request)], request, key=by_arrival)

    def _leave_queue(self, request: RequestView) -> None:
        urgency = self._urgency(request)
        queue = self._queues.get(urgency, [])
        if waits(request, queue):
            del queue[bisect_left(queue, request.arrival_index, key=by_arrival)]
            if not queue:
                del self._queues[urgency]

    def chunk(self, request: RequestView, budget_tokens: int, view: SchedulerView) -> int:
        if not request.pages or self._is_overdue(request, view):
            return budget_tokens
        if view.step != self._looked_step:
            self._looked_step = view.step
            self._look_at_newcomers(view)
        urgency = self._urgency(request)
        for one in self._most_urgent_first:
            if budget_tokens <= 0 or self._urgency(one) <= urgency:
                break
            budget_tokens -= one.uncached_tokens
        return max(0, budget_tokens)

    def _look_at_newcomers(self, view: SchedulerView) -> None:
        """Look once a step: thousands may come at once, and many prompts be computed."""
        for one, step in list(self._came.items()):
            if one.pages or (step is not None and view.step >= step + YIELDED_STEPS):
                del self._came[one]
            elif step is None:
                self._came[one] = view.step
        self._most_urgent_first = sorted(self._came, key=self._urgency, reverse=True)

    def arrived(self, requests: Sequence[RequestView]) -> None:
        self._came.update(dict.fromkeys(requests))
        self._forget_look()

    def finished(self, requests: Sequence[RequestView]) -> None:
        self._changes.forget(requests)
        for request in requests:
            self._leave_queue(request)
            self._came.pop(request, None)
        self._forget_look()

    def _forget_look(self) -> None:
        """Forget the last look: a step without work has the number of the next one."""
        self._looked_step, self._most_urgent_first = -1, []

    def precedence(self, request: RequestView) -> int:
        return self._urgency(request) if self._preempts else 0

    def displaces(
        self, request: RequestView, running: Sequence[RequestView], view: SchedulerView
    ) -> Iterable[RequestView]:
        return super().displaces(
            request, [one for one in running if not self._is_overdue(one, view)], view
        )

    def victim(
        self, running: Sequence[RequestView], need_pages: int, view: SchedulerView
    ) -> RequestView:
        """Choose a victim of the least urgent ones, as by default."""
        spared = [one for one in running if not self._is_overdue(one, view)] or running
        least = min(map(self._urgency, spared))
        return super().victim(
            [one for one in spared if self._urgency(one) == least], need_pages, view
        )

    def _urgency(self, request: RequestView) -> int:
        """Urgency of a request: the greater, the sooner."""
        return request.priority if self.first == "highest" else -request.priority

    def _is_overdue(self, request: RequestView, view: SchedulerView) -> bool:
        waited = view.processed_tokens - request.arrival_processed_tokens
        return self.patience_tokens is not None and waited >= self.patience_tokens


@hookimpl
def aioserve_scheduling_policies() -> list[PolicySpec]:
    return [PolicySpec("priority", Priority, "the most urgent first, preempting others")]
