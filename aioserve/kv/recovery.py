"""Take back pages and receipts without an owner, after an exception interrupted a change.

A change to KV memory takes several calls. If one in the middle raises, the lease being changed
can't be trusted, and pages or receipts may have lost their owner. This recounts, instead of undoing
each kind of change. The remaining leases and the prefix tree keep what they name, and the rest
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

__all__ = ["held_in", "recover"]

PageIds = npt.NDArray[np.int32]


def recover(memory: KVMemory, leases: Sequence[KVLease], last_step: int) -> None:
    """Give back each reference and receipt that neither `leases` nor the prefix tree account for.

    `leases` are all live ones, none of them in the middle of a change. Pages that come back are
    fenced by `last_step`. Raises `InvariantError` if a lease names a page that it doesn't hold.
    """
    nodes = [] if memory.tree is None else memory.tree.walk()
    if memory.tree is not None:
        receipts = {lease.receipt for lease in leases}
        for receipt in sorted({r for node in nodes for r in node.receipts} - receipts):
            memory.tree.release(receipt)
    for number, tier in enumerate(memory.tiers):
        _release_surplus(tier.pool, held_in(number, leases, nodes), last_step)


def held_in(tier: int, leases: Iterable[KVLease], nodes: Sequence[TreeNode]) -> list[PageIds]:
    """Pages of a tier that leases and the prefix tree have references to. A page appears once for
    each reference."""
    held: list[PageIds] = []
    for lease in leases:
        if not tier:
            held += [table.held for table in lease.tables]
        elif lease.swapped is not None and lease.swapped.tier == tier:
            held += [run.page_ids for run in lease.swapped.groups]
    for node in nodes:
        if node.tier == tier:
            beside = [page for some in node.group_page_ids for page in some]
            held.append(np.array([*node.page_ids, *beside], np.int32))
    return held


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
