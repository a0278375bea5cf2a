"""LightLLM's past-future reserve: as many pages for answers as earlier answers took."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

from aioserve import (
    ConfigError,
    PolicySpec,
    RequestView,
    SchedulerView,
    SchedulingPolicy,
    hookimpl,
)

__all__ = ["PastFuture"]


class PastFuture(SchedulingPolicy):
    """Start a request only if the pages suffice at the moment when the running ones need most.

    The answers, including its own, are assumed to be as long as earlier ones. The length of an
    answer is drawn from the last `window` answers that were longer than it is now. The peak is
    found as in the paper: it comes when one of the requests ends, in order of their remaining
    tokens, longest first. Until `least_answers` answers are known, the engine's own reserve
    decides. Raises `ConfigError` for numbers below 1.

    Gong et al.: "Past-Future Scheduler for LLM Serving under SLA Guarantees", ASPLOS 2025.
    """

    def __init__(self, *, window: int = 1000, least_answers: int = 16, seed: int = 0) -> None:
        for name, value in (("window", window), ("least_answers", least_answers)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value!r}")
        self.least_answers = least_answers
        self._past: deque[int] = deque(maxlen=window)
        self._random = random.Random(seed)
        self._drawn: dict[int, int] = {}
        """Assumed lengths of the answers of running requests, by their arrival."""

    def finished(self, requests: Sequence[RequestView]) -> None:
        for request in requests:
            self._drawn.pop(request.arrival_index, None)
            if request.generated_tokens:
                self._past.append(request.generated_tokens)

    def reserve(self, request: RequestView, view: SchedulerView) -> int | None:
        if len(self._past) < self.least_answers:
            return None
        tokens = [
            (self._remaining(one), one.prompt_tokens + one.generated_tokens)
            for one in (*view.running, request)
        ]
        held = peak = sum(now for _, now in tokens)
        ahead = 0
        for number, (remaining, now) in enumerate(sorted(tokens, reverse=True), start=1):
            ahead += now
            peak = max(peak, ahead + number * remaining)
        return min(view.pages_total, -(-(peak - held) // view.page_size))

    def _remaining(self, request: RequestView) -> int:
        generated = request.generated_tokens
        drawn = self._drawn.get(request.arrival_index, 0)
        if drawn <= generated:
            longer = [length for length in self._past if length > generated]
            drawn = self._random.choice(longer) if longer else generated + 1
            self._drawn[request.arrival_index] = min(drawn, request.max_tokens)
        return max(0, min(drawn, request.max_tokens) - generated)


@hookimpl
def aioserve_scheduling_policies() -> list[PolicySpec]:
    return [PolicySpec("past_future", PastFuture, "reserves what past answers took")]
