"""The steps that are shown one by one are those that tell policies apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from aioserve.simulation.records import RequestRecord
from aioserve.simulation.report import PolicyRun
from aioserve.simulation.report.windows import busiest_window, choose_windows
from tests.simulation.report.runs import asking, run_of


def state_of(record: RequestRecord, at: float) -> int:
    assert record.end_seconds is not None
    began = record.end_seconds if record.started_seconds is None else record.started_seconds
    return (at >= began) + (at >= record.end_seconds)


def differing(runs: list[PolicyRun], at: float) -> int:
    """Return the number of requests whose state differs between policies: waiting, running or
    gone."""
    states = [
        {record.request.number: state_of(record, at) for record in run.result.requests}
        for run in runs
    ]
    return sum(len({state[number] for state in states}) > 1 for number in states[0])


def sum_of(runs: list[PolicyRun], window: tuple[float, float]) -> float:
    """Requests that differ, summed over the window: times of runs are tenths of a second, and a
    window's length may lie between two of them."""
    first, last = round(window[0] * 20), round(window[1] * 20)
    return sum(differing(runs, part / 20 + 0.025) for part in range(first, last))


@st.composite
def two_runs(draw: st.DrawFn) -> list[PolicyRun]:
    trace = [
        asking(n, at=draw(st.integers(0, 60)) / 10, output=draw(st.integers(1, 30)))
        for n in range(draw(st.integers(1, 12)))
    ]
    seats = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return [run_of(trace, name=str(one), max_num_seqs=one) for one in seats]


@given(two_runs())
def test_in_no_other_window_do_more_requests_differ(runs: list[PolicyRun]) -> None:
    found = choose_windows(runs)
    length = found.common[1] - found.common[0]
    starts = {step.began_seconds for run in runs for step in run.timeline.steps}
    most = max(sum_of(runs, (start, start + length)) for start in starts)
    assert found.differ == (most > 0)
    if found.differ:
        assert sum_of(runs, found.common) == most
    else:
        assert found.common == busiest_window(runs[0])


def test_each_policy_has_the_window_in_which_most_wait_for_it_alone() -> None:
    """The first policy leaves half of the requests for the end, and the second the others."""
    early = [asking(n, output=30) for n in range(6)]
    late = [asking(6 + n, at=30.0, output=30) for n in range(6)]
    slow_first = run_of([*early, *late], name="a", max_num_seqs=1)
    fast = run_of([*early, *late], name="b", max_num_seqs=6)
    found = choose_windows([slow_first, fast])
    assert found.differ
    own = found.own[0] or found.common
    waits = [
        record
        for record in slow_first.result.requests
        if record.started_seconds is not None and record.started_seconds >= own[1]
    ]
    assert len(waits) >= 4
    assert found.own[1] is not None  # nobody waits for it alone: its busiest steps
    assert found.own[1] == busiest_window(fast)


def test_a_run_alone_has_one_window() -> None:
    run = run_of([asking(n, at=n / 5, output=9) for n in range(50)], max_num_seqs=2)
    found = choose_windows([run])
    assert (found.common, found.differ, found.own) == (busiest_window(run), False, (None,))


def test_policies_that_do_the_same_have_one_window() -> None:
    run = run_of([asking(n, at=n / 5, output=9) for n in range(50)], max_num_seqs=2)
    found = choose_windows([run, replace(run, name="other")])
    assert (found.common, found.differ, found.own) == (busiest_window(run), False, (None, None))


@pytest.mark.parametrize("num_pages", [1, 4])
def test_requests_that_never_start_are_gone_when_they_are_refused(num_pages: int) -> None:
    trace = [asking(n, at=n / 10, output=4 + 90 * (n == 3)) for n in range(9)]
    runs = [run_of(trace, num_pages=60, max_num_seqs=n, name=str(n)) for n in (1, 8)]
    less = run_of(trace, num_pages=num_pages, name="less")
    found = choose_windows([*runs, *([less] if less.timeline.steps else [])])
    assert found.differ
