"""An engine's numbers as Prometheus reads them, taken from `Engine.stats` when it asks.

The last are those of the Model Server Protocol (kubernetes-sigs/gateway-api-inference-extension,
docs/proposals/003-model-server-protocol), under the names that its endpoint picker reads unless it
is told otherwise: those of vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

import aioserve
from aioserve.engine.stats import EngineStats
from aioserve.errors import EngineClosedError
from aioserve.server.app_state import AppState

__all__ = ["EngineCollector"]

STATES = ("free", "fenced", "cached", "held_by_requests")
GAUGES = {
    "sequences_running": ("num_running", "Sequences with pages, one for each sample of a request"),
    "requests_waiting": ("num_waiting", "Requests that wait to start, and preempted sequences"),
    "kv_pages_capacity": ("pages_total", "Pages of the KV cache"),
    "kv_host_pages_capacity": ("pages_host_total", "Pages of the host pool"),
    "kv_host_pages_used": ("pages_host_used", "Pages of the host pool that are in use"),
    "step_age_seconds": (
        "step_age_seconds",
        "While work is pending, time since the last step ended; 0 when idle",
    ),
    "loop_lag_seconds": (
        "loop_lag_seconds",
        "Longest recent delay between the end of a step and the event loop hearing of it",
    ),
}
COUNTERS = {
    "prefilled_tokens": ("tokens_prefilled_total", "Prompt tokens computed"),
    "cached_tokens": ("tokens_cached_total", "Prompt tokens taken from the prefix cache"),
    "generated_tokens": ("tokens_generated_total", "Tokens generated"),
    "preemptions": ("preemptions_total", "Sequences that gave their pages back"),
    "kv_pages_copied": ("pages_copied_total", "Pages copied on the device"),
    "kv_pages_swapped_out": ("pages_swapped_out_total", "Pages copied to the host pool"),
    "kv_pages_swapped_in": ("pages_swapped_in_total", "Pages copied back"),
    "steps": ("steps_total", "Engine steps"),
    "step_seconds": ("step_seconds_total", "Time in which a step was in flight"),
    "planning_seconds": ("planning_seconds_total", "Event loop time spent planning steps"),
    "commit_seconds": ("commit_seconds_total", "Event loop time spent taking in outcomes"),
    "delivery_seconds": ("delivery_seconds_total", "Event loop time spent handing out tokens"),
    "policy_faults": ("policy_faults_total", "Steps in which the scheduling policy failed"),
}


class EngineCollector(Collector):
    """Shows nothing of an engine that was never entered."""

    def __init__(self, app_state: AppState) -> None:
        self._app_state = app_state
        self._engine = app_state.engine

    def describe(self) -> list[Metric]:
        return []  # registering an engine must not ask it, which may not be entered yet

    def collect(self) -> Iterator[Metric]:
        try:
            stats, limits = self._engine.stats(), self._engine.limits
            model = self._app_state.own_name
        except EngineClosedError:
            return
        yield _labelled(
            "aioserve_info", "What is served", version=aioserve.__version__, model=model
        )
        length = "aioserve_max_model_len_tokens"
        yield GaugeMetricFamily(
            length, "Most tokens of a prompt and its answer", limits.max_model_len
        )
        for name, (field, what) in GAUGES.items():
            yield GaugeMetricFamily(f"aioserve_{name}", what, getattr(stats, field))
        for name, (field, what) in COUNTERS.items():
            yield CounterMetricFamily(f"aioserve_{name}", what, getattr(stats, field))
        pages = GaugeMetricFamily("aioserve_kv_pages", "Pages by state", labels=["state"])
        for state in STATES:
            pages.add_metric([state], getattr(stats, f"pages_{state}"))
        yield pages
        use, hits = _use_ratio(stats), _hit_ratio(stats)
        used = "Share of pages that requests hold or a step may still touch, in 0 to 1"
        yield GaugeMetricFamily("aioserve_kv_use_ratio", used, use)
        found = "Share of prompt tokens that came from the prefix cache since the start, in 0 to 1"
        yield GaugeMetricFamily("aioserve_prefix_hit_ratio", found, hits)
        waiting, running = "vllm:num_requests_waiting", "vllm:num_requests_running"
        yield GaugeMetricFamily(waiting, "TotalQueuedRequests", stats.num_waiting)
        yield GaugeMetricFamily(running, "TotalRunningRequests", stats.num_running)
        yield GaugeMetricFamily("vllm:kv_cache_usage_perc", "KVCacheUtilization, in 0 to 1", use)
        yield _labelled(
            "vllm:cache_config_info",
            "BlockSize and NumGPUBlocks",
            block_size=str(self._engine.config.page_size),
            num_gpu_blocks=str(stats.pages_total),
        )


def _labelled(name: str, what: str, **labels: str) -> Metric:
    family = GaugeMetricFamily(name, what, labels=list(labels))
    family.add_metric(list(labels.values()), 1)
    return family


def _use_ratio(stats: EngineStats) -> float:
    """Cached pages that nobody holds are given to whoever needs them: they count as free."""
    used = stats.pages_held_by_requests + stats.pages_fenced
    return used / stats.pages_total if stats.pages_total else 0.0


def _hit_ratio(stats: EngineStats) -> float:
    tokens = stats.tokens_cached_total + stats.tokens_prefilled_total
    return stats.tokens_cached_total / tokens if tokens else 0.0
