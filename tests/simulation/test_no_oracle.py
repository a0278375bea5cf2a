"""The simulator keeps the recorded answers to itself: a policy learns how long one is when it ends,
as in the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve import RequestView, SchedulerView, SchedulingPolicy, Verdict
from aioserve.simulation.records import SimulationResult
from aioserve.simulation.simulator import simulate
from aioserve.steps.plan import StepPlan
from aioserve.testing import replay
from aioserve.traces.formats import read_trace
from aioserve.traces.synthetic import WORKLOADS, synthetic_trace
from aioserve.traces.trace_request import TraceRequest
from aioserve.traces.workload import with_targets
from tests import made_up_traces

PAGE_SIZE = 4
FIELDS = [name for name in dir(RequestView) if not name.startswith("_")]
VIEW_FIELDS = [name for name in dir(SchedulerView) if not name.startswith("_")]
VIEW = "view"


def shown(view: SchedulerView, name: str) -> Any:
    """Return the value that a view gives for that name, in a form that is equal in two equal
    runs."""
    value = getattr(view, name)
    if name == "estimate":
        return [value(9, 2, 50), value(0, 3, 90)]
    if name == "pages_reserved_for":
        return [value(request) for request in (*view.running, *view.waiting)]
    if isinstance(value, Sequence) and all(isinstance(part, RequestView) for part in value):
        return [part.arrival_index for part in value]
    return value


class LinearCost:
    def step_seconds(self, plan: StepPlan) -> float:
        return 1.0 + plan.num_tokens / 100


class ShortestAnswerFirst(SchedulingPolicy):
    """Policy that would be the best if `max_tokens` told the completion's length."""

    def order(self, waiting: Sequence[RequestView], view: SchedulerView) -> Iterable[RequestView]:
        return sorted(waiting, key=lambda request: request.max_tokens)


