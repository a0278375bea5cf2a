"""Highest response ratio next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aioserve import PolicySpec, RequestView, SchedulerView, SchedulingPolicy, hookimpl

__all__ = ["HighestResponseRatioNext"]


class HighestResponseRatioNext(SchedulingPolicy):
    """Start the request with the longest wait as a multiple of its work.

    Short ones start soon, and long ones in their time. Wait and work are counted in tokens. The
    work is the prompt's uncached tokens, and the forecast of the answer if there is one.

    Brinch Hansen: "An Analysis of Response Ratio Scheduling", IFIP Congress 1971.
    """

    def order(self, waiting: Sequence[RequestView], view: SchedulerView) -> Iterable[RequestView]:
        def ratio(request: RequestView) -> float:
            waited = view.processed_tokens - request.arrival_processed_tokens
            left = (request.predicted_output_tokens or 0) - request.generated_tokens
            return waited / (request.uncached_tokens + max(0, left))

        return sorted(waiting, key=ratio, reverse=True)  # if ratios are equal, in order of arrival


@hookimpl
def aioserve_scheduling_policies() -> list[PolicySpec]:
    return [PolicySpec("hrrn", HighestResponseRatioNext, "highest response ratio next")]
