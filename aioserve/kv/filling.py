"""Count of the empty token slots in pages that leases hold: internal fragmentation."""

from __future__ import annotations

from collections.abc import Iterable

from aioserve.kv.lease import KVLease
from aioserve.paging.pages import full_pages

__all__ = ["num_empty_slots"]


def num_empty_slots(leases: Iterable[KVLease], page_size: int) -> int:
    """Return the token slots without an entry in the pages of `leases`, of all groups.

    A page of `page_size` tokens has as many slots. Only the page of a lease's last entry and those
    behind it have empty ones. A page that several leases share counts once, by the lease that fills
    it most. Steps in flight count as done.
    """
    filled: dict[int, int] = {}
    for lease in leases:
        entries = lease.entries
        first = full_pages(entries, page_size)
        for table in lease.tables:
            begin = max(first, table.first)
            pages = table.between(begin, len(table)).tolist()
            for at, page in enumerate(pages):
                used = max(0, entries - (begin + at // table.width) * page_size)
                filled[page] = max(filled.get(page, 0), min(used, page_size))
    return len(filled) * page_size - sum(filled.values())
