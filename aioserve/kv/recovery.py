"""Takes back pages and receipts without an owner, after a change was interrupted by an exception.

A change to KV memory takes several calls. If one in the middle raises, the lease being changed
can't be trusted, and pages or receipts may have lost their owner. Instead of undoing each kind of
change, this recounts: what the remaining leases and the prefix tree name is theirs, and the rest
comes back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from aioserve.errors import InvariantError
from aioserve.kv.lease import KVLease
from aioserve.kv.memory import KVMemory
from aioserve.kv.page_pool import PagePool

__all__ = ["recover"]

PageIds = npt.NDArray[np.int32]


def recover(memory: KVMemory, leases: Sequence[KVLease], last_step: int) -> None:
    """Give back each reference and receipt that neither `leases` nor the prefix tree account for.

    `leases` are all that live on, none of them in the middle of a change. Pages that come back are
    fenced by `last_step`. Raises `InvariantError` if a lease names a page that it doesn't hold.
    """
    nodes = [] if memory.tree is None else memory.tree.walk()
    if memory.tree is not None:
        receipts = {lease.receipt for lease in leases}
        for receipt in sorted({r for node in nodes for r in node.receipts} - receipts):
            memory.tree.release(receipt)
    tables = [lease.page_ids for lease in leases]
    tables += [np.array(node.page_ids, np.int32) for node in nodes if not node.on_host]
    _release_surplus(memory.pool, tables, last_step)
    if memory.host_pool is not None:
        tables = [lease.swapped.host_page_ids for lease in leases if lease.swapped is not None]
        tables += [np.array(node.page_ids, np.int32) for node in nodes if node.on_host]
        _release_surplus(memory.host_pool, tables, last_step)


def _release_surplus(pool: PagePool, tables: Iterable[PageIds], last_step: int) -> None:
    surplus = pool.ref_counts()
    for page_ids in tables:
        np.subtract.at(surplus, page_ids, 1)
    if (surplus < 0).any():
        page = int(surplus.argmin())
        raise InvariantError(f"page {page} lacks {-int(surplus[page])} references")
    while surplus.any():
        pages = np.flatnonzero(surplus).astype(np.int32)
        pool.release(pages, last_step)
        surplus[pages] -= 1
