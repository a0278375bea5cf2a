"""Makes one page about runs of some policies on one trace: everything in it, nothing fetched."""

from __future__ import annotations

from collections.abc import Sequence

from aioserve.simulation.figures import GROUPS, unanswered
from aioserve.simulation.metrics import targets_of
from aioserve.simulation.report.gantt import MOST_SPANS, Window, busiest_window, gantt_chart
from aioserve.simulation.report.layout import PolicyRun, legend_of, rendered, requests_file
from aioserve.simulation.report.overtime import queue_chart, steps_and_memory_charts
from aioserve.simulation.report.summary import (
    figures_table,
    group_chart,
    slowest_table,
    summary_rows,
    targets_chart,
)
from aioserve.simulation.report.tails import tails_chart

__all__ = ["report_page"]

MOST_SPANS_OF_ALL = 5000
"""Most spans in the lanes of all policies: each is an element of its own."""
DRAWN_OF_STEPS = (
    ("queue", "Queue"),
    ("steps", "Steps and KV memory"),
    ("lanes", "Step by step"),
)
"""Charts drawn if any step ran."""


def report_page(
    runs: Sequence[PolicyRun],
    *,
    title: str,
    command: str,
    facts: Sequence[tuple[str, str]],
    window: Window | None = None,
) -> str:
    """Make the page's HTML. The same runs give the same text.

    command, facts: what was run, for the reader.
    window: seconds on the trace's clock whose steps are shown one by one; the busiest ones of the
        first policy that ran a step unless given.
    """
    ran = [run for run in runs if run.timeline.steps]
    found = {run.name: run.metrics for run in runs}
    most_spans = min(MOST_SPANS, MOST_SPANS_OF_ALL // len(runs))
    targets = targets_of(record.request for record in runs[0].result.requests)
    by_target = targets_chart(runs)
    groups = [
        {"key": group, "title": group.capitalize(), "chart": chart}
        for group in GROUPS
        if (chart := group_chart(runs, group)) is not None
    ]
    contents = [
        ("figures", "Figures"),
        *([("latency", "How long requests took")] if ran else []),
        *([("targets", "Targets")] if by_target else []),
        *((group["key"], group["title"]) for group in groups),
        *(DRAWN_OF_STEPS if ran else ()),
        ("requests", "Requests"),
    ]
    window = window or busiest_window(ran[0] if ran else runs[0])
    return rendered(
        "policies.html",
        title=title,
        command=command,
        facts=facts,
        contents=contents,
        legend=legend_of(list(found)),
        rows=summary_rows(found),
        figures=figures_table(found),
        unanswered=unanswered({run.name: [run.metrics] for run in runs}),
        ran=bool(ran),
        latency=tails_chart(runs, targets),
        targets=by_target,
        groups=groups,
        queue=queue_chart(runs),
        steps=steps_and_memory_charts(ran) if ran else [],
        gantts=[gantt_chart(run, window, f"g{n}", most_spans) for n, run in enumerate(ran)],
        window=f"{window[0]:,.2f} to {window[1]:,.2f} s",
        slowest=slowest_table(runs),
        download=requests_file(runs),
    )
