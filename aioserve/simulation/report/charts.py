"""The charts that compare policies: how long requests took, who got what, and what filled the
steps and the memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from aioserve.simulation.metrics import (
    ClientMetrics,
    Targets,
    e2e_seconds,
    has_answer,
    tpot_seconds,
    ttft_seconds,
)
from aioserve.simulation.report.runs import Chart, PolicyRun
from aioserve.simulation.report.sampling import (
    cumulative_shares,
    means_over_time,
    peaks_over_time,
)
from aioserve.simulation.report.svg import INK, look_of, new_figure, plain_numbers, to_svg
from aioserve.simulation.simulator import RequestRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "COLORS_OF_PARTS",
    "DECODE_COLOR",
    "PREFILL_COLOR",
    "batch_and_memory_chart",
    "clients_chart",
    "latency_chart",
    "queue_chart",
    "targets_chart",
]

WIDTH = 740.0
MOST_CDF_POINTS = 300
MOST_BINS = 300
MOST_BINS_OF_ALL = 1200
MOST_CLIENTS = 20

# From Paul Tol's muted scheme, unlike the colours of policies.
PREFILL_COLOR = "#AA4499"
DECODE_COLOR = "#44AA99"
CACHED_COLOR = "#999999"
HELD_COLOR = "#0072B2"
GOOD_COLOR = "#009E73"
LATE_COLOR = "#E69F00"
COLORS_OF_PARTS = {
    "prefill": PREFILL_COLOR,
    "decode": DECODE_COLOR,
    "held": HELD_COLOR,
    "cached": CACHED_COLOR,
    "good": GOOD_COLOR,
    "late": LATE_COLOR,
}


def latency_chart(runs: Sequence[PolicyRun], targets: Targets | None) -> Chart:
    """How many requests took at most how long: three measures, all policies in each."""
    figure = new_figure(WIDTH, 235)
    measures: tuple[tuple[str, str, Callable[[RequestRecord], float | None], float], ...] = (
        ("Time to first token", "s", ttft_seconds, 1),
        ("Time per output token", "ms", tpot_seconds, 1000),
        ("Whole answer", "s", e2e_seconds, 1),
    )
    marks = (None, None) if targets is None else (targets.ttft_seconds, targets.tpot_seconds)
    for axes, (title, unit, measure, factor), mark in zip(
        figure.subplots(1, 3, sharey=True), measures, (*marks, None), strict=True
    ):
        drawn: list[float] = []
        for index, run in enumerate(runs):
            asked = _asked_for(run, measure)
            found = (measure(record) for record in asked)
            known = [value * factor for value in found if value is not None]
            if known:
                values, shares = cumulative_shares(known, len(asked), MOST_CDF_POINTS)
                axes.step(values, shares, where="post", **look_of(index).line)
                drawn += (values[0], values[-1])
        if mark is not None:
            drawn.append(mark * factor)
            axes.axvline(mark * factor, alpha=0)
        if drawn and max(drawn) > 20 * min(drawn):
            axes.set_xscale("log")
            plain_numbers(axes, "x")
        axes.set(title=title, xlabel=unit, ylim=(0, 1.02), yticks=(0, 0.25, 0.5, 0.75, 0.9, 1))
        if mark is not None:
            _mark_target(axes, mark * factor, f"target {mark * factor:,.6g} {unit}")
    figure.axes[0].set_ylabel("share of requests")
    figure.axes[0].yaxis.set_major_formatter(_percent)
    return Chart(
        to_svg(figure, "latency", "Cumulative distributions of latencies under each policy"),
        "Share of all requests whose time was at most so long; one that got no answer counts among "
        "all. The time per output token is of answers with two tokens or more. Where times differ "
        "by more than a factor of 20 the scale is logarithmic.",
    )


def targets_chart(runs: Sequence[PolicyRun]) -> Chart | None:
    """How many requests met their targets; None where none were given."""
    if any(run.metrics.goodput is None for run in runs):
        return None
    figure = new_figure(WIDTH, 45 + 26 * len(runs))
    axes = figure.subplots()
    for row, run in enumerate(runs):
        metrics, goodput = run.metrics, run.metrics.goodput
        if goodput is None or not metrics.requests:
            continue
        late = metrics.finished - goodput.requests
        left = 0.0
        for count, color in (
            (goodput.requests, GOOD_COLOR),
            (late, LATE_COLOR),
            (metrics.requests - metrics.finished, CACHED_COLOR),
        ):
            axes.barh(row, count / metrics.requests, 0.7, left=left, color=color)
            left += count / metrics.requests
        text = f"{goodput.share:.1%}, {goodput.requests_per_second:,.3f} requests/s"
        axes.annotate(text, (1.01, row), va="center", annotation_clip=False)
    axes.set(xlim=(0, 1), xlabel="share of requests", ylim=(len(runs) - 0.5, -0.5))
    axes.set_yticks(range(len(runs)), [run.name for run in runs])
    axes.xaxis.set_major_formatter(_percent)
    axes.grid(visible=False, axis="y")
    return Chart(
        to_svg(figure, "targets", "Share of requests that met their targets under each policy"),
        "The figures at the right are those of requests that met their targets.",
    )


def clients_chart(runs: Sequence[PolicyRun]) -> Chart | None:
    """How long each client waited; None where the trace names none."""
    clients = runs[0].metrics.clients
    if not clients:
        return None
    largest = sorted(clients, key=lambda name: (-clients[name].requests, name))[:MOST_CLIENTS]
    figure = new_figure(WIDTH, 70 + 17 * len(largest))
    measures: tuple[tuple[str, str, Callable[[ClientMetrics], float | None]], ...] = (
        ("Time to first token, p99", "s", _p99_ttft),
        ("Longest wait", "tokens computed for others", lambda client: client.max_wait_tokens),
    )
    for axes, (title, unit, measure) in zip(
        figure.subplots(1, 2, sharey=True), measures, strict=True
    ):
        drawn = []
        for index, run in enumerate(runs):
            values = [measure(run.metrics.clients[name]) for name in largest]
            dots = [(value, row) for row, value in enumerate(values) if value is not None]
            drawn += [value for value, _ in dots]
            axes.plot(
                [value for value, _ in dots],
                [row for _, row in dots],
                linestyle="none",
                marker=look_of(index).marker,
                markersize=4.5,
                markeredgewidth=0,
                color=look_of(index).color,
            )
        if drawn and min(drawn) > 0 and max(drawn) > 20 * min(drawn):
            axes.set_xscale("log")
            plain_numbers(axes, "x")
        else:
            axes.set_xlim(left=0)
            axes.xaxis.set_major_formatter(_thousands)
        axes.set(title=title, xlabel=unit, ylim=(len(largest) - 0.5, -0.5))
    figure.axes[0].set_yticks(range(len(largest)), largest)
    caption = "The clients with the most requests first."
    if len(clients) > len(largest):
        caption += f" Left out: {len(clients) - len(largest)} clients with fewer."
    gaps = [run.metrics.service_gap_tokens for run in runs]
    if None not in gaps:
        told = ", ".join(f"{gap:,} with {run.name}" for gap, run in zip(gaps, runs, strict=True))
        caption += f" Largest gap in tokens between two clients that both had to wait: {told}."
    return Chart(to_svg(figure, "clients", "How long each client waited"), caption)


def queue_chart(runs: Sequence[PolicyRun]) -> Chart:
    """Requests that wait and requests that run, over time, all policies in each."""
    edges = _edges(runs)
    figure = new_figure(WIDTH, 300)
    for axes, (column, title) in zip(
        figure.subplots(2, 1, sharex=True),
        (("waiting", "Requests that wait"), ("running", "Requests that run")),
        strict=True,
    ):
        for index, run in enumerate(runs):
            began, ended = _times(run)
            values = run.timeline.column(column)
            means = means_over_time(edges, began, ended, values)
            peaks = peaks_over_time(edges, began, ended, values)
            look = look_of(index)
            axes.stairs(
                np.maximum(means, peaks),
                edges,
                baseline=means,
                fill=True,
                alpha=0.2,
                color=look.color,
                linewidth=0,
            )
            axes.plot(_middles(edges), means, **look.line)
        axes.set(title=title, ylabel="requests", ylim=(0, None), xlim=(edges[0], edges[-1]))
        axes.yaxis.set_major_formatter(_thousands)
    figure.axes[-1].set_xlabel("seconds on the trace's clock")
    return Chart(
        to_svg(figure, "queue", "Requests that wait and run over time under each policy"),
        f"Lines are means over {_bin_text(edges)}, and what is shaded reaches up to the most.",
    )


def batch_and_memory_chart(runs: Sequence[PolicyRun]) -> Chart:
    """What filled the steps and the KV memory, over time: three panels for each policy."""
    edges = _edges(runs)
    figure = new_figure(WIDTH, 25 + 115 * len(runs))
    grid = figure.subplots(len(runs), 3, sharex=True, sharey="col", squeeze=False)
    for (prefill, decode, memory), run in zip(grid, runs, strict=True):
        pages = run.result.num_pages
        bottom = np.zeros(len(edges) - 1)
        for axes, column, color in (
            (prefill, "prefill_tokens", PREFILL_COLOR),
            (decode, "decode_tokens", DECODE_COLOR),
            (memory, "pages_held", HELD_COLOR),
            (memory, "pages_cached", CACHED_COLOR),
        ):
            top = means_over_time(edges, *_times(run), run.timeline.column(column))
            if axes is memory:
                top = bottom + top / pages
            axes.stairs(top, edges, baseline=bottom, fill=True, color=color, linewidth=0)
            if axes is memory:
                bottom = top
        prefill.set(title=f"{run.name}: prefill", ylabel="tokens of a step")
        decode.set(title=f"{run.name}: decode", ylabel="tokens of a step")
        memory.set(title=f"{run.name}: KV pages", ylabel="share of pages")
        for axes, form in ((prefill, _thousands), (decode, _thousands), (memory, _percent)):
            axes.yaxis.set_major_formatter(form)
    for axes in grid[-1]:  # and with them all others: their axes are shared
        axes.set(xlim=(edges[0], edges[-1]), ylim=(0, None))
        axes.set_xlabel("seconds on the trace's clock")
    return Chart(
        to_svg(figure, "batch", "Tokens of steps and use of KV pages over time under each policy"),
        f"Means over {_bin_text(edges)}; between steps there are no tokens, and no pages are "
        f"counted. {_memory_text(runs[0])}",
    )


# -- parts


def _asked_for(
    run: PolicyRun, measure: Callable[[RequestRecord], float | None]
) -> list[RequestRecord]:
    """The requests that have the measure, or would have it if they had been served: of an answer
    that has ended, what there is of it counts, and not what the trace says."""
    if measure is not tpot_seconds:
        return list(run.result.requests)
    return [
        r
        for r in run.result.requests
        if (r.output_tokens if has_answer(r) else r.request.output_tokens) >= 2
    ]


def _p99_ttft(client: ClientMetrics) -> float | None:
    return None if client.ttft_seconds is None else client.ttft_seconds.p99


def _mark_target(axes: Axes, at: float, text: str) -> None:
    """Call it when the scale of the axis stands."""
    axes.axvline(at, color=INK, linewidth=1, linestyle=(0, (1, 1.5)))
    across, _ = axes.transAxes.inverted().transform(axes.transData.transform((at, 0)))
    side, offset = ("left", 3) if across < 0.5 else ("right", -3)
    axes.annotate(
        text, (at, 0.03), xytext=(offset, 0), textcoords="offset points", fontsize=8, ha=side
    )


def _edges(runs: Sequence[PolicyRun]) -> np.ndarray:
    """Ends of the spans over which means are taken, the same for all policies."""
    firsts = [run.timeline.steps[0].began_seconds for run in runs if run.timeline.steps]
    lasts = [run.timeline.steps[-1].ended_seconds for run in runs if run.timeline.steps]
    longest = max((len(run.timeline) for run in runs), default=0)
    first, last = min(firsts, default=0.0), max(lasts, default=1.0)
    most = min(MOST_BINS, MOST_BINS_OF_ALL // len(runs))
    return np.linspace(first, last, min(most, max(1, longest)) + 1)


def _middles(edges: np.ndarray) -> np.ndarray:
    return (edges[:-1] + edges[1:]) / 2


def _bin_text(edges: np.ndarray) -> str:
    return f"{edges[1] - edges[0]:,.3g} s each"


def _memory_text(run: PolicyRun) -> str:
    pages = f"{run.result.num_pages:,} pages of {run.result.page_size} tokens"
    if run.result.unbounded:
        return f"Memory has no limit: shares are of the {pages} that all requests could ever need."
    return f"All of the memory is {pages}."


def _times(run: PolicyRun) -> tuple[np.ndarray, np.ndarray]:
    return run.timeline.column("began_seconds"), run.timeline.column("ended_seconds")


def _percent(value: float, _: object) -> str:
    return f"{value * 100:.10g}%"


def _thousands(value: float, _: object) -> str:
    return f"{value:,.10g}"
