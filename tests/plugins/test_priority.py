"""Policy `priority`: who starts first, who gives way, and who no longer does."""

from __future__ import annotations

import asyncio
import random

import pytest

from aioserve import ConfigError, Engine, SamplingParams
from aioserve.testing import (
    FakeModel,
    check_policy,
    expected_tokens,
    policy_check,
    run_simulated,
)
from aioserve_plugins.priority import Priority
from tests.scheduling.bench import Bench, work


def bench_of(*, seats: int = 2, **options) -> Bench:
    names = options.keys() & {"first", "preempt", "patience_tokens"}
    policy = {name: options.pop(name) for name in names}
    return Bench(policy=Priority(**policy), max_num_seqs=seats, **options)


def ids(items: list[tuple[int, int, int]]) -> list[int]:
    return [sequence_id for sequence_id, _, _ in items]


@pytest.mark.parametrize("first", ["lowest", "highest"])
def test_the_lowest_number_starts_first_unless_the_highest_should(first):
    bench = bench_of(first=first, seats=8, max_num_batched_tokens=64)
    a, b, c, d = (bench.submit(3, priority=priority) for priority in (0, 5, -5, 0))
    expected = [c, a, d, b] if first == "lowest" else [b, a, d, c]
    assert ids(work(bench.plan())) == expected


@pytest.mark.parametrize("overlap", [False, True])
def test_one_that_finds_all_seats_taken_starts_in_the_next_step_or_the_one_after(overlap):
    bench = bench_of(seats=2)
    low, lower = bench.submit(5, 40, priority=1), bench.submit(5, 40, priority=2)
    bench.step()
    in_flight = [bench.plan()] if overlap else []
    urgent = bench.submit(6, 4, priority=0)
    started = []
    for step in range(3):
        in_flight.append(bench.plan())
        if len(in_flight) == 1 + overlap:
            bench.commit(in_flight.pop(0))
        if any(s.sequence_id == urgent for s in bench.running):
            started.append(step)
    assert started[0] <= 1
    assert [s.sequence_id for s in bench.waiting] == [lower]
    assert low in [s.sequence_id for s in bench.running]
    for plan in in_flight:
        bench.commit(plan)
    bench.run()
    assert bench.scheduler.counters.preemptions == 1


def test_one_that_finds_no_pages_gets_those_of_as_few_as_do():
    """Three of four pages each: the urgent one needs four, and one is free."""
    bench = bench_of(seats=8, num_pages=13, max_num_batched_tokens=64)
    lows = [bench.submit([i] * 13, 12, priority=priority) for i, priority in enumerate((1, 2, 1))]
    bench.step()
    urgent = bench.submit([4] * 13, 3, priority=0)
    plan = bench.plan()
    assert plan.preempted == ()
    bench.commit(plan)
    plan = bench.plan()
    assert plan.preempted == (lows[1],)
    assert urgent in ids(work(plan))
    bench.commit(plan)
    bench.run()


def test_equals_wait_for_each_other():
    bench = bench_of(seats=1)
    a = bench.submit(5, 10, priority=3)
    bench.step()
    b = bench.submit(5, 10, priority=3)
    order = []
    while bench.sequences:
        order += ids(work(plan := bench.plan()))
        bench.commit(plan)
    assert order == sorted(order)
    assert {a, b} == set(order)
    assert bench.scheduler.counters.preemptions == 0


def test_nobody_gives_way_where_that_is_not_enough():
    """The urgent one needs two slots, and one of the two is taken by an equally urgent one."""
    bench = bench_of(seats=2)
    bench.submit(5, 20, priority=0)
    bench.submit(5, 20, priority=1)
    bench.step()
    pair = bench.submit_all(5, 4, n=2, priority=0)
    for _ in range(6):
        bench.step()
    assert bench.scheduler.counters.preemptions == 0
    assert {s.sequence_id for s in bench.waiting} <= set(pair)
    bench.run()


def test_without_preemption_the_urgent_one_waits_for_a_seat_and_takes_the_first():
    bench = bench_of(seats=1, preempt=False)
    bench.submit(5, 5, priority=1)
    bench.step()
    low = bench.submit(5, 5, priority=1)
    urgent = bench.submit(5, 5, priority=0)
    order = []
    while bench.sequences:
        order += ids(work(plan := bench.plan()))
        bench.commit(plan)
    assert bench.scheduler.counters.preemptions == 0
    assert order.index(urgent) < order.index(low)


