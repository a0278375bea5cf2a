"""Shortest uncached prompt first, with ageing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from aioserve import (
    PolicySpec,
    RequestView,
    SchedulerView,
    hookimpl,
)
from aioserve_plugins._waiting_prompts import Rank, RankedByUncached, WaitingPrompt

__all__ = ["ShortestFirst"]


class ShortestFirst(RankedByUncached):
    """Starts the request with the fewest tokens to compute.

    A token of a prompt is forgiven for every `patience` tokens that the engine has processed since
    the request arrived. Requests that are forgiven everything come first, in order of arrival. All
    waiting requests are compared by the cached tokens of their last lookups. A step makes at most
    `lookups` of these.

    Raises `ConfigError` for a `patience` that isn't positive and finite, or `lookups` below 1.
    """

    def order(self, waiting: Sequence[RequestView], view: SchedulerView) -> Iterator[RequestView]:
        self._prompts.begin(waiting, view)
        for prompt in self._prompts.in_turn(view.processed_tokens):
            yield prompt.request

    def _rank(self, prompt: WaitingPrompt, cached: int, now: int) -> Rank:
        return max(0.0, self._forgiven(prompt, cached) - now), prompt.index

    def _holds_until(self, first: WaitingPrompt, second: WaitingPrompt, now: int) -> float:
        """Time until which the order holds: all are forgiven at the same rate, until they are
        forgiven everything."""
        is_older = first.index < second.index
        return math.inf if is_older else self._forgiven(second, second.ranked_cached)

    def _forgiven(self, prompt: WaitingPrompt, cached: int) -> float:
        """Time at which it is forgiven everything, in tokens processed."""
        return self.patience * (prompt.tokens - cached) + prompt.arrived


@hookimpl
def aioserve_scheduling_policies() -> list[PolicySpec]:
    return [PolicySpec("shortest_first", ShortestFirst, "shortest uncached prompt first")]
