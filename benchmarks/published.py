"""Tries the claim of each published policy (examples/policies) on a made-up workload.

For each it prints the claim, the figure that shows it, and the figure of the policy that it is
compared with. The simulator runs them, a Llama 3 8B on one H100, on workloads drawn from a seed.
The same command prints the same table anywhere. The policies needn't be installed.

    python benchmarks/published.py
    python benchmarks/published.py fastserve andes --seed 1
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from aioserve import SchedulingPolicy, Verdict
from aioserve.capacity.hardware import hardware_preset
from aioserve.capacity.models import ModelShape, read_model
from aioserve.plugins import PluginRegistry
from aioserve.simulation.metrics import GroupMetrics, Metrics, metrics_of
from aioserve.simulation.roofline import RooflineCost
from aioserve.simulation.simulator import simulate
from aioserve.traces.synthetic import synthetic_trace
from aioserve.traces.workload import with_predictions, with_targets

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "policies"))

from published_policies import (
    andes,
    fastserve,
    hrrn,
    orca,
    past_future,
    sarathi,
    sglang,
    srpt,
    vllm_v0,
    vtc,
)

POLICIES = (andes, fastserve, hrrn, orca, past_future, sarathi, sglang, srpt, vllm_v0, vtc)
READING_SECONDS = 0.2
"""Seconds that a reader takes for a token, in Andes' study."""


class OneBatchAfterAnother(SchedulingPolicy):
    """Baseline of Orca's paper: a new request waits until the whole batch has ended."""

    def __init__(self) -> None:
        self._filling = -1

    def admit(self, request: Any, view: Any) -> Verdict:
        if not view.num_running:
            self._filling = view.step
        return Verdict.NOW if view.step == self._filling else Verdict.LATER


class Side(msgspec.Struct, frozen=True):
    """One of the policies that a study compares."""

    name: str
    make: Callable[[], SchedulingPolicy]
    predictor: str | None = None


class Study(msgspec.Struct, frozen=True, kw_only=True):
    """Claim of a paper, and the figures that support or refute it here."""

    policy: str
    hooks: str
    """Hooks that the policy implements."""
    claim: str
    workload: str
    rate: float
    num_requests: int
    sides: tuple[Side, ...]
    """Sides in order, the policy's own first."""
    figures: Mapping[str, Callable[[Metrics], float]]
    holds: Callable[[Sequence[Sequence[float]]], bool]
    """Called with the figures of each side, in order; true if the claim holds."""
    options: Mapping[str, Any] = {}
    urgent: str | None = None
    """Tenant whose requests have priority -1; those of the others have 0."""
    targets: dict[str, float] = msgspec.field(default_factory=dict)
    """Targets by the names that a `TraceRequest` has for them."""


class Finding(msgspec.Struct, frozen=True):
    study: Study
    figures: tuple[tuple[float, ...], ...]
    """Figures of each side."""

    @property
    def holds(self) -> bool:
        return self.study.holds(self.figures)


def bundled(name: str) -> Side:
    return Side(name, lambda: PluginRegistry().policy(name))


def spread(field: str, percentile: str) -> Callable[[Metrics], float]:
    return lambda metrics: getattr(getattr(metrics, field), percentile)


