"""Small runs to draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aioserve import SchedulingPolicy
from aioserve.simulation.metrics import metrics_of
from aioserve.simulation.report import PolicyRun
from aioserve.simulation.simulator import simulate
from aioserve.simulation.timeline import Timeline
from aioserve.steps.plan import StepPlan
from aioserve.traces.trace_request import TraceRequest
from aioserve.traces.workload import with_targets

__all__ = ["asking", "run_of"]


class Steady:
    """A step takes a tenth of a second."""

    def step_seconds(self, plan: StepPlan) -> float:
        return 0.1


def asking(number: int, *, at: float = 0.0, output: int = 4, tenant: str = "") -> TraceRequest:
    """Its caller asks for no more than it gets, so that no step goes on past its answer's end."""
    return TraceRequest(number, at, 10, output, (), 10, tenant=tenant, max_tokens=output)


def run_of(
    trace: Sequence[TraceRequest],
    *,
    name: str = "fcfs",
    num_pages: int | None = None,
    targets: Mapping[str, float] | None = None,
    max_num_seqs: int = 256,
    speculation_max_tokens: int = 0,
) -> PolicyRun:
    """A run under first come, first served, whatever its `name`. Of draft tokens 0.6 are right."""
    timeline = Timeline()
    result = simulate(
        with_targets(trace, **(targets or {})),
        SchedulingPolicy(),
        cost=Steady(),
        num_pages=num_pages,
        page_size=4,
        max_num_seqs=max_num_seqs,
        output_reserve_tokens=0,
        speculation_max_tokens=speculation_max_tokens,
        acceptance=0.6 if speculation_max_tokens else None,
        timeline=timeline,
    )
    return PolicyRun(name, result, metrics_of(result), timeline)
