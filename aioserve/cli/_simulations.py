"""Common parts of `simulate` and `sweep`: flags, their checks, and output about a run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aioserve.arguments import counted, shown
from aioserve.cli._streams import check_output, one_line
from aioserve.errors import ConfigError
from aioserve.simulation.cost import CostModel, CostTable
from aioserve.simulation.options import SchedulerOptions, TrialOptions
from aioserve.simulation.request_rows import check_requests_file, is_same_file
from aioserve.traces.workload import WorkloadOptions

if TYPE_CHECKING:
    from aioserve.simulation.machine import Machine
    from aioserve.simulation.metrics import Metrics
    from aioserve.traces.trace_request import TraceRequest

__all__ = [
    "TRIAL_FLAGS",
    "TrialFlags",
    "as_json",
    "check_files",
    "check_policies",
    "command_line",
    "facts_of",
    "say_what_is_unknown",
    "source_of",
    "warn",
    "warn_of_long_contexts",
    "warn_of_steps_outside",
]


@dataclass(frozen=True, kw_only=True)
class TrialFlags(TrialOptions):
    """Options for what is tried."""

    policy: Sequence[str] = ("fcfs",)
    """Scheduling policy, fcfs when not given, with options if you like:
    NAME:OPTION=VALUE,OPTION=VALUE. Or a class of yours: FILE.py:CLASS. May be given several times.
    """
    synthetic: str | None = None
    """A made-up workload in place of a trace: prefix-trees, conversations, bursts, tenants,
    heavy-tails, chatbot, documents, agents or unique-prompts."""
    requests: Path | None = None
    """Write a line for each request to this file, *.csv or *.jsonl."""
    json: bool = False
    """Print JSON instead of tables."""


def _own(kind: type, *left_out: str) -> list[str]:
    return [field.name for field in fields(kind) if field.name not in left_out]


TRIAL_FLAGS = (
    *("policy", "synthetic"),
    *_own(WorkloadOptions, "rate", "seed"),
    *("model", "hardware", "num_devices", "cost_table", "step_noise"),
    *("num_pages", "num_host_pages", "unbounded_cache"),
    *_own(SchedulerOptions, "num_pages", "num_host_pages"),
    *("requests", "json"),
)
"""Flags of both verbs, in the order in which help shows them."""
SPECULATION_FLAGS = ("speculation_max_tokens", "acceptance")


def as_json(options: WorkloadOptions, flags: Sequence[str]) -> dict[str, Any]:
    """Return values of all flags, for the results. Without speculation its flags are left out."""
    values = {name: getattr(options, name) for name in flags}
    if not values.get("speculation_max_tokens"):
        values = {name: values[name] for name in values if name not in SPECULATION_FLAGS}
    return {n: str(value) if isinstance(value, Path) else value for n, value in values.items()}


def command_line(
    verb: str, trace: Path | None, options: WorkloadOptions, flags: Sequence[str]
) -> str:
    """Return the command that gives these options, without options at their defaults.

    `verb` may be several words.
    """
    words = ["aioserve", *verb.split(), *([] if trace is None else [str(trace)])]
    defaults = {field.name: field.default for field in fields(options)}
    for field in flags:
        value, name = getattr(options, field), f"--{field.replace('_', '-')}"
        if value == defaults[field]:
            continue
        if isinstance(value, bool):
            words.append(name if value else f"--no-{name[2:]}")
        else:
            for one in value if isinstance(value, tuple) else (value,):
                words += [name, str(one)]
    return shlex.join(words)


def source_of(trace: Path | None, flags: TrialFlags) -> Path | str:
    """Return the trace's file, or the name of a made-up workload.

    Raises `ConfigError` unless exactly one is given.
    """
    if trace is not None and flags.synthetic is None:
        return trace
    if trace is None and flags.synthetic is not None:
        return flags.synthetic
    if trace is None:
        raise ConfigError("give a trace, or a made-up workload with --synthetic")
    raise ConfigError(
        f"give either a trace or --synthetic, and not both: {shown(str(trace))} is taken for a "
        "trace; give --policy anew for each policy, and rates with commas between them"
    )


def check_policies(policies: Sequence[str]) -> None:
    """Raise `ConfigError` for a policy that is given twice."""
    for name in policies:
        if policies.count(name) > 1:
            raise ConfigError(f"policy {name!r} is given {policies.count(name)} times")


def check_files(trace: Path | None, **wanted: Path | None) -> None:
    """Raise `ConfigError` unless these files, by their options, can be written.

    None may be the trace or another one of them. An existing file is left as it is.
    """
    others = {} if trace is None else {"the trace": trace}
    for option, path in wanted.items():
        if path is None:
            continue
        if option == "requests":
            check_requests_file(path)
        check_output(option, path)
        if option == "report" and path.is_fifo():
            raise ConfigError(f"report: {path} is a pipe; give a file")
        for what, other in others.items():
            if is_same_file(path, other):
                raise ConfigError(f"{option}: {path} is {what}, which would be lost")
        others[f"that of {option}"] = path


def facts_of(
    trace: Path | None, synthetic: str | None, requests: Sequence[TraceRequest]
) -> dict[str, Any]:
    arrivals = [request.arrival_seconds for request in requests]
    return {
        "name": synthetic if trace is None else trace.name,
        "requests": len(requests),
        "prompt_tokens": sum(request.prompt_tokens for request in requests),
        "output_tokens": sum(request.output_tokens for request in requests),
        "seconds": max(arrivals) - min(arrivals),
    }


def say_what_is_unknown(machine: Machine, options: TrialOptions) -> None:
    """Print a line on stderr about what a cost table lacks, and what is assumed instead."""
    table = machine.cost
    if not isinstance(table, CostTable):
        return
    unknown: list[tuple[str, str]] = []
    if table.step_noise is None:
        unknown.append(("how steps vary", "each takes its mean"))
    if machine.device is not None:
        unknown.append(("the KV memory", f"pages are those of {machine.device}"))
    if table.kv is None and options.max_model_len is None:
        unknown.append(("the model's longest context", "none is too long for it"))
    if unknown:
        missing, instead = zip(*unknown, strict=True)
        print(
            f"aioserve: {one_line(_name_of(options))} doesn't tell {', '.join(missing)}: "
            f"{', '.join(instead)}",
            file=sys.stderr,
            flush=True,
        )


def warn_of_long_contexts(cost: CostModel, options: TrialOptions) -> None:
    """Warn on stderr if requests may have longer contexts than a cost table was measured with."""
    given = options.max_model_len
    if given is None or not isinstance(cost, CostTable):
        return
    limits = {
        "kv.max_model_len": None if cost.kv is None else cost.kv.max_model_len,
        "max_context_tokens": cost.max_context_tokens,
    }
    known = [(limit, name) for name, limit in limits.items() if limit is not None]
    if known and given > min(known)[0]:
        limit, name = min(known)
        warn(
            f"max_model_len: {given:,} tokens are more than {_name_of(options)} was measured with "
            f"({name} is {limit:,}), and what steps with such contexts take is a guess"
        )


def warn_of_steps_outside(options: TrialOptions, found: Iterable[tuple[str, Metrics]]) -> None:
    """Warn on stderr about the named run with the largest share of steps outside the cost table, if
    any.
    """
    outsides = [
        (metrics.steps_outside, metrics.steps, name)
        for name, metrics in found
        if metrics.steps_outside is not None and metrics.steps_outside.steps
    ]
    if not outsides:
        return
    outside, steps, name = max(outsides, key=lambda one: one[0].share)
    warn(
        f"{_name_of(options)} was not measured for {outside.share:.1%} of the "
        f"{counted(steps, 'step', form=',')} of {name}, and what they take is a guess; the first: "
        f"{outside.first}"
    )


def warn(text: str) -> None:
    print(f"aioserve: warning: {one_line(text)}", file=sys.stderr, flush=True)


def _name_of(options: TrialOptions) -> str:
    return options.cost_table or "a cost table"  # several if a sweep varies it
