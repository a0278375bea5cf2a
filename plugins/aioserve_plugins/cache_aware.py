"""Longest prefix match first, with ageing."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence

from aioserve import (
    ConfigError,
    PolicySpec,
    RequestView,
    SchedulerView,
    SchedulingPolicy,
    hookimpl,
)
from aioserve_plugins._waiting_prompts import Prefix, WaitingPrompt, WaitingPrompts

__all__ = ["CacheAware"]


class CacheAware(SchedulingPolicy):
    """Starts first what the prefix cache serves best, before it is evicted.

    The rank is a response ratio (Brinch Hansen, 1971) in tokens of work, which counts what the
    cache saves as time already waited: `(cached + waited / patience) / uncached`. Once a request
    has waited for `patience` times its length, it goes before all that arrived later.

    A request that goes on like one ahead of it is moved behind the others: when its turn comes it
    finds that prefix in the cache. All that wait are compared, by what was cached of them when they
    were looked up last; a step has `lookups` of these.

    Raises `ConfigError` for a `patience` that isn't positive and finite, or `lookups` below 1.
    """

    def __init__(self, *, patience: float = 1024.0, lookups: int = 64) -> None:
        if not isinstance(patience, int | float) or not 0 < patience < math.inf:
            raise ConfigError(f"patience must be positive and finite, got {patience!r}")
        if not isinstance(lookups, int) or lookups < 1:
            raise ConfigError(f"lookups must be an int of at least 1, got {lookups!r}")
        self.patience = patience
        self.lookups = lookups
        self._prompts = WaitingPrompts(lookups)

    def starvation_bound_tokens(self, request: RequestView) -> int:
        return math.ceil(self.patience * (request.prompt_tokens + request.generated_tokens))

    def order(self, waiting: Sequence[RequestView], view: SchedulerView) -> Iterator[RequestView]:
        now, patience = view.processed_tokens, self.patience
        computed: set[Prefix] = set()
        """Prefixes that those ahead will have computed."""
        ranked: list[tuple[float, int, int, WaitingPrompt]] = []
        for prompt in self._prompts.begin(waiting, view):
            waited = now - prompt.arrived
            if waited >= patience * prompt.tokens:
                self._prompts.look_up(prompt)
                computed.add(prompt.prefix)
                yield prompt.request
            else:
                cached = prompt.cached  # `_rank` without a call, as thousands may wait
                ratio = (cached + waited / patience) / (prompt.tokens - cached)
                ranked.append((-ratio, -cached, prompt.index, prompt))
        heapq.heapify(ranked)
        deferred: list[RequestView] = []
        while ranked:
            prompt = ranked[0][-1]
            self._prompts.look_up(prompt)
            entry = _rank(prompt, (now - prompt.arrived) / patience)
            if entry > ranked[0]:  # less is cached than at the lookup before
                heapq.heapreplace(ranked, entry)
                continue
            heapq.heappop(ranked)
            if prompt.prefix in computed and prompt.prefix[0] < prompt.tokens:
                deferred.append(prompt.request)
            else:
                computed.add(prompt.prefix)
                yield prompt.request
        yield from deferred

    def chunk(self, request: RequestView, budget_tokens: int, view: SchedulerView) -> int:
        if not request.pages:
            self._prompts.starts(request)
        return budget_tokens

    def finished(self, requests: Sequence[RequestView]) -> None:
        for request in requests:
            self._prompts.forget(request)


def _rank(prompt: WaitingPrompt, earned: float) -> tuple[float, int, int, WaitingPrompt]:
    """The least goes first. `earned`: tokens that its wait counts for."""
    ratio = (prompt.cached + earned) / (prompt.tokens - prompt.cached)
    return -ratio, -prompt.cached, prompt.index, prompt


@hookimpl
def aioserve_scheduling_policies() -> list[PolicySpec]:
    return [PolicySpec("cache_aware", CacheAware, "longest cached prefix first")]
