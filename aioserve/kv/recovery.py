"""Takes back what nobody has, after something was raised in the middle of a change.

Changes to KV memory are made of several calls. Where one in the middle raises, the lease that was
being changed can't be trusted, and pages or receipts may be held by nobody. Instead of undoing each
kind of change, the books are counted: what the remaining leases and the prefix tree name is theirs,
and the rest comes back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from aioserve.errors import InvariantError
from aioserve.execution.plan import CopyKind
from aioserve.kv.lease import KVLease
from aioserve.kv.memory import KVMemory
from aioserve.kv.page_pool import PagePool
from aioserve.kv.prefix_tree import PrefixTree, TreeNode

__all__ = ["drop_unwritten", "recover"]

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


def drop_unwritten(
    memory: KVMemory, step: int, written: Iterable[PageIds], lost: Iterable[KVLease]
) -> dict[int, int]:
    """Forget pages in the prefix tree that `step` was to write and won't: those neither among
    `written`, device pages, nor the target of a copy that waits for the next plan.

    A page that comes back from the host may be meant to be completed: those of `lost` leases won't.

    Returns the receipts that lost pages, with the number of pages that they still cover.
    """
    if memory.tree is None:
        return {}
    on_device = {page for page_ids in written for page in page_ids.tolist()}
    on_host: set[int] = set()
    incomplete = {
        page for one in lost for page in one.page_ids[one.cached // memory.page_size :].tolist()
    }
    for copy in memory.copies:
        if copy.kind is CopyKind.TO_HOST:
            on_host.add(copy.target)
        elif copy.kind is CopyKind.FROM_HOST and copy.target not in incomplete:
            on_device.add(copy.target)
    cut: dict[int, int] = {}
    while (found := _unwritten(memory.tree, step, on_device, on_host)) is not None:
        namespace, token_ids, num_pages = found
        match = memory.tree.match(namespace, token_ids, partial=False, use=False)
        cut.update(memory.tree.cut(match.receipt, num_pages))
        memory.tree.release(match.receipt)
        cut.pop(match.receipt, None)
    return cut


def _unwritten(
    tree: PrefixTree, step: int, on_device: set[int], on_host: set[int]
) -> tuple[bytes, PageIds, int] | None:
    """A path that ends in a page which `step` leaves unwritten: its namespace, its tokens, and the
    number of pages before that one."""
    nodes = tree.walk()
    for node in nodes:
        written = on_host if node.on_host else on_device
        for index, (page, writer) in enumerate(zip(node.page_ids, node.written_steps, strict=True)):
            if writer == step and page not in written:
                path = _path(nodes, node)
                above = len(path) // tree.page_size - len(node.page_ids)
                return node.namespace, np.array(path, np.int32), above + index
    return None


def _path(nodes: Sequence[TreeNode], node: TreeNode) -> list[int]:
    """Tokens from the root to the end of `node`."""
    path = list(node.token_ids)
    while node.parent >= 0:
        node = nodes[node.parent]
        path = [*node.token_ids, *path]
    return path
