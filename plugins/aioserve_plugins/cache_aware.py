"""Longest prefix match first, with ageing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from aioserve import (
    PolicySpec,
    RequestView,
    SchedulerView,
    hookimpl,
)
from aioserve_plugins._waiting_prompts import Prefix, Rank, RankedByUncached, WaitingPrompt

__all__ = ["CacheAware"]

SAFE = 1 - 1e-9
"""Factor that makes a ratio less in spite of rounding."""


class CacheAware(RankedByUncached):
    """Starts first what the prefix cache serves best, before it is evicted.

    The rank is a response ratio (Brinch Hansen, 1971) in tokens of work. It counts what the cache
    saves as time already waited: `(cached + waited / patience) / uncached`. Once a request has
    waited for `patience` times its length, it goes before all that arrived later.

    A request that begins like one ahead of it is moved behind the others: when its turn comes it
    finds that prefix in the cache. All waiting requests are compared by the cached tokens of their
    last lookups. A step makes at most `lookups` of these.

    Raises `ConfigError` for a `patience` that isn't positive and finite, or `lookups` below 1.
    """

    def order(self, waiting: Sequence[RequestView], view: SchedulerView) -> Iterator[RequestView]:
        now = view.processed_tokens
        self._prompts.begin(waiting, view)
        computed: set[Prefix] = set()
        """Prefixes that requests ahead will have computed."""
        deferred: list[RequestView] = []
        for prompt in self._prompts.in_turn(now):
            begins_alike = prompt.prefix in computed and prompt.prefix[0] < prompt.tokens
            if begins_alike and now < self._due(prompt):
                deferred.append(prompt.request)
            else:
                computed.add(prompt.prefix)
                yield prompt.request
        yield from deferred

    def _due(self, prompt: WaitingPrompt) -> float:
        """Time from which it goes before all that arrived later, in tokens processed."""
        return prompt.arrived + self.patience * prompt.tokens

    def _rank(self, prompt: WaitingPrompt, cached: int, now: int) -> Rank:
        if now >= self._due(prompt):
            return -math.inf, 0, prompt.index
        return -self._ratio(prompt, cached, now), -cached, prompt.index

    def _ratio(self, prompt: WaitingPrompt, cached: int, now: int) -> float:
        return (cached + (now - prompt.arrived) / self.patience) / (prompt.tokens - cached)

    def _holds_until(self, first: WaitingPrompt, second: WaitingPrompt, now: int) -> float:
        """Time until which the order holds: until the second has the greater ratio, or goes before
        all that arrived later. A ratio grows linearly with the tokens processed."""
        until = self._due(second)
        if first.index < second.index and self._due(first) <= max(until, now):
            until = math.inf
        cached, other_cached = first.ranked_cached, second.ranked_cached
        are_equal = (first.tokens, cached) == (second.tokens, other_cached)
        if are_equal or now >= self._due(first):
            return until
        lead = SAFE * self._ratio(first, cached, now) - self._ratio(second, other_cached, now)
        if lead <= 0:
            return now
        growth, other_growth = 1 / (first.tokens - cached), 1 / (second.tokens - other_cached)
        closing = (other_growth - SAFE * growth) / self.patience
        return min(until, now + lead // closing) if closing > 0 else until


@hookimpl
def aioserve_scheduling_policies() -> list[PolicySpec]:
    return [PolicySpec("cache_aware", CacheAware, "longest cached prefix first")]
