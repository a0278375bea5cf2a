"""deadline: who goes first, who is refused and why, and how much of a step prompts get."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve import ConfigError
from aioserve.simulation.metrics import metrics_of
from aioserve.simulation.records import Ending
from aioserve.simulation.simulator import simulate
from aioserve.steps.plan import StepPlan
from aioserve.traces.synthetic import synthetic_trace
from aioserve.traces.trace_request import TraceRequest
from aioserve.traces.workload import with_targets
from aioserve_plugins.deadline import WARM_UP_STEPS, Deadline
from aioserve_plugins.fcfs import FirstComeFirstServed
from tests.scheduling.bench import Bench, work
from tests.tiers import examples

STEP_SECONDS = 1.0
NUM_STEPS = WARM_UP_STEPS + 4
NOW = NUM_STEPS * STEP_SECONDS


def measured(**options) -> Bench:
    """A bench whose policy has measured steps of 16 tokens and a second each. The time is `NOW`."""
    bench = Bench(policy=Deadline(**options), num_pages=256)
    bench.submit(16 * NUM_STEPS, 1)
    for step in range(NUM_STEPS):
        bench.commit(bench.plan(step * STEP_SECONDS), (step + 1) * STEP_SECONDS)
        if step == NUM_STEPS - 2:
            bench.submit(1, 2)  # there is work left, so that the last step is measured, too
    return bench


def starts(bench: Bench, now: float, steps: int = 12) -> list[int]:
    """Sequences in the order in which they start."""
    started: list[int] = []
    for _ in range(steps):
        plan = bench.scheduler.plan(now)
        if plan is None:
            break
        bench.scheduler.sanity_check()
        started += [i.sequence_id for i in plan.items if i.start == 0]
        now += STEP_SECONDS
        bench.commit(plan, now)
    return started


def test_the_earliest_deadline_goes_first_and_none_is_ten_seconds():
    bench = Bench(policy=Deadline(), max_num_batched_tokens=64)
    late = bench.submit(4, 1, ttft_target_seconds=30)
    none = bench.submit(4, 1)
    soon = bench.submit(4, 1, ttft_target_seconds=3)
    sooner = bench.submit(4, 1, ttft_target_seconds=3.5, now_seconds=-1.0)
    assert [item[0] for item in work(bench.plan())] == [sooner, soon, none, late]


def test_where_not_all_can_make_it_the_longest_is_put_off():
    bench = measured()
    long = bench.submit(32, 1, ttft_target_seconds=2.6, now_seconds=NOW)
    short = [bench.submit(8, 1, ttft_target_seconds=2.7, now_seconds=NOW) for _ in range(2)]
    assert [i for i in starts(bench, NOW, 1) if i > long - 1] == short


def test_nobody_is_put_off_where_all_can_make_it():
    bench = measured()
    long = bench.submit(30, 1, ttft_target_seconds=4, now_seconds=NOW)
    short = bench.submit(8, 1, ttft_target_seconds=5, now_seconds=NOW)
    assert [i for i in starts(bench, NOW) if i >= long] == [long, short]


def test_who_cannot_make_it_is_refused_with_the_estimate():
    bench = measured()
    hopeless = bench.submit(64, 1, ttft_target_seconds=2, now_seconds=NOW)
    bench.plan(NOW)
    (refused,) = bench.scheduler.take_ended_unplanned()
    assert refused.sequence_id == hopeless
    assert refused.error is not None
    assert refused.error == (
        "its first token would come 4 s after its arrival at the earliest, and "
        "ttft_target_seconds is 2"
    )


def test_nothing_is_drafted_before_something_was_measured():
    bench = Bench(policy=Deadline())
    bench.submit(200, 1, ttft_target_seconds=0.001)
    bench.plan(0.0005)
    assert bench.scheduler.take_ended_unplanned() == []


def test_the_slow_first_steps_of_an_engine_are_not_counted():
    bench = Bench(policy=Deadline(), num_pages=256)
    bench.submit(16 * WARM_UP_STEPS, 4)
    for step in range(WARM_UP_STEPS):
        bench.commit(bench.plan(100.0 * step), 100.0 * (step + 1))
    now = 100.0 * WARM_UP_STEPS
    bench.commit(bench.plan(now), now + 1)
    bench.submit(32, 1, ttft_target_seconds=40, now_seconds=now + 1)
    bench.plan(now + 1)
    assert bench.scheduler.take_ended_unplanned() == []


def test_a_deadline_that_has_passed_is_refused_although_nothing_was_measured():
    bench = Bench(policy=Deadline())
    a = bench.submit(4, 1, ttft_target_seconds=1.0)
    assert bench.scheduler.plan(1.5) is None
    (refused,) = bench.scheduler.take_ended_unplanned()
    assert refused.sequence_id == a
    assert refused.error is not None
    assert "would come 1.5 s" in refused.error


def test_without_rejection_those_that_are_late_come_last_and_are_served():
    bench = measured(reject=False)
    hopeless = bench.submit(64, 1, ttft_target_seconds=0.5, now_seconds=NOW)
    short = bench.submit(8, 1, ttft_target_seconds=2, now_seconds=NOW)
    started = starts(bench, NOW)
    assert [i for i in started if i >= hopeless] == [short, hopeless]
    assert bench.scheduler.take_ended_unplanned() == []
    assert not bench.scheduler.state.sequences


def test_a_request_without_a_target_is_never_refused():
    bench = measured(default_ttft_seconds=0.1)
    plain = bench.submit(64, 1, now_seconds=NOW)
    assert plain in starts(bench, 100.0)
    assert bench.scheduler.take_ended_unplanned() == []


def test_a_pause_between_requests_is_not_taken_for_a_slow_step():
    bench = Bench(policy=Deadline(), num_pages=256)
    for request in range(2 * WARM_UP_STEPS):
        begun = 1000.0 * request
        bench.submit(16, 1, ttft_target_seconds=5, now_seconds=begun)
        bench.commit(bench.plan(begun), begun + STEP_SECONDS)
    assert bench.scheduler.take_ended_unplanned() == []


def test_a_preempted_request_that_has_begun_to_answer_is_not_refused():
    bench = Bench(num_pages=4, policy=Deadline())
    bench.submit(7, 9, ttft_target_seconds=2)
    b = bench.submit(7, 9, ttft_target_seconds=2)
    view = bench.view(b)
    now = 0.0
    while bench.scheduler.state.sequences:
        now += STEP_SECONDS
        bench.commit(bench.plan(now - STEP_SECONDS), now)
    assert view.preemptions == 1
    assert bench.scheduler.take_ended_unplanned() == []


class LinearCost:
    def step_seconds(self, plan: StepPlan) -> float:
        return 0.01 + plan.num_tokens / 10_000


def test_prompts_leave_those_who_decode_the_time_that_they_want():
    trace = [TraceRequest(0, 0.0, 100, 400, (), 512)]
    trace += [TraceRequest(1 + n, 0.5 + n, 8000, 1, (), 512) for n in range(5)]
    trace = with_targets(trace, ttft_target_seconds=60.0, tpot_target_seconds=0.018)
    options = {"cost": LinearCost(), "num_pages": None}
    longest: list[float] = []
    for policy in (Deadline(), FirstComeFirstServed()):
        result = simulate(trace, policy, **options)
        assert all(record.ending is Ending.FINISHED for record in result.requests)
        tpot = metrics_of(result).tpot_seconds
        assert tpot is not None
        longest.append(tpot.max)
    assert longest[0] <= 0.018 < longest[1]


def test_a_target_that_decoding_alone_misses_holds_up_no_prompt():
    trace = [TraceRequest(0, 0.0, 100, 400, (), 512), TraceRequest(1, 0.5, 8000, 1, (), 512)]
    trace = with_targets(trace, tpot_target_seconds=0.005)
    options = {"cost": LinearCost(), "num_pages": None}
    result = simulate(trace, Deadline(), **options)
    plain = simulate(trace, FirstComeFirstServed(), **options)
    assert result.requests[1].first_token_seconds == plain.requests[1].first_token_seconds


def test_small_steps_say_nothing_of_large_ones():
    trace = synthetic_trace("heavy-tails", 120, rate=20.0, seed=8)
    trace = with_targets(trace, ttft_target_seconds=0.3)
    options = {"cost": LinearCost(), "num_pages": None}
    assert metrics_of(simulate(trace, Deadline(), **options)).finished > 90


@settings(max_examples=examples(12))
@given(
    st.sampled_from(["bursts", "heavy-tails", "tenants"]),
    st.sampled_from([20.0, 100.0]),
    st.sampled_from([0.3, 1.0]),
    st.integers(0, 9),
)
def test_what_is_served_is_served_in_time_and_more_of_it_than_in_order_of_arrival(
    name, rate, ttft, seed
):
    trace = synthetic_trace(name, 120, rate=rate, seed=seed)
    trace = with_targets(trace, ttft_target_seconds=ttft)
    options = {"cost": LinearCost(), "num_pages": None}
    result = simulate(trace, Deadline(), **options)
    mine = metrics_of(result)
    plain = metrics_of(simulate(trace, FirstComeFirstServed(), **options))
    assert mine.goodput is not None
    assert plain.goodput is not None
    assert mine.goodput.requests >= 0.98 * plain.goodput.requests
    assert mine.finished + mine.refused == len(trace)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"default_ttft_seconds": 0}, "default_ttft_seconds must be positive and finite, got 0"),
        ({"patience": float("inf")}, "patience must be positive and finite, got inf"),
        ({"reject": "no"}, "reject must be True or False, got 'no'"),
        ({"window": 0}, "window must be an int of at least 1, got 0"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(options, message):
    with pytest.raises(ConfigError, match=message):
        Deadline(**options)
