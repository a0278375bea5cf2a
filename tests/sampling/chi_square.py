"""Chi-square tests of counts against a distribution."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["deviate", "deviate_of_two"]

Numbers = npt.NDArray[np.floating[Any]] | npt.NDArray[np.integer[Any]]


def deviate(observed: Numbers, expected: Numbers) -> float:
    """Return the normal deviate of Pearson's statistic of counts, `[cells]` each, whose sums are
    equal (Wilson and Hilferty, 1931).

    Cells with fewer than 5 expected count as one. If that cell has fewer than 5 as well, it doesn't
    count. Raises `AssertionError` if a cell with 0 expected was observed.
    """
    assert not np.any(observed[expected == 0]), "a token outside the kept set was drawn"
    common = expected >= 5
    rest = expected[~common].sum()
    statistic = ((observed - expected)[common] ** 2 / expected[common]).sum()
    cells = int(common.sum())
    if rest >= 5:
        statistic += (observed[~common].sum() - rest) ** 2 / rest
        cells += 1
    return _normal(statistic, cells - 1)


def deviate_of_two(first: Numbers, second: Numbers) -> float:
    """Normal deviate of the statistic of two samples of one size, counts of `[cells]` each, as if
    both had one distribution. Cells of less than 10 of both together count as one."""
    together = first + second
    common = together >= 10
    firsts, seconds = (np.append(each[common], each[~common].sum()) for each in (first, second))
    both = firsts + seconds
    statistic = ((firsts - seconds)[both > 0] ** 2 / both[both > 0]).sum()
    return _normal(statistic, int((both > 0).sum()) - 1)


def _normal(statistic: float, degrees: int) -> float:
    if degrees == 0:
        return 0.0
    spread = 2 / (9 * degrees)
    return float(((statistic / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))
