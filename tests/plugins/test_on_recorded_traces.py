"""Benefits of the bundled policies, on small made-up traces and on the recorded ones of
docs/reference/policies.md. These are not in the repository; without them their tests skip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aioserve.capacity.hardware import hardware_preset
from aioserve.capacity.models import ModelShape, read_model
from aioserve.plugins import PluginRegistry
from aioserve.simulation.metrics import Metrics, metrics_of
from aioserve.simulation.roofline import RooflineCost
from aioserve.simulation.simulator import simulate
from aioserve.traces.formats import read_trace
from aioserve.traces.trace_request import TraceRequest, at_rate
from aioserve.traces.workload import with_targets
from tests import made_up_traces

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
LLAMA_8B_PAGES_ON_H100 = 27_439

NOT_HERE = pytest.mark.skipif(not TRACES.is_dir(), reason="the recorded traces are not here")


def run(
    trace: Path | list[TraceRequest],
    policies: tuple[str, ...],
    *,
    rate: float | None = None,
    devices: int = 1,
    num_pages: int = LLAMA_8B_PAGES_ON_H100,
    targets: dict[str, float] | None = None,
) -> dict[str, Metrics]:
    requests = read_trace(trace) if isinstance(trace, Path) else trace
    if rate is not None:
        requests = at_rate(requests, rate)
    requests = with_targets(requests, **(targets or {}))
    hardware = hardware_preset("h100").times(devices)
    options: dict[str, Any] = {
        "cost": RooflineCost(ModelShape.of(read_model("llama-3-8b")), hardware),
        "num_pages": num_pages,
    }
    return {
        name: metrics_of(simulate(requests, PluginRegistry().policy(name), **options))
        for name in policies
    }


OTHERS = ("fcfs", "round_robin", "shortest_first", "cache_aware", "fair_share")


def misses_under_deadline_and_others(
    trace: Path | list[TraceRequest], rate: float, others: tuple[str, ...] = OTHERS
) -> tuple[float, float, float]:
    """Shares of requests that `deadline`, `deadline:reject=false` and the best of the others don't
    serve in time."""
    targets = {"ttft_target_seconds": 2.0, "tpot_target_seconds": 0.1}
    policies = (*others, "deadline", "deadline:reject=false")
    found = run(trace, policies, rate=rate, targets=targets)
    missed = {name: 1 - m.goodput.share for name, m in found.items() if m.goodput is not None}
    least = min(missed[name] for name in others)
    return missed["deadline"], missed["deadline:reject=false"], least


def test_deadline_has_the_best_goodput_on_made_up_bursts(tmp_path: Path) -> None:
    trace = made_up_traces.azure(tmp_path)
    rejecting, patient, least_of_others = misses_under_deadline_and_others(trace, rate=24)
    assert rejecting < patient < 0.6 * least_of_others


@pytest.mark.slow
@NOT_HERE
def test_deadline_has_the_best_goodput_on_bursts_of_code_completions() -> None:
    trace = TRACES / "azure2023_code.csv.gz"
    rejecting, patient, least_of_others = misses_under_deadline_and_others(trace, rate=8)
    assert max(rejecting, patient) < 0.7 * least_of_others


@pytest.mark.slow
@NOT_HERE
@pytest.mark.parametrize(
    ("half", "most"), [(0, 0.8), (1, 0.45)], ids=["its options were chosen by", "held out"]
)
def test_deadline_has_the_best_goodput_on_each_half_of_that_trace(half: int, most: float) -> None:
    requests = read_trace(TRACES / "azure2023_code.csv.gz")
    requests.sort(key=lambda request: request.arrival_seconds)
    middle = len(requests) // 2
    mine = requests[middle:] if half else requests[:middle]
    rejecting, patient, least_of_others = misses_under_deadline_and_others(
        mine, rate=8, others=("shortest_first",)
    )
    assert max(rejecting, patient) < most * least_of_others


def service_gaps(trace: Path) -> dict[str, float]:
    found = run(trace, ("fcfs", "fair_share", "fair_share:output_cost=1"), rate=250)
    return {name: m.service_gap_tokens for name, m in found.items() if m.service_gap_tokens}


def check_service_gaps(gaps: dict[str, float], longest_prompt: int) -> None:
    assert gaps["fair_share"] <= 2 * longest_prompt
    assert gaps["fair_share:output_cost=1"] <= 2 * longest_prompt
    assert gaps["fcfs"] > 4 * gaps["fair_share"]


def test_fair_share_bounds_how_far_a_made_up_tenant_gets_ahead(tmp_path: Path) -> None:
    trace = made_up_traces.servegen(tmp_path)
    longest_prompt = max(request.prompt_tokens for request in read_trace(trace))
    check_service_gaps(service_gaps(trace), longest_prompt)


@pytest.mark.slow
@NOT_HERE
def test_fair_share_bounds_how_far_one_tenant_gets_ahead_of_another() -> None:
    check_service_gaps(service_gaps(TRACES / "servegen_m_small.csv.gz"), longest_prompt=36_404)


def check_that_cache_aware_finds_more(found: dict[str, Metrics]) -> None:
    plain, mine = found["fcfs"], found["cache_aware"]
    assert plain.block_hit_share is not None
    assert mine.block_hit_share is not None
    assert plain.ttft_seconds is not None
    assert mine.ttft_seconds is not None
    assert mine.block_hit_share > plain.block_hit_share
    assert mine.ttft_seconds.p50 < 0.6 * plain.ttft_seconds.p50
    assert mine.ttft_seconds.p99 < 1.2 * plain.ttft_seconds.p99


def test_cache_aware_finds_more_than_fcfs_does_in_made_up_conversations(tmp_path: Path) -> None:
    trace = made_up_traces.mooncake(tmp_path)
    found = run(trace, ("fcfs", "cache_aware"), rate=4, num_pages=3000)
    check_that_cache_aware_finds_more(found)


@pytest.mark.slow
@NOT_HERE
def test_cache_aware_finds_more_than_fcfs_does_and_its_waits_are_shorter() -> None:
    trace = TRACES / "mooncake_conversation.jsonl.gz"
    found = run(trace, ("fcfs", "cache_aware"), devices=2, num_pages=407_512)
    check_that_cache_aware_finds_more(found)
