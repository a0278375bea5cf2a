"""Charts over time: the queue, and the use of steps and KV memory.

Many points of a long run become few, without changing what the picture says.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from aioserve.arguments import counted
from aioserve.simulation.report.layout import Chart, Panel, PolicyRun, Table
from aioserve.simulation.report.plot import Plot, look_of
from aioserve.simulation.report.scales import Linear

__all__ = [
    "means_of_steps",
    "means_over_time",
    "peaks_over_time",
    "queue_chart",
    "steps_and_memory_charts",
]

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


def means_over_time(edges: Floats, began: Floats, ended: Floats, values: Floats) -> Floats:
    """Return the mean over each span between `edges` of a quantity that has `values[i]` from
    `began[i]` to `ended[i]`.

    It is 0 between an end and the next beginning.
    """
    if not len(values):
        return np.zeros(len(edges) - 1)
    times = np.column_stack((began, ended)).reshape(-1)
    gained = np.column_stack((np.zeros_like(values), values * (ended - began))).reshape(-1)
    return np.diff(np.interp(edges, times, np.cumsum(gained))) / np.diff(edges)


def means_of_steps(edges: Floats, began: Floats, ended: Floats, values: Floats) -> Floats:
    """Return means like `means_over_time`, over the time of steps alone; NaN if none ran."""
    busy = means_over_time(edges, began, ended, np.ones_like(values))
    ran = busy > 1e-6
    means = np.full(len(busy), np.nan)
    means[ran] = means_over_time(edges, began, ended, values)[ran] / busy[ran]
    return means


def peaks_over_time(edges: Floats, began: Floats, ended: Floats, values: Floats) -> Floats:
    """Return the largest of `values` in each span between `edges`; 0 in spans without values."""
    peaks = np.zeros(len(edges) - 1)
    last = len(peaks) - 1
    first_bins = np.clip(np.searchsorted(edges, began, side="right") - 1, 0, last)
    last_bins = np.clip(np.searchsorted(edges, ended, side="left") - 1, first_bins, last)
    np.maximum.at(peaks, first_bins, values)
    for index in np.flatnonzero(last_bins > first_bins):
        reach = slice(first_bins[index], last_bins[index] + 1)
        peaks[reach] = np.maximum(peaks[reach], values[index])
    return peaks


MOST_BINS = 300
MOST_BINS_OF_ALL = 1200
NUM_TOLD = 24
"""Number of spans with figures in the text."""
CLOCK = "seconds on the trace's clock"


def queue_chart(runs: Sequence[PolicyRun]) -> Chart:
    """Return a chart of waiting and running requests over time, with all policies in each panel."""
    edges = _edges(runs, MOST_BINS)
    coarse = _edges(runs, NUM_TOLD)
    panels: list[Panel] = []
    cells: list[list[str]] = [[_span_text(*pair)] for pair in _pairs(coarse)]
    for column, title in (("waiting", "Requests that wait"), ("running", "Requests that run")):
        means = [means_over_time(edges, *_steps(run, column)) for run in runs]
        peaks = [peaks_over_time(edges, *_steps(run, column)) for run in runs]
        most = max(float(values.max()) for values in peaks)
        plot = Plot(_time_axis(edges), Linear(0.0, most * 1.04 or 1.0), height=150)
        for index, (mean, peak) in enumerate(zip(means, peaks, strict=True)):
            look = look_of(index)
            tops = np.maximum(mean, peak)
            plot.band(edges.tolist(), mean.tolist(), tops.tolist(), f"haze {look.css}")
            plot.line(zip(_middles(edges).tolist(), mean.tolist(), strict=True), look)
        told = [
            (
                means_over_time(coarse, *_steps(run, column)),
                peaks_over_time(coarse, *_steps(run, column)),
            )
            for run in runs
        ]
        for number, span in enumerate(_pairs(coarse)):
            lines = [
                f"{run.name}: {mean[number]:,.1f}, at most {peak[number]:,.0f}"
                for run, (mean, peak) in zip(runs, told, strict=True)
            ]
            plot.over(span, "\n".join([_span_text(*span), *lines]))
            cells[number] += [
                text
                for mean, peak in told
                for text in (f"{mean[number]:,.1f}", f"{peak[number]:,.0f}")
            ]
        about = "; ".join(
            f"{run.name}: at most {p.max():,.0f}" for run, p in zip(runs, peaks, strict=True)
        )
        svg = plot.svg(
            f"queue-{column}", f"{title}, over time, under each policy", about, x_label=CLOCK
        )
        panels.append(Panel(title, svg))
    head = [CLOCK]
    for what in ("wait", "run"):
        head += [f"{what}, {run.name}, {kind}" for run in runs for kind in ("mean", "most")]
    table = Table(
        "Requests that wait and run, over time", tuple(head), tuple(tuple(row) for row in cells)
    )
    caption = f"Lines are means over {_bin_text(edges)}, and what is shaded reaches up to the most."
    return Chart(tuple(panels), caption, table)


def steps_and_memory_charts(runs: Sequence[PolicyRun]) -> list[Chart]:
    """Return charts of the use of steps and KV memory over time: one for each policy, with equal
    axes.
    """
    edges = _edges(runs, MOST_BINS)
    means = [
        {
            column: means_of_steps(edges, *_steps(run, column))
            for column in ("prefill_tokens", "decode_tokens", "pages_held", "pages_cached")
        }
        for run in runs
    ]
    tops = [
        max(1.0, max(float(np.nan_to_num(of_run[column]).max()) for of_run in means)) * 1.04
        for column in ("prefill_tokens", "decode_tokens")
    ]
    return [
        _steps_and_memory(number, run, edges, of_run, tops)
        for number, (run, of_run) in enumerate(zip(runs, means, strict=True))
    ]


# -- parts


def _steps_and_memory(
    number: int, run: PolicyRun, edges: Floats, means: dict[str, Floats], tops: Sequence[float]
) -> Chart:
    coarse = _edges([run], NUM_TOLD)
    told = {column: means_of_steps(coarse, *_steps(run, column)) for column in means}
    shares = {name: told[f"pages_{name}"] / run.result.num_pages for name in ("held", "cached")}
    rows: list[tuple[str, ...]] = []
    memory_tips: list[str] = []
    for at, span in enumerate(_pairs(coarse)):
        held, cached = float(shares["held"][at]), float(shares["cached"][at])
        tokens = [float(told[column][at]) for column in ("prefill_tokens", "decode_tokens")]
        pages = [held, cached, max(0.0, 1 - held - cached)]
        idle = bool(np.isnan(held))
        texts = [*(f"{v:,.1f}" for v in tokens), *(f"{v:.1%}" for v in pages)]
        rows.append((_span_text(*span), *(["-"] * 5 if idle else texts)))
        pages_text = "no step" if idle else f"held by requests: {held:.1%}\n"
        if not idle:
            pages_text += f"cached, can be evicted: {cached:.1%}\nfree: {pages[2]:.1%}"
        memory_tips.append(f"{_span_text(*span)}\n{pages_text}")
    panels: list[Panel] = []
    for kind, top in zip(("prefill", "decode"), tops, strict=True):
        column = f"{kind}_tokens"
        plot = Plot(_time_axis(edges), Linear(0.0, top), height=120)
        upper = np.nan_to_num(means[column]).tolist()
        plot.band(edges.tolist(), [0.0] * len(upper), upper, kind)
        for at, span in enumerate(_pairs(coarse)):
            value = float(told[column][at])
            text = "no step" if np.isnan(value) else f"{value:,.1f} tokens a step"
            plot.over(span, f"{_span_text(*span)}\n{kind}: {text}")
        title = f"{kind.capitalize()} tokens of a step"
        key, about = f"{kind}{number}", f"{title} under {run.name}, over time"
        panels.append(Panel(title, plot.svg(key, about, _mean_text(upper), x_label=CLOCK)))
    panels.append(_memory_panel(number, run, edges, means, coarse, memory_tips))
    head = (CLOCK, "prefill tokens", "decode tokens", "pages held", "pages cached", "pages free")
    caption = f"Means over the steps of {_bin_text(edges)}; where none ran nothing is drawn."
    table = Table(f"Steps and KV pages under {run.name}, over time", head, tuple(rows))
    return Chart(tuple(panels), f"{caption} {_memory_text(run)}", table, run.name)


def _memory_panel(
    number: int,
    run: PolicyRun,
    edges: Floats,
    means: dict[str, Floats],
    coarse: Floats,
    tips: Sequence[str],
) -> Panel:
    """Draw pages held by requests below, evictable ones on them, and free ones above."""
    plot = Plot(_time_axis(edges), Linear(0.0, 1.0, percent=True), height=120)
    held = np.nan_to_num(means["pages_held"]) / run.result.num_pages
    both = held + np.nan_to_num(means["pages_cached"]) / run.result.num_pages
    nothing = np.zeros_like(held).tolist()
    plot.band(edges.tolist(), nothing, held.tolist(), "held")
    plot.band(edges.tolist(), held.tolist(), np.minimum(1.0, both).tolist(), "cached")
    for span, tip in zip(_pairs(coarse), tips, strict=True):
        plot.over(span, tip)
    described = (
        f"Pages that requests hold: {_mean_text((held * 100).tolist(), '%')} "
        f"Pages that the cache alone holds: {_mean_text(((both - held) * 100).tolist(), '%')}"
    )
    about = f"Use of KV pages under {run.name}, over time"
    return Panel("KV pages", plot.svg(f"pages{number}", about, described, x_label=CLOCK))


def _edges(runs: Sequence[PolicyRun], most: int) -> Floats:
    """Return the edges of the spans over which means are taken, the same for all policies."""
    firsts = [run.timeline.steps[0].began_seconds for run in runs if run.timeline.steps]
    lasts = [run.timeline.steps[-1].ended_seconds for run in runs if run.timeline.steps]
    longest = max((len(run.timeline) for run in runs), default=0)
    first, last = min(firsts, default=0.0), max(lasts, default=1.0)
    return np.linspace(first, last, min(most, MOST_BINS_OF_ALL // len(runs), max(1, longest)) + 1)


def _steps(run: PolicyRun, column: str) -> tuple[Floats, Floats, Floats]:
    timeline = run.timeline
    began, ended = timeline.column("began_seconds"), timeline.column("ended_seconds")
    return began, ended, timeline.column(column)


def _time_axis(edges: Floats) -> Linear:
    return Linear(float(edges[0]), float(edges[-1]))


def _middles(edges: Floats) -> Floats:
    return (edges[:-1] + edges[1:]) / 2


def _pairs(edges: Floats) -> list[tuple[float, float]]:
    return list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))


def _span_text(start: float, end: float) -> str:
    return f"{start:,.2f} to {end:,.2f} s"


def _bin_text(edges: Floats) -> str:
    return f"{edges[1] - edges[0]:,.3g} s each"


def _mean_text(values: Sequence[float], unit: str = "") -> str:
    return f"{np.mean(values):,.1f}{unit} on average, {np.max(values):,.1f}{unit} at most."


def _memory_text(run: PolicyRun) -> str:
    pages = counted(run.result.num_pages, "page", form=",")
    pages += f" of {counted(run.result.page_size, 'token')}"
    if run.result.unbounded:
        return f"Memory has no limit: shares are of the {pages} that all requests could ever need."
    return f"All of the memory is {pages}."
