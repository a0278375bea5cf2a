"""KV memory: which pages a lease gets, shares, and gives back.

Binds groups of layers, tiers of pages and the prefix tree together, one lease at a time:

    claim ──► begin ──► reserve, advance, publish, fork, truncate ──► leave
      └─────► drop                                                      └──► swapped, or
                                                                             computed again

Knows token ids, in the order of a sequence, and namespaces; knows no request. Copies to make
collect in `copies` for the next plan. Only a lease that is the one holder of a page may write it.
Pages in the tree are complete, and a page that two leases share is copied before it is written.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aioserve.config import Preemption
from aioserve.errors import InvariantError
from aioserve.kv.claims import Claim, Claims
from aioserve.kv.eviction import Eviction
from aioserve.kv.groups.base import Group
from aioserve.kv.groups.making import groups_of
from aioserve.kv.lease import KVLease
from aioserve.kv.page_pool import NO_STEP, OutOfPagesError, PagePool
from aioserve.kv.page_table import PageTable, rows_of
from aioserve.kv.prefix_tree import NO_RECEIPT, PrefixTree
from aioserve.kv.tiers.copies import Copies
from aioserve.kv.tiers.swapping import Swapping
from aioserve.kv.tiers.tier import Tier, tiers_of
from aioserve.kv.usage import KVUsage, usage_of
from aioserve.paging.layout import ONE_GROUP, GroupSpec
from aioserve.paging.pages import (
    capacity_tokens,
    full_pages,
    pages_for,
    pages_for_each,
    tokens_in_part,
)
from aioserve.steps.pages import PageCopy

__all__ = ["KVMemory"]

TokenIds = npt.NDArray[np.int32]
PageIds = npt.NDArray[np.int32]


class KVMemory:
    """All pages, and which lease has them. Not thread-safe; owned by one scheduler.

    Token ids are int32 arrays of all known tokens of a sequence, from position 0.

    Steps compute in pages of the first of `tiers`. Leaves evicted from the prefix tree go to the
    next tier first and come back on a hit. Under `preemption="swap"`, so do the pages of preempted
    sequences that the tree doesn't hold.

    `groups` say what a lease needs at each position. Pools have group pages for all groups after
    the first. Raises `ValueError` for options that don't go together.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        groups: Sequence[GroupSpec] = ONE_GROUP,
        prefix_caching: bool = True,
        partial_page_reuse: bool = True,
        eviction: Eviction = "lru",
        preemption: Preemption = "auto",
    ) -> None:
        if preemption == "swap" and len(tiers) == 1:
            raise ValueError('preemption="swap" needs a second tier to swap to')
        self.tiers: tuple[Tier, ...] = tuple(tiers)
        self.pool: PagePool = tiers[0].pool
        """Pages that steps read and write."""
        self.page_size: int = self.pool.page_size
        for tier in tiers:
            if tier.pool.page_size != self.page_size:
                raise ValueError(
                    f"tiers must have the page_size of the first, {self.page_size}, "
                    f"got {tier.pool.page_size} in tier {tier.name}"
                )
        self.copies_evicted: bool = len(tiers) > 1
        """True if evicted pages are copied to another tier."""
        self.groups: tuple[Group, ...] = groups_of(groups, tiers)
        self.keeps_all: bool = all(group.keeps_all for group in self.groups)
        """True if pages stay until their lease leaves, so that there is nothing to `trim`."""
        self.grows_with_chunks: bool = any(group.grows_with_chunks for group in self.groups)
        """True if a prompt in progress lacks pages for tokens that no chunk has computed."""
        self._trims = [(at, g.trim) for at, g in enumerate(self.groups) if not g.keeps_all]
        self._beside = tuple(enumerate(self.groups))[1:]
        self._num_short = tuple([(at, group.num_short) for at, group in enumerate(self.groups)])
        self._width = sum([group.width for group in self.groups])
        self.capacity_tokens: int = self.tokens_in(self.pool.num_pages)
        """Tokens that one sequence may have if it gets all pages of the first tier."""
        self.tree: PrefixTree | None = None
        if prefix_caching:
            pools = [tier.pool for tier in tiers]
            needed = max([group.needed_tokens for group in self.groups])
            self.tree = PrefixTree(*pools, strategy=eviction, needed_tokens=needed)
        partial = partial_page_reuse and self.page_size > 1
        self.claims: Claims = Claims(self.tree, self.groups, len(tiers), partial=partial)
        """Finds what a lease may begin with."""
        self._copies = Copies(self.tiers)
        self.copies: list[PageCopy] = self._copies.waiting
        """Copies for the next plan, in order. The plan carries and clears them."""
        self._swapping = Swapping(self.tiers, self.groups, self.tree, self._copies, preemption)

    @classmethod
    def of(
        cls,
        num_pages: Sequence[int],
        page_size: int,
        *,
        groups: Sequence[GroupSpec] = ONE_GROUP,
        **options: Any,
    ) -> KVMemory:
        """Make a memory with pools of its own: `num_pages` of each tier, nearest first, 0 for
        none."""
        num_group_pages = sum([group.width for group in groups[1:]])
        return cls(tiers_of(num_pages, page_size, num_group_pages), groups=groups, **options)

    def usage(self) -> KVUsage:
        """Counts of pages by where they are at this moment."""
        return usage_of(self.tiers, self.num_cached)

    @property
    def num_cached(self) -> int:
        """Pages of all groups that only the prefix tree holds, so that they can be evicted."""
        return 0 if self.tree is None else self.tree.num_evictable

    def tokens_in(self, num_pages: int) -> int:
        """Tokens of one sequence for which `num_pages` pages of all groups are enough."""
        return capacity_tokens(self._most_positions(num_pages, num_pages), self.page_size)

    def _most_positions(self, most: int, num_pages: int, lease: KVLease | None = None) -> int:
        """The most positions, up to `most`, for which `num_pages` pages are enough. Counts a new
        sequence, or pages beyond those of `lease`."""

        def needed(num_positions: int) -> int:
            if lease is None:
                return sum([group.need(num_positions) for group in self.groups])
            pairs = zip(self.groups, lease.tables, strict=True)
            return sum([group.num_short(table, num_positions) for group, table in pairs])

        return bisect_right(range(most + 1), num_pages, key=needed) - 1

    @property
    def num_available(self) -> int:
        """Pages that are free or can be evicted. The latter may be fenced for a step."""
        return self.pool.num_free + self.num_cached

    def complete(self, step: int) -> None:
        """Record that step `step` and every one before it are done."""
        for tier in self.tiers:
            tier.pool.complete(step)

    # -- a lease begins

    def begin(self, lease: KVLease, claim: Claim, step: int) -> bool:
        """Give an empty lease what it claimed, and new pages for all its known tokens, in `step`.
        Groups that grow with chunks get pages for one token after the claimed ones.

        Return False, and drop the claim, if pages that must be evicted for it are fenced.
        """
        match, num_found = claim.match, claim.match.num_pages
        fresh = self._acquire(claim.num_first_pages, step)
        if fresh is None:
            self.claims.drop(claim)
            return False
        if match.receipt != NO_RECEIPT:
            self._tree.use(match.receipt, match.tail_receipt)
        tables: list[PageTable] = []
        start = 0
        for part, group in zip(claim.groups, self.groups, strict=True):
            end = start + part.num_first
            tables.append(group.begin(part, fresh[start:end]))
            start = end
        lease.take(tuple(tables))
        lease.receipt, lease.published = match.receipt, num_found
        if num_found > len(match.tiers[0]):
            self._swapping.promote(lease, match, claim.groups, step)
        if claim.swapped is not None:
            lease.inherited_step = self._swapping.swap_in(lease, claim.groups)
        elif match.tail_tokens:
            for part, table in zip(claim.groups, tables, strict=True):
                target = table.between(num_found, num_found + 1)
                self._copies.within(0, part.tail, target, match.tail_tokens)
        for at, group in self._beside:
            group.end_claim(claim.groups[at], step)
        if match.tail_receipt != NO_RECEIPT:
            self._tree.release(match.tail_receipt)
        self.forget_swapped(lease, step)
        lease.computed = lease.cached = lease.borrowed = claim.num_cached
        lease.entries = claim.num_entries
        lease.covered = lease.num_pages
        for at, _ in self._beside:
            lease.covered = min(lease.covered, len(tables[at]))
        return True

    def fork(self, lease: KVLease, child: KVLease, written_step: int, step: int) -> None:
        """Give an empty lease all that another has computed: another sample of the same prompt.

        `step` computes the last of it, and steps up to `written_step` the rest.
        """
        count = pages_for(lease.entries, self.page_size)
        pairs = zip(self.groups, lease.tables, strict=True)
        child.namespace = lease.namespace
        child.take(tuple([group.fork(table, count) for group, table in pairs]))
        child.covered = count
        child.computed = child.cached = child.borrowed = lease.computed
        child.entries = lease.entries
        child.inherited_step = written_step
        child.last_step = step
        if lease.receipt != NO_RECEIPT:
            child.receipt = self._tree.fork(lease.receipt)
            child.published = lease.published
        if tokens_in_part(lease.entries, self.page_size):
            lease.shares_partial_page = child.shares_partial_page = True

    # -- a lease grows and shrinks

    def short_of_pages(self, leases: Iterable[KVLease]) -> list[KVLease]:
        """Leases that lack a page for one more token, or may not write the one that they have."""
        size = self.page_size
        return [
            lease
            for lease in leases
            if (
                lease.entries == lease.covered * size
                if lease.entries % size == 0
                else lease.shares_partial_page and self._must_copy(lease)
            )
        ]

    def num_pages_to_reserve(self, leases: Iterable[KVLease], num_tokens: int = 1) -> int:
        """Pages that `num_tokens` more tokens of each of `leases` need together. Of several leases
        that share a page, the last one writes to it without a copy."""
        needed = 0
        sharing: dict[int, int] = {}
        for lease in leases:
            whole = pages_for_each(lease.entries + num_tokens, self.page_size)
            for at, num_short in self._num_short:
                needed += num_short(lease.tables[at], whole)
            if lease.shares_partial_page and self._must_copy(lease):
                page = self._partial_page(lease)
                sharing[page] = sharing.get(page, 0) + 1
        copies = [min(count, self.pool.ref_count(page) - 1) for page, count in sharing.items()]
        return needed + sum(copies) * self._width

    def reserve(self, lease: KVLease, num_tokens: int, step: int) -> bool:
        """Give a lease pages for `num_tokens` more tokens, and its own copy of a shared page that
        it would write. Return False, with nothing changed, if too few pages are free."""
        copies = self._must_copy(lease) * self._width
        whole = pages_for_each(lease.entries + num_tokens, self.page_size)
        short = [num_short(lease.tables[at], whole) for at, num_short in self._num_short]
        needed = copies + sum(short)
        if not needed:
            return True
        pages = self._acquire(needed, step)
        if pages is None:
            return False
        if copies:
            self._copy_shared(lease, pages[:copies], step)
        start = copies
        for at, count in enumerate(short):
            lease.tables[at].append(pages[start : start + count])
            start += count
        lease.covered = max(lease.covered, whole)
        return True

    def reserve_some(self, lease: KVLease, num_tokens: int, step: int) -> int:
        """Give a lease pages for up to `num_tokens` more tokens, as far as there are any. Return
        the number of tokens."""
        if self.reserve(lease, num_tokens, step):
            return num_tokens
        left = max(0, self.pool.num_free - self._must_copy(lease) * self._width)
        positions = self._most_positions(lease.num_pages + left, left, lease)
        count = min(num_tokens, capacity_tokens(positions, self.page_size) - lease.entries)
        return count if count > 0 and self.reserve(lease, count, step) else 0

    def _copy_shared(self, lease: KVLease, pages: PageIds, step: int) -> None:
        """Copy the pages that the lease shares at the position of the next token to `pages`."""
        index = full_pages(lease.entries, self.page_size)
        offset = tokens_in_part(lease.entries, self.page_size)
        for table in lease.tables:
            shared, own = table.between(index, index + 1), pages[: table.width]
            self._copies.within(0, shared, own, offset)
            table.replace(index, own)
            self.pool.release(shared, step)
            pages = pages[table.width :]
        lease.carried = min(lease.carried, index)
        lease.shares_partial_page = False

    def _partial_page(self, lease: KVLease) -> int:
        return int(lease.page_ids[full_pages(lease.entries, self.page_size)])

    def _must_copy(self, lease: KVLease) -> bool:
        if not lease.shares_partial_page:
            return False
        lease.shares_partial_page = self.pool.ref_count(self._partial_page(lease)) > 1
        return lease.shares_partial_page

    def make_free(self, count: int, step: int) -> None:
        """Evict until `count` pages are free, or nothing is left to evict."""
        short = count - self.pool.num_free
        if short > 0 and self.tree is not None:
            self._copies.evicted(self.tree.evict(short, step))

    def forget_cached(self) -> int:
        """Drop every cached page that no request uses, in every tier. Return their number. Steps in
        flight keep the pages that they read."""
        if self.tree is None:
            return 0
        later = [tier.pool for tier in self.tiers[1:]]
        held = self.num_cached + sum([pool.num_held for pool in later])
        self.tree.clear()
        return held - self.num_cached - sum([pool.num_held for pool in later])

    def advance(self, lease: KVLease, num_tokens: int, step: int) -> None:
        """Record that `step` computes `num_tokens` more tokens into pages that the lease has."""
        lease.computed += num_tokens
        lease.entries += num_tokens
        lease.last_step = step

    def retract(self, lease: KVLease, launched: int) -> None:
        """Record that no step after `launched` will touch the pages of the lease."""
        lease.last_step = min(lease.last_step, launched)

    def truncate(self, lease: KVLease, num_tokens: int) -> None:
        """Keep only the first `num_tokens` tokens of a lease; the rest was computed in vain. Pages
        without kept tokens come back.

        Published tokens must stay, since others may read them. So must tokens whose successors need
        pages that are gone. Raises `InvariantError` for fewer tokens than these, or more than
        computed.
        """
        dropped = lease.computed - lease.entries
        least = dropped + capacity_tokens(lease.published, self.page_size)
        for at, group in self._beside:
            least = max(least, dropped + group.least_index(lease.tables[at].first))
        if not least <= num_tokens <= lease.computed:
            raise InvariantError(
                f"num_tokens must be in [{least}, {lease.computed}], from those published to "
                f"those computed, got {num_tokens}"
            )
        lease.entries = num_tokens - dropped
        kept = pages_for(lease.entries, self.page_size)
        lease.covered = kept
        lease.carried = min(lease.carried, kept)
        lease.computed = num_tokens
        lease.cached = min(lease.cached, num_tokens)
        lease.borrowed = min(lease.borrowed, num_tokens)
        # Whole pages are never written again, but a shared one may have become partial.
        lease.shares_partial_page = tokens_in_part(lease.entries, self.page_size) > 0
        # The pool hands out first what came back last, so each group gets its own pages again.
        for group, table in reversed([*zip(self.groups, lease.tables, strict=True)]):
            group.truncate(lease, table, kept)

    def trim(self, lease: KVLease, least: int) -> None:
        """Give back pages that no token from position `least` on needs. No earlier token will be
        computed. With `keeps_all`, no group has pages to give back."""
        index = least - (lease.computed - lease.entries)
        for at, trim in self._trims:
            trim(lease, lease.tables[at], index)

    def retreat(self, lease: KVLease, num_tokens: int) -> None:
        """Record that the last `num_tokens` tokens of a lease were computed in vain, as rejected
        draft tokens are. The pages stay, and the next tokens overwrite them.

        Raises `InvariantError` if that many tokens aren't computed and unpublished.
        """
        least = capacity_tokens(lease.published, self.page_size)
        if not 0 <= num_tokens <= lease.entries - least:
            raise InvariantError(
                f"num_tokens must be in [0, {lease.entries - least}], computed and not published, "
                f"got {num_tokens}"
            )
        lease.computed -= num_tokens
        lease.entries -= num_tokens

    def publish(self, lease: KVLease, token_ids: TokenIds, *, leaving: bool = False) -> None:
        """Let others find the pages that are full of known tokens, computed or being computed.

        Called when the step that computes them has its number. If the tree has a run already, later
        steps of the sequence read the tree's pages, and its own come back. A lease that lost
        entries publishes nothing, because its pages no longer hold its first tokens.
        """
        size, first = self.page_size, lease.published
        full = full_pages(min(lease.computed, len(token_ids)), size)
        if full <= first or self.tree is None or lease.entries != lease.computed:
            return
        start, end = capacity_tokens(first, size), capacity_tokens(full, size)
        page_ids, group_page_ids = lease.page_ids[first:full], None
        if self._beside:
            beside = lease.tables[1:]
            held = max([first, *(table.first for table in beside)])
            group_page_ids = rows_of(beside, min(held, full), full)
        count = self.tree.insert(
            lease.receipt, token_ids[start:end], page_ids, lease.last_step, group_page_ids
        )
        lease.published = full
        if count < full - first and not leaving:
            self._take_over(lease, first, self.tree.page_ids(lease.receipt, first))

    def _take_over(self, lease: KVLease, first: int, page_ids: PageIds) -> None:
        """Put the tree's pages in place of a lease's duplicates, from page `first` on.

        A lease that kept both could need more than its share of pages, and not fit alone. Steps in
        flight read the duplicates through the old table, whose views never change.
        """
        own = lease.page_ids[first : first + len(page_ids)]
        changed = np.flatnonzero(own != page_ids)
        if not len(changed):
            return
        lease.borrowed = capacity_tokens(first + int(changed[-1]) + 1, self.page_size)
        for group, table in zip(self.groups, lease.tables, strict=True):
            group.take_over(lease, table, first, page_ids)

    def num_reclaimable(self, lease: KVLease) -> int:
        """Pages that come back, now or after the steps in flight, if the lease ends."""
        pairs = zip(self.groups, lease.tables, strict=False)
        own = sum([group.num_own(lease, table) for group, table in pairs])
        return own + self._num_exclusive(lease)

    def num_shared_tokens(self, lease: KVLease) -> int:
        """Leading tokens that stay computed for others if the lease ends."""
        return capacity_tokens(lease.published - self._num_exclusive(lease), self.page_size)

    def _num_exclusive(self, lease: KVLease) -> int:
        return 0 if lease.receipt == NO_RECEIPT else self._tree.num_exclusive(lease.receipt)

    # -- a lease ends

    def leave(self, lease: KVLease) -> None:
        """Take back the pages of a lease, fenced by its last step."""
        if lease.receipt != NO_RECEIPT:
            self._tree.release(lease.receipt)
        # Not before, so that no leaf is younger than what it needs of other groups.
        for at, table in enumerate(lease.tables):
            self.groups[at].leave(lease, table)

    def swap_out(
        self, lease: KVLease, num_known: int, step: int, how: Preemption | None = None
    ) -> None:
        """Copy what the tree doesn't hold of a lease that is about to leave to the next tier.

        Does nothing if the sequence is to be recomputed, or the tier has no room. `how` replaces
        `preemption`.
        """
        swapped = self._swapping.swap_out(lease, num_known, step, how)
        if swapped is not None:
            lease.swapped = swapped

    def forget_swapped(self, lease: KVLease, last_step: int = NO_STEP) -> None:
        """Give up a lease's swapped pages. Step `last_step` may still read them."""
        swapped, lease.swapped = lease.swapped, None
        if swapped is not None:
            self._swapping.give_up(swapped, last_step)

    # -- steps fail

    def withdraw(self, step: int) -> dict[int, int]:
        """Forget every page that `step`, which failed, should have written. Return the receipts
        that lost pages, with the number of pages that they still cover."""
        return {} if self.tree is None else dict(self.tree.withdraw(step))

    def forget(self, namespace: bytes, token_ids: TokenIds, num_pages: int) -> dict[int, int]:
        """Forget all runs that begin like `token_ids`, from page `num_pages` on. Return receipts as
        `withdraw` does."""
        return {} if self.tree is None else dict(self.tree.forget(namespace, token_ids, num_pages))

    def shorten(self, lease: KVLease, cut: Mapping[int, int]) -> bool:
        """Adjust a lease if `cut`, a result of `withdraw` or `forget`, has its receipt. Return True
        if the lease had taken over KV that is gone, so that what it computed over it is
        worthless."""
        left = cut.get(lease.receipt)
        if left is None:
            return False
        lease.published = left
        return lease.borrowed > capacity_tokens(left, self.page_size)

    def sanity_check(self) -> None:
        """Raise `InvariantError` unless each pool and the tree are consistent."""
        for tier in self.tiers:
            tier.pool.sanity_check()
        if self.tree is not None:
            self.tree.sanity_check()

    # -- parts

    @property
    def _tree(self) -> PrefixTree:
        if self.tree is None:
            raise InvariantError("a receipt without a prefix tree")
        return self.tree

    def _acquire(self, count: int, step: int) -> PageIds | None:
        self.make_free(count, step)
        try:
            return self.pool.acquire(count)
        except OutOfPagesError:
            return None
