"""A trace file of any known format, and traces at another rate or scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from aioserve.errors import ConfigError, TraceError
from aioserve.simulation.csv_traces import (
    AZURE_HEADERS,
    SERVEGEN_HEADER,
    read_azure,
    read_servegen,
)
from aioserve.simulation.traces import TraceRequest, lines_of, read_agentic, read_mooncake

__all__ = ["at_rate", "read_trace", "with_scaled_lengths"]

FORMATS = "Mooncake JSONL, agentic sessions JSONL, Azure CSV, ServeGen CSV"


def read_trace(path: str | Path) -> list[TraceRequest]:
    """Requests of a file, whose first line tells its format. Raises `TraceError`."""
    first = _first_line(Path(path))
    columns = tuple(first.strip().split(","))
    if any(columns[: len(header)] == header for header in AZURE_HEADERS):
        requests = read_azure(path)
    elif columns[: len(SERVEGEN_HEADER)] == SERVEGEN_HEADER:
        requests = read_servegen(path)
    elif first.startswith("{") and '"timestamp"' in first:
        requests = read_mooncake(path)
    elif first.startswith("{") and '"requests"' in first:
        requests = read_agentic(path)
    else:
        raise TraceError(f"{path}:1: not the beginning of a known format ({FORMATS})")
    if not requests:
        raise TraceError(f"{path}: no request in it")
    return requests


def at_rate(trace: Sequence[TraceRequest], requests_per_second: float) -> list[TraceRequest]:
    """The trace with all arrivals stretched evenly, to so many requests a second on average.

    Raises `ConfigError` for a rate that isn't more than 0, or a trace that takes no time.
    """
    if not 0 < requests_per_second < math.inf:
        raise ConfigError(f"rate must be more than 0, got {requests_per_second}")
    lasts = max((request.arrival_seconds for request in trace), default=0.0)
    if lasts <= 0:
        raise ConfigError("rate: all requests of the trace arrive at once")
    factor = len(trace) / requests_per_second / lasts
    return [replace(r, arrival_seconds=r.arrival_seconds * factor) for r in trace]


def with_scaled_lengths(trace: Sequence[TraceRequest], factor: float) -> list[TraceRequest]:
    """The trace with `factor` times as many tokens in prompts, answers and blocks, rounded up.

    Block ids stay, so that requests share what they shared. Raises `ConfigError` for a factor that
    isn't more than 0 or makes a fraction of a shared block.
    """
    if not 0 < factor < math.inf:
        raise ConfigError(f"scale_lengths must be more than 0, got {factor}")
    return [
        replace(
            r,
            prompt_tokens=math.ceil(r.prompt_tokens * factor),
            output_tokens=math.ceil(r.output_tokens * factor),
            block_tokens=_scaled_block(r, factor),
        )
        for r in trace
    ]


def _scaled_block(request: TraceRequest, factor: float) -> int:
    scaled = request.block_tokens * factor
    if request.block_ids and (scaled < 1 or not scaled.is_integer()):
        raise ConfigError(
            f"scale_lengths {factor} makes {scaled} tokens of blocks of {request.block_tokens}: "
            "give a factor that leaves whole ones"
        )
    return math.ceil(scaled)


def _first_line(path: Path) -> str:
    return next((line for _, line in lines_of(path) if line.strip()), "")
