"""Metrics that are worked out by hand."""

from __future__ import annotations

import tracemalloc
from math import inf

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.simulation.gaps import ServiceGap
from aioserve.simulation.metrics import Targets, block_hits, metrics_of, targets_of
from aioserve.simulation.records import Ending, RequestRecord, SimulationResult
from aioserve.traces.trace_request import TraceRequest


def record(
    number: int, first: float, end: float, output: int, *, tenant: str = ""
) -> RequestRecord:
    return RequestRecord(
        TraceRequest(number, 1.0, 10, output, (), 10, tenant=tenant),
        Ending.FINISHED,
        output,
        started_seconds=1.5,
        first_token_seconds=first,
        end_seconds=end,
        wait_tokens=number,
    )


def result_of(*records: RequestRecord) -> SimulationResult:
    return SimulationResult(records, 4, 10, 10.0, 8.0, 5, 100, 90, 0, 0, 0, 2.5, 5, None)


def test_latencies_are_those_of_the_records() -> None:
    refused = RequestRecord(TraceRequest(9, 1.0, 10, 5, (), 10), Ending.REFUSED, end_seconds=1.0)
    metrics = metrics_of(result_of(record(0, 2.0, 5.0, 4), record(1, 4.0, 4.0, 1), refused))
    assert metrics.ttft_seconds is not None
    # The one that was refused is infinitely late: of three the middle one is the second.
    assert (metrics.ttft_seconds.mean, metrics.ttft_seconds.p50) == (2.0, 3.0)
    assert (metrics.ttft_seconds.p99, metrics.ttft_seconds.max) == (inf, inf)
    assert metrics.tpot_seconds is not None
    assert metrics.tpot_seconds.mean == 1.0
    assert metrics.e2e_seconds is not None
    assert (metrics.e2e_seconds.mean, metrics.e2e_seconds.p50) == (3.5, 4.0)
    assert metrics.queue_seconds is not None
    assert (metrics.queue_seconds.mean, metrics.queue_seconds.never) == (0.5, 1)
    assert metrics.busy_share == 0.8
    assert (metrics.finished, metrics.refused, metrics.max_wait_tokens) == (2, 1, 1)
    assert metrics.output_tokens_per_second == 0.5
    assert (metrics.kv_occupancy_mean, metrics.kv_occupancy_max) == (0.25, 0.5)
    assert metrics.goodput is None


def test_an_answer_that_was_never_finished_has_no_time_per_token() -> None:
    # Preempted after two tokens, and refused when it asked to go on.
    cut = RequestRecord(
        TraceRequest(9, 1.0, 10, 5, (), 10),
        Ending.REFUSED,
        2,
        started_seconds=1.5,
        first_token_seconds=2.0,
        end_seconds=50.0,
    )
    metrics = metrics_of(result_of(cut))
    assert metrics.tpot_seconds is not None
    assert metrics.e2e_seconds is not None
    assert metrics.tpot_seconds.p50 == metrics.e2e_seconds.p50 == inf
    assert metrics.ttft_seconds is not None
    assert metrics.ttft_seconds.max == 1.0


@pytest.mark.parametrize(
    ("targets", "good"),
    [
        ({"deadline_seconds": 9.0}, 2),
        ({"ttft_target_seconds": 1.0}, 1),
        ({"ttft_target_seconds": 0.9}, 0),
        ({"tpot_target_seconds": 0.9}, 1),
        ({"tpot_target_seconds": 1.0, "ttft_target_seconds": 3.0}, 2),
    ],
)
def test_good_requests_meet_all_targets_that_are_given(
    targets: dict[str, float], good: int
) -> None:
    refused = RequestRecord(TraceRequest(9, 1.0, 10, 5, (), 10), Ending.REFUSED, end_seconds=1.0)
    records = (record(0, 2.0, 5.0, 4), record(1, 4.0, 4.0, 1), refused)
    for one in records:
        one.request = msgspec.structs.replace(one.request, **targets)
    goodput = metrics_of(result_of(*records)).goodput
    assert goodput is not None
    assert (goodput.requests, goodput.share, goodput.requests_per_second) == (
        good,
        good / 3,
        good / 10,
    )


