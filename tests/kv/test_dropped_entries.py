"""A lease that lost entries in the middle: its pages go by index, its tokens by position."""

from __future__ import annotations

import numpy as np
import pytest

from aioserve.errors import InvariantError
from aioserve.kv.lease import KVLease
from aioserve.kv.memory import KVMemory
from tests.doubles.dropped_entries import drop_pages

IDS = np.arange(14, dtype=np.int32)


def lease_of(memory: KVMemory, *, drops: bool = True) -> KVLease:
    """Lease of all of `IDS` in pages of four tokens, of which the second is dropped."""
    lease = KVLease()
    assert memory.begin(lease, memory.claims.claim(lease, IDS), 0)
    memory.advance(lease, len(IDS) - lease.computed, 0)
    if drops:
        drop_pages(memory.pool, lease, 1, 2)
        assert (lease.computed, lease.entries, lease.num_pages) == (14, 10, 3)
    return lease


def test_the_shared_page_of_the_next_entry_is_copied() -> None:
    memory = KVMemory.of((16,), 4, prefix_caching=False)
    lease, child = lease_of(memory), KVLease()
    memory.fork(lease, child, 0, 0)
    assert (child.computed, child.entries) == (14, 10)
    before = lease.page_ids.tolist()
    assert memory.num_pages_to_reserve([lease, child]) == 1
    assert memory.short_of_pages([lease, child]) == [lease, child]
    assert memory.reserve(lease, 1, 1)
    (copy,) = memory.copies
    assert (copy.source, copy.target, copy.num_tokens) == (before[2], lease.page_ids[2], 2)
    assert lease.page_ids[:2].tolist() == before[:2]
    assert child.page_ids.tolist() == before
    assert lease.carried <= 2


def test_a_page_is_taken_when_the_entries_fill_theirs() -> None:
    memory = KVMemory.of((16,), 4, prefix_caching=False)
    lease = lease_of(memory)
    assert memory.reserve(lease, 2, 1)
    assert lease.num_pages == 3
    memory.advance(lease, 2, 1)
    assert memory.short_of_pages([lease]) == [lease]
    assert memory.reserve_some(lease, 5, 2) == 5
    assert (lease.computed, lease.entries, lease.num_pages) == (16, 12, 5)


def test_a_lease_is_cut_to_tokens_behind_those_that_lost_their_entries() -> None:
    memory = KVMemory.of((16,), 4, prefix_caching=False)
    lease = lease_of(memory)
    memory.retreat(lease, 1)
    assert (lease.computed, lease.entries) == (13, 9)
    memory.truncate(lease, 12)
    assert (lease.computed, lease.entries, lease.num_pages) == (12, 8, 2)
    with pytest.raises(InvariantError, match=r"in \[4, 12\].* got 3"):
        memory.truncate(lease, 3)


def test_pages_that_are_not_those_of_the_first_tokens_are_not_published() -> None:
    memory = KVMemory.of((16,), 4)
    lease = lease_of(memory)
    memory.publish(lease, IDS)
    assert lease.published == 0
    assert memory.claims.peek(KVLease(), IDS) == 0


def test_swapped_pages_come_back_although_the_tree_has_more() -> None:
    memory = KVMemory.of((16, 16), 4, preemption="swap")
    lease, other = lease_of(memory), lease_of(memory, drops=False)
    memory.publish(other, IDS)
    memory.copies.clear()
    memory.swap_out(lease, len(IDS), 1)
    memory.leave(lease)
    assert [copy.source for copy in memory.copies] == lease.page_ids.tolist()
    targets = [copy.target for copy in memory.copies]
    memory.copies.clear()

    again = lease.successor()
    assert memory.claims.peek(again, IDS) == 13
    assert memory.begin(again, memory.claims.claim(again, IDS), 2)
    assert (again.computed, again.entries, again.num_pages) == (13, 9, 3)
    assert [copy.source for copy in memory.copies] == targets
    assert [copy.target for copy in memory.copies] == again.page_ids.tolist()
