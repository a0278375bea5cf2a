"""Prefix tree in plain Python, as serving engines have them, to compare the native one with.

It is a compressed radix tree over runs of whole pages. Children are in a dict by the tokens of
their first page, numpy compares runs, and locks are counted along the path. Unlocked leaves are
evicted page by page from a heap, least recently used first. It finds and evicts the same as
`aioserve.kv.PrefixTree` with the strategy "lru" and without a host pool. It does not check its
arguments, merge nodes that were split, or know the steps that write pages.
"""

from __future__ import annotations

import heapq
from itertools import count

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]


class Node:
    """Run of tokens and the pages that hold their KV. A lock on a node also locks all above it."""

    __slots__ = ("children", "last_used", "locks", "pages", "parent", "tokens")

    def __init__(self, parent: Node | None, tokens: Ids, pages: Ids, last_used: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.last_used = last_used
        self.locks = 0
        self.children: dict[bytes, Node] = {}


class RadixTree:
    """Tree that owns `num_pages` pages: the free ones, and those in the tree."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.free = list(range(num_pages - 1, -1, -1))
        nothing = np.empty(0, np.int32)
        self._root = Node(None, nothing, nothing, 0)
        self._now = 0
        self._leaves: list[tuple[int, int, Node]] = []
        """Heap of unlocked leaves by last use. Outdated entries are skipped."""
        self._entry = count()

    def acquire(self, num_pages: int) -> Ids:
        """Take free pages; there must be enough."""
        pages = self.free[len(self.free) - num_pages :]
        del self.free[len(self.free) - num_pages :]
        return np.array(pages, np.int32)

    def match(self, tokens: Ids) -> tuple[Node, Ids]:
        """Return the node at which the longest cached prefix ends, locked, and the prefix's
        pages.
        """
        self._now += 1
        node, pages = self._root, [self._root.pages]
        while child := node.children.get(tokens[: self.page_size].tobytes()):
            common = self._common_pages(child, tokens)
            node = self._split(child, common) if common < len(child.pages) else child
            node.last_used = self._now
            pages.append(node.pages)
            tokens = tokens[common * self.page_size :]
        self._lock(node)
        return node, np.concatenate(pages)

    def insert(self, node: Node, tokens: Ids, pages: Ids) -> Node:
        """Extend the path that ends at the locked `node`, and return the new end.

        The lock moves there. If the tree has a run already it keeps its own pages.
        """
        self._now += 1
        start = node
        while child := node.children.get(tokens[: self.page_size].tobytes()):
            common = self._common_pages(child, tokens)
            node = self._split(child, common) if common < len(child.pages) else child
            tokens, pages = tokens[common * self.page_size :], pages[common:]
        if len(pages):
            child = Node(node, tokens.copy(), pages.copy(), self._now)
            node.children[tokens[: self.page_size].tobytes()] = child
            node = child
        self._lock(node)
        self._use(node)
        self._unlock(start)
        return node

    def release(self, node: Node) -> None:
        """Unlock the path that ends at `node`."""
        self._now += 1
        self._use(node)
        self._unlock(node)

    def evict(self, num_pages: int) -> int:
        """Free up to `num_pages` pages of unlocked leaves; return how many."""
        evicted = 0
        while evicted < num_pages and self._leaves:
            last_used, _, leaf = self._leaves[0]
            parent = leaf.parent
            if parent is None or leaf.children or leaf.locks or last_used != leaf.last_used:
                heapq.heappop(self._leaves)
                continue
            kept = max(len(leaf.pages) - (num_pages - evicted), 0)
            evicted += len(leaf.pages) - kept
            self.free += leaf.pages[kept:].tolist()
            if kept:
                leaf.pages, leaf.tokens = leaf.pages[:kept], leaf.tokens[: kept * self.page_size]
                continue
            heapq.heappop(self._leaves)
            del parent.children[leaf.tokens[: self.page_size].tobytes()]
            leaf.parent = None
            self._list_if_evictable(parent)
        return evicted

    def _common_pages(self, node: Node, tokens: Ids) -> int:
        """Return the number of pages that `node` and `tokens` have in common; at least one."""
        length = min(len(node.tokens), len(tokens) // self.page_size * self.page_size)
        differs = node.tokens[:length] != tokens[:length]
        first = int(differs.argmax())
        return (first if differs[first] else length) // self.page_size

    def _split(self, node: Node, num_pages: int) -> Node:
        """Split a node after its first pages; return the new node above, which gets these."""
        cut = num_pages * self.page_size
        upper = Node(node.parent, node.tokens[:cut], node.pages[:num_pages], node.last_used)
        upper.locks = node.locks
        upper.children[node.tokens[cut : cut + self.page_size].tobytes()] = node
        if node.parent is not None:
            node.parent.children[node.tokens[: self.page_size].tobytes()] = upper
        node.parent = upper
        node.tokens, node.pages = node.tokens[cut:], node.pages[num_pages:]
        return upper

    def _lock(self, node: Node | None) -> None:
        while node is not None:
            node.locks += 1
            node = node.parent

    def _unlock(self, node: Node) -> None:
        above: Node | None = node
        while above is not None:
            above.locks -= 1
            above = above.parent
        self._list_if_evictable(node)

    def _use(self, node: Node | None) -> None:
        while node is not None:
            node.last_used = self._now
            node = node.parent

    def _list_if_evictable(self, node: Node) -> None:
        if not node.locks and not node.children and node.parent is not None:
            heapq.heappush(self._leaves, (node.last_used, next(self._entry), node))
