"""Layers that see everything: a page for each position, from the first token to the last."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from aioserve.kv.groups.base import Group, GroupClaim
from aioserve.kv.lease import KVLease, SwappedRun
from aioserve.kv.page_table import NO_PAGES, PageTable
from aioserve.kv.prefix_tree import Match
from aioserve.paging.pages import pages_for

__all__ = ["FullGroup"]

PageIds = npt.NDArray[np.int32]


class FullGroup(Group):
    """Group 0 of a layout. The prefix tree consists of its pages. The receipts of a match lock
    them, so a claim holds nothing more."""

    keeps_all = True
    grows_with_chunks = False

    def need(self, num_positions: int) -> int:
        return num_positions

    def pages_of(self, tier: int, page_ids: PageIds) -> PageIds:
        return page_ids

    def match(
        self, match: Match, num_cached: int, num_known: int, swapped: SwappedRun | None
    ) -> GroupClaim:
        num_new = pages_for(num_known, self.page_size) - len(match.tiers[0])
        tail = np.array([match.tail_page], np.int32) if match.tail_tokens else NO_PAGES
        return GroupClaim(0, match.tiers, tail, num_new, num_new)

    def pin(self, match: Match) -> PageTable:
        return PageTable()

    def begin(self, claim: GroupClaim, page_ids: PageIds) -> PageTable:
        self._pool.retain(claim.found[0])
        return PageTable(1, 0, claim.found[0], page_ids)

    def first_swapped(self, lease: KVLease, index: int) -> int:
        return lease.published

    def num_own(self, lease: KVLease, table: PageTable) -> int:
        # The tree has a reference to each published page.
        return self._pool.num_unshared(table.page_ids[lease.published :])

    def leave(self, lease: KVLease, table: PageTable) -> None:
        self._pool.release(table.page_ids, lease.last_step)
