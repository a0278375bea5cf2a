"""A plain model of the prefix tree: an entry per page, and what it promises worked out anew each
time."""

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
    on_host: bool = False
    windows: tuple[int, ...] = ()
    """Its companions; a hollow page has none."""
    last_idle: tuple[int, int] = (0, 0)
    """When these were left by their last user, and in which order of being left."""


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
    """What the tree promises, in dicts: no nodes, no order structures, no counters."""

    page_size: int
    strategy: str
    has_host: bool
    num_companions: int
    window: int
    pages: dict[Prefix, CachedPage] = field(default_factory=dict)
    receipts: dict[int, Prefix] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)
    """Receipts whose release counts as a use."""
    created: dict[int, int] = field(default_factory=dict)
    """When the run began that each receipt added last."""
    users: Counter[int] = field(default_factory=Counter)
    """References of others than the tree to device pages that are companions, or were."""
    users_on_host: Counter[int] = field(default_factory=Counter)
    """As `users`, of host pages, while they are copied."""
    now: int = 0
    num_left: int = 0
    """How often companions have been left by their last user."""
    host_free: int = 0
    """Pages that are free on the host; told before anything is evicted."""
    moved: dict[Prefix, list[int]] = field(default_factory=dict)
    """Device pages that an eviction has put on the host: a page, and its companions behind it."""

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
            if cached is None or (cached.on_host and cached.step > done_step):
                break
            found.append(prefix)
        if whole:
            return found[-1]
        return [path for path in found if not any(map(self.is_hollow, self.seen(path)))][-1]

    def is_hollow(self, prefix: Prefix) -> bool:
        return self.num_companions > 0 and not self.pages[prefix].windows

    def seen(self, path: Prefix) -> list[Prefix]:
        """Pages with one or more of the last `window` tokens that the token behind `path` sees,
        itself included."""
        first = len(path[1]) + 1 - self.window
        return [prefix for prefix in self.prefixes(path) if len(prefix[1]) > first]

    def tails(self, path: Prefix, rest: tuple[int, ...], done_step: int) -> dict[int, set[int]]:
        """Pages that begin with the most of `rest`: by how many tokens, at least one."""
        found: dict[int, set[int]] = {}
        for other in self.next_pages(path):
            cached = self.pages[other]
            common = common_tokens(other[1][len(path[1]) :], rest)
            is_there = not cached.on_host and cached.step <= done_step
            if common > 0 and is_there and not self.is_hollow(other):
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

    def give_windows(
        self, cached: CachedPage, windows: tuple[int, ...], step: int, done_step: int
    ) -> None:
        """Companions that `step` writes, unless the page has some, or is itself being written by
        another step."""
        if windows and not cached.windows and (cached.step == step or cached.step <= done_step):
            cached.windows, cached.step = windows, step

    def leave(self, windows: list[int]) -> None:
        """One user fewer for each, the last one first."""
        for page in reversed(windows):
            self.users[page] -= 1
            for cached in self.pages.values():
                if page in cached.windows and not cached.on_host and not self.is_used(cached):
                    self.count_as_left(cached)

    def count_as_left(self, cached: CachedPage) -> None:
        self.num_left += 1
        cached.last_idle = (self.now, self.num_left)

    def is_used(self, cached: CachedPage) -> bool:
        users = self.users_on_host if cached.on_host else self.users
        return any(users[page] for page in cached.windows)

    def idle(self, *, on_host: bool) -> list[CachedPage]:
        """Pages with companions that nobody uses, in the order in which these were left."""
        idle = [
            cached
            for cached in self.pages.values()
            if cached.on_host == on_host and cached.windows and not self.is_used(cached)
        ]
        return sorted(idle, key=lambda cached: cached.last_idle)

    def locks(self) -> Counter[Prefix]:
        return Counter(p for path in self.receipts.values() for p in self.prefixes(path))

    # What goes.

    def num_pages(self, *, on_host: bool) -> int:
        return sum(size_of(c) for c in self.pages.values() if c.on_host == on_host)

    def num_evictable(self, *, on_host: bool) -> int:
        locks = self.locks()
        alone = sum(not locks[p] for p, c in self.pages.items() if c.on_host == on_host)
        return alone + sum(len(cached.windows) for cached in self.idle(on_host=on_host))

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

    def first_to_strip(self, *, on_host: bool) -> CachedPage | None:
        """The page whose companions go next, before any page does."""
        leaf = self.first_to_go(on_host=on_host)
        for cached in self.idle(on_host=on_host)[:1]:
            if leaf is None or cached.last_idle[0] < self.pages[leaf].last_used:
                return cached
        return None

    def evict(self, count: int, done_step: int) -> int:
        """How many pages the device loses; `moved` says which of them the host has then."""
        given_up = 0
        self.moved = {}
        while given_up < count:
            hollowed = self.first_to_strip(on_host=False)
            if hollowed is not None:
                given_up += len(hollowed.windows)
                hollowed.windows = ()
                continue
            prefix = self.first_to_go(on_host=False)
            if prefix is None:
                break
            cached = self.pages[prefix]
            given_up += size_of(cached)
            if cached.step > done_step:
                self.forget(prefix)
            elif self.has_host and self.make_room(size_of(cached)):
                self.host_free -= size_of(cached)
                self.moved[prefix] = [cached.page, *cached.windows]
                cached.on_host = True
                self.count_as_left(cached)
            else:
                assert self.num_companions or not self.behind(prefix)
                self.forget(prefix)
        return given_up

    def make_room(self, wanted: int) -> bool:
        if self.host_free + self.num_evictable(on_host=True) < wanted:
            return False
        while self.host_free < wanted:
            self.evict_host_once()
        return True

    def evict_host_once(self) -> int:
        """Drop what is the first to go from the host; return how many pages that is."""
        hollowed = self.first_to_strip(on_host=True)
        if hollowed is not None:
            count, hollowed.windows = len(hollowed.windows), ()
            self.moved |= {p: m[:1] for p, m in self.moved.items() if self.pages[p] is hollowed}
            self.host_free += count
            return count
        prefix = self.first_to_go(on_host=True)
        return 0 if prefix is None else self.forget(prefix)

    def forget(self, first: Prefix) -> int:
        """Drop `first` and all behind it, whose receipts are gone; return how many host pages that
        frees."""
        gone = {prefix: self.pages.pop(prefix) for prefix in [first, *self.behind(first)]}
        self.moved = {p: pages for p, pages in self.moved.items() if p not in gone}
        freed = sum(size_of(cached) for cached in gone.values() if cached.on_host)
        self.host_free += freed
        return freed

    def clear(self) -> None:
        locks = self.locks()
        self.pages = {p: c for p, c in self.pages.items() if locks[p]}
        for cached in self.idle(on_host=False) + self.idle(on_host=True):
            cached.windows = ()

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


def size_of(cached: CachedPage) -> int:
    return 1 + len(cached.windows)


def is_behind(tokens: tuple[int, ...], path: tuple[int, ...]) -> bool:
    return len(tokens) > len(path) and tokens[: len(path)] == path


def common_tokens(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count
