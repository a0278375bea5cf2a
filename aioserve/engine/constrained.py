"""What may come next in one constrained completion, and which rows of steps wait for that."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.errors import AioserveError
from aioserve.sampling.masks import LateMasks

__all__ = ["ConstrainedCompletion", "Guide"]


class Guide(msgspec.Struct, frozen=True, gc=False):
    """What comes next in one completion."""

    forced: tuple[int, ...]
    """Tokens that must come first."""
    mask: npt.NDArray[np.int32] | None
    """Which tokens may come behind them; None where they end the completion."""
    error: AioserveError | None = None
    """Error that ends the completion."""


class ConstrainedCompletion:
    """What is known of one completion, and which rows of steps wait for more."""

    __slots__ = ("_first", "_guide", "_position", "_waiting")

    def __init__(self, position: int) -> None:
        """`position` is that of its first token."""
        self._first = self._position = position
        self._guide: Guide | None = None
        """What guides the tokens from `_first` on: those that are forced, and the one behind them,
        which is at `_position`."""
        self._waiting: list[tuple[int, LateMasks, int]] = []

    def expect(self, position: int, masks: LateMasks, row: int) -> None:
        """A step samples the token at a position."""
        self._waiting.append((position, masks, row))
        self._bring()

    def told(self, guide: Guide, num_tokens: int = 1) -> None:
        """What is known once the tokens before these are: so many since it was told before."""
        if self._guide is not None:
            self._first = self._position + num_tokens
        self._guide, self._position = guide, self._first + len(guide.forced)
        self._bring()

    def ended(self) -> None:
        """Let the rows that wait go on: what is sampled for them is dropped."""
        for _, masks, row in self._waiting:
            masks.bring(row, None)
        self._waiting = []

    def _bring(self) -> None:
        guide = self._guide
        if guide is None:
            return
        waiting, self._waiting = self._waiting, []
        for position, masks, row in waiting:
            if position > self._position:
                self._waiting.append((position, masks, row))
            elif position < self._first:
                masks.bring(row, None)  # of a run that is over: the token is known
            elif position == self._position or guide.mask is None:
                masks.bring(row, guide.mask)
            else:
                only = np.zeros_like(guide.mask)
                token_id = guide.forced[position - self._first]
                only.view(np.uint32)[token_id // 32] = np.uint32(1 << token_id % 32)
                masks.bring(row, only)
