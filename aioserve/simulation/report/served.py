"""One page about a load that a server was measured with: everything is in it, nothing is fetched.

Its charts are those of simulated requests, without steps and memory, which only a simulator sees.
"""

from __future__ import annotations

from collections.abc import Sequence

from aioserve.simulation.figures import GROUPS, Figure, Group
from aioserve.simulation.metrics import GroupMetrics, targets_of
from aioserve.simulation.report.layout import (
    Chart,
    ServedRun,
    Table,
    legend_of,
    rendered,
    requests_file,
)
from aioserve.simulation.report.summary import (
    P99_TTFT,
    group_dots,
    group_parts,
    slowest_table,
    targets_chart,
)
from aioserve.simulation.report.tails import tails_chart
from aioserve.simulation.served import ServedMetrics

__all__ = ["SERVED_FIGURES", "served_page"]

MOST_NAMES = 20


def _spread(label: str, field: str, names: Sequence[str] = ("p50", "p90", "p99")) -> list[Figure]:
    return [
        Figure(f"{label} {name}, ms", f"{field}.{name}", "{:,.2f}", 1000, "less") for name in names
    ]


SERVED_FIGURES = (
    Figure("finished", "finished"),
    Figure("of those, shorter than asked for", "cut_short"),
    Figure("refused (429, 503)", "refused"),
    Figure("failed", "failed"),
    Figure("under way at the end", "unfinished"),
    Figure("never sent", "not_sent"),
    Figure("of those finished, without counts of the server", "without_usage"),
    Figure("of those finished, without a token to see", "without_text"),
    *_spread("time to first token", "ttft_seconds"),
    *_spread("time per output token", "tpot_seconds"),
    *_spread("gap between chunks", "gap_seconds", ("p50", "p99", "max")),
    *_spread("whole answer", "e2e_seconds"),
    Figure("met their targets", "goodput.share", "{:.1%}"),
    Figure("goodput, requests/s", "goodput.requests_per_second", "{:,.3f}"),
    Figure("requests/s", "requests_per_second", "{:,.3f}"),
    Figure("prompt tokens/s", "prompt_tokens_per_second", "{:,.1f}"),
    Figure("output tokens/s", "output_tokens_per_second", "{:,.1f}"),
    Figure("tokens in a chunk, mean", "tokens_per_chunk", "{:,.2f}"),
    Figure("prompt tokens", "prompt_tokens"),
    Figure("of those cached", "cached_tokens"),
    Figure("output tokens", "output_tokens"),
    Figure("time, s", "seconds", "{:,.2f}"),
    *_spread("the generator: requests sent late by", "generator.late_seconds", ("p99", "max")),
    *_spread("the generator: its loop lag", "generator.loop_lag_seconds", ("p99", "max")),
    Figure("the generator: busy", "generator.busy_share", "{:.1%}"),
)


def served_page(
    run: ServedRun,
    *,
    title: str,
    command: str,
    facts: Sequence[tuple[str, str]],
) -> str:
    """Make the page's HTML. The same run gives the same text.

    command, facts: what was run, for the reader.
    """
    metrics, targets = run.metrics, targets_of(record.request for record in run.requests)
    by_target = targets_chart([run], "refused, or failed")
    groups = group_parts(lambda group: _groups_chart(run, group))
    failures = _failures_table(metrics)
    contents = [
        ("figures", "Figures"),
        *([("failures", "Failures")] if failures.rows else []),
        *([("latency", "How long requests took")] if run.requests else []),
        *([("targets", "Targets")] if by_target else []),
        *((part.key, part.title) for part in groups),
        ("requests", "Requests"),
    ]
    return rendered(
        "served.html",
        title=title,
        command=command,
        facts=facts,
        contents=contents,
        legend=legend_of([run.name]),
        figures=_figures_table(metrics),
        findings=metrics.generator.findings,
        failures=failures,
        latency=tails_chart([run], targets) if run.requests else None,
        targets=by_target,
        groups=groups,
        slowest=slowest_table([run]),
        download=requests_file([run]),
    )


# -- parts


def _figures_table(metrics: ServedMetrics) -> Table:
    rows = [
        (figure.label, figure.text(metrics))
        for figure in SERVED_FIGURES
        if metrics.goodput is not None or not figure.field.startswith("goodput.")
    ]
    return Table("What was measured", ("figure", "value"), tuple(rows))


def _failures_table(metrics: ServedMetrics) -> Table:
    rows = [
        (kind, f"{failure.requests:,}", failure.first) for kind, failure in metrics.failures.items()
    ]
    return Table("Requests without an answer", ("kind", "requests", "the first"), tuple(rows))


def _groups_chart(run: ServedRun, group: Group) -> Chart | None:
    """Return a chart of the waits of each tenant, or class; None if the trace names none."""
    named: dict[str, GroupMetrics] = getattr(run.metrics, group)
    if not named:
        return None
    largest = sorted(named, key=lambda name: (-named[name].requests, name))[:MOST_NAMES]
    title, one = "Time to first token p99, s", GROUPS[group]
    panel = group_dots([run], group, largest, title, f"{one}-ttft", P99_TTFT, "{:,.2f} s")
    figures = (
        Figure("requests", "requests"),
        Figure("finished", "finished"),
        Figure("tokens", "tokens"),
        Figure(title, "ttft_seconds.p99", "{:,.3f}"),
        Figure("met their targets", "goodput.share", "{:.1%}"),
    )
    if run.metrics.goodput is None:
        figures = figures[:-1]
    rows = [(name, *(figure.text(named[name]) for figure in figures)) for name in largest]
    head = (one, *(figure.label for figure in figures))
    caption = f"The {group} with the most requests first."
    if len(named) > len(largest):
        caption += f" Left out: {len(named) - len(largest):,} with fewer."
    return Chart((panel,), caption, Table(f"Each {one}", head, tuple(rows)))
