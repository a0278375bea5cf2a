"""Charts of policies at several rates of requests: the share of the load that is served well.

`aioserve sweep` runs one trace at one rate after the other, and passes the results to `rate_page`.
Only the metrics of each run are needed, so a sweep of many rates keeps no records.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from math import inf
from operator import itemgetter

from aioserve.simulation.figures import MISSING, NEVER, unanswered_at_rates
from aioserve.simulation.metrics import Metrics, Targets, measure_of
from aioserve.simulation.report.layout import Chart, Panel, RateRun, Table, legend_of, rendered
from aioserve.simulation.report.plot import Plot, guides_of, look_of
from aioserve.simulation.report.scales import Linear, fitting, plain
from aioserve.simulation.sweeps import Estimate, attainment_by_class, estimate_of

__all__ = ["goodput_chart", "latency_by_rate_chart", "rate_file", "rate_page", "rate_table"]

Measure = Callable[[Metrics], float | None]
GOOD_RATE: Measure = measure_of("goodput.requests_per_second")
GOOD_SHARE: Measure = measure_of("goodput.share")
MOST_DOTS = 2000
"""Most dots of seeds in one picture: a page stays below 2 MB."""
LEAST_GOOD = 1e-9
"""Fewest requests a second on an axis: with fewer, it has no room for its ticks."""


def rate_page(
    runs: Sequence[RateRun],
    *,
    title: str,
    command: str,
    facts: Sequence[tuple[str, str]],
    targets: Targets | None = None,
) -> str:
    """Make the HTML of one page about policies at several rates. The same runs give the same text.

    - `runs` has one of each policy at each rate, or one for each seed, in any order. Policies are
      shown in the order in which they come first. Runs with goodput are drawn with it; without
      targets there is none.
    - `command` and `facts` say what was run, for the reader.
    - `targets` are those of the goodput, drawn beside the latencies.
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
        unanswered=unanswered_at_rates(
            (name, rate, seeds) for name in _names(runs) for rate, seeds in _by_rate(runs, name)
        ),
        table=rate_table(runs),
        file=rate_file(runs),
    )


