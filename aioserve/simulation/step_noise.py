"""Noise of steps of one kind: ratios to a cost table's times, by place on its grid, drawn by step
number.

The draw for a step depends only on a seed and the step's number. So steps may be asked for one by
one, several at once, and in any order. Only integers are drawn: the digits are the same in each
case.

Slow steps come together: something else runs on the machine for a while, or it is slower. If the
order of the measured ratios is known, blocks of it are drawn, in which steps follow each other as
they did. This is the block bootstrap (Künsch, "The Jackknife and the Bootstrap for General
Stationary Observations", Annals of Statistics 1989). Independent draws for each step would average
out over the steps of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from aioserve.errors import ConfigError
from aioserve.traces.checks import named

__all__ = ["BLOCK_STEPS", "MAX_ORDER", "MAX_RATIOS", "NUM_RANKS", "StepNoise"]

MAX_RATIOS = 256
"""Most ratios of one point of a grid."""
MAX_RATIO = 1e3
NUM_RANKS = 256
"""Ranks of measured steps among those near the same point, from the shortest to the longest."""
MAX_ORDER = 1 << 16
"""Most ranks in the order in which they were measured."""
BLOCK_STEPS = 256
"""Steps of a block, which follow each other as measured ones did."""
MEAN_ERROR = 0.01
"""Largest difference of a point's mean ratio from 1."""

BITS_64 = (1 << 64) - 1
STRIDE = 0x9E3779B97F4A7C15
"""Constant 2**64 / golden ratio, as in SplitMix64, whose finalizer mixes the bits. See Steele et
al., "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
"""
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)

NAME = "step_noise (`scatter` in a file)"


class StepNoise:
    """Ratios for each point of a grid, all equally likely, with a mean of 1."""

    def __init__(
        self,
        ratios: Sequence[Sequence[Sequence[float]]],
        shape: tuple[int, ...],
        order: Sequence[int] | None = None,
    ) -> None:
        """Check and store the ratios of a grid of `shape`.

        `ratios[i][j]` are those of a point; all points have equally many. With an `order` they must
        ascend. `order` has the ranks, in `[0, NUM_RANKS)`, of the measured steps one after the
        other.

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
        self._order = None if order is None else _checked_order(order)
        if order is not None and (np.diff(grid, axis=2) < 0).any():
            raise ConfigError(f"{NAME} must grow at each point where its order is given")
        self._grid = grid
        self._ratios: list[list[list[float]]] = grid.tolist()

    def ratio(self, i: int, j: int, draw: int) -> float:
        """Return the ratio of a step near point `[i][j]` for which `draw` was drawn."""
        return self._ratios[i][j][(draw >> 32) * self.num_ratios >> 32]

    def ratios(self, i: int, j: int, draws: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
        """Return the ratios of several steps near point `[i][j]`."""
        high = draws >> np.uint64(32)
        return self._grid[i, j][high * np.uint64(self.num_ratios) >> np.uint64(32)]

    def percentiles(self, i: int, j: int, ranks: Sequence[float]) -> list[float]:
        return np.percentile(self._grid[i, j], ranks).tolist()

    def draw(self, seed: int, step: int) -> int:
        """Draw 64 bits for the step of that number."""
        if self._order is None:
            return _drawn(seed, step)
        start = _drawn(seed, step // BLOCK_STEPS) % len(self._order)
        return int(self._order[(start + step % BLOCK_STEPS) % len(self._order)])

    def draws(self, seed: int, step: int, count: int) -> npt.NDArray[np.uint64]:
        """Return what `draw` gives for each of `count` steps from that number on."""
        if self._order is None:
            return _drawn_from(seed, step, count)
        first, last = step // BLOCK_STEPS, (step + count) // BLOCK_STEPS
        blocks = _drawn_from(seed, first, last - first + 1) % np.uint64(len(self._order))
        numbers = np.arange(step, step + count)
        places = blocks.astype(np.int64)[numbers // BLOCK_STEPS - first] + numbers % BLOCK_STEPS
        return self._order[places % len(self._order)]


def _checked_order(order: Sequence[int]) -> npt.NDArray[np.uint64]:
    """Return ranks as draws: 64 bits in the middle of each rank's share."""
    with named("cost table: noise_order"):
        ranks = [*islice(order, MAX_ORDER + 1)]
    if not 1 <= len(ranks) <= MAX_ORDER or not all(
        type(rank) is int and 0 <= rank < NUM_RANKS for rank in ranks
    ):
        raise ConfigError(
            f"noise_order must be 1 to {MAX_ORDER:,} ranks in [0, {NUM_RANKS - 1}], got "
            f"{len(ranks):,} from {min(ranks, default=0)} to {max(ranks, default=0)}"
        )
    width = (1 << 64) // NUM_RANKS
    return np.array(ranks, np.uint64) * np.uint64(width) + np.uint64(width // 2)


def _drawn(seed: int, number: int) -> int:
    return _mixed(_mixed(seed) + number)


def _drawn_from(seed: int, number: int, count: int) -> npt.NDArray[np.uint64]:
    """Return what `_drawn` gives for `count` numbers from that one on."""
    bits = np.arange(count, dtype=np.uint64) + np.uint64((_mixed(seed) + number) & BITS_64)
    bits += np.uint64(STRIDE)
    bits = (bits ^ bits >> np.uint64(30)) * np.uint64(MULTIPLIERS[0])
    bits = (bits ^ bits >> np.uint64(27)) * np.uint64(MULTIPLIERS[1])
    return bits ^ bits >> np.uint64(31)


def _mixed(bits: int) -> int:
    bits = bits + STRIDE & BITS_64
    bits = (bits ^ bits >> 30) * MULTIPLIERS[0] & BITS_64
    bits = (bits ^ bits >> 27) * MULTIPLIERS[1] & BITS_64
    return bits ^ bits >> 31
