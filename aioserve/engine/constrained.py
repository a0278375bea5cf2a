"""Guides of one constrained completion, and the rows of steps that wait for them."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.errors import AioserveError
from aioserve.sampling.masks import LateMasks

__all__ = ["ConstrainedCompletion", "Guide"]


class Guide(msgspec.Struct, frozen=True, gc=False):
    """Forced tokens of a completion, and the choice that follows them."""

    forced: tuple[int, ...]
    """Tokens that must come next, in order. May be empty."""
    mask: npt.NDArray[np.int32] | None
    """Tokens allowed after the forced ones, a bit for each id; None if those end the completion."""
    error: AioserveError | None = None
    """Error that ends the completion."""
    drawn: bool = False
    """True if forced tokens are drawn all the same, since more is wanted of them than their ids.

    The mask then applies after the last of them. It is all zeros if that one ends the completion.
    """
    error_behind: AioserveError | None = None
    """Error that ends the completion once the last forced token is drawn."""

    def mask_at(self, place: int) -> npt.NDArray[np.int32] | None:
        """Mask of the draw that follows the first `place` forced tokens."""
        if self.mask is None or place == len(self.forced):
            return self.mask
        only = np.zeros_like(self.mask)
        token_id = self.forced[place]
        only.view(np.uint32)[token_id // 32] = np.uint32(1 << token_id % 32)
        return only

    @property
    def is_last(self) -> bool:
        """True if the completion ends with forced tokens that are drawn."""
        return self.drawn and self.mask is not None and not self.mask.any()


class ConstrainedCompletion:
    """Matches the guides of one completion with the rows of steps that sample its tokens."""

    __slots__ = ("_begin", "_first", "_guide", "_position", "_waiting", "is_large")

    def __init__(self, position: int, is_large: bool = False) -> None:
        """`position` is that of its first token. `is_large` says that its grammar is large."""
        self.is_large: bool = is_large
        self._begin = self._first = self._position = position
        self._guide: Guide | None = None
        """Guide of the tokens from `_first` on: the forced ones, and the free one at
        `_position`."""
        self._waiting: list[tuple[int, LateMasks, int]] = []

    def expect(self, position: int, masks: LateMasks, row: int) -> None:
        """Bring the mask of a row that samples the token at `position`, now or once it is known."""
        self._waiting.append((position, masks, row))
        self._bring()

    def add_guide(self, guide: Guide, num_tokens: int = 1) -> None:
        """Take the next guide, for what follows the `num_tokens` tokens known since the previous
        one."""
        if self._guide is not None:
            self._first = self._position + num_tokens
        self._guide, self._position = guide, self._first + len(guide.forced)
        self._bring()

    def drawn_behind(self, position: int) -> tuple[Guide, int] | None:
        """Find the guide of the token at `position`, if that token is forced and drawn; otherwise
        None.

        The number returned with it counts the guide's forced tokens before that position.
        """
        guide = self._guide
        if guide is None or not guide.drawn or not self._first <= position < self._position:
            return None
        return guide, position - self._first

    def num_forced_behind(self, num_tokens: int) -> int:
        """Count the forced tokens that follow the first `num_tokens` of the completion.

        Negative if the last of these was not forced.
        """
        return self._position - self._begin - num_tokens

    @property
    def error_behind(self) -> AioserveError | None:
        """Error that ends the completion after its forced tokens."""
        return None if self._guide is None else self._guide.error_behind

    def ended(self) -> None:
        """Let waiting rows go on; their samples are dropped."""
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
                masks.bring(row, None)  # a dropped run: its token is known
            else:
                masks.bring(row, guide.mask_at(position - self._first))
