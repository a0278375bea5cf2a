"""Charts of accepted draft tokens beside the expected ones, drawn if a run has draft tokens."""

from __future__ import annotations

from aioserve.simulation.expected_tokens import counted_tokens, expected_tokens
from aioserve.simulation.report.draft_tokens import draft_tokens_chart
from tests.simulation.report.runs import asking, run_of
from tests.simulation.report.test_page import page_of

TRACE = [asking(number, output=60) for number in range(4)]


def test_each_run_that_drafted_has_a_row_for_each_number_of_drafts() -> None:
    plain = run_of(TRACE)
    drafting = run_of(TRACE, name="drafting", speculation_max_tokens=3)
    chart = draft_tokens_chart([plain, drafting])
    assert chart is not None
    assert chart.table is not None
    found = drafting.metrics.speculation
    assert found is not None
    first = found.accepted[0] / found.drafted[0]
    counted = counted_tokens(found.drafted, found.accepted)
    assert list(chart.table.rows) == [
        ("drafting", f"{k}", f"{expected_tokens(first, k):.2f}", f"{tokens:.2f}", f"{steps:,}")
        for k, (tokens, steps) in enumerate(zip(counted, found.drafted, strict=True), 1)
    ]
    assert len(counted) == 3
    (panel,) = chart.panels
    assert "draft tokens that a step verifies" in panel.svg
    assert panel.svg.count('class="mark c1"') == 3
    assert "mark c0" not in panel.svg


def test_a_page_has_the_chart_where_something_drafted_and_not_elsewhere() -> None:
    plain, drafting = run_of(TRACE), run_of(TRACE, speculation_max_tokens=3)
    assert draft_tokens_chart([plain]) is None
    assert 'id="draft-tokens"' not in page_of([plain])
    page = page_of([drafting])
    assert '<section id="draft-tokens"' in page
    assert 'href="#draft-tokens"' in page
    assert "tokens per step of a sequence" in page
