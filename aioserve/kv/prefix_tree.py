"""Prefix tree: which runs of tokens have their KV in pages, and which pages to give up first.

Knows token ids, page numbers and step numbers; the tree itself is native. Must not know tensors or
clocks: a tick that counts uses orders them. Not thread-safe: one scheduler owns a tree.
"""

from __future__ import annotations

import weakref

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve import _native
from aioserve.kv.eviction import Eviction, StrategyCalls
from aioserve.kv.page_pool import PagePool
from aioserve.paging.pages import full_pages

__all__ = ["EVICTION_STRATEGIES", "NO_RECEIPT", "Evicted", "Match", "PrefixTree", "TreeNode"]

NO_RECEIPT = -1
"""Receipt of a match without one."""

EVICTION_STRATEGIES = ("lru", "lfu", "fifo", "slru")
"""Orders in which unlocked leaves are evicted.

- lru: the least recently used first.
- lfu: the least often matched first, then the least recently used.
- fifo: the oldest first. A sequence is as old as the first page that it added without a break.
- slru: those never matched first, then the others, each by least recent use. This is segmented LRU
  without a bound on the protected segment (Karedla, Love and Wherry 1994).

These are native. Others are written in Python, see `aioserve.kv.eviction`.
"""

Int32Array = npt.NDArray[np.int32]


class Match(msgspec.Struct, frozen=True, gc=False):
    """Pages that the tree has of a prompt: whole pages from position 0, and one page in part.

    Each page is in one tier. All pages after it are in the same tier or later ones.
    """

    receipt: int
    """Locks exactly the pages of `tiers` until it is released."""
    tiers: tuple[Int32Array, ...]
    """Pages in each tier, nearest first, int32 `[n]` each. The pages of a tier follow those of the
    one before."""
    num_pages: int
    """Number of pages in all tiers."""
    tail_page: int = -1
    """A page of tier 0 that begins with the next `tail_tokens` tokens of the prompt; -1 if none."""
    tail_tokens: int = 0
    """Tokens of `tail_page` that match, 1 to `page_size` - 1; 0 without one."""
    tail_receipt: int = NO_RECEIPT
    """Locks `tail_page`, and what is above it, until it is released."""

    @property
    def page_ids(self) -> Int32Array:
        """Pages in tier 0, where steps read them: int32 `[n]`."""
        return self.tiers[0]


class Evicted(msgspec.Struct, frozen=True, gc=False):
    """Result of `PrefixTree.evict`."""

    count: int
    """Pages of the tier that the tree gave up, including those that the next tier has now. Pages
    that a step in flight may touch are fenced until it is done."""
    tiers: Int32Array
    """Tier of each page to copy, int32 `[k]`: the evicted tier, and later ones that had to make
    room. Copies are in order."""
    page_ids: Int32Array
    """Pages to copy, each to the tier after its own: int32 `[k]`, all different within a tier."""
    target_ids: Int32Array
    """Targets of the copies: int32 `[k]`, all different within a tier."""


class TreeNode(msgspec.Struct, frozen=True):
    """One node, from `PrefixTree.walk`."""

    namespace: bytes
    parent: int
    """Index in the walk; -1 for the root of a namespace, which has no pages."""
    token_ids: tuple[int, ...]
    page_ids: tuple[int, ...]
    written_steps: tuple[int, ...]
    """Number of the step that writes each page."""
    tier: int
    num_locks: int
    """Number of receipts that end at this node or below."""
    receipts: tuple[int, ...]
    """Receipts that end at this node's end."""
    created: int
    last_used: int
    hits: int
    """Matches that covered the node. Nodes that the strategy can't tell apart are merged, so this
    and the ticks above hold only as far as the strategy uses them."""
    group_page_ids: tuple[tuple[int, ...], ...]
    """Pages of other groups beside each page; an empty tuple where they are missing."""


