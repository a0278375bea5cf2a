"""Stored responses: bounded, dropped at an age, and separate for each tenant."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from aioserve.server.openai.responses_api.store import ID_BYTES, ResponseStore, Stored
from tests.tiers import examples

MAX_ENTRIES, MAX_BYTES, SECONDS = 3, 4 * ID_BYTES, 100
tenants = st.sampled_from([None, "a", "b"])
names = st.sampled_from([f"resp_{number}" for number in range(6)])
items = st.sampled_from(["msg_0", "msg_1", "fc_0"])


class StoreMachine(RuleBasedStateMachine):
    """Compares the store with lists, the least recently used first."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.store = ResponseStore(
            max_entries=MAX_ENTRIES,
            max_bytes=MAX_BYTES,
            seconds=SECONDS,
            clock=lambda: self.now,
        )
        self.puts: list[tuple[Any, str]] = []
        self.model: dict[Any, list[tuple[str, Stored, int]]] = {}

    def mine(self, tenant: Any) -> list[tuple[str, Stored, int]]:
        kept = [entry for entry in self.model.get(tenant, []) if entry[2] > self.now]
        self.model[tenant] = kept
        return kept

    @rule(
        tenant=tenants,
        name=names,
        size=st.integers(0, MAX_BYTES + 1),
        ids=st.lists(items, max_size=2, unique=True),
    )
    def put(self, tenant: Any, name: str, size: int, ids: list[str]) -> None:
        stored = Stored(b"x" * (size // 2), b"y" * (size - size // 2), 1, tuple(ids))
        mine = self.mine(tenant)
        mine[:] = [entry for entry in mine if entry[0] != name]
        fits = stored.num_bytes <= MAX_BYTES
        if fits:
            mine.append((name, stored, self.now + SECONDS))
        while len(mine) > MAX_ENTRIES or sum(each.num_bytes for _, each, _ in mine) > MAX_BYTES:
            mine.pop(0)
        assert self.store.put(tenant, name, stored) == fits
        if fits:
            self.puts.append((tenant, name))

    @rule(tenant=tenants, item=items)
    def find(self, tenant: Any, item: str) -> None:
        """An item is found in the last stored response that has it."""
        having = {name for name, stored, _ in self.mine(tenant) if item in stored.ids}
        last = [name for of, name in reversed(self.puts) if of == tenant and name in having]
        assert self.store.with_item(tenant, item) == (last[0] if last else None)

    @rule(tenant=tenants, name=names)
    def get(self, tenant: Any, name: str) -> None:
        mine = self.mine(tenant)
        found = [entry for entry in mine if entry[0] == name]
        for entry in found:
            mine.remove(entry)
            mine.append(entry)
        assert self.store.get(tenant, name) is (found[0][1] if found else None)

    @rule(tenant=tenants, name=names)
    def delete(self, tenant: Any, name: str) -> None:
        mine = self.mine(tenant)
        left = [entry for entry in mine if entry[0] != name]
        assert self.store.delete(tenant, name) == (len(left) < len(mine))
        mine[:] = left

    @rule(seconds=st.integers(1, SECONDS + 1))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        assert self.store.get("nobody", "resp_0") is None  # a call of any tenant drops old ones

    @invariant()
    def bytes_are_those_of_what_is_kept(self) -> None:
        for tenant in (None, "a", "b"):
            expected = sum(stored.num_bytes for _, stored, _ in self.mine(tenant))
            assert self.store.num_bytes(tenant) == expected

    @invariant()
    def no_item_is_known_of_what_is_gone(self) -> None:
        kept = {(of, name) for of in self.model for name, _, _ in self.mine(of)}
        for (of, item), having in self.store._of_items.items():
            assert having
            assert all((of, name) in kept for name in having), item


StoreMachine.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None
)
TestStoreMachine = StoreMachine.TestCase


def test_at_the_limits_responses_are_kept_and_one_past_them_not() -> None:
    store = ResponseStore(max_entries=2, max_bytes=8, seconds=10, clock=lambda: 0)
    four = Stored(b"1234", b"", 0)
    assert all(store.put(None, name, four) for name in ("a", "b"))
    assert store.num_bytes(None) == 8
    assert store.put(None, "c", Stored(b"", b"", 0))  # a third entry
    assert store.get(None, "a") is None
    assert store.put(None, "d", Stored(b"12345", b"", 0))  # a ninth byte
    assert store.get(None, "b") is None
    assert store.put(None, "e", Stored(b"1234", b"5678", 0))
    assert not store.put(None, "f", Stored(b"1234", b"56789", 0))
    assert store.get(None, "e") is not None
    assert not ResponseStore(max_entries=0, max_bytes=8, seconds=10).put(None, "a", four)


def test_a_response_that_was_read_stays_longer_than_one_that_was_not() -> None:
    store = ResponseStore(max_entries=2, max_bytes=8, seconds=10, clock=lambda: 0)
    nothing = Stored(b"", b"", 0)
    for name in ("a", "b"):
        store.put(None, name, nothing)
    assert store.get(None, "a") is nothing
    store.put(None, "c", nothing)
    assert [store.get(None, name) is nothing for name in ("a", "b", "c")] == [True, False, True]
