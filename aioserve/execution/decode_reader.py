"""Steps that compute one token of each sequence: most are such, and each is like the one before.

A page table is kept between them. Of B sequences about B / page_size get a page in a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_not

import numpy as np
import numpy.typing as npt

from aioserve.errors import InvariantError
from aioserve.kv.pages import pages_for, token_location
from aioserve.ops import HostBatch
from aioserve.steps.plan import PENDING_TOKEN, WorkItem

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
        self._only_pending = np.zeros(0, np.int64)
        # Of the last batch: by the page tables above, and where it stopped.
        self._locations: list[int] = []
        self._ends: list[int] = []
        self._context_lens = np.zeros(0, np.int32)
        self._slots: list[int] = []
        self._pending_slots = np.zeros(0, np.int64)

    def read(self, items: Sequence[WorkItem]) -> HostBatch:
        """Items with a count of 1 and one row each.

        Raises `InvariantError` for one without a page for its token.
        """
        # Lists, and one function that makes arrays of them: what comes between two steps finds
        # cold caches, and half a dozen of numpy's functions then take longer than a short loop.
        size = len(items)
        if size != len(self._rows):
            self._rows = np.arange(size)
            self._query_start = np.arange(size + 1, dtype=np.int32)
            self._only_pending = np.full(size, PENDING_TOKEN, np.int64)
        starts = [item.start for item in items]
        follows, self._ends = starts == self._ends, []  # nothing follows what fails below
        changed = self._update([item.page_ids for item in items])
        locations = self._locate(items, changed if follows else range(size))
        positions = self._context_lens if follows else np.array(starts, np.int32)
        self._locations, self._ends = locations, [start + 1 for start in starts]
        self._context_lens = np.array(self._ends, np.int32)
        ids, slots = [item.token_ids[0] for item in items], [item.slot for item in items]
        token_ids, pending_rows = self._only_pending, self._rows
        if ids.count(PENDING_TOKEN) < size:
            rows = [row for row, token_id in enumerate(ids) if token_id == PENDING_TOKEN]
            token_ids, pending_rows = np.array(ids, np.int64), np.array(rows, np.int64)
            slots = [slots[row] for row in rows]
        if slots != self._slots:
            self._slots, self._pending_slots = slots, np.array(slots, np.int64)
        return HostBatch(
            token_ids=token_ids,
            query_start=self._query_start,
            context_lens=self._context_lens,
            page_table=self._table,
            token_locations=np.array(locations, np.int64),
            positions=positions,
            logit_rows=self._rows,
            pending_rows=pending_rows,
            pending_slots=self._pending_slots,
        )

    def _locate(self, items: Sequence[WorkItem], changed: Iterable[int]) -> list[int]:
        """Where the tokens go. In rows but the `changed` the last one went to the place before, and
        no page table need be read, unless it was the last of its page."""
        page_size = self._page_size
        unknown = set(changed)
        locations = [0] * len(items)
        if len(unknown) < len(items):
            locations = [location + 1 for location in self._locations]
            unknown.update([row for row, at in enumerate(locations) if at % page_size == 0])
        try:
            for row in unknown:
                item = items[row]
                locations[row] = token_location(item.page_ids, item.start, page_size)
        except IndexError:
            for item in items:
                check_pages(item, pages_for(item.start + 1, page_size))
            raise
        return locations

    def _update(self, page_ids: list[PageIds]) -> Sequence[int]:
        """Let the rows of the table be those of `page_ids`; which ones changed."""
        known = self._page_ids
        width = self._table.shape[1]
        changed: Sequence[int] = range(len(page_ids))
        if len(known) == len(page_ids):
            if not any(map(is_not, page_ids, known)):
                return ()
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
        return changed


def check_pages(item: WorkItem, num_pages: int) -> None:
    """Raise `InvariantError` for an item with fewer pages: its KV would go to pages of others."""
    if len(item.page_ids) < num_pages:
        raise InvariantError(
            f"sequence {item.sequence_id} has {len(item.page_ids)} pages, and its tokens up to "
            f"position {item.start + item.count - 1} need {num_pages}"
        )
