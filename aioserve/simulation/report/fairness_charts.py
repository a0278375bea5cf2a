"""Charts of fairness: requests that met their targets, and how long each client waited."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from aioserve.arguments import counted
from aioserve.simulation.figures import NEVER
from aioserve.simulation.metrics import ClientMetrics
from aioserve.simulation.report.looks import look_of
from aioserve.simulation.report.plot import Plot
from aioserve.simulation.report.runs import Chart, Panel, PolicyRun, Table
from aioserve.simulation.report.scales import Linear, fitting
from aioserve.simulation.report.summary import clients_table

__all__ = ["clients_chart", "short", "slowest_table", "targets_chart"]

MOST_CLIENTS = 20
MOST_SLOWEST = 10
NAME_CHARS = 15
AXIS_CHARS = 12
MISSING = "-"


def targets_chart(runs: Sequence[PolicyRun]) -> Chart | None:
    """Chart of how many requests met their targets; None where none were given."""
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
            ("refused, or too long", metrics.requests - metrics.finished, "never"),
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
    head = ("policy", "met their targets", "missed a target", "no completion", "goodput")
    svg = plot.svg(
        "targets",
        "Share of requests that met their targets, under each policy",
        "; ".join(f"{name}: {told}" for name, *_, told in table),
        x_label="share of requests",
        y_names=(),
    )
    return Chart(
        (Panel("Share of all requests", svg),),
        "What is written over a bar is of the good requests, those that met their targets.",
        Table("Requests that met their targets under each policy", head, tuple(table)),
    )


def clients_chart(runs: Sequence[PolicyRun]) -> Chart | None:
    """Chart of how long each client waited; None where the trace names none."""
    clients = runs[0].metrics.clients
    if not clients:
        return None
    largest = sorted(clients, key=lambda name: (-clients[name].requests, name))[:MOST_CLIENTS]
    panels = (
        _dots(runs, largest, "Time to first token p99, s", "client-ttft", _p99_ttft, "{:,.2f} s"),
        _dots(
            runs,
            largest,
            "Longest wait, tokens computed for others",
            "client-wait",
            lambda client: client.max_wait_tokens,
            "{:,} tokens",
        ),
    )
    caption = "The clients with the most requests first."
    if any(_p99_ttft(run.metrics.clients[name]) == math.inf for run in runs for name in largest):
        caption += f" At {NEVER!r}: of their requests more than one in a hundred got no completion."
    if len(clients) > len(largest):
        caption += f" Left out: {counted(len(clients) - len(largest), 'client')} with fewer."
    gaps = [run.metrics.service_gap_tokens for run in runs]
    if None not in gaps:
        told = ", ".join(f"{gap:,} with {run.name}" for gap, run in zip(gaps, runs, strict=True))
        caption += f" Largest gap in tokens between two clients that both had to wait: {told}."
    return Chart(panels, caption, clients_table({run.name: run.metrics for run in runs}))


def slowest_table(runs: Sequence[PolicyRun]) -> Table:
    """Table of the requests of each policy that waited longest for their first token."""
    rows: list[tuple[str, ...]] = []
    for run in runs:
        waited = [
            (r.first_token_seconds - r.request.arrival_seconds, r)
            for r in run.result.requests
            if r.first_token_seconds is not None
        ]
        waited.sort(key=lambda pair: -pair[0])
        for seconds, record in waited[:MOST_SLOWEST]:
            request, end = record.request, record.end_seconds
            rows.append(
                (
                    f"#{request.number}",
                    run.name,
                    short(request.client, 40) or MISSING,
                    f"{request.arrival_seconds:,.2f}",
                    f"{request.prompt_tokens:,}",
                    f"{record.cached_tokens:,}",
                    f"{record.output_tokens:,}",
                    f"{seconds:,.2f}",
                    MISSING if end is None else f"{end - request.arrival_seconds:,.2f}",
                )
            )
    head = ("request", "policy", "client", "arrives, s", "prompt tokens", "of those cached")
    return Table(
        f"The {MOST_SLOWEST} requests of each policy that waited longest for their first token",
        (*head, "output tokens", "first token after, s", "ends after, s"),
        tuple(rows),
    )


def short(name: str, most_chars: int = NAME_CHARS) -> str:
    """Shorten a name that may have 500 characters."""
    return name if len(name) <= most_chars else name[: most_chars - 1] + "…"


# -- parts


def _dots(
    runs: Sequence[PolicyRun],
    names: Sequence[str],
    title: str,
    key: str,
    measure: Callable[[ClientMetrics], float | None],
    form: str,
) -> Panel:
    """A row for each client, a dot for each policy."""
    values = [[measure(run.metrics.clients[name]) for name in names] for run in runs]
    known = [float(v) for one in values for v in one if v is not None]
    rows = float(len(names))
    plot = Plot(fitting(known), Linear(0.0, rows), height=22 * len(names) + 6, css="named")
    for row, name in enumerate(names):
        place = rows - row - 0.5
        told = [name]
        for index, run in enumerate(runs):
            value = values[index][row]
            told.append(f"{run.name}: {_told(value, form)}")
            if value is not None:
                plot.mark((value, place), look_of(index))
        plot.row((place - 0.5, place + 0.5), "\n".join(told))
    return Panel(
        title,
        plot.svg(
            key,
            f"{title}, of each client under each policy",
            "The table below has all figures.",
            y_names=[(rows - n - 0.5, short(name, AXIS_CHARS)) for n, name in enumerate(names)],
        ),
    )


def _p99_ttft(client: ClientMetrics) -> float | None:
    spread = client.ttft_seconds
    return None if spread is None else spread.p99


def _told(value: float | None, form: str) -> str:
    if value is None:
        return "none"
    return NEVER if value == math.inf else form.format(value)
