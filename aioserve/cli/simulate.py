"""`aioserve simulate`: policies side by side on a trace, without a model.

The simulator itself is in `aioserve.simulation`; this module reads options and prints.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from aioserve.cli._streams import json_text
from aioserve.errors import ConfigError

if TYPE_CHECKING:
    from aioserve.simulation.cost import CostModel
    from aioserve.simulation.metrics import Metrics, Targets
    from aioserve.traces.request import TraceRequest

__all__ = ["SimulateOptions", "simulate"]

OnProgress = Callable[[int, int], None]
WIDTH_OF_FILES = 10_000


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """What to run."""

    synthetic: str | None = None
    """A made-up workload in place of a trace: prefix-trees, conversations, bursts, tenants or
    heavy-tails."""
    num_requests: int | None = None
    """Requests of a made-up workload (500 when not given), or the first so many of a trace, by
    their times."""
    seed: int | None = None
    """Key of a made-up workload, 0 when not given."""
    policy: Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)] = ("fcfs",)
    """A scheduling policy, fcfs when not given, or NAME:OPTION=VALUE,OPTION=VALUE.
    May be given several times."""
    rate: float | None = None
    """Requests a second; arrivals are stretched evenly. Not given: as recorded, or 4."""
    priority: Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)] = ()
    """CLIENT=NUMBER: the priority of a client's requests, for policies to see; 0 when not given.
    May be given several times."""
    scale_lengths: float = 1.0
    """This many times the tokens of prompts, answers and shared blocks, for example 0.0625."""
    model: str = "llama-3-8b"
    """A preset, a config.json, a model directory, an embedded model or a cached hub id. Its weights
    aren't read."""
    hardware: str = "h100"
    """h200, h100, a100, l4, or cpu, which is a rough guess."""
    num_devices: int = 1
    """That share model and memory evenly; what they tell each other isn't counted."""
    cost_table: str | None = None
    """A file of measured steps, in place of the roofline of model and hardware, which then say no
    more than how many pages there are: that of `aioserve calibrate`, or a splitwise latency profile
    as FILE:MODEL,HARDWARE,TENSOR_PARALLEL."""
    num_pages: int | None = None
    """KV pages. Not given: as many as the memory of the devices holds."""
    unbounded_cache: Annotated[bool, Parameter(negative=())] = False
    """KV memory without a limit."""
    page_size: int = 16
    """Tokens of one KV page."""
    max_num_seqs: int = 256
    """Sequences that run at once."""
    max_num_batched_tokens: int = 2048
    """Tokens of one step."""
    max_tokens: int | None = None
    """Most tokens of an answer, where the trace has no such limit of the caller's. Not given: as
    many as the KV memory holds."""
    prefix_caching: Annotated[bool, Parameter(negative="--no-prefix-caching")] = True
    """Start requests from what is cached of their prefix."""
    eviction: str = "lru"
    """Which cached pages go first: lru, lfu, fifo, slru, or a name that a plugin offers."""
    overlap: Annotated[bool, Parameter(negative="--no-overlap")] = True
    """Plan a step while the one before is running."""
    ttft_target_seconds: float | None = None
    """A good answer's first token comes this soon: counts goodput, and policies see it."""
    tpot_target_seconds: float | None = None
    """A good answer's further tokens take no longer than this on average: likewise."""
    report: Path | None = None
    """Write a page with charts to this file; needs the extra `report`."""
    gantt_window: str | None = None
    """START:END in seconds on the trace's clock: the steps that the report shows one by one. Not
    given: the 60 during which most requests are there."""
    json: Annotated[bool, Parameter(negative=())] = False
    """Print JSON instead of tables."""


