"""Figures of all policies side by side, with their change from the first and the best of them.

Also charts of requests that met their targets, and of each tenant and each class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from aioserve.arguments import counted
from aioserve.simulation.figures import (
    GROUPS,
    MISSING,
    NEVER,
    Figure,
    Group,
    group_rows,
    shown_figures,
    text_of,
)
from aioserve.simulation.metrics import Metrics, measure_of
from aioserve.simulation.report.layout import Chart, MeasuredRequests, Panel, PolicyRun, Table
from aioserve.simulation.report.plot import Plot, look_of
from aioserve.simulation.report.scales import Linear, fitting

__all__ = [
    "P99_TTFT",
    "Cell",
    "Row",
    "figures_table",
    "group_chart",
    "group_dots",
    "group_parts",
    "group_table",
    "short",
    "slowest_table",
    "summary_rows",
    "targets_chart",
]

MOST_NAMES = 200
NAME_CHARS = 48
LEAST_SHOWN_CHANGE = 0.0005
"""Smallest change that is shown: a smaller one rounds to no tenth of a percent."""


class Cell(msgspec.Struct, frozen=True):
    """One figure of one policy."""

    text: str
    change: str = ""
    """Change from the first policy, with its sign; empty if there is nothing to compare."""
    verdict: str = ""
    """`better` or `worse` than the first; empty if neither can be said."""
    best: bool = False


class Row(msgspec.Struct, frozen=True):
    label: str
    cells: tuple[Cell, ...]


def summary_rows(found: Mapping[str, Metrics]) -> list[Row]:
    """Return rows of figures, with a cell for each policy."""
    return [_row(figure, list(found.values())) for figure in shown_figures(found)]


def figures_table(found: Mapping[str, Metrics]) -> Table:
    """Return a table of the figures to download."""
    head = ["figure"]
    for number, name in enumerate(found):
        head += [name, f"{name}, change", f"{name}, is"] if number else [name]
    rows: list[tuple[str, ...]] = []
    for row in summary_rows(found):
        cells = [row.label, row.cells[0].text]
        for cell in row.cells[1:]:
            cells += [cell.text, cell.change, cell.verdict]
        rows.append(tuple(cells))
    return Table("All figures under each policy", tuple(head), tuple(rows))


def group_table(found: Mapping[str, Metrics], group: Group = "tenants") -> Table | None:
    """Return a table of all tenants, or classes; of many, the `MOST_NAMES` with the most requests.

    None if the trace names none.
    """
    parts = group_rows(found, group)
    if not parts:
        return None
    requests = [one.requests for one in getattr(next(iter(found.values())), group).values()]
    largest = sorted(range(len(requests)), key=lambda n: -requests[n])[:MOST_NAMES]
    head = [
        f"{GROUPS[group]} (requests)",
        *(f"{label}: {name}" for label, _ in parts for name in found),
    ]
    rows = [
        (_short(parts[0][1][n][0]), *(text for _, lines in parts for text in lines[n][1]))
        for n in sorted(largest)
    ]
    caption = f"Each {GROUPS[group]} under each policy"
    if len(rows) < len(requests):
        caption += f"; left out: {len(requests) - len(rows):,} with fewer requests"
    return Table(caption, tuple(head), tuple(rows))


# -- parts


def _short(text: str) -> str:
    """Shorten a text, but not its end, which is the number of requests."""
    return text if len(text) <= NAME_CHARS else f"{text[: NAME_CHARS - 12]}…{text[-11:]}"


def _row(figure: Figure, all_metrics: list[Metrics]) -> Row:
    values = [figure.of(metrics) for metrics in all_metrics]
    texts = [figure.show(value) for value in values]
    best = _best_text(figure, values)
    cells = [
        Cell(text, *(_change(figure, values[0], value) if number else ("", "")), text == best)
        for number, (text, value) in enumerate(zip(texts, values, strict=True))
    ]
    return Row(figure.label, tuple(cells))


def _best_text(figure: Figure, values: list[float | None]) -> str | None:
    """Return the text of the best value.

    None if neither more nor less is better, or if all look alike.
    """
    known = [value for value in values if value is not None]
    if figure.better is None or len({figure.show(value) for value in known}) < 2:
        return None
    return figure.show(max(known) if figure.better == "more" else min(known))


def _change(figure: Figure, first: float | None, value: float | None) -> tuple[str, str]:
    if first is None or value is None:
        return "", ""
    if value == first:
        return "same", ""
    if math.isinf(value) or math.isinf(first):
        return "", _verdict(figure, math.isinf(value))
    relative = value - first if figure.is_share or not first else (value - first) / abs(first)
    if abs(relative) < LEAST_SHOWN_CHANGE:
        return "nearly the same", ""
    if figure.is_share:
        text = f"{relative * 100:+,.1f} points"
    elif first:
        text = f"{relative:+,.1%}"
    else:
        text = ("+" if relative > 0 else "") + figure.show(relative)
    return text.replace("-", "\N{MINUS SIGN}"), _verdict(figure, relative > 0)


def _verdict(figure: Figure, is_more: bool) -> str:
    if figure.better is None:
        return ""
    return "better" if is_more == (figure.better == "more") else "worse"


CHARTED_NAMES = 20
MOST_SLOWEST = 10
SHORT_CHARS = 15
AXIS_CHARS = 12
P99_TTFT = measure_of("ttft_seconds.p99")
SHARE = Linear(0.0, 1.0, percent=True)


def targets_chart(
    runs: Sequence[MeasuredRequests], without: str = "refused, or too long"
) -> Chart | None:
    """Return a chart of requests that met their targets; None without targets.

    `without` says how requests got no completion.
    """
    if any(run.metrics.goodput is None for run in runs):
        return None
    rows = float(len(runs))
    plot = Plot(
        Linear(0.0, 1.0, percent=True), Linear(0.0, rows), height=46 * len(runs), css="bars"
    )
    table: list[tuple[str, ...]] = []
    for number, run in enumerate(runs):
        metrics, goodput = run.metrics, run.metrics.goodput
        if goodput is None or not metrics.requests:
            continue
        parts = (
            ("met their targets", goodput.requests, "good"),
            ("finished, but missed a target", metrics.finished - goodput.requests, "late"),
            (without, metrics.requests - metrics.finished, "never"),
        )
        place, left = rows - number - 0.5, 0.0
        for name, count, css in parts:
            if not count:
                continue
            right = left + count / metrics.requests
            tip = (
                f"{run.name}\n{count:,} of {counted(metrics.requests, 'request', form=',')}: {name}"
            )
            plot.bar((left, min(1.0, right)), (place - 0.45, place + 0.02), css, tip)
            left = right
        told = f"{goodput.share:.1%}, {goodput.requests_per_second:,.3f} good/s"
        plot.note((0.0, place + 0.27), f"{short(run.name)}: {told}")
        table.append((run.name, *(f"{count:,}" for _, count, _ in parts), told))
    head = (runs[0].kind, "met their targets", "missed a target", "no completion", "goodput")
    svg = plot.svg(
        "targets",
        f"Share of requests that met their targets, {runs[0].each}",
        "; ".join(f"{name}: {told}" for name, *_, told in table),
        x_label="share of requests",
        y_names=(),
    )
    return Chart(
        (Panel("Share of all requests", svg),),
        "What is written over a bar is of the good requests, those that met their targets.",
        Table(f"Requests that met their targets {runs[0].each}", head, tuple(table)),
    )


class GroupPart(msgspec.Struct, frozen=True):
    """Part of a page about tenants, or about classes."""

    key: Group
    title: str
    chart: Chart


def group_parts(chart_of: Callable[[Group], Chart | None]) -> list[GroupPart]:
    """Return parts for the groups that have a chart."""
    return [
        GroupPart(group, group.capitalize(), chart)
        for group in GROUPS
        if (chart := chart_of(group)) is not None
    ]


def group_chart(runs: Sequence[PolicyRun], group: Group = "tenants") -> Chart | None:
    """Return a chart of the waits of each tenant, or class, and of its requests that met their
    targets.

    None if the trace names none.
    """
    named = [getattr(run.metrics, group) for run in runs]
    if not named[0]:
        return None
    one = GROUPS[group]
    by_size = sorted(named[0], key=lambda name: (-named[0][name].requests, name))
    largest = by_size[:CHARTED_NAMES]
    title, key = "Time to first token p99, s", f"{one}-ttft"
    panels = [group_dots(runs, group, largest, title, key, P99_TTFT, "{:,.2f} s")]
    title, key = "Longest wait, tokens computed for others", f"{one}-wait"
    wait = measure_of("max_wait_tokens")
    panels.append(group_dots(runs, group, largest, title, key, wait, "{:,} tokens"))
    if all(run.metrics.goodput is not None for run in runs):
        title, key = "Share of requests that met their targets", f"{one}-targets"
        share = measure_of("goodput.share")
        panels.append(group_dots(runs, group, largest, title, key, share, "{:.1%}", SHARE))
    caption = f"The {group} with the most requests first."
    if any(P99_TTFT(theirs[name]) == math.inf for theirs in named for name in largest):
        caption += f" At {NEVER!r}: of their requests more than one in a hundred got no completion."
    if len(by_size) > len(largest):
        left = len(by_size) - len(largest)
        caption += f" Left out: {counted(left, one, group)} with fewer."
    gaps = [run.metrics.service_gap_tokens for run in runs]
    if group == "tenants" and None not in gaps:
        told = ", ".join(f"{gap:,} with {run.name}" for gap, run in zip(gaps, runs, strict=True))
        caption += f" Largest gap in tokens between two tenants that both had to wait: {told}."
    table = group_table({run.name: run.metrics for run in runs}, group)
    return Chart(tuple(panels), caption, table)


def slowest_table(runs: Sequence[MeasuredRequests]) -> Table:
    """Return a table of the requests of each policy that waited longest for their first token."""
    rows: list[tuple[str, ...]] = []
    for run in runs:
        waited = [
            (r.first_token_seconds - r.request.arrival_seconds, r)
            for r in run.requests
            if r.first_token_seconds is not None
        ]
        waited.sort(key=lambda pair: -pair[0])
        for seconds, record in waited[:MOST_SLOWEST]:
            request, end = record.request, record.end_seconds
            rows.append(
                (
                    f"#{request.number}",
                    run.name,
                    short(request.tenant, 40) or MISSING,
                    f"{request.arrival_seconds:,.2f}",
                    f"{request.prompt_tokens:,}",
                    f"{record.cached_tokens:,}",
                    f"{record.output_tokens:,}",
                    f"{seconds:,.2f}",
                    MISSING if end is None else f"{end - request.arrival_seconds:,.2f}",
                )
            )
    kind = runs[0].kind
    head = ("request", kind, "tenant", "arrives, s", "prompt tokens", "of those cached")
    return Table(
        f"The {MOST_SLOWEST} requests of each {kind} that waited longest for their first token",
        (*head, "output tokens", "first token after, s", "ends after, s"),
        tuple(rows),
    )


def short(name: str, most_chars: int = SHORT_CHARS) -> str:
    """Shorten a name, which may have 500 characters."""
    return name if len(name) <= most_chars else name[: most_chars - 1] + "…"


# -- parts


def group_dots(
    runs: Sequence[MeasuredRequests],
    group: Group,
    names: Sequence[str],
    title: str,
    key: str,
    value_of: Callable[[Any], float | None],
    form: str,
    scale: Linear | None = None,
) -> Panel:
    """Return a panel with a row for each tenant or class, and a dot for each policy."""
    values = [[value_of(getattr(run.metrics, group)[name]) for name in names] for run in runs]
    known = [float(v) for one in values for v in one if v is not None]
    rows = float(len(names))
    plot = Plot(scale or fitting(known), Linear(0.0, rows), height=22 * len(names) + 6, css="named")
    for row, name in enumerate(names):
        place = rows - row - 0.5
        lines = [name]
        for index, run in enumerate(runs):
            value = values[index][row]
            lines.append(f"{run.name}: {text_of(value, form, missing='none')}")
            if value is not None:
                plot.mark((value, place), look_of(index))
        plot.row((place - 0.5, place + 0.5), "\n".join(lines))
    return Panel(
        title,
        plot.svg(
            key,
            f"{title}, of each {GROUPS[group]} {runs[0].each}",
            "The table below has all figures.",
            y_names=[(rows - n - 0.5, short(name, AXIS_CHARS)) for n, name in enumerate(names)],
        ),
    )
