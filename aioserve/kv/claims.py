"""Finds what a lease may begin with: pages that the prefix tree has, or that were swapped out.

Locks what is found for the lease that begins with it; knows leases, and changes none.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.errors import InvariantError
from aioserve.kv.lease import KVLease
from aioserve.kv.pages import capacity_tokens, pages_for
from aioserve.kv.prefix_tree import NO_RECEIPT, Match, PrefixTree

__all__ = ["Claim", "Claims", "PagesNeeded"]

TokenIds = npt.NDArray[np.int32]
NO_PAGES = np.empty(0, np.int32)
NO_MATCH = Match(NO_RECEIPT, NO_PAGES, NO_PAGES)


class Claim(msgspec.Struct, frozen=True, gc=False):
    """Pages that a lease would find and need. Its match is locked until it is begun with or
    dropped."""

    match: Match
    num_found: int
    """Leading tokens whose KV the prefix tree has."""
    num_cached: int
    """Leading tokens that need no computing: those found, or those swapped to the host."""
    num_new_pages: int
    """Pages to acquire for all tokens known."""
    uses_swapped: bool


class PagesNeeded(msgspec.Struct, frozen=True, gc=False):
    """Pages that a lease would take if it began now, less the page that it would copy in part."""

    num_new: int
    num_found: int
    """Cached pages found that no other lease uses: they could be evicted no longer."""
    page_ids: npt.NDArray[np.int32]
    """All device pages found."""

    @property
    def total(self) -> int:
        """Free or evictable pages that the lease takes."""
        return self.num_new + self.num_found


class Claims:
    """Claims of leases of one `KVMemory` on its `tree`; with `partial`, on parts of pages too.

    Without a tree, leases claim swapped pages alone.
    """

    def __init__(self, tree: PrefixTree | None, page_size: int, *, partial: bool) -> None:
        self._tree = tree
        self._page_size = page_size
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
        if swapped is not None and capacity_tokens(swapped.first, self._page_size) <= device + host:
            return max(swapped.computed, device + host)
        return device + host

    def claim(self, lease: KVLease, token_ids: TokenIds, limit: int | None = None) -> Claim:
        """Find and lock what is cached of `token_ids`, but for the last: one token is always
        computed. Begin with it, or drop it. At most `limit` tokens are taken from what is cached:
        the caller needs more of the others than their keys and values."""
        match = NO_MATCH
        if self._tree is not None:
            cacheable = token_ids[: -1 if limit is None else limit]
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
        return Claim(match, num_found, num_cached, num_new_pages, uses_swapped)

    def pages_needed(
        self, lease: KVLease, token_ids: TokenIds, limit: int | None = None
    ) -> PagesNeeded:
        """Pages that the lease would take if it claimed and began now. Changes nothing."""
        evictable = 0 if self._tree is None else self._tree.num_evictable
        claim = self.claim(lease, token_ids, limit)
        claim = self.without_tail(lease, len(token_ids), claim, limit)
        found = 0 if self._tree is None else evictable - self._tree.num_evictable
        self.drop(claim)
        return PagesNeeded(claim.num_new_pages, found, claim.match.page_ids)

    def drop(self, claim: Claim) -> None:
        """Unlock what a claim found."""
        for receipt in (claim.match.receipt, claim.match.tail_receipt):
            if receipt != NO_RECEIPT:
                self._release(receipt)

    def _release(self, receipt: int) -> None:
        if self._tree is None:
            raise InvariantError("a receipt without a prefix tree")
        self._tree.release(receipt)
