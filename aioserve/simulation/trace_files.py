"""A trace file of any known format, and traces at another rate or scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

from msgspec.structs import replace

from aioserve.errors import ConfigError, TraceError
from aioserve.simulation.csv_traces import (
    AZURE_HEADERS,
    SERVEGEN_HEADER,
    begins_with,
    read_azure,
    read_servegen,
)
from aioserve.simulation.traces import TraceRequest, lines_of, read_agentic, read_mooncake

__all__ = ["at_rate", "read_trace", "with_scaled_lengths"]

FORMATS = "Mooncake JSONL, agentic sessions JSONL, Azure CSV, ServeGen CSV"


def read_trace(path: str | Path) -> list[TraceRequest]:
    """Requests of a file, whose first line tells its format: by arrival, which counts from the
    first of them. Raises `TraceError`."""
    place, first = _first_line(Path(path))
    if begins_with(AZURE_HEADERS, first):
        requests = read_azure(path)
    elif begins_with((SERVEGEN_HEADER,), first):
        requests = read_servegen(path)
    elif first.startswith("{") and '"timestamp"' in first:
        requests = read_mooncake(path)
    elif first.startswith("{") and '"requests"' in first:
        requests = read_agentic(path)
    else:
        raise TraceError(
            f"{place}: not the beginning of a known format ({FORMATS}): {first[:60]!r}"
        )
    if not requests:
        raise TraceError(f"{path}: no request in it")
    requests.sort(key=attrgetter("arrival_seconds"))
    began = requests[0].arrival_seconds
    return [
        replace(request, number=number, arrival_seconds=request.arrival_seconds - began)
        for number, request in enumerate(requests)
    ]


def at_rate(trace: Sequence[TraceRequest], requests_per_second: float) -> list[TraceRequest]:
    """The trace with all arrivals stretched evenly, to so many requests a second on average from
    the first of them, at 0, to the last.

    Raises `ConfigError` for a rate that isn't more than 0, or a trace that takes no time.
    """
    if not 0 < requests_per_second < math.inf:
        raise ConfigError(f"rate must be more than 0, got {requests_per_second}")
    arrivals = [request.arrival_seconds for request in trace]
    first, last = min(arrivals, default=0.0), max(arrivals, default=0.0)
    if first == last:
        raise ConfigError(
            f"rate {requests_per_second}: no time to stretch, as all requests of the trace "
            f"({len(trace)}) arrive at once"
        )
    factor = len(trace) / requests_per_second / (last - first)
    return [replace(r, arrival_seconds=(r.arrival_seconds - first) * factor) for r in trace]


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


def _first_line(path: Path) -> tuple[str, str]:
    """`file:line` and the text of the first line that isn't blank, without blanks around it."""
    lines = ((place, line.strip()) for place, line in lines_of(path))
    return next(((place, line) for place, line in lines if line), (f"{path}:1", ""))
