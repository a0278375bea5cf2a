"""Pages of preempted sequences on the host: copied there and back, or given up.

Knows leases, and changes none.
"""

from __future__ import annotations

from aioserve.config import Preemption
from aioserve.errors import InvariantError
from aioserve.kv.copies import Copies
from aioserve.kv.lease import KVLease, SwappedPages
from aioserve.kv.page_pool import OutOfPagesError, PagePool
from aioserve.kv.pages import pages_for
from aioserve.kv.prefix_tree import PrefixTree
from aioserve.kv.window_pages import NO_PAGES
from aioserve.kv.windows import Windows

__all__ = ["SWAP_FROM_TOKENS", "Swapping"]

SWAP_FROM_TOKENS = 256
"""Context length from which "auto" swaps: copying grows with it, computing with its square."""


class Swapping:
    """Swaps pages that the leases of one `KVMemory` have to `host_pool`, if there is one, and back.

    Pages of the host pool that `tree` holds make room.
    """

    def __init__(
        self,
        host_pool: PagePool | None,
        tree: PrefixTree | None,
        copies: Copies,
        preemption: Preemption,
        windows: Windows,
    ) -> None:
        self._host_pool = host_pool
        self._tree = tree
        self._copies = copies
        self._preemption = preemption
        self._windows = windows

    def swap_out(
        self, lease: KVLease, num_known: int, step: int, how: Preemption | None
    ) -> SwappedPages | None:
        """Copy what the tree doesn't hold of a lease with `num_known` known tokens, and all window
        pages that the next token needs, in `step`.

        None where recomputing is the way, or the host pool has no room. `how` is in place of
        `preemption`.
        """
        # One known token is always computed again: its step samples the next.
        computed = min(lease.computed, num_known - 1)
        first, pool = lease.published, self._host_pool
        if pool is None or not self._swaps(lease, how):
            return None
        end = pages_for(computed, pool.page_size)
        if end <= first:
            return None
        page_ids, windows, first_window = lease.page_ids[first:end], NO_PAGES, 0
        if lease.windows is not None:
            first_window = self._windows.first_needed(computed)
            windows = lease.windows.between(first_window, end)
        count = len(page_ids) + len(windows)
        if count > pool.num_free and self._tree is not None:
            self._tree.evict_host(count - pool.num_free)
        try:
            host_page_ids = pool.acquire(count)
        except OutOfPagesError:
            return None
        host_page_ids, host_windows = host_page_ids[: len(page_ids)], host_page_ids[len(page_ids) :]
        self._copies.to_host(page_ids, host_page_ids)
        self._copies.to_host(windows, host_windows)
        return SwappedPages(first, host_page_ids, computed, step, first_window, host_windows)

    def _swaps(self, lease: KVLease, how: Preemption | None) -> bool:
        preemption = how or self._preemption
        if preemption == "auto":
            return lease.computed >= SWAP_FROM_TOKENS
        return preemption == "swap"

    def swap_in(self, lease: KVLease, found: int) -> int:
        """Copy pages back to a lease of the same sequence, which has the first `found` already;
        return the number of the step that copied them to the host."""
        swapped = lease.swapped
        if swapped is None:
            raise InvariantError("a lease without pages on the host is swapped in")
        sources = swapped.host_page_ids[found - swapped.first :]
        self._copies.from_host(sources, lease.page_ids[found : found + len(sources)])
        if lease.windows is not None:
            targets = lease.windows.held[: len(swapped.host_window_page_ids)]
            self._copies.from_host(swapped.host_window_page_ids, targets)
        return swapped.step

    def give_up(self, swapped: SwappedPages, last_step: int) -> None:
        """Free the pages on the host; step `last_step` may still read them."""
        if self._host_pool is not None:
            for page_ids in (swapped.host_page_ids, swapped.host_window_page_ids):
                self._host_pool.release(page_ids, max(last_step, swapped.step))
