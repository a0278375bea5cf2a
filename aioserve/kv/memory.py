"""KV memory: which pages a lease gets, shares, and gives back.

Binds the page pool, the prefix tree and the host pool together, one lease at a time:

    claim ──► begin ──► reserve, advance, publish, fork, truncate ──► leave
      └─────► drop                                                      └──► swapped to the host, or
                                                                             computed again
Knows token ids, in the order of a sequence, and namespaces; knows no request. What has to be copied
collects in `copies` for the next plan. A page may be written only by a lease that is its one
holder: pages that the tree holds are complete, and a page that two leases share is copied first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from aioserve.config import Preemption
from aioserve.errors import InvariantError
from aioserve.kv.claims import Claim, Claims
from aioserve.kv.copies import Copies, MemoryCounters
from aioserve.kv.eviction import Eviction
from aioserve.kv.lease import KVLease
from aioserve.kv.page_pool import NO_STEP, OutOfPagesError, PagePool
from aioserve.kv.page_table import PageTable
from aioserve.kv.pages import capacity_tokens, full_pages, pages_for, pages_for_each, tokens_in_part
from aioserve.kv.prefix_tree import NO_RECEIPT, PrefixTree
from aioserve.kv.swapping import Swapping
from aioserve.kv.usage import KVUsage, usage_of
from aioserve.kv.window_pages import NO_PAGES
from aioserve.kv.windows import Windows
from aioserve.steps.pages import PageCopy

__all__ = ["KVMemory"]

TokenIds = npt.NDArray[np.int32]


class KVMemory:
    """All pages, and which lease has them. Not thread-safe; owned by one scheduler.

    Token ids are int32 arrays of all that is known of a sequence, from position 0.

    `host_pool` counts the pages of a storage beside the device: leaves evicted from the prefix tree
    go there first and come back on a hit, and so do, under `preemption="swap"`, the pages of
    preempted sequences that the tree doesn't hold.

    Where pages of the pool have companions, these are window pages: a lease has as many for each
    position of its last `window` tokens, and the tree for as many of its pages as it can. Raises
    `ValueError` for options that don't go together.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        host_pool: PagePool | None = None,
        prefix_caching: bool = True,
        partial_page_reuse: bool = True,
        eviction: Eviction = "lru",
        preemption: Preemption = "auto",
        window: int = 0,
    ) -> None:
        if preemption == "swap" and host_pool is None:
            raise ValueError('preemption="swap" needs a host_pool to swap to')
        if host_pool is not None and host_pool.page_size != pool.page_size:
            raise ValueError(
                f"host_pool must have the page_size of the pool, {pool.page_size}, "
                f"got {host_pool.page_size}"
            )
        self.windows: Windows = Windows(pool, window)
        """How many window pages there are, and for how long."""
        self.pool = pool
        self.host_pool = host_pool
        self.page_size: int = pool.page_size
        self.capacity_tokens: int = self.windows.capacity_tokens(pool.num_pages)
        """Tokens that one sequence may have which has all pages of the device."""
        self.tree: PrefixTree | None = None
        if prefix_caching:
            seen = max(1, window)
            self.tree = PrefixTree(pool, host_pool=host_pool, strategy=eviction, window=seen)
        partial = partial_page_reuse and pool.page_size > 1
        self.claims: Claims = Claims(self.tree, pool, host_pool, self.windows, partial=partial)
        """What a lease may begin with."""
        self._copies = Copies(pool.page_size)
        self.copies: list[PageCopy] = self._copies.waiting
        """Copies for the next plan to carry, in order, and to clear."""
        self.counters: MemoryCounters = self._copies.counters
        self._swapping = Swapping(host_pool, self.tree, self._copies, preemption, self.windows)

    @classmethod
    def of(
        cls,
        num_pages: int,
        page_size: int,
        *,
        num_host_pages: int = 0,
        num_window_groups: int = 0,
        **options: Any,
    ) -> KVMemory:
        """One with pools of its own: `num_pages` on the device, `num_host_pages` on the host."""
        groups = num_window_groups
        host = PagePool(num_host_pages, page_size, groups) if num_host_pages else None
        return cls(PagePool(num_pages, page_size, groups), host_pool=host, **options)

    def usage(self) -> KVUsage:
        """Counts of pages by where they are at this moment."""
        return usage_of(self.pool, self.host_pool, self.num_cached, self.counters)

    @property
    def num_cached(self) -> int:
        """Pages of all groups that the prefix tree alone holds: they can be evicted."""
        return 0 if self.tree is None else self.tree.num_evictable

    @property
    def num_available(self) -> int:
        """Pages that are free or can be evicted. The latter may be fenced for a step."""
        return self.pool.num_free + self.num_cached

    def complete(self, step: int) -> None:
        """Take note that step `step`, and every one before it, is done."""
        self.pool.complete(step)
        if self.host_pool is not None:
            self.host_pool.complete(step)

    # -- a lease begins

    def begin(self, lease: KVLease, claim: Claim, step: int) -> bool:
        """Give an empty lease what it claimed and the pages of all its known tokens, in `step`; of
        window pages those for one token behind what was claimed.

        False, and the claim is dropped, when pages that must be evicted for it are fenced.
        """
        match = claim.match
        fresh = self._acquire(claim.num_first_pages, step)
        if fresh is None:
            self.claims.drop(claim)
            return False
        windows = NO_PAGES
        if self.windows.num_groups:
            first, found_windows = claim.first_window, claim.window_page_ids
            end = pages_for(claim.num_cached + 1, self.page_size)
            count = (end - first) * self.windows.num_groups - len(found_windows)
            fresh, windows = fresh[: len(fresh) - count], fresh[len(fresh) - count :]
            self.windows.begin(lease, first, np.concatenate((found_windows, windows)))
        if match.receipt != NO_RECEIPT:
            self._tree.use(match.receipt, match.tail_receipt)
        self.pool.retain(match.page_ids)
        lease.page_table.append(match.page_ids)
        lease.page_table.append(fresh)
        lease.receipt = match.receipt
        found = len(match.page_ids) + len(match.host_page_ids)
        lease.published = found
        if len(match.host_page_ids):
            targets = fresh[: len(match.host_page_ids)]
            promoted = windows[: len(claim.host_window_page_ids)]
            self._tree.promote(match.receipt, targets, step, promoted if len(promoted) else None)
            self._copies.from_host(match.host_page_ids, targets)
            if self.host_pool is not None and len(promoted):
                self._copies.from_host(claim.host_window_page_ids, promoted)
                self.host_pool.release(claim.host_window_page_ids, step)
        if claim.uses_swapped:
            lease.inherited_step = self._swapping.swap_in(lease, found)
        elif match.tail_tokens:
            target = lease.page_ids[found : found + 1]
            tail = np.array([match.tail_page], np.int32)
            self._copies.on_device(tail, target, match.tail_tokens)
            if lease.windows is not None:
                tail_windows = claim.tail_window_page_ids
                target = lease.windows.between(found, found + 1)
                self._copies.on_device(tail_windows, target, match.tail_tokens)
                self.pool.release(tail_windows, NO_STEP)
        if match.tail_receipt != NO_RECEIPT:
            self._tree.release(match.tail_receipt)
        self.forget_swapped(lease, step)
        lease.computed = lease.cached = lease.borrowed = claim.num_cached
        if lease.windows is None:
            lease.covered = len(lease.page_table.page_ids)
        return True

    def fork(self, lease: KVLease, child: KVLease, written_step: int, step: int) -> None:
        """Give an empty lease all that another has computed: another sample of the same prompt.

        `step` computes the last of it, and steps up to `written_step` the rest.
        """
        pages = lease.page_ids[: pages_for(lease.computed, self.page_size)]
        self.pool.retain(pages)
        child.namespace = lease.namespace
        child.page_table.append(pages)
        child.covered = len(pages)
        self.windows.share(lease, child, len(pages))
        child.computed = child.cached = child.borrowed = lease.computed
        child.inherited_step = written_step
        child.last_step = step
        if lease.receipt != NO_RECEIPT:
            child.receipt = self._tree.fork(lease.receipt)
            child.published = lease.published
        if tokens_in_part(lease.computed, self.page_size):
            lease.shares_partial_page = child.shares_partial_page = True

    # -- a lease grows and shrinks

    def short_of_pages(self, leases: Iterable[KVLease]) -> list[KVLease]:
        """Leases that lack a page, or one that they may write, for one more token."""
        size = self.page_size
        return [
            lease
            for lease in leases
            if (
                lease.computed == lease.covered * size
                if lease.computed % size == 0
                else lease.shares_partial_page and self._must_copy(lease)
            )
        ]

    def num_pages_to_reserve(self, leases: Iterable[KVLease], num_tokens: int = 1) -> int:
        """Pages that `num_tokens` more tokens of each of `leases` need together: of the leases that
        share a page, the last one writes to it without a copy."""
        needed = 0
        sharing: dict[int, int] = {}
        for lease in leases:
            needed += self._num_pages_short(lease, num_tokens)
            if lease.shares_partial_page and self._must_copy(lease):
                page = self._partial_page(lease)
                sharing[page] = sharing.get(page, 0) + 1
        copies = [min(count, self.pool.ref_count(page) - 1) for page, count in sharing.items()]
        return needed + sum(copies) * (1 + self.windows.num_groups)

    def reserve(self, lease: KVLease, num_tokens: int, step: int) -> bool:
        """Give a lease the pages that `num_tokens` more tokens need, and a page of its own for one
        that it shares and would write; False, and nothing has changed, when too few are free."""
        copies = self._must_copy(lease) * (1 + self.windows.num_groups)
        needed = copies + self._num_pages_short(lease, num_tokens)
        if not needed:
            return True
        pages = self._acquire(needed, step)
        if pages is None:
            return False
        if copies:
            self._copy_shared(lease, pages[:copies], step)
        whole = pages_for_each(lease.computed + num_tokens, self.page_size)
        own = copies + max(0, whole - len(lease.page_table.page_ids))
        lease.page_table.append(pages[copies:own])
        lease.covered = len(lease.page_table.page_ids)
        if lease.windows is not None:
            lease.windows.table.append(pages[own:])
            lease.covered = len(lease.windows)
        return True

    def reserve_some(self, lease: KVLease, num_tokens: int, step: int) -> int:
        """Give a lease the pages that as many of `num_tokens` more tokens need as there are pages
        for; return how many."""
        if self.reserve(lease, num_tokens, step):
            return num_tokens
        copies = self._must_copy(lease) * (1 + self.windows.num_groups)
        positions = self.windows.num_covered_with(lease, self.pool.num_free - copies)
        count = min(num_tokens, capacity_tokens(positions, self.page_size) - lease.computed)
        return count if count > 0 and self.reserve(lease, count, step) else 0

    def _copy_shared(self, lease: KVLease, pages: npt.NDArray[np.int32], step: int) -> None:
        """Copy the page that the lease shares, and its window pages, to `pages`."""
        index = full_pages(lease.computed, self.page_size)
        offset = tokens_in_part(lease.computed, self.page_size)
        shared = lease.page_ids[index : index + 1]
        self._copies.on_device(shared, pages[:1], offset)
        lease.page_table = lease.page_table.replaced(index, pages[:1])
        self.pool.release(shared, step)
        if lease.windows is not None:
            shared = lease.windows.between(index, index + 1)
            self._copies.on_device(shared, pages[1:], offset)
            lease.windows.replace(index, pages[1:])
            self.pool.release(shared, step)
        lease.carried = min(lease.carried, index)
        lease.shares_partial_page = False

    def _num_pages_short(self, lease: KVLease, num_tokens: int) -> int:
        whole = pages_for_each(lease.computed + num_tokens, self.page_size)
        short = max(0, whole - len(lease.page_table.page_ids))
        if lease.windows is not None:
            short += self.windows.num_groups * max(0, whole - lease.covered)
        return short

    def _partial_page(self, lease: KVLease) -> int:
        return int(lease.page_ids[full_pages(lease.computed, self.page_size)])

    def _must_copy(self, lease: KVLease) -> bool:
        if not lease.shares_partial_page:
            return False
        lease.shares_partial_page = self.pool.ref_count(self._partial_page(lease)) > 1
        return lease.shares_partial_page

    def make_free(self, count: int, step: int) -> None:
        """Evict until `count` pages are free, or nothing is left to evict."""
        short = count - self.pool.num_free
        if short > 0 and self.tree is not None:
            evicted = self.tree.evict(short, step)
            self._copies.to_host(evicted.device_page_ids, evicted.host_page_ids)

    def forget_cached(self) -> int:
        """Drop every cached page that no request uses, on the device and on the host; return how
        many there were of both. Steps in flight go on with those that they read."""
        if self.tree is None:
            return 0
        held = self.num_cached + (0 if self.host_pool is None else self.host_pool.num_held)
        self.tree.clear()
        kept = self.num_cached + (0 if self.host_pool is None else self.host_pool.num_held)
        return held - kept

    def advance(self, lease: KVLease, num_tokens: int, step: int) -> None:
        """Take note that `step` computes `num_tokens` more tokens into pages that the lease has."""
        lease.computed += num_tokens
        lease.last_step = step

    def retract(self, lease: KVLease, launched: int) -> None:
        """Take note that no step after `launched` will touch the pages of the lease."""
        lease.last_step = min(lease.last_step, launched)

    def truncate(self, lease: KVLease, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens of a lease alone: what is behind them was computed in
        vain. Pages that hold none of them come back.

        Published tokens can't go: others may read them. Nor can those whose successors need window
        pages that have gone. Raises `InvariantError` for a number below these, or above those
        computed.
        """
        least = capacity_tokens(lease.published, self.page_size)
        if lease.windows is not None:
            least = max(least, self.windows.least_position(lease.windows.first))
        if not least <= num_tokens <= lease.computed:
            raise InvariantError(
                f"num_tokens must be in [{least}, {lease.computed}], from those published to "
                f"those computed, got {num_tokens}"
            )
        kept = pages_for(num_tokens, self.page_size)
        rest = lease.page_ids[kept:]
        lease.page_table = lease.page_table.first(kept)
        lease.covered = kept
        self.windows.truncate(lease, kept)
        lease.carried = min(lease.carried, kept)
        lease.computed = num_tokens
        lease.cached = min(lease.cached, num_tokens)
        lease.borrowed = min(lease.borrowed, num_tokens)
        # Whole pages are never written again; of the others one may have become the partial one.
        lease.shares_partial_page = tokens_in_part(num_tokens, self.page_size) > 0
        self.pool.release(rest, lease.last_step)

    def retreat(self, lease: KVLease, num_tokens: int) -> None:
        """Take note that of the last tokens of a lease `num_tokens` were computed in vain, as
        guesses are that were wrong. The pages stay: what comes next is written over them.

        Raises `InvariantError` for more than there are behind those published.
        """
        least = capacity_tokens(lease.published, self.page_size)
        if not 0 <= num_tokens <= lease.computed - least:
            raise InvariantError(
                f"num_tokens must be in [0, {lease.computed - least}], computed and not published, "
                f"got {num_tokens}"
            )
        lease.computed -= num_tokens

    def publish(self, lease: KVLease, token_ids: TokenIds, *, leaving: bool = False) -> None:
        """Let others find the pages that are full of known tokens, computed or being computed.

        Called when the step that computes them has their numbers. Where the tree has a run already,
        later steps of the sequence read the tree's pages, and its own come back.
        """
        size, first = self.page_size, lease.published
        full = full_pages(min(lease.computed, len(token_ids)), size)
        if full <= first or self.tree is None:
            return
        start, end = capacity_tokens(first, size), capacity_tokens(full, size)
        page_ids, windows = lease.page_ids[first:full], None
        if lease.windows is not None:
            windows = lease.windows.between(max(first, lease.windows.first), full)
        count = self.tree.insert(
            lease.receipt, token_ids[start:end], page_ids, lease.last_step, windows
        )
        lease.published = full
        if count < full - first and not leaving:
            self._take_over(lease, first, self.tree.page_ids(lease.receipt, first))

    def _take_over(self, lease: KVLease, first: int, page_ids: npt.NDArray[np.int32]) -> None:
        """Put the tree's pages in place of a lease's duplicates, from page `first` on.

        A lease that kept both could need more than its share of pages, and not fit alone. Steps in
        flight read the duplicates through the old table, whose views never change.
        """
        table = lease.page_ids
        end = first + len(page_ids)
        changed = np.flatnonzero(table[first:end] != page_ids)
        if not len(changed):
            return
        self.pool.retain(page_ids[changed])
        lease.page_table = PageTable.of(table[:first], page_ids, table[end:])
        lease.carried = min(lease.carried, first + int(changed[0]))
        lease.borrowed = capacity_tokens(first + int(changed[-1]) + 1, self.page_size)
        self.pool.release(table[first:end][changed], lease.last_step)
        self.windows.take_over(lease, first)

    def num_reclaimable(self, lease: KVLease) -> int:
        """Pages that come back, now or after the steps in flight, if the lease ends."""
        # The tree has a reference to each page that is published.
        own = self.pool.num_unshared(lease.page_ids[lease.published :])
        if lease.windows is not None:
            own += self.pool.num_unshared(lease.windows.held)
        return own + self._num_exclusive(lease)

    def num_shared_tokens(self, lease: KVLease) -> int:
        """Leading tokens that stay computed for others if the lease ends."""
        return capacity_tokens(lease.published - self._num_exclusive(lease), self.page_size)

    def _num_exclusive(self, lease: KVLease) -> int:
        return 0 if lease.receipt == NO_RECEIPT else self._tree.num_exclusive(lease.receipt)

    # -- a lease ends

    def leave(self, lease: KVLease) -> None:
        """Take back the pages of a lease, fenced by its last step."""
        if len(lease.page_table):
            self.pool.release(lease.page_ids, lease.last_step)
        if lease.receipt != NO_RECEIPT:
            self._tree.release(lease.receipt)
        self.windows.leave(lease)  # no sooner, so that no leaf is younger than what it needs

    def swap_out(
        self, lease: KVLease, num_known: int, step: int, how: Preemption | None = None
    ) -> None:
        """Copy to the host what the tree doesn't hold of a lease that is about to leave.

        Nothing happens where recomputing is the way, or where the host pool has no room. `how` is
        in place of `preemption`.
        """
        swapped = self._swapping.swap_out(lease, num_known, step, how)
        if swapped is not None:
            lease.swapped = swapped

    def forget_swapped(self, lease: KVLease, last_step: int = NO_STEP) -> None:
        """Give up a lease's pages on the host; step `last_step` may still read them."""
        swapped, lease.swapped = lease.swapped, None
        if swapped is not None:
            self._swapping.give_up(swapped, last_step)

    # -- steps fail

    def withdraw(self, step: int) -> dict[int, int]:
        """Forget every page that `step`, which failed, should have written.

        Returns the receipts that lost pages, with the number of pages that they still cover.
        """
        return {} if self.tree is None else dict(self.tree.withdraw(step))

    def forget(self, namespace: bytes, token_ids: TokenIds, num_pages: int) -> dict[int, int]:
        """Forget all that begins like `token_ids`, from page `num_pages` on.

        Returns receipts as `withdraw` does.
        """
        if self.tree is None:
            return {}
        return dict(self.tree.forget(namespace, token_ids, num_pages))

    def shorten(self, lease: KVLease, cut: Mapping[int, int]) -> bool:
        """Take note if the path of a lease is among those `cut`, as `withdraw` and `forget` tell.

        Returns whether the lease had taken over KV that is gone: what was computed over that is
        worth nothing.
        """
        left = cut.get(lease.receipt)
        if left is None:
            return False
        lease.published = left
        return lease.borrowed > capacity_tokens(left, self.page_size)

    def sanity_check(self) -> None:
        """Raise `InvariantError` unless the pools and the tree agree, each with itself."""
        self.pool.sanity_check()
        if self.host_pool is not None:
            self.host_pool.sanity_check()
        if self.tree is not None:
            self.tree.sanity_check()

    # -- parts

    @property
    def _tree(self) -> PrefixTree:
        if self.tree is None:
            raise InvariantError("a receipt without a prefix tree")
        return self.tree

    def _acquire(self, count: int, step: int) -> npt.NDArray[np.int32] | None:
        self.make_free(count, step)
        try:
            return self.pool.acquire(count)
        except OutOfPagesError:
            return None
