"""Leases of the KV memory under every order of calls, against the tokens that each should hold.

A page holds, for each place in it, the prefix that ends there. What is computed is written at once,
and a write to a page that another can see is an error; copies are made in the order in which they
are asked for. So a page shared too long, given back too early or cut at the wrong place shows as a
lease that holds another prefix than its own.
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
from aioserve.kv.pages import capacity_tokens, pages_for
from aioserve.steps.pages import CopyKind

LONG = [[(5 * k + i) % 7 for i in range(64)] for k in range(2)]
Prefix = tuple[int, ...]


def prompts():
    beginning = st.tuples(st.sampled_from(LONG), st.integers(0, 24)).map(lambda t: t[0][: t[1]])
    return st.tuples(beginning, st.lists(st.integers(0, 2), min_size=1, max_size=3)).map(
        lambda t: [*t[0], *t[1]]
    )


class Holder:
    """A lease, the tokens that are known of its sequence, and drafts that aren't: behind these."""

    def __init__(self, token_ids: list[int]) -> None:
        self.lease = KVLease()
        self.known = token_ids
        self.drafts: list[int] = []

    @property
    def ids(self) -> np.ndarray:
        return np.array(self.known, np.int32)

    @property
    def tokens(self) -> list[int]:
        return [*self.known, *self.drafts]


class KVMemoryMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 2, 4, 4, 16]),
        num_pages=st.integers(12, 60),
        num_host_pages=st.sampled_from([0, 0, 20]),
        prefix_caching=st.booleans(),
    )
    def start(self, page_size, num_pages, num_host_pages, prefix_caching):
        self.memory = KVMemory.of(
            num_pages,
            page_size,
            num_host_pages=num_host_pages,
            prefix_caching=prefix_caching,
            preemption="swap" if num_host_pages else "recompute",
        )
        self.holders: list[Holder] = []
        self.swapped: list[Holder] = []
        self.kv: dict[tuple[str, int, int], Prefix] = {}
        self.step = 0
        self.next_draft = 100

    # -- what a runner does

    def compute(self, holder: Holder, count: int) -> None:
        """`count` more tokens, in a step that is done at once."""
        memory, lease = self.memory, holder.lease
        for position in range(lease.computed, lease.computed + count):
            index, offset = divmod(position, memory.page_size)
            page = int(lease.page_ids[index])
            assert memory.pool.ref_count(page) == 1, f"page {page} is written and shared"
            self.kv["device", page, offset] = tuple(holder.tokens[: position + 1])
        memory.advance(lease, count, self.step)

    def copy(self) -> None:
        copies = tuple(self.memory.copies)
        self.memory.copies.clear()
        for copy in copies:
            source = "host" if copy.kind is CopyKind.FROM_HOST else "device"
            target = "host" if copy.kind is CopyKind.TO_HOST else "device"
            for offset in range(copy.num_tokens):
                place = (source, copy.source, offset)
                self.kv[target, copy.target, offset] = self.kv.get(place, ())

    def done(self) -> None:
        self.copy()
        self.memory.complete(self.step)
        self.step += 1

    # -- what a scheduler does

    @precondition(lambda self: len(self.holders) < 5)
    @rule(prompt=prompts())
    def begin(self, prompt):
        self.begin_with(Holder(prompt))

    def begin_with(self, holder: Holder) -> bool:
        memory = self.memory
        claim = memory.claims.claim(holder.lease, holder.ids)
        assert claim.num_cached < len(holder.known)
        if claim.num_new_pages > memory.num_available:
            memory.claims.drop(claim)
            return False
        assert memory.begin(holder.lease, claim, self.step)
        self.holders.append(holder)
        self.copy()
        self.compute(holder, len(holder.known) - holder.lease.computed)
        memory.publish(holder.lease, holder.ids)
        self.done()
        return True

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), count=st.integers(1, 20), num_known=st.integers(0, 3))
    def reserve_several(self, data, count, num_known):
        """Some tokens that are known, and drafts that may have to go."""
        holder = data.draw(st.sampled_from(self.holders))
        memory, lease = self.memory, holder.lease
        if holder.drafts:
            return
        new = [len(holder.known) % 3 + i for i in range(min(count, num_known))]
        needed = memory.num_pages_to_reserve([lease], count)
        if needed > memory.num_available:
            before = lease.page_ids.tolist()
            assert not memory.reserve(lease, count, self.step)
            assert lease.page_ids.tolist() == before
            self.done()
            return
        assert memory.reserve(lease, count, self.step)
        assert memory.num_pages_to_reserve([lease], count) == 0
        self.copy()
        holder.known = [*holder.known, *new]
        for _ in range(count - len(new)):
            holder.drafts.append(self.next_draft)
            self.next_draft += 1
        self.compute(holder, count)
        memory.publish(lease, holder.ids)
        self.done()

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def truncate(self, data):
        """Keep some of the drafts, which become known, or not even all that was known."""
        holder = data.draw(st.sampled_from(self.holders))
        lease, size = holder.lease, self.memory.page_size
        length = data.draw(st.integers(1, len(holder.tokens)))
        if capacity_tokens(lease.published, size) > length:
            with pytest.raises(InvariantError, match=f"got {length}"):
                self.memory.truncate(lease, length)
            return
        self.memory.truncate(lease, length)
        holder.known, holder.drafts = holder.tokens[:length], []
        assert lease.num_pages == pages_for(length, size)
        self.memory.publish(lease, holder.ids)
        self.done()

    @precondition(lambda self: 0 < len(self.holders) < 6)
    @rule(data=st.data())
    def fork(self, data):
        holder = data.draw(st.sampled_from(self.holders))
        if holder.drafts:
            return
        child = Holder(list(holder.known))
        self.memory.fork(holder.lease, child.lease, self.step, self.step)
        self.holders.append(child)
        self.done()

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def leave(self, data):
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        memory = self.memory
        before = memory.num_available + memory.pool.num_fenced
        reclaimable = memory.num_reclaimable(holder.lease)
        memory.leave(holder.lease)
        assert memory.num_available + memory.pool.num_fenced - before == reclaimable

    @precondition(lambda self: self.holders and self.memory.host_pool is not None)
    @rule(data=st.data())
    def swap_out(self, data):
        holder = data.draw(st.sampled_from(self.holders))
        if holder.drafts:
            return
        self.holders.remove(holder)
        self.memory.publish(holder.lease, holder.ids, leaving=True)
        self.memory.swap_out(holder.lease, len(holder.known), self.step)
        self.memory.leave(holder.lease)
        holder.lease = holder.lease.successor()
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
        self.memory.make_free(self.memory.pool.num_free + count, self.step)
        self.done()

    # -- what holds always

    @invariant()
    def every_lease_holds_its_own_tokens(self):
        if not hasattr(self, "memory"):
            return
        self.memory.sanity_check()
        size, counts = self.memory.page_size, self.memory.pool.ref_counts()
        # What nobody holds is gone: it would often be what the next holder wants.
        self.kv = {p: kv for p, kv in self.kv.items() if p[0] == "host" or counts[p[1]]}
        for holder in self.holders:
            lease = holder.lease
            assert lease.computed == len(holder.tokens)
            for position in range(lease.computed):
                index, offset = divmod(position, size)
                held = self.kv.get(("device", int(lease.page_ids[index]), offset))
                assert held == tuple(holder.tokens[: position + 1])

    def teardown(self):
        if not hasattr(self, "memory"):
            return
        for holder in self.holders:
            self.memory.leave(holder.lease)
        for holder in self.swapped:
            self.memory.forget_swapped(holder.lease)
        self.memory.complete(self.step)
        if self.memory.tree is not None:
            self.memory.tree.clear()
        assert self.memory.pool.num_free == self.memory.pool.num_pages
        assert self.memory.host_pool is None or self.memory.host_pool.num_held == 0


KVMemoryMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40)
TestKVMemory = pytest.mark.timeout(300)(KVMemoryMachine.TestCase)


def test_a_number_of_tokens_that_a_lease_cannot_be_cut_to_is_named():
    memory = KVMemory.of(8, 4)
    lease, ids = KVLease(), np.arange(10, dtype=np.int32)
    assert memory.begin(lease, memory.claims.claim(lease, ids), 0)
    memory.advance(lease, 10, 0)
    memory.publish(lease, ids)
    for length in (7, 11):
        with pytest.raises(InvariantError, match=rf"in \[8, 10\].* got {length}"):
            memory.truncate(lease, length)
    memory.truncate(lease, 8)
    assert (lease.computed, lease.num_pages) == (8, 2)
