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
    drawn: bool = False
    """The forced tokens are drawn all the same, since more is asked of them than their ids. The
    mask is that behind the last of them, and leaves nothing where that one ends the completion."""
    error_behind: AioserveError | None = None
    """Error that ends the completion when the last of them is drawn."""

    def mask_at(self, place: int) -> npt.NDArray[np.int32] | None:
        """What may be drawn behind the first `place` forced tokens."""
        if self.mask is None or place == len(self.forced):
            return self.mask
        only = np.zeros_like(self.mask)
        token_id = self.forced[place]
        only.view(np.uint32)[token_id // 32] = np.uint32(1 << token_id % 32)
        return only

    @property
    def is_last(self) -> bool:
        """Whether the completion ends with the forced tokens that are drawn."""
        return self.drawn and self.mask is not None and not self.mask.any()


class ConstrainedCompletion:
    """What is known of one completion, and which rows of steps wait for more."""

    __slots__ = ("_begin", "_first", "_guide", "_position", "_waiting", "is_large")

    def __init__(self, position: int, is_large: bool = False) -> None:
        """`position` is that of its first token. `is_large` tells of its grammar."""
        self.is_large: bool = is_large
        self._begin = self._first = self._position = position
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

    def drawn_behind(self, position: int) -> tuple[Guide, int] | None:
        """Where the token at a position is a forced one that is drawn: what guides it, and how many
        of the forced ones come before it."""
        guide = self._guide
        if guide is None or not guide.drawn or not self._first <= position < self._position:
            return None
        return guide, position - self._first

    def num_forced_behind(self, num_tokens: int) -> int:
        """How many forced tokens come behind the first `num_tokens` of the completion; less than 0
        where the last of these was free."""
        return self._position - self._begin - num_tokens

    @property
    def error_behind(self) -> AioserveError | None:
        """Error that ends the completion behind its forced tokens."""
        return None if self._guide is None else self._guide.error_behind

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
            if position > self._position or (position == self._position and guide.is_last):
                self._waiting.append((position, masks, row))
            elif position < self._first:
                masks.bring(row, None)  # of a run that is over: the token is known
            else:
                masks.bring(row, guide.mask_at(position - self._first))
