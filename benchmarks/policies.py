"""Measures each bundled policy on a recorded trace: the figures of docs/explanation/policies.md.

Each study simulates one policy and those that it is compared with, on the trace and at the load
that its policy is for. It prints the results and, with `--figures`, draws them. The traces are
public (see docs/how-to/simulate-a-policy.md for their sources); `--traces` is their directory. The
simulator is deterministic: the same traces give the same figures.

    python benchmarks/policies.py --traces DIR
    python benchmarks/policies.py --traces DIR --figures docs/explanation/figures fair_share
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from aioserve.capacity.capacity import capacity_of
from aioserve.capacity.hardware import hardware_preset
from aioserve.capacity.models import ModelShape, read_model
from aioserve.plugins import PluginRegistry
from aioserve.simulation.metrics import Metrics, metrics_of
from aioserve.simulation.records import SimulationResult
from aioserve.simulation.roofline import RooflineCost
from aioserve.simulation.simulator import simulate
from aioserve.traces.formats import read_trace
from aioserve.traces.trace_request import TraceRequest, at_rate
from aioserve.traces.workload import with_targets

MODEL, HARDWARE = "llama-3-8b", "h100"
CODE_TARGETS = {"ttft_target_seconds": 2.0, "tpot_target_seconds": 0.1}
COLORS = {
    "fcfs": "#555555",
    "round_robin": "#0072b2",
    "shortest_first": "#e69f00",
    "cache_aware": "#009e73",
    "fair_share": "#cc79a7",
    "deadline": "#d55e00",
}
"""Okabe and Ito's palette, which colour-blind readers can tell apart."""


class Run(msgspec.Struct, frozen=True):
    policy: str
    rate: float
    """Requests a second, as they arrived."""
    result: SimulationResult
    metrics: Metrics


class Study(msgspec.Struct, frozen=True, kw_only=True):
    """Runs of one figure."""

    trace: str
    policies: tuple[str, ...]
    draw: Callable[[Any, Study, list[Run]], None]
    rates: tuple[float | None, ...] = (None,)
    """Requests a second; None is as recorded."""
    num_devices: int = 1
    num_pages: int | None = None
    """KV pages of 16 tokens; None is as many as fit beside the model."""
    targets: dict[str, float] = msgspec.field(default_factory=dict)
    """Targets by the names that a `TraceRequest` has for them."""


def main() -> None:
    options = parse_arguments()
    for name in options.studies or STUDIES:
        study = STUDIES[name]
        path = options.traces / study.trace
        if not path.exists():
            sys.exit(f"--traces: {path} is not there")
        requests = read_trace(path)
        print(f"\n{name}: {study.trace}, {len(requests):,} requests")
        runs = [run(study, requests, p, rate) for rate in study.rates for p in study.policies]
        print_table(runs)
        if options.figures is not None:
            draw(study, runs, options.figures / f"{name}.svg")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("studies", nargs="*", choices=[*STUDIES, []], metavar="POLICY")
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR")
    parser.add_argument("--figures", type=Path, metavar="DIR")
    return parser.parse_args()


def run(study: Study, requests: Sequence[TraceRequest], policy: str, rate: float | None) -> Run:
    model, hardware = read_model(MODEL), hardware_preset(HARDWARE)
    cost = RooflineCost(ModelShape.of(model), hardware.times(study.num_devices))
    num_pages = study.num_pages
    if num_pages is None:
        fits = capacity_of(
            MODEL, model, gpu_memory_bytes=hardware.memory_bytes, num_gpus=study.num_devices
        )
        num_pages = fits.num_pages
    requests = with_targets(requests, **study.targets)
    if rate is not None:
        requests = at_rate(requests, rate)
    result = simulate(
        requests,
        PluginRegistry().policy(policy),
        cost=cost,
        num_pages=num_pages,
    )
    times = [request.arrival_seconds for request in requests]
    arrived = len(times) / (max(times) - min(times))
    return Run(policy, arrived, result, metrics_of(result))


