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
from aioserve.kv.prefix_tree import TreeNode

__all__ = ["held_on_device", "held_on_host", "recover"]

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
    _release_surplus(memory.pool, held_on_device(leases, nodes), last_step)
    if memory.host_pool is not None:
        _release_surplus(memory.host_pool, held_on_host(leases, nodes), last_step)


def held_on_device(leases: Iterable[KVLease], nodes: Sequence[TreeNode]) -> list[PageIds]:
    """Pages that leases and the prefix tree have references to, one for each time that one is
    named."""
    leases = list(leases)
    windows = [lease.windows.held for lease in leases if lease.windows is not None]
    return [*(lease.page_ids for lease in leases), *windows, *_held_by_tree(nodes, on_host=False)]


def held_on_host(leases: Iterable[KVLease], nodes: Sequence[TreeNode]) -> list[PageIds]:
    """As `held_on_device`, of the host."""
    swapped = [lease.swapped for lease in leases if lease.swapped is not None]
    pages = [page_ids for s in swapped for page_ids in (s.host_page_ids, s.host_window_page_ids)]
    return [*pages, *_held_by_tree(nodes, on_host=True)]


def _held_by_tree(nodes: Sequence[TreeNode], *, on_host: bool) -> list[PageIds]:
    return [
        np.array(page_ids, np.int32)
        for node in nodes
        if node.on_host is on_host
        for page_ids in (node.page_ids, [p for some in node.window_page_ids for p in some])
    ]


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
