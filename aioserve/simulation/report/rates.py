"""What policies did at several rates of requests: how much of what is asked for is served well.

`aioserve sweep` runs one trace at one rate after the other and hands what came of it to
`rate_page`. Of each run only the metrics are needed, so a sweep of many rates keeps no records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from aioserve.simulation.metrics import Metrics, Targets
from aioserve.simulation.report.layout import legend_of, rendered
from aioserve.simulation.report.looks import look_of
from aioserve.simulation.report.plot import Plot
from aioserve.simulation.report.runs import Chart, Panel, RateRun, Table
from aioserve.simulation.report.scales import Linear, fitting, plain

__all__ = ["goodput_chart", "latency_by_rate_chart", "rate_page", "rate_table"]

Measure = Callable[[Metrics], float | None]
MISSING = "-"


def rate_page(
    runs: Sequence[RateRun],
    *,
    title: str,
    command: str,
    facts: Sequence[tuple[str, str]],
    targets: Targets | None = None,
) -> str:
    """HTML of one page about policies at several rates. The same runs give the same text.

    runs: one for each policy and rate, in any order; policies are shown in the order in which they
        come first. Those that have goodput are drawn with it, and without targets none has.
    command, facts: what was run, for the reader.
    targets: those of the goodput, drawn beside the latencies.
    """
    goodput = goodput_chart(runs)
    charts = [
        {"key": key, "chart": chart}
        for key, chart in (
            ("goodput", goodput),
            ("latency", latency_by_rate_chart(runs, targets)),
        )
        if chart is not None
    ]
    return rendered(
        "rates.html",
        title=title,
        command=command,
        facts=facts,
        legend=legend_of(_names(runs)),
        contents=[("figures", "Figures"), *((c["key"], c["chart"].title) for c in charts)],
        charts=charts,
        table=rate_table(runs),
    )


def goodput_chart(runs: Sequence[RateRun]) -> Chart | None:
    """Requests that met their targets against requests that arrive, a second, and as a share of
    all; None where a run has no goodput, which is counted where there are targets."""
    if any(run.metrics.goodput is None for run in runs):
        return None
    served = [(run.rate, _good_rate(run.metrics) or 0.0) for run in runs]
    rates = Linear(0.0, max((rate for rate, _ in served), default=1.0) * 1.04)
    most = max((good for _, good in served), default=0.0)
    absolute = Plot(rates, Linear(0.0, 1.25 * most or 1.0), height=230)
    share = Plot(rates, Linear(0.0, 1.0, percent=True), height=230)
    absolute.diagonal("all that arrive")
    _draw(absolute, runs, _good_rate, lambda value: f"{value:,.3f} good requests/s")
    _draw(share, runs, _good_share, lambda value: f"{value:.1%} met their targets")
    label = "requests that arrive in a second"
    return Chart(
        (
            Panel(
                "Good requests a second",
                absolute.svg(
                    "goodput-rate",
                    "Requests that met their targets, by the rate of requests, under each policy",
                    _most_told(runs),
                    x_label=label,
                ),
            ),
            Panel(
                "Share of requests that met their targets",
                share.svg(
                    "goodput-share",
                    "Share of requests that met their targets, by the rate, under each policy",
                    "The table below has all figures.",
                    x_label=label,
                ),
            ),
        ),
        "A good request met its targets. On the dotted line all are good, and served as soon as "
        "they come. A run lasts until its last request has ended: a short trace stays below "
        "the line even where all are good. " + _most_told(runs),
        title="Goodput against rate",
    )


def latency_by_rate_chart(runs: Sequence[RateRun], targets: Targets | None = None) -> Chart:
    """The median and the 99th percentile of latencies against the rate."""
    marks = (None, None) if targets is None else (targets.ttft_seconds, targets.tpot_seconds)
    measures: tuple[tuple[str, str, str, float, float | None], ...] = (
        ("Time to first token, p50", "ttft_seconds", "p50", 1, marks[0]),
        ("Time to first token, p99", "ttft_seconds", "p99", 1, marks[0]),
        ("Time per output token, p50", "tpot_seconds", "p50", 1000, marks[1]),
        ("Time per output token, p99", "tpot_seconds", "p99", 1000, marks[1]),
    )
    rates = Linear(0.0, max((run.rate for run in runs), default=1.0) * 1.04)
    panels = []
    for number, (title, field, name, factor, target) in enumerate(measures):
        unit = "s" if factor == 1 else "ms"
        measure = _spread(field, name, factor)
        values = [v for run in runs if (v := measure(run.metrics)) is not None and v < inf]
        if target is not None:
            values.append(target * factor)
        plot = Plot(rates, fitting(values))
        if target is not None:
            plot.guide(f"target {target * factor:,.6g} {unit}", y=target * factor)
        _draw(plot, runs, measure, lambda value, unit=unit: f"{value:,.2f} {unit}")
        panels.append(
            Panel(
                f"{title}, {unit}",
                plot.svg(
                    f"by-rate{number}",
                    f"{title}, by the rate of requests, under each policy",
                    "The table at the top of the page has all figures.",
                    x_label="requests that arrive in a second",
                ),
            )
        )
    return Chart(
        tuple(panels),
        "Requests that were refused count as infinitely late: no dot is that high. Where values "
        "differ by more than a factor of 20 the scale is logarithmic.",
        title="Latency against rate",
    )


def rate_table(runs: Sequence[RateRun]) -> Table:
    """The figures that are drawn, a row for each policy and rate."""
    columns: tuple[tuple[str, Measure, str], ...] = (
        ("met their targets", _good_share, "{:.1%}"),
        ("good requests/s", _good_rate, "{:,.3f}"),
        ("TTFT p50, s", _spread("ttft_seconds", "p50"), "{:,.2f}"),
        ("TTFT p99, s", _spread("ttft_seconds", "p99"), "{:,.2f}"),
        ("TPOT p50, ms", _spread("tpot_seconds", "p50", 1000), "{:,.2f}"),
        ("TPOT p99, ms", _spread("tpot_seconds", "p99", 1000), "{:,.2f}"),
        ("output tokens/s", lambda metrics: metrics.output_tokens_per_second, "{:,.1f}"),
    )
    if all(run.metrics.goodput is None for run in runs):
        columns = columns[2:]
    rows = []
    for name in _names(runs):
        for run in _of(runs, name):
            values = [(measure(run.metrics), form) for _, measure, form in columns]
            cells = (MISSING if v is None else form.format(v) for v, form in values)
            rows.append((name, plain(run.rate), *cells))
    return Table(
        "Each policy at each rate of requests",
        ("policy", "requests/s", *(label for label, _, _ in columns)),
        tuple(rows),
    )


# -- parts


def _names(runs: Sequence[RateRun]) -> list[str]:
    return list(dict.fromkeys(run.name for run in runs))


def _of(runs: Sequence[RateRun], name: str) -> list[RateRun]:
    return sorted((run for run in runs if run.name == name), key=lambda run: run.rate)


def _draw(
    plot: Plot, runs: Sequence[RateRun], measure: Measure, told: Callable[[float], str]
) -> None:
    """A line with a dot at each rate for each policy."""
    for index, name in enumerate(_names(runs)):
        look = look_of(index)
        points = [
            (run.rate, value)
            for run in _of(runs, name)
            if (value := measure(run.metrics)) is not None and value < inf
        ]
        plot.line(points, look)
        for rate, value in points:
            plot.mark((rate, value), look, f"{name} at {plain(rate)} requests/s\n{told(value)}")


def _good_rate(metrics: Metrics) -> float | None:
    return None if metrics.goodput is None else metrics.goodput.requests_per_second


def _good_share(metrics: Metrics) -> float | None:
    return None if metrics.goodput is None else metrics.goodput.share


def _spread(field: str, name: str, factor: float = 1) -> Measure:
    def measure(metrics: Metrics) -> float | None:
        spread = getattr(metrics, field)
        return None if spread is None else getattr(spread, name) * factor

    return measure


def _most_told(runs: Sequence[RateRun]) -> str:
    told = []
    for name in _names(runs):
        best = max(_of(runs, name), key=lambda run: _good_rate(run.metrics) or 0.0)
        told.append(f"{_good_rate(best.metrics):,.3f} with {name} at {plain(best.rate)}")
    return f"Most good requests a second: {', '.join(told)} requests/s."
