"""Window pages of one lease: what layers that see the last tokens alone keep of its sequence.

    position of a page      0    1    2    3    4
    pages of the lease      7    3    9    4    6     everything behind needs them
    window pages, group 1   .    .    2    8          those of the last tokens are held; before them
                  group 2   .    .   11    5          the table names nothing

A position has one window page for each group of window layers: they are taken, held and given back
together. Knows no token, and no page's owner.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from aioserve.kv.page_table import PageTable
from aioserve.kv.pages import full_pages

__all__ = ["NO_PAGES", "WindowPages"]

PageIds = npt.NDArray[np.int32]
NO_PAGES: PageIds = np.empty(0, np.int32)


class WindowPages:
    """Window pages of one lease: a record, as the lease is."""

    __slots__ = ("first", "num_groups", "table")

    def __init__(self, num_groups: int) -> None:
        self.num_groups: int = num_groups
        self.table: PageTable = PageTable()
        """`num_groups` pages for each position, one position after the other; what is before
        `first` is no matter."""
        self.first: int = 0
        """Position of the first that the lease holds."""

    def __len__(self) -> int:
        """Number of positions, those included whose pages have gone."""
        return full_pages(len(self.table), self.num_groups)

    def between(self, first: int, end: int) -> PageIds:
        """Pages of the positions `[first, end)`: a read-only view, int32 `[n * num_groups]`."""
        return self.table.page_ids[first * self.num_groups : end * self.num_groups]

    @property
    def held(self) -> PageIds:
        """Pages to which the lease has a reference each."""
        return self.table.page_ids[self.first * self.num_groups :]

    def replace(self, index: int, page_ids: PageIds) -> None:
        """Put `page_ids`, int32 `[n * num_groups]`, in place of those from position `index` on."""
        pages = self.table.page_ids
        start = index * self.num_groups
        self.table = PageTable.of(pages[:start], page_ids, pages[start + len(page_ids) :])

    def beside(self, page_ids: PageIds, first: int) -> PageIds:
        """Rows of a runner's table from position `first` on, int32 `[n * (1 + num_groups)]`: each
        page of `page_ids`, int32 `[p]`, and behind it the window pages of its position."""
        end = len(self)
        windows = self.between(first, end).reshape(end - first, self.num_groups)
        return np.concatenate((page_ids[first:end, None], windows), axis=1).ravel()
