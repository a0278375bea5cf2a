"""Leases that lose entries in the middle, so that positions and indices differ.

    position   0  1  2  3  4  5  6  7  8        pages of two tokens: 7 3 9 4 6
    index      0  1  2  3  4  5  6  7  8
    entries    0  1  .  .  .  .  6  7  8        pages 3 and 9 are dropped: 7 4 6
    index      0  1              2  3  4

The package drops no entries. `DroppingGroup` does, while it is in `KINDS` of
`aioserve.kv.groups.making`.
"""

from __future__ import annotations

from aioserve.kv.groups.full import FullGroup
from aioserve.kv.lease import KVLease
from aioserve.kv.page_pool import PagePool
from aioserve.kv.page_table import PageTable
from aioserve.paging.pages import capacity_tokens, full_pages

__all__ = ["MOST_PAGES", "DroppingGroup", "drop_pages", "positions_kept"]

MOST_PAGES = 4
"""Full pages at which a `DroppingGroup` drops the second one, before the next token is planned."""


def drop_pages(pool: PagePool, lease: KVLease, first: int, end: int) -> None:
    """Drop the entries in the pages at places `[first, end)` of each table of a lease. Raises
    ValueError for pages that are in the prefix tree, or not full."""
    if not lease.published <= first <= end <= full_pages(lease.entries, pool.page_size):
        raise ValueError(f"{lease}: pages [{first}, {end}) aren't full pages of its own")
    for table in lease.tables:
        gone = table.between(max(first, table.first), max(end, table.first))
        behind = table.between(end, len(table))
        table.cut(first)
        table.append(behind)
        table.first -= min(max(0, table.first - first), end - first)
        pool.release(gone, lease.last_step)
    lease.entries -= capacity_tokens(end - first, pool.page_size)
    lease.covered -= end - first
    lease.carried = min(lease.carried, first)


class DroppingGroup(FullGroup):
    """The only group of a memory without a prefix tree: the first page and the last ones stay."""

    keeps_all = False

    def trim(self, lease: KVLease, table: PageTable, least: int) -> None:
        while full_pages(lease.entries, self.page_size) >= MOST_PAGES:
            drop_pages(self._pool, lease, 1, 2)


def positions_kept(held: list[int], page_size: int) -> list[int]:
    """Positions whose entries `DroppingGroup` keeps of those `held`, in order of index."""
    while len(held) // page_size >= MOST_PAGES:
        held = held[:page_size] + held[2 * page_size :]
    return held
