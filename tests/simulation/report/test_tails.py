"""Charts of latencies show the values that the runs had."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from aioserve import SchedulingPolicy
from aioserve.scheduling.pipeline import StepPipeline
from aioserve.simulation.metrics import Targets, e2e_seconds, metrics_of, tpot_seconds, ttft_seconds
from aioserve.simulation.report import PolicyRun
from aioserve.simulation.report.scales import Linear, Log, Tail, fitting
from aioserve.simulation.report.tails import latencies_of, tails_chart
from aioserve.simulation.simulator import simulate
from aioserve.simulation.timeline import Timeline
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.plan import StepPlan
from aioserve.traces.trace_request import TraceRequest
from tests.simulation.report.runs import asking, run_of


class Uneven:
    def step_seconds(self, plan: StepPlan) -> float:
        return 0.125 * (1 + plan.step * 7 % 5)


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 1.0, 30.0]), st.integers(1, 30), st.integers(1, 12)),
        min_size=1,
        max_size=8,
    ),
    st.integers(14, 40),
    st.booleans(),
    st.integers(4, 64),
)
def test_times_between_tokens_are_those_at_which_the_scheduler_gave_them_out(
    requests: list[tuple[float, int, int]], num_pages: int, overlap: bool, step_tokens: int
) -> None:
    """The run has preemptions, chunks of prompts, and steps that continue past the end of a
    completion."""
    came: defaultdict[int, list[float]] = defaultdict(list)
    finish = StepPipeline.finish

    def record(self: StepPipeline[float], outcome: StepOutcome, now: float) -> Any:
        progress = finish(self, outcome, now)
        for one in progress:
            came[one.sequence_id].append(now)
        return progress

    timeline = Timeline()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepPipeline, "finish", record)
        result = simulate(
            [TraceRequest(n, at, p, o, (), 10) for n, (at, p, o) in enumerate(requests)],
            SchedulingPolicy(),
            cost=Uneven(),
            num_pages=num_pages,
            page_size=4,
            max_num_seqs=4,
            max_num_batched_tokens=step_tokens,
            output_reserve_tokens=0,
            overlap=overlap,
            timeline=timeline,
        )
    found = latencies_of(PolicyRun("a", result, metrics_of(result), timeline), None)
    expected = [gap for times in came.values() for gap in np.diff(times).tolist()]
    assert np.repeat(found.values, found.counts) == pytest.approx(sorted(expected))
    whole = sum(
        record.end_seconds - record.first_token_seconds
        for record in result.requests
        if record.end_seconds is not None and record.first_token_seconds is not None
    )
    assert sum(expected) == pytest.approx(whole)


def test_one_long_pause_is_seen_although_the_mean_hides_it() -> None:
    run = run_of([asking(n, output=20) for n in range(4)], num_pages=16)
    assert run.result.preemptions
    assert run.metrics.tpot_seconds is not None
    assert latencies_of(run, None).at(1.0) > run.metrics.tpot_seconds.max  # pyright: ignore[reportOptionalOperand]


def test_percentiles_are_those_of_the_metrics() -> None:
    trace = [asking(n, at=n / 7, output=1 + n % 9) for n in range(50)]
    run = run_of(trace, max_num_seqs=3)
    for field, measure in (
        ("ttft_seconds", ttft_seconds),
        ("tpot_seconds", tpot_seconds),
        ("e2e_seconds", e2e_seconds),
    ):
        spread, found = getattr(run.metrics, field), latencies_of(run, measure)
        for share, name in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"), (1.0, "max")):
            assert found.at(share) == pytest.approx(getattr(spread, name))


def test_an_answer_cut_to_one_token_has_no_time_between_tokens() -> None:
    """It is not among those of which a share had a short one, whatever length the trace gives."""
    trace = [replace(asking(n), max_tokens=1 if n < 2 else 4) for n in range(4)]
    run = run_of(trace)
    counted = [
        (int(found.counts.sum()), found.missing)
        for found in (latencies_of(run, m) for m in (ttft_seconds, tpot_seconds, e2e_seconds))
    ]
    assert counted == [(4, 0), (2, 0), (4, 0)]


def test_who_got_no_answer_is_slower_than_all_others() -> None:
    trace = [asking(n) for n in range(9)] + [TraceRequest(9, 0.0, 999, 4, (), 10)]
    run = run_of(trace, num_pages=99)
    found = latencies_of(run, e2e_seconds)
    assert found.missing == 1
    assert found.at(0.85) is not None
    assert found.at(0.95) is None
    chart = tails_chart([run], None)
    assert chart.table is not None
    row = chart.table.rows[-1]
    assert row[2:] == ("0.40", *["never"] * 4, "9", "1")
    answers = chart.panels[-1].svg
    assert answers.count('y="5%" class="mark') == 3
    assert "At 99%: fcfs: never." in answers
    assert "never" not in chart.panels[1].svg  # times between tokens are of those that came


def test_each_nine_is_as_wide_as_the_one_before() -> None:
    tail = Tail()
    places = [tail.at(share) for share in (0.0, 0.9, 0.99, 0.999)]
    assert places == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert [tail.share(place) for place in places] == pytest.approx([0.0, 0.9, 0.99, 0.999])
    assert [text for _, text in tail.ticks()] == ["0%", "50%", "90%", "99%", "99.9%"]


def test_what_is_told_at_a_share_is_the_percentile() -> None:
    runs = [run_of([asking(n, at=n / 9) for n in range(60)], name=x, max_num_seqs=2) for x in "ab"]
    chart = tails_chart(runs, Targets(ttft_seconds=(0.25,)))
    assert all(run.metrics.ttft_seconds is not None for run in runs)
    p99 = f"{runs[0].metrics.ttft_seconds.p99:,.2f} s"  # pyright: ignore[reportOptionalMemberAccess]
    assert f"<title>99.0% at most\na: {p99}\nb: {p99}</title>" in chart.panels[0].svg
    assert ">target 0.25 s</text>" in chart.panels[0].svg


@given(st.lists(st.floats(1e-6, 1e9) | st.just(0.0), max_size=20))
def test_an_axis_holds_its_values_and_its_numbers_in_order(values: list[float]) -> None:
    scale = fitting(values)
    places = [scale.at(value) for value in sorted(values)]
    assert all(-1e-9 <= place <= 1 + 1e-9 for place in places)
    assert places == sorted(places)
    ticks = scale.ticks()
    assert 1 <= len(ticks) <= 8
    assert [value for value, _ in ticks] == sorted(value for value, _ in ticks)
    assert all(-1e-6 <= scale.at(value) <= 1 + 1e-6 for value, _ in ticks)
    assert len({text for _, text in ticks}) == len(ticks)


def test_numbers_are_written_as_people_write_them() -> None:
    assert [text for _, text in Linear(0, 2500).ticks()] == [
        "0",
        "500",
        "1,000",
        "1,500",
        "2,000",
        "2,500",
    ]
    assert [text for _, text in Log(0.05, 5).ticks()] == [
        "0.05",
        "0.1",
        "0.2",
        "0.5",
        "1",
        "2",
        "5",
    ]
    assert [text for _, text in Linear(0, 1, percent=True).ticks()][-1] == "100%"
    assert not re.search("e", "".join(text for _, text in Linear(3.00001, 3.00009).ticks()))