def test_each_tenant_and_each_class_is_measured_by_the_targets_of_its_own_requests() -> None:
    first, other = record(0, 2.0, 5.0, 4, tenant="a"), record(1, 4.0, 4.0, 1, tenant="b")
    first.request = msgspec.structs.replace(
        first.request, request_class="chat", ttft_target_seconds=0.9, tpot_target_seconds=2.0
    )
    other.request = msgspec.structs.replace(other.request, ttft_target_seconds=3.0)
    metrics = metrics_of(result_of(first, other, record(2, 2.0, 5.0, 4)))
    shares = {
        name: None if group.goodput is None else group.goodput.share
        for name, group in (metrics.tenants | metrics.classes).items()
    }
    assert shares == {"a": 0.0, "b": 1.0, "chat": 0.0}
    assert metrics.goodput is not None
    assert metrics.goodput.requests == 2  # the third has no target, and its completion
    requests = [first.request, other.request]
    assert targets_of(requests) == Targets(ttft_seconds=(0.9, 3.0), tpot_seconds=(2.0,))
    assert targets_of([record(2, 2.0, 5.0, 4).request]) is None


def test_tenants_are_measured_each_for_itself() -> None:
    metrics = metrics_of(
        result_of(
            record(3, 2.0, 5.0, 4, tenant="b"),
            record(1, 3.0, 5.0, 2, tenant="a"),
            record(2, 4.0, 5.0, 2, tenant="a"),
        )
    )
    assert list(metrics.tenants) == ["a", "b"]
    theirs = metrics.tenants["a"]
    assert (theirs.requests, theirs.finished, theirs.tokens) == (2, 2, 24)
    assert theirs.max_wait_tokens == 2
    assert theirs.ttft_seconds is not None
    assert theirs.ttft_seconds.mean == 2.5


@pytest.mark.parametrize(
    ("prompt", "ids", "cached", "page_size", "hits"),
    [
        (100, 2, 0, 16, 0),
        (100, 2, 63, 16, 0),
        (100, 2, 64, 16, 1),
        (100, 2, 95, 16, 1),  # the second block has 36 tokens, of which 32 fill pages
        (100, 2, 96, 16, 2),
        (128, 2, 112, 16, 2),  # the last page of a prompt that is all in the cache
        (128, 2, 127, 16, 2),
        (66, 2, 64, 16, 1),  # nothing of the second block was found
        (66, 2, 65, 16, 2),
        (100, 1, 99, 16, 1),
    ],
)
def test_blocks_found_are_counted_whole(
    prompt: int, ids: int, cached: int, page_size: int, hits: int
) -> None:
    request = TraceRequest(0, 0.0, prompt, 1, tuple(range(ids)), 64)
    assert block_hits(RequestRecord(request, cached_tokens=cached), page_size) == hits


def test_a_tenant_that_waits_for_nothing_is_not_behind() -> None:
    gap = ServiceGap()
    gap.step([("a", 100)], ["a"])
    gap.step([("a", 100)], [])
    assert gap.most == 0
    gap.step([("a", 100)], ["a", "b"])
    gap.step([("a", 20), ("b", 50)], ["a", "b"])
    assert gap.most == 100
    gap.step([("a", 500)], ["a"])
    gap.step([("a", 120)], ["a", "b"])
    assert gap.most == 120


TENANTS = range(4)


@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(0, 9)), max_size=3),
            st.sets(st.sampled_from(TENANTS), max_size=2).map(set(TENANTS).difference),
            st.integers(1, 4),
        ),
        max_size=10,
    )
)
def test_the_gap_is_that_of_the_worst_span(
    several: list[tuple[list[tuple[int, int]], set[int], int]],
) -> None:
    gap = ServiceGap()
    for served, waiting, times in several:
        gap.step([(str(c), n) for c, n in served], {str(c) for c in waiting}, times)
    steps = [(served, waiting) for served, waiting, times in several for _ in range(times)]
    worst = 0
    for first in range(len(steps)):
        got = [0 for _ in TENANTS]
        waited = set(TENANTS)
        for served, waiting in steps[first:]:
            waited &= waiting
            for tenant, tokens in served:
                got[tenant] += tokens
            theirs = [got[tenant] for tenant in waited]
            worst = max(worst, max(theirs, default=0) - min(theirs, default=0))
    assert gap.most == worst


def test_tenants_that_come_and_go_take_the_memory_of_those_that_wait_at_once() -> None:
    """500 tenants in pairs: the pairs of them all are 250,000."""
    gap = ServiceGap()
    tracemalloc.start()
    for number in range(0, 500, 2):
        pair = [str(number), str(number + 1)]
        gap.step([(pair[0], 3)], pair)
        gap.step([(pair[1], 4)], pair)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert gap.most == 4
    assert most_bytes < 100_000


def test_tenants_that_are_served_nothing_yet_take_no_memory_in_pairs() -> None:
    names = [str(number) for number in range(500)]
    gap = ServiceGap()
    tracemalloc.start()
    for number in range(400):
        gap.step([(names[number], 7), (names[499], 1)], names[number + 1 :])
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert gap.most == 400
    assert most_bytes < 200_000
