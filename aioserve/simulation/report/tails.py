"""Charts of the slowest requests: latencies by the share of requests with no longer ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.simulation.figures import NEVER, text_of
from aioserve.simulation.gaps import quantile
from aioserve.simulation.metrics import (
    Targets,
    e2e_seconds,
    has_answer,
    tpot_seconds,
    ttft_seconds,
)
from aioserve.simulation.records import RequestRecord
from aioserve.simulation.report.layout import Chart, MeasuredRequests, Panel, Table
from aioserve.simulation.report.plot import Plot, guides_of, look_of
from aioserve.simulation.report.scales import Tail, fitting

__all__ = ["Latencies", "latencies_of", "tails_chart"]

NUM_POINTS = 240
SHARES_TOLD = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.995, 0.999)
SHARES_MARKED = (0.5, 0.9, 0.99, 0.999)
CAPTION = (
    "Each further nine is as wide as the one before, so that the slowest of a thousand is as easy "
    "to see as the median. Of fewer than a thousand, 99.9% is next to the slowest. A request that "
    "got no completion counts as slower than all others: there the line ends, and what is marked "
    f"is at {NEVER!r}. The time between tokens is that of each token, the time per output token "
    "their mean in each completion of two or more. Where times differ by more than a factor of 20 "
    "the scale is logarithmic."
)


class Latencies(msgspec.Struct, frozen=True):
    """One measure of one run."""

    values: npt.NDArray[np.float64]
    """Values in ascending order, in the unit that is shown."""
    counts: npt.NDArray[np.int64]
    """Counts of each value."""
    missing: int
    """Requests that should have a value and have none."""

    def at(self, share: float) -> float | None:
        return quantile(self.values, share, counts=self.counts, missing=self.missing)

    def reached(self, share: float) -> float | None:
        """Return the value at a share, infinite for requests without a value; None without any
        request.
        """
        value = self.at(share)
        return math.inf if value is None and self.missing else value


class _Measure(msgspec.Struct, frozen=True):
    key: str
    title: str
    unit: str
    factor: float
    of: Callable[[RequestRecord], float | None] | None
    """Latency of a request; None for the time between tokens, which belongs to no request."""
    targets: tuple[float, ...] = ()


def latencies_of(
    run: MeasuredRequests,
    measure: Callable[[RequestRecord], float | None] | None,
    factor: float = 1,
) -> Latencies:
    """Return the latencies of every request that has the measure, or would have it if it was
    served.

    Without a measure, they are the times between tokens.
    """
    if measure is None:
        values, counts = run.token_gaps
        order = np.argsort(values, kind="stable")
        return Latencies(values[order] * factor, counts[order], 0)
    asked = _asked_for(run, measure)
    known = np.array([v for record in asked if (v := measure(record)) is not None], np.float64)
    ones = np.ones(len(known), np.int64)
    return Latencies(np.sort(known) * factor, ones, len(asked) - len(known))


def tails_chart(runs: Sequence[MeasuredRequests], targets: Targets | None) -> Chart:
    """Return a chart of percentiles of four latencies on an axis that shows 50, 90, 99 and
    99.9 %.
    """
    marks = ((), ()) if targets is None else (targets.ttft_seconds, targets.tpot_seconds)
    measures = (
        _Measure("ttft", "Time to first token", "s", 1, ttft_seconds, marks[0]),
        _Measure("gap", "Time between tokens", "ms", 1000, None),
        _Measure("tpot", "Time per output token", "ms", 1000, tpot_seconds, marks[1]),
        _Measure("e2e", "Whole answer", "s", 1, e2e_seconds),
    )
    panels: list[Panel] = []
    rows: list[tuple[str, ...]] = []
    for measure in measures:
        found = [latencies_of(run, measure.of, measure.factor) for run in runs]
        panels.append(_panel(measure, [run.name for run in runs], found, runs[0].each))
        rows += [
            (f"{measure.title}, {measure.unit}", run.name, *_cells(latencies))
            for run, latencies in zip(runs, found, strict=True)
        ]
    head = ("measure", runs[0].kind, "p50", "p90", "p99", "p99.9")
    table = Table(
        f"Percentiles of latencies {runs[0].each}",
        (*head, "max", "measured", "without"),
        tuple(rows),
    )
    return Chart(tuple(panels), CAPTION, table)


# -- parts


def _panel(measure: _Measure, names: Sequence[str], found: Sequence[Latencies], each: str) -> Panel:
    tail, unit = Tail(), measure.unit
    places = np.linspace(0, 1, NUM_POINTS)
    lines = [
        [(s, v) for s in map(tail.share, places.tolist()) if (v := one.at(s)) is not None]
        for one in found
    ]
    marks = [[(share, one.reached(share)) for share in SHARES_MARKED] for one in found]
    drawn = [value for line in (*lines, *marks) for _, value in line if value is not None]
    targets = guides_of(measure.targets, measure.factor)
    plot = Plot(tail, fitting([*drawn, *targets]), height=200)
    for target in targets:
        plot.guide(f"target {target:,.6g} {unit}", y=target)
    if not drawn:
        plot.nothing("nothing to measure")
    for index, (line, places) in enumerate(zip(lines, marks, strict=True)):
        plot.line(line, look_of(index))
        for share, value in places:
            if value is not None:
                plot.mark((share, value), look_of(index))
    at = [tail.at(share) for share in SHARES_TOLD]
    borders = [0.0, *((a + b) / 2 for a, b in pairwise(at)), 1.0]
    for number, share in enumerate(SHARES_TOLD):
        between = (tail.share(borders[number]), tail.share(borders[number + 1]))
        plot.over(
            between, "\n".join([f"{share:.1%} at most", *_share_texts(names, found, share, unit)])
        )
    what = "times between tokens" if measure.of is None else "requests"
    return Panel(
        f"{measure.title}, {unit}",
        plot.svg(
            f"tail-{measure.key}",
            f"{measure.title} by the share of {what}, {each}",
            "At 99%: " + "; ".join(_share_texts(names, found, 0.99, unit)) + ".",
            x_label=f"share of {what}",
        ),
    )


def _share_texts(
    names: Sequence[str], found: Sequence[Latencies], share: float, unit: str
) -> list[str]:
    values = [text_of(one.reached(share), f"{{:,.2f}} {unit}", missing="none") for one in found]
    return [f"{name}: {value}" for name, value in zip(names, values, strict=True)]


def _cells(latencies: Latencies) -> list[str]:
    shown = [latencies.reached(share) for share in (*SHARES_MARKED, 1.0)]
    measured = int(latencies.counts.sum())
    return [
        *(text_of(value) for value in shown),
        f"{measured:,}",
        f"{latencies.missing:,}",
    ]


def _asked_for(
    run: MeasuredRequests, measure: Callable[[RequestRecord], float | None]
) -> list[RequestRecord]:
    """Return requests that have the measure, or would have it if they had been served.

    A completion that has ended counts with its own tokens, not with those in the trace.
    """
    if measure is not tpot_seconds:
        return list(run.requests)
    return [
        r
        for r in run.requests
        if (r.output_tokens if has_answer(r) else r.request.output_tokens) >= 2
    ]
