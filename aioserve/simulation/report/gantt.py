"""Steps of a short while, one request a lane: who was computed when, and who waited."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from aioserve.simulation.report.charts import DECODE_COLOR, PREFILL_COLOR
from aioserve.simulation.report.runs import Chart, PolicyRun
from aioserve.simulation.report.svg import INK, new_figure, to_svg
from aioserve.simulation.simulator import RequestRecord
from aioserve.simulation.timeline import Preempted, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Lanes", "busiest_window", "choose_lanes", "gantt_chart"]

WIDTH = 740.0
LANE_HEIGHT = 9.5
MOST_LANES = 40
MOST_SPANS = 2500
MOST_STEP_LINES = 120
WINDOW_STEPS = 60

Window = tuple[float, float]


class Lanes(msgspec.Struct, frozen=True):
    """What of a window is drawn, and how much is not."""

    window: Window
    """Cut short where it holds more than `MOST_SPANS`."""
    records: list[RequestRecord]
    """One a lane, in order of arrival."""
    spans: list[Span]
    preemptions: list[Preempted]
    num_present: int
    """Requests that waited or ran in the window."""
    num_steps: int


def busiest_window(run: PolicyRun) -> Window:
    """Seconds of the `WINDOW_STEPS` steps in a row, or all there are, during which most requests
    were there; of equally busy ones the first."""
    began, ended = run.timeline.column("began_seconds"), run.timeline.column("ended_seconds")
    if not len(began):
        return (0.0, 1.0)
    present = run.timeline.column("waiting") + run.timeline.column("running")
    total = np.concatenate(([0.0], np.cumsum(present)))
    length = min(WINDOW_STEPS, len(present))
    first = int(np.argmax(total[length:] - total[:-length]))
    return (float(began[first]), float(ended[first + length - 1]))


def choose_lanes(run: PolicyRun, window: Window) -> Lanes:
    """Of the requests that are there in the window, those of which there is most to see: first
    those whose prompt is computed or that are preempted, then those that only decode, then those
    that only wait; among equals the earlier ones."""
    start, end = window
    spans = [s for s in run.timeline.spans if s.ended_seconds > start and s.began_seconds < end]
    preemptions = [p for p in run.timeline.preemptions if start <= p.seconds <= end]
    computed = {span.request for span in spans}
    eventful = {span.request for span in spans if not span.decodes}
    eventful |= {preempted.request for preempted in preemptions}
    present = [record for record in run.result.requests if _is_there(record, start, end)]
    ranked = sorted(
        present,
        key=lambda r: (r.request.number not in eventful, r.request.number not in computed),
    )
    chosen = {record.request.number for record in ranked[:MOST_LANES]}
    spans = [span for span in spans if span.request in chosen]
    if len(spans) > MOST_SPANS:
        end = spans[MOST_SPANS].began_seconds
        spans = spans[:MOST_SPANS]
    return Lanes(
        (start, end),
        [r for r in present if r.request.number in chosen and r.request.arrival_seconds <= end],
        spans,
        [p for p in preemptions if p.request in chosen and p.seconds <= end],
        len(present),
        sum(s.ended_seconds > start and s.began_seconds < end for s in run.timeline.steps),
    )


def gantt_chart(run: PolicyRun, window: Window, name: str) -> Chart:
    """One policy's steps in the window; `name` is that of no other chart of the page."""
    lanes = choose_lanes(run, window)
    start, end = lanes.window
    figure = new_figure(WIDTH, 45 + LANE_HEIGHT * max(3, len(lanes.records)))
    axes = figure.subplots()
    row_of = {record.request.number: row for row, record in enumerate(lanes.records)}
    if lanes.num_steps <= MOST_STEP_LINES:
        _draw_steps(axes, run, lanes)
    for record, row in zip(lanes.records, range(len(lanes.records)), strict=True):
        ended = end if record.end_seconds is None else min(end, record.end_seconds)
        since = max(start, record.request.arrival_seconds)
        axes.plot((since, ended), (row, row), color=INK, alpha=0.55, linewidth=0.8, zorder=1)
    for decodes, color in ((False, PREFILL_COLOR), (True, DECODE_COLOR)):
        _draw_boxes(
            axes,
            [
                (max(start, s.began_seconds), min(end, s.ended_seconds), row_of[s.request])
                for s in lanes.spans
                if s.decodes is decodes and s.request in row_of
            ],
            color,
        )
    marks = [(p.seconds, row_of[p.request]) for p in lanes.preemptions if p.request in row_of]
    axes.plot(
        [at for at, _ in marks],
        [row for _, row in marks],
        linestyle="none",
        marker="x",
        color=INK,
        markersize=5,
        markeredgewidth=1.8,
        zorder=4,
    )
    axes.set(
        xlim=(start, end),
        ylim=(max(3, len(lanes.records)) - 0.5, -0.5),
        xlabel="seconds on the trace's clock",
    )
    axes.set_yticks(range(len(lanes.records)), [_lane_name(r) for r in lanes.records], fontsize=7)
    axes.ticklabel_format(axis="x", useOffset=False, style="plain")
    axes.grid(visible=False)
    what = f"Steps under {run.name} from {start:,.2f} to {end:,.2f} s, one request a lane"
    return Chart(to_svg(figure, name, what), _caption(lanes, window), run.name)


# -- parts


def _is_there(record: RequestRecord, start: float, end: float) -> bool:
    gone = record.end_seconds
    return record.request.arrival_seconds < end and (gone is None or gone > start)


def _draw_steps(axes: Axes, run: PolicyRun, lanes: Lanes) -> None:
    start, end = lanes.window
    times = {step.began_seconds for step in run.timeline.steps}
    times |= {step.ended_seconds for step in run.timeline.steps}
    for at in sorted(at for at in times if start <= at <= end):
        axes.axvline(at, color=INK, alpha=0.2, linewidth=0.4, zorder=3)


def _draw_boxes(axes: Axes, boxes: Sequence[tuple[float, float, int]], color: str) -> None:
    """All in one path: a page with thousands of elements is slow to show."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    if not boxes:
        return
    corners: list[tuple[float, float]] = []
    for left, right, row in boxes:
        top, bottom = row - 0.38, row + 0.38
        corners += [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(boxes)
    axes.add_patch(PathPatch(Path(corners, codes), facecolor=color, edgecolor="none", zorder=2))


def _lane_name(record: RequestRecord) -> str:
    request = record.request
    return f"{request.client} #{request.number}" if request.client else f"#{request.number}"


def _caption(lanes: Lanes, asked: Window) -> str:
    shown = len(lanes.records)
    text = f"{lanes.num_steps:,} steps; {shown:,} of the {lanes.num_present:,} requests that are "
    text += "there."
    if shown < lanes.num_present:
        text += (
            f" Left out: {lanes.num_present - shown:,}, of those that only wait or only decode "
            "before any whose prompt is computed."
        )
    if lanes.window[1] < asked[1]:
        text += (
            f" Drawn to {lanes.window[1]:,.2f} s, after {MOST_SPANS:,} boxes; "
            f"{asked[1] - lanes.window[1]:,.2f} s of the window are left out."
        )
    if lanes.num_steps > MOST_STEP_LINES:
        text += f" With more than {MOST_STEP_LINES} steps their borders are not drawn."
    return text
