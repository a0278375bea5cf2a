"""Callers who wait for their answers: a turn comes its time to think after the one before it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from aioserve import RequestView, SchedulerView, SchedulingPolicy, Verdict
from aioserve.errors import TraceError
from aioserve.simulation.records import Ending, SimulationResult
from aioserve.simulation.simulator import simulate
from aioserve.steps.plan import StepPlan
from aioserve.traces.synthetic import synthetic_trace
from aioserve.traces.trace_request import TraceRequest
from aioserve.traces.workload import with_arrivals


class LinearCost:
    def step_seconds(self, plan: StepPlan) -> float:
        return 1.0 + plan.num_tokens / 100


def run(
    trace: list[TraceRequest],
    policy: SchedulingPolicy | None = None,
    *,
    closed_loop: bool = True,
    num_pages: int | None = 40,
    max_num_seqs: int = 2,
) -> SimulationResult:
    return simulate(
        trace,
        policy or SchedulingPolicy(),
        cost=LinearCost(),
        num_pages=num_pages,
        page_size=4,
        max_num_seqs=max_num_seqs,
        closed_loop=closed_loop,
    )


@st.composite
def conversations(draw: st.DrawFn) -> list[TraceRequest]:
    trace: list[TraceRequest] = []
    for number, arrival in enumerate(sorted(draw(st.lists(st.floats(0, 50), max_size=8)))):
        prompt, follows = draw(st.integers(1, 200)), None
        if trace:
            follows = draw(st.sampled_from([None, *(r.number for r in trace)]))
        trace.append(
            TraceRequest(
                number,
                arrival,
                prompt,
                draw(st.integers(1, 30)),
                (),
                prompt,
                follows=follows,
                think_seconds=draw(st.sampled_from([0.0, 0.5, 20.0])),
            )
        )
    return trace


@settings(deadline=None)
@given(conversations())
def test_a_turn_comes_when_its_caller_has_read_and_thought(trace: list[TraceRequest]) -> None:
    result = run(trace)
    ended = {record.request.number: record.end_seconds for record in result.requests}
    assert sorted(ended) == [request.number for request in trace]
    arrivals = [record.request.arrival_seconds for record in result.requests]
    assert arrivals == sorted(arrivals)
    for record in result.requests:
        request, told = record.request, trace[record.request.number]
        if request.follows is None:
            assert request == told
        else:
            before = ended[request.follows]
            assert before is not None
            assert request.arrival_seconds == before + told.think_seconds
            assert replace(request, arrival_seconds=told.arrival_seconds) == told
        assert record.ending is not None
        assert record.end_seconds is not None
        assert record.end_seconds >= request.arrival_seconds


@settings(deadline=None)
@given(conversations())
def test_without_a_closed_loop_each_comes_when_the_trace_says(trace: list[TraceRequest]) -> None:
    alone = [replace(request, follows=None, think_seconds=0.0) for request in trace]
    times = [r.end_seconds for r in run(trace, closed_loop=False).requests]
    assert times == [r.end_seconds for r in run(alone).requests]


def test_a_turn_comes_after_one_that_was_refused_too() -> None:
    class Never(SchedulingPolicy):
        def admit(self, request: RequestView, view: SchedulerView) -> Verdict:
            return Verdict.NEVER

    trace = [
        TraceRequest(0, 3.0, 8, 5, (), 8),
        TraceRequest(1, 4.0, 8, 5, (), 8, follows=0, think_seconds=7.0),
    ]
    first, second = run(trace, Never()).requests
    assert first.ending is second.ending is Ending.REFUSED
    assert second.request.arrival_seconds == 10.0


def test_a_turn_that_follows_none_before_it_is_refused() -> None:
    trace = [TraceRequest(0, 0.0, 8, 5, (), 8, follows=1), TraceRequest(1, 1.0, 8, 5, (), 8)]
    with pytest.raises(TraceError, match="request 0 follows request 1, which doesn't come before"):
        run(trace)
    assert len(run(trace, closed_loop=False).requests) == 2


def test_a_slow_service_is_asked_less_in_a_closed_loop() -> None:
    trace = synthetic_trace("conversations", 60, rate=20.0)
    options = {"num_pages": None, "max_num_seqs": 1}
    open_loop, closed = (run(trace, closed_loop=closed, **options) for closed in (False, True))
    waits = [
        max((r.started_seconds or 0.0) - r.request.arrival_seconds for r in result.requests)
        for result in (open_loop, closed)
    ]
    assert waits[1] < waits[0]


def test_drawn_arrivals_are_of_sessions_in_a_closed_loop() -> None:
    trace = synthetic_trace("conversations", 200)
    begin = [index for index, request in enumerate(trace) if request.follows is None]
    drawn = with_arrivals(trace, "poisson", rate=1.0, closed_loop=True)
    last = drawn[begin[-1]].arrival_seconds
    assert last == pytest.approx(len(begin), rel=0.5)
    ended = {r.request.number: r.end_seconds for r in run(drawn, num_pages=None).requests}
    assert None not in ended.values()
