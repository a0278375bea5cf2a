"""One page about runs of some policies on one trace: everything is in it, nothing is fetched."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from aioserve.simulation.figures import unanswered
from aioserve.simulation.metrics import targets_of
from aioserve.simulation.report.draft_tokens import draft_tokens_chart
from aioserve.simulation.report.gantt import MOST_SPANS, Gantt, gantt_chart
from aioserve.simulation.report.layout import PolicyRun, legend_of, rendered, requests_file
from aioserve.simulation.report.overtime import queue_chart, steps_and_memory_charts
from aioserve.simulation.report.summary import (
    figures_table,
    group_chart,
    group_parts,
    slowest_table,
    summary_rows,
    targets_chart,
)
from aioserve.simulation.report.tails import tails_chart
from aioserve.simulation.report.windows import Window, choose_windows

__all__ = ["report_page"]

MOST_SPANS_OF_ALL = 5000
"""Most spans in the lanes of all windows: each is an element of its own."""
DRAWN_OF_STEPS = (
    ("queue", "Queue"),
    ("steps", "Steps and KV memory"),
    ("lanes", "Step by step"),
)
"""Charts that are drawn if any step ran."""


class While(msgspec.Struct, frozen=True):
    """Steps of some policies, drawn one by one."""

    title: str
    gantts: list[Gantt]


def report_page(
    runs: Sequence[PolicyRun],
    *,
    title: str,
    command: str,
    facts: Sequence[tuple[str, str]],
    window: Window | None = None,
) -> str:
    """Make the page's HTML. The same runs give the same text.

    - `command` and `facts` say what was run, for the reader.
    - `window` is the time, in seconds on the trace's clock, whose steps are shown one by one. By
      default it is the time in which the policies differ most, and a further one for each policy.
    """
    ran = [run for run in runs if run.timeline.steps]
    found = {run.name: run.metrics for run in runs}
    targets = targets_of(record.request for record in runs[0].result.requests)
    by_target = targets_chart(runs)
    draft_tokens = draft_tokens_chart(runs)
    groups = group_parts(lambda group: group_chart(runs, group))
    contents = [
        ("figures", "Figures"),
        *([("latency", "How long requests took")] if ran else []),
        *([("targets", "Targets")] if by_target else []),
        *([("draft-tokens", "Draft tokens")] if draft_tokens else []),
        *((part.key, part.title) for part in groups),
        *(DRAWN_OF_STEPS if ran else ()),
        ("requests", "Requests"),
    ]
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
        draft_tokens=draft_tokens,
        groups=groups,
        queue=queue_chart(runs),
        steps=steps_and_memory_charts(ran) if ran else [],
        whiles=_whiles(ran, window) if ran else [],
        slowest=slowest_table(runs),
        download=requests_file(runs),
    )


def _whiles(ran: Sequence[PolicyRun], window: Window | None) -> list[While]:
    """Return the steps of all runs in one window and, unless it is given, of each in its own."""
    if window is not None:
        pairs = [("As asked for", [(run, window) for run in ran])]
    else:
        chosen = choose_windows(ran)
        title = (
            "Where the policies differ most" if chosen.differ else "Where most requests are there"
        )
        own = [(run, one) for run, one in zip(ran, chosen.own, strict=True) if one is not None]
        pairs = [(title, [(run, chosen.common) for run in ran])]
        if own:
            pairs.append(("Where most requests wait that another policy has started", own))
    most_spans = min(MOST_SPANS, MOST_SPANS_OF_ALL // sum(len(drawn) for _, drawn in pairs))
    return [
        While(
            title,
            [gantt_chart(run, one, f"g{n}-{m}", most_spans) for m, (run, one) in enumerate(drawn)],
        )
        for n, (title, drawn) in enumerate(pairs)
    ]
