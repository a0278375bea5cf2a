"""Requests and steps drawn of a window, and what is said of the others."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from aioserve.simulation.report import gantt, windows
from aioserve.simulation.report.gantt import choose_lanes, gantt_chart
from aioserve.simulation.report.windows import busiest_window
from tests.simulation.report.runs import asking, run_of


def test_the_busiest_window_has_most_requests_in_it() -> None:
    few = [asking(n, at=n / 10, output=200) for n in range(2)]
    many = [asking(2 + n, at=50.0, output=100) for n in range(9)]
    run = run_of([*few, *many])
    start, end = busiest_window(run)
    assert 50.0 <= start < end
    assert end - start == pytest.approx(0.1 * windows.WINDOW_STEPS)


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


def test_a_window_with_too_many_boxes_is_cut_and_says_so() -> None:
    run = run_of([asking(n, at=float(n), output=2) for n in range(6)])
    lanes = choose_lanes(run, (0.0, 6.0), 5)
    assert len(lanes.spans) == 5
    assert lanes.window == (0.0, lanes.spans[-1].ended_seconds)
    caption = gantt_chart(run, (0.0, 6.0), "a", 5).caption
    assert f"Drawn to {lanes.window[1]:.2f} s, after 5 boxes" in caption


def test_steps_are_counted_where_they_are_not_drawn() -> None:
    run = run_of([asking(0, output=300)])
    caption = gantt_chart(run, (0.0, 100.0), "a").caption
    assert caption.startswith("300 steps; 1 of the 1 request that is there.")
    assert "their borders are not drawn" in caption


def test_a_window_without_steps_can_be_drawn() -> None:
    run = run_of([asking(0)])
    empty = gantt_chart(run, (50.0, 60.0), "a")
    assert empty.caption == "0 steps; 0 of the 0 requests that are there."
    assert empty.lanes == ()


def test_a_lane_names_its_request_its_tenant_and_its_tokens() -> None:
    run = run_of([asking(0, tenant="ann"), asking(1, output=7, tenant="b" * 300), asking(2)])
    lanes = gantt_chart(run, (0.0, 9.0), "a").lanes
    assert [(lane.number, lane.tenant, lane.tokens) for lane in lanes] == [
        ("#0", "ann", "10 + 4"),
        ("#1", "b" * 14 + "…", "10 + 7"),
        ("#2", "", "10 + 4"),
    ]
    assert lanes[1].full_tenant == "b" * 59 + "…"


def test_every_box_says_whose_it_is_and_what_was_computed_when() -> None:
    (lane,) = gantt_chart(run_of([asking(0, at=2.0, tenant="<a>")]), (2.0, 2.4), "a").lanes
    tips = ElementTree.fromstring(lane.svg).findall(".//title")
    assert [tip.text for tip in tips] == [
        "#0 <a>: prefill of 10 tokens\nfrom 2.000 to 2.100 s",
        "#0 <a>: decode of 3 tokens\nfrom 2.100 to 2.400 s",
    ]
    label = ElementTree.fromstring(lane.svg).get("aria-label")
    assert label == (
        "prefill of 10 tokens from 2.000 to 2.100 s, decode of 3 tokens from 2.100 to 2.400 s"
    )


def test_prefill_and_decode_differ_in_height_and_waiting_is_no_box() -> None:
    run = run_of([asking(0), asking(1)], max_num_seqs=1)
    first, second = (ElementTree.fromstring(x.svg) for x in gantt_chart(run, (0, 1), "a").lanes)
    boxes = {box.get("class"): box for box in first.findall("rect")}
    assert float(boxes["prefill hit"].get("height", 0)) > float(
        boxes["decode hit"].get("height", 0)
    )
    assert "waits\nfrom 0.000 to 0.400 s" in (second.findtext("rect[@class='hit']/title") or "")


def test_a_preemption_is_a_cross_with_its_time() -> None:
    run = run_of([asking(n, output=20) for n in range(4)], num_pages=16)
    text = "".join(lane.svg for lane in gantt_chart(run, (0.0, 100.0), "a").lanes)
    assert text.count('class="cross"') == run.result.preemptions
    for one in run.timeline.preemptions:
        assert f"#{one.request}: gives its pages back\nat {one.seconds:,.3f} s" in text


@pytest.mark.parametrize("num_pages", [None, 40])
def test_pages_in_use_and_evictable_ones_and_free_ones_are_told_apart(
    num_pages: int | None,
) -> None:
    trace = [asking(n, at=n / 5, output=9) for n in range(9)]
    run = run_of(trace, num_pages=num_pages, max_num_seqs=3)
    drawing = ElementTree.fromstring(gantt_chart(run, busiest_window(run), "a").pages)
    by_class = {
        name: [box for box in drawing.findall("rect") if box.get("class") == name]
        for name in ("held", "cached", "hit clear")
    }
    steps, pages = run.timeline.steps, run.result.num_pages
    assert len(by_class["held"]) == len(by_class["hit clear"]) == len(steps)
    assert any(step.pages_cached for step in steps)
    for step, box, tip in zip(steps, by_class["held"], by_class["hit clear"], strict=True):
        height = float((box.get("height") or "").rstrip("%"))
        assert height == pytest.approx(100 * step.pages_held / pages, abs=0.01)
        told = tip.findtext("title") or ""
        assert f"held by requests: {step.pages_held:,} pages" in told
        assert f"cached, can be evicted: {step.pages_cached:,} (" in told
        assert f"free: {pages - step.pages_held - step.pages_cached:,}" in told
    for box in by_class["cached"]:
        assert float((box.get("y") or "").rstrip("%")) >= 0
