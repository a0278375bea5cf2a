"""Metrics at `/metrics`, for Prometheus, with a registry for each app.

Each scrape reads gauges and counters of the engine from `Engine.stats`. An observer of the engine
feeds histograms as requests end, so that requests of the surrounding program count too. Labels have
few values: no text of clients becomes one.

The last numbers of the engine are those of the Model Server Protocol
(kubernetes-sigs/gateway-api-inference-extension, docs/proposals/003-model-server-protocol). They
have vLLM's names, which its endpoint picker reads by default.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

import aioserve
from aioserve import Observer, RequestSummary
from aioserve.engine.stats import EngineStats
from aioserve.errors import EngineClosedError
from aioserve.server.app_state import AppState
from aioserve.server.call_log import CallLog
from aioserve.server.chat_parts.unknown_fields import PLACES
from aioserve.server.middleware import Listener
from aioserve.server.vllm_metrics import (
    GapHistogram,
    VllmCollector,
    labelled,
    protocol_gauges,
    use_ratio,
)
from aioserve.timings import GAP_BOUNDS_SECONDS

__all__ = ["EngineCollector", "Metrics"]

STATES = ("free", "fenced", "cached", "held_by_requests")
GAUGES = {
    "sequences_running": ("num_running", "Sequences with pages, one for each sample of a request"),
    "requests_waiting": ("num_waiting", "Requests that wait to start, and preempted sequences"),
    "kv_pages_capacity": ("pages_total", "Pages of the KV cache, of all groups of layers"),
    "kv_host_pages_capacity": ("pages_host_total", "Pages of the host pool"),
    "kv_host_pages_used": ("pages_host_used", "Pages of the host pool that are in use"),
    "tokens_per_step": ("tokens_per_step", "Mean number of tokens that a step computes"),
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
OPTIONAL_GAUGES = {
    "kv_fill_ratio": (
        "fill_ratio",
        "Share of the page capacity of requests that holds tokens, in 0 to 1; absent without any",
    ),
    "request_latency_mean_seconds": (
        "latency_mean_seconds",
        "Mean time from submission to the end, of the last 512 requests",
    ),
    "request_latency_variance_square_seconds": (
        "latency_variance_square_seconds",
        "Variance of the time from submission to the end, of the last 512 requests",
    ),
    "service_gap_seconds": (
        "service_gap_seconds",
        "Largest difference in device seconds between two tenants, of open requests and the last "
        "512; absent with fewer than two tenants",
    ),
}
"""Gauges that are absent while their number is None."""
PHASES = ("prefill", "decode")
PHASE_COUNTERS = {
    "phase_tokens": ("tokens_total", "Tokens computed, by phase"),
    "phase_seconds": ("seconds_total", "Seconds of steps, shared by their tokens, by phase"),
    "phase_flops": ("flops_total", "Operations that the model's sizes ask for, by phase"),
    "phase_bytes": ("bytes_total", "Bytes that the model's sizes make steps move, by phase"),
}
PHASE_GAUGES = {
    "compute_use_ratio": ("compute_use", "Operations a second over peak_flops_per_second"),
    "bandwidth_use_ratio": ("bandwidth_use", "Bytes a second over peak_bytes_per_second"),
}
"""Numbers of each phase, absent while they are None."""
DRAFT_TOKENS = {
    "drafted_tokens": ("tokens_drafted_total", "Draft tokens that steps verified"),
    "accepted_draft_tokens": ("tokens_accepted_total", "Draft tokens among them that were right"),
}
"""Counters of engines with speculation. Labels are the drafter's name and the position of a draft
token after the last token of its sequence, from 0."""


class EngineCollector(Collector):
    """Collector of the engine's numbers. It yields nothing for an engine that was never entered."""

    def __init__(self, app_state: AppState) -> None:
        self._app_state = app_state
        self._engine = app_state.engine

    def describe(self) -> list[Metric]:
        return []  # registration can't query the engine, which may not be entered yet

    def collect(self) -> Iterator[Metric]:
        try:
            stats, limits = self._engine.stats(), self._engine.facts.limits
            model = self._app_state.own_name
        except EngineClosedError:
            return
        about = {"version": aioserve.__version__, "model": model}
        yield labelled("aioserve_info", "What is served", about)
        length = "aioserve_max_model_len_tokens"
        yield GaugeMetricFamily(
            length, "Most tokens of a prompt and its answer", limits.max_model_len
        )
        for name, (field, what) in GAUGES.items():
            yield GaugeMetricFamily(f"aioserve_{name}", what, getattr(stats, field))
        for name, (field, what) in COUNTERS.items():
            yield CounterMetricFamily(f"aioserve_{name}", what, getattr(stats, field))
        for name, (field, what) in OPTIONAL_GAUGES.items():
            gauge = GaugeMetricFamily(f"aioserve_{name}", what, labels=())
            if (number := getattr(stats, field)) is not None:
                gauge.add_metric((), number)
            yield gauge
        yield from _phases(stats)
        ended = CounterMetricFamily(
            "aioserve_requests_finished",
            "Requests that have ended, those that admission plugins refused included",
            labels=["finish_reason"],
        )
        for reason, count in stats.requests_finished_total.items():
            ended.add_metric([reason], count)
        yield ended
        if (speculation := self._engine.config.speculation) is not None:
            yield from _draft_counts(stats, speculation.drafter_name)
        pages = GaugeMetricFamily("aioserve_kv_pages", "Pages by state", labels=["state"])
        for state in STATES:
            pages.add_metric([state], getattr(stats, f"pages_{state}"))
        yield pages
        used = "Share of pages that requests hold or a step may still touch, in 0 to 1"
        yield GaugeMetricFamily("aioserve_kv_use_ratio", used, use_ratio(stats))
        found = "Share of prompt tokens that came from the prefix cache since the start, in 0 to 1"
        yield GaugeMetricFamily("aioserve_prefix_hit_ratio", found, _hit_ratio(stats))
        if self._app_state.settings.metrics_names == "aioserve":
            yield from protocol_gauges(self._engine, stats)


