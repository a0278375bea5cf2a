"""Summaries of many runs: a policy at each rate over several seeds, and the rate up to which it
meets its objectives.

Knows metrics alone: neither how they are made nor how they are shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from statistics import fmean, stdev

import msgspec

from aioserve.errors import ConfigError
from aioserve.isolation import shown
from aioserve.simulation.metrics import Metrics, measure_of

__all__ = [
    "Estimate",
    "Objective",
    "attainment_by_class",
    "bounds_of",
    "estimate",
    "estimate_of",
    "objectives",
    "rate_between",
]

T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""The 97.5th percentile of Student's t distribution with 1, 2, ... degrees of freedom."""

SPREADS = {
    "ttft": "ttft_seconds",
    "tpot": "tpot_seconds",
    "gap": "gap_seconds",
    "queue": "queue_seconds",
    "e2e": "e2e_seconds",
}
PERCENTILES = ("mean", "p50", "p90", "p99", "max")
ATTAINMENT = "attainment"
MAX_LIMIT_SECONDS = 1e9


class Estimate(msgspec.Struct, frozen=True):
    """A mean over seeds, with half of its 95 % confidence interval.

    The interval holds the true mean in 95 of 100 such sweeps, if values are normally distributed.
    `half_width` is None with one seed.
    """

    mean: float
    half_width: float | None = None


def estimate(values: Iterable[float]) -> Estimate:
    """Return the estimate of at least one value."""
    known = list(values)
    if not all(map(math.isfinite, known)):
        return Estimate(math.inf)
    if len(known) < 2:
        return Estimate(known[0])
    freedom = len(known) - 1
    # Beyond the table, t is close to the normal distribution's 1.96.
    t = T_975[freedom - 1] if freedom <= len(T_975) else 1.96 + 2.5 / freedom
    return Estimate(fmean(known), t * stdev(known) / math.sqrt(len(known)))


def estimate_of(
    runs: Iterable[Metrics], value_of: Callable[[Metrics], float | None]
) -> Estimate | None:
    """Return the estimate of a value over the runs that have it; None if no run has."""
    values = [value for metrics in runs if (value := value_of(metrics)) is not None]
    return estimate(values) if values else None


def attainment_by_class(runs: Iterable[Metrics]) -> dict[str, Callable[[Metrics], float | None]]:
    """Return a measure for each class of these runs that has targets, by its name.

    It is the share of the class's requests that met their targets; None for a run without that
    class.
    """
    names = sorted(
        {
            name
            for metrics in runs
            for name, theirs in metrics.classes.items()
            if theirs.goodput is not None
        }
    )
    return {name: partial(_attainment, name) for name in names}


def _attainment(name: str, metrics: Metrics) -> float | None:
    theirs = metrics.classes.get(name)
    return None if theirs is None or theirs.goodput is None else theirs.goodput.share


class Objective(msgspec.Struct, frozen=True):
    """One objective: `ttft_p99=2`."""

    name: str
    limit: float

    def value(self, metrics: Metrics) -> float | None:
        """Return the value to compare with the limit; None if there was nothing to measure."""
        if self.name == ATTAINMENT:
            return measure_of("goodput.share")(metrics)
        kind, _, percentile = self.name.partition("_")
        return measure_of(f"{SPREADS[kind]}.{percentile}")(metrics)

    def met(self, metrics: Metrics) -> bool:
        """True if it was met.

        Refused requests are infinitely late. Completions without a second token meet limits between
        tokens.
        """
        value = self.value(metrics)
        if self.name == ATTAINMENT:
            return value is not None and value >= self.limit
        return value is None or value <= self.limit


def objectives(text: str) -> tuple[Objective, ...]:
    """Parse objectives as in `ttft_p99=2,tpot_p99=0.1` or `attainment=0.9`. Raises `ConfigError`.

    Limits are seconds, or the share of requests that met their targets.
    """
    found: dict[str, Objective] = {}
    names = [f"{kind}_{percentile}" for kind in SPREADS for percentile in PERCENTILES]
    for part in text.split(","):
        name, equals, number = (piece.strip() for piece in part.partition("="))
        if not equals or name not in (*names, ATTAINMENT) or name in found:
            raise ConfigError(
                f"slo must be NAME=LIMIT, once for each of {', '.join(SPREADS)} with _ and one of "
                f"{', '.join(PERCENTILES)}, or {ATTAINMENT}=SHARE, got {shown(part)}"
            )
        most = 1.0 if name == ATTAINMENT else MAX_LIMIT_SECONDS
        try:
            limit = float(number)
        except ValueError:
            limit = math.nan
        if not 0 < limit <= most:
            raise ConfigError(
                f"slo: {name} must be a number of more than 0 and at most {most:g}, got "
                f"{shown(number)}"
            )
        found[name] = Objective(name, limit)
    return tuple(found.values())


def bounds_of(kept: Mapping[float, bool]) -> tuple[float | None, float | None]:
    """Return the largest rate up to which all objectives are met, and the next rate, at which they
    aren't.

    Either is None if there is no such rate.
    """
    largest = None
    for rate in sorted(kept):
        if not kept[rate]:
            return largest, rate
        largest = rate
    return largest, None


def rate_between(kept: Mapping[float, bool]) -> float | None:
    """Return the geometric mean of the two bounds, with four digits.

    None if a bound is missing, or if no such rate is between them.
    """
    largest, missed = bounds_of(kept)
    if largest is None or missed is None:
        return None
    middle = float(f"{math.sqrt(largest * missed):.4g}")
    return middle if largest < middle < missed else None
