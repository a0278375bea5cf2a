"""`aioserve simulate`: policies side by side on a trace, without a model.

The simulator itself is in `aioserve.simulation`; this module reads options and prints.
"""

from __future__ import annotations

import dataclasses
import sys
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any  # noqa: F401  (types of inherited flags)

from cyclopts import Parameter

from aioserve.arguments import counted
from aioserve.cli._interrupts import cleaning_up_first
from aioserve.cli._progress import bar_on_terminal
from aioserve.cli._simulated_machine import (
    say_what_is_unknown,
    warn,
    warn_of_long_contexts,
    warn_of_steps_outside,
)
from aioserve.cli._streams import json_text, table_console
from aioserve.cli._trial_flags import (
    TrialFlags,
    check_files,
    check_policies,
    facts_of,
    source_of,
    trial_options,
)

if TYPE_CHECKING:
    from aioserve.simulation.machine import Machine
    from aioserve.simulation.metrics import Metrics
    from aioserve.simulation.report import PolicyRun
    from aioserve.testing.trial import Trial

__all__ = ["SimulateOptions", "simulate"]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions(TrialFlags):
    """What to run."""

    rate: float | None = None
    """Requests a second; arrivals are stretched evenly. Not given: as recorded, or 4."""
    seed: int | None = None
    """Key of all that is drawn: of a made-up workload, of arrivals, of a noisy predictor, and of
    the scatter of a cost table's steps; 0 when not given."""
    report: Path | None = None
    """Write a page with charts to this file."""
    gantt_window: str | None = None
    """START:END in seconds on the trace's clock: the steps that the report shows one by one. Not
    given: the 60 during which most requests are there."""


def simulate(trace: Path | None = None, /, *, options: SimulateOptions | None = None) -> None:
    """Run scheduling policies over a trace on a virtual clock, with the engine's own scheduler.

    Args:
        trace: A file of requests: Mooncake or agentic JSONL, Azure, ServeGen or Vidur CSV, plain or
            .gz.
    """
    from aioserve.cli._simulation_report import check_window, write_report
    from aioserve.simulation.unanswered import unanswered

    options = options or SimulateOptions()
    check_policies(options.policy)
    check_window(options.gantt_window, options.report)
    check_files(trace, report=options.report, requests=options.requests)
    # What policies print belongs to no table.
    with cleaning_up_first(), redirect_stdout(sys.stderr):
        trial, found, drawn = _tried(trace, options)
    facts = facts_of(trace, options, trial.requests)
    try:
        if options.report is not None:
            write_report(options.report, drawn, facts, trace, options, trial)
    finally:  # what was simulated for minutes isn't lost with the page
        _print(facts, options, trial.machine, found)
        warn_of_steps_outside(options, found.items())
        for told in unanswered({name: [metrics] for name, metrics in found.items()}):
            warn(told)


def _tried(
    trace: Path | None, options: SimulateOptions
) -> tuple[Trial, dict[str, Metrics], list[PolicyRun]]:
    """The workload, the figures of each policy, and what a report is drawn of, where one is."""
    from aioserve.plugins import PluginRegistry
    from aioserve.plugins.files import named_policy
    from aioserve.simulation.report import PolicyRun
    from aioserve.simulation.request_rows import RequestFile
    from aioserve.simulation.timeline import Timeline
    from aioserve.testing.trial import Trial

    registry = PluginRegistry()
    registry.check_selected()
    trial = Trial(source_of(trace, options), trial_options(options), registry)
    # All are made before the first is run, so that a name that is none costs nothing.
    chosen = {name: named_policy(registry, name) for name in options.policy}
    registry.eviction(options.eviction)
    say_what_is_unknown(trial.machine, options)
    warn_of_long_contexts(trial.machine.cost, options)
    found: dict[str, Metrics] = {}
    drawn: list[PolicyRun] = []
    with ExitStack() as files:
        file = None
        if options.requests is not None:
            file = files.enter_context(RequestFile(options.requests, ("policy",)))
        for name, policy in chosen.items():
            timeline = None if options.report is None else Timeline()
            with bar_on_terminal(name) as on_progress:
                result, metrics = trial.run(policy, timeline=timeline, on_progress=on_progress)
            found[name] = metrics
            if file is not None:
                file.add(result.requests, {"policy": name})
            if timeline is not None:
                drawn.append(PolicyRun(name, result, metrics, timeline))
    return trial, found, drawn


def _print(
    facts: dict[str, Any], options: SimulateOptions, machine: Machine, found: dict[str, Metrics]
) -> None:
    if not options.json:
        _print_tables(facts, options, machine, found)
        return
    given = dataclasses.asdict(options)
    for name in ("report", "requests"):
        given[name] = None if given[name] is None else str(given[name])
    printed = {"trace": facts, "options": given, "policies": found}
    known = machine._asdict()
    del known["cost"]
    known["device"] = machine.device and machine.device._asdict()
    printed["machine"] = known
    print(json_text(printed))


def _print_tables(
    facts: dict[str, Any], options: SimulateOptions, machine: Machine, found: dict[str, Metrics]
) -> None:
    from rich.table import Table

    from aioserve.simulation.figures import client_rows, rows

    console = table_console()
    metrics = next(iter(found.values()))
    steps = f"steps as in {options.cost_table}"
    if machine.scatter_seed is not None:
        steps += f" with its scatter (seed {machine.scatter_seed})"
    if options.cost_table is None:
        steps = str(machine.device)
    tokens = counted(metrics.page_size, "token")
    pages = f"{counted(metrics.num_pages, 'page', form=',')} of {tokens}"
    if options.unbounded_cache:
        pages = f"KV memory without a limit in pages of {tokens}"
    console.print(
        f"{facts['name']}: {counted(facts['requests'], 'request', form=',')} in "
        f"{facts['seconds']:,.1f} s, {counted(facts['prompt_tokens'], 'token', form=',')} in, "
        f"{facts['output_tokens']:,} out; {steps}, {pages}\n",
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in found:
        table.add_column(name, justify="right", overflow="fold")
    for label, cells in rows(found):
        table.add_row(label, *cells)
    for label, lines in client_rows(found):
        table.add_row()
        table.add_row(f"{label}, by client (requests)")
        for client, cells in lines:
            table.add_row(f"  {client}", *cells)
    console.print(table)
