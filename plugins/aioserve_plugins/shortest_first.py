"""Shortest uncached prompt first, with ageing."""

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

__all__ = ["ShortestFirst"]


class ShortestFirst(SchedulingPolicy):
    """Starts the request with the fewest tokens to compute.

    A token of a prompt is forgiven for every `patience` tokens that the engine has processed since
    the request arrived. Requests that are forgiven everything come first, in order of arrival. Only
    the `window` oldest are compared, since to know what is cached of a prompt means looking it up.

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
        return math.ceil(self.patience * (request.prompt_tokens + request.generated_tokens))

    def order(self, waiting: Sequence[RequestView], view: SchedulerView) -> Iterable[RequestView]:
        def rank(request: RequestView) -> float:
            waited = view.processed_tokens - request.arrival_processed_tokens
            return max(0.0, self.patience * request.uncached_tokens - waited)

        return chain(sorted(waiting[: self.window], key=rank), waiting[self.window :])


@hookimpl
def aioserve_scheduling_policies() -> list[PolicySpec]:
    return [PolicySpec("shortest_first", ShortestFirst, "shortest uncached prompt first")]