class PrefixTree:
    """Compressed radix tree over runs of whole pages, per namespace, in one tier or several.

    The structure is RadixAttention's (Zheng et al., arXiv 2312.07104) over the pages of
    PagedAttention (Kwon et al., arXiv 2309.06180). The tree holds one reference to each page in it.
    Other users of a page have a reference of their own *and* a receipt that covers the page.
    Evicting pages that no receipt covers therefore always brings them back, free or fenced.

    A receipt locks the path from the start of a prompt to the page where it ends. It survives every
    split and merge of nodes, and grows only through its own `insert`. Unlocked pages at the ends of
    branches are evicted in the order of `strategy`. A strategy object that raises or returns no
    number is replaced by "lru" for good. Evicted pages go to the next tier first, if there is one.
    All pages after a page are in its tier or later ones.

    The pages in the tree are those of group 0. A page has *group pages* if the pools say so: the
    pages in which other groups keep its tokens. They belong to the tree like the page itself, and
    go with it. Group pages without other references are idle. They go before their page if they are
    idle for longer than the next leaf is unused; the page then lacks them. A sequence can go on
    after a page only if the group pages of the last `needed_tokens` tokens are there, so `match`
    finds no more.

    The caller makes the copies between the tiers, in the order in which the calls ask for them.
    Within a step they come before all computation, so a page whose KV leaves can be reused in the
    same step.

    Every operation happens whole, or raises and changes nothing. An `InvariantError` means a bug of
    the caller or the tree, for example an unknown receipt or a page that is in the tree already.
    Token and page ids are one-dimensional, contiguous int32 arrays; anything else is a `TypeError`
    or `ValueError`.
    """

    __slots__ = ("_native", "_strategy", "page_size", "pools")

    def __init__(
        self, *pools: PagePool, strategy: Eviction = "lru", needed_tokens: int = 1
    ) -> None:
        """`pools` are those of the tiers, nearest first. A token needs the group pages of the last
        `needed_tokens` tokens, its own included.

        Raises `ValueError` for an unknown strategy, no pool or more than four, and `needed_tokens`
        below 1. Also for pools that differ in page size or number of group pages.
        """
        if not isinstance(strategy, str | StrategyCalls):
            strategy = StrategyCalls(strategy, type(strategy).__name__)
        self._strategy = strategy  # here, so that the garbage collector sees its references
        self._native = _native.PrefixTree(
            [pool._native for pool in pools],
            strategy if isinstance(strategy, str) else weakref.proxy(strategy),
            needed_tokens,
        )
        self.pools: tuple[PagePool, ...] = pools
        self.page_size: int = pools[0].page_size

    @property
    def asks_strategy(self) -> bool:
        """True if the strategy is written in Python."""
        return not isinstance(self._strategy, str)

    @property
    def num_pages(self) -> int:
        """Pages of tier 0 in the tree, group pages included."""
        return self._native.num_pages

    @property
    def num_evictable(self) -> int:
        """Pages of tier 0 that `evict` can give up: pages that no receipt covers, and idle group
        pages."""
        return self._native.num_evictable

    @property
    def num_locked(self) -> int:
        """Pages of tier 0 that receipts cover, and their group pages that others refer to."""
        return self._native.num_pages - self._native.num_evictable

    def num_pages_in(self, tier: int) -> int:
        """Pages of a tier in the tree, group pages included."""
        return self._native.num_pages_in(tier)

    def num_evictable_in(self, tier: int) -> int:
        """Pages of a tier that `evict` can give up."""
        return self._native.num_evictable_in(tier)

    @property
    def num_nodes(self) -> int:
        """Number of nodes, roots of namespaces included."""
        return self._native.num_nodes

    @property
    def num_receipts(self) -> int:
        """Number of receipts that are not released."""
        return self._native.num_receipts

    def match(
        self,
        namespace: bytes,
        token_ids: Int32Array,
        *,
        partial: bool = True,
        use: bool = True,
        whole: bool = False,
    ) -> Match:
        """Find and lock the longest cached prefix of `token_ids`, int32 `[n]`.

        The caller adds its own references to the pages that it goes on to use. It releases every
        receipt, including one that covers nothing. Pages of tier 0 are found as soon as they are in
        the tree, those of later tiers once their copies there are made.

        The match counts as a use of each page that it finds. With `use=False`, neither the match
        nor the release of its receipts counts, until `use` or `insert` says that the match is
        taken.

        With `partial`, and if all pages are in tier 0, a page that begins with the next tokens is
        found, too. It is the one with the most of them, among those written by a step that is done.
        If there are very many siblings, only those closest in token order are considered.

        Finds no more than what the next token can go on from; with `whole`, everything.
        """
        pages = np.empty(full_pages(len(token_ids), self.page_size), np.int32)
        receipt, ends, *found = self._native.match(namespace, token_ids, partial, use, whole, pages)
        tiers: tuple[Int32Array, ...] = ()
        start = 0
        for end in ends:
            tiers = (*tiers, pages[start:end])
            start = end
        return Match(receipt, tiers, *found)

    def use(self, receipt: int, tail_receipt: int = NO_RECEIPT) -> None:
        """Count a use of the paths of both receipts, as their match with `use=True` would. A common
        path counts once."""
        self._native.use(receipt, tail_receipt)

    def peek(
        self, namespace: bytes, token_ids: Int32Array, *, whole: bool = False
    ) -> tuple[int, ...]:
        """Tokens of `token_ids`, int32 `[n]`, that `match` would find in each tier, in whole pages,
        with the same `whole`. Read-only: does not count as a use for eviction."""
        counts = self._native.peek(namespace, token_ids, whole)
        return tuple([count * self.page_size for count in counts])

    def insert(
        self,
        receipt: int,
        token_ids: Int32Array,
        page_ids: Int32Array,
        step: int,
        group_page_ids: Int32Array | None = None,
    ) -> int:
        """Extend the path of `receipt` by `page_ids`, int32 `[n]`. `step` writes these with the KV
        of `token_ids`, int32 `[n * page_size]`. Return how many of the pages the tree took.

        If the tree has a run in tier 0, it keeps its own pages, and the caller's stay with the
        caller. If it has the run in a later tier, it takes the caller's pages and gives its own
        back. It adds a reference to each page that it takes. The receipt then covers the whole
        path, which counts as used.

        `step` may be done already, because a page may become full only when later tokens are known.
        Raises `InvariantError` for a receipt that ends in a later tier: call `promote` first.

        `group_page_ids`, int32 `[m * num_group_pages]`, become the group pages of the last m pages.
        This holds for pages that the tree takes, and for written ones of its own that lack them.
        """
        return self._native.insert(receipt, token_ids, page_ids, group_page_ids, step)

    def promote(
        self,
        receipt: int,
        page_ids: Int32Array,
        step: int,
        group_page_ids: Int32Array | None = None,
    ) -> None:
        """Put the h pages of later tiers that `receipt` covers into `page_ids`, int32 `[h]` of tier
        0. `step` copies them there.

        The tree adds its own reference to each page. The pages of later tiers are given back once
        `step` is done in their pools. The last m of `page_ids` get `group_page_ids`, int32 `[m *
        num_group_pages]`. Raises `InvariantError` for a step that is done.
        """
        self._native.promote(receipt, page_ids, group_page_ids, step)

    def fork(self, receipt: int) -> int:
        """Return a second receipt for the same path. Its release counts as a use if that of
        `receipt` does."""
        return self._native.fork(receipt)

    def release(self, receipt: int) -> None:
        """End `receipt`. Its path counts as used now, unless no use of it was counted before."""
        self._native.release(receipt)

    def evict(self, count: int, step: int, tier: int = 0) -> Evicted:
        """Give up `count` pages of `tier` that no receipt covers, or all if there are fewer.

        Pages go from the ends of branches in the order of the strategy, each together with its
        group pages. Idle group pages go, too. The result may be a few pages more than `count`,
        since a page and its group pages go as one.

        Each page moves to the next tier, if there is one and it has room. Room is made there in the
        same way. The result says what to copy in `step`. A page whose step isn't done in the pool
        is dropped together with what is behind it in later tiers. A copy would outlive the failure
        of the step that writes the page. So no page is copied twice in a step.

        `count` must be at least 0. Raises `InvariantError` for a step that is done, except for the
        last of several tiers, and `ValueError` for an unknown tier.
        """
        given_up, *moved = self._native.evict(count, step, tier)
        return Evicted(given_up, *[np.frombuffer(one, np.int32) for one in moved])

    def frees_at_once(self, count: int) -> bool:
        """True if `evict` would give up `count` pages of tier 0 and free all of them at once: no
        step in flight may touch them. Requires `count` of at least 0."""
        return self._native.frees_at_once(count)

    def clear(self) -> None:
        """Drop everything that no receipt covers, in every tier, and idle group pages."""
        self._native.clear()

    def page_ids(self, receipt: int, first: int) -> Int32Array:
        """Pages of the path of `receipt` from page number `first` on: int32 `[n]` of tier 0.

        Raises `InvariantError` if one is in a later tier, or the path has fewer than `first` pages.
        Takes time in proportion to `n` and the nodes that hold these pages.
        """
        return np.frombuffer(self._native.page_ids(receipt, first), np.int32)

    def num_exclusive(self, receipt: int) -> int:
        """Pages of tier 0 that only `receipt` covers."""
        return self._native.num_exclusive(receipt)

    def withdraw(self, step: int) -> tuple[tuple[int, int], ...]:
        """Drop every page that `step` was to write, by computation or copy, and everything after
        it.

        Return the receipts that covered dropped pages, in ascending order, each with the number of
        pages that it still covers. Looks at every node.
        """
        return self._native.withdraw(step)

    def cut(self, receipt: int, num_pages: int) -> tuple[tuple[int, int], ...]:
        """Drop what the path of `receipt` holds after its first `num_pages` pages, and everything
        after that. Return what `withdraw` returns. `num_pages` must be at least 0."""
        return self._native.cut(receipt, num_pages)

    def forget(
        self, namespace: bytes, token_ids: Int32Array, num_pages: int
    ) -> tuple[tuple[int, int], ...]:
        """Drop all runs that begin like `token_ids`, int32 `[n]`, from page `num_pages` on. Return
        what `withdraw` returns."""
        match = self.match(namespace, token_ids, partial=False, use=False, whole=True)
        cut = self.cut(match.receipt, min(num_pages, match.num_pages))
        self.release(match.receipt)
        return cut

    def walk(self) -> list[TreeNode]:
        """All nodes, parents before their children: for tests and dumps."""
        return [TreeNode(*node) for node in self._native.walk()]

    def sanity_check(self) -> None:
        """Recount everything; raise `InvariantError` naming every term that is off. The tree is
        consistent if:

        - locks are the receipts that pass through each node,
        - counters equal a walk,
        - exactly the pages that can be evicted are listed for eviction,
        - each page has a reference, and a page that no receipt covers has no other,
        - siblings differ in their first page, and
        - nothing is behind a page of a later tier.

        Costs time in proportion to the tree: for tests and for an idle engine.
        """
        self._native.sanity_check()

    def __repr__(self) -> str:
        later = [self.num_pages_in(tier) for tier in range(1, len(self.pools))]
        return (
            f"PrefixTree(pages={[self.num_pages, *later]}, evictable={self.num_evictable}, "
            f"nodes={self.num_nodes}, receipts={self.num_receipts})"
        )