def goodput_chart(runs: Sequence[RateRun]) -> Chart | None:
    """Return a chart of good requests against requests that arrive, a second, and as a share of
    all.

    Good requests met their targets. Returns None if a run has no goodput, which needs targets.
    """
    if any(run.metrics.goodput is None for run in runs):
        return None
    served = [(run.rate, GOOD_RATE(run.metrics) or 0.0) for run in runs]
    rates = _rate_axis(runs)
    most = max((good for _, good in served), default=0.0)
    absolute = Plot(rates, Linear(0.0, 1.25 * most if most > LEAST_GOOD else 1.0), height=230)
    share = Plot(rates, Linear(0.0, 1.0, percent=True), height=230)
    absolute.diagonal("all that arrive")
    _draw(absolute, runs, GOOD_RATE, lambda value: f"{value:,.3f} good requests/s")
    _draw(share, runs, GOOD_SHARE, lambda value: f"{value:.1%} met their targets")
    label = "requests that arrive in a second"
    return Chart(
        (
            Panel(
                "Good requests a second",
                absolute.svg(
                    "goodput-rate",
                    "Requests that met their targets, by the rate of requests, under each policy",
                    _most_text(runs),
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
        f"the line even where all are good. {_most_text(runs)}{_seeds_text(runs)}",
        title="Goodput against rate",
    )


def latency_by_rate_chart(runs: Sequence[RateRun], targets: Targets | None = None) -> Chart:
    """Return a chart of the median and the 99th percentile of latencies against the rate."""
    marks = ((), ()) if targets is None else (targets.ttft_seconds, targets.tpot_seconds)
    measures: tuple[tuple[str, str, float, tuple[float, ...]], ...] = (
        ("Time to first token, p50", "ttft_seconds.p50", 1, marks[0]),
        ("Time to first token, p99", "ttft_seconds.p99", 1, marks[0]),
        ("Time per output token, p50", "tpot_seconds.p50", 1000, marks[1]),
        ("Time per output token, p99", "tpot_seconds.p99", 1000, marks[1]),
    )
    rates = _rate_axis(runs)
    panels = []
    for number, (title, field, factor, targeted) in enumerate(measures):
        unit = "s" if factor == 1 else "ms"
        measure = measure_of(field, factor)
        values = [v for run in runs if (v := measure(run.metrics)) is not None]
        guides = guides_of(targeted, factor)
        plot = Plot(rates, fitting([*values, *guides]))
        if not values:
            plot.nothing("nothing to measure at any rate")
        for target in guides:
            plot.guide(f"target {target:,.6g} {unit}", y=target)
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
        f"Requests that were refused count as infinitely late. A dot for that is at {NEVER!r}, and "
        "no line leads there. Where values "
        f"differ by more than a factor of 20 the scale is logarithmic.{_seeds_text(runs)}",
        title="Latency against rate",
    )


def rate_table(runs: Sequence[RateRun]) -> Table:
    """Return a table of the drawn figures, a row for each policy and rate.

    A mean over seeds comes with half of its 95 % confidence interval.
    """
    return _table(runs, lambda label: (label,), lambda texts: (" ±".join(texts),), NEVER)


def rate_file(runs: Sequence[RateRun]) -> Table:
    """Return a table like `rate_table`, for computing.

    With several seeds, half of the interval has a column of its own.
    """
    if _num_seeds(runs) < 2:
        return _table(runs, lambda label: (label,), tuple, "inf")

    def cells(texts: Sequence[str]) -> tuple[str, ...]:
        return (texts[0], texts[1] if len(texts) > 1 else MISSING)

    return _table(runs, lambda label: (label, f"{label}, 95 % ±"), cells, "inf")


# -- parts


def _table(
    runs: Sequence[RateRun],
    heads: Callable[[str], tuple[str, ...]],
    cells: Callable[[Sequence[str]], tuple[str, ...]],
    never: str,
) -> Table:
    """Make a table.

    - `heads` gives the heads of a measure by its label.
    - `cells` gives the cells of the texts of a mean and of half its interval, if it has one.
    - `never` is the text of an infinite mean.
    """
    columns: tuple[tuple[str, Measure, str], ...] = (
        ("met their targets", GOOD_SHARE, "{:.1%}"),
        ("good requests/s", GOOD_RATE, "{:,.3f}"),
        ("TTFT p50, s", measure_of("ttft_seconds.p50"), "{:,.2f}"),
        ("TTFT p99, s", measure_of("ttft_seconds.p99"), "{:,.2f}"),
        ("TPOT p50, ms", measure_of("tpot_seconds.p50", 1000), "{:,.2f}"),
        ("TPOT p99, ms", measure_of("tpot_seconds.p99", 1000), "{:,.2f}"),
        ("output tokens/s", measure_of("output_tokens_per_second"), "{:,.1f}"),
        *(
            (f"{name} met their targets", measure, "{:.1%}")
            for name, measure in attainment_by_class(run.metrics for run in runs).items()
        ),
    )
    if all(run.metrics.goodput is None for run in runs):
        columns = columns[2:]
    rows = []
    for name in _names(runs):
        for rate, seeds in _by_rate(runs, name):
            told = [
                _texts(estimate_of(seeds, measure), form, never) for _, measure, form in columns
            ]
            rows.append((name, plain(rate), *(cell for texts in told for cell in cells(texts))))
    most = _num_seeds(runs)
    over = f", as a mean over {most} seeds with 95 % confidence" if most > 1 else ""
    return Table(
        f"Each policy at each rate of requests{over}",
        ("policy", "requests/s", *(head for label, _, _ in columns for head in heads(label))),
        tuple(rows),
    )


def _texts(value: Estimate | None, form: str, never: str) -> list[str]:
    known = (None, None) if value is None else (value.mean, value.half_width)
    if known[0] == inf:
        return [never]
    return [form.format(one) for one in known if one is not None] or [MISSING]


def _names(runs: Sequence[RateRun]) -> list[str]:
    return list(dict.fromkeys(run.name for run in runs))


def _by_rate(runs: Sequence[RateRun], name: str) -> list[tuple[float, list[Metrics]]]:
    """Return the metrics of a policy at each rate, with each seed."""
    grouped = defaultdict[float, list[Metrics]](list)
    for run in runs:
        if run.name == name:
            grouped[run.rate].append(run.metrics)
    return sorted(grouped.items(), key=itemgetter(0))


def _num_seeds(runs: Sequence[RateRun]) -> int:
    return max(
        (len(seeds) for name in _names(runs) for _, seeds in _by_rate(runs, name)), default=0
    )


def _seeds_text(runs: Sequence[RateRun]) -> str:
    if _num_seeds(runs) < 2:
        return ""
    each = ", and each seed is a small dot" if len(runs) <= MOST_DOTS else ""
    return f" Lines join the means over {_num_seeds(runs)} seeds{each}."


def _draw(
    plot: Plot, runs: Sequence[RateRun], measure: Measure, text_of: Callable[[float], str]
) -> None:
    """Draw a line with a dot at each rate for each policy, and small dots for several seeds."""
    for index, name in enumerate(_names(runs)):
        look = look_of(index)
        line: list[tuple[float, float]] = []
        for rate, seeds in _by_rate(runs, name):
            if len(seeds) > 1 and len(runs) <= MOST_DOTS:
                values = sorted(v for one in seeds if (v := measure(one)) is not None)
                plot.dots([(rate, value) for value in values], look)
            mean = estimate_of(seeds, measure)
            if mean is None:
                continue
            if mean.mean < inf:
                line.append((rate, mean.mean))
            tip = f"{name} at {plain(rate)} requests/s\n"
            tip += NEVER if mean.mean == inf else text_of(mean.mean)
            if mean.half_width is not None:
                tip += f"\nmean over {len(seeds)} seeds, ± {text_of(mean.half_width)}"
            plot.mark((rate, mean.mean), look, tip)
        plot.line(line, look)


def _rate_axis(runs: Sequence[RateRun]) -> Linear:
    """Return an axis of all rates from 0 on. Requests that all come at once have no rate."""
    return Linear(0.0, 1.04 * (max((run.rate for run in runs), default=0.0) or 1.0))


def _most_text(runs: Sequence[RateRun]) -> str:
    told = []
    for name in _names(runs):
        means = [(estimate_of(seeds, GOOD_RATE), rate) for rate, seeds in _by_rate(runs, name)]
        good, rate = max((0.0 if mean is None else mean.mean, -rate) for mean, rate in means)
        told.append(f"{good:,.3f} with {name} at {plain(-rate)}")
    return f"Most good requests a second: {', '.join(told)} requests/s."
