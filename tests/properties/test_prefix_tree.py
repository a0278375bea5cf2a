"""The native prefix tree against a model with an entry per page, through any order of calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from aioserve.errors import InvariantError
from aioserve.kv.eviction import Eviction, PageUse
from aioserve.kv.page_pool import NO_STEP, PagePool
from aioserve.kv.prefix_tree import EVICTION_STRATEGIES, NO_RECEIPT, PrefixTree

Prefix = tuple[bytes, tuple[int, ...]]
"""A namespace and all tokens up to the end of a page: names that page of that prompt."""

NAMESPACES = (b"", b"\x00a")


randoms = st.randoms(use_true_random=True)
"""What a rule draws inside: by the seed alone, which is much faster than draws that shrink."""


def int32(values) -> np.ndarray:
    return np.array(values, np.int32)


@dataclass
class CachedPage:
    page: int
    step: int
    created: int
    last_used: int
    hits: int = 0
    on_host: bool = False


STRATEGY_KEYS = {
    "lru": lambda use: (use.last_used,),
    "lfu": lambda use: (use.hits, use.last_used),
    "fifo": lambda use: (use.created,),
    "slru": lambda use: (use.hits > 0, use.last_used),
    "most recent": lambda use: (-use.last_used, use.last_used),
    "all alike": lambda use: (0, use.last_used),
    "hits and age": lambda use: (use.hits / 2 - use.created, use.last_used),
    "raises soon": lambda use: (use.last_used,),
    "answers nonsense soon": lambda use: (use.last_used,),
}


class FailsSoon:
    """The order of "lru", which it must be before it fails and after."""

    def __init__(self, fail: Callable[[], float]) -> None:
        self.fail = fail
        self.calls = 0

    def key(self, use: PageUse) -> float:
        self.calls += 1
        assert self.calls <= 4, "it is asked after it has failed"
        return use.last_used_tick if self.calls < 4 else self.fail()


def strategy_of(name: str) -> Eviction:
    if name in EVICTION_STRATEGIES:
        return name
    custom = {
        "most recent": Keyed(lambda use: -use.last_used_tick),
        "all alike": Keyed(lambda use: False),
        "hits and age": Keyed(lambda use: use.hits / 2 - use.created_tick),
        "raises soon": FailsSoon(lambda: 1 // 0),
        "answers nonsense soon": FailsSoon(lambda: float("nan")),
    }
    return custom[name]


@dataclass
class Keyed:
    key: Callable[[PageUse], float]


@dataclass
class ModelTree:
    """What the tree promises, in dicts: no nodes, no order structures, no counters."""

    page_size: int
    strategy: str
    has_host: bool
    pages: dict[Prefix, CachedPage] = field(default_factory=dict)
    receipts: dict[int, Prefix] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)
    """Receipts whose release counts as a use."""
    created: dict[int, int] = field(default_factory=dict)
    """When the run began that each receipt added last."""
    now: int = 0

    def prefixes(self, path: Prefix) -> list[Prefix]:
        namespace, tokens = path
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return [(namespace, tokens[:end]) for end in ends]

    def behind(self, path: Prefix) -> list[Prefix]:
        namespace, tokens = path
        return [
            other for other in self.pages if other[0] == namespace and is_behind(other[1], tokens)
        ]

    def next_pages(self, path: Prefix) -> list[Prefix]:
        return [p for p in self.behind(path) if len(p[1]) == len(path[1]) + self.page_size]

    def longest(self, namespace: bytes, tokens: tuple[int, ...], done_step: int) -> Prefix:
        found = (namespace, ())
        for prefix in self.prefixes((namespace, tokens)):
            cached = self.pages.get(prefix)
            if cached is None or (cached.on_host and cached.step > done_step):
                break
            found = prefix
        return found

    def tails(self, path: Prefix, rest: tuple[int, ...], done_step: int) -> dict[int, set[int]]:
        """Pages that begin with the most of `rest`: by how many tokens, at least one."""
        found: dict[int, set[int]] = {}
        for other in self.next_pages(path):
            cached = self.pages[other]
            common = common_tokens(other[1][len(path[1]) :], rest)
            if common > 0 and not cached.on_host and cached.step <= done_step:
                found.setdefault(common, set()).add(cached.page)
        return found

    def created_behind(self, prefix: Prefix, receipt: int) -> int:
        before = self.pages.get((prefix[0], prefix[1][: -self.page_size]))
        if before is None or self.created.get(receipt) != before.created:
            self.created[receipt] = self.now
        return self.created[receipt]

    def use(self, path: Prefix, hits: int = 0) -> None:
        for prefix in self.prefixes(path):
            self.pages[prefix].last_used = self.now
            self.pages[prefix].hits += hits

    def locks(self) -> Counter[Prefix]:
        return Counter(p for path in self.receipts.values() for p in self.prefixes(path))

    def key(self, prefix: Prefix) -> tuple[int, ...]:
        return STRATEGY_KEYS[self.strategy](self.pages[prefix])

    def first_to_go(self, *, on_host: bool) -> Prefix | None:
        locks = self.locks()
        leaves = [
            prefix
            for prefix, cached in self.pages.items()
            if cached.on_host == on_host
            and not locks[prefix]
            and all(self.pages[p].on_host and not on_host for p in self.next_pages(prefix))
        ]
        if not leaves:
            return None
        first, *others = sorted(leaves, key=self.key)
        assert not others or self.key(first) < self.key(others[0]), "the order leaves a choice"
        return first

    def evict(self, count: int, host_free: int, done_step: int) -> tuple[int, dict[int, Prefix]]:
        """How many pages the device loses, and which of them the host has then."""
        moved: dict[Prefix, int] = {}
        for i in range(count):
            prefix = self.first_to_go(on_host=False)
            if prefix is None:
                return i, {page: p for p, page in moved.items()}
            if self.pages[prefix].step > done_step:
                for gone in [prefix, *self.behind(prefix)]:
                    host_free += self.pages.pop(gone).on_host
                    moved.pop(gone, None)
                continue
            if self.has_host and host_free == 0:
                dropped = self.first_to_go(on_host=True)
                if dropped is not None:
                    moved.pop(dropped, None)
                    del self.pages[dropped]
                    host_free += 1
            if self.has_host and host_free > 0:
                host_free -= 1
                moved[prefix] = self.pages[prefix].page
                self.pages[prefix].on_host = True
            else:
                assert not self.behind(prefix)
                del self.pages[prefix]
        return count, {page: p for p, page in moved.items()}

    def drop(self, first: Prefix) -> dict[int, Prefix]:
        """Drop `first` and all behind it; return the receipts that end above now, and where."""
        for prefix in [first, *self.behind(first)]:
            self.pages.pop(prefix, None)
        above = (first[0], first[1][: -self.page_size])
        shortened = {
            receipt: above
            for receipt, (namespace, tokens) in self.receipts.items()
            if namespace == first[0] and tokens[: len(first[1])] == first[1]
        }
        self.receipts.update(shortened)
        return shortened


def is_behind(tokens: tuple[int, ...], path: tuple[int, ...]) -> bool:
    return len(tokens) > len(path) and tokens[: len(path)] == path


def common_tokens(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count


@dataclass
class Holder:
    """A sequence as the scheduler keeps it: a receipt, and references to the pages it may read."""

    receipt: int
    page_ids: list[int]


class PrefixTreeMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 2, 16, 64]),
        strategy=st.sampled_from(list(STRATEGY_KEYS)),
        num_pages=st.integers(6, 24),
        num_host_pages=st.sampled_from([None, 1, 4, 8, 8]),
    )
    def start(
        self, page_size: int, strategy: str, num_pages: int, num_host_pages: int | None
    ) -> None:
        self.page_size = page_size
        self.pool = PagePool(num_pages, page_size)
        self.host = None if num_host_pages is None else PagePool(num_host_pages, page_size)
        self.tree = PrefixTree(self.pool, host_pool=self.host, strategy=strategy_of(strategy))
        self.model = ModelTree(page_size, strategy, self.host is not None)
        self.holders: list[Holder] = []
        self.tail_receipts: list[int] = []
        self.step = 0

    # What is drawn: few kinds of pages, so that prompts share them whole and in part.

    def some_page(self, random: Random) -> tuple[int, ...]:
        kinds = [(0, 0, 1), (0, 1, 1), (0, 1, 2), (1, 0, 9)]
        head, rest, length = random.choice(kinds)
        length = min(length, self.page_size)
        return (head,) * length + (rest,) * (self.page_size - length)

    def some_pages(self, random: Random, most: int) -> tuple[int, ...]:
        count = random.randint(0, most)
        return sum((self.some_page(random) for _ in range(count)), ())

    def some_path(self, random: Random, paths: list[Prefix]) -> Prefix:
        """One of `paths`, often one that leads to the host."""
        on_host = [p for p in paths if p in self.model.pages and self.model.pages[p].on_host]
        if on_host and random.random() < 0.5:
            paths = on_host
        return random.choice(paths)

    def some_prompt(self, random: Random) -> Prefix:
        """Mostly a continuation of what is cached already."""
        roots = [(namespace, ()) for namespace in NAMESPACES]
        namespace, tokens = self.some_path(random, [*roots, *self.model.pages])
        part = self.some_page(random)[: random.randint(0, self.page_size - 1)]
        return namespace, tokens + self.some_pages(random, 2) + part

    def some_continuation(self, random: Random, holder: Holder) -> tuple[int, ...]:
        path = self.model.receipts[holder.receipt]
        _, tokens = self.some_path(random, [path, *self.model.behind(path)])
        return tokens[len(path[1]) :] + self.some_pages(random, 3)

    def some_holder(self, random: Random) -> Holder:
        return random.choice(self.holders)

    # A sequence's life.

    @rule(random=randoms, partial=st.booleans(), use=st.booleans())
    def match(self, random: Random, partial: bool, use: bool) -> None:
        self.start_with(*self.some_prompt(random), partial=partial, use=use)

    @precondition(lambda self: self.holders)
    @rule(random=randoms)
    def use(self, random: Random) -> None:
        receipt = self.some_holder(random).receipt
        tail = random.choice([NO_RECEIPT, *self.tail_receipts])
        self.use_now(receipt, tail)

    def use_now(self, receipt: int, tail: int) -> None:
        model = self.model
        self.tree.use(receipt, tail)
        model.now += 1
        used = {receipt, tail} - {NO_RECEIPT}
        model.used |= used
        for prefix in {p for one in used for p in model.prefixes(model.receipts[one])}:
            model.pages[prefix].last_used = model.now
            model.pages[prefix].hits += 1

    @rule(random=randoms, staying=st.lists(st.booleans(), max_size=5))
    def serve(self, random: Random, staying: list[bool]) -> None:
        """What a scheduler does with requests, as far as there is memory for them."""
        for stays in staying:
            self.next_step(in_flight=1)
            if len(self.holders) > 3:
                self.finish_one(self.holders[0], self.step - 1)
            holder = self.start_with(*self.some_prompt(random), partial=True, use=True)
            self.promote_if_possible(holder)
            self.insert_if_possible(holder, self.some_continuation(random, holder))
            if not stays:
                self.finish_one(holder, self.step)

    def start_with(
        self, namespace: bytes, tokens: tuple[int, ...], *, partial: bool, use: bool
    ) -> Holder:
        model = self.model
        path = model.longest(namespace, tokens, self.pool.done_step)
        found = [model.pages[prefix] for prefix in model.prefixes(path)]
        tails = model.tails(path, tokens[len(path[1]) :], self.pool.done_step)

        match = self.tree.match(namespace, int32(tokens), partial=partial, use=use)

        assert match.page_ids.tolist() == [c.page for c in found if not c.on_host]
        assert match.host_page_ids.tolist() == [c.page for c in found if c.on_host]
        model.now += use
        model.receipts[match.receipt] = path
        used = path
        if not partial or not tails or any(cached.on_host for cached in found):
            assert (match.tail_page, match.tail_tokens, match.tail_receipt) == (-1, 0, NO_RECEIPT)
        else:
            assert match.tail_tokens == max(tails)
            assert match.tail_page in tails[match.tail_tokens]
            assert 0 < match.tail_tokens < self.page_size
            used = self.path_of_page(match.tail_page)
            model.receipts[match.tail_receipt] = used
            self.tail_receipts.append(match.tail_receipt)
        if use:
            model.use(used, hits=1)
            model.used |= {match.receipt, match.tail_receipt} - {NO_RECEIPT}
        self.pool.retain(match.page_ids)
        holder = Holder(match.receipt, match.page_ids.tolist())
        self.holders.append(holder)
        return holder

    def path_of_page(self, page: int) -> Prefix:
        (path,) = (p for p, c in self.model.pages.items() if c.page == page and not c.on_host)
        return path

    @precondition(lambda self: self.tail_receipts)
    @rule(random=randoms)
    def release_a_tail(self, random: Random) -> None:
        receipt = random.choice(self.tail_receipts)
        self.tail_receipts.remove(receipt)
        self.release(receipt)

    def release(self, receipt: int) -> None:
        self.tree.release(receipt)
        path = self.model.receipts.pop(receipt)
        if receipt in self.model.used:
            self.model.now += 1
            self.model.use(path)
            self.model.used.remove(receipt)

    def acquire(self, count: int) -> np.ndarray | None:
        """Free pages, made free by eviction where that helps."""
        if count > self.pool.num_free:
            self.evict_now(count - self.pool.num_free)
        return self.pool.acquire(count) if count <= self.pool.num_free else None

    def host_part(self, receipt: int) -> list[Prefix]:
        path = self.model.receipts[receipt]
        return [p for p in self.model.prefixes(path) if self.model.pages[p].on_host]

    def promote_if_possible(self, holder: Holder) -> None:
        prefixes = self.host_part(holder.receipt)
        pages = self.acquire(len(prefixes))
        if pages is None:
            return
        self.tree.promote(holder.receipt, pages, self.step)
        holder.page_ids += pages.tolist()
        for prefix, page in zip(prefixes, pages.tolist(), strict=True):
            cached = self.model.pages[prefix]
            cached.page, cached.step, cached.on_host = page, self.step, False

    @precondition(lambda self: self.holders)
    @rule(random=randoms, promote=st.booleans())
    def go_on(self, random: Random, promote: bool) -> None:
        self.next_step(in_flight=1)
        holder = self.some_holder(random)
        if promote:
            self.promote_if_possible(holder)
        self.insert_if_possible(holder, self.some_continuation(random, holder))

    def insert_if_possible(self, holder: Holder, tokens: tuple[int, ...]) -> None:
        model = self.model
        namespace, before = model.receipts[holder.receipt]
        count = len(tokens) // self.page_size
        pages = self.acquire(count)
        if pages is None:
            return
        if self.host_part(holder.receipt):
            with pytest.raises(InvariantError, match=f"receipt {holder.receipt} ends on the host"):
                self.tree.insert(holder.receipt, int32(tokens), pages, self.step)
            self.pool.release(pages, NO_STEP)
            return

        adopted = self.tree.insert(holder.receipt, int32(tokens), pages, self.step)

        model.now += 1
        path = (namespace, before + tokens)
        mine = model.prefixes(path)[len(before) // self.page_size :]
        for prefix, page in zip(mine, pages.tolist(), strict=True):
            cached = model.pages.get(prefix)
            if cached is None:
                created = model.created_behind(prefix, holder.receipt)
                model.pages[prefix] = CachedPage(page, self.step, created, model.now)
            elif cached.on_host:
                cached.page, cached.step, cached.on_host = page, self.step, False
            else:
                adopted += 1
        assert adopted == count
        model.receipts[holder.receipt] = path
        model.used.add(holder.receipt)
        model.use(path)
        holder.page_ids += pages.tolist()

    @precondition(lambda self: self.holders)
    @rule(random=randoms)
    def fork(self, random: Random) -> None:
        holder = self.some_holder(random)
        receipt = self.tree.fork(holder.receipt)
        assert receipt not in self.model.receipts
        self.model.receipts[receipt] = self.model.receipts[holder.receipt]
        if holder.receipt in self.model.used:
            self.model.used.add(receipt)
        self.pool.retain(int32(holder.page_ids))
        self.holders.append(Holder(receipt, list(holder.page_ids)))

    @precondition(lambda self: self.holders)
    @rule(random=randoms, behind=st.integers(0, 2))
    def finish(self, random: Random, behind: int) -> None:
        self.finish_one(self.some_holder(random), self.step - behind)

    def finish_one(self, holder: Holder, last_step: int) -> None:
        self.holders.remove(holder)
        self.release(holder.receipt)
        self.pool.release(int32(holder.page_ids), last_step)

    # Steps, and what leaves the tree.

    @rule(in_flight=st.integers(0, 2))
    def step_on(self, in_flight: int) -> None:
        self.next_step(in_flight)

    def next_step(self, in_flight: int) -> None:
        done = max(self.step - in_flight, self.pool.done_step)
        self.pool.complete(done)
        if self.host is not None:
            self.host.complete(done)
        self.step += 1

    @rule(count=st.integers(1, 8))
    def evict(self, count: int) -> None:
        self.evict_now(count)

    def evict_now(self, count: int) -> None:
        before = {c.page: p for p, c in self.model.pages.items() if not c.on_host}
        host_free = 0 if self.host is None else self.host.num_free
        expected, moved = self.model.evict(count, host_free, self.pool.done_step)
        num_free, frees_at_once = self.pool.num_free, self.tree.frees_at_once(count)
        evicted = self.tree.evict(count, self.step)
        assert evicted.count == expected
        assert frees_at_once == (self.pool.num_free - num_free == count)
        sources, targets = evicted.device_page_ids.tolist(), evicted.host_page_ids.tolist()
        assert sorted(sources) == sorted(moved)
        assert len(set(targets)) == len(targets) == len(sources)
        for source, target in zip(sources, targets, strict=True):
            cached = self.model.pages[moved[source]]
            cached.page, cached.step = target, self.step
        gone = set(before.values()) - {p for p, c in self.model.pages.items() if not c.on_host}
        assert len(gone) == expected

    @rule(count=st.integers(1, 4))
    def evict_host(self, count: int) -> None:
        expected = 0
        while expected < count and (first := self.model.first_to_go(on_host=True)):
            del self.model.pages[first]
            expected += 1
        assert self.tree.evict_host(count) == expected

    @rule(random=randoms, kind=st.sampled_from(["clear", "withdraw", "cut"]))
    def lose(self, random: Random, kind: str) -> None:
        if kind == "clear":
            self.clear()
        elif kind == "withdraw":
            steps = [cached.step for cached in self.model.pages.values()]
            self.withdraw(random.choice([*steps, self.step]))
        elif self.holders:
            self.cut(random)

    def clear(self) -> None:
        self.tree.clear()
        locks = self.model.locks()
        self.model.pages = {p: c for p, c in self.model.pages.items() if locks[p]}

    def withdraw(self, step: int) -> None:
        shortened = self.tree.withdraw(step)
        expected: dict[int, Prefix] = {}
        while wrong := [p for p, cached in self.model.pages.items() if cached.step == step]:
            expected |= self.model.drop(min(wrong, key=lambda prefix: len(prefix[1])))
        assert shortened == self.as_shortened(expected)

    def cut(self, random: Random) -> None:
        receipt = self.some_holder(random).receipt
        prefixes = self.model.prefixes(self.model.receipts[receipt])
        num_pages = random.randint(0, len(prefixes) + 1)
        shortened = self.tree.cut(receipt, num_pages)
        expected = self.model.drop(prefixes[num_pages]) if num_pages < len(prefixes) else {}
        assert shortened == self.as_shortened(expected)

    def as_shortened(self, moved: dict[int, Prefix]) -> tuple[tuple[int, int], ...]:
        return tuple(
            (receipt, len(tokens) // self.page_size)
            for receipt, (_, tokens) in sorted(moved.items())
        )

    # What must be refused, and change nothing.

    @rule(receipt=st.integers(-2, 60))
    def a_receipt_that_is_not_live_is_refused(self, receipt: int) -> None:
        if receipt in self.model.receipts:
            return
        none = int32([])
        for call in (
            lambda: self.tree.insert(receipt, none, none, self.step),
            lambda: self.tree.promote(receipt, none, self.step),
            lambda: self.tree.fork(receipt),
            lambda: self.tree.release(receipt),
            lambda: self.tree.use(receipt),
            lambda: self.tree.page_ids(receipt, 0),
            lambda: self.tree.num_exclusive(receipt),
            lambda: self.tree.cut(receipt, 0),
        ):
            with pytest.raises(InvariantError, match=f"receipt {receipt} is not live"):
                call()

    @precondition(lambda self: self.holders)
    @rule(random=randoms, page=st.integers(-1, 17))
    def a_page_that_the_tree_cannot_take_is_refused(self, random: Random, page: int) -> None:
        receipt = self.some_holder(random).receipt
        if self.host_part(receipt):
            return
        cached = {c.page for c in self.model.pages.values() if not c.on_host}
        is_held = 0 <= page < self.pool.num_pages and self.pool.ref_count(page) > 0
        if is_held and page not in cached:
            return
        new = int32([7] * self.page_size)  # of no prompt
        with pytest.raises(InvariantError, match=f"insert: page {page} is"):
            self.tree.insert(receipt, new, int32([page]), self.step)

    @precondition(lambda self: self.holders)
    @rule(random=randoms, page=st.integers(-1, 17))
    def a_duplicate_that_nobody_holds_is_refused(self, random: Random, page: int) -> None:
        namespace, tokens = self.model.receipts[(holder := self.some_holder(random)).receipt]
        known = self.model.next_pages((namespace, tokens))
        is_held = 0 <= page < self.pool.num_pages and self.pool.ref_count(page) > 0
        if is_held or not known or self.host_part(holder.receipt):
            return
        again = int32(random.choice(known)[1][len(tokens) :])
        with pytest.raises(InvariantError, match=f"insert: page {page} is not"):
            self.tree.insert(holder.receipt, again, int32([page]), self.step)

    # The state.

    def pages_of_the_tree(self) -> Iterator[tuple[Prefix, CachedPage, int]]:
        """Every page with its use and locks, and the receipts' paths checked on the way."""
        ends: dict[int, Prefix] = {}
        paths: list[Prefix] = []
        nodes = self.tree.walk()
        for node in nodes:
            above = paths[node.parent][1] if node.parent >= 0 else ()
            paths.append((node.namespace, above + node.token_ids))
            ends |= dict.fromkeys(node.receipts, paths[-1])
            prefixes = self.model.prefixes(paths[-1])[len(above) // self.page_size :]
            for prefix, page, step in zip(prefixes, node.page_ids, node.written_steps, strict=True):
                use = (node.created, node.last_used, node.hits)
                yield prefix, CachedPage(page, step, *use, node.on_host), node.num_locks
        assert ends == self.model.receipts
        assert len(nodes) == self.tree.num_nodes

    @invariant()
    def the_tree_equals_its_model(self) -> None:
        self.tree.sanity_check()
        model, tree = self.model, self.tree
        key = STRATEGY_KEYS[model.strategy]
        locks = model.locks()
        found = {
            prefix: (cached.page, cached.on_host, cached.step, key(cached), num_locks)
            for prefix, cached, num_locks in self.pages_of_the_tree()
        }
        assert found == {
            prefix: (cached.page, cached.on_host, cached.step, key(cached), locks[prefix])
            for prefix, cached in model.pages.items()
        }
        on_device = [prefix for prefix, cached in model.pages.items() if not cached.on_host]
        on_host = [prefix for prefix, cached in model.pages.items() if cached.on_host]
        assert tree.num_pages == len(on_device)
        assert tree.num_evictable == sum(not locks[prefix] for prefix in on_device)
        assert tree.num_locked == sum(locks[prefix] > 0 for prefix in on_device)
        assert tree.num_host_pages == len(on_host)
        assert tree.num_host_evictable == sum(not locks[prefix] for prefix in on_host)
        assert tree.num_receipts == len(model.receipts)

    @invariant()
    def the_pools_count_each_holder_and_the_tree(self) -> None:
        self.pool.sanity_check()
        references = Counter(c.page for c in self.model.pages.values() if not c.on_host)
        for holder in self.holders:
            references.update(holder.page_ids)
        assert self.pool.ref_counts().tolist() == [
            references[page] for page in range(self.pool.num_pages)
        ]
        if self.host is None:
            return
        self.host.sanity_check()
        on_host = {c.page for c in self.model.pages.values() if c.on_host}
        assert self.host.ref_counts().tolist() == [
            int(page in on_host) for page in range(self.host.num_pages)
        ]

    @invariant()
    def questions_are_answered_as_by_the_model(self) -> None:
        locks = self.model.locks()
        for receipt, path in self.model.receipts.items():
            prefixes = self.model.prefixes(path)
            device = [p for p in prefixes if not self.model.pages[p].on_host]
            self.the_pages_behind_each_page_are_known(receipt, prefixes, len(device))
            assert self.tree.num_exclusive(receipt) == sum(locks[p] == 1 for p in device)
            found = self.tree.peek(path[0], int32([*path[1], 0]))
            longest = self.model.longest(path[0], (*path[1], 0), self.pool.done_step)
            num_device = sum(not self.model.pages[p].on_host for p in self.model.prefixes(longest))
            assert found == (
                num_device * self.page_size,
                len(longest[1]) - num_device * self.page_size,
            )

    def the_pages_behind_each_page_are_known(
        self, receipt: int, prefixes: list[Prefix], num_device: int
    ) -> None:
        pages = [self.model.pages[prefix].page for prefix in prefixes]
        for first in range(len(pages) + 1):
            if first == len(pages) or num_device == len(pages):
                assert self.tree.page_ids(receipt, first).tolist() == pages[first:]
            else:
                with pytest.raises(InvariantError, match=f"receipt {receipt} covers pages on the"):
                    self.tree.page_ids(receipt, first)

    def teardown(self) -> None:
        """When everybody has left, clearing brings every page back."""
        if not hasattr(self, "tree"):
            return
        for receipt in self.tail_receipts:
            self.tree.release(receipt)
        for holder in self.holders:
            self.tree.release(holder.receipt)
            self.pool.release(int32(holder.page_ids), self.step)
        assert self.tree.num_locked == 0
        self.tree.clear()
        self.tree.sanity_check()
        assert (self.tree.num_nodes, self.pool.num_held) == (0, 0)
        assert self.host is None or self.host.num_held == 0


TestPrefixTreeEqualsItsModel = PrefixTreeMachine.TestCase
TestPrefixTreeEqualsItsModel.settings = settings(max_examples=200, stateful_step_count=50)
