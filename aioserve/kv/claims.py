"""Finds what a lease may begin with: pages that the prefix tree has, or that were swapped out.

Locks what is found for the lease that begins with it, or for a pin; changes no lease that has
begun.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.errors import InvariantError
from aioserve.kv.lease import KVLease
from aioserve.kv.page_pool import PagePool
from aioserve.kv.pages import capacity_tokens, pages_for
from aioserve.kv.prefix_tree import NO_RECEIPT, Match, PrefixTree
from aioserve.kv.window_pages import NO_PAGES
from aioserve.kv.windows import Windows

__all__ = ["Claim", "Claims", "PagesNeeded"]

TokenIds = npt.NDArray[np.int32]
NO_MATCH = Match(NO_RECEIPT, NO_PAGES, NO_PAGES)


class Claim(msgspec.Struct, frozen=True, gc=False):
    """Pages that a lease would find and need. Its match is locked, and the window pages found are
    held, until it is begun with or dropped."""

    match: Match
    num_found: int
    """Leading tokens whose KV the prefix tree has."""
    num_cached: int
    """Leading tokens that need no computing: those found, or those swapped to the host."""
    num_new_pages: int
    """Pages to acquire for all tokens known, with as many window pages as these need at a time.
    For want of the last of these it waits; alone it gets them from what leaves its window."""
    uses_swapped: bool
    num_first_pages: int
    """Pages to begin with: window pages for the first token to compute, and all others."""
    first_window: int = 0
    """First position whose window pages the lease begins with."""
    window_page_ids: npt.NDArray[np.int32] = NO_PAGES
    """Window pages found on the device, from there on."""
    host_window_page_ids: npt.NDArray[np.int32] = NO_PAGES
    """Window pages that follow, on the host."""
    tail_window_page_ids: npt.NDArray[np.int32] = NO_PAGES
    """Window pages of the page that is copied in part."""


class PagesNeeded(msgspec.Struct, frozen=True, gc=False):
    """Pages that a lease would take if it began now, less the page that it would copy in part."""

    num_first: int
    """New pages to begin with, as a claim's."""
    num_new: int
    num_found: int
    """Cached pages found that no other lease uses: they could be evicted no longer."""
    page_ids: npt.NDArray[np.int32]
    """All device pages found, window pages included."""

    @property
    def total(self) -> int:
        """Free or evictable pages that the lease takes."""
        return self.num_new + self.num_found


