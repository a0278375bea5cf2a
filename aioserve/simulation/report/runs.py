"""What a report is made of."""

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
    """One policy at one rate of requests: what is left of a run when there are many."""

    name: str
    """Of the policy."""
    rate: float
    """Requests that arrive in a second."""
    metrics: Metrics


class Panel(msgspec.Struct, frozen=True):
    """One picture of a chart."""

    title: str
    svg: str


class Table(msgspec.Struct, frozen=True):
    """What a chart shows, in figures. The first cell of a row says what the row is about."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Chart(msgspec.Struct, frozen=True):
    """Pictures that belong together, and what it takes to read them."""

    panels: tuple[Panel, ...]
    caption: str
    table: Table | None = None
    title: str = ""
