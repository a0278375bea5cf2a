"""Chart of the steps of a short time, one request a lane: when it was computed, and when it
waited.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from html import escape

import msgspec

from aioserve.arguments import counted
from aioserve.simulation.records import RequestRecord
from aioserve.simulation.report.layout import PolicyRun
from aioserve.simulation.report.plot import number, percent
from aioserve.simulation.report.scales import Linear
from aioserve.simulation.report.summary import short
from aioserve.simulation.report.windows import Window
from aioserve.simulation.timeline import Preempted, Span

__all__ = ["Gantt", "Lane", "Lanes", "choose_lanes", "gantt_chart"]

MOST_LANES = 40
MOST_SPANS = 2500
MOST_STEP_LINES = 120
INNER_WIDTH = 1000
LANE_HEIGHT = 15
TENANT_CHARS = 16
FULL_CHARS = 60


class Lane(msgspec.Struct, frozen=True):
    """One request, and a picture of its course."""

    number: str
    tenant: str
    """Name of the tenant, shortened if it is long; empty if the trace has none."""
    full_tenant: str
    """Name of the tenant, shortened if it is very long."""
    tokens: str
    """Tokens of its prompt and of its completion."""
    svg: str


class Gantt(msgspec.Struct, frozen=True):
    """One policy's steps in a window."""

    key: str
    title: str
    about: str
    lanes: tuple[Lane, ...]
    has_tenants: bool
    ruler: str
    """The time axis."""
    pages: str
    """The KV pages of each step, on the same axis."""
    caption: str


class Lanes(msgspec.Struct, frozen=True):
    """Part of a window that is drawn, and counts of all of it."""

    window: Window
    """Window, shortened if it holds too many spans."""
    records: list[RequestRecord]
    """Records, one a lane, in order of arrival."""
    spans: list[Span]
    preemptions: list[Preempted]
    num_present: int
    """Requests that waited or ran in the window."""
    num_steps: int


def choose_lanes(run: PolicyRun, window: Window, most_spans: int = MOST_SPANS) -> Lanes:
    """Choose the most eventful requests in the window.

    First come those whose prompt is computed or that are preempted, then those that only decode,
    then those that only wait. Earlier ones go first among equals. The window ends before more than
    `most_spans` spans.
    """
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
    if len(spans) > most_spans:
        end = spans[most_spans].began_seconds
        spans = spans[:most_spans]
    return Lanes(
        (start, end),
        [r for r in present if r.request.number in chosen and r.request.arrival_seconds <= end],
        spans,
        [p for p in preemptions if p.request in chosen and p.seconds <= end],
        len(present),
        sum(s.ended_seconds > start and s.began_seconds < end for s in run.timeline.steps),
    )


def gantt_chart(run: PolicyRun, window: Window, key: str, most_spans: int = MOST_SPANS) -> Gantt:
    """Draw one policy's steps in the window. No other picture of the page may have the same
    `key`.
    """
    lanes = choose_lanes(run, window, most_spans)
    axis = Linear(*lanes.window)
    spans: defaultdict[int, list[Span]] = defaultdict(list)
    for span in lanes.spans:
        spans[span.request].append(span)
    preempted: defaultdict[int, list[Preempted]] = defaultdict(list)
    for one in lanes.preemptions:
        preempted[one.request].append(one)
    borders = lanes.num_steps <= MOST_STEP_LINES
    drawn = [
        _lane(record, spans[record.request.number], preempted[record.request.number], axis, key)
        for record in lanes.records
    ]
    start, end = lanes.window
    return Gantt(
        key,
        f"{run.name}, {start:,.2f} to {end:,.2f} s",
        f"Steps under {run.name} from {start:,.2f} to {end:,.2f} s, one request a lane",
        tuple(drawn),
        any(lane.tenant for lane in drawn),
        _ruler(axis, key, _step_times(run, lanes) if borders else []),
        _pages(run, axis, key),
        _caption(lanes, window, most_spans),
    )


# -- parts


def _is_there(record: RequestRecord, start: float, end: float) -> bool:
    gone = record.end_seconds
    return record.request.arrival_seconds < end and (gone is None or gone > start)


def _lane(
    record: RequestRecord, spans: Sequence[Span], gone: Sequence[Preempted], axis: Linear, key: str
) -> Lane:
    """Draw a lane: a thin line from arrival to end, with boxes on it and crosses at preemptions.

    Tall boxes are prefill and low ones decode, so that they differ without colours.
    """
    request = record.request
    name = f"#{request.number} {short(request.tenant, TENANT_CHARS)}".strip()
    ends = axis.high if record.end_seconds is None else min(axis.high, record.end_seconds)
    since = max(axis.low, request.arrival_seconds)
    first = max(since, min([ends, *(span.began_seconds for span in spans)]))
    parts = [f'<use href="#{key}-steps" width="100%" height="{LANE_HEIGHT}"/>']
    a, b = percent(axis.at(since)), percent(axis.at(ends))
    parts.append(f'<line class="waits" x1="{a}" x2="{b}" y1="7.5" y2="7.5"/>')
    if first > since:
        tip = f"{name}: waits\nfrom {since:,.3f} to {first:,.3f} s"
        parts.append(_box("hit", axis, since, first, 1, 13, tip))
    for span in spans:
        what, top, height = ("decode", 4, 7) if span.decodes else ("prefill", 1, 13)
        tip = (
            f"{name}: {what} of {counted(span.tokens, 'token', form=',')}\n"
            f"from {span.began_seconds:,.3f} to {span.ended_seconds:,.3f} s"
        )
        began, ended = max(axis.low, span.began_seconds), min(axis.high, span.ended_seconds)
        parts.append(_box(f"{what} hit", axis, began, ended, top, height, tip))
    for one in gone:
        at = percent(axis.at(one.seconds))
        tip = escape(f"{name}: gives its pages back\nat {one.seconds:,.3f} s")
        cross = '<path class="cross" d="M-4 3.5L4 11.5M4 3.5L-4 11.5"/>'
        circle = f'<circle cy="7.5" r="8" class="hit clear"><title>{tip}</title></circle>'
        parts.append(f'<svg x="{at}" overflow="visible" width="1" height="1">{cross}{circle}</svg>')
    label = escape(_lane_text(spans, gone, since, first))
    svg = f'<svg class="lane" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    tokens = f"{request.prompt_tokens:,} + {record.output_tokens:,}"
    full = short(request.tenant, FULL_CHARS)
    return Lane(f"#{request.number}", short(request.tenant), full, tokens, svg)


