"""Compares options of the bundled policies: the tables of docs/explanation/policies.md.

Each sweep runs one policy with several options on the first half of a public trace. All of them run
again on the second half, which no option was chosen by. Sessions are split by turns instead: every
other one is in the first half. The queue is deep: all requests come at once, or as fast as the
sweep says.

`longest-match` is the order that finds most in the prefix cache and starves requests for which it
finds nothing; it is no policy of aioserve. The simulator is deterministic: the same traces give the
same figures.

    python benchmarks/policy_options.py --traces DIR
    python benchmarks/policy_options.py --traces DIR cache_aware
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from aioserve import RequestView, SchedulerView, SchedulingPolicy
from aioserve.capacity.capacity import capacity_of
from aioserve.capacity.hardware import hardware_preset
from aioserve.capacity.models import ModelShape, read_model
from aioserve.plugins import PluginRegistry
from aioserve.simulation.metrics import Metrics, metrics_of
from aioserve.simulation.records import SimulationResult
from aioserve.simulation.roofline import RooflineCost
from aioserve.simulation.simulator import simulate
from aioserve.traces.formats import read_trace
from aioserve.traces.synthetic import synthetic_trace
from aioserve.traces.trace_request import TraceRequest, at_rate
from aioserve.traces.workload import with_targets

MODEL, HARDWARE = "llama-3-8b", "h100"
AT_ONCE = 100_000.0
"""Requests a second."""
SHORT_TOKENS = 2048
LONGEST_MATCH = "longest-match"


class LongestMatch(SchedulingPolicy):
    """Looks up every prompt in every step."""

    def order(self, waiting: Sequence[RequestView], view: SchedulerView) -> Iterable[RequestView]:
        return sorted(waiting, key=lambda request: -request.cached_tokens)


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """Runs of one table for each half of the trace."""

    trace: str
    """File in `--traces`, or a made-up workload, whose halves are two seeds."""
    policies: tuple[str, ...]
    columns: tuple[str, ...]
    """Names of `COLUMNS`."""
    rate: float | None = AT_ONCE
    """Requests a second; None is as recorded."""
    closed_loop: bool = False
    num_devices: int = 1
    num_pages: int | None = None
    """KV pages of 16 tokens; None is as many as fit beside the model."""
    num_requests: int | None = None
    """Number of requests of each half, from its start; None is all."""
    targets: dict[str, float] = msgspec.field(default_factory=dict)
    """Targets by the names that a `TraceRequest` has for them."""
    urgent: str | None = None
    """Tenant whose requests have priority -1; those of the others have 0."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sweeps", nargs="*", choices=[*SWEEPS, []], metavar="SWEEP")
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR")
    options = parser.parse_args()
    for name in options.sweeps or SWEEPS:
        sweep = SWEEPS[name]
        for half, requests in halves(sweep, options.traces).items():
            print(f"\n{name}: {sweep.trace}, {half}, {len(requests):,} requests")
            print_table(sweep, requests if sweep.rate is None else at_rate(requests, sweep.rate))


def halves(sweep: Sweep, traces: Path) -> dict[str, list[TraceRequest]]:
    if "." not in sweep.trace:
        count = sweep.num_requests or 500
        made = [synthetic_trace(sweep.trace, count, seed=seed) for seed in (0, 1)]
        return {"seed 0": made[0], "seed 1": made[1]}
    path = traces / sweep.trace
    if not path.exists():
        sys.exit(f"--traces: {path} is not there")
    first, second = halves_of(read_trace(path))
    most = sweep.num_requests
    return {"first half": first[:most], "second half": second[:most]}


def halves_of(trace: list[TraceRequest]) -> tuple[list[TraceRequest], list[TraceRequest]]:
    """Return halves by arrival, or every other session, as each has a clock of its own."""
    sessions = list(dict.fromkeys(request.session for request in trace))
    if len(sessions) > 1:
        even = set(sessions[::2])
        return (
            [request for request in trace if request.session in even],
            [request for request in trace if request.session not in even],
        )
    requests = sorted(trace, key=lambda request: request.arrival_seconds)
    middle = len(requests) // 2
    return requests[:middle], requests[middle:]