class Claims:
    """Claims of leases of one `KVMemory` on its `tree`; with `partial`, on parts of pages too.

    Without a tree, leases claim swapped pages alone.
    """

    def __init__(
        self,
        tree: PrefixTree | None,
        pool: PagePool,
        host_pool: PagePool | None,
        windows: Windows,
        *,
        partial: bool,
    ) -> None:
        self._tree = tree
        self._pool = pool
        self._host_pool = host_pool
        self._windows = windows
        self._page_size = pool.page_size
        self._partial = partial

    def peek(self, lease: KVLease, token_ids: TokenIds, limit: int | None = None) -> int:
        """Tokens that need no computing if the lease of `token_ids` begins now, up to `limit` as in
        `claim`."""
        swapped = lease.swapped
        if limit is not None:
            token_ids = token_ids[: limit + 1]
            swapped = None if swapped is not None and swapped.computed > limit else swapped
        if self._tree is None:
            return 0 if swapped is None else swapped.computed
        device, host = self._tree.peek(lease.namespace, token_ids[:-1])
        if self._windows.num_groups:
            uses_swapped = self._goes_on_from_swapped(lease, token_ids[:-1], limit)
            return swapped.computed if swapped is not None and uses_swapped else device + host
        if swapped is not None and capacity_tokens(swapped.first, self._page_size) <= device + host:
            return max(swapped.computed, device + host)
        return device + host

    def pin(self, namespace: bytes, token_ids: TokenIds) -> KVLease:
        """Keep what the tree has of `token_ids`, in whole pages, from being evicted until
        `KVMemory.leave`. The lease has no pages of its own; `published` says how many are kept.
        """
        lease = KVLease(namespace)
        if self._tree is not None:
            match = self._tree.match(namespace, token_ids, partial=False, use=False)
            lease.receipt = match.receipt
            lease.published = len(match.page_ids) + len(match.host_page_ids)
            if self._windows.num_groups:
                self._windows.pin(lease, match.page_ids, lease.published)
        return lease

    def claim(self, lease: KVLease, token_ids: TokenIds, limit: int | None = None) -> Claim:
        """Find and lock what is cached of `token_ids`, but for the last: one token is always
        computed. Begin with it, or drop it. At most `limit` tokens are taken from what is cached:
        the caller needs more of the others than their keys and values."""
        match = NO_MATCH
        cacheable = token_ids[: -1 if limit is None else limit]
        if self._windows.num_groups:
            return self._claim_with_windows(lease, len(token_ids), cacheable, limit)
        if self._tree is not None:
            match = self._tree.match(lease.namespace, cacheable, partial=self._partial, use=False)
        return self._claim(lease, len(token_ids), match, limit)

    def without_tail(
        self, lease: KVLease, num_known: int, claim: Claim, limit: int | None = None
    ) -> Claim:
        """The claim, made with the same `limit`, less the page that it would copy in part, which
        others may evict again."""
        match = claim.match
        if match.tail_receipt == NO_RECEIPT:
            return claim
        self._release(match.tail_receipt)
        without = Match(match.receipt, match.page_ids, match.host_page_ids)
        if self._windows.num_groups:
            self._pool.unretain(claim.window_page_ids)
            self._pool.unretain(claim.tail_window_page_ids)
            return self._with_windows(lease, num_known, without, uses_swapped=False)
        return self._claim(lease, num_known, without, limit)

    def _claim(self, lease: KVLease, num_known: int, match: Match, limit: int | None) -> Claim:
        found = len(match.page_ids) + len(match.host_page_ids)
        num_found = num_cached = capacity_tokens(found, self._page_size) + match.tail_tokens
        swapped = lease.swapped
        uses_swapped = (
            swapped is not None
            and swapped.first <= found
            and swapped.computed > num_cached
            and (limit is None or swapped.computed <= limit)
        )
        if swapped is not None and uses_swapped:
            num_found, num_cached = num_found - match.tail_tokens, swapped.computed
        num_new_pages = pages_for(num_known, self._page_size) - len(match.page_ids)
        return Claim(match, num_found, num_cached, num_new_pages, uses_swapped, num_new_pages)

    # -- where there are window pages

    def _goes_on_from_swapped(self, lease: KVLease, cacheable: TokenIds, limit: int | None) -> bool:
        """Whether swapped pages bring a lease further than the tree does. The tree must have all
        pages before the first of them, and needs no window pages for that."""
        swapped = lease.swapped
        if swapped is None or (limit is not None and swapped.computed > limit):
            return False
        if self._tree is None:
            return True
        if swapped.computed <= sum(self._tree.peek(lease.namespace, cacheable)):
            return False
        found = self._tree.peek(lease.namespace, cacheable[: swapped.computed], whole=True)
        return capacity_tokens(swapped.first, self._page_size) <= sum(found)

    def _claim_with_windows(
        self, lease: KVLease, num_known: int, cacheable: TokenIds, limit: int | None
    ) -> Claim:
        match, swapped = NO_MATCH, None
        if self._goes_on_from_swapped(lease, cacheable, limit):
            swapped = lease.swapped
        if self._tree is not None and swapped is not None:
            swapped_ids = cacheable[: swapped.computed]
            match = self._tree.match(
                lease.namespace, swapped_ids, partial=False, use=False, whole=True
            )
        elif self._tree is not None:
            match = self._tree.match(lease.namespace, cacheable, partial=self._partial, use=False)
        return self._with_windows(lease, num_known, match, uses_swapped=swapped is not None)

    def _with_windows(
        self, lease: KVLease, num_known: int, match: Match, *, uses_swapped: bool
    ) -> Claim:
        """A claim that holds the window pages that it goes on from."""
        size, windows = self._page_size, self._windows
        num_device = len(match.page_ids)
        found = num_device + len(match.host_page_ids)
        num_found = num_cached = capacity_tokens(found, size) + match.tail_tokens
        on_device = on_host = tail = NO_PAGES
        if lease.swapped is not None and uses_swapped:
            num_cached, first = lease.swapped.computed, lease.swapped.first_window
        else:
            first = windows.first_needed(num_cached)
            on_device = self._pool.companions(match.page_ids[first:]).ravel()
            if self._host_pool is not None:
                behind = match.host_page_ids[max(0, first - num_device) :]
                on_host = self._host_pool.companions(behind).ravel()
                self._host_pool.retain(on_host)
            if match.tail_tokens:
                tail = self._pool.companions(np.array([match.tail_page], np.int32)).ravel()
            self._pool.retain(on_device)
            self._pool.retain(tail)
        num_own = pages_for(num_known, size) - num_device
        num_first = (pages_for(num_cached + 1, size) - first) * windows.num_groups - len(on_device)
        # Others may have the pages found, so that none comes back when these leave the window.
        num_positions = pages_for(num_known, size) - max(num_device, first)
        num_later = windows.num_held(capacity_tokens(num_positions, size))
        return Claim(
            match,
            num_found,
            num_cached,
            num_own + max(num_first, num_later),
            uses_swapped,
            num_own + num_first,
            first,
            on_device,
            on_host,
            tail,
        )

    def pages_needed(
        self, lease: KVLease, token_ids: TokenIds, limit: int | None = None
    ) -> PagesNeeded:
        """Pages that the lease would take if it claimed and began now. Changes nothing."""
        evictable = 0 if self._tree is None else self._tree.num_evictable
        claim = self.claim(lease, token_ids, limit)
        claim = self.without_tail(lease, len(token_ids), claim, limit)
        found = 0 if self._tree is None else evictable - self._tree.num_evictable
        self.drop(claim)
        page_ids = claim.match.page_ids
        if len(claim.window_page_ids):
            page_ids = np.concatenate((page_ids, claim.window_page_ids))
        return PagesNeeded(claim.num_first_pages, claim.num_new_pages, found, page_ids)

    def drop(self, claim: Claim) -> None:
        """Unlock what a claim found."""
        for receipt in (claim.match.receipt, claim.match.tail_receipt):
            if receipt != NO_RECEIPT:
                self._release(receipt)
        if self._windows.num_groups:
            self._pool.unretain(claim.window_page_ids)
            self._pool.unretain(claim.tail_window_page_ids)
            if self._host_pool is not None:
                self._host_pool.unretain(claim.host_window_page_ids)

    def _release(self, receipt: int) -> None:
        if self._tree is None:
            raise InvariantError("a receipt without a prefix tree")
        self._tree.release(receipt)
