"""Contract of a group: what a lease needs of one kind of KV.

Knows leases, tiers and pages. Must not know the prefix tree or other groups. `KVMemory` calls it,
and only `KVMemory` changes leases. Verbs that get a page table change that table, and say which
pages they need or give back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.kv.lease import KVLease, SwappedRun
from aioserve.kv.page_pool import PagePool
from aioserve.kv.page_table import PageTable
from aioserve.kv.prefix_tree import Match
from aioserve.kv.tiers.tier import Tier
from aioserve.paging.layout import GroupSpec
from aioserve.paging.pages import full_pages

__all__ = ["Group", "GroupClaim"]

PageIds = npt.NDArray[np.int32]


class GroupClaim(msgspec.Struct, frozen=True, gc=False):
    """Pages of one group that a lease would find and need."""

    first: int
    """Position of the first pages that the lease begins with."""
    found: tuple[PageIds, ...]
    """Pages found in each tier from there on, nearest first."""
    tail: PageIds
    """Pages of the position that is copied in part."""
    num_first: int
    """New pages to begin with. The first of them receive what was found in later tiers."""
    num_new: int
    """New pages for all known tokens. Counts as many as are held at a time."""

    @property
    def num_later(self) -> int:
        """Pages found in later tiers."""
        return sum([len(page_ids) for page_ids in self.found[1:]])


class Group(ABC):
    """One kind of KV: which pages a sequence needs of it, and for how long.

    Each position of a page table has `width` pages. They are taken, shared and given back together.
    """

    keeps_all: bool
    """True if pages stay until their lease leaves."""
    grows_with_chunks: bool
    """True if pages for the tokens of a prompt are taken with each chunk, and not all when it
    begins."""
    needed_tokens: int = 1
    """Number of last tokens, its own included, whose pages a token needs, unless it needs all."""

    def __init__(self, tiers: Sequence[Tier], spec: GroupSpec) -> None:
        self.width: int = spec.width
        self._pools: tuple[PagePool, ...] = tuple([tier.pool for tier in tiers])
        self._pool: PagePool = self._pools[0]
        self.page_size: int = self._pool.page_size

    # -- what a sequence needs

    @abstractmethod
    def need(self, num_positions: int) -> int:
        """Pages that a sequence with tokens in `num_positions` positions holds while it decodes."""

    def first_needed(self, index: int) -> int:
        """First page position whose pages the token with the entry at `index` needs."""
        return 0

    def least_index(self, first: int) -> int:
        """Index of the first token that needs no pages before page position `first`."""
        return 0

    def num_short(self, table: PageTable, num_positions: int) -> int:
        """Pages that `table` lacks of the first `num_positions` positions."""
        short = num_positions * self.width - len(table.page_ids)
        return short if short > 0 else 0

    def num_ahead(self, table: PageTable | None, num_known: int, num_reach: int) -> int:
        """Pages that a sequence with tokens in `num_known` positions needs beyond its own to reach
        `num_reach`. Without a table, the pages of its known tokens count as its own."""
        held = self.need(num_known) if table is None else len(table.held)
        return max(0, self.need(num_reach) - held)

    # -- what the prefix tree has

    @abstractmethod
    def pages_of(self, tier: int, page_ids: PageIds) -> PageIds:
        """Pages of this group that the tree has beside its pages `page_ids`, int32 `[n]` of `tier`:
        int32 `[n * width]`, -1 where it has none."""

    @abstractmethod
    def match(
        self, match: Match, num_cached: int, num_known: int, swapped: SwappedRun | None
    ) -> GroupClaim:
        """Find the pages with which a lease goes on from `num_cached` entries to `num_known`. Hold
        the ones that the receipts of `match` don't lock. If the lease goes on from swapped pages,
        they are `swapped`."""

    def drop(self, claim: GroupClaim) -> None:
        """Release what an unused claim holds. Not called for group 0, since receipts lock all that
        it finds."""
        raise NotImplementedError

    @abstractmethod
    def pin(self, match: Match) -> PageTable:
        """Hold what a sequence would need to go on after `match`."""

    # -- a lease

    @abstractmethod
    def begin(self, claim: GroupClaim, page_ids: PageIds) -> PageTable:
        """Make a table of the pages found in tier 0 and of new ones, with a reference to each."""

    def end_claim(self, claim: GroupClaim, step: int) -> None:
        """Release pages that were found and not taken. `step` is the last to read them. Not called
        for group 0."""
        raise NotImplementedError

    def fork(self, table: PageTable, num_positions: int) -> PageTable:
        """Make a table that shares the pages of the first `num_positions` positions."""
        page_ids = table.between(table.first, num_positions)
        self._pool.retain(page_ids)
        return PageTable(self.width, table.first, page_ids)

    def take_over(self, lease: KVLease, table: PageTable, first: int, page_ids: PageIds) -> None:
        """Replace the lease's own pages by those of the tree, where the tree has some. Its pages of
        group 0 from position `first` on are `page_ids`, int32 `[n]`. Steps in flight read the
        lease's pages through views of the table."""
        start, end = max(first, table.first), first + len(page_ids)
        if start >= end:
            return
        own, theirs = table.between(start, end), self.pages_of(0, page_ids[start - first :])
        changed = np.flatnonzero((theirs != own) & (theirs >= 0))
        if not len(changed):
            return
        self._pool.retain(theirs[changed])
        table.replace(start, np.where(theirs >= 0, theirs, own).astype(np.int32))
        lease.carried = min(lease.carried, start + full_pages(int(changed[0]), self.width))
        self._pool.release(own[changed], lease.last_step)

    def trim(self, lease: KVLease, table: PageTable, least: int) -> None:
        """Give back pages that no token from index `least` on needs, fenced by the last step of the
        lease. No earlier token will be computed."""
        first = self.first_needed(least)
        if first > table.first:
            gone = table.between(table.first, first)
            table.first = first
            self._pool.release(gone, lease.last_step)

    def truncate(self, lease: KVLease, table: PageTable, num_positions: int) -> None:
        """Give back the pages after the first `num_positions` positions."""
        rest = table.between(num_positions, len(table))
        table.cut(num_positions)
        self._pool.release(rest, lease.last_step)

    @abstractmethod
    def first_swapped(self, lease: KVLease, index: int) -> int:
        """First page position to swap out for the token at `index`. The tree keeps what it needs
        before that."""

    @abstractmethod
    def num_own(self, lease: KVLease, table: PageTable) -> int:
        """Pages that only the lease holds. Pages in the tree don't count."""

    @abstractmethod
    def leave(self, lease: KVLease, table: PageTable) -> None:
        """Give back all pages, fenced by the last step of the lease."""
