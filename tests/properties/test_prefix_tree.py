"""The native prefix tree against a model with an entry per page, through any order of calls.

Pages have 0, 1 or 2 companions: what the tree finds, gives up and counts of these is the model's,
too, and which pages of both pools are held, by whom.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
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
from aioserve.kv.page_pool import NO_STEP, PagePool
from aioserve.kv.prefix_tree import NO_RECEIPT, PrefixTree
from tests.properties.prefix_tree_model import (
    STRATEGY_KEYS,
    CachedPage,
    ModelTree,
    Prefix,
    strategy_of,
)
from tests.tiers import examples

NAMESPACES = (b"", b"\x00a")


randoms = st.randoms(use_true_random=True)
"""What a rule draws inside: by the seed alone, which is much faster than draws that shrink."""
seldom = st.sampled_from([False, False, False, True])


def int32(values) -> np.ndarray:
    return np.array(values, np.int32)


@dataclass
class Holder:
    """A sequence as the scheduler keeps it: a receipt, and references to the pages it may read."""

    receipt: int
    page_ids: list[int]
    windows: list[int] = field(default_factory=list)
    """Companions to which it has references: of its own pages, or of what its receipt covers."""


class PrefixTreeMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 2, 16, 64]),
        strategy=st.sampled_from(list(STRATEGY_KEYS)),
        num_pages=st.integers(6, 24),
        num_host_pages=st.sampled_from([None, 1, 2, 4, 8, 8, 12]),
        companions=st.sampled_from([0, 1, 2]),
        window=st.sampled_from([(0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 1), (3, 0)]),
    )
    def start(
        self,
        page_size: int,
        strategy: str,
        num_pages: int,
        num_host_pages: int | None,
        companions: int,
        window: tuple[int, int],
    ) -> None:
        """`window` is that of pages, and of tokens beside them."""
        self.page_size = page_size
        self.companions = companions
        seen = window[0] * page_size + window[1]
        num_pages += 8 * companions
        self.pool = PagePool(num_pages, page_size, companions)
        self.host = None
        if num_host_pages is not None:
            self.host = PagePool(num_host_pages, page_size, companions)
        pools = [pool for pool in (self.pool, self.host) if pool is not None]
        self.tree = PrefixTree(*pools, strategy=strategy_of(strategy), needed_tokens=seen)
        self.model = ModelTree(page_size, strategy, self.host is not None, companions, seen)
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

    @rule(random=randoms, partial=st.booleans(), use=st.booleans(), whole=seldom)
    def match(self, random: Random, partial: bool, use: bool, whole: bool) -> None:
        self.start_with(*self.some_prompt(random), partial=partial, use=use, whole=whole)

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
            self.insert_if_possible(random, holder)
            if not stays:
                self.finish_one(holder, self.step)

    def start_with(
        self,
        namespace: bytes,
        tokens: tuple[int, ...],
        *,
        partial: bool,
        use: bool,
        whole: bool = False,
    ) -> Holder:
        model = self.model
        path = model.longest(namespace, tokens, self.pool.done_step, whole=whole)
        found = [model.pages[prefix] for prefix in model.prefixes(path)]
        tails = model.tails(path, tokens[len(path[1]) :], self.pool.done_step)

        match = self.tree.match(namespace, int32(tokens), partial=partial, use=use, whole=whole)

        assert match.page_ids.tolist() == [c.page for c in found if not c.on_host]
        later = [page for tier in match.tiers[1:] for page in tier.tolist()]
        assert later == [c.page for c in found if c.on_host]
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
        if not whole:
            self.hold_windows(holder, [model.pages[prefix] for prefix in model.seen(path)])
        return holder

    def hold_windows(self, holder: Holder, cached_pages: list[CachedPage]) -> None:
        """References to the companions of pages that the receipt of `holder` covers."""
        windows = [w for cached in cached_pages if not cached.on_host for w in cached.windows]
        self.pool.retain(int32(windows))
        self.model.users.update(windows)
        holder.windows += windows

    def leave_windows(self, holder: Holder, windows: list[int], last_step: int) -> None:
        self.pool.release(int32(windows), last_step)
        self.model.leave(windows)
        for page in windows:
            holder.windows.remove(page)

    @precondition(lambda self: self.companions and self.holders)
    @rule(random=randoms, behind=st.integers(0, 2))
    def move_the_window(self, random: Random, behind: int) -> None:
        """Let go of some companions, and take some of those that the tree has."""
        holder = self.some_holder(random)
        left = random.sample(holder.windows, random.randint(0, len(holder.windows)))
        self.leave_windows(holder, list(dict.fromkeys(left)), self.step - behind)
        path = self.model.prefixes(self.model.receipts[holder.receipt])
        self.hold_windows(holder, [self.model.pages[p] for p in path if random.random() < 0.3])

    @precondition(lambda self: self.companions)
    @rule(random=randoms, count=st.integers(0, 3))
    def claim_and_drop(self, random: Random, count: int) -> None:
        """What is held for a claim that leads to nothing was idle all the time."""
        holder = self.start_with(*self.some_prompt(random), partial=False, use=False)
        self.evict_now(count)
        self.pool.unretain(int32(holder.windows))
        self.model.users.subtract(holder.windows)
        self.holders.remove(holder)
        self.release(holder.receipt)
        self.pool.release(int32(holder.page_ids), NO_STEP)

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
        """With the companions that the host has of its last pages, as many as there are."""
        prefixes = self.host_part(holder.receipt)
        on_host = [self.model.pages[prefix] for prefix in prefixes]
        copied: list[int] = []
        for cached in reversed(on_host):
            if not cached.windows:
                break
            copied = [*cached.windows, *copied]
            self.model.users_on_host.update(cached.windows)
        if self.host is not None:
            self.host.retain(int32(copied))
        pages = self.acquire(len(prefixes) + len(copied))
        if self.host is not None and pages is None:
            self.host.unretain(int32(copied))
        self.model.users_on_host.clear()
        if pages is None:
            return
        own, windows = pages[: len(prefixes)], pages[len(prefixes) :]
        self.tree.promote(holder.receipt, own, self.step, windows if len(windows) else None)
        if self.host is not None:
            self.host.release(int32(copied), self.step)
        self.give(holder, own, windows)
        given = self.of_each_page(len(own), windows)
        for cached, page, some in zip(on_host, own.tolist(), given, strict=True):
            cached.page, cached.step, cached.on_host, cached.windows = page, self.step, False, some

    def give(self, holder: Holder, pages: np.ndarray, windows: np.ndarray) -> None:
        """Pages that were acquired for a holder."""
        holder.page_ids += pages.tolist()
        holder.windows += windows.tolist()
        self.model.users.update(windows.tolist())

    def of_each_page(self, num_pages: int, windows: np.ndarray) -> list[tuple[int, ...]]:
        """Companions of each of `num_pages` pages, where `windows` are for the last ones."""
        if not self.companions:
            return [()] * num_pages
        given = [tuple(some) for some in windows.reshape(-1, self.companions).tolist()]
        return [()] * (num_pages - len(given)) + given

    @precondition(lambda self: self.holders)
    @rule(random=randoms, promote=st.booleans())
    def go_on(self, random: Random, promote: bool) -> None:
        self.next_step(in_flight=1)
        holder = self.some_holder(random)
        if promote:
            self.promote_if_possible(holder)
        self.insert_if_possible(random, holder)

    def insert_if_possible(self, random: Random, holder: Holder) -> None:
        model = self.model
        tokens = self.some_continuation(random, holder)
        namespace, before = model.receipts[holder.receipt]
        count = len(tokens) // self.page_size
        num_hollow = random.choice([0, 0, random.randint(0, count), count])
        acquired = self.acquire(count + (count - num_hollow) * self.companions)
        if acquired is None:
            return
        pages, windows = acquired[:count], acquired[count:]
        given = windows if len(windows) or random.random() < 0.5 else None
        if self.host_part(holder.receipt):
            with pytest.raises(InvariantError, match=f"receipt {holder.receipt} ends on the host"):
                self.tree.insert(holder.receipt, int32(tokens), pages, self.step, given)
            self.pool.release(acquired, NO_STEP)
            return

        adopted = self.tree.insert(holder.receipt, int32(tokens), pages, self.step, given)

        model.now += 1
        self.give(holder, pages, windows)
        path = (namespace, before + tokens)
        mine = model.prefixes(path)[len(before) // self.page_size :]
        of_each = self.of_each_page(count, windows)
        for prefix, page, some in zip(mine, pages.tolist(), of_each, strict=True):
            cached = model.pages.get(prefix)
            if cached is None:
                created = model.created_behind(prefix, holder.receipt)
                cached = CachedPage(page, self.step, created, model.now)
                model.pages[prefix] = cached
            elif cached.on_host:
                cached.page, cached.step, cached.on_host = page, self.step, False
                cached.windows = ()
            else:
                adopted += 1
            model.give_windows(cached, some, self.step, self.pool.done_step)
        assert adopted == count
        model.receipts[holder.receipt] = path
        model.used.add(holder.receipt)
        model.use(path)

    @precondition(lambda self: self.holders)
    @rule(random=randoms)
    def fork(self, random: Random) -> None:
        holder = self.some_holder(random)
        receipt = self.tree.fork(holder.receipt)
        assert receipt not in self.model.receipts
        self.model.receipts[receipt] = self.model.receipts[holder.receipt]
        if holder.receipt in self.model.used:
            self.model.used.add(receipt)
        self.pool.retain(int32([*holder.page_ids, *holder.windows]))
        self.model.users.update(holder.windows)
        self.holders.append(Holder(receipt, list(holder.page_ids), list(holder.windows)))

    @precondition(lambda self: self.holders)
    @rule(random=randoms, behind=st.integers(0, 2))
    def finish(self, random: Random, behind: int) -> None:
        self.finish_one(self.some_holder(random), self.step - behind)

    def finish_one(self, holder: Holder, last_step: int) -> None:
        self.holders.remove(holder)
        self.release(holder.receipt)
        self.pool.release(int32(holder.page_ids), last_step)
        self.leave_windows(holder, list(holder.windows), last_step)

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
        model = self.model
        before = self.device_pages()
        model.host_free = 0 if self.host is None else self.host.num_free
        expected = model.evict(count, self.pool.done_step)
        num_free, frees_at_once = self.pool.num_free, self.tree.frees_at_once(count)
        evicted = self.tree.evict(count, self.step)
        assert evicted.count == expected
        all_are_free = self.pool.num_free - num_free == expected
        assert frees_at_once == (all_are_free and expected >= count)
        sources, targets = evicted.page_ids.tolist(), evicted.target_ids.tolist()
        assert sorted(sources) == sorted(page for pages in model.moved.values() for page in pages)
        assert len(set(targets)) == len(targets) == len(sources)
        place = dict(zip(sources, targets, strict=True))
        for prefix, pages in model.moved.items():
            cached = model.pages[prefix]
            cached.step = self.step
            cached.page, *windows = (place[page] for page in pages)
            cached.windows = tuple(windows)
        assert len(before - self.device_pages()) == expected

    def device_pages(self) -> set[int]:
        """Those of the tree, companions included."""
        cached = [c for c in self.model.pages.values() if not c.on_host]
        return {page for c in cached for page in (c.page, *c.windows)}

    @precondition(lambda self: self.host is not None)
    @rule(count=st.integers(1, 4))
    def evict_host(self, count: int) -> None:
        expected = 0
        while expected < count and (dropped := self.model.evict_host_once()):
            expected += dropped
        assert self.tree.evict(count, self.step, 1).count == expected

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
        self.model.clear()

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
        is_held = 0 <= page < self.pool.num_pages and self.pool.ref_count(page) > 0
        if is_held and page not in self.device_pages():
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

    @precondition(lambda self: self.holders and self.pool.num_free > 3)
    @rule(random=randoms, kind=st.sampled_from(["number", "held", "taken", "owner", "twice"]))
    def companions_that_the_tree_cannot_take_are_refused(self, random: Random, kind: str) -> None:
        holder = self.some_holder(random)
        if self.host_part(holder.receipt) or not (self.companions or kind == "number"):
            return
        page, *good = self.pool.acquire(1 + self.companions).tolist()
        wrong = {
            "number": [*good, page],
            "held": [*good[1:], random.choice([-1, self.pool.num_pages, self.a_free_page()])],
            "taken": [*good[1:], *list(self.device_pages() or {-1})[:1]],
            "owner": [*good[1:], page],
            "twice": good[:1] * self.companions if self.companions > 1 else [-1],
        }[kind]
        path = self.model.receipts[holder.receipt]
        known = self.model.next_pages(path) if kind != "taken" else []
        new = random.choice([(7,) * self.page_size, *(p[1][len(path[1]) :] for p in known)])
        with pytest.raises(InvariantError, match="insert: "):
            self.tree.insert(holder.receipt, int32(new), int32([page]), self.step, int32(wrong))
        self.pool.release(int32([page, *good]), NO_STEP)

    def a_free_page(self) -> int:
        return next(page for page in range(self.pool.num_pages) if not self.pool.ref_count(page))

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
            use = (node.created, node.last_used, node.hits)
            parts = (node.page_ids, node.written_steps, node.companion_ids)
            for prefix, page, step, windows in zip(prefixes, *parts, strict=True):
                yield prefix, CachedPage(page, step, *use, node.tier == 1, windows), node.num_locks
        assert ends == self.model.receipts
        assert len(nodes) == self.tree.num_nodes

    @invariant()
    def the_tree_equals_its_model(self) -> None:
        self.tree.sanity_check()
        model, tree = self.model, self.tree
        key = STRATEGY_KEYS[model.strategy]
        locks = model.locks()
        found = {
            prefix: (cached.page, cached.windows, cached.on_host, cached.step, key(cached), locked)
            for prefix, cached, locked in self.pages_of_the_tree()
        }
        assert found == {
            prefix: (c.page, c.windows, c.on_host, c.step, key(c), locks[prefix])
            for prefix, c in model.pages.items()
        }
        assert tree.num_pages == model.num_pages(on_host=False)
        assert tree.num_evictable == model.num_evictable(on_host=False)
        assert tree.num_locked == tree.num_pages - tree.num_evictable
        if self.host is not None:
            assert tree.num_pages_in(1) == model.num_pages(on_host=True)
            assert tree.num_evictable_in(1) == model.num_evictable(on_host=True)
        assert tree.num_receipts == len(model.receipts)

    @invariant()
    def the_pools_count_each_holder_and_the_tree(self) -> None:
        self.pool.sanity_check()
        references = Counter(self.device_pages())
        for holder in self.holders:
            references.update([*holder.page_ids, *holder.windows])
        assert self.pool.ref_counts().tolist() == [
            references[page] for page in range(self.pool.num_pages)
        ]
        assert self.pool.idle_owners() == self.idle_owners(on_host=False)
        if self.host is None:
            return
        self.host.sanity_check()
        cached = [c for c in self.model.pages.values() if c.on_host]
        on_host = {page for c in cached for page in (c.page, *c.windows)}
        assert self.host.ref_counts().tolist() == [
            int(page in on_host) for page in range(self.host.num_pages)
        ]
        assert self.host.idle_owners() == self.idle_owners(on_host=True)

    def idle_owners(self, *, on_host: bool) -> list[tuple[int, int]]:
        return [(c.page, c.last_idle[0]) for c in self.model.idle(on_host=on_host)]

    @invariant()
    def questions_are_answered_as_by_the_model(self) -> None:
        locks = self.model.locks()
        for receipt, path in self.model.receipts.items():
            prefixes = self.model.prefixes(path)
            device = [p for p in prefixes if not self.model.pages[p].on_host]
            self.the_pages_behind_each_page_are_known(receipt, prefixes, len(device))
            assert self.tree.num_exclusive(receipt) == sum(locks[p] == 1 for p in device)
            for whole in (False, True):
                self.what_is_found_is_known(path[0], (*path[1], 0), whole=whole)

    def what_is_found_is_known(
        self, namespace: bytes, tokens: tuple[int, ...], *, whole: bool
    ) -> None:
        found = self.tree.peek(namespace, int32(tokens), whole=whole)
        longest = self.model.longest(namespace, tokens, self.pool.done_step, whole=whole)
        num_device = sum(not self.model.pages[p].on_host for p in self.model.prefixes(longest))
        on_device = num_device * self.page_size
        assert [found[0], sum(found[1:])] == [on_device, len(longest[1]) - on_device]

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
            self.pool.release(int32([*holder.page_ids, *holder.windows]), self.step)
        assert self.tree.num_locked == 0
        self.tree.clear()
        self.tree.sanity_check()
        assert (self.tree.num_nodes, self.pool.num_held) == (0, 0)
        assert self.host is None or self.host.num_held == 0


TestPrefixTreeEqualsItsModel = PrefixTreeMachine.TestCase
TestPrefixTreeEqualsItsModel.settings = settings(max_examples=examples(300), stateful_step_count=50)
