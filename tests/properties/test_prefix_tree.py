"""Native prefix tree compared with a model with an entry per page, in any order of calls.

Pages have 0, 1 or 2 group pages, and are in up to three tiers. The tree finds, gives up, moves and
counts the same as the model. The held pages of all pools are the same, too, with their holders.
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
"""Source of draws inside a rule. It depends only on the seed, which is much faster than draws that
shrink."""
seldom = st.sampled_from([False, False, False, True])


def int32(values) -> np.ndarray:
    return np.array(values, np.int32)


@dataclass
class Holder:
    """A sequence as the scheduler keeps it: a receipt, and references to the pages it may read."""

    receipt: int
    page_ids: list[int]
    group_pages: list[int] = field(default_factory=list)
    """Group pages to which it has references: of its own pages, or of those that its receipt
    covers."""


class PrefixTreeMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 2, 16, 64]),
        strategy=st.sampled_from(list(STRATEGY_KEYS)),
        num_pages=st.integers(6, 24),
        later=st.sampled_from(
            [(), (1,), (2,), (4,), (8,), (12,), (1, 1), (2, 8), (2, 8), (4, 4), (4, 12), (8, 3)]
        ),
        num_group_pages=st.sampled_from([0, 1, 2]),
        window=st.sampled_from([(0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 1), (3, 0)]),
    )
    def start(
        self,
        page_size: int,
        strategy: str,
        num_pages: int,
        later: tuple[int, ...],
        num_group_pages: int,
        window: tuple[int, int],
    ) -> None:
        """`later` are numbers of pages of later tiers; `window` is that of pages, and of tokens
        beside them."""
        self.page_size = page_size
        self.num_group_pages = num_group_pages
        seen = window[0] * page_size + window[1]
        sizes = num_pages + 8 * num_group_pages, *later
        self.pools = [PagePool(size, page_size, num_group_pages) for size in sizes]
        self.pool = self.pools[0]
        self.tree = PrefixTree(*self.pools, strategy=strategy_of(strategy), needed_tokens=seen)
        self.model = ModelTree(page_size, strategy, len(sizes), num_group_pages, seen)
        self.holders: list[Holder] = []
        self.tail_receipts: list[int] = []
        self.step = 0

    # Draws: few kinds of pages, so that prompts share them whole and in part.

    def some_page(self, random: Random) -> tuple[int, ...]:
        kinds = [(0, 0, 1), (0, 1, 1), (0, 1, 2), (1, 0, 9)]
        head, rest, length = random.choice(kinds)
        length = min(length, self.page_size)
        return (head,) * length + (rest,) * (self.page_size - length)

    def some_pages(self, random: Random, most: int) -> tuple[int, ...]:
        count = random.randint(0, most)
        return sum((self.some_page(random) for _ in range(count)), ())

    def some_path(self, random: Random, paths: list[Prefix]) -> Prefix:
        """One of `paths`, often one that leads to a later tier."""
        later = [p for p in paths if p in self.model.pages and self.model.pages[p].tier]
        if later and random.random() < 0.5:
            paths = later
        return random.choice(paths)

    def some_prompt(self, random: Random) -> Prefix:
        """Draw a prompt, mostly a continuation of a cached one."""
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
        """Serve requests like a scheduler, as far as memory allows."""
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

        assert [page_ids.tolist() for page_ids in match.tiers] == [
            [c.page for c in found if c.tier == tier] for tier in range(len(self.pools))
        ]
        assert match.num_pages == len(found)
        assert [c.tier for c in found] == sorted(c.tier for c in found)
        model.now += use
        model.receipts[match.receipt] = path
        used = path
        if not partial or not tails or any(cached.tier for cached in found):
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
            self.hold_group_pages(holder, [model.pages[prefix] for prefix in model.seen(path)])
        return holder

    def hold_group_pages(self, holder: Holder, cached_pages: list[CachedPage]) -> None:
        """Add references to the group pages of pages that the receipt of `holder` covers."""
        held = [page for cached in cached_pages if not cached.tier for page in cached.group_pages]
        self.pool.retain(int32(held))
        self.model.users[0].update(held)
        holder.group_pages += held

    def leave_group_pages(self, holder: Holder, left: list[int], last_step: int) -> None:
        self.pool.release(int32(left), last_step)
        self.model.leave(left)
        for page in left:
            holder.group_pages.remove(page)

    @precondition(lambda self: self.num_group_pages and self.holders)
    @rule(random=randoms, behind=st.integers(0, 2))
    def move_the_window(self, random: Random, behind: int) -> None:
        """Release some group pages, and take some of those that the tree has."""
        holder = self.some_holder(random)
        left = random.sample(holder.group_pages, random.randint(0, len(holder.group_pages)))
        self.leave_group_pages(holder, list(dict.fromkeys(left)), self.step - behind)
        path = self.model.prefixes(self.model.receipts[holder.receipt])
        self.hold_group_pages(holder, [self.model.pages[p] for p in path if random.random() < 0.3])

    @precondition(lambda self: self.num_group_pages)
    @rule(random=randoms, count=st.integers(0, 3))
    def claim_and_drop(self, random: Random, count: int) -> None:
        """Hold and drop a claim. Its group pages then count as idle all the time."""
        holder = self.start_with(*self.some_prompt(random), partial=False, use=False)
        self.evict_now(count)
        self.pool.unretain(int32(holder.group_pages))
        self.model.users[0].subtract(holder.group_pages)
        self.holders.remove(holder)
        self.release(holder.receipt)
        self.pool.release(int32(holder.page_ids), NO_STEP)

    def path_of_page(self, page: int) -> Prefix:
        (path,) = (p for p, c in self.model.pages.items() if c.page == page and not c.tier)
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
        """Take free pages, after evictions if needed."""
        if count > self.pool.num_free:
            self.evict_now(count - self.pool.num_free)
        return self.pool.acquire(count) if count <= self.pool.num_free else None

    def later_part(self, receipt: int) -> list[Prefix]:
        """Pages of a path that are in later tiers."""
        path = self.model.receipts[receipt]
        return [p for p in self.model.prefixes(path) if self.model.pages[p].tier]

    def promote_if_possible(self, holder: Holder) -> None:
        """Promote a path, with the group pages that later tiers have of its last pages."""
        prefixes = self.later_part(holder.receipt)
        later = [self.model.pages[prefix] for prefix in prefixes]
        copied: list[tuple[int, int]] = []
        for cached in reversed(later):
            if not cached.group_pages:
                break
            copied = [*((cached.tier, page) for page in cached.group_pages), *copied]
        for tier, page in copied:
            self.model.users[tier][page] += 1
            self.pools[tier].retain(int32([page]))
        pages = self.acquire(len(prefixes) + len(copied))
        if pages is None:
            for tier, page in copied:
                self.pools[tier].unretain(int32([page]))
        for users in self.model.users[1:]:
            users.clear()
        if pages is None:
            return
        own, group_pages = pages[: len(prefixes)], pages[len(prefixes) :]
        given = group_pages if len(group_pages) else None
        self.tree.promote(holder.receipt, own, self.step, given)
        for tier, page in copied:
            self.pools[tier].release(int32([page]), self.step)
        self.give(holder, own, group_pages)
        of_each = self.of_each_page(len(own), group_pages)
        for cached, page, some in zip(later, own.tolist(), of_each, strict=True):
            cached.page, cached.step, cached.tier, cached.group_pages = page, self.step, 0, some

    def give(self, holder: Holder, pages: np.ndarray, group_pages: np.ndarray) -> None:
        """Add acquired pages to a holder."""
        holder.page_ids += pages.tolist()
        holder.group_pages += group_pages.tolist()
        self.model.users[0].update(group_pages.tolist())

    def of_each_page(self, num_pages: int, group_pages: np.ndarray) -> list[tuple[int, ...]]:
        """Group pages of each of `num_pages` pages. `group_pages` are for the last ones."""
        if not self.num_group_pages:
            return [()] * num_pages
        given = [tuple(some) for some in group_pages.reshape(-1, self.num_group_pages).tolist()]
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
        num_lacking = random.choice([0, 0, random.randint(0, count), count])
        acquired = self.acquire(count + (count - num_lacking) * self.num_group_pages)
        if acquired is None:
            return
        pages, group_pages = acquired[:count], acquired[count:]
        given = group_pages if len(group_pages) or random.random() < 0.5 else None
        if self.later_part(holder.receipt):
            message = f"receipt {holder.receipt} covers pages in tier"
            with pytest.raises(InvariantError, match=message):
                self.tree.insert(holder.receipt, int32(tokens), pages, self.step, given)
            self.pool.release(acquired, NO_STEP)
            return

        adopted = self.tree.insert(holder.receipt, int32(tokens), pages, self.step, given)

        model.now += 1
        self.give(holder, pages, group_pages)
        path = (namespace, before + tokens)
        mine = model.prefixes(path)[len(before) // self.page_size :]
        of_each = self.of_each_page(count, group_pages)
        for prefix, page, some in zip(mine, pages.tolist(), of_each, strict=True):
            cached = model.pages.get(prefix)
            if cached is None:
                created = model.created_behind(prefix, holder.receipt)
                cached = CachedPage(page, self.step, created, model.now)
                model.pages[prefix] = cached
            elif cached.tier:
                cached.page, cached.step, cached.tier = page, self.step, 0
                cached.group_pages = ()
            else:
                adopted += 1
            model.give_group_pages(cached, some, self.step, self.pool.done_step)
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
        self.pool.retain(int32([*holder.page_ids, *holder.group_pages]))
        self.model.users[0].update(holder.group_pages)
        self.holders.append(Holder(receipt, list(holder.page_ids), list(holder.group_pages)))

    @precondition(lambda self: self.holders)
    @rule(random=randoms, behind=st.integers(0, 2))
    def finish(self, random: Random, behind: int) -> None:
        self.finish_one(self.some_holder(random), self.step - behind)

    def finish_one(self, holder: Holder, last_step: int) -> None:
        self.holders.remove(holder)
        self.release(holder.receipt)
        self.pool.release(int32(holder.page_ids), last_step)
        self.leave_group_pages(holder, list(holder.group_pages), last_step)

    # Steps, and what leaves the tree.

    @rule(in_flight=st.integers(0, 2))
    def step_on(self, in_flight: int) -> None:
        self.next_step(in_flight)

    def next_step(self, in_flight: int) -> None:
        done = max(self.step - in_flight, self.pool.done_step)
        for pool in self.pools:
            pool.complete(done)
        self.step += 1

    @rule(count=st.integers(1, 8))
    def evict(self, count: int) -> None:
        self.evict_now(count)

    def evict_now(self, count: int) -> None:
        num_free, frees_at_once = self.pool.num_free, self.tree.frees_at_once(count)
        expected = self.evict_from(0, count)
        all_are_free = self.pool.num_free - num_free == expected
        assert frees_at_once == (all_are_free and expected >= count)

    @precondition(lambda self: len(self.pools) > 1)
    @rule(random=randoms, count=st.integers(1, 8))
    def evict_later(self, random: Random, count: int) -> None:
        self.evict_from(random.randrange(1, len(self.pools)), count)

    def evict_from(self, tier: int, count: int) -> int:
        """Evict as the model does, in this step; return the number of pages that the tier lost."""
        model = self.model
        before = self.pages_in(tier)
        model.free = [pool.num_free for pool in self.pools]
        expected = model.evict(tier, count, self.step, self.pool.done_step)
        evicted = self.tree.evict(count, self.step, tier)
        assert evicted.count == expected
        moved = list(zip(evicted.tiers.tolist(), evicted.page_ids.tolist(), strict=True))
        targets = list(zip(evicted.tiers.tolist(), evicted.target_ids.tolist(), strict=True))
        assert sorted(moved) == sorted(
            (source, page) for source, pages in model.moved.values() for page in pages
        )
        assert len(set(targets)) == len(targets)
        place = dict(zip(moved, evicted.target_ids.tolist(), strict=True))
        for prefix, (source, pages) in model.moved.items():
            cached = model.pages[prefix]
            cached.page, *group_pages = (place[source, page] for page in pages)
            cached.group_pages = tuple(group_pages)
        assert len(before - self.pages_in(tier)) == expected
        return expected

    def pages_in(self, tier: int) -> set[int]:
        """Pages of the tree in a tier, group pages included."""
        cached = [c for c in self.model.pages.values() if c.tier == tier]
        return {page for c in cached for page in (c.page, *c.group_pages)}

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

    # Calls that must be refused, and change nothing.

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
        if self.later_part(receipt):
            return
        is_held = 0 <= page < self.pool.num_pages and self.pool.ref_count(page) > 0
        if is_held and page not in self.pages_in(0):
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
        if is_held or not known or self.later_part(holder.receipt):
            return
        again = int32(random.choice(known)[1][len(tokens) :])
        with pytest.raises(InvariantError, match=f"insert: page {page} is not"):
            self.tree.insert(holder.receipt, again, int32([page]), self.step)

    @precondition(lambda self: self.holders and self.pool.num_free > 3)
    @rule(random=randoms, kind=st.sampled_from(["number", "held", "taken", "owner", "twice"]))
    def group_pages_that_the_tree_cannot_take_are_refused(self, random: Random, kind: str) -> None:
        holder = self.some_holder(random)
        if self.later_part(holder.receipt) or not (self.num_group_pages or kind == "number"):
            return
        page, *good = self.pool.acquire(1 + self.num_group_pages).tolist()
        wrong = {
            "number": [*good, page],
            "held": [*good[1:], random.choice([-1, self.pool.num_pages, self.a_free_page()])],
            "taken": [*good[1:], *list(self.pages_in(0) or {-1})[:1]],
            "owner": [*good[1:], page],
            "twice": good[:1] * self.num_group_pages if self.num_group_pages > 1 else [-1],
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
            parts = (node.page_ids, node.written_steps, node.group_page_ids)
            for prefix, page, step, beside in zip(prefixes, *parts, strict=True):
                yield prefix, CachedPage(page, step, *use, node.tier, beside), node.num_locks
        assert ends == self.model.receipts
        assert len(nodes) == self.tree.num_nodes

    @invariant()
    def the_tree_equals_its_model(self) -> None:
        self.tree.sanity_check()
        model, tree = self.model, self.tree
        key = STRATEGY_KEYS[model.strategy]
        locks = model.locks()
        found = {
            prefix: (cached.page, cached.group_pages, cached.tier, cached.step, key(cached), locked)
            for prefix, cached, locked in self.pages_of_the_tree()
        }
        assert found == {
            prefix: (c.page, c.group_pages, c.tier, c.step, key(c), locks[prefix])
            for prefix, c in model.pages.items()
        }
        for tier in range(len(self.pools)):
            assert tree.num_pages_in(tier) == model.num_pages(tier)
            assert tree.num_evictable_in(tier) == model.num_evictable(tier)
        assert tree.num_pages == tree.num_pages_in(0)
        assert tree.num_evictable == tree.num_evictable_in(0)
        assert tree.num_locked == tree.num_pages - tree.num_evictable
        assert tree.num_receipts == len(model.receipts)

    @invariant()
    def what_is_behind_a_page_is_in_its_tier_or_a_later_one(self) -> None:
        nodes = self.tree.walk()
        for node in nodes:
            assert node.parent < 0 or nodes[node.parent].tier <= node.tier

    @invariant()
    def the_pools_count_each_holder_and_the_tree(self) -> None:
        for tier, pool in enumerate(self.pools):
            pool.sanity_check()
            references = Counter(self.pages_in(tier))
            for holder in self.holders if not tier else ():
                references.update([*holder.page_ids, *holder.group_pages])
            assert pool.ref_counts().tolist() == [
                references[page] for page in range(pool.num_pages)
            ]
            idle = [(cached.page, cached.last_idle[0]) for cached in self.model.idle(tier)]
            assert pool.idle_owners() == idle

    @invariant()
    def questions_are_answered_as_by_the_model(self) -> None:
        locks = self.model.locks()
        for receipt, path in self.model.receipts.items():
            prefixes = self.model.prefixes(path)
            near = [p for p in prefixes if not self.model.pages[p].tier]
            self.the_pages_behind_each_page_are_known(receipt, prefixes, len(near))
            assert self.tree.num_exclusive(receipt) == sum(locks[p] == 1 for p in near)
            for whole in (False, True):
                self.what_is_found_is_known(path[0], (*path[1], 0), whole=whole)

    def what_is_found_is_known(
        self, namespace: bytes, tokens: tuple[int, ...], *, whole: bool
    ) -> None:
        found = self.tree.peek(namespace, int32(tokens), whole=whole)
        longest = self.model.longest(namespace, tokens, self.pool.done_step, whole=whole)
        tiers = Counter(self.model.pages[p].tier for p in self.model.prefixes(longest))
        assert found == tuple(tiers[tier] * self.page_size for tier in range(len(self.pools)))

    def the_pages_behind_each_page_are_known(
        self, receipt: int, prefixes: list[Prefix], num_near: int
    ) -> None:
        pages = [self.model.pages[prefix].page for prefix in prefixes]
        for first in range(len(pages) + 1):
            if first == len(pages) or num_near == len(pages):
                assert self.tree.page_ids(receipt, first).tolist() == pages[first:]
            else:
                with pytest.raises(InvariantError, match=f"receipt {receipt} covers pages in"):
                    self.tree.page_ids(receipt, first)

    def teardown(self) -> None:
        """Check that clearing brings every page back once all holders have left."""
        if not hasattr(self, "tree"):
            return
        for receipt in self.tail_receipts:
            self.tree.release(receipt)
        for holder in self.holders:
            self.tree.release(holder.receipt)
            self.pool.release(int32([*holder.page_ids, *holder.group_pages]), self.step)
        assert self.tree.num_locked == 0
        self.tree.clear()
        self.tree.sanity_check()
        assert self.tree.num_nodes == 0
        assert all(pool.num_held == 0 for pool in self.pools)


TestPrefixTreeEqualsItsModel = PrefixTreeMachine.TestCase
TestPrefixTreeEqualsItsModel.settings = settings(max_examples=examples(300), stateful_step_count=50)