FCFS = bundled("fcfs")
URGENT = "tenant-1"
STALL_FREE = Side("sarathi:tbt_seconds=0.03", lambda: sarathi.StallFree(tbt_seconds=0.03))
STUDIES = (
    Study(
        policy="orca",
        hooks="chunk",
        claim="Requests that leave when they have ended, and join at any step, wait much less than "
        "for a whole batch, at more tokens a second",
        workload="heavy-tails",
        rate=8,
        num_requests=200,
        options={"max_num_seqs": 32},
        sides=(Side("orca", orca.Orca), Side("whole batches", OneBatchAfterAnother)),
        figures={
            "p50 TTFT, s": spread("ttft_seconds", "p50"),
            "tokens/s": lambda m: m.output_tokens_per_second,
        },
        holds=lambda f: 2 * f[0][0] < f[1][0] and f[0][1] > f[1][1],
    ),
    Study(
        policy="vllm_v0",
        hooks="decode, victim",
        claim="Prompts first: the first token comes soon, and those who decode stand still "
        "meanwhile",
        workload="bursts",
        rate=20,
        num_requests=400,
        sides=(Side("vllm_v0", vllm_v0.PromptsFirst), STALL_FREE),
        figures={
            "p50 TTFT, s": spread("ttft_seconds", "p50"),
            "p99 gap, s": spread("gap_seconds", "p99"),
        },
        holds=lambda f: f[0][0] <= f[1][0] and f[0][1] > f[1][1],
    ),
    Study(
        policy="sarathi",
        hooks="chunk, estimate",
        claim="No gap between two tokens is much longer than the target, here 0.03 s",
        workload="bursts",
        rate=8,
        num_requests=400,
        sides=(
            STALL_FREE,
            Side("orca", orca.Orca),
            FCFS,
        ),
        figures={
            "p99 gap, s": spread("gap_seconds", "p99"),
            "longest gap, s": spread("gap_seconds", "max"),
        },
        holds=lambda f: f[0][0] < 0.036 and all(f[0][0] < other[0] for other in f[1:]),
    ),
    Study(
        policy="lpm",
        hooks="order",
        claim="Longest prefix first finds more in the cache, and so comes to more tokens a second",
        workload="prefix-trees",
        rate=400,
        num_requests=500,
        options={"num_pages": 1500, "max_num_seqs": 16},
        sides=(Side("lpm", sglang.LongestPrefixMatch), FCFS),
        figures={
            "token hit share": lambda m: m.token_hit_share or 0.0,
            "tokens/s": lambda m: m.output_tokens_per_second,
        },
        holds=lambda f: f[0][0] > f[1][0] and f[0][1] > f[1][1],
    ),
    Study(
        policy="dfs_weight",
        hooks="order",
        claim="So does going through the tree of what the waiting have in common, with no look at "
        "the cache",
        workload="prefix-trees",
        rate=400,
        num_requests=500,
        options={"num_pages": 1500, "max_num_seqs": 16},
        sides=(Side("dfs_weight", sglang.DepthFirstByWeight), FCFS),
        figures={"token hit share": lambda m: m.token_hit_share or 0.0},
        holds=lambda f: f[0][0] > f[1][0],
    ),
    Study(
        policy="hrrn",
        hooks="order",
        claim="Most requests wait less than under fcfs, at the cost of the longest",
        workload="heavy-tails",
        rate=14,
        num_requests=600,
        options={"max_num_seqs": 8},
        sides=(Side("hrrn", hrrn.HighestResponseRatioNext), FCFS),
        figures={
            "p50 TTFT, s": spread("ttft_seconds", "p50"),
            "longest TTFT, s": spread("ttft_seconds", "max"),
        },
        holds=lambda f: f[0][0] < f[1][0] and f[0][1] > f[1][1],
    ),
    Study(
        policy="fastserve",
        hooks="order, preempt",
        claim="Short answers aren't held up by long ones although nobody knows which they are: the "
        "mean time to the end falls",
        workload="heavy-tails",
        rate=14,
        num_requests=600,
        options={"max_num_seqs": 8},
        sides=(Side("fastserve", fastserve.SkipJoinMLFQ), FCFS),
        figures={
            "mean end to end, s": spread("e2e_seconds", "mean"),
            "p50 TTFT, s": spread("ttft_seconds", "p50"),
            "preemptions": lambda m: m.preemptions,
        },
        holds=lambda f: f[0][0] < f[1][0] and f[0][1] < f[1][1],
    ),
    Study(
        policy="vtc",
        hooks="order",
        claim="The service of two tenants who both wait doesn't run apart, whatever they ask for",
        workload="tenants",
        rate=40,
        num_requests=800,
        options={"max_num_seqs": 32},
        sides=(Side("vtc", vtc.VirtualTokenCounter), FCFS),
        figures={"service gap, tokens": lambda m: float(m.service_gap_tokens or 0)},
        holds=lambda f: 2 * f[0][0] < f[1][0],
    ),
    Study(
        policy="srpt",
        hooks="order, preempt",
        claim="Short answers first cuts the mean time to the end, with forecasts that are often "
        "wrong by a factor of two or more by less",
        workload="heavy-tails",
        rate=14,
        num_requests=600,
        options={"max_num_seqs": 8},
        sides=(
            Side("srpt, oracle", srpt.ShortestRemaining, "oracle"),
            Side("srpt, noisy:1", srpt.ShortestRemaining, "noisy:1"),
            FCFS,
        ),
        figures={"mean end to end, s": spread("e2e_seconds", "mean")},
        holds=lambda f: f[0][0] < f[1][0] < f[2][0],
    ),
    Study(
        policy="andes",
        hooks="order, preempt",
        claim="Under pressure the first token comes sooner, and nobody reads slower than they can",
        workload="tenants",
        rate=14,
        num_requests=500,
        options={"max_num_seqs": 16, "num_host_pages": 4096},
        sides=(
            Side("andes", lambda: andes.QualityOfExperience(reading_seconds=READING_SECONDS)),
            FCFS,
        ),
        figures={
            "mean TTFT, s": spread("ttft_seconds", "mean"),
            "p99 TPOT, s": spread("tpot_seconds", "p99"),
        },
        holds=lambda f: f[0][0] < f[1][0] and f[0][1] < READING_SECONDS,
    ),
    Study(
        policy="past_future",
        hooks="reserve, finished",
        claim="Far fewer are preempted than without a reserve, at as many tokens a second",
        workload="tenants",
        rate=60,
        num_requests=800,
        options={"num_pages": 2400, "output_reserve_tokens": 0},
        sides=(
            Side("past_future", past_future.PastFuture),
            Side("fcfs, no reserve", lambda: PluginRegistry().policy("fcfs")),
        ),
        figures={
            "preemptions": lambda m: m.preemptions,
            "tokens/s": lambda m: m.output_tokens_per_second,
        },
        holds=lambda f: f[0][0] < 0.6 * f[1][0] and f[0][1] > 0.98 * f[1][1],
    ),
    Study(
        policy="priority",
        hooks="order, chunk, precedence, displaces, victim",
        claim="Who is urgent waits neither for those that wait nor for those that run",
        workload="tenants",
        rate=12,
        num_requests=400,
        options={"max_num_seqs": 16},
        urgent=URGENT,
        sides=(bundled("priority"), bundled("priority:preempt=false"), FCFS),
        figures={
            "p99 TTFT of the urgent, s": lambda m: _longest_waits(m.tenants[URGENT]),
            "preemptions": lambda m: m.preemptions,
        },
        holds=lambda f: 2 * f[0][0] < f[1][0] < 0.5 * f[2][0],
    ),
    Study(
        policy="deadline",
        hooks="order, admit, chunk",
        claim="Of requests with deadlines, more are served in time than in any order that knows of "
        "none",
        workload="bursts",
        rate=60,
        num_requests=500,
        targets={"ttft_target_seconds": 1.0, "tpot_target_seconds": 0.1},
        sides=(bundled("deadline"), bundled("shortest_first"), FCFS),
        figures={"share in time": lambda m: 0.0 if m.goodput is None else m.goodput.share},
        holds=lambda f: f[0][0] > max(f[1][0], f[2][0]),
    ),
)


