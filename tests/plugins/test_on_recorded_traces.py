"""What the bundled policies are for, on the recorded traces of docs/reference/policies.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aioserve.capacity.hardware import hardware_preset
from aioserve.capacity.models import ModelShape, read_model
from aioserve.plugins import PluginRegistry
from aioserve.simulation.cost import RooflineCost
from aioserve.simulation.metrics import Metrics, Targets, metrics_of
from aioserve.simulation.simulator import simulate
from aioserve.traces.formats import read_trace
from aioserve.traces.request import at_rate

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
LLAMA_8B_PAGES_ON_H100 = 27_439

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not TRACES.is_dir(), reason="the recorded traces are not here"),
]


def run(
    trace: str,
    policies: tuple[str, ...],
    *,
    rate: float | None = None,
    devices: int = 1,
    num_pages: int = LLAMA_8B_PAGES_ON_H100,
    targets: Targets | None = None,
) -> dict[str, Metrics]:
    requests = read_trace(TRACES / trace)
    if rate is not None:
        requests = at_rate(requests, rate)
    hardware = hardware_preset("h100").times(devices)
    options: dict[str, Any] = {
        "cost": RooflineCost(ModelShape.of(read_model("llama-3-8b")), hardware),
        "num_pages": num_pages,
    }
    if targets is not None:
        options["ttft_target_seconds"] = targets.ttft_seconds
        options["tpot_target_seconds"] = targets.tpot_seconds
    return {
        name: metrics_of(simulate(requests, PluginRegistry().policy(name), **options), targets)
        for name in policies
    }


def test_deadline_has_the_best_goodput_on_bursts_of_code_completions():
    others = ("fcfs", "round_robin", "shortest_first", "cache_aware", "fair_share")
    targets = Targets(ttft_seconds=2.0, tpot_seconds=0.1)
    policies = (*others, "deadline", "deadline:reject=false")
    found = run("azure2023_code.csv.gz", policies, rate=8, targets=targets)
    good = {name: m.goodput.share for name, m in found.items() if m.goodput is not None}
    best_of_others = max(good[name] for name in others)
    assert good["deadline"] > 1.3 * best_of_others
    assert good["deadline:reject=false"] > best_of_others


def test_fair_share_bounds_how_far_one_client_gets_ahead_of_another():
    found = run(
        "servegen_m_small.csv.gz", ("fcfs", "fair_share", "fair_share:output_cost=1"), rate=250
    )
    gaps = {name: m.service_gap_tokens for name, m in found.items() if m.service_gap_tokens}
    longest_prompt = 36_404
    assert gaps["fair_share"] <= 2 * longest_prompt
    assert gaps["fair_share:output_cost=1"] <= 2 * longest_prompt
    assert gaps["fcfs"] > 4 * gaps["fair_share"]


def test_cache_aware_finds_more_than_fcfs_does_and_its_waits_are_shorter():
    found = run(
        "mooncake_conversation.jsonl.gz", ("fcfs", "cache_aware"), devices=2, num_pages=407_512
    )
    plain, mine = found["fcfs"], found["cache_aware"]
    assert plain.block_hit_share is not None
    assert mine.block_hit_share is not None
    assert plain.ttft_seconds is not None
    assert mine.ttft_seconds is not None
    assert mine.block_hit_share > plain.block_hit_share
    assert mine.ttft_seconds.p50 < 0.6 * plain.ttft_seconds.p50
    assert mine.ttft_seconds.p99 < 1.2 * plain.ttft_seconds.p99
