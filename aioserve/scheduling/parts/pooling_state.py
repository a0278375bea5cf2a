"""Progress of the sum over a prompt's hidden states, which steps make part by part.

    positions   0 ........ added ........ launched ........ end
                  in total      in flight       to compute

Each token counts once. A sequence that begins again may take the added tokens from the prefix
cache, and computes all after them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from aioserve.steps.plan import PooledTokens

__all__ = ["PoolingState"]


class PoolingState:
    """Sum of one sequence over the `positions` that its request names."""

    __slots__ = ("_added", "_first", "_launched", "_total", "end")

    def __init__(self, positions: range) -> None:
        self._first = positions.start
        self.end: int = positions.stop
        self.forget()

    @property
    def num_cacheable(self) -> int | None:
        """Leading tokens that needn't be computed for the sum; None for no limit."""
        return self._launched if self._launched < self.end else None

    def launch(self, start: int, end: int) -> PooledTokens | None:
        """Return what a step adds that computes the tokens at `[start, end)`; None for nothing.
        `start` is at most `num_cacheable`."""
        first = self._launched
        count = min(end, self.end) - first
        if count <= 0:
            return None
        self._launched = first + count
        return PooledTokens(offset=first - start, count=count)

    def add(self, part: npt.NDArray[np.float32], count: int) -> None:
        """Add the sum over the next `count` tokens, float32 `[hidden]`, from a step."""
        self._added += count
        self._total = part + self._total

    def begin_again(self) -> None:
        """Forget what is in flight."""
        self._launched = self._added

    def forget(self) -> None:
        """Forget everything, because what was added may be wrong."""
        self._added = self._launched = self._first
        self._total = np.zeros(1, np.float64)

    @property
    def total(self) -> npt.NDArray[np.float64]:
        """Sum, float64 `[hidden]`, once all tokens were added."""
        return self._total
