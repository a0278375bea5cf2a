"""Parts of a report."""

from __future__ import annotations

import msgspec

from aioserve.simulation.metrics import Metrics
from aioserve.simulation.records import SimulationResult
from aioserve.simulation.timeline import Timeline

__all__ = ["Chart", "Panel", "PolicyRun", "RateRun", "Table"]


class PolicyRun(msgspec.Struct, frozen=True):
    """One policy on the trace."""

    name: str
    result: SimulationResult
    metrics: Metrics
    timeline: Timeline


class RateRun(msgspec.Struct, frozen=True):
    """One policy at one rate of requests: all that is held of a run when there are many."""

    name: str
    """Name of the policy."""
    rate: float
    """Requests that arrive in a second."""
    metrics: Metrics


class Panel(msgspec.Struct, frozen=True):
    """One picture of a chart."""

    title: str
    svg: str


class Table(msgspec.Struct, frozen=True):
    """Figures that a chart shows. The first cell of a row says what the row is about."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Chart(msgspec.Struct, frozen=True):
    """Pictures that belong together, with their caption and table."""

    panels: tuple[Panel, ...]
    caption: str
    table: Table | None = None
    title: str = ""
