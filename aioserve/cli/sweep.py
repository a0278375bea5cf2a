"""`aioserve sweep`: compares policies at several rates, seeds and options, in many processes.

This module reads options and prints; `_sweep_runs` lists the runs and executes them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, redirect_stdout
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from aioserve.arguments import counted
from aioserve.cli._busy import usable_processors
from aioserve.cli._flags import option_flags, takes_flags
from aioserve.cli._interrupts import cleaning_up_first
from aioserve.cli._simulations import (
    TRIAL_FLAGS,
    as_json,
    check_files,
    check_policies,
    command_line,
    facts_of,
    say_what_is_unknown,
    warn,
    warn_of_long_contexts,
    warn_of_steps_outside,
)
from aioserve.cli._streams import json_text, table_console
from aioserve.cli._sweep_runs import Cell, Done, Grid, SweepOptions, Workers, grid_of
from aioserve.errors import ConfigError
from aioserve.progress_bar import bar_on_terminal
from aioserve.simulation.figures import MISSING, text_of, unanswered_at_rates
from aioserve.simulation.metrics import Metrics, measure_of
from aioserve.simulation.report import RateRun, rate_page
from aioserve.simulation.request_rows import RequestFile, to_csv
from aioserve.simulation.sweeps import (
    Estimate,
    Objective,
    attainment_by_class,
    bounds_of,
    estimate_of,
    objectives,
    rate_between,
)
from aioserve.testing.trial import Trial
from aioserve.traces.checks import check_int

__all__ = ["SweepOptions", "sweep"]

FLAGS = (
    *TRIAL_FLAGS,
    *("rates", "seeds", "vary", "slo", "refine", "jobs", "csv", "report"),
)
MAX_JOBS = 1024
MAX_REFINE = 20
MAX_SEEDS = 10_000


class Row(NamedTuple):
    """All seeds of one policy with one set of options at one rate."""

    policy: str
    varied: str
    rate: float
    runs: tuple[Metrics, ...]

    @property
    def name(self) -> str:
        return f"{self.policy} {self.varied}".strip()

    @property
    def place(self) -> str:
        return f"{self.name} at {self.rate:,.6g} requests/s"


def sweep(trace: Path | None = None, /, **flags: Any) -> None:
    """Try policies at several rates, and say up to which rate each keeps what is promised.

    Args:

        trace: A file of requests: Mooncake or agentic JSONL, Azure, ServeGen or Vidur CSV, plain or
            .gz.
    """
    options = SweepOptions(**flags)
    promised = () if options.slo is None else objectives(options.slo)
    jobs = _checked(trace, options, promised)
    # Output of policies belongs to no table.
    with cleaning_up_first(), redirect_stdout(sys.stderr):
        grid, trial = grid_of(trace, options)
        if trial.targets is None and any(one.name == "attainment" for one in promised):
            raise ConfigError(
                "slo: attainment is of requests that meet their targets, and none has any: give "
                "--ttft-target-seconds, --tpot-target-seconds or --deadline-seconds"
            )
        say_what_is_unknown(trial.machine, options)
        for cost, tried in grid.tables():
            warn_of_long_contexts(cost, tried)
        cells, done = _swept(grid, jobs, promised)
    rows = _rows(cells, done)
    facts = facts_of(trace, options.synthetic, trial.requests)
    try:
        if options.csv is not None:
            _write_runs(options.csv, cells, done)
        if options.report is not None:
            _write_report(options.report, rows, facts, trace, options, trial, promised)
    finally:  # hours of simulation aren't lost with a file
        _print(facts, options, rows, promised)
        warn_of_steps_outside(options, ((row.place, run) for row in rows for run in row.runs))
        for told in unanswered_at_rates((row.name, row.rate, row.runs) for row in rows):
            warn(told)


takes_flags(sweep, option_flags(SweepOptions, FLAGS))


def _swept(grid: Grid, jobs: int, promised: Sequence[Objective]) -> tuple[list[Cell], list[Done]]:
    """Return all runs and their results, in one order. Lines about requests are written to the
    file.
    """
    options, refine = grid.options, grid.options.refine
    cells: list[Cell] = []
    done: list[Done] = []
    with ExitStack() as stack:
        file = None
        if options.requests is not None:
            labels = ("policy", "varied", "rate", "seed")
            file = stack.enter_context(RequestFile(options.requests, labels))
        on_progress = stack.enter_context(bar_on_terminal("runs"))
        workers = stack.enter_context(Workers(jobs))  # they end before bar and file
        further = grid.cells()
        for nth in range(refine + 1):
            for one in workers.run(further, on_progress):
                if file is not None:
                    file.write(one.lines)
                done.append(one._replace(lines=""))
            cells += further
            if nth == refine or not (further := _between(grid, cells, done, promised)):
                break
    if refine:
        places = {place: n for n, place in enumerate(product(options.policy, grid.variants))}
        both = sorted(
            zip(cells, done, strict=True),
            key=lambda one: (places[one[0].policy, one[0].varied], one[0].rate),
        )
        cells, done = [cell for cell, _ in both], [one for _, one in both]
    return cells, done


def _between(
    grid: Grid, cells: Sequence[Cell], done: Sequence[Done], promised: Sequence[Objective]
) -> list[Cell]:
    """Return runs at the rates that show more exactly where each policy begins to break a
    promise.
    """
    return [
        cell
        for policy, varied, kept in _kept_rates(_rows(cells, done), promised)
        if (rate := rate_between(kept)) is not None
        for cell in grid.at(policy, varied, rate)
    ]


def _checked(trace: Path | None, options: SweepOptions, promised: Sequence[Objective]) -> int:
    """Raise `ConfigError` for options that make no sense; return the number of processes to use."""
    check_policies(options.policy)
    check_files(trace, report=options.report, requests=options.requests, csv=options.csv)
    if options.seeds is not None:
        check_int("seeds", options.seeds, 1, MAX_SEEDS)
    if options.jobs is not None:
        check_int("jobs", options.jobs, 1, MAX_JOBS)
    check_int("refine", options.refine, 0, MAX_REFINE)
    if options.refine and not (promised and options.rates):
        raise ConfigError(
            "refine: rates are tried between those that keep what is promised and those that "
            f"don't, got {options.refine}: give --slo and --rates too"
        )
    return options.jobs or len(usable_processors())


# -- results


def _rows(cells: Sequence[Cell], done: Sequence[Done]) -> list[Row]:
    """Return the rows in the order in which they come first."""
    grouped: dict[tuple[str, str, float | None], list[Done]] = {}
    for cell, one in zip(cells, done, strict=True):
        grouped.setdefault((cell.policy, cell.varied, cell.rate), []).append(one)
    return [
        Row(
            policy,
            varied,
            runs[0].arrived_rate if rate is None else rate,
            tuple(one.metrics for one in runs),
        )
        for (policy, varied, rate), runs in grouped.items()
    ]


def _estimates(row: Row, classes: Measures) -> dict[str, Estimate | None]:
    """Return the measures of a row; None for a measure that no seed has."""
    return {name: estimate_of(row.runs, value) for name, value in (MEASURES | classes).items()}


def _by_class(runs: Iterable[Metrics]) -> Measures:
    """Return the attainment of each class that has targets."""
    shares = attainment_by_class(runs)
    return {f"attainment of {name}": value_of for name, value_of in shares.items()}


Measures = dict[str, Callable[[Metrics], float | None]]
MEASURES: Measures = {
    "goodput_per_second": measure_of("goodput.requests_per_second"),
    "attainment": measure_of("goodput.share"),
    "ttft_p50_seconds": measure_of("ttft_seconds.p50"),
    "ttft_p99_seconds": measure_of("ttft_seconds.p99"),
    "tpot_p50_seconds": measure_of("tpot_seconds.p50"),
    "tpot_p99_seconds": measure_of("tpot_seconds.p99"),
    "gap_p99_seconds": measure_of("gap_seconds.p99"),
    "queue_p99_seconds": measure_of("queue_seconds.p99"),
    "e2e_p99_seconds": measure_of("e2e_seconds.p99"),
    "output_tokens_per_second": measure_of("output_tokens_per_second"),
    "busy_share": measure_of("busy_share"),
    "refused": lambda m: float(m.refused + m.too_long),
    "overdue": lambda m: None if m.overdue is None else float(m.overdue),
    "preemptions": lambda m: float(m.preemptions),
    "policy_faults": lambda m: float(m.policy_faults),
    "steps_outside_share": measure_of("steps_outside.share"),
}
"""Measures of a run, by the names that JSON and CSV have."""


def _kept(row: Row, promised: Sequence[Objective]) -> bool:
    """True if every seed kept all promises."""
    return all(objective.met(metrics) for metrics in row.runs for objective in promised)


def _kept_rates(
    rows: Sequence[Row], promised: Sequence[Objective]
) -> list[tuple[str, str, dict[float, bool]]]:
    """Return policy, varied options, and for each rate True if the promises were kept."""
    found: dict[tuple[str, str], dict[float, bool]] = {}
    for row in rows:
        found.setdefault((row.policy, row.varied), {})[row.rate] = _kept(row, promised)
    return [(policy, varied, kept) for (policy, varied), kept in found.items()]


# -- output


def _write_runs(path: Path, cells: Sequence[Cell], done: Sequence[Done]) -> None:
    measures = MEASURES | _by_class(one.metrics for one in done)
    rows: list[list[Any]] = [
        ["policy", "varied", "rate", "seed", "requests", "finished", *measures]
    ]
    for cell, one in zip(cells, done, strict=True):
        rate = one.arrived_rate if cell.rate is None else cell.rate
        head = [cell.policy, cell.varied, rate, cell.seed]
        values = [value_of(one.metrics) for value_of in measures.values()]
        rows.append([*head, one.metrics.requests, one.metrics.finished, *values])
    path.write_bytes(to_csv(rows).encode(errors="surrogateescape"))


def _write_report(
    path: Path,
    rows: Sequence[Row],
    facts: dict[str, Any],
    trace: Path | None,
    options: SweepOptions,
    trial: Trial,
    promised: Sequence[Objective],
) -> None:
    runs = [RateRun(row.name, row.rate, metrics) for row in rows for metrics in row.runs]
    page = rate_page(
        runs,
        title=f"{facts['name']}: {', '.join(options.policy)}",
        command=command_line("sweep", trace, options, FLAGS),
        facts=[
            ("Trace", str(facts["name"])),
            ("Requests", f"{facts['requests']:,}"),
            ("Seeds", f"{len(rows[0].runs)}"),
            *([("Promised", str(options.slo))] if promised else []),
            *((f"Largest rate, {name}", told) for name, told in _largest_rates(rows, promised)),
        ],
        targets=trial.targets,
    )
    path.write_text(page, encoding="utf-8")


def _print(
    facts: dict[str, Any],
    options: SweepOptions,
    rows: Sequence[Row],
    promised: Sequence[Objective],
) -> None:
    if not options.json:
        _print_tables(facts, options, rows, promised)
        return
    largest = [
        {"policy": policy, "varied": varied, **dict(zip(RATES, bounds_of(kept), strict=True))}
        for policy, varied, kept in _kept_rates(rows, promised)
    ]
    classes = _by_class(run for row in rows for run in row.runs)
    found = [
        {
            "policy": row.policy,
            "varied": row.varied,
            "rate": row.rate,
            "seeds": len(row.runs),
            "slo_kept": _kept(row, promised) if promised else None,
            "over_seeds": _estimates(row, classes),
            "runs": row.runs,
        }
        for row in rows
    ]
    printed = {"trace": facts, "options": as_json(options, FLAGS), "rows": found}
    print(json_text(printed | ({"slo": largest} if promised else {})))


RATES = ("largest_rate", "missed_rate")
SHOWN = {
    "goodput_per_second": ("good/s", 1),
    "attainment": ("met targets, %", 100),
    "ttft_p50_seconds": ("TTFT p50, s", 1),
    "ttft_p99_seconds": ("TTFT p99, s", 1),
    "tpot_p99_seconds": ("TPOT p99, ms", 1000),
    "gap_p99_seconds": ("gap p99, ms", 1000),
    "output_tokens_per_second": ("tokens/s", 1),
    "refused": ("refused", 1),
    "overdue": ("overdue", 1),
    "policy_faults": ("policy faults", 1),
    "steps_outside_share": ("not measured, %", 100),
}
"""Measures in the table, with their heads and factors."""
ONLY_WHERE_ANY = ("policy_faults", "steps_outside_share")
"""Measures shown only if they aren't 0 everywhere: they mean that the others are less reliable."""


