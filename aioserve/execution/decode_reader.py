"""Steps that compute one token of each sequence: most are such, and each is like the one before.

A page table is kept between them. Of B sequences about B / page_size get a page in a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_not

import numpy as np
import numpy.typing as npt

from aioserve.errors import InvariantError
from aioserve.execution.plan import PENDING_TOKEN, WorkItem
from aioserve.kv.pages import pages_for, token_location
from aioserve.ops import HostBatch

__all__ = ["DecodeReader", "check_pages"]

SPARE_PAGES = 16
"""A table is made wider by so many pages than it needs to be, and then lasts for a while."""

PageIds = npt.NDArray[np.int32]


class DecodeReader:
    """Reads batches of one token per sequence. A step may still read the arrays of a batch when the
    next ones are read: nothing that was given out is written again."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        # Views of page tables: what one shows never changes, so the same object is the same pages.
        self._page_ids: list[PageIds] = []
        self._table = np.zeros((0, 0), np.int32)
        self._rows = np.arange(0)
        self._query_start = np.arange(1, dtype=np.int32)

    def read(self, items: Sequence[WorkItem]) -> HostBatch:
        """Items with a count of 1 and one row each.

        Raises `InvariantError` for one without a page for its token.
        """
        # Lists, and one function that makes arrays of them: what comes between two steps finds
        # cold caches, and half a dozen of numpy's functions then take longer than a short loop.
        size, page_size = len(items), self._page_size
        if size != len(self._rows):
            self._rows = np.arange(size)
            self._query_start = np.arange(size + 1, dtype=np.int32)
        self._update([item.page_ids for item in items])
        starts = [item.start for item in items]
        try:
            locations = [token_location(item.page_ids, item.start, page_size) for item in items]
        except IndexError:
            for item in items:
                check_pages(item, pages_for(item.start + 1, page_size))
            raise
        ids = [item.token_ids[0] for item in items]
        pending = [row for row, token_id in enumerate(ids) if token_id == PENDING_TOKEN]
        return HostBatch(
            token_ids=np.array(ids, np.int64),
            query_start=self._query_start,
            context_lens=np.array([start + 1 for start in starts], np.int32),
            page_table=self._table,
            token_locations=np.array(locations, np.int64),
            positions=np.array(starts, np.int32),
            logit_rows=self._rows,
            pending_rows=self._rows if len(pending) == size else np.array(pending, np.int64),
            pending_slots=np.array([items[row].slot for row in pending], np.int64),
        )

    def _update(self, page_ids: list[PageIds]) -> None:
        """Let the rows of the table be those of `page_ids`."""
        known = self._page_ids
        width = self._table.shape[1]
        changed = range(len(page_ids))
        if len(known) == len(page_ids):
            if not any(map(is_not, page_ids, known)):
                return
            changed = [row for row in changed if page_ids[row] is not known[row]]
        needed = max([len(page_ids[row]) for row in changed])
        if len(known) != len(page_ids) or needed > width:
            changed = range(len(page_ids))
            width = max([len(ids) for ids in page_ids]) + SPARE_PAGES
            table = np.zeros((len(page_ids), width), np.int32)
        else:
            table = self._table.copy()
        for row in changed:
            ids = page_ids[row]
            table[row, : len(ids)] = ids
        self._page_ids, self._table = page_ids, table


def check_pages(item: WorkItem, num_pages: int) -> None:
    """Raise `InvariantError` for an item with fewer pages: its KV would go to pages of others."""
    if len(item.page_ids) < num_pages:
        raise InvariantError(
            f"sequence {item.sequence_id} has {len(item.page_ids)} pages, and its tokens up to "
            f"position {item.start + item.count - 1} need {num_pages}"
        )
