"""Noise of steps of one kind: ratios to what a cost table says, by place on its grid, drawn by
number of the step.

The draw for a step depends on a seed and the step's number alone, so steps may be asked for
one by one, several at once, and in any order. Only integers are drawn: the digits are the same
whichever way.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from aioserve.errors import ConfigError
from aioserve.traces.checks import named

__all__ = ["MAX_RATIOS", "StepNoise", "drawn", "drawn_from"]

MAX_RATIOS = 256
"""Most ratios of one point of a grid."""
MAX_RATIO = 1e3
MEAN_ERROR = 0.01
"""Most that the mean ratio of a point may differ from 1."""

BITS_64 = (1 << 64) - 1
STRIDE = 0x9E3779B97F4A7C15
"""2**64 / golden ratio, as in SplitMix64 (Steele et al., "Fast Splittable Pseudorandom Number
Generators", OOPSLA 2014), whose finalizer mixes the bits."""
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)

NAME = "step_noise (`scatter` in a file)"


class StepNoise:
    """Ratios for each point of a grid, all equally likely: 1 on average, so that steps take on
    average what the table says."""

    def __init__(self, ratios: Sequence[Sequence[Sequence[float]]], shape: tuple[int, ...]) -> None:
        """`ratios[i][j]` are those of a point; all points of a grid of that shape have as many.

        Raises `ConfigError` for anything else, for ratios that aren't positive, and for a point
        whose mean isn't 1.
        """
        high, wide = shape
        with named("cost table: step_noise"):
            points = [
                [[*islice(point, MAX_RATIOS + 1)] for point in islice(row, wide + 1)]
                for row in islice(ratios, high + 1)
            ]
            counts = {len(point) for row in points for point in row}
            is_grid = len(points) == high and all(len(row) == wide for row in points)
            if not is_grid or len(counts) != 1 or not 1 <= min(counts) <= MAX_RATIOS:
                raise ConfigError(
                    f"{NAME} must be a grid of {high} by {wide} points with 1 to {MAX_RATIOS} "
                    f"ratios each, as many for all"
                )
            grid = np.array(points, float)
        if not (np.isfinite(grid).all() and grid.min() > 0 and grid.max() <= MAX_RATIO):
            raise ConfigError(f"{NAME} must be ratios above 0 and at most {MAX_RATIO:g}")
        off = np.argwhere(np.abs(grid.mean(axis=2) - 1) > MEAN_ERROR)
        if len(off):
            i, j = off[0].tolist()
            raise ConfigError(
                f"{NAME} must be 1 on average at each point, got {grid[i, j].mean():.3g} at "
                f"[{i}][{j}]"
            )
        self.num_ratios: int = grid.shape[2]
        self._grid = grid
        self._ratios: list[list[list[float]]] = grid.tolist()

    def ratio(self, i: int, j: int, draw: int) -> float:
        """Ratio of a step near point `[i][j]` for which `draw` was drawn."""
        return self._ratios[i][j][(draw >> 32) * self.num_ratios >> 32]

    def ratios(self, i: int, j: int, draws: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
        """Ratios of several steps near point `[i][j]`."""
        high = draws >> np.uint64(32)
        return self._grid[i, j][high * np.uint64(self.num_ratios) >> np.uint64(32)]

    def percentiles(self, i: int, j: int, ranks: Sequence[float]) -> list[float]:
        return np.percentile(self._grid[i, j], ranks).tolist()


def drawn(seed: int, step: int) -> int:
    """Draw 64 bits for the step of that number."""
    return _mixed(_mixed(seed) + step)


def drawn_from(seed: int, step: int, count: int) -> npt.NDArray[np.uint64]:
    """Draw for `count` steps from that number on what `drawn` does for each."""
    bits = np.arange(count, dtype=np.uint64) + np.uint64((_mixed(seed) + step) & BITS_64)
    bits += np.uint64(STRIDE)
    bits = (bits ^ bits >> np.uint64(30)) * np.uint64(MULTIPLIERS[0])
    bits = (bits ^ bits >> np.uint64(27)) * np.uint64(MULTIPLIERS[1])
    return bits ^ bits >> np.uint64(31)


def _mixed(bits: int) -> int:
    bits = bits + STRIDE & BITS_64
    bits = (bits ^ bits >> 30) * MULTIPLIERS[0] & BITS_64
    bits = (bits ^ bits >> 27) * MULTIPLIERS[1] & BITS_64
    return bits ^ bits >> 31
