"""Plain model of the prefix tree: an entry per page, and every promise computed anew each time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from aioserve.kv.eviction import Eviction, PageUse
from aioserve.kv.prefix_tree import EVICTION_STRATEGIES

Prefix = tuple[bytes, tuple[int, ...]]
"""A namespace and all tokens up to the end of a page: names that page of that prompt."""


@dataclass
class CachedPage:
    page: int
    step: int
    created: int
    last_used: int
    hits: int = 0
    tier: int = 0
    group_pages: tuple[int, ...] = ()
    """Its group pages; empty where they are missing."""
    last_idle: tuple[int, int] = (0, 0)
    """Time when their last user left them, and the place in the order of being left."""


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
    """The order of "lru" until it fails, which is also the order after that."""

    def __init__(self, fail: Callable[[], float]) -> None:
        self.fail = fail
        self.calls = 0

    def key(self, use: PageUse) -> float:
        self.calls += 1
        assert self.calls <= 4, "it is asked after it has failed"
        return use.last_used_tick if self.calls < 4 else self.fail()


@dataclass
class Keyed:
    key: Callable[[PageUse], float]


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
class ModelTree:
    """Promises of the tree, in dicts: no nodes, no order structures, no counters."""

    page_size: int
    strategy: str
    num_tiers: int
    num_group_pages: int
    window: int
    pages: dict[Prefix, CachedPage] = field(default_factory=dict)
    receipts: dict[int, Prefix] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)
    """Receipts whose release counts as a use."""
    created: dict[int, int] = field(default_factory=dict)
    """Time when the last run that each receipt added began."""
    users: tuple[Counter[int], ...] = field(init=False)
    """References to pages of each tier that are or were group pages, without those of the tree. In
    later tiers, references while they are copied."""
    now: int = 0
    num_left: int = 0
    """Number of times that group pages were left by their last user."""
    free: list[int] = field(default_factory=list)
    """Pages that are free in each tier, set before each eviction."""
    moved: dict[Prefix, tuple[int, list[int]]] = field(default_factory=dict)
    """Pages that an eviction has moved to the next tier: their old tier, and a page followed by its
    group pages."""

    def __post_init__(self) -> None:
        self.users = tuple(Counter() for _ in range(self.num_tiers))

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

    # What is found.

    def longest(
        self, namespace: bytes, tokens: tuple[int, ...], done_step: int, *, whole: bool = False
    ) -> Prefix:
        found: list[Prefix] = [(namespace, ())]
        for prefix in self.prefixes((namespace, tokens)):
            cached = self.pages.get(prefix)
            if cached is None or (cached.tier and cached.step > done_step):
                break
            found.append(prefix)
        if whole:
            return found[-1]
        return [path for path in found if not any(map(self.lacks_group_pages, self.seen(path)))][-1]

    def lacks_group_pages(self, prefix: Prefix) -> bool:
        return self.num_group_pages > 0 and not self.pages[prefix].group_pages

    def seen(self, path: Prefix) -> list[Prefix]:
        """Pages with at least one of the last `window` tokens that the token after `path` sees,
        itself included."""
        first = len(path[1]) + 1 - self.window
        return [prefix for prefix in self.prefixes(path) if len(prefix[1]) > first]

    def tails(self, path: Prefix, rest: tuple[int, ...], done_step: int) -> dict[int, set[int]]:
        """Pages that begin with the most of `rest`, by their number of common tokens, at least
        one."""
        found: dict[int, set[int]] = {}
        for other in self.next_pages(path):
            cached = self.pages[other]
            common = common_tokens(other[1][len(path[1]) :], rest)
            is_there = not cached.tier and cached.step <= done_step
            if common > 0 and is_there and not self.lacks_group_pages(other):
                found.setdefault(common, set()).add(cached.page)
        return found

    # What is used.

    def created_behind(self, prefix: Prefix, receipt: int) -> int:
        before = self.pages.get((prefix[0], prefix[1][: -self.page_size]))
        if before is None or self.created.get(receipt) != before.created:
            self.created[receipt] = self.now
        return self.created[receipt]

    def use(self, path: Prefix, hits: int = 0) -> None:
        for prefix in self.prefixes(path):
            self.pages[prefix].last_used = self.now
            self.pages[prefix].hits += hits

    def give_group_pages(
        self, cached: CachedPage, given: tuple[int, ...], step: int, done_step: int
    ) -> None:
        """Set the group pages that `step` writes, unless the page has some or another step is
        writing it."""
        if given and not cached.group_pages and (cached.step == step or cached.step <= done_step):
            cached.group_pages, cached.step = given, step

    def leave(self, pages: list[int]) -> None:
        """Remove one user from each group page of tier 0, the last one first."""
        for page in reversed(pages):
            self.users[0][page] -= 1
            for cached in self.pages.values():
                if page in cached.group_pages and not cached.tier and not self.is_used(cached):
                    self.count_as_left(cached)

    def count_as_left(self, cached: CachedPage) -> None:
        self.num_left += 1
        cached.last_idle = (self.now, self.num_left)

    def is_used(self, cached: CachedPage) -> bool:
        return any(self.users[cached.tier][page] for page in cached.group_pages)

    def idle(self, tier: int) -> list[CachedPage]:
        """Pages with unused group pages, in the order in which these were left."""
        idle = [
            cached
            for cached in self.pages.values()
            if cached.tier == tier and cached.group_pages and not self.is_used(cached)
        ]
        return sorted(idle, key=lambda cached: cached.last_idle)

    def locks(self) -> Counter[Prefix]:
        return Counter(p for path in self.receipts.values() for p in self.prefixes(path))

    # What goes.

    def num_pages(self, tier: int) -> int:
        return sum(size_of(c) for c in self.pages.values() if c.tier == tier)

    def num_evictable(self, tier: int) -> int:
        locks = self.locks()
        alone = sum(not locks[p] for p, c in self.pages.items() if c.tier == tier)
        return alone + sum(len(cached.group_pages) for cached in self.idle(tier))

    def key(self, prefix: Prefix) -> tuple[int, ...]:
        return STRATEGY_KEYS[self.strategy](self.pages[prefix])

    def first_to_go(self, tier: int) -> Prefix | None:
        locks = self.locks()
        leaves = [
            prefix
            for prefix, cached in self.pages.items()
            if cached.tier == tier
            and not locks[prefix]
            and all(self.pages[p].tier > tier for p in self.next_pages(prefix))
        ]
        if not leaves:
            return None
        first, *others = sorted(leaves, key=self.key)
        assert not others or self.key(first) < self.key(others[0]), "the order leaves a choice"
        return first

    def first_to_strip(self, tier: int) -> CachedPage | None:
        """The page whose group pages go next, before any page does."""
        leaf = self.first_to_go(tier)
        for cached in self.idle(tier)[:1]:
            if leaf is None or cached.last_idle[0] < self.pages[leaf].last_used:
                return cached
        return None

    def evict(self, tier: int, count: int, step: int, done_step: int) -> int:
        """Return the number of pages that the tier loses. Afterwards `moved` has the pages that
        went to the next tier, and those of later tiers that made room."""
        self.moved = {}
        given_up = 0
        while given_up < count and (gone := self.give_up_first(tier, step, done_step)):
            given_up += gone
        return given_up

    def give_up_first(self, tier: int, step: int, done_step: int) -> int:
        """Give up the first to go from a tier; return the number of its pages."""
        stripped = self.first_to_strip(tier)
        if stripped is not None:
            count, stripped.group_pages = len(stripped.group_pages), ()
            for prefix, (source, pages) in self.moved.items():
                if self.pages[prefix] is stripped:
                    self.moved[prefix] = source, pages[:1]
            self.free[tier] += count
            return count
        prefix = self.first_to_go(tier)
        if prefix is None:
            return 0
        cached = self.pages[prefix]
        size, target = size_of(cached), tier + 1
        if target == self.num_tiers or cached.step > done_step:
            self.forget(prefix)
        elif self.make_room(target, size, step, done_step):
            self.free[tier] += size
            self.free[target] -= size
            self.moved[prefix] = tier, [cached.page, *cached.group_pages]
            cached.tier, cached.step = target, step
            self.count_as_left(cached)
        else:
            assert self.num_group_pages or self.num_tiers > 2 or not self.behind(prefix)
            self.forget(prefix)
        return size

    def make_room(self, tier: int, wanted: int, step: int, done_step: int) -> bool:
        if self.free[tier] + self.num_evictable(tier) < wanted:
            return False
        while self.free[tier] < wanted:
            self.give_up_first(tier, step, done_step)
        return True

    def forget(self, first: Prefix) -> None:
        """Drop `first` and all after it, whose receipts are gone."""
        gone = {prefix: self.pages.pop(prefix) for prefix in [first, *self.behind(first)]}
        self.moved = {p: moved for p, moved in self.moved.items() if p not in gone}
        for cached in gone.values():
            self.free[cached.tier] += size_of(cached)

    def clear(self) -> None:
        locks = self.locks()
        self.pages = {p: c for p, c in self.pages.items() if locks[p]}
        for tier in range(self.num_tiers):
            for cached in self.idle(tier):
                cached.group_pages = ()

    def drop(self, first: Prefix) -> dict[int, Prefix]:
        """Drop `first` and all after it; return the receipts that now end above, and where."""
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


def size_of(cached: CachedPage) -> int:
    return 1 + len(cached.group_pages)


def is_behind(tokens: tuple[int, ...], path: tuple[int, ...]) -> bool:
    return len(tokens) > len(path) and tokens[: len(path)] == path


def common_tokens(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count