def test_one_that_has_waited_for_its_patience_goes_first_and_gives_way_no_more():
    bench = bench_of(seats=1, patience_tokens=20)
    old = bench.submit(5, 30, priority=9)
    while bench.scheduler.counters.tokens_processed < 20:
        bench.step()
    urgent = bench.submit(5, 3, priority=-9)
    for _ in range(4):
        bench.step()
    assert [s.sequence_id for s in bench.running] == [old]
    assert [s.sequence_id for s in bench.waiting] == [urgent]
    bench.run()
    assert bench.scheduler.counters.preemptions == 0


def test_a_long_prompt_leaves_room_in_the_step_for_an_urgent_one():
    bench = bench_of(seats=4, max_num_batched_tokens=16, num_pages=64)
    long = bench.submit([1] * 120, priority=1)
    bench.step()
    urgent = bench.submit([2] * 12, priority=0)
    plan = bench.plan()
    assert work(plan) == [(long, 16, 4), (urgent, 0, 12)]
    bench.commit(plan)


def test_a_long_prompt_does_not_leave_room_for_ever():
    """There are slots, but no pages that an equally urgent request would give."""
    bench = bench_of(seats=4, max_num_batched_tokens=16, num_pages=40)
    bench.submit([0] * 40, 80, priority=0)
    for _ in range(3):
        bench.step()
    long = bench.submit([1] * 100, 1, priority=1)
    bench.step()
    bench.submit([2] * 130, 20, priority=0)
    steps = [work(plan) for plan in iter_plans(bench, 5)]
    assert long not in ids(steps[0])
    assert long in ids(steps[-1])


def iter_plans(bench: Bench, count: int):
    for _ in range(count):
        plan = bench.plan()
        yield plan
        bench.commit(plan)


def test_an_urgent_one_that_grows_takes_the_pages_of_an_older_less_urgent_one():
    bench = bench_of(seats=2, num_pages=6, prefix_caching=False)
    old = bench.submit([1] * 11, 9, priority=1)
    urgent = bench.submit([2] * 11, 9, priority=0)
    preempted = []
    while bench.sequences:
        plan = bench.plan()
        preempted += plan.preempted
        bench.commit(plan)
    assert preempted == [old]
    assert urgent not in preempted


@pytest.mark.parametrize("seed", range(3))
def test_urgent_requests_overtake_and_everyone_gets_the_same_tokens(seed):
    draw = random.Random(seed)

    async def main():
        model = FakeModel(num_pages=48, max_model_len=96, step_seconds=lambda plan: 0.01)
        async with Engine(model, policy="priority", page_size=4, max_num_seqs=3) as engine:
            waits = {0: [], 1: []}

            async def ask(priority, after, prompt, max_tokens):
                await asyncio.sleep(after)
                answer = await engine.generate(
                    prompt,
                    SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=1),
                    priority=priority,
                )
                assert list(answer.token_ids) == expected_tokens(prompt, max_tokens, 1)
                waits[priority].append(answer.timings.first_token_seconds)

            low = [ask(1, 0.0, [draw.randrange(9)] * 20, 30) for _ in range(12)]
            high = [ask(0, draw.uniform(0.1, 0.8), [9, i] * 4, 5) for i in range(4)]
            await asyncio.gather(*low, *high)
            assert engine.stats().preemptions_total > 0
            return waits

    waits = run_simulated(main, seed=seed)
    assert max(waits[0]) <= 0.08
    assert max(waits[1]) > 0.5


class NeverAges(Priority):
    def order(self, waiting, view):
        return sorted(waiting, key=lambda request: request.priority)


def test_a_policy_of_priorities_that_never_ages_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(policy_check, "MAX_SMALLER_RUSHES", 0)
    with pytest.raises(AssertionError, match="starvation"):
        check_policy(lambda: NeverAges(patience_tokens=100), max_examples=50)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"first": "urgent"}, "first must be 'lowest' or 'highest', got 'urgent'"),
        ({"preempt": 1}, "preempt must be True or False, got 1"),
        ({"patience_tokens": -1}, "patience_tokens must be an int of at least 0, or None, got -1"),
        ({"patience_tokens": True}, "patience_tokens must be an int of .*, got True"),
        ({"patience_tokens": 1.5}, "patience_tokens must be an int of .*, got 1.5"),
    ],
)
def test_an_option_out_of_range_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Priority(**options)
