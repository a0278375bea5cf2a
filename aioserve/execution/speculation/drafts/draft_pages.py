"""Tracks how much of its KV pages a draft model has written.

The target writes the KV of every token; the draft model only of tokens that it comes by. So its
page may have a hole that the target's page of the same number has not. This happens after a prefix
that was computed without draft tokens, or came back from the host. The hole is computed before the
next draft token.

    target    [ a b c d ] [ e f g h ] [ i j . . ]
    draft     [ a b c d ] [ e f . . ] [ . . . . ]     filled 4, 2, 0: the hole begins at position 6

Knows pages, but neither tensors nor requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from aioserve.paging.pages import pages_for

__all__ = ["DraftPages"]

PageIds = npt.NDArray[np.int32]


class DraftPages:
    """Number of leading tokens of each page that the draft model has written.

    A table has the pages of a sequence in order of position, int32 `[n]`.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._filled = np.zeros(num_pages, np.int32)
        self._page_size = page_size

    def of(self, table: PageIds, start: int, end: int) -> list[int]:
        """Return the pages of positions `[start, end)`."""
        return table[start // self._page_size : pages_for(end, self._page_size)].tolist()

    def num_alike(self, table: PageIds, start: int, end: int, page_ids: Sequence[int]) -> int:
        """Count the leading positions of `[start, end)` that still have their former pages.

        `page_ids` are the former pages, from position `start` on.
        """
        if start >= end:
            return 0
        now = self.of(table, start, end)
        alike = [one == before for one, before in zip(now, page_ids, strict=False)]
        count = alike.index(False) if False in alike else len(alike)
        first = start // self._page_size
        return max(0, min(end, (first + count) * self._page_size) - start)

    def copied(self, source: int, target: int, num_tokens: int) -> None:
        """Note a copy of a page's first tokens to another page, in both models."""
        self._filled[target] = min(int(self._filled[source]), num_tokens)

    def overwritten(self, table: PageIds, start: int, end: int) -> None:
        """Note that the target writes positions `[start, end)`, which the draft hasn't seen yet."""
        first, offset = divmod(start, self._page_size)
        page = table[first]
        self._filled[page] = min(int(self._filled[page]), offset)
        self._filled[table[first + 1 : pages_for(end, self._page_size)]] = 0

    def written(self, table: PageIds, start: int, end: int) -> None:
        """Note that the draft model has written positions `[start, end)`, if it had all before
        them."""
        if start >= end:
            return
        last = pages_for(end, self._page_size) - 1
        self._filled[table[start // self._page_size : last]] = self._page_size
        page = table[last]
        self._filled[page] = max(int(self._filled[page]), end - last * self._page_size)

    def hole(self, table: PageIds, end: int) -> int:
        """Return the first position before `end` that the draft model lacks; `end` if it has
        all."""
        filled = self._filled[table[: pages_for(end, self._page_size)]]
        short = np.flatnonzero(filled < self._page_size)
        if not len(short):
            return end
        first = int(short[0])
        return min(end, first * self._page_size + int(filled[first]))
