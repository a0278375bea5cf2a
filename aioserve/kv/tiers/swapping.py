"""Pages in later tiers. Those of preempted sequences are copied there and back, or given up. Those
of the prefix tree are copied back.

Reads leases, and changes none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from aioserve.config import Preemption
from aioserve.errors import InvariantError
from aioserve.kv.groups.base import Group, GroupClaim
from aioserve.kv.lease import KVLease, SwappedPages, SwappedRun
from aioserve.kv.page_pool import OutOfPagesError
from aioserve.kv.page_table import rows_of
from aioserve.kv.prefix_tree import Match, PrefixTree
from aioserve.kv.tiers.copies import Copies
from aioserve.kv.tiers.tier import Tier
from aioserve.paging.pages import full_pages, pages_for

__all__ = ["SWAP_FROM_TOKENS", "Swapping"]

PageIds = npt.NDArray[np.int32]

SWAP_FROM_TOKENS = 256
"""Context length from which "auto" swaps: the time to copy is linear in it, the time to compute
quadratic."""
SWAP_TIER = 1


class Swapping:
    """Swaps pages of the leases of one `KVMemory` to the second of `tiers`, if there is one, and
    back.

    Pages of that tier that `tree` holds make room.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        groups: Sequence[Group],
        tree: PrefixTree | None,
        copies: Copies,
        preemption: Preemption,
    ) -> None:
        self._tiers = tiers
        self._groups = groups
        self._tree = tree
        self._copies = copies
        self._preemption = preemption

    def swap_out(
        self, lease: KVLease, num_known: int, step: int, how: Preemption | None
    ) -> SwappedPages | None:
        """Copy what the next token needs of a lease with `num_known` known tokens, and the tree
        doesn't hold for it, in `step`.

        Return None if the sequence is to be recomputed, or the tier has no room. `how` replaces
        `preemption`.
        """
        # One known token is always computed again: its step samples the next.
        computed = min(lease.computed, num_known - 1)
        entries = computed - (lease.computed - lease.entries)
        if len(self._tiers) <= SWAP_TIER or not self._swaps(lease, how):
            return None
        pool = self._tiers[SWAP_TIER].pool
        end = pages_for(entries, pool.page_size)
        if end <= lease.published:
            return None
        firsts = [group.first_swapped(lease, entries) for group in self._groups]
        sources = [
            table.between(first, end) for table, first in zip(lease.tables, firsts, strict=True)
        ]
        count = sum([len(page_ids) for page_ids in sources])
        if count > pool.num_free and self._tree is not None:
            self._copies.evicted(self._tree.evict(count - pool.num_free, step, SWAP_TIER))
        try:
            targets = pool.acquire(count)
        except OutOfPagesError:
            return None
        runs: list[SwappedRun] = []
        for first, page_ids in zip(firsts, sources, strict=True):
            runs.append(SwappedRun(first, targets[: len(page_ids)]))
            self._copies.across(0, page_ids, SWAP_TIER, runs[-1].page_ids)
            targets = targets[len(page_ids) :]
        return SwappedPages(SWAP_TIER, tuple(runs), computed, entries, step)

    def _swaps(self, lease: KVLease, how: Preemption | None) -> bool:
        preemption = how or self._preemption
        if preemption == "auto":
            return lease.computed >= SWAP_FROM_TOKENS
        return preemption == "swap"

    def swap_in(self, lease: KVLease, claims: Sequence[GroupClaim]) -> int:
        """Copy pages back to a lease of the same sequence, which already has those found. Return
        the number of the step that copied them out."""
        swapped = lease.swapped
        if swapped is None:
            raise InvariantError("a lease without swapped pages is swapped in")
        for run, claim, table in zip(swapped.groups, claims, lease.tables, strict=True):
            start = claim.first * table.width + len(claim.found[0]) + claim.num_later
            sources = run.page_ids[start - run.first * table.width :]
            targets = table.page_ids[start : start + len(sources)]
            self._copies.across(swapped.tier, sources, 0, targets)
        return swapped.step

    def promote(
        self, lease: KVLease, match: Match, claims: Sequence[GroupClaim], step: int
    ) -> None:
        """Copy what `match` found in later tiers to the first new pages of a lease that begins, in
        `step`."""
        if self._tree is None:
            raise InvariantError("a match without a prefix tree")
        targets: list[PageIds] = []
        for claim, table in zip(claims, lease.tables, strict=True):
            start = claim.first * table.width + len(claim.found[0])
            targets.append(table.page_ids[start : start + claim.num_later])
        beside, end = lease.tables[1:], match.num_pages
        counts = [
            full_pages(len(page_ids), table.width)
            for page_ids, table in zip(targets[1:], beside, strict=True)
        ]
        first = end - min(counts, default=0)
        group_page_ids = rows_of(beside, first, end) if first < end else None
        self._tree.promote(match.receipt, targets[0], step, group_page_ids)
        for claim, page_ids in zip(claims, targets, strict=True):
            start = 0
            for tier, sources in enumerate(claim.found[1:], 1):
                own = page_ids[start : start + len(sources)]
                self._copies.across(tier, sources, 0, own)
                start += len(sources)

    def give_up(self, swapped: SwappedPages, last_step: int) -> None:
        """Free the swapped pages. Step `last_step` may still read them."""
        pool = self._tiers[swapped.tier].pool
        for run in swapped.groups:
            pool.release(run.page_ids, max(last_step, swapped.step))