def print_table(runs: Sequence[Run]) -> None:
    print(
        f"{'':15} {'rate':>6} {'TTFT p50':>9} {'p90':>8} {'p99':>8} {'longest wait':>13} "
        f"{'found':>7} {'good':>7} {'gap':>9}"
    )
    for found in runs:
        metrics, ttft = found.metrics, found.metrics.ttft_seconds
        if ttft is None:
            sys.exit(f"{found.policy}: no request has a first token")
        print(
            f"{found.policy:15} {found.rate:6.2f} {ttft.p50:8.2f}s {ttft.p90:7.2f}s "
            f"{ttft.p99:7.2f}s {metrics.max_wait_tokens:13,} "
            f"{or_dash(metrics.block_hit_share, '.1%'):>7} {or_dash(good_share(found), '.1%'):>7} "
            f"{or_dash(metrics.service_gap_tokens, ','):>9}"
        )


def good_share(found: Run) -> float | None:
    return None if found.metrics.goodput is None else found.metrics.goodput.share


def or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def draw(study: Study, runs: list[Run], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "aioserve", "font.size": 9})
    figure = pyplot.figure(figsize=(7.2, 3.0), layout="constrained", facecolor="white")
    study.draw(figure, study, runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


# -- one way to draw each kind of study


def draw_waits_over_time(figure: Any, study: Study, runs: list[Run]) -> None:
    """Draw how the wait follows the load."""
    (found,) = runs
    records = found.result.requests
    arrival = np.array([record.request.arrival_seconds for record in records]) / 60
    tokens = np.array([record.request.prompt_tokens for record in records])
    ttft = np.array([seconds_to_first_token(record) for record in records])
    load, wait = figure.subplots(2, 1, sharex=True)
    edges = np.linspace(0, arrival.max(), 61)
    arrived, _ = np.histogram(arrival, edges, weights=tokens)
    seconds = 60 * (edges[1] - edges[0])
    load.stairs(arrived / seconds / 1000, edges, color=COLORS["fcfs"], fill=True, alpha=0.5)
    load.set_ylabel("1,000 tokens/s\narriving")
    minute = np.digitize(arrival, edges[1:-1])
    for share, style in ((50, "-"), (99, ":")):
        at = [np.percentile(ttft[minute == index], share) for index in range(60)]
        wait.plot((edges[:-1] + edges[1:]) / 2, at, style, color=COLORS["fcfs"], label=f"p{share}")
    wait.legend(frameon=False)
    wait.set_ylabel("time to first\ntoken, s")
    wait.set_xlabel("arrival, minutes")


def draw_waits_by_length(figure: Any, study: Study, runs: list[Run]) -> None:
    """Draw who gains and who pays, by the length of the prompt."""
    lengths = np.array([record.request.prompt_tokens for record in runs[0].result.requests])
    edges = (0, 256, 512, 1024, 2048, int(lengths.max()))
    labels = [*(f"≤ {edge:,}" for edge in edges[1:-1]), "more"]
    width = 0.8 / len(runs)
    for axes, share in zip(figure.subplots(1, 2, sharex=True), (50, 90), strict=True):
        for place, found in enumerate(runs):
            ttft = np.array([seconds_to_first_token(record) for record in found.result.requests])
            waits = [
                float(np.percentile(ttft[(lengths > low) & (lengths <= high)], share))
                for low, high in pairwise(edges)
            ]
            at = np.arange(len(labels)) + (place - (len(runs) - 1) / 2) * width
            axes.bar(at, waits, width, color=COLORS[found.policy], label=found.policy)
        axes.set_xticks(range(len(labels)), labels)
        axes.set_xlabel("prompt, tokens")
        axes.set_ylabel(f"time to first token, p{share}, s")
        axes.legend(frameon=False)


def draw_distribution(figure: Any, study: Study, runs: list[Run]) -> None:
    """Draw the whole distribution of waits, and the share found in the cache."""
    waits, found_share = figure.subplots(1, 2, width_ratios=(3, 1))
    for found in runs:
        ttft = np.sort([seconds_to_first_token(record) for record in found.result.requests])
        shares = np.linspace(0, 100, 201)
        waits.plot(
            np.percentile(ttft, shares), shares, color=COLORS[found.policy], label=found.policy
        )
    waits.set_xscale("log")
    waits.set_xlabel("time to first token, seconds")
    waits.set_ylabel("requests, %")
    waits.legend(frameon=False)
    names = [found.policy for found in runs]
    hits = [100 * (found.metrics.block_hit_share or 0) for found in runs]
    bars = found_share.bar(names, hits, color=[COLORS[name] for name in names])
    found_share.bar_label(bars, fmt="%.1f")
    found_share.margins(y=0.1)
    found_share.set_ylabel("prefix blocks found, %")


def draw_tenants(figure: Any, study: Study, runs: list[Run]) -> None:
    """Draw the waits of each tenant, by its demand."""
    demand: dict[str, int] = {}
    for record in runs[0].result.requests:
        tokens = record.request.prompt_tokens + record.request.output_tokens
        demand[record.request.tenant] = demand.get(record.request.tenant, 0) + tokens
    tenants = sorted(demand, key=lambda tenant: demand[tenant])
    waits, gap = figure.subplots(1, 2, width_ratios=(3, 1))
    for found in runs:
        p90 = [
            np.percentile(
                [
                    seconds_to_first_token(record)
                    for record in found.result.requests
                    if record.request.tenant == tenant
                ],
                90,
            )
            for tenant in tenants
        ]
        asked = [demand[tenant] / 1000 for tenant in tenants]
        waits.plot(asked, p90, "o-", ms=4, color=COLORS[found.policy], label=found.policy)
    waits.set_xscale("log")
    waits.set_yscale("log")
    waits.set_xlabel("tokens that a tenant asks for, thousands")
    waits.set_ylabel("time to first token, p90, s")
    waits.legend(frameon=False)
    names = [found.policy for found in runs]
    gaps = [(found.metrics.service_gap_tokens or 0) / 1000 for found in runs]
    gap.bar(names, gaps, color=[COLORS[name] for name in names])
    gap.set_ylabel("gap between backlogged\ntenants, thousand tokens")


def draw_goodput(figure: Any, study: Study, runs: list[Run]) -> None:
    """Draw the share of requests that met their targets, at each load."""
    axes = figure.subplots()
    for policy in study.policies:
        own = [found for found in runs if found.policy == policy]
        axes.plot(
            [found.rate for found in own],
            [100 * (good_share(found) or 0) for found in own],
            "o-",
            ms=4,
            color=COLORS[policy],
            label=policy,
        )
    axes.set_xlabel("requests/s arriving")
    axes.set_ylabel("met their targets, %")
    axes.set_ylim(0, 100)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))


