"""What the charts count."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from aioserve.simulation.report import charts
from aioserve.simulation.report.svg import chart_style
from tests.simulation.report.runs import asking, run_of

pytest.importorskip("matplotlib")


def test_an_answer_cut_to_one_token_has_no_time_between_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is not among those of which a share had a short one, whatever length the trace gives."""
    seen: list[tuple[int, int]] = []
    found = charts.cumulative_shares

    def record(values: list[float], out_of: int, most_points: int) -> Any:
        seen.append((len(values), out_of))
        return found(values, out_of, most_points)

    monkeypatch.setattr(charts, "cumulative_shares", record)
    trace = [replace(asking(n), max_tokens=1 if n < 2 else 4) for n in range(4)]
    with chart_style():
        charts.latency_chart([run_of(trace)], None)
    assert seen == [(4, 4), (2, 2), (4, 4)]