def print_table(sweep: Sweep, requests: Sequence[TraceRequest]) -> None:
    widths = {name: max(len(name), 9) + 2 for name in sweep.columns}
    print(" " * 41 + "".join(f"{name:>{width}}" for name, width in widths.items()), flush=True)
    for policy in sweep.policies:
        result, metrics = run(sweep, requests, policy)
        cells = (f"{COLUMNS[name](result, metrics):>{width}}" for name, width in widths.items())
        print(f"{policy:41}{''.join(cells)}", flush=True)


def run(
    sweep: Sweep, requests: Sequence[TraceRequest], policy: str
) -> tuple[SimulationResult, Metrics]:
    model, hardware = read_model(MODEL), hardware_preset(HARDWARE)
    num_pages = sweep.num_pages
    requests = with_targets(requests, **sweep.targets)
    if num_pages is None:
        memory = hardware.memory_bytes
        fits = capacity_of(MODEL, model, gpu_memory_bytes=memory, num_gpus=sweep.num_devices)
        num_pages = fits.num_pages
    result = simulate(
        [msgspec.structs.replace(r, priority=-int(r.tenant == sweep.urgent)) for r in requests],
        LongestMatch() if policy == LONGEST_MATCH else PluginRegistry().policy(policy),
        cost=RooflineCost(ModelShape.of(model), hardware.times(sweep.num_devices)),
        num_pages=num_pages,
        closed_loop=sweep.closed_loop,
    )
    return result, metrics_of(result)


def p90_of_short_prompts(result: SimulationResult) -> float:
    waits = [
        record.first_token_seconds - record.request.arrival_seconds
        for record in result.requests
        if record.first_token_seconds is not None and record.request.prompt_tokens <= SHORT_TOKENS
    ]
    return float(np.percentile(waits, 90))


def wait_of_the_urgent(percent: int) -> Callable[[SimulationResult, Metrics], str]:
    def cell(result: SimulationResult, metrics: Metrics) -> str:
        waits = [
            record.first_token_seconds - record.request.arrival_seconds
            for record in result.requests
            if record.first_token_seconds is not None and record.request.priority < 0
        ]
        return f"{np.percentile(waits, percent):.2f} s" if waits else "-"

    return cell


def time_to_first_token(share: str) -> Callable[[SimulationResult, Metrics], str]:
    def cell(result: SimulationResult, metrics: Metrics) -> str:
        if metrics.ttft_seconds is None:
            sys.exit("no request has a first token")
        return f"{getattr(metrics.ttft_seconds, share):.2f} s"

    return cell


def met_targets(result: SimulationResult, metrics: Metrics) -> str:
    return "-" if metrics.goodput is None else f"{metrics.goodput.share:.1%}"


def found(result: SimulationResult, metrics: Metrics) -> str:
    return "-" if metrics.block_hit_share is None else f"{metrics.block_hit_share:.1%}"


def gap(result: SimulationResult, metrics: Metrics) -> str:
    return "-" if metrics.service_gap_tokens is None else f"{metrics.service_gap_tokens:,}"


COLUMNS: dict[str, Callable[[SimulationResult, Metrics], str]] = {
    "TTFT p50": time_to_first_token("p50"),
    "TTFT p90": time_to_first_token("p90"),
    "TTFT p99": time_to_first_token("p99"),
    "p90 to 2,048": lambda result, metrics: f"{p90_of_short_prompts(result):.2f} s",
    "urgent p50": wait_of_the_urgent(50),
    "urgent p99": wait_of_the_urgent(99),
    "longest wait": lambda result, metrics: f"{metrics.max_wait_tokens:,}",
    "found": found,
    "gap": gap,
    "preempted": lambda result, metrics: f"{metrics.preemptions:,}",
    "output/s": lambda result, metrics: f"{metrics.output_tokens_per_second:,.0f}",
    "seconds": lambda result, metrics: f"{metrics.seconds:,.0f}",
    "met": met_targets,
}

