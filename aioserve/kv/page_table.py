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

    __slots__ = ("_buffer", "_length", "_view")

    def __init__(self) -> None:
        self._buffer = np.empty(_FIRST_CAPACITY, np.int32)
        self._length = 0
        self._view = self._read_only_view()

    def __len__(self) -> int:
        """Number of pages."""
        return self._length

    @property
    def page_ids(self) -> npt.NDArray[np.int32]:
        """The pages so far, a read-only view: int32 `[len(self)]`. What it shows never changes."""
        return self._view

    def append(self, page_ids: npt.NDArray[np.int32]) -> None:
        """Add `page_ids`, int32 `[n]`, behind the pages so far."""
        end = self._length + len(page_ids)
        if end > len(self._buffer):
            grown = np.empty(max(end, 2 * len(self._buffer)), np.int32)
            grown[: self._length] = self._view
            self._buffer = grown
        self._buffer[self._length : end] = page_ids
        self._length = end
        self._view = self._read_only_view()

    @classmethod
    def of(cls, *parts: npt.NDArray[np.int32]) -> PageTable:
        """A table of `parts`, each int32 `[n]`, one after the other."""
        table = cls()
        for part in parts:
            table.append(part)
        return table

    def first(self, num_pages: int) -> PageTable:
        """A new table of the first `num_pages` pages."""
        return PageTable.of(self._view[:num_pages])

    def replaced(self, index: int, page_id: npt.NDArray[np.int32]) -> PageTable:
        """A new table with `page_id`, int32 `[1]`, in place of page number `index`."""
        return PageTable.of(self._view[:index], page_id, self._view[index + 1 :])

    def _read_only_view(self) -> npt.NDArray[np.int32]:
        view = self._buffer[: self._length]
        view.flags.writeable = False
        return view

    def __repr__(self) -> str:
        return f"PageTable({self._view.tolist()})"
