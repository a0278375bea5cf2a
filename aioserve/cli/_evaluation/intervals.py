"""Confidence intervals of means over the tokens of a text, which depend on each other.

Batch means: the tokens are cut into a few long blocks, which depend on each other far less than
neighbouring tokens do. The interval comes from how the blocks' means differ, by Student's
distribution. Between 10 and 30 blocks do best, whatever the length. See B. Schmeiser, Batch size
effects in the analysis of simulation output, Operations Research 30(3), 1982. Nothing is drawn, so
the same tokens give the same interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["BLOCKS", "LEAST_TOKENS", "LEVEL", "Estimate", "ratio_of_sums"]

BLOCKS = 30
LEVEL = 0.95
STUDENT_T = 2.0452296
"""Quantile (1 + LEVEL) / 2 of Student's distribution with BLOCKS - 1 degrees of freedom."""
LEAST_TOKENS = 10 * BLOCKS
"""Fewest tokens for an interval: with fewer, blocks would be too short."""


class Estimate(NamedTuple):
    """A value and its interval at `LEVEL`; None for both ends if there are too few tokens."""

    value: float
    low: float | None = None
    high: float | None = None

    def map(self, function: Callable[[float], float]) -> Estimate:
        """Return the estimate of an increasing function of the value."""
        return Estimate(*[None if one is None else function(one) for one in self])  # pyright: ignore[reportArgumentType]

    def within(self, least: float, most: float) -> Estimate:
        """Return the estimate of a quantity that is always in `[least, most]`."""
        return Estimate(
            self.value,
            None if self.low is None else max(least, self.low),
            None if self.high is None else min(most, self.high),
        )


def ratio_of_sums(
    numerators: npt.NDArray[np.float64], denominators: npt.NDArray[np.float64]
) -> Estimate:
    """Return the sum of `numerators` divided by the sum of `denominators`.

    Both are float64 `[tokens]`, in the order of the text. The interval is that of a ratio estimator
    over blocks (delta method).
    """
    total = float(denominators.sum())
    value = float(numerators.sum()) / total
    if len(numerators) < LEAST_TOKENS or not math.isfinite(value):
        return Estimate(value)
    starts = np.arange(BLOCKS) * len(numerators) // BLOCKS
    residuals = np.add.reduceat(numerators - value * denominators, starts)
    variance = BLOCKS / (BLOCKS - 1) * float(residuals @ residuals) / total**2
    margin = STUDENT_T * math.sqrt(variance)
    return Estimate(value, value - margin, value + margin)