def seconds_to_first_token(record: Any) -> float:
    """Return the seconds to the first token; NaN for a request that was refused, or too long."""
    if record.first_token_seconds is None:
        return float("nan")
    return record.first_token_seconds - record.request.arrival_seconds


STUDIES = {
    "fcfs": Study(
        trace="azure2023_conv.csv.gz", rates=(22,), policies=("fcfs",), draw=draw_waits_over_time
    ),
    "round_robin": Study(
        trace="azure2023_conv.csv.gz",
        rates=(22,),
        policies=("fcfs", "round_robin"),
        draw=draw_waits_by_length,
    ),
    "shortest_first": Study(
        trace="azure2023_conv.csv.gz",
        rates=(22,),
        policies=("fcfs", "shortest_first"),
        draw=draw_waits_by_length,
    ),
    "cache_aware": Study(
        trace="mooncake_conversation.jsonl.gz",
        num_devices=2,
        num_pages=407_512,
        policies=("fcfs", "cache_aware"),
        draw=draw_distribution,
    ),
    "fair_share": Study(
        trace="servegen_m_small.csv.gz",
        rates=(200,),
        policies=("fcfs", "fair_share"),
        draw=draw_tenants,
    ),
    "deadline": Study(
        trace="azure2023_code.csv.gz",
        rates=(4, 8, 12, 16),
        policies=tuple(COLORS),
        targets=CODE_TARGETS,
        draw=draw_goodput,
    ),
}


if __name__ == "__main__":
    main()
