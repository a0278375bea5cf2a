"""Output of a server's measurement: printed, as JSON, as rows of requests, and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aioserve.arguments import counted
from aioserve.cli._http_load.measure import Measured
from aioserve.cli._http_load.options import FLAGS, LoadOptions
from aioserve.cli._simulations import as_json, command_line, facts_of, warn
from aioserve.cli._streams import json_text, table_console
from aioserve.simulation.figures import GROUPS, Figure, text_of
from aioserve.simulation.gaps import Spread
from aioserve.simulation.metrics import GroupMetrics, targets_of
from aioserve.simulation.records import RequestRecord
from aioserve.simulation.report import ServedRun, served_page
from aioserve.simulation.request_rows import RequestFile
from aioserve.simulation.served import ServedMetrics, token_gaps_of

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["print_measured", "write_measured"]

SHOWN_FLAGS = tuple(name for name in FLAGS if name != "api_key")
LATENCIES = {
    "ttft_seconds": "time to first token",
    "tpot_seconds": "time per output token",
    "gap_seconds": "gap between chunks",
    "e2e_seconds": "whole answer",
}
RATES = ("requests", "prompt_tokens", "output_tokens", "total_tokens")
SPREAD = ("mean", "p50", "p90", "p99", "max")
GROUP_FIGURES = (
    Figure("requests", "requests"),
    Figure("finished", "finished"),
    Figure("tokens", "tokens"),
    Figure("first token p50, ms", "ttft_seconds.p50", "{:,.2f}", 1000),
    Figure("p99, ms", "ttft_seconds.p99", "{:,.2f}", 1000),
    Figure("met their targets", "goodput.share", "{:.1%}"),
)


def write_measured(measured: Measured, trace: Path | None, options: LoadOptions) -> None:
    """Write the files that were asked for, and print JSON if it replaces the tables."""
    result = json_text(_result(measured, trace, options))
    if options.json == "-":
        print(result)
    elif options.json is not None:
        Path(options.json).write_text(result + "\n", encoding="utf-8")
    if options.requests is not None:
        labels = ("late_seconds", "held_seconds", "failure", "detail")
        with RequestFile(options.requests, labels) as file:
            for one in measured.load.served:
                if one.is_sent:
                    file.add([one.record], {name: getattr(one, name) for name in labels})
    if options.report is not None:
        run = ServedRun(
            measured.model,
            tuple(_ended(measured)),
            measured.metrics,
            token_gaps_of(measured.load.served),
        )
        page = served_page(
            run,
            title=f"{_facts(measured, trace, options)['name']}: {measured.model}",
            command=command_line(f"bench serve {measured.url}", trace, options, SHOWN_FLAGS),
            facts=_load_lines(measured, trace, options),
        )
        options.report.write_text(page, encoding="utf-8")


def print_measured(measured: Measured, trace: Path | None, options: LoadOptions) -> None:
    """Print tables on stdout."""
    from rich.table import Table

    console, metrics = table_console(), measured.metrics
    for line in _load_lines(measured, trace, options):
        console.print(": ".join(line), soft_wrap=True)
    console.print()
    rates = Table(box=None, pad_edge=False)
    rates.add_column("")
    rates.add_column("per second", justify="right")
    for name in RATES:
        rates.add_row(name.replace("_", " "), f"{getattr(metrics, f'{name}_per_second'):,.1f}")
    console.print(rates)
    times = Table(box=None, pad_edge=False)
    for column in ("ms", *SPREAD):
        times.add_column(column, justify="left" if column == "ms" else "right")
    for name, label in LATENCIES.items():
        times.add_row(label, *_cells(getattr(metrics, name)))
    console.print(times)
    _print_counts(console, metrics)
    _print_groups(console, metrics)
    _print_generator(console, measured)


def _print_counts(console: Console, metrics: ServedMetrics) -> None:
    for line in _counts(metrics):
        console.print(line, soft_wrap=True)
    for kind, failure in metrics.failures.items():
        console.print(f"  {kind}: {failure.requests:,}; the first: {failure.first}", soft_wrap=True)


def _counts(metrics: ServedMetrics) -> list[str]:
    """Return lines about the requests' ends, and about figures that rest on too little."""
    parts = [f"{metrics.finished:,} finished"]
    for count, what in (
        (metrics.cut_short, "of those shorter than asked for"),
        (metrics.refused, "refused"),
        (metrics.failed, "failed"),
        (metrics.unfinished, "under way at the end"),
        (metrics.not_sent, "never sent"),
    ):
        if count:
            parts.append(f"{count:,} {what}")
    lines = [f"requests: {', '.join(parts)}, in {metrics.seconds:,.2f} s"]
    if metrics.goodput is not None:
        good = metrics.goodput
        lines.append(
            f"goodput: {good.requests:,} met their targets, {good.share:.1%}, "
            f"{good.requests_per_second:,.3f} a second"
        )
    lines.append(
        f"tokens: {metrics.output_tokens:,} out in chunks of "
        f"{text_of(metrics.tokens_per_chunk, '{:.2f}')}; {metrics.prompt_tokens:,} in, "
        f"{metrics.cached_tokens:,} of them cached"
    )
    if metrics.without_usage:
        lines.append(
            f"the server told no counts of {counted(metrics.without_usage, 'request', form=',')}: "
            "each chunk counts as a token there"
        )
    if metrics.without_text:
        lines.append(
            f"no token could be seen of {counted(metrics.without_text, 'request', form=',')}: "
            "they have no time to first token (--return-token-ids shows all, where it is served)"
        )
    return lines


