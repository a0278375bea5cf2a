"""Which requests and steps of a window are drawn, and what is said of the others."""

from __future__ import annotations

import pytest

from aioserve.simulation.report import gantt
from aioserve.simulation.report.gantt import busiest_window, choose_lanes, gantt_chart
from aioserve.simulation.report.svg import chart_style
from tests.simulation.report.runs import asking, run_of


def test_the_busiest_window_has_most_requests_in_it() -> None:
    few = [asking(n, at=n / 10, output=200) for n in range(2)]
    many = [asking(2 + n, at=50.0, output=100) for n in range(9)]
    run = run_of([*few, *many])
    start, end = busiest_window(run)
    assert 50.0 <= start < end
    assert end - start == pytest.approx(0.1 * gantt.WINDOW_STEPS)


def test_the_busiest_window_of_a_short_run_is_all_of_it() -> None:
    run = run_of([asking(0, at=2.0, output=3)])
    assert busiest_window(run) == pytest.approx((2.0, 2.3))
    assert busiest_window(run_of([asking(0, output=99)], num_pages=1)) == (0.0, 1.0)


def test_requests_that_begin_or_are_preempted_come_before_those_that_only_decode() -> None:
    # Those that came first decode, thirty begin, and the others have no seat and wait.
    trace = [asking(n, output=90) for n in range(30)]
    trace += [asking(n, at=5.0, output=90) for n in range(30, 90)]
    run = run_of(trace, max_num_seqs=60)
    lanes = choose_lanes(run, (4.9, 6.0))
    numbers = [record.request.number for record in lanes.records]
    assert numbers == [*range(10), *range(30, 60)]
    assert len(numbers) == gantt.MOST_LANES
    assert lanes.num_present == 90
    assert {span.request for span in lanes.spans} <= set(numbers)
    with chart_style():
        chart = gantt_chart(run, (4.9, 6.0), "a")
    assert "40 of the 90 requests that are there." in chart.caption
    assert "Left out: 50" in chart.caption


def test_preemptions_in_the_window_are_there() -> None:
    run = run_of([asking(n, output=20) for n in range(4)], num_pages=16)
    assert run.result.preemptions > 0
    lanes = choose_lanes(run, (0.0, 100.0))
    assert lanes.preemptions == run.timeline.preemptions
    first = run.timeline.preemptions[0]
    assert choose_lanes(run, (first.seconds + 0.01, 100.0)).preemptions != lanes.preemptions


def test_a_window_with_too_many_boxes_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gantt, "MOST_SPANS", 5)
    run = run_of([asking(n, at=float(n), output=2) for n in range(6)])
    lanes = choose_lanes(run, (0.0, 6.0))
    assert len(lanes.spans) == 5
    assert lanes.window == (0.0, lanes.spans[-1].ended_seconds)
    with chart_style():
        caption = gantt_chart(run, (0.0, 6.0), "a").caption
    assert f"Drawn to {lanes.window[1]:.2f} s, after 5 boxes" in caption


def test_steps_are_counted_where_they_are_not_drawn() -> None:
    run = run_of([asking(0, output=300)])
    with chart_style():
        caption = gantt_chart(run, (0.0, 100.0), "a").caption
    assert caption.startswith("300 steps; 1 of the 1 requests")
    assert "their borders are not drawn" in caption


def test_a_window_without_steps_can_be_drawn() -> None:
    run = run_of([asking(0)])
    with chart_style():
        assert gantt_chart(run, (50.0, 60.0), "a").caption == (
            "0 steps; 0 of the 0 requests that are there."
        )
