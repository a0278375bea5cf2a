"""What `aioserve simulate --report` needs: checks before the run, and the page after it."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aioserve.arguments import counted
from aioserve.errors import ConfigError

if TYPE_CHECKING:
    from aioserve.simulation.report import PolicyRun
    from aioserve.testing.trial import Trial

__all__ = ["check_window", "command_line", "window_of", "write_report"]


def check_window(window: str | None, report: Path | None) -> None:
    """Raise `ConfigError` for a window that is none, or is of no report."""
    window_of(window)
    if window is not None and report is None:
        raise ConfigError("gantt_window is of the report: give --report too")


def window_of(text: str | None) -> tuple[float, float] | None:
    """Seconds from `START:END`. Raises `ConfigError` unless they are two that come in order."""
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


def command_line(trace: Path | None, options: Any, verb: str = "simulate") -> str:
    """The command that gives these options, those left out that are as by default."""
    words = ["aioserve", verb, *([] if trace is None else [str(trace)])]
    for field in dataclasses.fields(options):
        value, name = getattr(options, field.name), f"--{field.name.replace('_', '-')}"
        if value == field.default:
            continue
        if isinstance(value, bool):
            words.append(name if value else f"--no-{name[2:]}")
        else:
            for one in value if isinstance(value, tuple) else (value,):
                words += [name, str(one)]
    return shlex.join(words)


def write_report(
    path: Path,
    runs: Sequence[PolicyRun],
    facts: dict[str, Any],
    trace: Path | None,
    options: Any,
    trial: Trial,
) -> None:
    """Draw and write the page."""
    from aioserve.simulation.report import report_page

    page = report_page(
        runs,
        title=f"{facts['name']}: {', '.join(run.name for run in runs)}",
        command=command_line(trace, options),
        facts=_facts(runs, facts, options, trial),
        targets=trial.targets,
        window=window_of(options.gantt_window),
    )
    path.write_text(page, encoding="utf-8")


def _facts(
    runs: Sequence[PolicyRun], facts: dict[str, Any], options: Any, trial: Trial
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
    asked = []
    if targets is not None and targets.ttft_seconds is not None:
        asked.append(f"first token within {targets.ttft_seconds:,.6g} s")
    if targets is not None and targets.tpot_seconds is not None:
        asked.append(f"further tokens every {targets.tpot_seconds * 1000:,.6g} ms")
    return [*told, ("Targets", ", ".join(asked))] if asked else told