DEEP_QUEUE = ("TTFT p50", "TTFT p90", "TTFT p99", "p90 to 2,048", "longest wait", "found")
CACHE_AWARE = (
    "fcfs",
    LONGEST_MATCH,
    "cache_aware:patience=64",
    "cache_aware:patience=256",
    "cache_aware:patience=1024",
    "cache_aware:patience=4096",
    "cache_aware:patience=1024,lookups=8",
    "cache_aware:patience=1024,lookups=1024",
)
SWEEPS = {
    "cache_aware": Sweep(
        trace="mooncake_conversation.jsonl.gz",
        num_devices=2,
        columns=DEEP_QUEUE,
        policies=CACHE_AWARE,
    ),
    "prefix_trees": Sweep(
        trace="prefix-trees",
        num_pages=1500,
        num_requests=800,
        columns=DEEP_QUEUE,
        policies=CACHE_AWARE,
    ),
    "shortest_first": Sweep(
        trace="azure2023_conv.csv.gz",
        columns=DEEP_QUEUE,
        policies=(
            "fcfs",
            "shortest_first:patience=64",
            "shortest_first:patience=256",
            "shortest_first:patience=1024",
            "shortest_first:patience=4096",
        ),
    ),
    "round_robin": Sweep(
        trace="agentic_coding.jsonl.gz",
        rate=8.0,
        num_devices=4,
        columns=("TTFT p50", "TTFT p90", "TTFT p99", "longest wait", "found", "seconds"),
        policies=(
            "fcfs",
            "cache_aware",
            "round_robin:patience=0",
            "round_robin:patience=4",
            "round_robin:patience=16",
            "round_robin:patience=64",
            "round_robin:patience=256",
            "round_robin:patience=64,chunk_size=128",
            "round_robin:patience=64,chunk_size=1024",
        ),
    ),
    "fair_share": Sweep(
        trace="servegen_deepseek_r1.csv.gz",
        rate=20.0,
        num_devices=2,
        num_requests=500,
        columns=("TTFT p50", "TTFT p90", "TTFT p99", "gap", "preempted", "output/s"),
        policies=(
            "fcfs",
            "fair_share:lead_tokens=none",
            "fair_share:lead_tokens=65536",
            "fair_share:lead_tokens=16384",
            "fair_share:lead_tokens=4096",
            "fair_share:lead_tokens=1024",
        ),
    ),
    "deadline": Sweep(
        trace="azure2023_code.csv.gz",
        rate=8.0,
        targets={"ttft_target_seconds": 2.0, "tpot_target_seconds": 0.1},
        columns=("met", "TTFT p50", "longest wait"),
        policies=(
            "fcfs",
            "shortest_first",
            "deadline:window=64",
            "deadline:window=256",
            "deadline:window=1024",
            "deadline:reject=false,patience=64",
            "deadline:reject=false,patience=1024",
            "deadline:reject=false,patience=4096",
        ),
    ),
    "priority": Sweep(
        trace="servegen_deepseek_r1.csv.gz",
        rate=20.0,
        num_devices=2,
        num_requests=500,
        urgent="30",
        columns=("urgent p50", "urgent p99", "TTFT p50", "TTFT p99", "preempted", "output/s"),
        policies=(
            "fcfs",
            "priority:patience_tokens=20000",
            "priority:patience_tokens=50000",
            "priority:patience_tokens=100000",
            "priority:patience_tokens=200000",
            "priority:patience_tokens=1000000",
            "priority:patience_tokens=none",
        ),
    ),
    "chats_at_22": Sweep(
        trace="azure2023_conv.csv.gz",
        rate=22.0,
        columns=("TTFT p50", "TTFT p90", "p90 to 2,048", "TTFT p99"),
        policies=("fcfs", "round_robin", "shortest_first"),
    ),
    "conversations_as_recorded": Sweep(
        trace="mooncake_conversation.jsonl.gz",
        rate=None,
        num_devices=2,
        num_pages=203_756,
        columns=("TTFT p50", "TTFT p90", "TTFT p99", "found"),
        policies=("fcfs", "cache_aware"),
    ),
    "tenants_at_200": Sweep(
        trace="servegen_m_small.csv.gz",
        rate=200.0,
        columns=("TTFT p50", "TTFT p90", "TTFT p99", "gap"),
        policies=("fcfs", "fair_share"),
    ),
}


if __name__ == "__main__":
    main()
