"""Layers that see only the last tokens: they hold pages for these, and give earlier ones back.

Several groups of this kind hold a page each per position, all for the same time. So one
`WindowGroup` stands for all of them. In the prefix tree its pages are group pages of those of group
0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from aioserve.kv.groups.base import Group, GroupClaim
from aioserve.kv.lease import KVLease, SwappedRun
from aioserve.kv.page_pool import NO_STEP
from aioserve.kv.page_table import NO_PAGES, PageTable
from aioserve.kv.prefix_tree import Match
from aioserve.kv.tiers.tier import Tier
from aioserve.paging.layout import GroupSpec
from aioserve.paging.pages import capacity_tokens, full_pages, pages_for, window_pages

__all__ = ["WindowGroup"]

PageIds = npt.NDArray[np.int32]


class WindowGroup(Group):
    """Groups of layers with one window: a token sees the last `window` tokens, itself included.

    The tree gives up window pages that no one refers to, even if receipts cover the page beside
    them. So a claim takes references to the pages that it finds.
    """

    keeps_all = False
    grows_with_chunks = True

    def __init__(self, tiers: Sequence[Tier], spec: GroupSpec) -> None:
        super().__init__(tiers, spec)
        self.needed_tokens: int = spec.window
        self._num_before = spec.window - 1
        self._most_positions = window_pages(spec.window, self.page_size)

    def need(self, num_positions: int) -> int:
        return self.width * min(num_positions, self._most_positions)

    def first_needed(self, index: int) -> int:
        first = index - self._num_before  # not by `first_seen`: each step asks for each sequence
        return full_pages(first, self.page_size) if first > 0 else 0

    def least_index(self, first: int) -> int:
        return capacity_tokens(first, self.page_size) + self._num_before if first else 0

    def pages_of(self, tier: int, page_ids: PageIds) -> PageIds:
        return self._pools[tier].group_pages(page_ids).ravel()

    def match(
        self, match: Match, num_cached: int, num_known: int, swapped: SwappedRun | None
    ) -> GroupClaim:
        size, found, tail = self.page_size, [NO_PAGES] * len(match.tiers), NO_PAGES
        if swapped is not None:
            first = swapped.first
        else:
            first, before = self.first_needed(num_cached), 0
            for tier, page_ids in enumerate(match.tiers):
                found[tier] = self.pages_of(tier, page_ids[max(0, first - before) :])
                self._pools[tier].retain(found[tier])
                before += len(page_ids)
            if match.tail_tokens:
                tail = self.pages_of(0, np.array([match.tail_page], np.int32))
                self._pool.retain(tail)
        num_first = (pages_for(num_cached + 1, size) - first) * self.width - len(found[0])
        # Others may share the found pages, so none may come back when they leave the window.
        num_later = self.need(pages_for(num_known, size) - max(len(match.tiers[0]), first))
        return GroupClaim(first, tuple(found), tail, num_first, max(num_first, num_later))

    def drop(self, claim: GroupClaim) -> None:
        for pool, page_ids in zip(self._pools, claim.found, strict=True):
            pool.unretain(page_ids)
        if len(claim.tail):
            self._pool.unretain(claim.tail)

    def pin(self, match: Match) -> PageTable:
        first = self.first_needed(capacity_tokens(match.num_pages, self.page_size))
        first = min(first, len(match.page_ids))
        held = self.pages_of(0, match.page_ids[first:])
        self._pool.retain(held)
        return PageTable(self.width, first, held)

    def begin(self, claim: GroupClaim, page_ids: PageIds) -> PageTable:
        return PageTable(self.width, claim.first, claim.found[0], page_ids)

    def end_claim(self, claim: GroupClaim, step: int) -> None:
        for pool, page_ids in zip(self._pools[1:], claim.found[1:], strict=True):
            pool.release(page_ids, step)
        if len(claim.tail):
            self._pool.release(claim.tail, NO_STEP)

    def first_swapped(self, lease: KVLease, index: int) -> int:
        return self.first_needed(index)

    def num_own(self, lease: KVLease, table: PageTable) -> int:
        return self._pool.num_unshared(table.held)

    def leave(self, lease: KVLease, table: PageTable) -> None:
        """Give back all pages, fenced by the last step of the lease.

        A sequence that goes on after the last published page needs some earlier pages, which this
        lease has trimmed already. If the tree has these, they count as used, too.
        """
        first = self.first_needed(capacity_tokens(lease.published, self.page_size))
        seen = self.pages_of(0, lease.page_ids[first : table.first])
        seen = seen[seen >= 0]
        self._pool.retain(seen)
        self._pool.release(np.concatenate((seen, table.held)), lease.last_step)
