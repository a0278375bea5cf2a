"""Time that requests take outside of steps: before the first step, and after the steps that give
them tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from aioserve import SchedulingPolicy
from aioserve.errors import ConfigError
from aioserve.simulation.cost import CostTable, HostTimes
from aioserve.simulation.records import Ending, RequestRecord
from aioserve.simulation.simulator import simulate
from aioserve.simulation.timeline import Timeline
from aioserve.traces.trace_request import TraceRequest

SHAPE: dict[str, Any] = {
    "prefill_tokens": [0, 64, 512],
    "decode_batch": [0, 4, 16],
    "seconds": [[0.01, 0.0123, 0.02], [0.03, 0.041, 0.043], [0.05, 0.06, 0.0777]],
}
seconds = st.sampled_from([0.0, 2.0**-8, 0.25])
"""Exact in binary, as arrivals are: sums have no rounding."""


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRequest]:
    trace: list[TraceRequest] = []
    arrival = 0.0
    for number in range(draw(st.integers(1, 8))):
        arrival += draw(st.sampled_from([0.0, 0.125, 8.0]))
        prompt, output = draw(st.integers(1, 100)), draw(st.integers(1, 20))
        trace.append(TraceRequest(number, arrival, prompt, output, (), prompt))
    return trace


def run(trace: list[TraceRequest], host: HostTimes, **options: Any) -> dict[int, RequestRecord]:
    shape = SHAPE | {"seconds": options.pop("seconds", SHAPE["seconds"])}
    cost = CostTable(**shape, host=host)
    result = simulate(
        trace,
        SchedulingPolicy(),
        cost=cost,
        num_pages=options.pop("num_pages", 60),
        page_size=4,
        max_num_seqs=3,
        max_num_batched_tokens=64,
        **options,
    )
    return {record.request.number: record for record in result.requests}


def taken_in(trace: list[TraceRequest], intake: float) -> list[TraceRequest]:
    """The trace as the scheduler has it: one request after the other is taken in."""
    moved: list[TraceRequest] = []
    for request in trace:
        begins = max(request.arrival_seconds, moved[-1].arrival_seconds if moved else 0.0)
        moved.append(replace(request, arrival_seconds=begins + intake))
    return moved


@given(traces(), seconds, seconds, st.booleans())
def test_they_move_arrivals_and_answers_and_no_step(trace, intake, delivery, overlap):
    host = HostTimes(intake, delivery)
    found = run(trace, host, overlap=overlap)
    moved = taken_in(trace, intake)
    plain = run(moved, HostTimes(), overlap=overlap)
    for number, record in found.items():
        other = plain[number]
        assert record.request.arrival_seconds == trace[number].arrival_seconds
        assert record.started_seconds == other.started_seconds
        for name in ("first_token_seconds", "end_seconds"):
            assert getattr(record, name) == getattr(other, name) + delivery
        assert record.output_tokens == other.output_tokens
        assert record.max_gap_seconds == other.max_gap_seconds


def test_requests_of_one_moment_are_taken_in_one_after_the_other():
    together = [TraceRequest(n, 1.0, 100, 1, (), 100) for n in range(3)]
    found = run(together, HostTimes(0.25), num_pages=100)
    # A step takes less, so that each has one of its own.
    assert [found[n].started_seconds for n in range(3)] == [1.25, 1.5, 1.75]


def steps_of(trace: list[TraceRequest], host: HostTimes, overlap: bool) -> Timeline:
    timeline = Timeline()
    run(trace, host, overlap=overlap, timeline=timeline)
    return timeline


@pytest.mark.parametrize(("overlap", "delayed"), [(False, 1), (True, 2)])
def test_a_request_that_comes_while_a_step_runs_delays_the_next_one_launched(overlap, delayed):
    trace = [TraceRequest(0, 0.0, 10, 6, (), 10), TraceRequest(1, 2.0**-10, 10, 1, (), 10)]
    plain, found = (
        [
            step.ended_seconds - step.began_seconds
            for step in steps_of(trace, HostTimes(2.0**-8, 0.0, delay), overlap).steps
        ]
        for delay in (0.0, 0.5)
    )
    more = [after - before for before, after in zip(plain, found, strict=True)]
    expected = [0.0] * len(plain)
    expected[delayed] = 0.5
    assert more == pytest.approx(expected)


def test_a_request_that_comes_while_nothing_runs_delays_nothing():
    trace = [TraceRequest(n, 8.0 * n, 10, 3, (), 10) for n in range(4)]
    assert run(trace, HostTimes(0.25, 0.125, 0.5)) == run(trace, HostTimes(0.25, 0.125))


def test_the_first_step_after_an_idle_time_takes_longer():
    arrivals = [0.0, 2.0**-10, 8.0, 8.5]
    trace = [TraceRequest(n, arrival, 10, 2, (), 10) for n, arrival in enumerate(arrivals)]
    plain, found = (
        steps_of(trace, HostTimes(2.0**-8, wake_seconds=wake), False).steps for wake in (0.0, 0.125)
    )
    ends = [-1.0, *(step.ended_seconds for step in plain)]
    is_idle = [step.began_seconds - end > 0.005 for step, end in zip(plain, ends, strict=False)]
    more = [
        after.ended_seconds - after.began_seconds - (before.ended_seconds - before.began_seconds)
        for before, after in zip(plain, found, strict=True)
    ]
    assert is_idle.count(True) == 3
    assert more == pytest.approx([0.125 * idle for idle in is_idle])


@given(traces(), st.sampled_from([2.0**-10, 0.5]), st.booleans())
def test_each_request_delays_at_most_one_step_and_once(trace, delay, overlap):
    host, timeline = HostTimes(2.0**-8, 0.0, delay), Timeline()
    run(trace, host, seconds=[[0.0625] * 3] * 3, overlap=overlap, timeline=timeline)
    times = [(step.ended_seconds - step.began_seconds - 0.0625) / delay for step in timeline.steps]
    assert times == pytest.approx([round(each) for each in times], abs=1e-6)
    assert 0 <= sum(times) < len(trace)  # while nothing runs, the first one comes


def test_a_follower_comes_when_its_caller_has_the_answer():
    first = TraceRequest(0, 0.0, 10, 3, (), 10)
    second = TraceRequest(1, 0.5, 10, 3, (), 10, follows=0, think_seconds=2.0)
    found = run([first, second], HostTimes(0.25, 0.125), closed_loop=True)
    ended = found[0].end_seconds
    assert ended is not None
    assert found[1].request.arrival_seconds == ended + 2.0
    assert found[1].started_seconds == pytest.approx(ended + 2.25)


def test_a_request_that_can_never_fit_waits_for_nothing():
    long = TraceRequest(0, 1.0, 600, 3, (), 600)
    record = run([long], HostTimes(0.25, 0.125))[0]
    assert (record.ending, record.end_seconds) == (Ending.TOO_LONG, 1.0)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), "1", True])
@pytest.mark.parametrize("name", HostTimes.__struct_fields__)
def test_what_is_no_time_is_named(name, value):
    with pytest.raises(ConfigError, match=f"cost table: host: {name}"):
        HostTimes(**{name: value})
    with pytest.raises(ConfigError, match="host must be HostTimes"):
        CostTable(**SHAPE, host=value)