def _phases(stats: EngineStats) -> Iterator[Metric]:
    work = {phase: getattr(stats, phase) for phase in PHASES}
    for kind, names in (
        (CounterMetricFamily, PHASE_COUNTERS),
        (GaugeMetricFamily, PHASE_GAUGES),
    ):
        for name, (field, what) in names.items():
            family = kind(f"aioserve_{name}", what, labels=["phase"])
            for phase, done in work.items():
                if (number := getattr(done, field)) is not None:
                    family.add_metric([phase], number)
            yield family


def _draft_counts(stats: EngineStats, drafter: str) -> Iterator[Metric]:
    for name, (field, what) in DRAFT_TOKENS.items():
        family = CounterMetricFamily(f"aioserve_{name}", what, labels=["drafter", "position"])
        for position, count in enumerate(getattr(stats, field)):
            family.add_metric([drafter, str(position)], count)
        yield family
    faults = "Calls in which the drafter failed"
    yield CounterMetricFamily("aioserve_drafter_faults", faults, stats.drafter_faults_total)


def _hit_ratio(stats: EngineStats) -> float:
    tokens = stats.tokens_cached_total + stats.tokens_prefilled_total
    return stats.tokens_cached_total / tokens if tokens else 0.0


FIRST_TOKEN_SECONDS = (
    *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20),
    *(40, 80, 160),
)
TOTAL_SECONDS = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 960)
NUM_TOKENS = tuple(2**power for power in range(18))
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("Until the first token", FIRST_TOKEN_SECONDS),
    "inter_token_seconds": ("Mean time between two tokens of one request", GAP_BOUNDS_SECONDS),
    "inter_token_p99_seconds": (
        "99 % of the times between two tokens of one request are no longer",
        GAP_BOUNDS_SECONDS,
    ),
    "seconds": ("Until the end", TOTAL_SECONDS),
    "decode_seconds": ("From its first token to its end", TOTAL_SECONDS),
    "inference_seconds": ("From its first step to its end", TOTAL_SECONDS),
    "queue_seconds": ("Until its first step", TOTAL_SECONDS),
    "prefill_seconds": ("From its first step to its first token", FIRST_TOKEN_SECONDS),
    "prompt_tokens": ("Tokens of the prompt", NUM_TOKENS),
    "generated_tokens": ("Tokens generated, of all samples together", NUM_TOKENS),
}
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})