def _longest_waits(tenant: GroupMetrics) -> float:
    return math.inf if tenant.ttft_seconds is None else tenant.ttft_seconds.p99


def found(study: Study, seed: int) -> Finding:
    """Return each side's figures on the study's workload."""
    trace = synthetic_trace(study.workload, study.num_requests, rate=study.rate, seed=seed)
    trace = with_targets(trace, **study.targets)
    trace = [
        msgspec.structs.replace(request, priority=-int(request.tenant == study.urgent))
        for request in trace
    ]
    cost = RooflineCost(ModelShape.of(read_model("llama-3-8b")), hardware_preset("h100"))
    rows: list[tuple[float, ...]] = []
    for side in study.sides:
        requests = trace
        if side.predictor is not None:
            requests = with_predictions(trace, side.predictor, seed=seed)
        options = {"num_pages": 30_000, "max_tokens": 4096, **study.options}
        result = simulate(requests, side.make(), cost=cost, **options)
        metrics = metrics_of(result)
        if metrics.policy_faults:
            raise SystemExit(f"{side.name} had {metrics.policy_faults} faults")
        rows.append(tuple(figure(metrics) for figure in study.figures.values()))
    return Finding(study, tuple(rows))


def table(findings: Sequence[Finding]) -> str:
    """Return a table in Markdown: a row for each side of each study."""
    lines = [
        "| policy | asked | claim | figures here | the claim |",
        "| --- | --- | --- | --- | --- |",
    ]
    for finding in findings:
        study = finding.study
        sides = [
            f"{side.name}: "
            + ", ".join(
                f"{name} {value:,.4g}" for name, value in zip(study.figures, values, strict=True)
            )
            for side, values in zip(study.sides, finding.figures, strict=True)
        ]
        verdict = "holds" if finding.holds else "does not hold"
        cells = (f"`{study.policy}`", study.hooks, study.claim, "<br>".join(sides), verdict)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    names = [study.policy for study in STUDIES]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("policies", nargs="*", metavar="POLICY", help=f"of {', '.join(names)}")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if unknown := set(arguments.policies).difference(names):
        parser.error(f"no policy {', '.join(sorted(unknown))}; there are: {', '.join(names)}")
    chosen = [s for s in STUDIES if not arguments.policies or s.policy in arguments.policies]
    print(table([found(study, arguments.seed) for study in chosen]))


if __name__ == "__main__":
    main()