def _box(css: str, axis: Linear, start: float, end: float, top: int, height: int, tip: str) -> str:
    left, right = axis.at(start), axis.at(end)
    return (
        f'<rect class="{css}" x="{percent(left)}" width="{percent(right - left)}" y="{top}" '
        f'height="{height}"><title>{escape(tip)}</title></rect>'
    )


def _lane_text(spans: Sequence[Span], gone: Sequence[Preempted], since: float, first: float) -> str:
    """Return the lane in words."""
    told = [f"waits {first - since:,.3f} s"] if first > since else []
    for decodes, what in ((False, "prefill"), (True, "decode")):
        theirs = [span for span in spans if span.decodes is decodes]
        if theirs:
            told.append(
                f"{what} of {counted(sum(s.tokens for s in theirs), 'token', form=',')} from "
                f"{theirs[0].began_seconds:,.3f} to {theirs[-1].ended_seconds:,.3f} s"
            )
    if gone:
        told.append(f"gives its pages back {counted(len(gone), 'time')}")
    return ", ".join(told) or "is there"


def _step_times(run: PolicyRun, lanes: Lanes) -> list[float]:
    start, end = lanes.window
    times = {step.began_seconds for step in run.timeline.steps}
    times |= {step.ended_seconds for step in run.timeline.steps}
    return sorted(at for at in times if start <= at <= end)


def _ruler(axis: Linear, key: str, borders: Sequence[float]) -> str:
    """Draw the numbers of the time axis, and the borders of steps for all lanes to use."""
    d = "".join(f"M{number(axis.at(at) * INNER_WIDTH)} 0V10" for at in borders)
    symbol = (
        f'<symbol id="{key}-steps" viewBox="0 0 {INNER_WIDTH} 10" preserveAspectRatio="none">'
        f'<path class="steps" d="{d}"/></symbol>'
    )
    ticks = "".join(
        f'<text class="tx" x="{percent(axis.at(value))}" y="12">{escape(text)}</text>'
        for value, text in axis.ticks()
    )
    return f'<svg class="ruler" aria-hidden="true">{symbol}{ticks}</svg>'


def _pages(run: PolicyRun, axis: Linear, key: str) -> str:
    """Draw columns for the steps of the window: held pages below, evictable ones on them."""
    parts: list[str] = []
    most = {"held": 0.0, "cached": 0.0}
    shown = [
        s for s in run.timeline.steps if s.ended_seconds > axis.low and s.began_seconds < axis.high
    ][:MOST_SPANS]
    for step in shown:
        left = axis.at(max(axis.low, step.began_seconds))
        right = axis.at(min(axis.high, step.ended_seconds))
        held, cached = (n / run.result.num_pages for n in (step.pages_held, step.pages_cached))
        place = f'x="{percent(left)}" width="{percent(right - left)}"'
        top = 0.0
        for css, share in (("held", held), ("cached", cached)):
            most[css] = max(most[css], share)
            if share:
                y, height = percent(1 - top - share), percent(share)
                parts.append(f'<rect class="{css}" {place} y="{y}" height="{height}"/>')
            top += share
        if len(shown) <= MOST_STEP_LINES:
            tip = (
                f"{step.began_seconds:,.3f} to {step.ended_seconds:,.3f} s\n"
                f"held by requests: {counted(step.pages_held, 'page', form=',')} ({held:.1%})\n"
                f"cached, can be evicted: {step.pages_cached:,} ({cached:.1%})\n"
                f"free: {run.result.num_pages - step.pages_held - step.pages_cached:,}"
            )
            parts.append(
                f'<rect class="hit clear" {place} height="100%"><title>{escape(tip)}</title></rect>'
            )
    label = (
        f"KV pages: requests hold at most {most['held']:.1%}, the cache alone at most "
        f"{most['cached']:.1%}"
    )
    frame = '<rect class="free" width="100%" height="100%"/>'
    return (
        f'<svg class="lane tall" role="img" aria-label="{label}" id="{key}-pages">{frame}'
        f"{''.join(parts)}</svg>"
    )


def _caption(lanes: Lanes, asked: Window, most_spans: int) -> str:
    shown = len(lanes.records)
    text = f"{counted(lanes.num_steps, 'step', form=',')}; {shown:,} of the "
    text += counted(lanes.num_present, "request that is", "requests that are", form=",") + " there."
    if shown < lanes.num_present:
        text += (
            f" Left out: {lanes.num_present - shown:,}, of those that only wait or only decode "
            "before any whose prompt is computed."
        )
    if lanes.window[1] < asked[1]:
        text += (
            f" Drawn to {lanes.window[1]:,.2f} s, after {most_spans:,} boxes; "
            f"{asked[1] - lanes.window[1]:,.2f} s of the window are left out."
        )
    if lanes.num_steps > MOST_STEP_LINES:
        text += f" With more than {MOST_STEP_LINES} steps their borders are not drawn."
    return text
