"""Which options the bundled policies should have: the tables of docs/explanation/policies.md.

Each sweep runs one policy with several options on the first half of a public trace, and all of them
again on the second half, which no option was chosen by. The queue is deep: all requests come at
once, or as fast as the sweep says. `longest-match` stands for the order that finds the most in the
prefix cache and starves those it finds nothing for; it is no policy of aioserve. The simulator is
deterministic: the same traces give the same figures.

    python benchmarks/policy_options.py --traces DIR
    python benchmarks/policy_options.py --traces DIR cache_aware
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from aioserve import RequestView, SchedulerView, SchedulingPolicy
from aioserve.capacity.capacity import capacity_of
from aioserve.capacity.hardware import hardware_preset
from aioserve.capacity.models import ModelShape, read_model
from aioserve.plugins import PluginRegistry
from aioserve.simulation.cost import RooflineCost
from aioserve.simulation.metrics import Metrics, metrics_of
from aioserve.simulation.records import SimulationResult
from aioserve.simulation.simulator import simulate
from aioserve.traces.formats import read_trace
from aioserve.traces.request import TraceRequest, at_rate
from aioserve.traces.synthetic import synthetic_trace

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
    """One table for each half of the trace."""

    trace: str
    """A file in `--traces`, or a made-up workload, whose halves are two seeds."""
    policies: tuple[str, ...]
    rate: float = AT_ONCE
    num_devices: int = 1
    num_pages: int | None = None
    """KV pages of 16 tokens; None is as many as fit beside the model."""
    num_requests: int = 800
    """Of a made-up workload."""


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
            print_table(sweep, at_rate(requests, sweep.rate))


def halves(sweep: Sweep, traces: Path) -> dict[str, list[TraceRequest]]:
    if "." not in sweep.trace:
        made = [synthetic_trace(sweep.trace, sweep.num_requests, seed=seed) for seed in (0, 1)]
        return {"seed 0": made[0], "seed 1": made[1]}
    path = traces / sweep.trace
    if not path.exists():
        sys.exit(f"--traces: {path} is not there")
    requests = sorted(read_trace(path), key=lambda request: request.arrival_seconds)
    middle = len(requests) // 2
    return {"first half": requests[:middle], "second half": requests[middle:]}


def print_table(sweep: Sweep, requests: Sequence[TraceRequest]) -> None:
    print(
        f"{'':36} {'TTFT p50':>9} {'p90':>8} {'p99':>8} {'p90 to 2,048':>13} "
        f"{'longest wait':>13} {'found':>7} {'gap':>9}",
        flush=True,
    )
    for policy in sweep.policies:
        result, metrics = run(sweep, requests, policy)
        ttft = metrics.ttft_seconds
        if ttft is None:
            sys.exit(f"{policy}: no request has a first token")
        found, gap = metrics.block_hit_share, metrics.service_gap_tokens
        print(
            f"{policy:36} {ttft.p50:8.2f}s {ttft.p90:7.2f}s {ttft.p99:7.2f}s "
            f"{p90_of_short_prompts(result):12.2f}s {metrics.max_wait_tokens:13,} "
            f"{'-' if found is None else format(found, '.1%'):>7} "
            f"{'-' if gap is None else format(gap, ','):>9}",
            flush=True,
        )


def run(
    sweep: Sweep, requests: Sequence[TraceRequest], policy: str
) -> tuple[SimulationResult, Metrics]:
    model, hardware = read_model(MODEL), hardware_preset(HARDWARE)
    num_pages = sweep.num_pages
    if num_pages is None:
        memory = hardware.memory_bytes
        fits = capacity_of(MODEL, model, gpu_memory_bytes=memory, num_gpus=sweep.num_devices)
        num_pages = fits.num_pages
    result = simulate(
        requests,
        LongestMatch() if policy == LONGEST_MATCH else PluginRegistry().policy(policy),
        cost=RooflineCost(ModelShape.of(model), hardware.times(sweep.num_devices)),
        num_pages=num_pages,
    )
    return result, metrics_of(result)


def p90_of_short_prompts(result: SimulationResult) -> float:
    waits = [
        record.first_token_seconds - record.request.arrival_seconds
        for record in result.requests
        if record.first_token_seconds is not None and record.request.prompt_tokens <= SHORT_TOKENS
    ]
    return float(np.percentile(waits, 90))


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
        policies=CACHE_AWARE,
    ),
    "prefix_trees": Sweep(
        trace="prefix-trees",
        num_pages=1500,
        policies=CACHE_AWARE,
    ),
    "shortest_first": Sweep(
        trace="azure2023_conv.csv.gz",
        policies=(
            "fcfs",
            "shortest_first:patience=64",
            "shortest_first:patience=256",
            "shortest_first:patience=1024",
            "shortest_first:patience=4096",
        ),
    ),
}


if __name__ == "__main__":
    main()
