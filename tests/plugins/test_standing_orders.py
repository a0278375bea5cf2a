"""State that policies keep from step to step: it equals what they would find by looking at all
requests anew."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, Protocol, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve import RequestView, SchedulerView, SchedulingPolicy
from aioserve.testing import check_policy
from aioserve_plugins._standing_order import StandingOrder
from aioserve_plugins._waiting_changes import WaitingChanges
from aioserve_plugins.cache_aware import CacheAware
from aioserve_plugins.priority import Priority
from aioserve_plugins.shortest_first import ShortestFirst
from tests.plugins.plain_orders import (
    PlainCacheAware,
    PlainLookups,
    PlainOrder,
    PlainPriority,
    PlainShortestFirst,
)
from tests.scheduling.bench import Bench
from tests.tiers import examples


class Plain(Protocol):
    def order(
        self, waiting: Sequence[RequestView], view: SchedulerView
    ) -> Iterator[RequestView]: ...


class Compared(SchedulingPolicy):
    """A policy that fails if its order isn't the plain one. Everything else is its own."""

    def __init__(self, policy: SchedulingPolicy, plain: Plain) -> None:
        self.policy = policy
        self.plain = plain
        lookups = plain.lookups if isinstance(plain, PlainOrder) else None
        self.lookups: PlainLookups | None = lookups
        self.starvation_bound_tokens = policy.starvation_bound_tokens
        self.arrived = policy.arrived
        self.precedence = policy.precedence
        self.displaces = policy.displaces
        self.victim = policy.victim

    def order(self, waiting: Sequence[RequestView], view: SchedulerView) -> Iterator[RequestView]:
        plain = self.plain.order(waiting, view)
        for request in self.policy.order(waiting, view):
            assert request is next(plain, None)
            yield request
        assert next(plain, None) is None

    def chunk(self, request: RequestView, budget_tokens: int, view: SchedulerView) -> int:
        if self.lookups is not None and not request.pages:
            self.lookups.starts(request)
        return self.policy.chunk(request, budget_tokens, view)

    def finished(self, requests: Sequence[RequestView]) -> None:
        if self.lookups is not None:
            for request in requests:
                self.lookups.forget(request)
        self.policy.finished(requests)


ORDERS: dict[str, Callable[[], Compared]] = {
    "shortest_first": lambda: Compared(ShortestFirst(), PlainShortestFirst(1024.0, 64)),
    "shortest_first, impatient": lambda: Compared(
        ShortestFirst(patience=2.5, lookups=3), PlainShortestFirst(2.5, 3)
    ),
    "cache_aware": lambda: Compared(CacheAware(), PlainCacheAware(1024.0, 64)),
    "cache_aware, impatient": lambda: Compared(
        CacheAware(patience=2.5, lookups=3), PlainCacheAware(2.5, 3)
    ),
    "priority": lambda: Compared(Priority(patience_tokens=400), PlainPriority(400)),
}


@pytest.mark.filterwarnings("ignore:Compared. starvation_bound_tokens declares")
@pytest.mark.parametrize("name", ORDERS)
def test_an_order_that_is_kept_is_the_plain_one(name: str) -> None:
    check_policy(ORDERS[name], max_examples=examples(8))


@pytest.mark.parametrize("name", ORDERS)
@settings(max_examples=examples(10))
@given(st.integers(0, 2**32))
def test_so_it_is_in_a_deep_queue(name: str, seed: int) -> None:
    random = Random(seed)
    bench = Bench(policy=ORDERS[name](), num_pages=400, prefix_caching=True)
    for _ in range(25):
        for _ in range(random.choice([0, 1, 20])):
            length = random.randrange(1, random.choice([4, 40]))
            ids = [random.randrange(3)] * random.randrange(length) + [9] * length
            bench.submit(ids[:length], random.randrange(1, 4), priority=random.randrange(3))
        for sequence in random.sample(bench.waiting, len(bench.waiting) // 10):
            bench.scheduler.finish(sequence.sequence_id)
        for sequence in random.sample(bench.waiting, len(bench.waiting) // 10):
            end = bench.scheduler.resume if sequence.paused else bench.scheduler.pause
            end(sequence.sequence_id)
        plan = bench.scheduler.plan(0.0)
        if plan is not None:
            bench.commit(plan)
    assert bench.scheduler.policy_calls.last_fault is None


# -- the parts


Line = tuple[int, int, int]
"""Value at 0, growth, and a number of its own."""


def rank(line: Line, now: int) -> tuple[int, int]:
    return line[0] + line[1] * now, line[2]


def holds_until(first: Line, second: Line, now: int) -> float:
    closing = first[1] - second[1]
    return now + (rank(second, now)[0] - rank(first, now)[0]) / closing if closing > 0 else math.inf


LINES = st.tuples(st.integers(-50, 50), st.integers(-5, 5))


@given(st.lists(st.tuples(st.integers(0, 9), st.lists(LINES, max_size=12), st.integers(0, 20))))
def test_a_standing_order_is_that_of_the_ranks_at_each_time(
    steps: list[tuple[int, list[tuple[int, int]], int]],
) -> None:
    standing: StandingOrder[Line] = StandingOrder(rank, holds_until)
    lines: list[Line] = []
    now = number = 0
    for passed, come, leaving in steps:
        now += passed
        for line in [line for line in lines if line[2] % 21 == leaving]:
            standing.remove(line)
            lines.remove(line)
        for value, growth in come:
            number += 1
            lines.append((value, growth, number))
            standing.put(lines[-1])
        assert len(standing) == len(lines)
        expected = sorted((rank(line, now), line) for line in lines)
        assert list(standing.ranked(now)) == expected


class Request:
    def __init__(self, arrival_index: int) -> None:
        self.arrival_index = arrival_index


NUMBERS = st.sets(st.integers(0, 60))


@given(st.lists(st.tuples(NUMBERS, NUMBERS)))
def test_who_came_and_who_left_is_told_of_all_but_those_that_were_forgotten(
    steps: list[tuple[set[int], set[int]]],
) -> None:
    requests = [Request(number) for number in range(61)]
    changes, known = WaitingChanges(), set[int]()
    for waiting, forgotten in steps:
        looked: Any = changes.look(cast("Any", tuple(requests[n] for n in sorted(waiting))))
        came, gone = ([one.arrival_index for one in some] for some in looked)
        assert (came, gone) == (sorted(waiting - known), sorted(known - waiting))
        changes.forget(cast("Any", [requests[n] for n in sorted(forgotten)]))
        known = waiting - forgotten
