"""`aioserve sweep`: policies at several rates, over several seeds and options, in many processes.

This module reads options, says which runs there are, and prints; `_sweep_runs` runs them.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_type_hints

from cyclopts import Parameter

from aioserve.cli._busy import usable_processors
from aioserve.cli._progress import bar_on_terminal
from aioserve.cli._simulated_machine import say_what_is_unknown, warn_of_steps_outside
from aioserve.cli._streams import json_text
from aioserve.cli._sweep_runs import Cell, Done, run_cells
from aioserve.cli._trial_flags import (
    TrialFlags,
    check_files,
    check_policies,
    facts_of,
    source_of,
    trial_options,
)
from aioserve.errors import ConfigError

if TYPE_CHECKING:
    from aioserve.simulation.metrics import Metrics
    from aioserve.simulation.sweeps import Estimate, Objective
    from aioserve.simulation.trial_options import TrialOptions
    from aioserve.testing.trial import Trial

__all__ = ["SweepOptions", "sweep"]

MAX_CELLS = 100_000
MAX_JOBS = 1024
MAX_SEEDS = 10_000
DEFAULT_SEEDS = 3
NOT_VARIED = ("num_requests", "arrivals", "closed_loop", "priority", "predictor")
"""What makes another workload: of which one can't say that it comes at another rate."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions(TrialFlags):
    """What to run."""

    policy: Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)] = ("fcfs",)
    """A scheduling policy, fcfs when not given, or NAME:OPTION=VALUE,OPTION=VALUE, or a class of
    yours as FILE.py:CLASS. May be given several times."""
    rates: str | None = None
    """Rates with commas between them, as 2,4,8. Not given: as recorded, or 4."""
    seeds: int | None = None
    """So many seeds, from 0 on. Not given: 3 where something is drawn, and else 1."""
    vary: Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)] = ()
    """NAME=VALUE,VALUE: an option of the engine or the machine that is tried with each value, as
    max_num_seqs=64,256. May be given several times."""
    slo: str | None = None
    """What is promised, as ttft_p99=2,tpot_p99=0.1 in seconds, or attainment=0.9 for the share of
    requests that meet their targets: adds the largest rate up to which all seeds keep it."""
    jobs: int | None = None
    """Processes that run at once. Not given: as many as there are processors."""
    csv: Path | None = None
    """Write a line for each run to this file."""
    report: Path | None = None
    """Write a page with charts of the first seed's runs to this file."""


class Row(NamedTuple):
    """One policy with one set of options at one rate: all its seeds."""

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


def sweep(trace: Path | None = None, /, *, options: SweepOptions | None = None) -> None:
    """Try policies at several rates, and say up to which rate each keeps what is promised.

    Args:
        trace: A file of requests: Mooncake or agentic JSONL, Azure, ServeGen or Vidur CSV, plain or
            .gz.
    """
    from aioserve.simulation.sweeps import objectives

    options = options or SweepOptions()
    promised = () if options.slo is None else objectives(options.slo)
    jobs = _checked(trace, options, promised)
    with redirect_stdout(sys.stderr):  # what policies print belongs to no table
        cells, trial = _cells(trace, options)
        say_what_is_unknown(trial.machine.cost, options)
        done = _done(cells, jobs, options.requests)
    rows = _rows(cells, done)
    facts = facts_of(trace, options, trial.requests)
    try:
        if options.csv is not None:
            _write_runs(options.csv, cells, done)
        if options.report is not None:
            _write_report(options.report, rows, facts, trace, options, trial)
    finally:  # what was simulated for hours isn't lost with a file
        _print(facts, options, rows, promised)
        warn_of_steps_outside(options, ((row.place, run) for row in rows for run in row.runs))


def _done(cells: Sequence[Cell], jobs: int, requests: Path | None) -> list[Done]:
    """What came of all runs, but for the lines about requests, which are in the file then."""
    from aioserve.simulation.request_rows import RequestFile

    done: list[Done] = []
    with ExitStack() as stack:
        file = None
        if requests is not None:
            labels = ("policy", "varied", "rate", "seed")
            file = stack.enter_context(RequestFile(requests, labels))
        on_progress = stack.enter_context(bar_on_terminal("runs"))
        runs = run_cells(cells, jobs, on_progress)
        stack.callback(runs.close)  # ends the processes before the bar and the file
        for one in runs:
            if file is not None:
                file.write(one.lines)
            done.append(one._replace(lines=""))
    return done