class Probe(SchedulingPolicy):
    """Writes down everything that it can see, whenever it is asked, and does nothing about it."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, list[Any]]] = []
        """Time and contents of each sight. A notification has no view, and gets the time of the
        last one."""
        self.live: dict[RequestView, None] = {}
        self.now_seconds = 0.0

    def look(self, *what: object) -> None:
        requests = [
            [value(1), value(PAGE_SIZE), value(99)] if callable(value) else value
            for request in self.live
            for value in (getattr(request, name) for name in FIELDS)
        ]
        self.seen.append((self.now_seconds, [*what, *requests]))

    def look_at(self, view: SchedulerView, *what: object) -> None:
        self.now_seconds = view.now_seconds
        self.look(VIEW, *(shown(view, name) for name in VIEW_FIELDS), *what)

    def order(self, waiting: Sequence[RequestView], view: SchedulerView) -> Iterable[RequestView]:
        self.look_at(view, "order", [r.arrival_index for r in waiting])
        return waiting

    def admit(self, request: RequestView, view: SchedulerView) -> Verdict:
        self.look_at(view, "admit", request.arrival_index)
        return Verdict.NOW

    def chunk(self, request: RequestView, budget_tokens: int, view: SchedulerView) -> int:
        self.look_at(view, "chunk", request.arrival_index, budget_tokens)
        return budget_tokens

    def victim(
        self, running: Sequence[RequestView], need_pages: int, view: SchedulerView
    ) -> RequestView:
        self.look_at(view, "victim", [r.arrival_index for r in running], need_pages)
        return super().victim(running, need_pages, view)

    def arrived(self, requests: Sequence[RequestView]) -> None:
        self.live.update(dict.fromkeys(requests))
        self.look("arrived")

    def step_finished(self, step: int, tokens: int) -> None:
        self.look("step finished", step, tokens)

    def finished(self, requests: Sequence[RequestView]) -> None:
        for request in requests:
            del self.live[request]
        self.look("finished", [r.arrival_index for r in requests])

    def seen_before(self, seconds: float) -> list[tuple[float, list[Any]]]:
        """Return what was seen before a step that ended at `seconds`, up to the last view of an
        earlier time."""
        views = [
            index
            for index, (now, what) in enumerate(self.seen)
            if now < seconds and what[0] == VIEW
        ]
        return self.seen[: 1 + max(views, default=-1)]


def run(trace: list[TraceRequest], policy: SchedulingPolicy, **options: Any) -> SimulationResult:
    given: dict[str, Any] = {"num_pages": None, "page_size": PAGE_SIZE}
    result = simulate(trace, policy, cost=LinearCost(), **(given | options))
    assert result.policy_faults == 0
    return result


def with_answers(trace: list[TraceRequest], answers: list[int]) -> list[TraceRequest]:
    return [
        msgspec.structs.replace(request, output_tokens=answer)
        for request, answer in zip(trace, answers, strict=True)
    ]


def ends(result: SimulationResult) -> dict[int, float]:
    """Return the time at which each completion ended. Requests that were refused at once must not
    depend on it."""
    return {
        record.request.number: record.end_seconds
        for record in result.requests
        if record.output_tokens and record.end_seconds is not None
    }


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRequest]:
    """Draw requests, some of which begin alike. Their completions are drawn later."""
    arrivals = sorted(draw(st.lists(st.sampled_from([0.0, 0.5, 3.0, 9.0]), min_size=1, max_size=8)))
    requests = []
    for number, arrival in enumerate(arrivals):
        blocks, first = draw(st.integers(0, 4)), draw(st.integers(0, 2)) * 10
        requests.append(
            TraceRequest(
                number,
                arrival,
                blocks * PAGE_SIZE + draw(st.integers(1, 3)),
                1,
                tuple(range(first, first + blocks)),
                PAGE_SIZE,
                session=draw(st.sampled_from(["", "s"])),
                tenant=draw(st.sampled_from(["", "a", "b"])),
                max_tokens=draw(st.sampled_from([None, None, 1, 5, 30])),
            )
        )
    return requests


@settings(deadline=None)
@given(
    st.data(),
    traces(),
    st.sampled_from([None, 8, 12, 30]),
    st.integers(1, 4),
    st.sampled_from([0, 2, 64]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 1.0]),
    st.sampled_from([None, 9]),
)
def test_whatever_a_policy_sees_it_cannot_tell_long_answers_from_short_before_they_end(
    data: st.DataObject,
    trace: list[TraceRequest],
    num_pages: int | None,
    max_num_seqs: int,
    output_reserve_tokens: int,
    prefix_caching: bool,
    overlap: bool,
    target: float | None,
    max_tokens: int | None,
) -> None:
    options = {
        "num_pages": num_pages,
        "max_num_seqs": max_num_seqs,
        "output_reserve_tokens": output_reserve_tokens,
        "prefix_caching": prefix_caching,
        "overlap": overlap,
        "max_tokens": max_tokens,
    }
    drawn = st.lists(st.integers(0, 40), min_size=len(trace), max_size=len(trace))
    trace = with_targets(trace, ttft_target_seconds=target, tpot_target_seconds=target)
    one, other = (with_answers(trace, data.draw(drawn)) for _ in range(2))
    probes = Probe(), Probe()
    found = [ends(run(t, p, **options)) for t, p in zip((one, other), probes, strict=True)]
    differing = [a.number for a, b in zip(one, other, strict=True) if a != b]
    told = min((run[number] for run in found for number in differing), default=float("inf"))
    first, second = (probe.seen_before(told) for probe in probes)
    assert first == second


def times_under(policy: Callable[[], SchedulingPolicy], trace: list[TraceRequest]) -> list[float]:
    result = run(trace, policy(), max_num_seqs=1)
    return [end for _, end in sorted(ends(result).items())]


@given(st.lists(st.integers(1, 30), min_size=2, max_size=8))
def test_sorting_by_max_tokens_gains_nothing(answers: list[int]) -> None:
    trace = with_answers([TraceRequest(n, 0.0, 5, 1, (), 5) for n in range(len(answers))], answers)
    assert times_under(ShortestAnswerFirst, trace) == times_under(SchedulingPolicy, trace)


def without_a_column(name: str, directory: Path) -> Path | str:
    """A trace without a word of what callers asked for: of each format, and made up."""
    return getattr(made_up_traces, name)(directory) if hasattr(made_up_traces, name) else name


@pytest.mark.parametrize("name", ["mooncake", "agentic", "azure", "servegen", *WORKLOADS])
def test_shortest_by_max_tokens_gains_nothing_on_any_trace(name: str, tmp_path: Path) -> None:
    trace = without_a_column(name, tmp_path)
    trace = read_trace(trace)[:60] if isinstance(trace, Path) else synthetic_trace(trace, 60)
    assert {request.max_tokens for request in trace} == {None}
    assert {request.predicted_output_tokens for request in trace} == {None}
    first, shortest = (
        replay(trace, policy, max_num_seqs=2, max_tokens=500)
        for policy in (SchedulingPolicy(), ShortestAnswerFirst())
    )
    assert shortest == first
    assert len({request.output_tokens for request in trace}) > 10


class ShortestForecastFirst(SchedulingPolicy):
    def order(self, waiting: Sequence[RequestView], view: SchedulerView) -> Iterable[RequestView]:
        return sorted(waiting, key=lambda request: request.predicted_output_tokens or 0)


def test_a_forecast_is_seen_and_gains_as_much_as_it_is_good() -> None:
    means = []
    for predictor in ("oracle", "noisy:0.5", "constant:100"):
        found = replay(
            "heavy-tails",
            ShortestForecastFirst(),
            rate=100.0,
            num_requests=150,
            max_num_seqs=4,
            predictor=predictor,
        )
        assert found.e2e_seconds is not None
        means.append(found.e2e_seconds.mean)
    oracle, noisy, constant = means
    assert oracle < noisy < constant
    plain = replay("heavy-tails", "fcfs", rate=100.0, num_requests=150, max_num_seqs=4)
    assert plain.e2e_seconds is not None
    assert plain.e2e_seconds.mean == constant
