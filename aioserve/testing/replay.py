"""One policy on one trace, in a test: what `aioserve simulate` does on the command line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aioserve.capacity.hardware import hardware_preset
from aioserve.capacity.models import ModelShape, read_model
from aioserve.errors import TraceError
from aioserve.isolation import shown
from aioserve.kv.eviction import EvictionStrategy
from aioserve.plugins import PluginRegistry, check_policy_object
from aioserve.scheduling.policy import SchedulingPolicy
from aioserve.simulation.cost import CostModel, RooflineCost
from aioserve.simulation.metrics import Metrics, Targets, metrics_of
from aioserve.simulation.simulator import simulate
from aioserve.traces.formats import read_trace
from aioserve.traces.request import TraceRequest
from aioserve.traces.synthetic import WORKLOADS, synthetic_trace

__all__ = ["replay"]


def replay(
    trace: str | Path | Sequence[TraceRequest],
    policy: str | SchedulingPolicy,
    *,
    cost: CostModel | None = None,
    num_pages: int | None = None,
    ttft_target_seconds: float | None = None,
    tpot_target_seconds: float | None = None,
    eviction: str | EvictionStrategy = "lru",
    **options: Any,
) -> Metrics:
    """Run a trace through the real scheduler on a virtual clock and measure it.

    trace: a file of any format that `aioserve simulate` reads, the name of one of its made-up
        workloads, or requests.
    policy: a fresh policy object, or the name of one that is installed, options behind it.
    cost: how long a step takes; a Llama 3 8B on one H100 unless given.
    num_pages: pages of KV memory; None is memory without a limit.
    eviction: a strategy object, or the name of a strategy that is native or installed.
    options: `page_size`, `max_num_seqs` and the others of `aioserve.simulation.simulator.simulate`.

    With a target, which the policy sees of every request, the metrics have a goodput. Raises
    `TraceError` and `ConfigError`.
    """
    if cost is None:
        cost = RooflineCost(ModelShape.of(read_model("llama-3-8b")), hardware_preset("h100"))
    if isinstance(policy, str):
        policy = PluginRegistry().policy(str.__str__(policy))
    else:
        policy = check_policy_object(policy)
    result = simulate(
        _requests(trace),
        policy,
        cost=cost,
        num_pages=num_pages,
        ttft_target_seconds=ttft_target_seconds,
        tpot_target_seconds=tpot_target_seconds,
        eviction=PluginRegistry().eviction(str.__str__(eviction))
        if isinstance(eviction, str)
        else eviction,
        **options,
    )
    if ttft_target_seconds is None and tpot_target_seconds is None:
        return metrics_of(result)
    targets = Targets(ttft_seconds=ttft_target_seconds, tpot_seconds=tpot_target_seconds)
    return metrics_of(result, targets)


def _requests(trace: str | Path | Sequence[TraceRequest]) -> Sequence[TraceRequest]:
    if isinstance(trace, Path):
        return read_trace(trace)
    if not isinstance(trace, str):
        return trace
    name = str.__str__(trace)
    if name in WORKLOADS:
        return synthetic_trace(name)
    if not os.path.exists(name):
        raise TraceError(
            f"no trace file {shown(name)}, and no made-up workload of that name; there are: "
            f"{', '.join(WORKLOADS)}"
        )
    return read_trace(name)
