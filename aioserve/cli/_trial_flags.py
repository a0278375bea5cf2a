"""The flags that `simulate` and `sweep` have in common: the workload, the machine, the engine."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from aioserve.arguments import shown
from aioserve.cli._streams import check_output
from aioserve.errors import ConfigError

if TYPE_CHECKING:
    from aioserve.simulation.trial_options import TrialOptions
    from aioserve.traces.request import TraceRequest

__all__ = [
    "TrialFlags",
    "check_files",
    "check_policies",
    "facts_of",
    "source_of",
    "trial_options",
]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFlags:
    """What is tried."""

    policy: Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)] = ("fcfs",)
    """A scheduling policy, fcfs when not given, or NAME:OPTION=VALUE,OPTION=VALUE, or a class of
    yours as FILE.py:CLASS. May be given several times."""
    synthetic: str | None = None
    """A made-up workload in place of a trace: prefix-trees, conversations, bursts, tenants or
    heavy-tails."""
    num_requests: int | None = None
    """Requests of a made-up workload (500 when not given), or the first so many of a trace, by
    their times."""
    arrivals: str = "recorded"
    """When requests come: recorded, poisson, or gamma:CV with a coefficient of variation of the
    pauses. What isn't recorded is drawn from the seed, at the rate; lengths alone will do then."""
    closed_loop: Annotated[bool, Parameter(negative=())] = False
    """A turn comes its caller's time to think after the answer before it has ended, where the trace
    tells which follows which. Arrivals that are drawn are then those of sessions."""
    predictor: str | None = None
    """A forecast of each answer's length for policies to see: oracle, noisy:ERROR, constant:TOKENS
    or by-tenant. Not given: that of the trace, if any."""
    priority: Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)] = ()
    """CLIENT=NUMBER: the priority of a client's requests, for policies to see; 0 when not given.
    May be given several times."""
    scale_lengths: float = 1.0
    """This many times the tokens of prompts, answers and shared blocks, for example 0.0625."""
    model: str | None = None
    """A preset, llama-3-8b when not given, a config.json, a model directory, an embedded model or a
    cached hub id. Its weights aren't read."""
    hardware: str | None = None
    """h200, h100 (when not given), a100, l4, or cpu, which is a rough guess."""
    num_devices: int | None = None
    """That share model and memory evenly, 1 when not given; what they tell each other isn't
    counted."""
    cost_table: str | None = None
    """A file of measured steps, in place of the roofline of model and hardware, which then say no
    more than how many pages there are: that of `aioserve calibrate`, or a splitwise latency profile
    as FILE:MODEL,HARDWARE,TENSOR_PARALLEL."""
    scatter: Annotated[bool | None, Parameter(negative="--no-scatter")] = None
    """Steps of a cost table that was measured with it scatter as they did then, drawn from the
    seed, unless told otherwise; without it each takes its mean."""
    num_pages: int | None = None
    """KV pages. Not given: as many as the memory of the devices holds, or of the machine that a
    cost table was measured on."""
    num_host_pages: int = 0
    """Pages of the host's memory, to which cached pages and preempted requests are swapped."""
    unbounded_cache: Annotated[bool, Parameter(negative=())] = False
    """KV memory without a limit."""
    page_size: int = 16
    """Tokens of one KV page."""
    max_num_seqs: int = 256
    """Sequences that run at once."""
    max_num_batched_tokens: int = 2048
    """Tokens of one step."""
    output_reserve_tokens: int = 64
    """Tokens of answer that a request needs room for, beside its prompt, to be started."""
    max_tokens: int | None = None
    """Most tokens of an answer, where the trace has no such limit of the caller's. Not given: as
    many as the KV memory holds."""
    max_model_len: int | None = None
    """Most tokens of a prompt and its answer. Not given: what a cost table says, or as many as the
    KV memory holds."""
    prefix_caching: Annotated[bool, Parameter(negative="--no-prefix-caching")] = True
    """Start requests from what is cached of their prefix."""
    eviction: str = "lru"
    """Which cached pages go first: lru, lfu, fifo, slru, or a name that a plugin offers."""
    preemption: str = "auto"
    """What becomes of a preempted request's pages: swap, recompute, or auto."""
    overlap: Annotated[bool, Parameter(negative="--no-overlap")] = True
    """Plan a step while the one before is running."""
    ttft_target_seconds: float | None = None
    """A good answer's first token comes this soon: counts goodput, and policies see it."""
    tpot_target_seconds: float | None = None
    """A good answer's further tokens take no longer than this on average: likewise."""
    requests: Path | None = None
    """Write a line for each request to this file, *.csv or *.jsonl."""
    json: Annotated[bool, Parameter(negative=())] = False
    """Print JSON instead of tables."""


def trial_options(flags: TrialFlags, **others: Any) -> TrialOptions:
    """Options of one run, with `others` in place of what the flags say."""
    from aioserve.simulation.trial_options import TrialOptions

    known = {field.name for field in fields(TrialOptions)}
    given = {field.name: getattr(flags, field.name) for field in fields(flags)}
    return TrialOptions(**{name: given[name] for name in known & given.keys()} | others)


def source_of(trace: Path | None, flags: TrialFlags) -> Path | str:
    """The trace's file, or the name of a made-up workload. Raises `ConfigError` unless one is
    given."""
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


def check_policies(policies: tuple[str, ...]) -> None:
    """Raise `ConfigError` for one that is given twice."""
    for name in policies:
        if policies.count(name) > 1:
            raise ConfigError(f"policy {name!r} is given {policies.count(name)} times")


def check_files(trace: Path | None, **wanted: Path | None) -> None:
    """Raise `ConfigError` unless these files, by their options, can be written where they are
    wanted, and none of them is the trace or another one. A file that is there stays as it is."""
    from aioserve.simulation.request_rows import check_requests_file, is_same_file

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


def facts_of(trace: Path | None, flags: TrialFlags, requests: list[TraceRequest]) -> dict[str, Any]:
    arrivals = [request.arrival_seconds for request in requests]
    return {
        "name": flags.synthetic if trace is None else trace.name,
        "requests": len(requests),
        "prompt_tokens": sum(request.prompt_tokens for request in requests),
        "output_tokens": sum(request.output_tokens for request in requests),
        "seconds": max(arrivals) - min(arrivals),
    }
