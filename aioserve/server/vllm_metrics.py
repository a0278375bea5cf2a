"""Numbers of `/metrics` under vLLM's names, so that dashboards made for vLLM show this server.

The engine counts all of them anyway. Names without a number here, like those of adapters, are left
out: their panels stay empty, and show nothing false.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import Counter, Histogram, Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

from aioserve.engine.interface import EngineLike
from aioserve.engine.stats import EngineStats
from aioserve.errors import EngineClosedError
from aioserve.request import FinishReason
from aioserve.server.app_state import AppState
from aioserve.timings import GAP_BOUNDS_SECONDS, InterTokenLatency

__all__ = ["GapHistogram", "VllmCollector", "labelled", "protocol_gauges", "use_ratio"]

HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": "time_to_first_token_seconds",
    "vllm:request_time_per_output_token_seconds": "inter_token_seconds",
    "vllm:e2e_request_latency_seconds": "seconds",
    "vllm:request_queue_time_seconds": "queue_seconds",
    "vllm:request_prefill_time_seconds": "prefill_seconds",
    "vllm:request_decode_time_seconds": "decode_seconds",
    "vllm:request_inference_time_seconds": "inference_seconds",
    "vllm:request_prompt_tokens": "prompt_tokens",
    "vllm:request_generation_tokens": "generated_tokens",
}
"""Histograms of requests: vLLM's names, and the names in `Metrics`."""
GAPS = ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")
"""Times between tokens: the current name, and the one before."""


class GapHistogram(Collector):
    """Histogram of the times between two tokens of one sample, over all requests that have
    ended."""

    def __init__(self) -> None:
        self._counts = [0] * len(GAP_BOUNDS_SECONDS)
        self._count = 0
        self._sum_seconds = 0.0

    def count(self, gaps: InterTokenLatency) -> None:
        """Add the times of one request."""
        self._counts = [a + b for a, b in zip(self._counts, gaps.counts, strict=True)]
        self._count += gaps.count
        self._sum_seconds += gaps.mean_seconds * gaps.count

    def add_to(self, family: HistogramMetricFamily, labels: list[str]) -> None:
        """Add the histogram to a family, with these values of its labels."""
        bounds = [str(bound) for bound in GAP_BOUNDS_SECONDS]
        buckets = [*zip(bounds, self._counts, strict=True), ("+Inf", self._count)]
        family.add_metric(labels, buckets=buckets, sum_value=self._sum_seconds)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        what = "Times between two tokens of one sample, of requests that have ended"
        family = HistogramMetricFamily("aioserve_token_gap_seconds", what)
        self.add_to(family, [])
        yield family


class VllmCollector(Collector):
    """Collector of numbers with vLLM's names. It yields nothing for an engine that was never
    entered."""

    def __init__(
        self,
        app_state: AppState,
        histograms: Mapping[str, Histogram],
        ended: Counter,
        gaps: GapHistogram,
    ) -> None:
        """`histograms` have their names without prefix as keys. `ended` counts requests by
        reason."""
        self._app_state = app_state
        self._engine = app_state.engine
        self._histograms = histograms
        self._ended = ended
        self._gaps = gaps

    def describe(self) -> list[Metric]:
        return []  # registration can't query the engine, which may not be entered yet

    def collect(self) -> Iterator[Metric]:
        try:
            stats, model = self._engine.stats(), self._app_state.model_names[0]
        except EngineClosedError:
            return
        labels = {"model_name": model, "engine": "0"}
        yield from protocol_gauges(self._engine, stats, labels)
        yield from _counters(stats, labels)
        yield self._success(labels)
        for name, own in HISTOGRAMS.items():
            yield from _renamed(self._histograms[own], name, labels)
        for name in GAPS:
            family = HistogramMetricFamily(name, "Times between two tokens", labels=list(labels))
            self._gaps.add_to(family, list(labels.values()))
            yield family

    def _success(self, labels: Mapping[str, str]) -> Metric:
        """Number of ended requests by reason, of all tenants together."""
        counts = {str(reason): 0.0 for reason in FinishReason}
        for metric in self._ended.collect():
            for sample in metric.samples:
                if sample.name.endswith("_total"):
                    counts[sample.labels["finish_reason"]] += sample.value
        family = CounterMetricFamily(
            "vllm:request_success",
            "Requests that have ended",
            labels=[*labels, "finished_reason"],
        )
        for reason, count in counts.items():
            family.add_metric([*labels.values(), reason], count)
        return family


def protocol_gauges(
    engine: EngineLike, stats: EngineStats, labels: Mapping[str, str] = {}
) -> Iterator[Metric]:
    """Gauges of the Model Server Protocol, by which gateways choose a server."""
    for name, what, value in (
        ("vllm:num_requests_waiting", "TotalQueuedRequests", stats.num_waiting),
        ("vllm:num_requests_running", "TotalRunningRequests", stats.num_running),
        ("vllm:kv_cache_usage_perc", "KVCacheUtilization, in 0 to 1", use_ratio(stats)),
    ):
        yield labelled(name, what, labels, value)
    sizes = {"block_size": str(engine.config.page_size), "num_gpu_blocks": str(stats.pages_total)}
    yield labelled("vllm:cache_config_info", "BlockSize and NumGPUBlocks", {**labels, **sizes})


def _counters(stats: EngineStats, labels: Mapping[str, str]) -> Iterator[Metric]:
    prompt_tokens = stats.tokens_prefilled_total + stats.tokens_cached_total
    counts = {
        "prompt_tokens": ("Prompt tokens, cached ones included", prompt_tokens),
        "generation_tokens": ("Tokens generated", stats.tokens_generated_total),
        "num_preemptions": ("Sequences that gave their pages back", stats.preemptions_total),
        "prefix_cache_queries": ("Prompt tokens looked up", prompt_tokens),
        "prefix_cache_hits": ("Prompt tokens found there", stats.tokens_cached_total),
    }
    if stats.tokens_drafted_total:
        drafted, accepted = stats.tokens_drafted_total, stats.tokens_accepted_total
        counts |= {
            "spec_decode_num_drafts": ("Drafts", drafted[0]),
            "spec_decode_num_draft_tokens": ("Draft tokens", sum(drafted)),
            "spec_decode_num_accepted_tokens": ("Accepted draft tokens", sum(accepted)),
        }
        by_place = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by their place",
            labels=[*labels, "position"],
        )
        for place, count in enumerate(accepted):
            by_place.add_metric([*labels.values(), str(place)], count)
        yield by_place
    for name, (what, count) in counts.items():
        family = CounterMetricFamily(f"vllm:{name}", what, labels=list(labels))
        family.add_metric(list(labels.values()), count)
        yield family


def _renamed(histogram: Histogram, name: str, labels: Mapping[str, str]) -> Iterator[Metric]:
    for own in histogram.collect():
        renamed = Metric(name, own.documentation, own.type)
        for sample in own.samples:
            end = sample.name.removeprefix(own.name)
            if end != "_created":
                renamed.add_sample(name + end, {**labels, **sample.labels}, sample.value)
        yield renamed


def labelled(name: str, what: str, labels: Mapping[str, str], value: float = 1) -> Metric:
    """Gauge with one series of these labels."""
    family = GaugeMetricFamily(name, what, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def use_ratio(stats: EngineStats) -> float:
    """Share of pages, 0 to 1, that requests hold or a step may still touch. Cached pages that no
    request holds count as free: the next request that needs pages gets them."""
    used = stats.pages_held_by_requests + stats.pages_fenced
    return used / stats.pages_total if stats.pages_total else 0.0
