"""`aioserve simulate`: compares policies on a trace, without a model.

This module reads options and prints; the simulator itself is in `aioserve.simulation`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aioserve.arguments import counted
from aioserve.cli._flags import option_flags, takes_flags
from aioserve.cli._interrupts import cleaning_up_first
from aioserve.cli._simulations import (
    TRIAL_FLAGS,
    TrialFlags,
    as_json,
    check_files,
    check_policies,
    command_line,
    facts_of,
    say_what_is_unknown,
    source_of,
    warn,
    warn_of_long_contexts,
    warn_of_steps_outside,
)
from aioserve.cli._streams import json_text, table_console
from aioserve.errors import ConfigError
from aioserve.plugins import PluginRegistry
from aioserve.plugins.files import named_policy
from aioserve.progress_bar import bar_on_terminal
from aioserve.simulation.figures import GROUPS, group_rows, rows, unanswered
from aioserve.simulation.machine import Machine
from aioserve.simulation.metrics import Metrics
from aioserve.simulation.report import PolicyRun, report_page
from aioserve.simulation.request_rows import RequestFile
from aioserve.simulation.timeline import Timeline
from aioserve.testing.trial import Trial

__all__ = ["SimulateOptions", "simulate"]


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(TrialFlags):
    """Options for what to run."""

    report: Path | None = None
    """Write a page with charts to this file."""
    gantt_window: str | None = None
    """START:END in seconds on the trace's clock, of the steps that the report shows one by one. Not
    given: some 60 where the policies differ most, and as many for each of them.
    """


FLAGS = (*TRIAL_FLAGS, "rate", "seed", "report", "gantt_window")


def simulate(trace: Path | None = None, /, **flags: Any) -> None:
    """Run scheduling policies over a trace on a virtual clock, with the engine's own scheduler.

    Args:

        trace: A file of requests: Mooncake or agentic JSONL, Azure, ServeGen or Vidur CSV, plain or
            .gz.
    """
    options = SimulateOptions(**flags)
    check_policies(options.policy)
    window = window_of(options.gantt_window)
    if window is not None and options.report is None:
        raise ConfigError("gantt_window is of the report: give --report too")
    check_files(trace, report=options.report, requests=options.requests)
    # Output of policies belongs to no table.
    with cleaning_up_first(), redirect_stdout(sys.stderr):
        trial, found, drawn = _tried(trace, options)
    facts = facts_of(trace, options.synthetic, trial.requests)
    try:
        if options.report is not None:
            check_window(window, drawn)
            page = report_page(
                drawn,
                title=f"{facts['name']}: {', '.join(found)}",
                command=command_line("simulate", trace, options, FLAGS),
                facts=_facts(drawn, facts, options, trial),
                window=window,
            )
            options.report.write_text(page, encoding="utf-8")
    finally:  # minutes of simulation aren't lost with the page
        _print(facts, options, trial.machine, found)
        warn_of_steps_outside(options, found.items())
        for told in unanswered({name: [metrics] for name, metrics in found.items()}):
            warn(told)


takes_flags(simulate, option_flags(SimulateOptions, FLAGS))


def window_of(text: str | None) -> tuple[float, float] | None:
    """Return seconds from `START:END`. Raises `ConfigError` unless they are two numbers in
    order.
    """
    if text is None:
        return None
    start, _, end = text.partition(":")
    try:
        window = (float(start), float(end))
    except ValueError:
        window = (math.nan, math.nan)
    if not -math.inf < window[0] < window[1] < math.inf:
        raise ConfigError(
            f"gantt_window must be START:END in seconds, START before END, got {text!r}"
        )
    return window


def check_window(window: tuple[float, float] | None, drawn: Sequence[PolicyRun]) -> None:
    """Raise `ConfigError` for a window in which no run has a step."""
    if window is None:
        return
    began = np.concatenate([run.timeline.column("began_seconds") for run in drawn])
    ended = np.concatenate([run.timeline.column("ended_seconds") for run in drawn])
    if np.any((ended > window[0]) & (began < window[1])):
        return
    first, last = (began.min(), ended.max()) if len(began) else (0.0, 0.0)
    raise ConfigError(
        f"gantt_window has no step in it, from {window[0]:g} to {window[1]:g} s: the first step "
        f"of all begins at {first:g} s, and the last ends at {last:g} s"
    )


def _tried(
    trace: Path | None, options: SimulateOptions
) -> tuple[Trial, dict[str, Metrics], list[PolicyRun]]:
    """Return the workload, the figures of each policy, and the runs for a report, if one is
    wanted.
    """
    registry = PluginRegistry()
    registry.check_selected()
    trial = Trial(source_of(trace, options), options, registry)
    # Make all policies before the first run, so that an unknown name costs nothing.
    chosen = {name: named_policy(registry, name) for name in options.policy}
    trial.eviction()
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
    printed = {"trace": facts, "options": as_json(options, FLAGS), "policies": found}
    known = machine._asdict()
    del known["cost"]
    known["device"] = machine.device and machine.device._asdict()
    if not machine.num_window_groups:
        del known["num_window_groups"], known["window"]
    printed["machine"] = known
    print(json_text(printed))


def _print_tables(
    facts: dict[str, Any], options: SimulateOptions, machine: Machine, found: dict[str, Metrics]
) -> None:
    from rich.table import Table

    console = table_console()
    metrics = next(iter(found.values()))
    steps = f"steps as in {options.cost_table}"
    if machine.noise_seed is not None:
        steps += f" with its noise (seed {machine.noise_seed})"
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
    for group, one in GROUPS.items():
        for label, lines in group_rows(found, group):
            table.add_row()
            table.add_row(f"{label}, by {one} (requests)")
            for name, cells in lines:
                table.add_row(f"  {name}", *cells)
    console.print(table)


def _facts(
    runs: list[PolicyRun], facts: dict[str, Any], options: SimulateOptions, trial: Trial
) -> list[tuple[str, str]]:
    targets = trial.targets
    seconds = facts["seconds"]
    rate = f", {facts['requests'] / seconds:,.3g} a second" if seconds else ""
    steps = f"as in {options.cost_table}"
    if options.cost_table is None:
        steps = f"roofline of {trial.machine.device}"
    result = runs[0].result
    limit = ", without a limit" if options.unbounded_cache else ""
    cache = f"prefix cache, {options.eviction}" if options.prefix_caching else "no prefix cache"
    arrive = counted(facts["requests"], "that arrives", "that arrive", form=",")
    pages = counted(result.num_pages, "page", form=",")
    tokens = counted(options.max_num_batched_tokens, "token", form=",")
    told = [
        ("Trace", facts["name"]),
        ("Requests", f"{arrive} in {seconds:,.1f} s{rate}"),
        ("Tokens", f"{facts['prompt_tokens']:,} in prompts, {facts['output_tokens']:,} in answers"),
        ("Step times", steps),
        ("KV memory", f"{pages} of {counted(result.page_size, 'token')}{limit}; {cache}"),
        (
            "A step has at most",
            f"{counted(options.max_num_seqs, 'sequence', form=',')}, {tokens}",
        ),
    ]
    return told if targets is None else [*told, ("Targets", targets.description)]
