"""Bundled policies that keep counts decide like simple ones that look at all waiting requests in
each step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from aioserve import RequestView, SchedulerView
from aioserve.testing import check_policy
from aioserve_plugins.fair_share import FairShare
from aioserve_plugins.priority import YIELDED_STEPS, Priority
from aioserve_plugins.round_robin import RoundRobin
from tests.scheduling.bench import Bench


class CheckedRoundRobin(RoundRobin):
    def _in_turn(
        self, computing: Sequence[RequestView], view: SchedulerView
    ) -> Iterator[RequestView]:
        found = list(super()._in_turn(computing, view))
        assert found == list(self._simply(view))
        return iter(found)

    def _simply(self, view: SchedulerView) -> Iterator[RequestView]:
        seats = view.max_num_seqs - view.num_running
        pages = view.pages_free + view.pages_cached
        is_full = self._blocked
        for request in self._rotation:
            if request.is_running:
                if request.uncached_tokens > 1:
                    yield request
            elif not is_full and request not in self._put_off:
                known = request.prompt_tokens + request.generated_tokens
                pages -= -(-known // view.page_size)
                seats -= request.num_samples
                is_full = pages < 0 or seats < 0
                if not is_full:
                    yield request


@pytest.mark.more
def test_round_robin_deals_to_those_to_whom_a_look_at_the_whole_rotation_would() -> None:
    check_policy(lambda: CheckedRoundRobin(chunk_size=3), max_examples=25)


class CheckedFairShare(FairShare):
    def preempt(self, running: Sequence[RequestView], view: SchedulerView) -> Iterable[RequestView]:
        giving = list(super().preempt(running, view))
        waiting = view.waiting
        most = max(self._excess(request.tenant) for request in running)
        if all(most <= self._counter(request.tenant) for request in waiting):
            assert not giving
        else:
            assert giving == self._give_way(running, waiting, view)
        return giving

    def _by_service(
        self, waiting: Sequence[RequestView], counters: Mapping[str | None, float]
    ) -> Iterator[RequestView]:
        left = list(waiting)
        for request in super()._by_service(waiting, counters):
            first = {one.tenant: one for one in reversed(left)}.values()
            assert request is min(
                first, key=lambda one: (counters.get(one.tenant, 0.0), one.arrival_index)
            )
            left.remove(request)
            yield request
        assert not left


def test_fair_share_starts_and_preempts_whom_a_look_at_all_that_wait_would() -> None:
    check_policy(lambda: CheckedFairShare(lead_tokens=5.0), max_examples=25)


class CheckedPriority(Priority):
    def __init__(self, *, patience_tokens: int) -> None:
        super().__init__(patience_tokens=patience_tokens)
        self.came: dict[RequestView, int | None] = {}

    def chunk(self, request: RequestView, budget_tokens: int, view: SchedulerView) -> int:
        tokens = super().chunk(request, budget_tokens, view)
        if not request.pages or self._is_overdue(request, view):
            assert tokens == budget_tokens
            return tokens
        for one, step in list(self.came.items()):
            if one.pages or (step is not None and view.step >= step + YIELDED_STEPS):
                del self.came[one]
            elif step is None:
                self.came[one] = view.step
        more_urgent = [one for one in self.came if one.priority < request.priority]
        left = budget_tokens - sum(one.uncached_tokens for one in more_urgent)
        assert tokens == max(0, left)
        return tokens

    def arrived(self, requests: Sequence[RequestView]) -> None:
        super().arrived(requests)
        self.came.update(dict.fromkeys(requests))

    def finished(self, requests: Sequence[RequestView]) -> None:
        super().finished(requests)
        for request in requests:
            self.came.pop(request, None)


@pytest.mark.more
def test_priority_leaves_room_for_those_for_whom_a_look_at_all_newcomers_would() -> None:
    check_policy(lambda: CheckedPriority(patience_tokens=300), max_examples=25)


class Seen:
    """The part of a request that decides about the room left for it."""

    def __init__(self, *, pages: int, priority: int) -> None:
        self.pages, self.priority, self.arrival_index = pages, priority, priority
        self.uncached_tokens, self.arrival_processed_tokens = 10, 0


def test_priority_leaves_room_for_those_that_came_since_a_step_without_work() -> None:
    """The step without work has the number of the next one."""
    policy = Priority()
    computed: Any = Seen(pages=1, priority=5)
    first: Any = Seen(pages=0, priority=0)
    second: Any = Seen(pages=0, priority=1)
    view: Any = SimpleNamespace(step=1, processed_tokens=0)
    policy.arrived([first])
    assert policy.chunk(computed, 100, view) == 90
    policy.arrived([second])
    assert policy.chunk(computed, 100, view) == 80
    policy.finished([first])
    assert policy.chunk(computed, 100, view) == 90


def test_fair_share_keeps_a_further_sample_in_its_place_of_arrival() -> None:
    policy = CheckedFairShare()
    bench = Bench(policy=policy, num_pages=200, max_num_seqs=2)
    _, sample = bench.submit_all([1, 2, 3, 4], 60, n=2, tenant="a")
    later = bench.submit([5, 6], 8, tenant="a")
    for _ in range(3):
        bench.step()
    state = bench.scheduler.state
    state.preempt(state.sequences[sample], state.launched + 1)
    waiting = [bench.view(sample), bench.view(later)]
    assert waiting == list(policy._by_service(waiting, {}))