class Metrics(Listener, Observer):
    """Counts of calls and of the engine's requests, and the ASGI app that shows them. Only names in
    `tenants` become labels; all others are counted together, as ""."""

    def __init__(self, app_state: AppState, tenants: Collection[str]) -> None:
        shown = CollectorRegistry()
        names = app_state.settings.metrics_names
        registry = None if names == "vllm" else shown
        """Registry of the metrics with our own names."""
        if registry is not None:
            registry.register(EngineCollector(app_state))
        ProcessCollector(registry=shown)
        self.registry: Collector = shown
        self._http_requests = Counter(
            "aioserve_http_requests",
            "Requests over HTTP that have ended; status is 499 where the client left before the "
            "answer began",
            ["route", "method", "status"],
            registry=registry,
        )
        in_flight = Gauge(
            "aioserve_http_requests_in_flight",
            "Requests over HTTP that haven't ended",
            registry=registry,
        )
        in_flight.set_function(lambda: app_state.calls.num_requests)
        self._dropped = Counter(
            "aioserve_dropped_message_fields",
            "Unknown fields of messages that clients carried back, by where they were",
            ["place"],
            registry=registry,
        )
        for place in PLACES:
            self._dropped.labels(place)
        self._hints = Counter(
            "aioserve_let_through_fields",
            "Fields of bodies that were let through and change nothing here, by their names",
            ["field"],
            registry=registry,
        )
        self._tenants = frozenset(tenants)
        self._ended = Counter(
            "aioserve_requests",
            "Requests to the engine that have ended",
            ["finish_reason", "tenant"],
            registry=registry,
        )
        self._tokens = Counter(
            "aioserve_request_tokens",
            "Tokens of requests that have ended; of prompt tokens, cached ones are a part",
            ["kind", "tenant"],
            registry=registry,
        )
        self._histograms = {
            name: Histogram(f"aioserve_request_{name}", what, buckets=buckets, registry=registry)
            for name, (what, buckets) in HISTOGRAMS.items()
        }
        self._gaps = GapHistogram()
        if registry is not None:
            registry.register(self._gaps)
        if names != "aioserve":
            shown.register(VllmCollector(app_state, self._histograms, self._ended, self._gaps))

    def ended(self, call_log: CallLog) -> None:
        method = call_log.method if call_log.method in METHODS else "other"
        self._http_requests.labels(call_log.route or "", method, call_log.status or 499).inc()
        for place, count in call_log.dropped.items():
            self._dropped.labels(place).inc(count)
        for field, count in call_log.hints.items():
            self._hints.labels(field).inc(count)

    def finished(self, requests: Sequence[RequestSummary]) -> None:
        for request in requests:
            self._count(request)

    def _count(self, request: RequestSummary) -> None:
        tenant = request.tenant if request.tenant in self._tenants else ""
        self._ended.labels(str(request.finish_reason), tenant).inc()
        for kind, tokens in (
            ("prompt", request.prompt_tokens),
            ("cached", request.cached_tokens),
            ("generated", request.completion_tokens),
        ):
            self._tokens.labels(kind, tenant).inc(tokens)
        queued, first = request.queued_seconds, request.first_token_seconds
        gaps = request.inter_token_latency
        values = {
            "time_to_first_token_seconds": first,
            "inter_token_seconds": None if gaps is None else gaps.mean_seconds,
            "inter_token_p99_seconds": None if gaps is None else gaps.p99_seconds,
            "seconds": request.total_seconds,
            "decode_seconds": None if first is None else request.total_seconds - first,
            "inference_seconds": None if queued is None else request.total_seconds - queued,
            "queue_seconds": queued,
            "prefill_seconds": None if first is None or queued is None else first - queued,
            "prompt_tokens": request.prompt_tokens,
            "generated_tokens": request.completion_tokens,
        }
        for name, value in values.items():
            if value is not None:
                self._histograms[name].observe(value)
        if gaps is not None:
            self._gaps.count(gaps)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        accept = next((value for name, value in scope["headers"] if name == b"accept"), b"")
        encode, content_type = _encoder(accept.decode("latin-1"))
        quiet = {"cache-control": "no-store"}
        answer = Response(encode(self.registry), media_type=content_type, headers=quiet)
        await answer(scope, receive, send)


def _encoder(accept: str) -> tuple[Callable[[Collector], bytes], str]:
    """Encoder and content type for the `Accept` header.

    Every Prometheus reads all names here. But prometheus_client 0.26 replaces colons of some
    samples by underscores in OpenMetrics, unless any name is allowed.
    """
    encode, content_type = choose_encoder(accept)
    if content_type.startswith("application/openmetrics-text"):
        encode, _ = choose_encoder(OPENMETRICS + "; escaping=allow-utf-8")
        content_type = OPENMETRICS + "; charset=utf-8"
    return encode, content_type