def simulate(trace: Path | None = None, /, *, options: SimulateOptions | None = None) -> None:
    """Run scheduling policies over a trace on a virtual clock, with the engine's own scheduler.

    Args:
        trace: A file of requests: Mooncake or agentic JSONL, Azure or ServeGen CSV, plain or .gz.
    """
    from aioserve.cli._simulation_report import check_report, write_report
    from aioserve.plugins import PluginRegistry
    from aioserve.simulation.metrics import metrics_of
    from aioserve.simulation.report import PolicyRun
    from aioserve.simulation.simulator import simulate as run
    from aioserve.simulation.timeline import Timeline

    options = options or SimulateOptions()
    _check(options)
    check_report(options.report, options.gantt_window, trace)
    requests = _requests(trace, options)
    targets = _targets(options)
    registry = PluginRegistry()
    registry.check_selected()
    # New objects for each run: a strategy, like a policy, belongs to one scheduler.
    chosen = {
        name: (registry.policy(name), registry.eviction(options.eviction))
        for name in options.policy
    }
    cost, num_pages = _cost(options), _num_pages(options)
    found: dict[str, Metrics] = {}
    drawn: list[PolicyRun] = []
    for name, (policy, eviction) in chosen.items():
        timeline = None if options.report is None else Timeline()
        with _bar(name) as on_progress:
            result = run(
                requests,
                policy,
                cost=cost,
                num_pages=num_pages,
                page_size=options.page_size,
                max_num_seqs=options.max_num_seqs,
                max_num_batched_tokens=options.max_num_batched_tokens,
                max_tokens=options.max_tokens,
                prefix_caching=options.prefix_caching,
                eviction=eviction,
                overlap=options.overlap,
                ttft_target_seconds=options.ttft_target_seconds,
                tpot_target_seconds=options.tpot_target_seconds,
                timeline=timeline,
                on_progress=on_progress,
            )
        found[name] = metrics_of(result, targets)
        if timeline is not None:
            drawn.append(PolicyRun(name, result, found[name], timeline))
    facts = _facts(trace, options, requests)
    try:
        if options.report is not None:
            write_report(options.report, drawn, facts, trace, options, targets)
    finally:  # what was simulated for minutes isn't lost with the page
        _print(facts, options, found)


def _check(options: SimulateOptions) -> None:
    """Raise `ConfigError` for options that would be ignored."""
    for name in options.policy:
        if options.policy.count(name) > 1:
            raise ConfigError(f"policy {name!r} is given {options.policy.count(name)} times")
    num_pages_given = options.unbounded_cache or options.num_pages is not None
    if options.cost_table is not None and num_pages_given:
        for name in ("model", "hardware", "num_devices"):
            if getattr(options, name) != getattr(SimulateOptions(), name):
                raise ConfigError(
                    f"{name}: the cost table says how long steps take, and the number of pages is "
                    f"given too, got {getattr(options, name)!r}"
                )


def _requests(trace: Path | None, options: SimulateOptions) -> list[TraceRequest]:
    from aioserve.traces.checks import check_int
    from aioserve.traces.formats import read_trace
    from aioserve.traces.request import MAX_REQUESTS, at_rate, with_scaled_lengths
    from aioserve.traces.synthetic import synthetic_trace

    count = options.num_requests
    if count is not None:
        check_int("num_requests", count, 1, MAX_REQUESTS)
    if (trace is None) == (options.synthetic is None):
        raise ConfigError("give either a trace or --synthetic, and not both")
    if trace is not None:
        if options.seed is not None:
            raise ConfigError(f"seed: nothing of a trace is drawn, got {options.seed}")
        requests = read_trace(trace)[:count]
        if options.rate is not None:
            requests = at_rate(requests, options.rate)
    else:
        rate = 4.0 if options.rate is None else options.rate
        name = str(options.synthetic)
        requests = synthetic_trace(name, count or 500, rate=rate, seed=options.seed or 0)
    if options.scale_lengths != 1.0:
        requests = with_scaled_lengths(requests, options.scale_lengths)
    return _with_priorities(requests, options.priority)


def _with_priorities(requests: list[TraceRequest], given: tuple[str, ...]) -> list[TraceRequest]:
    """`given` are CLIENT=NUMBER. Raises `ConfigError` for a client that isn't in the trace, or
    comes twice, and for what is no priority."""
    from msgspec.structs import replace

    from aioserve.request import MAX_PRIORITY, MIN_PRIORITY
    from aioserve.traces.checks import check_int

    clients = {request.client for request in requests if request.client}
    priorities: dict[str, int] = {}
    for one in given:
        client, equals, number = one.rpartition("=")
        if not equals or client in priorities or client not in clients:
            raise ConfigError(
                f"priority must be CLIENT=NUMBER, once for each client of the trace "
                f"({', '.join(sorted(clients)[:8]) or 'it tells of none'}), got {one!r}"
            )
        try:
            priorities[client] = int(number)
        except ValueError:
            raise ConfigError(f"priority of {client} must be an int, got {number!r}") from None
        check_int(f"priority of {client}", priorities[client], MIN_PRIORITY, MAX_PRIORITY)
    if not priorities:
        return requests
    return [replace(r, priority=priorities.get(r.client, 0)) for r in requests]


