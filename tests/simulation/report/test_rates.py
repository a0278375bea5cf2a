"""A page about several rates says what was measured at each."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from aioserve.simulation.metrics import Goodput, Targets
from aioserve.simulation.report import RateRun, goodput_chart, rate_page
from aioserve.simulation.report.rates import latency_by_rate_chart, rate_file, rate_table
from tests.simulation.report.pages import downloads, read
from tests.simulation.report.runs import asking, run_of

ASKED = {"ttft_target_seconds": 0.3, "tpot_target_seconds": 0.1}
TARGETS = Targets(ttft_seconds=(0.3,), tpot_seconds=(0.1,))
NAUGHTY = """<b onclick="x">&amp; '=1+1'"""
METRICS = run_of([asking(0)]).metrics


def swept(name: str = "fcfs", *, targets: dict[str, float] | None = ASKED) -> list[RateRun]:
    """One policy at three rates, the highest first, with one seat."""
    runs = []
    for rate in (8.0, 2.0, 4.0):
        trace = [asking(n, at=n / rate) for n in range(12)]
        runs.append(RateRun(name, rate, run_of(trace, targets=targets, max_num_seqs=1).metrics))
    return runs


def page_of(runs: list[RateRun], **more: object) -> str:
    given = {"title": "a title", "command": "aioserve sweep x", "facts": [("fact", "7")]}
    return rate_page(runs, **(given | more))  # pyright: ignore[reportArgumentType]


def test_the_file_has_the_metrics_of_every_policy_and_rate() -> None:
    runs = [*swept(), *swept("other")]
    head, *rows = downloads(page_of(runs, targets=TARGETS))["rates.csv"]
    assert head[:4] == ["policy", "requests/s", "met their targets", "good requests/s"]
    assert [row[:2] for row in rows] == [[n, r] for n in ("fcfs", "other") for r in "248"]
    by_place = {(run.name, f"{run.rate:g}"): run.metrics for run in runs}
    for row in rows:
        metrics = by_place[row[0], row[1]]
        assert metrics.goodput is not None
        assert metrics.ttft_seconds is not None
        assert row[2] == f"{metrics.goodput.share:.1%}"
        assert row[3] == f"{metrics.goodput.requests_per_second:.3f}"
        assert row[5] == f"{metrics.ttft_seconds.p99:.2f}"


def test_every_point_says_its_policy_its_rate_and_its_value() -> None:
    runs = swept()
    chart = goodput_chart(runs)
    assert chart is not None
    for run in runs:
        assert run.metrics.goodput is not None
        about = f"<title>fcfs at {run.rate:g} requests/s\n"
        good, share = run.metrics.goodput.requests_per_second, run.metrics.goodput.share
        assert f"{about}{good:,.3f} good requests/s</title>" in chart.panels[0].svg
        assert f"{about}{share:.1%} met their targets</title>" in chart.panels[1].svg


def goodput_of(rate: float, good: float) -> RateRun:
    return RateRun("a", rate, replace(METRICS, goodput=Goodput(1, 0.5, good)))


POINTS = st.tuples(st.floats(0.01, 1e6), st.floats(0, 1e6))


@given(st.lists(POINTS, min_size=1, max_size=9, unique_by=lambda point: point[0]))
@example([(1.0, 5e-324)])
def test_points_stand_in_the_picture_in_the_order_of_their_values(
    points: list[tuple[float, float]],
) -> None:
    chart = goodput_chart([goodput_of(*point) for point in points])
    assert chart is not None
    found = re.findall(r'<circle cx="([\d.]+)%" cy="([\d.]+)%"', chart.panels[0].svg)
    placed = [(float(x), 100 - float(y)) for x, y in found]
    ordered = sorted(points, key=lambda point: point[0])
    assert len(placed) == len(points)
    for axis in (0, 1):
        pairs = sorted(
            (value[axis], place[axis]) for value, place in zip(ordered, placed, strict=True)
        )
        assert all(0 <= place <= 100 for _, place in pairs)
        assert [place for _, place in pairs] == sorted(place for _, place in pairs)


def test_lines_join_the_means_over_seeds_and_each_seed_is_a_dot() -> None:
    runs = [*swept(), *(goodput_of(2.0, good) for good in (1.0, 3.0))]
    runs += [goodput_of(4.0, 7.0), goodput_of(4.0, 9.0)]
    chart = goodput_chart(runs)
    assert chart is not None
    assert chart.panels[0].svg.count('class="seed ') == 4
    told = "<title>a at 2 requests/s\n2.000 good requests/s\nmean over 2 seeds, ± 12.706 good"
    assert told in chart.panels[0].svg
    assert "8.000 with a at 4 requests/s" in chart.caption
    assert "the means over 2 seeds" in chart.caption
    table = rate_table(runs)
    assert table.caption == (
        "Each policy at each rate of requests, as a mean over 2 seeds with 95 % confidence"
    )
    assert [row[:4] for row in table.rows[3:]] == [
        ("a", "2", "50.0% ±0.0%", "2.000 ±12.706"),
        ("a", "4", "50.0% ±0.0%", "8.000 ±12.706"),
    ]


def test_the_file_has_the_interval_of_every_mean_over_seeds() -> None:
    runs = [*(goodput_of(2.0, good) for good in (1.0, 2.0, 6.0)), goodput_of(4.0, 7.0)]
    head, *rows = downloads(page_of(runs))["rates.csv"]
    labels = rate_table(runs).head[2:]
    assert head == ["policy", "requests/s", *(h for x in labels for h in (x, f"{x}, 95 % ±"))]
    good = head.index("good requests/s")
    by_hand = 4.303 * 7**0.5 / 3**0.5  # Student's t with two degrees of freedom
    assert [row[good : good + 2] for row in rows] == [["3.000", f"{by_hand:.3f}"], ["7.000", "-"]]
    one_seed = downloads(page_of([goodput_of(2.0, 1.0)]))["rates.csv"]
    assert one_seed[0] == ["policy", "requests/s", *labels]


def test_a_mean_over_seeds_of_which_one_never_answered_is_never() -> None:
    nobody = run_of([asking(0, output=99)], num_pages=1, targets=ASKED).metrics
    runs = [*swept(), RateRun("fcfs", 8.0, nobody)]
    (row,) = [row for row in rate_table(runs).rows if row[1] == "8"]
    assert row[4] == "never"
    (kept,) = [row for row in rate_file(runs).rows if row[1] == "8"]
    assert kept[6:8] == ("inf", "-")
    svg = latency_by_rate_chart(runs, TARGETS).panels[0].svg
    assert "<title>fcfs at 8 requests/s\nnever</title>" in svg
    assert svg.count('class="seed ') == 2


def test_very_many_seeds_make_no_huge_page() -> None:
    runs = [goodput_of(1.0 + n % 20, n % 7) for n in range(20_000)]
    text = page_of(runs, targets=TARGETS)
    assert len(text) < 200_000
    assert "the means over 1000 seeds." in text


def test_without_targets_there_is_no_goodput() -> None:
    runs = swept(targets=None)
    assert goodput_chart(runs) is None
    text = page_of(runs)
    assert "Goodput" not in text
    assert "met their targets" not in rate_table(runs).head


def test_targets_are_drawn_beside_the_latencies() -> None:
    first, _, third, _ = latency_by_rate_chart(swept(), TARGETS).panels
    assert ">target 0.3 s</text>" in first.svg
    assert ">target 100 ms</text>" in third.svg


def test_a_rate_at_which_nobody_was_answered_has_a_mark_at_never_and_no_line_to_it() -> None:
    nobody = run_of([asking(0, output=99)], num_pages=1, targets=ASKED).metrics
    assert nobody.ttft_seconds is not None
    assert nobody.ttft_seconds.p50 == math.inf
    runs = [*swept(), RateRun("fcfs", 16.0, nobody)]
    assert rate_table(runs).rows[-1][2:] == ("0.0%", "0.000", *["never"] * 4, "0.0")
    assert rate_file(runs).rows[-1][2:] == ("0.0%", "0.000", *["inf"] * 4, "0.0")
    without, drawn = (latency_by_rate_chart(some).panels[0].svg for some in (runs[:-1], runs))
    assert "<title>fcfs at 16 requests/s\nnever</title>" in drawn
    assert drawn.count('y="5%" class="mark') == 1
    assert (without.count(">never</text>"), drawn.count(">never</text>")) == (0, 1)
    lines = [re.findall(r'class="line[^>]* d="([^"]*)"', svg)[0] for svg in (without, drawn)]
    assert lines[0].count("L") == lines[1].count("L")
    told = (
        "Under fcfs at 16 requests/s no request got a completion: "
        "1 request was too long for the model"
    )
    assert any(text.startswith(told) for text in read(page_of(runs, targets=TARGETS)).shown)
    alone = latency_by_rate_chart(runs[-1:]).panels
    assert all(">nothing to measure" not in panel.svg for panel in alone)
    assert all(re.findall(r'class="ty"[^>]*>([^<]*)<', panel.svg) == ["never"] for panel in alone)
    assert "Under fcfs at any rate no request" in page_of(runs[-1:], targets=TARGETS)


def test_one_run_alone_can_be_drawn() -> None:
    assert "<title>only at 3 requests/s\n" in page_of([RateRun("only", 3.0, METRICS)])


def test_names_are_text_on_the_page_and_in_the_file() -> None:
    text = page_of([*swept(NAUGHTY), *swept("=2+2")], title=NAUGHTY, facts=[(NAUGHTY, NAUGHTY)])
    reader = read(text)
    assert "<b onclick" not in text
    assert sum(piece.strip() == NAUGHTY for piece in reader.shown) >= 6
    assert [row[0] for row in downloads(text)["rates.csv"][1:]] == [NAUGHTY] * 3 + ["'=2+2"] * 3


@pytest.mark.parametrize("targets", [ASKED, None], ids=["targets", "no targets"])
def test_the_same_runs_give_the_same_page_in_any_order(targets: dict[str, float] | None) -> None:
    runs = swept(targets=targets)
    assert page_of(runs) == page_of(runs[::-1])


def test_requests_that_all_come_at_once_are_drawn_at_rate_0() -> None:
    run = RateRun("only", 0.0, METRICS)
    assert "<title>only at 0 requests/s\n" in page_of([run])
    chart = goodput_chart([goodput_of(0.0, 1.0)])
    assert chart is not None
    assert "<title>a at 0 requests/s\n" in chart.panels[0].svg
