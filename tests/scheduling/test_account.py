"""Accounts of requests: when they started, what they found, their share of the device."""

from __future__ import annotations

import pytest

from aioserve.scheduling.account import RequestAccount
from tests.scheduling.bench import Bench


def account(bench: Bench, sequence_id: int) -> RequestAccount:
    return bench.scheduler.account_of(sequence_id)


def test_a_request_starts_with_the_step_that_is_planned_first_and_finds_what_is_cached_then():
    bench = Bench(prefix_caching=True, max_num_batched_tokens=5)
    first = bench.submit(8)
    told = account(bench, first)
    assert (told.started_seconds, told.cached_tokens) == (None, None)
    bench.commit(bench.plan(2.0), 3.0)
    bench.commit(bench.plan(4.0), 5.0)
    assert (told.started_seconds, told.cached_tokens) == (2.0, 0)
    second = account(bench, bench.submit([*range(8), 9, 9]))
    bench.commit(bench.plan(6.0), 7.0)
    assert (second.started_seconds, second.cached_tokens) == (6.0, 8)


def test_the_time_of_a_step_is_shared_out_by_tokens_whatever_comes_of_it():
    bench = Bench()
    one, many, samples = (
        bench.submit_all(1),
        bench.submit_all(6),
        bench.submit_all(3, n=3),
    )
    accounts = [account(bench, ids[0]) for ids in (one, many, samples)]
    plan = bench.plan()
    bench.scheduler.charge(plan, 10.0)
    bench.commit(plan)
    assert [a.device_seconds for a in accounts] == pytest.approx([1.0, 6.0, 3.0])
    plan = bench.plan()
    bench.scheduler.charge(plan, 5.0)
    bench.fail(plan)
    assert [a.device_seconds for a in accounts] == pytest.approx([2.0, 7.0, 6.0])


def test_a_step_in_flight_is_charged_to_a_request_that_has_left():
    bench = Bench()
    sequence_id = bench.submit(4)
    told = account(bench, sequence_id)
    plan = bench.plan()
    bench.scheduler.finish(sequence_id)
    bench.scheduler.charge(plan, 1.5)
    bench.commit(plan)
    assert told.device_seconds == pytest.approx(1.5)


def test_what_was_found_of_a_step_that_failed_is_found_anew():
    bench = Bench(prefix_caching=True, max_num_batched_tokens=8)
    bench.submit(8)
    failing = bench.plan(1.0)
    told = account(bench, bench.submit([*range(8), 9]))
    bench.plan(2.0)
    assert (told.started_seconds, told.cached_tokens) == (2.0, 8)
    bench.fail(failing)
    assert (told.started_seconds, told.cached_tokens) == (2.0, None)
    bench.plan(3.0)
    assert (told.started_seconds, told.cached_tokens) == (2.0, 0)


def test_what_a_preempted_request_finds_of_its_own_does_not_count():
    bench = Bench(prefix_caching=True)
    sequence_id = bench.submit(9)
    told = account(bench, sequence_id)
    bench.step()
    state = bench.scheduler.state
    state.preempt(bench.sequences[sequence_id], state.launched + 1)
    bench.step()
    assert bench.view(sequence_id).cached_tokens == 8
    assert (told.cached_tokens, told.preemptions) == (0, 1)
