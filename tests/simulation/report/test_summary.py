"""Verdicts on policies: the better one, by how much, and the best."""

from __future__ import annotations

from math import inf

from msgspec.structs import replace

from aioserve.simulation.metrics import Metrics, Spread
from aioserve.simulation.report.summary import Cell, figures_table, group_table, summary_rows
from tests.simulation.report.runs import asking, run_of

MINUS = "\N{MINUS SIGN}"
METRICS = run_of([asking(0)]).metrics


def cells(label: str, *metrics: Metrics) -> tuple[Cell, ...]:
    found = {f"p{n}": one for n, one in enumerate(metrics)}
    return next(row.cells for row in summary_rows(found) if row.label == label)


def with_ttft(p50: float) -> Metrics:
    return replace(METRICS, ttft_seconds=Spread(p50, p50, p50, p50, p50))


def test_less_of_a_time_is_better_and_the_least_is_best() -> None:
    assert cells("time to first token p50, s", with_ttft(2.0), with_ttft(0.5), with_ttft(3.0)) == (
        Cell("2.00"),
        Cell("0.50", f"{MINUS}75.0%", "better", best=True),
        Cell("3.00", "+50.0%", "worse"),
    )


def test_more_of_what_is_served_is_better() -> None:
    some, more = (replace(METRICS, output_tokens_per_second=rate) for rate in (100.0, 150.0))
    assert cells("output tokens/s", more, some) == (
        Cell("150.0", best=True),
        Cell("100.0", f"{MINUS}33.3%", "worse"),
    )


def test_shares_differ_in_points() -> None:
    few, many = (replace(METRICS, token_hit_share=share) for share in (0.2, 0.5))
    assert cells("prompt tokens found", few, many)[1] == Cell(
        "50.0%", "+30.0 points", "better", True
    )


def test_what_only_happened_is_neither_better_nor_best() -> None:
    few, many = replace(METRICS, steps=10), replace(METRICS, steps=20)
    assert cells("steps", few, many) == (Cell("10"), Cell("20", "+100.0%"))


def test_from_nothing_the_difference_is_a_number() -> None:
    none, some = replace(METRICS, preemptions=0), replace(METRICS, preemptions=1200)
    assert cells("preemptions", none, some) == (
        Cell("0", best=True),
        Cell("1,200", "+1,200", "worse"),
    )
    assert cells("preemptions", some, none)[1] == Cell("0", f"{MINUS}100.0%", "better", best=True)


def test_what_is_shown_alike_is_equally_good() -> None:
    name = "time to first token p50, s"
    assert cells(name, with_ttft(1.0), with_ttft(1.0)) == (Cell("1.00"), Cell("1.00", "same"))
    assert cells(name, with_ttft(1.0), with_ttft(1.0001)) == (
        Cell("1.00"),
        Cell("1.00", "nearly the same"),
    )
    first, second, third = cells(name, with_ttft(1.0), with_ttft(1.001), with_ttft(2.0))
    assert (first.best, second.best, third.best) == (True, True, False)


def test_what_was_not_measured_is_compared_with_nothing() -> None:
    nothing = replace(METRICS, ttft_seconds=None)
    name = "time to first token p50, s"
    assert cells(name, nothing, with_ttft(1.0)) == (Cell("-"), Cell("1.00"))
    assert cells(name, with_ttft(1.0), nothing) == (Cell("1.00"), Cell("-"))


def test_what_never_came_is_worse_than_any_time() -> None:
    name = "time to first token p50, s"
    assert cells(name, with_ttft(1.0), with_ttft(inf)) == (
        Cell("1.00", best=True),
        Cell("never", "", "worse"),
    )
    assert cells(name, with_ttft(inf), with_ttft(1.0))[1] == Cell("1.00", "", "better", best=True)
    assert cells(name, with_ttft(inf), with_ttft(inf)) == (Cell("never"), Cell("never", "same"))


def test_one_policy_alone_is_the_best_of_nothing() -> None:
    assert not any(cell.best for row in summary_rows({"a": METRICS}) for cell in row.cells)


def test_the_file_has_every_cell() -> None:
    table = figures_table({"a": with_ttft(2.0), "b": with_ttft(1.0)})
    assert table.head == ("figure", "a", "b", "b, change", "b, is")
    assert ("time to first token p50, s", "2.00", "1.00", f"{MINUS}50.0%", "better") in table.rows


def test_tenants_stand_in_rows_with_all_figures_of_all_policies() -> None:
    assert group_table({"a": METRICS}) is None
    metrics = run_of([asking(n, tenant=f"c{n % 2}") for n in range(5)]).metrics
    table = group_table({"a": metrics, "b": metrics})
    assert table is not None
    assert [row[0] for row in table.rows] == ["c0 (3)", "c1 (2)"]
    assert table.head[1:3] == ("tokens served: a", "tokens served: b")
    assert table.rows[0][1] == f"{metrics.tenants['c0'].tokens:,}"
