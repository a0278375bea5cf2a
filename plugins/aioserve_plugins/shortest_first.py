"""Shortest uncached prompt first, with ageing."""

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
from aioserve_plugins._waiting_prompts import WaitingPrompt, WaitingPrompts

__all__ = ["ShortestFirst"]


class ShortestFirst(SchedulingPolicy):
    """Starts the request with the fewest tokens to compute.

    A token of a prompt is forgiven for every `patience` tokens that the engine has processed since
    the request arrived. Requests that are forgiven everything come first, in order of arrival. All
    that wait are compared, by what was cached of them when they were looked up last; a step has
    `lookups` of these.

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
        now = view.processed_tokens
        prompts, patience = self._prompts.begin(waiting, view), self.patience
        owed = [patience * (p.tokens - p.cached) + p.arrived - now for p in prompts]
        ranked = [(o if o > 0 else 0.0, p.index, p) for o, p in zip(owed, prompts, strict=True)]
        heapq.heapify(ranked)
        while ranked:
            prompt = ranked[0][-1]
            self._prompts.look_up(prompt)
            entry = self._rank(prompt, now)
            if entry > ranked[0]:  # less is cached than at the lookup before
                heapq.heapreplace(ranked, entry)
            else:
                heapq.heappop(ranked)
                yield prompt.request

    def _rank(self, prompt: WaitingPrompt, now: int) -> tuple[float, int, WaitingPrompt]:
        uncached = prompt.tokens - prompt.cached
        owed = self.patience * uncached + prompt.arrived - now
        return max(0.0, owed), prompt.index, prompt

    def chunk(self, request: RequestView, budget_tokens: int, view: SchedulerView) -> int:
        if not request.pages:
            self._prompts.starts(request)
        return budget_tokens

    def finished(self, requests: Sequence[RequestView]) -> None:
        for request in requests:
            self._prompts.forget(request)


@hookimpl
def aioserve_scheduling_policies() -> list[PolicySpec]:
    return [PolicySpec("shortest_first", ShortestFirst, "shortest uncached prompt first")]
