"""Longest prefix match first, with ageing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain

from aioserve import (
    ConfigError,
    PolicySpec,
    RequestView,
    SchedulerView,
    SchedulingPolicy,
    hookimpl,
)

__all__ = ["CacheAware"]


class CacheAware(SchedulingPolicy):
    """Starts first what the prefix cache serves best, before it is evicted.

    The rank is a response ratio (Brinch Hansen, 1971) in tokens of work, which counts what the
    cache saves as time already waited: `(cached + waited / patience) / uncached`. Once a request
    has waited for `patience` times its length, it goes before all that arrived later.

    A request that goes on like one ahead of it is moved behind the others: when its turn comes it
    finds that prefix in the cache. Only the `window` oldest are compared, since to know what is
    cached of a prompt means looking it up.

    Raises `ConfigError` for a `patience` that isn't positive and finite, or a `window` below 1.
    """

    def __init__(self, *, patience: float = 64.0, window: int = 64) -> None:
        if not isinstance(patience, int | float) or not 0 < patience < math.inf:
            raise ConfigError(f"patience must be positive and finite, got {patience!r}")
        if not isinstance(window, int) or window < 1:
            raise ConfigError(f"window must be an int of at least 1, got {window!r}")
        self.patience = patience
        self.window = window

    def starvation_bound_tokens(self, request: RequestView) -> int:
        return math.ceil(self.patience * _known_tokens(request))

    def order(self, waiting: Sequence[RequestView], view: SchedulerView) -> Iterable[RequestView]:
        overdue: list[RequestView] = []
        ranked: list[tuple[float, int, int, RequestView]] = []
        computed: set[bytes] = set()
        """Prefixes that those ahead will have computed."""
        for request in waiting[: self.window]:
            uncached = request.uncached_tokens
            cached = _known_tokens(request) - uncached
            waited = view.processed_tokens - request.arrival_processed_tokens
            if waited >= self.starvation_bound_tokens(request):
                overdue.append(request)
                computed.add(request.prefix_key(_next_page_end(cached, view)))
            else:
                ratio = (cached + waited / self.patience) / uncached
                ranked.append((-ratio, -cached, request.arrival_index, request))
        first: list[RequestView] = []
        deferred: list[RequestView] = []
        for _, minus_cached, _, request in sorted(ranked):
            end = _next_page_end(-minus_cached, view)
            key = request.prefix_key(end)
            shares = key in computed and end < _known_tokens(request)
            (deferred if shares else first).append(request)
            computed.add(key)
        return chain(overdue, first, deferred, waiting[self.window :])


def _known_tokens(request: RequestView) -> int:
    return request.prompt_tokens + request.generated_tokens


def _next_page_end(cached: int, view: SchedulerView) -> int:
    return (cached // view.page_size + 1) * view.page_size


@hookimpl
def aioserve_scheduling_policies() -> list[PolicySpec]:
    return [PolicySpec("cache_aware", CacheAware, "longest cached prefix first")]