# -- which runs there are


def _checked(trace: Path | None, options: SweepOptions, promised: Sequence[Objective]) -> int:
    """Raise `ConfigError` for options that make no sense; how many processes to use."""
    from aioserve.traces.checks import check_int

    check_policies(options.policy)
    check_files(trace, report=options.report, requests=options.requests, csv=options.csv)
    if options.seeds is not None:
        check_int("seeds", options.seeds, 1, MAX_SEEDS)
    if options.jobs is not None:
        check_int("jobs", options.jobs, 1, MAX_JOBS)
    has_targets = (options.ttft_target_seconds, options.tpot_target_seconds) != (None, None)
    if any(objective.name == "attainment" for objective in promised) and not has_targets:
        raise ConfigError(
            "slo: attainment is of requests that meet their targets: give --ttft-target-seconds or "
            "--tpot-target-seconds"
        )
    return options.jobs or len(usable_processors())


def _cells(trace: Path | None, options: SweepOptions) -> tuple[list[Cell], Trial]:
    """All runs, and the first one's workload, made here: what is wrong with it is said at once."""
    from aioserve.plugins import PluginRegistry
    from aioserve.plugins.files import named_policy
    from aioserve.testing.trial import Trial
    from aioserve.traces.workload import seed_draws

    source, base = source_of(trace, options), trial_options(options)
    registry = PluginRegistry()
    registry.check_selected()
    for name in options.policy:
        named_policy(registry, name)
    registry.eviction(options.eviction)
    rates, variants = _rates(options.rates), _variants(options.vary, base)
    draws = seed_draws(source, arrivals=options.arrivals, predictor=options.predictor)
    first = replace(base, rate=rates[0], **variants[0])
    trial = Trial(source, first, registry)
    draws = draws or trial.machine.scatter_seed is not None
    if options.seeds is not None and options.seeds > 1 and not draws:
        raise ConfigError(
            f"seeds: nothing of a trace is drawn, and no step scatters, got {options.seeds}: all "
            "runs would be the same"
        )
    seeds = options.seeds or (DEFAULT_SEEDS if draws else 1)
    count = len(options.policy) * len(variants) * len(rates) * seeds
    if count > MAX_CELLS:
        raise ConfigError(f"a sweep may have at most {MAX_CELLS:,} runs, and these are {count:,}")
    cells = [
        Cell(
            source,
            policy,
            rate,
            seed,
            ",".join(f"{name}={value}" for name, value in variant.items()),
            replace(base, rate=rate, seed=seed if draws else None, **variant),
            options.requests,
        )
        for policy in options.policy
        for variant in variants
        for rate in rates
        for seed in range(seeds)
    ]
    return cells, trial


def _rates(text: str | None) -> list[float | None]:
    from aioserve.traces.checks import check_number
    from aioserve.traces.request import MAX_RATE

    if text is None:
        return [None]
    rates: list[float | None] = []
    for part in text.split(","):
        try:
            rate = float(part)
        except ValueError:
            rate = math.nan
        check_number(f"rates: {part.strip()!r}", rate, MAX_RATE)
        if rate in rates:
            raise ConfigError(f"rates: {part.strip()} is given twice")
        rates.append(rate)
    return rates


def _variants(vary: Sequence[str], base: TrialOptions) -> list[dict[str, Any]]:
    """Every combination of the values. Raises `ConfigError`."""
    hints = get_type_hints(TrialFlags)
    known = [
        field.name for field in fields(base) if field.name in hints and field.name not in NOT_VARIED
    ]
    values: dict[str, list[Any]] = {}
    for one in vary:
        name, equals, texts = one.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or name not in known or name in values:
            raise ConfigError(
                f"vary must be NAME=VALUE,VALUE, once for each of {', '.join(known)}, got {one!r}"
            )
        values[name] = [_value(name, text.strip(), hints[name]) for text in texts.split(",")]
        if len(set(values[name])) < len(values[name]):
            raise ConfigError(f"vary: a value of {name} is given twice, got {texts!r}")
    return [
        dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())
    ]


