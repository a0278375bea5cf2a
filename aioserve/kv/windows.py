"""How many window pages sequences need, when these have had their time, and which leases hold
which.

Knows leases and the pool. `KVMemory` calls: it alone changes leases.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from aioserve.kv.layout import first_seen
from aioserve.kv.lease import KVLease
from aioserve.kv.page_pool import PagePool
from aioserve.kv.page_table import PageTable
from aioserve.kv.pages import (
    capacity_tokens,
    full_pages,
    pages_for,
    tokens_of_sequence,
    window_pages,
)
from aioserve.kv.window_pages import WindowPages

__all__ = ["Windows"]

PageIds = npt.NDArray[np.int32]


class Windows:
    """Window pages of the leases of one `KVMemory`: `num_groups` for each position, and none where
    it is 0. A token sees the last `window` tokens, itself included.
    """

    def __init__(self, pool: PagePool, window: int) -> None:
        """Raise `ValueError` for a window without pages, or pages without a window."""
        num_groups = pool.num_companions
        if (window > 0) != (num_groups > 0) or window < 0:
            raise ValueError(
                "window must be at least 1 where pages have companions, and 0 where they have "
                f"none, got {window} with {num_groups}"
            )
        self.num_groups: int = num_groups
        self.window: int = window
        self._pool = pool
        self._page_size = pool.page_size

    def first_needed(self, position: int) -> int:
        """The first page position whose window pages the token at `position` sees."""
        return full_pages(first_seen(position, self.window), self._page_size)

    def least_position(self, first: int) -> int:
        """The first token that sees no window page before page position `first`."""
        return capacity_tokens(first, self._page_size) + self.window - 1 if first else 0

    def num_held(self, num_tokens: int) -> int:
        """Window pages that a sequence of so many tokens holds, going on token by token."""
        size = self._page_size
        return self.num_groups * min(pages_for(num_tokens, size), window_pages(self.window, size))

    def capacity_tokens(self, num_pages: int) -> int:
        """Tokens of one sequence for which `num_pages` pages of all groups are enough."""
        return tokens_of_sequence(num_pages, self._page_size, self.num_groups, self.window)

    def num_covered_with(self, lease: KVLease, num_pages: int) -> int:
        """Positions for which a lease has all pages when it gets `num_pages` more: up to the end of
        its own it takes window pages alone."""
        positions, missing = lease.covered, lease.num_pages - lease.covered
        if missing:
            given = min(missing, max(0, num_pages) // self.num_groups)
            positions, num_pages = positions + given, num_pages - given * self.num_groups
        if positions < lease.num_pages:
            return positions
        return positions + max(0, num_pages) // (1 + self.num_groups)

    # -- leases

    def begin(self, lease: KVLease, first: int, page_ids: PageIds) -> None:
        """Window pages `page_ids`, int32 `[n * num_groups]`, from position `first` on: their
        references are the lease's from now on."""
        lease.windows = WindowPages(self.num_groups)
        lease.windows.first = first
        gone = np.zeros(first * self.num_groups, np.int32)
        lease.windows.table = PageTable.of(gone, page_ids)
        lease.covered = len(lease.windows)

    def share(self, lease: KVLease, child: KVLease, num_positions: int) -> None:
        """Make those of the first positions of a lease another one's, too."""
        if lease.windows is not None:
            first = lease.windows.first
            self.begin(child, first, lease.windows.between(first, num_positions))
            self._pool.retain(lease.windows.between(first, num_positions))

    def pin(self, lease: KVLease, page_ids: PageIds, num_pages: int) -> None:
        """Keep those of the tree's `page_ids`, the first of `num_pages` pages, that what comes
        behind these would see."""
        first = self.first_needed(capacity_tokens(num_pages, self._page_size))
        first = min(first, len(page_ids))
        held = self._pool.companions(page_ids[first:]).ravel()
        self.begin(lease, first, held)
        self._pool.retain(held)

    def trim(self, lease: KVLease, least: int) -> None:
        """Give back those that no token from position `least` on sees, fenced by the last step of
        the lease: no other token will be computed."""
        windows = lease.windows
        if windows is None:
            return
        first = self.first_needed(least)
        if first > windows.first:
            gone = windows.between(windows.first, first)
            windows.first = first
            self._pool.release(gone, lease.last_step)

    def truncate(self, lease: KVLease, num_positions: int) -> None:
        """Give back those behind the first positions."""
        windows = lease.windows
        if windows is not None:
            gone = windows.between(num_positions, len(windows))
            windows.table = PageTable.of(windows.between(0, num_positions))
            self._pool.release(gone, lease.last_step)

    def leave(self, lease: KVLease) -> None:
        """Take back all of them. What goes on behind the last page that is published sees some more
        than the last token did, which have gone by now: as far as the tree has these, they count as
        used, too."""
        windows = lease.windows
        if windows is None:
            return
        first = self.first_needed(capacity_tokens(lease.published, self._page_size))
        seen = self._pool.companions(lease.page_ids[first : windows.first]).ravel()
        seen = seen[seen >= 0]
        self._pool.retain(seen)
        self._pool.release(np.concatenate((seen, windows.held)), lease.last_step)

    def take_over(self, lease: KVLease, first: int) -> None:
        """Put those that the tree has from position `first` on, as far as pages are published, in
        place of a lease's own. A page that is hollow has none to take."""
        windows, end = lease.windows, lease.published
        if windows is None or max(first, windows.first) >= end:
            return
        first = max(first, windows.first)
        own = windows.between(first, end)
        tree = self._pool.companions(lease.page_ids[first:end]).ravel()
        changed = np.flatnonzero((tree != own) & (tree >= 0))
        if not len(changed):
            return
        self._pool.retain(tree[changed])
        windows.replace(first, np.where(tree >= 0, tree, own).astype(np.int32))
        lease.carried = min(lease.carried, first + full_pages(int(changed[0]), self.num_groups))
        self._pool.release(own[changed], lease.last_step)
