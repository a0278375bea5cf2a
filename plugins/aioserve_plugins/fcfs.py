"""First come, first served."""

from __future__ import annotations

from aioserve import PolicySpec, RequestView, SchedulingPolicy, hookimpl

__all__ = ["FirstComeFirstServed"]


class FirstComeFirstServed(SchedulingPolicy):
    """Starts requests in order of arrival and computes as much of each prompt as a step holds.

    No request is overtaken. Preempted ones keep their place. These are the defaults of every
    policy.
    """

    def starvation_bound_tokens(self, request: RequestView) -> int:
        return 0


@hookimpl
def aioserve_scheduling_policies() -> list[PolicySpec]:
    return [PolicySpec("fcfs", FirstComeFirstServed, "first come, first served")]