def _value(name: str, text: str, hint: Any) -> Any:
    kinds = [kind for kind in (bool, int, float, str) if kind is hint or kind in _parts(hint)]
    kind = kinds[0]
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        return kind(text)
    except (KeyError, ValueError):
        what = {bool: "true or false", int: "an int"}.get(kind, f"a {kind.__name__}")
        raise ConfigError(f"vary: {name} must be {what}, got {text!r}") from None


def _parts(hint: Any) -> tuple[Any, ...]:
    return getattr(hint, "__args__", ())


# -- what came of them


def _rows(cells: Sequence[Cell], done: Sequence[Done]) -> list[Row]:
    rows = []
    both = zip(cells, done, strict=True)
    keyed = itertools.groupby(both, lambda one: (one[0].policy, one[0].varied, one[0].rate))
    for (policy, varied, rate), group in keyed:
        runs = list(group)
        if rate is None:
            rate = runs[0][1].arrived_rate
        rows.append(Row(policy, varied, rate, tuple(found.metrics for _, found in runs)))
    return rows


def _estimates(row: Row) -> dict[str, Estimate | None]:
    """What is shown of a row; None where no seed had anything to measure."""
    from aioserve.simulation.sweeps import estimate

    made: dict[str, Estimate | None] = {}
    for name, measure in MEASURES.items():
        values = [v for metrics in row.runs if (v := measure(metrics)) is not None]
        made[name] = estimate(values) if values else None
    return made


def _of(field: str, percentile: str) -> Callable[[Metrics], float | None]:
    def measure(metrics: Metrics) -> float | None:
        spread = getattr(metrics, field)
        return None if spread is None else getattr(spread, percentile)

    return measure


def _good(field: str) -> Callable[[Metrics], float | None]:
    return lambda m: None if m.goodput is None else getattr(m.goodput, field)


MEASURES: dict[str, Callable[[Metrics], float | None]] = {
    "goodput_per_second": _good("requests_per_second"),
    "attainment": _good("share"),
    "ttft_p50_seconds": _of("ttft_seconds", "p50"),
    "ttft_p99_seconds": _of("ttft_seconds", "p99"),
    "tpot_p50_seconds": _of("tpot_seconds", "p50"),
    "tpot_p99_seconds": _of("tpot_seconds", "p99"),
    "gap_p99_seconds": _of("gap_seconds", "p99"),
    "queue_p99_seconds": _of("queue_seconds", "p99"),
    "e2e_p99_seconds": _of("e2e_seconds", "p99"),
    "output_tokens_per_second": lambda m: m.output_tokens_per_second,
    "busy_share": lambda m: m.busy_share,
    "refused": lambda m: float(m.refused + m.too_long),
    "preemptions": lambda m: float(m.preemptions),
    "policy_faults": lambda m: float(m.policy_faults),
    "steps_outside_share": lambda m: None if m.steps_outside is None else m.steps_outside.share,
}
"""Of a run, by the names that JSON and CSV have."""


def _kept(row: Row, promised: Sequence[Objective]) -> bool:
    """Whether every seed kept all of it."""
    return all(objective.met(metrics) for metrics in row.runs for objective in promised)


def _largest(
    rows: Sequence[Row], promised: Sequence[Objective]
) -> list[tuple[str, str, float | None]]:
    """Policy, what was varied, and the largest rate of the sweep up to which it was kept."""
    from aioserve.simulation.sweeps import largest_rate

    found = []
    for (policy, varied), group in itertools.groupby(rows, lambda row: (row.policy, row.varied)):
        kept = {row.rate: _kept(row, promised) for row in group}
        found.append((policy, varied, largest_rate(list(kept), kept.__getitem__)))
    return found


# -- how it is told


def _write_runs(path: Path, cells: Sequence[Cell], done: Sequence[Done]) -> None:
    from aioserve.simulation.csv_text import to_csv

    rows: list[list[Any]] = [
        ["policy", "varied", "rate", "seed", "requests", "finished", *MEASURES]
    ]
    for cell, one in zip(cells, done, strict=True):
        rate = one.arrived_rate if cell.rate is None else cell.rate
        head = [cell.policy, cell.varied, rate, cell.seed]
        values = [measure(one.metrics) for measure in MEASURES.values()]
        rows.append([*head, one.metrics.requests, one.metrics.finished, *values])
    path.write_bytes(to_csv(rows).encode(errors="surrogateescape"))


