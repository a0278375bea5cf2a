"""When the requests of a trace come, where it doesn't say or one wants to know about other times.

- `recorded`: as the trace has it.
- `poisson`: with exponential pauses, as from many callers who know nothing of each other.
- `gamma:CV`: with pauses of a gamma distribution whose standard deviation is CV times its mean:
  with 1 the same as `poisson`, with more in bursts, with less more evenly.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from aioserve.arguments import counted
from aioserve.errors import ConfigError
from aioserve.isolation import shown
from aioserve.request import MAX_SEED
from aioserve.traces.checks import check_int, check_number
from aioserve.traces.request import MAX_ARRIVAL_SECONDS, MAX_RATE, TraceRequest

__all__ = ["ARRIVALS", "is_drawn", "with_arrivals"]

ARRIVALS = ("recorded", "poisson", "gamma:CV")
MAX_VARIATION = 100.0


def is_drawn(arrivals: str) -> bool:
    """Whether they are drawn from a seed. Raises `ConfigError` for what is none of `ARRIVALS`."""
    return _variation(arrivals) is not None


def with_arrivals(
    trace: Sequence[TraceRequest],
    arrivals: str,
    *,
    rate: float,
    seed: int = 0,
    closed_loop: bool = False,
) -> list[TraceRequest]:
    """The trace with times that are drawn, in its order and from 0 on: about `rate` requests a
    second. In a `closed_loop` only those that follow none have times, so that so many sessions
    begin in a second.

    Raises `ConfigError` for a rate, a seed or arrivals that are none, and for a rate that makes the
    trace too long.
    """
    variation = _variation(arrivals)
    if variation is None:
        return list(trace)
    check_number("rate", rate, MAX_RATE)
    check_int("seed", seed, 0, MAX_SEED)
    shape = 1 / variation**2
    drawn = [index for index, r in enumerate(trace) if not (closed_loop and r.follows is not None)]
    rng = np.random.default_rng(seed)
    with np.errstate(over="ignore"):
        times = np.cumsum(rng.gamma(shape, 1 / shape, len(drawn)) / rate)
    times -= times[0] if len(times) else 0.0
    if len(times) and not times[-1] <= MAX_ARRIVAL_SECONDS:
        raise ConfigError(
            f"rate {rate} makes {counted(len(drawn), 'request')} take {times[-1]:g} s; "
            f"it may be at most {MAX_ARRIVAL_SECONDS:g}"
        )
    made = list(trace)
    for index, seconds in zip(drawn, times.tolist(), strict=True):
        made[index] = replace(trace[index], arrival_seconds=seconds)
    return made


def _variation(arrivals: str) -> float | None:
    """Coefficient of variation of the pauses; None for `recorded`."""
    if type(arrivals) is str:
        name, colon, text = arrivals.partition(":")
        if (name, colon) in (("recorded", ""), ("poisson", "")):
            return None if name == "recorded" else 1.0
        if (name, colon) == ("gamma", ":"):
            try:
                variation = float(text)
            except ValueError:
                message = f"arrivals: gamma must be a number, got {shown(text)}"
                raise ConfigError(message) from None
            check_number("arrivals: gamma", variation, MAX_VARIATION)
            if variation < 0.01:
                raise ConfigError(f"arrivals: gamma must be at least 0.01, got {variation}")
            return variation
    raise ConfigError(f"arrivals must be one of {', '.join(ARRIVALS)}, got {shown(arrivals)}")
