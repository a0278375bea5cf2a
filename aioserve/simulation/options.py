"""Checks options of the simulator and its trace before anything is simulated."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any, get_args

from aioserve.arguments import counted
from aioserve.config import MAX_BATCHED_TOKENS, MAX_COUNT, MAX_SEQS, Preemption
from aioserve.errors import ConfigError, TraceError
from aioserve.isolation import shown
from aioserve.kv.eviction import EvictionStrategy, StrategyCalls
from aioserve.kv.pages import pages_for
from aioserve.kv.prefix_tree import EVICTION_STRATEGIES
from aioserve.scheduling.policy import SchedulingPolicy
from aioserve.simulation.records import recorded_length
from aioserve.simulation.timeline import Timeline
from aioserve.traces.checks import check_int, check_number, named
from aioserve.traces.request import MAX_REQUESTS, TraceRequest, check_request

__all__ = [
    "check_counts",
    "check_eviction",
    "check_flags",
    "check_host",
    "check_objects",
    "check_targets",
    "in_order",
    "large_pool",
    "pages_needed",
]

LEAST_UNBOUNDED_PAGES = 1 << 16
MAX_PAGES = 1 << 25
"""Most pages, of which each takes 17 bytes, and 4 for each of its tokens that is cached."""
MAX_TARGET_SECONDS = 1e9
LIMITS = {
    "num_pages": (1, MAX_PAGES),
    "page_size": (1, 1 << 16),
    "max_num_seqs": (1, MAX_SEQS),
    "max_num_batched_tokens": (1, MAX_BATCHED_TOKENS),
    "output_reserve_tokens": (0, MAX_COUNT),
    "max_tokens": (1, MAX_COUNT),
    "max_model_len": (2, MAX_COUNT),
    "num_host_pages": (0, MAX_PAGES),
}
MAY_BE_NONE = ("num_pages", "max_tokens", "max_model_len")


def check_counts(**counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None or name not in MAY_BE_NONE:
            check_int(name, value, *LIMITS[name])


def check_targets(ttft_target_seconds: float | None, tpot_target_seconds: float | None) -> None:
    if ttft_target_seconds is not None:
        check_number("ttft_target_seconds", ttft_target_seconds, MAX_TARGET_SECONDS)
    if tpot_target_seconds is not None:
        check_number("tpot_target_seconds", tpot_target_seconds, MAX_TARGET_SECONDS)


def check_objects(policy: Any, cost: Any, timeline: Any, on_progress: Any) -> None:
    with named("simulate"):
        if not isinstance(policy, SchedulingPolicy):
            raise ConfigError(f"policy must be a SchedulingPolicy, got {shown(policy)}")
        if isinstance(cost, type) or not callable(getattr(cost, "step_seconds", None)):
            raise ConfigError(f"cost must have a method step_seconds, got {shown(cost)}")
        if timeline is not None and (not isinstance(timeline, Timeline) or len(timeline)):
            raise ConfigError(f"timeline must be an empty Timeline, got {shown(timeline)}")
        if on_progress is not None and not callable(on_progress):
            raise ConfigError(f"on_progress must be callable, got {shown(on_progress)}")


def check_flags(**flags: Any) -> None:
    for name, value in flags.items():
        if type(value) is not bool:
            raise ConfigError(f"{name} must be a bool, got {shown(value)}")


def check_host(
    num_host_pages: int, preemption: Any, prefix_caching: bool, num_pages: int | None
) -> None:
    """Raise for a kind of preemption that is none or has nowhere to copy to, and for memory of the
    host that nothing is ever copied to."""
    if type(preemption) is not str or preemption not in get_args(Preemption):
        known = ", ".join(get_args(Preemption))
        raise ConfigError(f"preemption must be one of {known}, got {shown(preemption)}")
    if num_host_pages == 0:
        if preemption == "swap":
            raise ConfigError("preemption='swap' needs num_host_pages of at least 1, got 0")
        return
    idle = "without a limit of pages" if num_pages is None else None
    if not prefix_caching and preemption == "recompute":
        idle = "with prefix_caching=False and preemption='recompute'"
    if idle is not None:
        raise ConfigError(
            f"num_host_pages={num_host_pages} has no effect {idle}: nothing is ever copied to the "
            "host, so leave one of them out"
        )


def check_eviction(eviction: Any, prefix_caching: Any, num_pages: int | None) -> None:
    """Raise for what is no eviction strategy, and for one that has nothing to decide."""
    with named("eviction"):
        if type(eviction) is str:
            if eviction not in EVICTION_STRATEGIES:
                known = ", ".join(EVICTION_STRATEGIES)
                raise ConfigError(f"eviction must be one of {known}, got {shown(eviction)}")
        elif isinstance(eviction, type | str) or not isinstance(
            eviction, StrategyCalls | EvictionStrategy
        ):
            raise ConfigError(
                f"eviction must be a name or have a method key, got {shown(eviction)}"
            )
    if eviction == "lru":
        return
    idle = "without a limit of pages: none is ever evicted" if num_pages is None else None
    if not prefix_caching:
        idle = "with prefix_caching=False: no page is cached"
    if idle is not None:
        name = eviction.label if isinstance(eviction, StrategyCalls) else shown(eviction)
        raise ConfigError(f"eviction={name} has no effect {idle}, so leave one of them out")


def in_order(trace: Iterable[TraceRequest]) -> list[TraceRequest]:
    """Requests by arrival. Raises `TraceError` for what is no trace."""
    numbers: set[int] = set()
    ordered: list[TraceRequest] = []
    with named("trace", TraceError):
        for request in trace:
            place = f"trace[{len(ordered)}]"
            if len(ordered) == MAX_REQUESTS:
                raise TraceError(f"a trace may have at most {MAX_REQUESTS:,} requests")
            check_request(place, request)
            # What is of a request alone is made of its number.
            if request.number in numbers:
                raise TraceError(f"{place}: another request has the number {request.number}")
            numbers.add(request.number)
            ordered.append(request)
    return sorted(ordered, key=attrgetter("arrival_seconds"))


def pages_needed(trace: list[TraceRequest], page_size: int) -> int:
    """Number of pages that could ever be needed."""
    needed = 1 + sum(pages_for(recorded_length(request), page_size) for request in trace)
    if needed > MAX_PAGES:
        raise ConfigError(
            f"num_pages=None: without a limit the trace could need {needed} pages of "
            f"{counted(page_size, 'token')}, and at most {MAX_PAGES} can be simulated: give a "
            "limit, or larger pages"
        )
    return needed


def large_pool(needed: int) -> int:
    """Number of pages of a pool that is large enough. Policies see it, so it is a round number,
    which tells no more of the completions than their order of magnitude."""
    return max(LEAST_UNBOUNDED_PAGES, 1 << (needed - 1).bit_length())
