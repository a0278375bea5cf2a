"""Sums many values up: mean, percentiles and the largest, with those that never came."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec
import numpy as np
import numpy.typing as npt

__all__ = ["Spread", "spread_of", "weighted_spread"]


class Spread(msgspec.Struct, frozen=True):
    """Spread of some values; percentiles are interpolated linearly."""

    mean: float
    """Mean of the values that came."""
    p50: float
    p90: float
    p99: float
    max: float
    never: int = 0
    """Number of values that never came, since their requests were refused. Percentiles and `max`
    count each as infinite, so that refusing makes none of them better."""


def spread_of(values: Iterable[float | None], *, never: int = 0) -> Spread | None:
    """Spread of the values that aren't None, and of `never` that never came; None without any."""
    known = np.array([value for value in values if value is not None], np.float64)
    return weighted_spread(known, np.ones(len(known), np.int64), never=never)


def weighted_spread(
    values: npt.NDArray[np.float64], counts: npt.NDArray[np.int64], *, never: int = 0
) -> Spread | None:
    """Spread, as of `spread_of`, where each value came so many times."""
    order = np.argsort(values)
    ordered, upto = values[order], np.cumsum(counts[order])
    came = int(upto[-1]) if len(upto) else 0

    def at(place: int) -> float:
        """Value at that place among all of them in order."""
        if place >= came:
            return math.inf
        return float(ordered[np.searchsorted(upto, place, side="right")])

    def percentile(share: float) -> float:
        place = share * (came + never - 1)
        below, above = at(math.floor(place)), at(math.ceil(place))
        return below if below == above else below + (above - below) * (place % 1)

    if not came + never:
        return None
    mean = float(values @ counts) / came if came else math.inf
    most = at(came + never - 1)
    return Spread(mean, percentile(0.5), percentile(0.9), percentile(0.99), most, never)