def _print_tables(
    facts: dict[str, Any],
    options: SweepOptions,
    rows: Sequence[Row],
    promised: Sequence[Objective],
) -> None:
    from rich.table import Table

    console = table_console()
    seeds = len(rows[0].runs)
    interval = f"mean over {seeds} seeds, with 95 % confidence" if seeds > 1 else "one seed"
    requests = counted(facts["requests"], "request", form=",")
    console.print(f"{facts['name']}: {requests}; {interval}\n", soft_wrap=True)
    classes = _by_class(run for row in rows for run in row.runs)
    estimates = [_estimates(row, classes) for row in rows]
    shown = {name: told for name, told in SHOWN.items() if _is_shown(name, estimates)}
    shown |= {name: (f"{name}, %".replace("attainment of", "met by"), 100) for name in classes}
    heads = ["policy", *(["varied"] if options.vary else []), "rate"]
    heads += [told for told, _ in shown.values()]
    table = Table(*heads, *(["SLO"] if promised else []), box=None, pad_edge=False)
    for row, made in zip(rows, estimates, strict=True):
        cells = [row.policy, *([row.varied] if options.vary else []), f"{row.rate:,.6g}"]
        cells += [_cell(made[name], factor) for name, (_, factor) in shown.items()]
        if promised:
            cells.append("kept" if _kept(row, promised) else "missed")
        table.add_row(*cells)
    console.print(table)
    for name, told in _largest_rates(rows, promised):
        line = f"\nlargest rate that keeps {options.slo}, {name}: {told}"
        console.print(line, soft_wrap=True)


def _largest_rates(rows: Sequence[Row], promised: Sequence[Objective]) -> list[tuple[str, str]]:
    """Return the largest rate of each policy, in words; empty without promises."""
    lines: list[tuple[str, str]] = []
    for policy, varied, kept in _kept_rates(rows, promised) if promised else ():
        largest, missed = bounds_of(kept)
        told = "none of these" if largest is None else f"{largest:,.6g} requests/s"
        told += ", the largest tried" if missed is None else f", missed at {missed:,.6g}"
        lines.append((f"{policy} {varied}".strip(), told))
    return lines


def _is_shown(name: str, estimates: Sequence[dict[str, Estimate | None]]) -> bool:
    known = [one for made in estimates if (one := made[name]) is not None]
    return any(one.mean for one in known) if name in ONLY_WHERE_ANY else bool(known)


def _cell(value: Estimate | None, factor: float) -> str:
    if value is None:
        return MISSING
    text = text_of(value.mean * factor)
    return text if value.half_width is None else f"{text} ±{value.half_width * factor:,.2f}"
