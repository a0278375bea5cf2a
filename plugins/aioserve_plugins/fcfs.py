"""First come, first served."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aioserve import PolicySpec, RequestView, SchedulerView, SchedulingPolicy, hookimpl

__all__ = ["FirstComeFirstServed"]


class FirstComeFirstServed(SchedulingPolicy):
    """Starts requests in order of arrival and computes as much of each prompt as a step holds.

    Nobody is overtaken, preempted requests included: they keep their place.
    """

    def starvation_bound_tokens(self, request: RequestView) -> int:
        return 0

    def order(self, waiting: Sequence[RequestView], view: SchedulerView) -> Iterable[RequestView]:
        return waiting

    def chunk(self, request: RequestView, budget_tokens: int, view: SchedulerView) -> int:
        return budget_tokens


@hookimpl
def aioserve_scheduling_policies() -> list[PolicySpec]:
    return [PolicySpec("fcfs", FirstComeFirstServed, "first come, first served")]
