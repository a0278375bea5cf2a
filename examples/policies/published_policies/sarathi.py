"""Sarathi-Serve: decodes in every step, and as many prompt tokens as the time between tokens
allows.
"""

from __future__ import annotations

import math

from aioserve import (
    ConfigError,
    PolicySpec,
    RequestView,
    SchedulerView,
    SchedulingPolicy,
    hookimpl,
)

__all__ = ["StallFree"]


class StallFree(SchedulingPolicy):
    """Give prompts so many tokens of a step that it doesn't exceed its time limit.

    The limit is `tbt_seconds`, or the least `tpot_target_seconds` of the requests that decode. The
    engine estimates the duration of a step from earlier ones. Until it can, prompts get
    `least_tokens`, which they get in any case. Raises `ConfigError` for numbers that aren't
    positive.

    Agrawal et al.: "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", OSDI
    2024.
    """

    def __init__(self, *, tbt_seconds: float = 0.1, least_tokens: int = 128) -> None:
        if not 0 < tbt_seconds < math.inf:
            raise ConfigError(f"tbt_seconds must be positive and finite, got {tbt_seconds!r}")
        if least_tokens < 1:
            raise ConfigError(f"least_tokens must be at least 1, got {least_tokens!r}")
        self.tbt_seconds = tbt_seconds
        self.least_tokens = least_tokens
        self._step = -1
        self._left = 0
        """Tokens of the step that prompts may still have."""

    def starvation_bound_tokens(self, request: RequestView) -> int:
        return 0

    def chunk(self, request: RequestView, budget_tokens: int, view: SchedulerView) -> int:
        if view.step != self._step:
            self._step, self._left = view.step, self._prompt_tokens(view)
        count = min(budget_tokens, self._left)
        self._left -= count
        return count

    def _prompt_tokens(self, view: SchedulerView) -> int:
        decoding = [request for request in view.running if request.uncached_tokens <= 1]
        if not decoding:
            return view.max_num_batched_tokens
        context = sum(request.computed_tokens for request in decoding)
        without = view.estimate(0, len(decoding), context)
        with_some = view.estimate(1024, len(decoding), context + 1024)
        if without is None or with_some is None:
            return self.least_tokens
        targets = [request.tpot_target_seconds or math.inf for request in decoding]
        seconds = min(self.tbt_seconds, *targets) - without
        per_token = (with_some - without) / 1024
        most = view.max_num_batched_tokens
        fits = most if per_token <= 0 else min(most, seconds / per_token)
        return max(self.least_tokens, int(fits))


@hookimpl
def aioserve_scheduling_policies() -> list[PolicySpec]:
    return [PolicySpec("sarathi", StallFree, "prompts in pieces that stall no decode")]