def _write_report(
    path: Path,
    rows: Sequence[Row],
    facts: dict[str, Any],
    trace: Path | None,
    options: SweepOptions,
    trial: Trial,
) -> None:
    """The page of the first seed's runs."""
    from aioserve.cli._simulation_report import command_line
    from aioserve.simulation.report import RateRun, rate_page

    runs = [RateRun(row.name, row.rate, row.runs[0]) for row in rows]
    page = rate_page(
        runs,
        title=f"{facts['name']}: {', '.join(options.policy)}",
        command=command_line(trace, options, "sweep"),
        facts=[
            ("Trace", str(facts["name"])),
            ("Requests", f"{facts['requests']:,}"),
            ("Drawn", f"seed 0 of {len(rows[0].runs)}"),
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
    given = asdict(options)
    for name in ("report", "requests", "csv"):
        given[name] = None if given[name] is None else str(given[name])
    largest = [
        {"policy": policy, "varied": varied, "largest_rate": rate}
        for policy, varied, rate in _largest(rows, promised)
    ]
    found = [
        {
            "policy": row.policy,
            "varied": row.varied,
            "rate": row.rate,
            "seeds": len(row.runs),
            "slo_kept": _kept(row, promised) if promised else None,
            "over_seeds": _estimates(row),
            "runs": row.runs,
        }
        for row in rows
    ]
    printed = {"trace": facts, "options": given, "rows": found}
    print(json_text(printed | ({"slo": largest} if promised else {})))


SHOWN = {
    "goodput_per_second": ("good/s", 1),
    "attainment": ("met targets, %", 100),
    "ttft_p50_seconds": ("TTFT p50, s", 1),
    "ttft_p99_seconds": ("TTFT p99, s", 1),
    "tpot_p99_seconds": ("TPOT p99, ms", 1000),
    "gap_p99_seconds": ("gap p99, ms", 1000),
    "output_tokens_per_second": ("tokens/s", 1),
    "refused": ("refused", 1),
    "policy_faults": ("policy faults", 1),
    "steps_outside_share": ("not measured, %", 100),
}
"""Of the measures those in the table, with their heads and factors."""
ONLY_WHERE_ANY = ("policy_faults", "steps_outside_share")
"""Shown where they aren't 0 everywhere: they say that the others are about something else."""


def _print_tables(
    facts: dict[str, Any],
    options: SweepOptions,
    rows: Sequence[Row],
    promised: Sequence[Objective],
) -> None:
    from rich.console import Console
    from rich.table import Table

    from aioserve.cli.simulate import WIDTH_OF_FILES

    width = None if sys.stdout.isatty() else WIDTH_OF_FILES
    console = Console(file=sys.stdout, width=width, markup=False, highlight=False)
    seeds = len(rows[0].runs)
    interval = f"mean over {seeds} seeds, with 95 % confidence" if seeds > 1 else "one seed"
    console.print(f"{facts['name']}: {facts['requests']:,} requests; {interval}\n", soft_wrap=True)
    estimates = [_estimates(row) for row in rows]
    shown = {name: told for name, told in SHOWN.items() if _is_shown(name, estimates)}
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
    for policy, varied, rate in _largest(rows, promised) if promised else ():
        told = "none of these" if rate is None else f"{rate:,.6g} requests/s"
        name = f"{policy} {varied}".strip()
        console.print(f"\nlargest rate that keeps {options.slo}, {name}: {told}", soft_wrap=True)


def _is_shown(name: str, estimates: Sequence[dict[str, Estimate | None]]) -> bool:
    known = [one for made in estimates if (one := made[name]) is not None]
    return any(one.mean for one in known) if name in ONLY_WHERE_ANY else bool(known)


def _cell(value: Estimate | None, factor: float) -> str:
    if value is None:
        return "-"
    text = f"{value.mean * factor:,.2f}"
    return text if value.half_width is None else f"{text} ±{value.half_width * factor:,.2f}"
