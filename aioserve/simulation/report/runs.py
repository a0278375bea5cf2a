"""What a report is made of."""

from __future__ import annotations

import msgspec

from aioserve.simulation.metrics import Metrics
from aioserve.simulation.simulator import SimulationResult
from aioserve.simulation.timeline import Timeline

__all__ = ["Chart", "PolicyRun"]


class PolicyRun(msgspec.Struct, frozen=True):
    """One policy on the trace."""

    name: str
    result: SimulationResult
    metrics: Metrics
    timeline: Timeline


class Chart(msgspec.Struct, frozen=True):
    """A picture and what it takes to read it."""

    svg: str
    caption: str
    title: str = ""
