"""Claims: what a lease may begin with, in pages of the prefix tree or in swapped-out ones.

Finds are locked for the lease that begins with them, or for a pin. Leases that have begun never
change here.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.errors import InvariantError
from aioserve.kv.groups.base import Group, GroupClaim
from aioserve.kv.lease import KVLease, SwappedPages
from aioserve.kv.page_table import NO_PAGES
from aioserve.kv.prefix_tree import NO_RECEIPT, Match, PrefixTree
from aioserve.paging.pages import capacity_tokens

__all__ = ["Claim", "Claims", "PagesNeeded"]

TokenIds = npt.NDArray[np.int32]


class Claim(msgspec.Struct, frozen=True, gc=False):
    """Pages that a lease would find and need. Its match is locked, and the group pages beside it
    are held, until a lease begins with the claim or it is dropped."""

    match: Match
    num_found: int
    """Leading tokens whose KV the prefix tree has."""
    num_cached: int
    """Leading tokens that need no computing: found in the tree, or swapped to another tier."""
    num_entries: int
    """Entries of the cached tokens in pages."""
    num_new_pages: int
    """New pages for all known tokens. Groups that give pages back count the most they need at a
    time. A lease waits for this many. Alone, it starts with `num_first_pages` and gets the rest
    from pages that come back."""
    swapped: SwappedPages | None
    """Swapped pages to go on from, if they bring the lease further than those found."""
    num_first_pages: int
    """New pages to begin with. Groups that grow with chunks count those for the first token to
    compute."""
    groups: tuple[GroupClaim, ...]
    """A part for each group of the memory."""


class PagesNeeded(msgspec.Struct, frozen=True, gc=False):
    """Pages that a lease would take if it began now, without the page that it would copy in
    part."""

    num_first: int
    """New pages to begin with, as in `Claim.num_first_pages`."""
    num_new: int
    num_found: int
    """Cached pages found that no other lease uses. They could no longer be evicted."""
    page_ids: npt.NDArray[np.int32]
    """All pages of tier 0 that are found."""

    @property
    def total(self) -> int:
        """Free or evictable pages that the lease takes."""
        return self.num_new + self.num_found


class Claims:
    """Claims of leases of one `KVMemory` on its `tree`. With `partial`, claims may include parts of
    pages.

    Without a tree, leases claim only swapped pages.
    """

    def __init__(
        self, tree: PrefixTree | None, groups: Sequence[Group], num_tiers: int, *, partial: bool
    ) -> None:
        self._tree = tree
        self._groups = groups
        self._page_size = groups[0].page_size
        self._partial = partial
        self._keeps_all = all(group.keeps_all for group in groups)
        self._beside = tuple(enumerate(groups))[1:]
        self._no_match = Match(NO_RECEIPT, (NO_PAGES,) * num_tiers, 0)

    def peek(self, lease: KVLease, token_ids: TokenIds, limit: int | None = None) -> int:
        """Tokens that need no computing if the lease of `token_ids` begins now. `limit` is that of
        `claim`."""
        cacheable, swapped = token_ids[: limit if limit is not None else -1], lease.swapped
        if swapped is not None and self._goes_on_from(swapped, lease, cacheable, limit):
            return swapped.computed
        return 0 if self._tree is None else sum(self._tree.peek(lease.namespace, cacheable))

    def pin(self, namespace: bytes, token_ids: TokenIds) -> KVLease:
        """Keep what the tree has of `token_ids`, in whole pages, from being evicted until
        `KVMemory.leave`. The lease has no pages of group 0; `published` says how many are kept."""
        lease = KVLease(namespace)
        if self._tree is not None:
            match = self._tree.match(namespace, token_ids, partial=False, use=False)
            lease.receipt = match.receipt
            lease.published = match.num_pages
            lease.take(tuple([group.pin(match) for group in self._groups]))
        return lease

    def claim(self, lease: KVLease, token_ids: TokenIds, limit: int | None = None) -> Claim:
        """Find and lock the cached pages of `token_ids`, except for the last token: one is always
        computed. Begin with the claim, or drop it.

        At most `limit` tokens are taken from the cache; the caller needs more of the others than
        their keys and values.
        """
        cacheable = token_ids[: -1 if limit is None else limit]
        swapped, match, tree = lease.swapped, self._no_match, self._tree
        # If groups give pages back, a match may be shorter than the tree's path.
        if (
            swapped is not None
            and (swapped.lost_entries or not self._keeps_all)
            and self._goes_on_from(swapped, lease, cacheable, limit)
        ):
            if tree is not None:
                path = self._before(swapped, cacheable)
                match = tree.match(lease.namespace, path, partial=False, use=False, whole=True)
            return self._claim(len(token_ids), match, swapped)
        if tree is not None:
            match = tree.match(lease.namespace, cacheable, partial=self._partial, use=False)
        return self._claim(len(token_ids), match, self._further_than(match, lease, limit))

    def without_tail(
        self, lease: KVLease, num_known: int, claim: Claim, limit: int | None = None
    ) -> Claim:
        """Release the page that a claim would copy in part, so that others may evict it. Return the
        claim without it. `limit` must be that of the claim."""
        match = claim.match
        if match.tail_receipt == NO_RECEIPT:
            return claim
        self._release(match.tail_receipt)
        for at, group in self._beside:
            group.drop(claim.groups[at])
        without = Match(match.receipt, match.tiers, match.num_pages)
        return self._claim(num_known, without, self._further_than(without, lease, limit))

    def _further_than(self, match: Match, lease: KVLease, limit: int | None) -> SwappedPages | None:
        """Swapped pages of a lease, if they bring it further than the match. The match holds
        everything that the tree has."""
        swapped = lease.swapped
        if swapped is None or swapped.lost_entries or not self._keeps_all:
            return None
        if limit is not None and swapped.computed > limit:
            return None
        num_cached = capacity_tokens(match.num_pages, self._page_size) + match.tail_tokens
        is_further = swapped.groups[0].first <= match.num_pages and swapped.computed > num_cached
        return swapped if is_further else None

    def _goes_on_from(
        self, swapped: SwappedPages, lease: KVLease, cacheable: TokenIds, limit: int | None
    ) -> bool:
        """True if swapped pages bring a lease further than the tree does, or lost entries that the
        tree still has. The tree must have all pages of group 0 before the run, and needs no others
        for that."""
        if limit is not None and swapped.computed > limit:
            return False
        if self._tree is None:
            return True
        further = sum(self._tree.peek(lease.namespace, cacheable))
        if swapped.computed <= further and not swapped.lost_entries:
            return False
        path = self._before(swapped, cacheable)
        found = self._tree.peek(lease.namespace, path, whole=True)
        return capacity_tokens(swapped.groups[0].first, self._page_size) <= sum(found)

    def _before(self, swapped: SwappedPages, cacheable: TokenIds) -> TokenIds:
        """Tokens whose pages the tree may have in place of swapped ones."""
        if swapped.lost_entries:
            return cacheable[: capacity_tokens(swapped.groups[0].first, self._page_size)]
        return cacheable[: swapped.computed]

    def _claim(self, num_known: int, match: Match, swapped: SwappedPages | None) -> Claim:
        num_found = capacity_tokens(match.num_pages, self._page_size)
        if swapped is None:
            num_cached = num_entries = num_found = num_found + match.tail_tokens
        else:
            num_cached, num_entries = swapped.computed, swapped.entries
        most_entries = num_known - (num_cached - num_entries)
        groups: list[GroupClaim] = []
        num_new = num_first = 0
        for at, group in enumerate(self._groups):
            run = None if swapped is None else swapped.groups[at]
            groups.append(group.match(match, num_entries, most_entries, run))
            num_new += groups[at].num_new
            num_first += groups[at].num_first
        numbers = num_found, num_cached, num_entries, num_new
        return Claim(match, *numbers, swapped, num_first, tuple(groups))

    def pages_needed(
        self, lease: KVLease, token_ids: TokenIds, limit: int | None = None
    ) -> PagesNeeded:
        """Pages that the lease would take if it claimed and began now. Read-only."""
        evictable = 0 if self._tree is None else self._tree.num_evictable
        claim = self.claim(lease, token_ids, limit)
        claim = self.without_tail(lease, len(token_ids), claim, limit)
        found = 0 if self._tree is None else evictable - self._tree.num_evictable
        self.drop(claim)
        page_ids = claim.match.page_ids
        if self._beside:
            page_ids = np.concatenate([part.found[0] for part in claim.groups])
        return PagesNeeded(claim.num_first_pages, claim.num_new_pages, found, page_ids)

    def drop(self, claim: Claim) -> None:
        """Unlock what a claim found."""
        for receipt in (claim.match.receipt, claim.match.tail_receipt):
            if receipt != NO_RECEIPT:
                self._release(receipt)
        for at, group in self._beside:
            group.drop(claim.groups[at])

    def _release(self, receipt: int) -> None:
        if self._tree is None:
            raise InvariantError("a receipt without a prefix tree")
        self._tree.release(receipt)
