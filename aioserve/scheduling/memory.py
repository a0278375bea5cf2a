"""The KV memory of a scheduler: which pages a sequence gets, shares, and gives back.

Binds the page pool, the prefix tree and the host pool together, one sequence at a time:

    claim ──► take ──► grow, copy on write, publish ──► leave
      └─────► drop                                        └──► swapped to the host, or recomputed

What has to be copied meanwhile collects in `copies` for the next plan. A page may be written only
by a sequence that is its one holder: pages that the tree holds are complete, and a page that two
samples share is copied first.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.config import Preemption
from aioserve.errors import InvariantError
from aioserve.execution.plan import CopyKind, PageCopy
from aioserve.kv.eviction import Eviction
from aioserve.kv.page_pool import NO_STEP, OutOfPagesError, PagePool
from aioserve.kv.page_table import PageTable
from aioserve.kv.pages import capacity_tokens, pages_for
from aioserve.kv.prefix_tree import NO_RECEIPT, Match, PrefixTree
from aioserve.scheduling.sequence import SequenceState, SwappedPages

__all__ = ["SWAP_FROM_TOKENS", "Claim", "KVMemory", "MemoryCounters"]

SWAP_FROM_TOKENS = 256
"""From this context length "auto" swaps: copying grows with it, computing with its square."""

NO_PAGES = np.empty(0, np.int32)
NO_MATCH = Match(NO_RECEIPT, NO_PAGES, NO_PAGES)


class MemoryCounters(msgspec.Struct):
    """Totals since the memory was made."""

    tokens_cached: int = 0
    """Prompt tokens whose KV was found in the prefix tree, also when a sequence begins again."""
    pages_copied: int = 0
    """Pages copied on the device: shared ones before a write, and cached ones in part."""
    pages_swapped_out: int = 0
    pages_swapped_in: int = 0


class Claim(msgspec.Struct, frozen=True, gc=False):
    """What a waiting sequence would find and need. Its match is locked until it is taken or
    dropped."""

    match: Match
    num_cached: int
    """Leading tokens that need no computing."""
    num_new_pages: int
    """Pages to acquire for all tokens known."""
    uses_swapped: bool


class KVMemory:
    """All pages, and who may have them. Not thread-safe; owned by one scheduler.

    `host_pool` counts the pages of a storage beside the device: leaves evicted from the prefix tree
    go there first and come back on a hit, and so do, under `preemption="swap"`, the pages of
    preempted sequences that the tree doesn't hold. Raises `ValueError` for options that don't go
    together.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        host_pool: PagePool | None = None,
        prefix_caching: bool = True,
        partial_page_reuse: bool = True,
        eviction: Eviction = "lru",
        preemption: Preemption = "auto",
    ) -> None:
        if preemption == "swap" and host_pool is None:
            raise ValueError('preemption="swap" needs a host_pool to swap to')
        if host_pool is not None and host_pool.page_size != pool.page_size:
            raise ValueError(
                f"host_pool must have the page_size of the pool, {pool.page_size}, "
                f"got {host_pool.page_size}"
            )
        self.pool = pool
        self.host_pool = host_pool
        self.page_size = pool.page_size
        self.tree = (
            PrefixTree(pool, host_pool=host_pool, strategy=eviction) if prefix_caching else None
        )
        self.partial_page_reuse = partial_page_reuse and pool.page_size > 1
        self.preemption = preemption
        self.counters = MemoryCounters()
        self._copies: list[PageCopy] = []

    @property
    def num_cached(self) -> int:
        """Pages that the prefix tree alone holds: they can be evicted."""
        return 0 if self.tree is None else self.tree.num_evictable

    @property
    def num_available(self) -> int:
        """Pages that are free or can be evicted. The latter may be fenced for a step."""
        return self.pool.num_free + self.num_cached

    def take_copies(self) -> tuple[PageCopy, ...]:
        """The copies that the next plan must carry, in order."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def complete(self, step: int) -> None:
        """Step `step`, and every one before it, is done."""
        self.pool.complete(step)
        if self.host_pool is not None:
            self.host_pool.complete(step)

    # -- a sequence begins

    def peek(self, sequence: SequenceState) -> int:
        """Tokens of a waiting sequence that need no computing if it begins now."""
        if self.tree is None:
            return 0 if sequence.swapped is None else sequence.swapped.computed
        device, host = self.tree.peek(sequence.namespace, _matchable(sequence))
        swapped = sequence.swapped
        if swapped is not None and capacity_tokens(swapped.first, self.page_size) <= device + host:
            return max(swapped.computed, device + host)
        return device + host

    def claim(self, sequence: SequenceState) -> Claim:
        """Find and lock what is cached of a waiting sequence. Take it, or drop it."""
        match = NO_MATCH
        if self.tree is not None:
            match = self.tree.match(
                sequence.namespace, _matchable(sequence), partial=self.partial_page_reuse, use=False
            )
        return self._claim(sequence, match)

    def without_tail(self, sequence: SequenceState, claim: Claim) -> Claim:
        """The claim less the page that it would copy in part, which others may evict again."""
        match = claim.match
        if match.tail_receipt == NO_RECEIPT:
            return claim
        self._tree.release(match.tail_receipt)
        return self._claim(sequence, Match(match.receipt, match.page_ids, match.host_page_ids))

    def _claim(self, sequence: SequenceState, match: Match) -> Claim:
        found = len(match.page_ids) + len(match.host_page_ids)
        num_cached = capacity_tokens(found, self.page_size) + match.tail_tokens
        swapped = sequence.swapped
        uses_swapped = (
            swapped is not None and swapped.first <= found and swapped.computed > num_cached
        )
        if swapped is not None and uses_swapped:
            num_cached = swapped.computed
        num_new_pages = pages_for(sequence.num_known, self.page_size) - len(match.page_ids)
        return Claim(match, num_cached, num_new_pages, uses_swapped)

    def drop(self, claim: Claim) -> None:
        """Unlock what a claim found."""
        for receipt in (claim.match.receipt, claim.match.tail_receipt):
            if receipt != NO_RECEIPT:
                self._tree.release(receipt)

    def take(self, sequence: SequenceState, claim: Claim, step: int) -> bool:
        """Give a sequence the pages of all its known tokens, in step `step`.

        False, and the claim is dropped, when pages that must be evicted for it are fenced.
        """
        match = claim.match
        fresh = self._acquire(claim.num_new_pages, step)
        if fresh is None:
            self.drop(claim)
            return False
        if match.receipt != NO_RECEIPT:
            self._tree.use(match.receipt, match.tail_receipt)
        self.pool.retain(match.page_ids)
        sequence.page_table.append(match.page_ids)
        sequence.page_table.append(fresh)
        sequence.receipt = match.receipt
        found = len(match.page_ids) + len(match.host_page_ids)
        sequence.published = found
        if len(match.host_page_ids):
            targets = fresh[: len(match.host_page_ids)]
            self._tree.promote(match.receipt, targets, step)
            self._copy(CopyKind.FROM_HOST, match.host_page_ids, targets)
        in_tree = capacity_tokens(found, self.page_size)
        if claim.uses_swapped:
            sequence.inherited_step = self._swap_in(sequence, found)
        elif match.tail_tokens:
            in_tree += match.tail_tokens
            target = sequence.page_table.page_ids[found : found + 1]
            tail = np.array([match.tail_page], np.int32)
            self._copy(CopyKind.DEVICE, tail, target, match.tail_tokens)
        if match.tail_receipt != NO_RECEIPT:
            self._tree.release(match.tail_receipt)
        self.forget_swapped(sequence, step)
        sequence.computed = sequence.cached = sequence.borrowed = claim.num_cached
        self.counters.tokens_cached += min(in_tree, sequence.prompt_tokens)
        return True

    def fork(self, sequence: SequenceState, child: SequenceState, written_step: int) -> None:
        """Give another sample of the same prompt the pages of a sequence that computes it in this
        step, and did so before in steps up to `written_step`."""
        pages = sequence.page_table.page_ids
        self.pool.retain(pages)
        child.page_table.append(pages)
        child.computed = child.cached = child.borrowed = sequence.computed
        child.inherited_step = written_step
        if sequence.receipt != NO_RECEIPT:
            child.receipt = self._tree.fork(sequence.receipt)
            child.published = sequence.published
        if sequence.computed % self.page_size:
            sequence.shares_last_page = child.shares_last_page = True

    # -- a sequence runs

    def needs_page(self, sequence: SequenceState) -> bool:
        """Whether the next token needs a page more than the sequence may write to."""
        if sequence.computed == capacity_tokens(len(sequence.page_table), self.page_size):
            return True
        return sequence.shares_last_page and self._must_copy(sequence)

    def num_pages_needed(self, sequences: Iterable[SequenceState]) -> int:
        """Pages that the next tokens of all `sequences` need together: of the samples that share a
        page, the last one writes to it without a copy."""
        needed = 0
        sharing: dict[int, int] = {}
        for sequence in sequences:
            if self._must_copy(sequence):
                last = int(sequence.page_table.page_ids[-1])
                sharing[last] = sharing.get(last, 0) + 1
            elif self.needs_page(sequence):
                needed += 1
        copies = [min(count, self.pool.ref_count(page) - 1) for page, count in sharing.items()]
        return needed + sum(copies)

    def grow(self, sequence: SequenceState, step: int) -> bool:
        """Give the sequence the page that its next token needs; False when none is free."""
        page = self._acquire(1, step)
        if page is None:
            return False
        if not self._must_copy(sequence):
            sequence.page_table.append(page)
            return True
        shared = sequence.page_table.page_ids[-1:]
        self._copy(CopyKind.DEVICE, shared, page, sequence.computed % self.page_size)
        sequence.page_table = sequence.page_table.with_last(page)
        sequence.shares_last_page = False
        self.pool.release(shared, step)
        return True

    def _must_copy(self, sequence: SequenceState) -> bool:
        if not sequence.shares_last_page:
            return False
        last = int(sequence.page_table.page_ids[-1])
        sequence.shares_last_page = self.pool.ref_count(last) > 1
        return sequence.shares_last_page

    def make_free(self, count: int, step: int) -> None:
        """Evict until `count` pages are free, or nothing is left to evict."""
        short = count - self.pool.num_free
        if short <= 0 or self.tree is None:
            return
        evicted = self.tree.evict(short, step)
        self._copy(CopyKind.TO_HOST, evicted.device_page_ids, evicted.host_page_ids)

    def publish(self, sequence: SequenceState, *, leaving: bool = False) -> None:
        """Let others find the pages that are full of known tokens, computed or being computed.

        Called when the step that computes them has their numbers. Where the tree has a run already,
        later steps of the sequence read the tree's pages, and its own come back.
        """
        full = min(sequence.computed, sequence.num_known) // self.page_size
        first = sequence.published
        if full <= first or self.tree is None:
            return
        start = capacity_tokens(first, self.page_size)
        count = self.tree.insert(
            sequence.receipt,
            sequence.ids(start, capacity_tokens(full, self.page_size) - start),
            sequence.page_table.page_ids[first:full],
            sequence.last_step,
        )
        sequence.published = full
        if count < full - first and not leaving:
            self._take_over(sequence, first, self.tree.page_ids(sequence.receipt, first))

    def _take_over(
        self, sequence: SequenceState, first: int, page_ids: npt.NDArray[np.int32]
    ) -> None:
        """Put the tree's pages in place of a sequence's duplicates, from page `first` on.

        A sequence that kept both could need more than its share of pages, and not fit alone."""
        table = sequence.page_table.page_ids
        end = first + len(page_ids)
        changed = np.flatnonzero(table[first:end] != page_ids)
        self.pool.retain(page_ids[changed])
        self.pool.release(table[first:end][changed], sequence.last_step)
        sequence.page_table = PageTable()
        for part in (table[:first], page_ids, table[end:]):
            sequence.page_table.append(part)
        sequence.borrowed = capacity_tokens(first + int(changed[-1]) + 1, self.page_size)

    def num_reclaimable(self, sequence: SequenceState) -> int:
        """Pages that come back, now or after the steps in flight, if the sequence leaves."""
        alone = self.pool.num_unshared(sequence.page_table.page_ids)
        return alone + self._num_exclusive(sequence)

    def num_shared_tokens(self, sequence: SequenceState) -> int:
        """Leading tokens that stay computed for others if the sequence leaves."""
        return capacity_tokens(sequence.published - self._num_exclusive(sequence), self.page_size)

    def _num_exclusive(self, sequence: SequenceState) -> int:
        if sequence.receipt == NO_RECEIPT:
            return 0
        return self._tree.num_exclusive(sequence.receipt)

    # -- a sequence leaves

    def leave(self, sequence: SequenceState) -> None:
        """Take back the pages of a sequence, fenced by its last step."""
        if len(sequence.page_table):
            self.pool.release(sequence.page_table.page_ids, sequence.last_step)
        if sequence.receipt != NO_RECEIPT:
            self._tree.release(sequence.receipt)

    def swap_out(self, sequence: SequenceState, step: int) -> None:
        """Copy to the host what the tree doesn't hold of a sequence that is about to leave.

        Nothing happens where recomputing is the way, or where the host pool has no room.
        """
        # One known token is always computed again: its step samples the next.
        computed = min(sequence.computed, sequence.num_known - 1)
        first = sequence.published
        count = pages_for(computed, self.page_size) - first
        if self.host_pool is None or count <= 0 or not self._swaps(sequence):
            return
        if count > self.host_pool.num_free and self.tree is not None:
            self.tree.evict_host(count - self.host_pool.num_free)
        try:
            host_page_ids = self.host_pool.acquire(count)
        except OutOfPagesError:
            return
        pages = sequence.page_table.page_ids[first : first + count]
        self._copy(CopyKind.TO_HOST, pages, host_page_ids)
        sequence.swapped = SwappedPages(first, host_page_ids, computed, step)

    def _swaps(self, sequence: SequenceState) -> bool:
        if self.preemption == "auto":
            return sequence.computed >= SWAP_FROM_TOKENS
        return self.preemption == "swap"

    def _swap_in(self, sequence: SequenceState, found: int) -> int:
        """Copy a sequence's pages back; the number of the step that copied them to the host."""
        swapped = sequence.swapped
        if swapped is None:
            raise InvariantError(f"sequence {sequence.sequence_id} has no pages on the host")
        sources = swapped.host_page_ids[found - swapped.first :]
        targets = sequence.page_table.page_ids[found : found + len(sources)]
        self._copy(CopyKind.FROM_HOST, sources, targets)
        return swapped.step

    def forget_swapped(self, sequence: SequenceState, last_step: int = NO_STEP) -> None:
        """Give up a sequence's pages on the host; step `last_step` may still read them."""
        swapped, sequence.swapped = sequence.swapped, None
        if swapped is not None and self.host_pool is not None:
            self.host_pool.release(swapped.host_page_ids, max(last_step, swapped.step))

    # -- steps fail

    def withdraw(self, step: int) -> dict[int, int]:
        """Step `step` has failed: forget every page that it should have written.

        Returns the receipts that lost pages, with the number of pages that they still cover.
        """
        return {} if self.tree is None else dict(self.tree.withdraw(step))

    def forget(self, sequence: SequenceState, num_pages: int) -> dict[int, int]:
        """Forget all that begins like `sequence`, from page `num_pages` on.

        Returns receipts as `withdraw` does.
        """
        if self.tree is None:
            return {}
        match = self.tree.match(
            sequence.namespace, sequence.ids(0, sequence.num_known), partial=False, use=False
        )
        found = len(match.page_ids) + len(match.host_page_ids)
        cut = dict(self.tree.cut(match.receipt, min(num_pages, found)))
        self.tree.release(match.receipt)
        return cut

    def sanity_check(self) -> None:
        """Raise `InvariantError` unless the pools and the tree agree, each with itself."""
        self.pool.sanity_check()
        if self.host_pool is not None:
            self.host_pool.sanity_check()
        if self.tree is not None:
            self.tree.sanity_check()

    # -- parts

    @property
    def _tree(self) -> PrefixTree:
        if self.tree is None:
            raise InvariantError("a receipt without a prefix tree")
        return self.tree

    def _acquire(self, count: int, step: int) -> npt.NDArray[np.int32] | None:
        self.make_free(count, step)
        try:
            return self.pool.acquire(count)
        except OutOfPagesError:
            return None

    def _copy(
        self,
        kind: CopyKind,
        sources: npt.NDArray[np.int32],
        targets: npt.NDArray[np.int32],
        num_tokens: int | None = None,
    ) -> None:
        tokens = self.page_size if num_tokens is None else num_tokens
        self._copies += [
            PageCopy(kind, source, target, tokens)
            for source, target in zip(sources.tolist(), targets.tolist(), strict=True)
        ]
        match kind:
            case CopyKind.DEVICE:
                self.counters.pages_copied += len(sources)
            case CopyKind.TO_HOST:
                self.counters.pages_swapped_out += len(sources)
            case CopyKind.FROM_HOST:
                self.counters.pages_swapped_in += len(sources)


def _matchable(sequence: SequenceState) -> npt.NDArray[np.int32]:
    """Known tokens that may come from the cache: the last one is always computed."""
    return sequence.ids(0, sequence.num_known - 1)