def _targets(options: SimulateOptions) -> Targets | None:
    from aioserve.simulation.metrics import Targets

    ttft, tpot = options.ttft_target_seconds, options.tpot_target_seconds
    if ttft is None and tpot is None:
        return None
    return Targets(ttft_seconds=ttft, tpot_seconds=tpot)


def _cost(options: SimulateOptions) -> CostModel:
    from aioserve.capacity.hardware import hardware_preset
    from aioserve.capacity.models import ModelShape, read_model
    from aioserve.simulation.cost import RooflineCost
    from aioserve.simulation.latency_profile import read_cost

    if options.cost_table is not None:
        return read_cost(options.cost_table)
    hardware = hardware_preset(options.hardware).times(options.num_devices)
    return RooflineCost(ModelShape.of(read_model(options.model)), hardware)


def _num_pages(options: SimulateOptions) -> int | None:
    from aioserve.capacity.capacity import capacity_of
    from aioserve.capacity.hardware import hardware_preset
    from aioserve.capacity.models import read_model

    if options.unbounded_cache:
        if options.num_pages is not None:
            raise ConfigError("give either --num-pages or --unbounded-cache, and not both")
        return None
    if options.num_pages is not None:
        return options.num_pages
    capacity = capacity_of(
        options.model,
        read_model(options.model),
        gpu_memory_bytes=hardware_preset(options.hardware).memory_bytes,
        num_gpus=options.num_devices,
        page_size=options.page_size,
    )
    if capacity.num_pages < 1:
        raise ConfigError(
            f"{options.model} leaves no room for KV pages on num_devices={options.num_devices} "
            f"of {options.hardware}: give more of them, or num_pages"
        )
    return capacity.num_pages


@contextmanager
def _bar(name: str) -> Iterator[OnProgress | None]:
    """A callback `(done, total)` that draws on stderr; None when stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=None)
        shown = -1

        def update(done: int, total: int) -> None:
            nonlocal shown
            if done != shown:
                shown = done
                bar.update(task, completed=done, total=total)

        yield update


def _facts(
    trace: Path | None, options: SimulateOptions, requests: list[TraceRequest]
) -> dict[str, Any]:
    arrivals = [request.arrival_seconds for request in requests]
    return {
        "name": options.synthetic if trace is None else trace.name,
        "requests": len(requests),
        "prompt_tokens": sum(request.prompt_tokens for request in requests),
        "output_tokens": sum(request.output_tokens for request in requests),
        "seconds": max(arrivals) - min(arrivals),
    }


def _print(facts: dict[str, Any], options: SimulateOptions, found: dict[str, Metrics]) -> None:
    if not options.json:
        _print_tables(facts, options, found)
        return
    given = dataclasses.asdict(options)
    given["report"] = None if options.report is None else str(options.report)
    printed = {"trace": facts, "options": given, "policies": found}
    print(json_text(printed))


def _print_tables(
    facts: dict[str, Any], options: SimulateOptions, found: dict[str, Metrics]
) -> None:
    from rich.console import Console
    from rich.table import Table

    from aioserve.simulation.figures import client_rows, rows

    # A file has room for all columns, and a narrow terminal for all digits on more lines.
    width = None if sys.stdout.isatty() else WIDTH_OF_FILES
    console = Console(file=sys.stdout, width=width, markup=False, highlight=False)
    metrics = next(iter(found.values()))
    steps = f"steps as in {options.cost_table}"
    if options.cost_table is None:
        steps = f"{options.model} on {options.num_devices} x {options.hardware}"
    pages = "unbounded KV memory" if options.unbounded_cache else f"{metrics.num_pages:,} pages"
    console.print(
        f"{facts['name']}: {facts['requests']:,} requests in {facts['seconds']:,.0f} s, "
        f"{facts['prompt_tokens']:,} tokens in, {facts['output_tokens']:,} out; {steps}, {pages} "
        f"of {metrics.page_size} tokens\n",
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
