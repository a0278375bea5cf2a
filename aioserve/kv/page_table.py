"""Page table: the pages that one sequence has of one group, in order of position.

    position of a page       0    1    2    3    4
    group 0, width 1         7    3    9    4    6     everything behind needs them
    a group of width 2       .    .    2    8          held from `first` = 2 on; before that the
                             .    .   11    5          table names nothing

Knows page numbers. Owns no page (`PagePool` counts references) and knows no token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from aioserve.paging.pages import full_pages

__all__ = ["NO_PAGES", "PageTable", "rows_of"]

PageIds = npt.NDArray[np.int32]
NO_PAGES: PageIds = np.empty(0, np.int32)

_FIRST_CAPACITY = 16


class PageTable:
    """Table of page ids, int32: `width` for each position, one position after the other.

    A runner may read a view of it while the scheduler changes it. An append writes past the end of
    every view handed out so far, or into a new buffer. To change or remove an entry that a view may
    show, the table takes a new buffer.
    """

    __slots__ = ("_buffer", "_shown", "first", "page_ids", "width")

    def __init__(self, width: int = 1, first: int = 0, *parts: PageIds) -> None:
        """Make a table of `parts`, each int32 `[n * width]`, one after the other from position
        `first` on."""
        self.width: int = width
        self.first: int = first
        """Position of the first pages that are held."""
        end = first * width
        for part in parts:
            end += len(part)
        self._take(np.zeros(end if end > _FIRST_CAPACITY else _FIRST_CAPACITY, np.int32))
        start = first * width
        for part in parts:
            self._buffer[start : start + len(part)] = part
            start += len(part)
        self.page_ids: PageIds = self._shown[:end]
        """Pages so far: a read-only view, int32 `[len(self) * width]`, whose contents never
        change."""

    def __len__(self) -> int:
        """Number of positions, including those whose pages are gone."""
        return full_pages(len(self.page_ids), self.width)

    def between(self, first: int, end: int) -> PageIds:
        """Pages of the positions `[first, end)`: a read-only view, int32 `[n * width]`."""
        return self.page_ids[first * self.width : end * self.width]

    @property
    def held(self) -> PageIds:
        """Pages to which the owner of the table has a reference each."""
        return self.page_ids[self.first * self.width :]

    def append(self, page_ids: PageIds) -> None:
        """Add `page_ids`, int32 `[n * width]`, after the pages so far."""
        length = len(self.page_ids)
        end = length + len(page_ids)
        if end > len(self._buffer):
            grown = np.empty(max(end, 2 * len(self._buffer)), np.int32)
            grown[:length] = self.page_ids
            self._take(grown)
        self._buffer[length:end] = page_ids
        self.page_ids = self._shown[:end]

    def cut(self, num_positions: int) -> None:
        """Keep the first `num_positions` positions."""
        self._set(self.between(0, num_positions))

    def replace(self, index: int, page_ids: PageIds) -> None:
        """Put `page_ids`, int32 `[n * width]`, in place of those from position `index` on."""
        pages, start = self.page_ids, index * self.width
        self._set(np.concatenate((pages[:start], page_ids, pages[start + len(page_ids) :])))

    def _set(self, page_ids: PageIds) -> None:
        """Show `page_ids` in a new buffer."""
        self._take(np.empty(max(_FIRST_CAPACITY, len(page_ids)), np.int32))
        self.page_ids = self._shown[:0]
        self.append(page_ids)

    def _take(self, buffer: PageIds) -> None:
        self._buffer = buffer
        self._shown = buffer.view()
        """Read-only view of the buffer, from which all other views are taken."""
        self._shown.flags.writeable = False

    def __repr__(self) -> str:
        return f"PageTable({self.page_ids.tolist()})"


def rows_of(tables: Sequence[PageTable], first: int, end: int) -> PageIds:
    """Rows of a runner's table for the positions `[first, end)`: int32 `[n * G]`. Each row has the
    pages of one position in each of `tables`, G together."""
    rows = [table.between(first, end).reshape(end - first, table.width) for table in tables]
    return np.concatenate(rows, axis=1).ravel()
