"""The pages of one sequence in order of position: a list that only grows.

Knows page numbers; owns no page (`PagePool` counts references) and knows no token.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["PageTable"]

_FIRST_CAPACITY = 16


class PageTable:
    """Append-only table of page ids, int32.

    A runner may read a view of it while the scheduler appends: an append writes past the end of
    every view handed out so far, or into a new buffer, never into an entry that a view shows. Where
    an entry has to change, or to go, there is a new table.
    """

    __slots__ = ("_buffer", "_shown", "page_ids")

    def __init__(self) -> None:
        self._take(np.empty(_FIRST_CAPACITY, np.int32))
        self.page_ids: npt.NDArray[np.int32] = self._shown[:0]
        """The pages so far, a read-only view: int32 `[len(self)]`. What it shows never changes."""

    def __len__(self) -> int:
        """Number of pages."""
        return len(self.page_ids)

    def append(self, page_ids: npt.NDArray[np.int32]) -> None:
        """Add `page_ids`, int32 `[n]`, behind the pages so far."""
        length = len(self.page_ids)
        end = length + len(page_ids)
        if end > len(self._buffer):
            grown = np.empty(max(end, 2 * len(self._buffer)), np.int32)
            grown[:length] = self.page_ids
            self._take(grown)
        self._buffer[length:end] = page_ids
        self.page_ids = self._shown[:end]

    @classmethod
    def of(cls, *parts: npt.NDArray[np.int32]) -> PageTable:
        """A table of `parts`, each int32 `[n]`, one after the other."""
        table = cls()
        for part in parts:
            table.append(part)
        return table

    def first(self, num_pages: int) -> PageTable:
        """A new table of the first `num_pages` pages."""
        return PageTable.of(self.page_ids[:num_pages])

    def replaced(self, index: int, page_id: npt.NDArray[np.int32]) -> PageTable:
        """A new table with `page_id`, int32 `[1]`, in place of page number `index`."""
        return PageTable.of(self.page_ids[:index], page_id, self.page_ids[index + 1 :])

    def _take(self, buffer: npt.NDArray[np.int32]) -> None:
        self._buffer = buffer
        self._shown = buffer.view()
        """A view of the buffer, of which all views are read-only."""
        self._shown.flags.writeable = False

    def __repr__(self) -> str:
        return f"PageTable({self.page_ids.tolist()})"
