"""Leases of the KV memory in every order of calls, compared with the tokens that each should hold.

A page holds, for each place in it, the prefix that ends there. Computed tokens are written at once,
and a write to a page that another can see is an error. Copies are made in the order in which they
are asked for. A page shared too long, given back too early or cut at the wrong place then shows:
its lease holds another prefix than its own.

Each window group has pages of its own, of which a lease needs the last ones. All entries that the
next token sees must be there in every group, in pages that the lease holds. Entries that have left
the window may be anything.

Leases lose entries in the middle, too. Later entries move up in the table: a position is no longer
the index of its entry.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aioserve.errors import InvariantError
from aioserve.kv.lease import KVLease
from aioserve.kv.memory import KVMemory
from aioserve.kv.page_pool import PageState
from aioserve.kv.recovery import held_in, recover
from aioserve.paging.layout import group_specs
from aioserve.paging.pages import capacity_tokens, full_pages, pages_for
from tests.doubles.dropped_entries import drop_pages
from tests.tiers import examples

LONG = [[(5 * k + i) % 7 for i in range(64)] for k in range(2)]
Prefix = tuple[int, ...]


def prompts():
    beginning = st.tuples(st.sampled_from(LONG), st.integers(0, 24)).map(lambda t: t[0][: t[1]])
    return st.tuples(beginning, st.lists(st.integers(0, 2), min_size=1, max_size=3)).map(
        lambda t: [*t[0], *t[1]]
    )


class Holder:
    """A lease, the known tokens of its sequence, and drafts after these, which aren't known."""

    def __init__(self, token_ids: list[int], *, publishes: bool = True) -> None:
        self.lease = KVLease()
        self.known = token_ids
        self.drafts: list[int] = []
        self.starts: dict[int, int] = {}
        """Position at which each step began that computed tokens."""
        self.least = 0
        """Lowest position that may be computed again."""
        self.publishes = publishes
        self.dropped: set[int] = set()
        """Positions whose entries were dropped."""

    @property
    def ids(self) -> np.ndarray:
        return np.array(self.known, np.int32)

    @property
    def tokens(self) -> list[int]:
        return [*self.known, *self.drafts]

    @property
    def kept(self) -> list[int]:
        """Positions in order of the indices of their entries."""
        return [at for at in range(self.lease.computed) if at not in self.dropped]

    def index(self, position: int) -> int:
        """Index of the entry of a token after the dropped ones."""
        return position - len(self.dropped)


class KVMemoryMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 2, 4, 4, 16]),
        num_pages=st.integers(12, 60),
        num_host_pages=st.sampled_from([0, 0, 20]),
        prefix_caching=st.sampled_from([True, True, False]),
        groups=st.sampled_from([0, 1, 2]),
        window=st.integers(1, 20),
        depth=st.sampled_from([1, 1, 2]),
    )
    def start(
        self, page_size, num_pages, num_host_pages, prefix_caching, groups=0, window=1, depth=1
    ):
        self.memory = KVMemory.of(
            (num_pages, num_host_pages),
            page_size,
            groups=group_specs(groups, window if groups else 0),
            prefix_caching=prefix_caching,
            preemption="swap" if num_host_pages else "recompute",
        )
        self.groups = groups
        self.window = window
        self.depth = depth
        """Steps in flight while the next one is planned."""
        self.holders: list[Holder] = []
        self.swapped: list[Holder] = []
        self.pinned: list[KVLease] = []
        self.kv: dict[tuple[int, int, int], Prefix] = {}
        self.touched: dict[int, int] = {}
        """Pages with the last step that reads or writes them."""
        self.step = 0
        self.next_draft = 100

    # -- what a runner does

    def compute(self, holder: Holder, count: int) -> None:
        """Compute `count` more tokens, all in one step."""
        memory, lease = self.memory, holder.lease
        holder.starts[self.step] = lease.computed
        for position in range(lease.computed, lease.computed + count):
            index, offset = divmod(holder.index(position), memory.page_size)
            for group, page in enumerate(self.pages_of(lease, index)):
                assert memory.pool.ref_count(page) == 1, f"page {page} is written and shared"
                self.kv[0, page, offset] = (group, *holder.tokens[: position + 1])
                self.touched[page] = self.step
        for page in self.pages_seen(lease, lease.entries, lease.entries + count):
            self.touched[page] = self.step
        memory.advance(lease, count, self.step)

    def pages_of(self, lease: KVLease, index: int) -> list[int]:
        """Pages of all groups of one position."""
        pages = [page for t in lease.tables for page in t.between(index, index + 1).tolist()]
        assert len(pages) == 1 + self.groups
        return pages

    def first_seen(self, position: int) -> int:
        """First token that the one at `position` sees in a window layer. The same holds for
        indices, since no dropped entry is seen there later."""
        return max(0, position - self.window + 1)

    def pages_seen(self, lease: KVLease, start: int, end: int) -> list[int]:
        """Pages that tokens with entries from index `start` up to `end` read: those of their
        windows, and all others of group 0."""
        size = self.memory.page_size
        seen = lease.page_ids[: pages_for(end, size)].tolist()
        for index in range(self.first_seen(start) // size, pages_for(end, size)):
            seen += self.pages_of(lease, index)[1:]
        return seen

    def run_chunks(self, holder: Holder, num_tokens: int) -> None:
        """Compute all known tokens, in as many steps as window pages require."""
        memory, lease = self.memory, holder.lease
        patience = 3
        while lease.computed < num_tokens:
            count = memory.reserve_some(lease, num_tokens - lease.computed, self.step)
            self.copy()
            if count:
                patience = 3
                self.compute(holder, count)
                self.publish(holder)
                self.trim(holder)
            else:
                patience -= 1
                assert patience, f"{lease} gets no page, and {memory.pool} has some"
            self.done()

    def publish(self, holder: Holder, *, leaving: bool = False) -> None:
        if holder.publishes:
            self.memory.publish(holder.lease, holder.ids, leaving=leaving)

    def trim(self, holder: Holder) -> None:
        least = min(holder.lease.computed, len(holder.known) - 1)
        self.memory.trim(holder.lease, least)
        holder.least = max(holder.least, least)

    def copy(self) -> None:
        copies = tuple(self.memory.copies)
        self.memory.copies.clear()
        for copy in copies:
            for offset in range(copy.num_tokens):
                place = (copy.from_tier, copy.source, offset)
                self.kv[copy.to_tier, copy.target, offset] = self.kv.get(place, ())

    def done(self) -> None:
        self.copy()
        self.memory.complete(max(self.memory.pool.done_step, self.step + 1 - self.depth))
        self.step += 1
        self.no_page_is_free_that_a_step_touches()

    def no_page_is_free_that_a_step_touches(self) -> None:
        done, pool = self.memory.pool.done_step, self.memory.pool
        self.touched = {page: step for page, step in self.touched.items() if step > done}
        for page in self.touched:
            assert pool.state(page) is not PageState.FREE, f"page {page} is free and touched"

    # -- what a scheduler does

    @precondition(lambda self: len(self.holders) < 5)
    @rule(prompt=prompts(), publishes=st.booleans())
    def begin(self, prompt, publishes):
        self.begin_with(Holder(prompt, publishes=publishes))

    def begin_with(self, holder: Holder) -> bool:
        memory = self.memory
        available, idle = memory.num_available, memory.pool.idle_owners()
        peeked = memory.claims.peek(holder.lease, holder.ids)
        needed = memory.claims.pages_needed(holder.lease, holder.ids)
        assert (memory.num_available, memory.pool.idle_owners()) == (available, idle)
        claim = memory.claims.claim(holder.lease, holder.ids)
        assert claim.num_cached < len(holder.known)
        assert claim.num_cached - claim.match.tail_tokens <= peeked <= claim.num_cached
        assert claim.num_first_pages <= claim.num_new_pages
        if claim.num_new_pages > memory.num_available:
            claim = memory.claims.without_tail(holder.lease, len(holder.known), claim)
            assert claim.num_new_pages == needed.num_new
        if claim.num_new_pages > memory.num_available:
            memory.claims.drop(claim)
            assert (memory.num_available, memory.pool.idle_owners()) == (available, idle)
            return False
        if not memory.begin(holder.lease, claim, self.step):
            assert memory.pool.num_fenced, "there were pages enough"
            self.done()
            return False
        self.holders.append(holder)
        holder.least = holder.lease.computed
        if holder.lease.entries == holder.lease.computed:  # didn't go on from swapped pages
            holder.dropped = set()
        self.copy()
        self.holds_its_own_tokens(holder)
        self.compute(holder, 1)
        self.publish(holder)
        self.trim(holder)
        self.done()
        self.run_chunks(holder, len(holder.known))
        return True

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), count=st.integers(1, 20), num_known=st.integers(0, 3))
    def reserve_several(self, data, count, num_known):
        """Reserve pages for some known tokens, and for drafts that may have to go."""
        holder = data.draw(st.sampled_from(self.holders))
        memory, lease = self.memory, holder.lease
        if holder.drafts:
            return
        new = [len(holder.known) % 3 + i for i in range(min(count, num_known))]
        needed = memory.num_pages_to_reserve([lease], count)
        before, num_held = lease.page_ids.tolist(), lease.num_held
        can = needed <= memory.num_available
        if not memory.reserve(lease, count, self.step):
            assert not can or memory.pool.num_fenced
            assert (lease.page_ids.tolist(), lease.num_held) == (before, num_held)
            self.done()
            return
        assert can
        assert memory.num_pages_to_reserve([lease], count) == 0
        self.copy()
        holder.known = [*holder.known, *new]
        for _ in range(count - len(new)):
            holder.drafts.append(self.next_draft)
            self.next_draft += 1
        self.compute(holder, count)
        self.publish(holder)
        self.trim(holder)
        self.done()

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def truncate(self, data):
        """Keep some of the drafts, which become known, or even fewer than the known tokens."""
        holder = data.draw(st.sampled_from(self.holders))
        lease, size = holder.lease, self.memory.page_size
        behind = max(holder.dropped, default=0)  # no truncation before dropped entries
        length = data.draw(st.integers(1 + behind, len(holder.tokens)))
        gone, index = max(table.first for table in lease.tables), holder.index(length)
        if capacity_tokens(lease.published, size) > index or gone > self.first_seen(index) // size:
            with pytest.raises(InvariantError, match=f"got {length}"):
                self.memory.truncate(lease, length)
            return
        self.memory.truncate(lease, length)
        holder.known, holder.drafts = holder.tokens[:length], []
        holder.least = min(holder.least, length)
        assert lease.num_pages == pages_for(index, size)
        self.publish(holder)
        self.trim(holder)
        self.done()

    @precondition(lambda self: 0 < len(self.holders) < 6)
    @rule(data=st.data())
    def fork(self, data):
        holder = data.draw(st.sampled_from(self.holders))
        if holder.drafts:
            return
        self.publish(holder)
        child = Holder(list(holder.known), publishes=holder.publishes)
        child.least, child.starts = holder.least, dict(holder.starts)
        child.dropped = set(holder.dropped)
        self.memory.fork(holder.lease, child.lease, self.step, self.step)
        self.holders.append(child)
        self.done()

    def droppable(self, holder: Holder) -> range:
        """Places of whole pages of the lease's own, with entries that no later token sees in its
        window."""
        least = holder.index(min(holder.least, len(holder.known) - 1))
        end = self.first_seen(least) if self.groups else least
        return range(holder.lease.published, full_pages(end, self.memory.page_size))

    @precondition(lambda self: any(map(self.droppable, self.holders)))
    @rule(data=st.data())
    def drop(self, data):
        holder = data.draw(st.sampled_from([h for h in self.holders if self.droppable(h)]))
        lease, size, places = holder.lease, self.memory.page_size, self.droppable(holder)
        first = data.draw(st.sampled_from(places))
        end = data.draw(st.integers(first + 1, places.stop))
        kept, published = holder.kept, lease.published
        holder.dropped |= {*kept[first * size : end * size]}
        drop_pages(self.memory.pool, lease, first, end)
        self.memory.publish(lease, holder.ids)
        assert lease.published == published

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def leave(self, data):
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        memory = self.memory
        if holder.drafts:  # drafts are not known, and must not be found
            memory.retract(holder.lease, self.step)
        before = memory.num_available + memory.pool.num_fenced
        reclaimable = memory.num_reclaimable(holder.lease)
        memory.leave(holder.lease)
        assert memory.num_available + memory.pool.num_fenced - before == reclaimable

    @precondition(lambda self: self.holders and len(self.memory.tiers) > 1)
    @rule(data=st.data())
    def swap_out(self, data):
        holder = data.draw(st.sampled_from(self.holders))
        if holder.drafts:
            return
        self.holders.remove(holder)
        self.publish(holder, leaving=True)
        self.memory.swap_out(holder.lease, len(holder.known), self.step)
        self.memory.leave(holder.lease)
        holder.lease, holder.starts = holder.lease.successor(), {}
        self.swapped.append(holder)
        self.done()

    @precondition(lambda self: self.swapped and len(self.holders) < 5)
    @rule()
    def begin_again(self):
        holder = self.swapped[0]
        if self.begin_with(holder):
            self.swapped.remove(holder)

    @rule(count=st.integers(1, 8))
    def evict(self, count):
        memory = self.memory
        wanted = min(memory.num_available, memory.pool.num_free + count)
        at_once = memory.tree is None or memory.tree.frees_at_once(wanted - memory.pool.num_free)
        memory.make_free(memory.pool.num_free + count, self.step)
        assert memory.pool.num_free + memory.pool.num_fenced >= wanted
        assert (memory.pool.num_free >= wanted) or not at_once
        self.done()

    @precondition(lambda self: self.memory.pool.done_step + 1 < self.step)
    @rule()
    def the_step_in_flight_fails(self):
        """Fail the step in flight. Its sequences end, and those that have taken over what it should
        have written."""
        memory, size = self.memory, self.memory.page_size
        failed = memory.pool.done_step + 1
        cut = memory.withdraw(failed)
        in_it = [h for h in self.holders if failed in h.starts]
        for holder in in_it:
            cut |= memory.forget(b"", holder.ids, holder.starts[failed] // size)
        memory.complete(failed)
        for holder in in_it:
            self.give_up(holder)
        for holder in list(self.holders):
            if memory.shorten(holder.lease, cut) or holder.lease.inherited_step >= failed:
                self.give_up(holder)
        for lease in self.pinned:
            memory.leave(lease)
        self.pinned.clear()
        for holder in self.swapped:
            if holder.lease.swapped is not None and holder.lease.swapped.step >= failed:
                memory.forget_swapped(holder.lease, self.step)
        self.done()

    def give_up(self, holder: Holder) -> None:
        self.holders.remove(holder)
        self.memory.leave(holder.lease)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), num_pages=st.integers(0, 4))
    def forget(self, data, num_pages):
        """Forget runs that begin like a sequence, as if they were wrong. All sequences that took
        some of them over end."""
        holder = data.draw(st.sampled_from(self.holders))
        memory, known = self.memory, holder.known
        proven = num_pages * memory.page_size
        self.give_up(holder)
        cut = memory.forget(b"", np.array(known, np.int32), num_pages)
        for lease in [lease for lease in self.pinned if lease.receipt in cut]:
            self.pinned.remove(lease)
            memory.leave(lease)
        for other in list(self.holders):
            memory.shorten(other.lease, cut)
            if other.lease.borrowed > proven and other.known[: proven + 1] == known[: proven + 1]:
                self.give_up(other)
        self.done()

    @rule()
    def forget_cached(self):
        memory = self.memory
        memory.forget_cached()
        assert memory.num_cached == 0

    @precondition(lambda self: self.holders and len(self.pinned) < 3)
    @rule(data=st.data(), tokens=st.integers(0, 40))
    def pin(self, data, tokens):
        holder = data.draw(st.sampled_from(self.holders))
        self.pinned.append(self.memory.claims.pin(b"", holder.ids[:tokens]))

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self):
        self.memory.leave(self.pinned.pop(0))

    @rule()
    def recover(self):
        """Recover although nothing is lost, so that nothing comes back."""
        memory = self.memory
        before = memory.pool.ref_counts().tolist()
        recover(memory, self.leases(), self.step)
        assert memory.pool.ref_counts().tolist() == before

    def leases(self) -> list[KVLease]:
        return [*(h.lease for h in (*self.holders, *self.swapped)), *self.pinned]

    # -- what holds always

    @invariant()
    def every_lease_holds_its_own_tokens(self):
        if not hasattr(self, "memory"):
            return
        self.memory.sanity_check()
        counts = self.memory.pool.ref_counts()
        # Clear unheld pages: they would often hold what the next holder wants.
        self.kv = {p: kv for p, kv in self.kv.items() if p[0] or counts[p[1]]}
        for holder in self.holders:
            assert holder.lease.computed == len(holder.tokens)
            assert holder.lease.entries == len(holder.kept)
            self.holds_its_own_tokens(holder)
        nodes = [] if self.memory.tree is None else self.memory.tree.walk()
        expected = np.zeros(len(counts), np.int32)
        for page_ids in held_in(0, self.leases(), nodes):
            np.add.at(expected, page_ids, 1)
        assert counts.tolist() == expected.tolist()

    def holds_its_own_tokens(self, holder: Holder) -> None:
        """Check that all entries that the next token sees are there, in pages that the lease
        holds."""
        lease, size = holder.lease, self.memory.page_size
        seen_from = self.first_seen(holder.index(holder.least))
        for at, position in enumerate(holder.kept):
            index, offset = divmod(at, size)
            for group, page in enumerate(self.pages_of(lease, index)):
                if group and at < seen_from:
                    continue
                assert self.kv.get((0, page, offset)) == (group, *holder.tokens[: position + 1])
                assert page in lease.tables[min(group, 1)].held.tolist()

    def teardown(self):
        if not hasattr(self, "memory"):
            return
        for holder in self.holders:
            self.memory.leave(holder.lease)
        for holder in self.swapped:
            self.memory.forget_swapped(holder.lease)
        for lease in self.pinned:
            self.memory.leave(lease)
        self.memory.complete(self.step)
        if self.memory.tree is not None:
            self.memory.tree.clear()
        assert self.memory.pool.num_free == self.memory.pool.num_pages
        assert all(tier.pool.num_held == 0 for tier in self.memory.tiers[1:])


KVMemoryMachine.TestCase.settings = settings(max_examples=examples(200), stateful_step_count=40)
TestKVMemory = KVMemoryMachine.TestCase


def test_a_number_of_tokens_that_a_lease_cannot_be_cut_to_is_named():
    memory = KVMemory.of((8,), 4)
    lease, ids = KVLease(), np.arange(10, dtype=np.int32)
    assert memory.begin(lease, memory.claims.claim(lease, ids), 0)
    memory.advance(lease, 10, 0)
    memory.publish(lease, ids)
    for length in (7, 11):
        with pytest.raises(InvariantError, match=rf"in \[8, 10\].* got {length}"):
            memory.truncate(lease, length)
    memory.truncate(lease, 8)
    assert (lease.computed, lease.num_pages) == (8, 2)