def _print_groups(console: Console, metrics: ServedMetrics) -> None:
    from rich.table import Table

    shown = GROUP_FIGURES if metrics.goodput is not None else GROUP_FIGURES[:-1]
    for group, one in GROUPS.items():
        named: dict[str, GroupMetrics] = getattr(metrics, group)
        if not named:
            continue
        table = Table(box=None, pad_edge=False)
        table.add_column(one)
        for figure in shown:
            table.add_column(figure.label, justify="right")
        for name, theirs in named.items():
            table.add_row(name, *(figure.text(theirs) for figure in shown))
        console.print(table)


def _print_generator(console: Console, measured: Measured) -> None:
    generator = measured.metrics.generator
    parts: list[str] = []
    for what, spread in (
        ("requests sent late by", generator.late_seconds),
        ("held for room by", generator.held_seconds if _is_timed(measured) else None),
        ("its loop lag", generator.loop_lag_seconds),
    ):
        if spread is not None:
            p99, most = spread.p99 * 1000, spread.max * 1000
            parts.append(f"{what} p99 {p99:,.2f} ms, max {most:,.2f} ms")
    parts.append(f"busy {generator.busy_share:.0%} of the time")
    console.print(f"the generator: {'; '.join(parts)}", soft_wrap=True)
    if findings := generator.findings:
        warn(
            f"the load generator did not keep up: {', '.join(findings)}: what it measured is in "
            "part itself"
        )


def _cells(spread: Spread | None) -> Sequence[str]:
    return [
        text_of(None if spread is None else getattr(spread, name) * 1000, "{:,.2f}")
        for name in SPREAD
    ]


def _ended(measured: Measured) -> list[RequestRecord]:
    records = [one.record for one in measured.load.served]
    return [record for record in records if record.ending is not None]


def _is_timed(measured: Measured) -> bool:
    """True if requests have times of their own, so that holding one makes it late."""
    return any(request.arrival_seconds for request in measured.requests)


def _facts(measured: Measured, trace: Path | None, options: LoadOptions) -> dict[str, Any]:
    return facts_of(trace, options.synthetic or "random prompts", measured.requests)


def _result(measured: Measured, trace: Path | None, options: LoadOptions) -> dict[str, Any]:
    return {
        "kind": "serve",
        "url": measured.url,
        "model": measured.model,
        "options": as_json(options, SHOWN_FLAGS),
        "load": _facts(measured, trace, options),
        "interrupted": measured.load.interrupted,
        "metrics": measured.metrics,
    }


def _load_lines(
    measured: Measured, trace: Path | None, options: LoadOptions
) -> list[tuple[str, str]]:
    facts = _facts(measured, trace, options)
    load = f"{facts['name']}, {counted(facts['requests'], 'request', form=',')}"
    tokens = f"{facts['prompt_tokens']:,} in prompts, {facts['output_tokens']:,} asked for"
    if _is_timed(measured):
        arrivals = f"in {facts['seconds']:,.1f} s"
        if options.closed_loop:
            arrivals += ", turns after the answers before"
    else:
        arrivals = "all at once"
    if options.concurrency is not None:
        arrivals += f", at most {options.concurrency:,} under way"
    lines = [
        ("server", f"{measured.url}, {measured.model}, {options.endpoint}"),
        ("load", load),
        ("tokens", tokens),
        ("arrivals", arrivals),
    ]
    if (targets := targets_of(measured.requests)) is not None:
        lines.append(("targets", targets.description))
    if measured.load.interrupted:
        lines.append(("interrupted", f"after {measured.load.seconds:,.1f} s"))
    return lines
