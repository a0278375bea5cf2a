"""Traps that other engines' prefix caches fell into, one example each.

Prompts are strings here, a token per character, and pages have four.
"""

from __future__ import annotations

import numpy as np
import pytest

from aioserve.errors import InvariantError
from aioserve.kv.page_pool import NO_STEP, PagePool, PageState
from aioserve.kv.prefix_tree import EVICTION_STRATEGIES, NO_RECEIPT, Evicted, Match, PrefixTree

PAGE_SIZE = 4


def ids(text: str) -> np.ndarray:
    return np.array([ord(character) for character in text], np.int32)


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


class Cache:
    """A tree with its pools, and requests that act as under a scheduler."""

    def __init__(
        self, num_pages: int = 16, *, host: int | None = None, strategy: str = "lru"
    ) -> None:
        self.pool = PagePool(num_pages, PAGE_SIZE)
        self.host = None if host is None else PagePool(host, PAGE_SIZE)
        pools = [pool for pool in (self.pool, self.host) if pool is not None]
        self.tree = PrefixTree(*pools, strategy=strategy)

    def match(
        self, text: str, namespace: bytes = b"", *, partial: bool = False, use: bool = True
    ) -> Match:
        return self.tree.match(namespace, ids(text), partial=partial, use=use)

    def start(
        self, text: str, step: int = NO_STEP, namespace: bytes = b""
    ) -> tuple[int, np.ndarray]:
        """Match `text` and publish the rest of its whole pages; return the receipt and the page
        table."""
        match = self.match(text, namespace)
        self.pool.retain(match.page_ids)
        have = len(match.page_ids)
        new = self.pool.acquire(len(text) // PAGE_SIZE - have)
        tokens = ids(text)[have * PAGE_SIZE :][: len(new) * PAGE_SIZE]
        self.tree.insert(match.receipt, tokens, new, step)
        return match.receipt, np.concatenate([match.page_ids, new])

    def finish(self, receipt: int, table: np.ndarray, last_step: int = NO_STEP) -> None:
        self.tree.release(receipt)
        self.pool.release(table, last_step)

    def serve(self, text: str, step: int = NO_STEP, namespace: bytes = b"") -> list[int]:
        """Run one request from start to finish; return the pages that hold its KV."""
        receipt, table = self.start(text, step, namespace)
        self.finish(receipt, table)
        self.check()
        return table.tolist()

    def evict(self, count: int, step: int | None = None) -> Evicted:
        """Evict, and make the copies: in `step`, or else in the next."""
        step = self.pool.done_step + 1 if step is None else step
        evicted = self.tree.evict(count, step)
        for pool in (self.pool, self.host):
            if pool is not None:
                pool.complete(step)
        return evicted

    def cached(self, text: str, namespace: bytes = b"") -> tuple[int, int]:
        """Tokens on the device, and on the host."""
        device, *host = self.tree.peek(namespace, ids(text))
        return device, sum(host)

    def check(self) -> None:
        self.tree.sanity_check()
        self.pool.sanity_check()
        if self.host is not None:
            self.host.sanity_check()


@pytest.fixture
def cache() -> Cache:
    return Cache()


# Who owns a page.


def test_a_duplicate_stays_with_its_owner_until_that_owner_ends(cache: Cache) -> None:
    first = cache.match("abcdefgh")
    second = cache.match("abcdefgh")  # before the first has published
    pages, duplicates = cache.pool.acquire(2), cache.pool.acquire(2)
    assert cache.tree.insert(first.receipt, ids("abcdefgh"), pages, 0) == 2
    assert cache.tree.insert(second.receipt, ids("abcdefgh"), duplicates, 0) == 0
    assert [cache.pool.ref_count(page) for page in duplicates] == [1, 1]
    cache.finish(first.receipt, pages)
    assert cache.tree.num_locked == 2  # the second receipt covers what the tree has
    cache.finish(second.receipt, duplicates)
    assert [cache.pool.state(page) for page in duplicates] == [PageState.FREE] * 2
    assert cache.match("abcdefgh").page_ids.tolist() == pages.tolist()


def test_what_a_sequence_published_outlives_the_sequence(cache: Cache) -> None:
    receipt, table = cache.start("abcdefgh")
    cache.pool.release(table, NO_STEP)  # preempted halfway, still listed as a reader
    assert [cache.pool.ref_count(page) for page in table] == [1, 1]
    assert cache.tree.evict(2, 1).count == 0
    cache.tree.release(receipt)
    assert cache.tree.evict(2, 1).count == 2
    assert cache.pool.num_free == 16


def test_eviction_takes_nothing_that_a_receipt_covers(cache: Cache) -> None:
    cache.serve("abcdefghijkl")
    match = cache.match("abcdefgh")
    assert cache.tree.num_evictable == 1
    assert cache.tree.evict(9, 1).count == 1
    assert cache.cached("abcdefghijkl") == (8, 0)
    assert [cache.pool.ref_count(page) for page in match.page_ids] == [1, 1]
    cache.check()


def test_a_match_locks_exactly_what_it_returned(cache: Cache) -> None:
    cache.serve("abcdefghijklmnop")
    match = cache.match("abcdefghxxxx")
    assert len(match.page_ids) == 2
    assert (cache.tree.num_locked, cache.tree.num_evictable) == (2, 2)


def test_the_match_of_an_unknown_prompt_is_a_receipt_for_nothing(cache: Cache) -> None:
    match = cache.match("abcdefgh", partial=True)
    assert (match.num_pages, match.tail_page) == (0, -1)
    assert (cache.tree.num_receipts, cache.tree.num_nodes) == (1, 1)
    cache.tree.release(match.receipt)
    assert (cache.tree.num_receipts, cache.tree.num_nodes) == (0, 0)


def test_the_pages_of_a_path_are_told_from_any_page_on(cache: Cache) -> None:
    table = cache.serve("abcdefghijkl")
    receipt, _ = cache.start("abcdefghpqrs")
    table[2] = int(cache.tree.page_ids(receipt, 2)[0])
    for first in range(4):
        assert cache.tree.page_ids(receipt, first).tolist() == table[first:]
    for first in (-1, 4):
        message = f"page_ids: first must be 0 to 3, where receipt {receipt} ends, got {first}"
        with pytest.raises(InvariantError, match=message):
            cache.tree.page_ids(receipt, first)


def test_the_pages_of_a_path_are_told_only_where_they_are_on_the_device() -> None:
    cache = Cache(host=4)
    cache.serve("abcdefghijkl")
    cache.tree.evict(1, 0)
    cache.pool.complete(0)
    match = cache.match("abcdefghijkl")
    for first in (0, 2):
        with pytest.raises(InvariantError, match="receipt 1 covers pages in tier 1; promote it"):
            cache.tree.page_ids(match.receipt, first)
    assert len(cache.tree.page_ids(match.receipt, 3)) == 0


def test_a_split_leaves_the_receipts_below_as_they_were(cache: Cache) -> None:
    receipt, table = cache.start("abcdefghijkl")
    shorter = cache.match("abcdxxxx")
    assert cache.tree.num_locked == 3
    cache.tree.release(shorter.receipt)
    assert cache.tree.num_locked == 3
    assert cache.tree.cut(receipt, 3) == ()
    cache.finish(receipt, table)
    assert cache.tree.num_locked == 0
    cache.check()


def test_a_split_does_not_make_the_rest_of_the_run_younger(cache: Cache) -> None:
    cache.serve("abcdefgh")
    cache.serve("pqrstuvw")
    cache.tree.release(cache.match("abcdxxxx").receipt)  # uses the first page only
    assert cache.tree.evict(1, 1).count == 1
    assert cache.cached("abcdefgh") == (4, 0)
    assert cache.tree.evict(1, 1).count == 1
    assert cache.cached("pqrstuvw") == (4, 0)


def test_shared_pages_are_counted_once(cache: Cache) -> None:
    first, first_table = cache.start("abcdefgh")
    second, second_table = cache.start("abcdefghijkl")
    assert (cache.tree.num_locked, cache.tree.num_evictable) == (3, 0)
    assert (cache.tree.num_exclusive(first), cache.tree.num_exclusive(second)) == (0, 1)
    cache.finish(first, first_table)
    assert (cache.tree.num_locked, cache.tree.num_evictable) == (3, 0)
    assert cache.tree.num_exclusive(second) == 3
    cache.finish(second, second_table)
    assert (cache.tree.num_locked, cache.tree.num_evictable) == (0, 3)
    cache.check()


def test_a_fork_keeps_the_path_when_the_first_lets_go(cache: Cache) -> None:
    receipt, table = cache.start("abcdefgh")
    fork = cache.tree.fork(receipt)
    cache.finish(receipt, table)
    assert cache.tree.evict(2, 1).count == 0
    cache.tree.release(fork)
    assert cache.tree.evict(2, 1).count == 2


def test_a_fork_does_not_come_to_cover_what_the_other_publishes(cache: Cache) -> None:
    receipt, table = cache.start("abcd")
    fork = cache.tree.fork(receipt)
    page = cache.pool.acquire(1)
    cache.tree.insert(receipt, ids("efgh"), page, 1)
    cache.finish(receipt, np.concatenate([table, page]))
    assert (cache.tree.num_locked, cache.tree.num_evictable) == (1, 1)
    assert cache.tree.cut(fork, 1) == ()


def test_a_page_that_is_used_behind_the_trees_back_is_found(cache: Cache) -> None:
    pages = cache.serve("abcdefgh")
    cache.pool.retain(int32(pages[1]))
    with pytest.raises(InvariantError, match=r"page 1 in .* with 0 locks has 2 references"):
        cache.tree.sanity_check()


def test_a_page_that_is_taken_from_the_tree_is_found(cache: Cache) -> None:
    receipt, table = cache.start("abcd")
    cache.pool.release(int32(*table, *table), NO_STEP)
    with pytest.raises(InvariantError, match=r"page 0 in .* with 1 locks has 0 references"):
        cache.tree.sanity_check()
    with pytest.raises(InvariantError, match="release: page 0 is not held"):
        cache.tree.cut(receipt, 0)
    assert cache.tree.num_pages == 1


# What may be shared.


def test_namespaces_share_nothing(cache: Cache) -> None:
    pages = cache.serve("abcdefgh", namespace=b"a")
    assert cache.cached("abcdefgh", b"a") == (8, 0)
    for other in (b"", b"a\x00", b"b"):
        assert cache.cached("abcdefgh", other) == (0, 0)
        assert len(cache.match("abcdefgh", other).page_ids) == 0
    assert cache.serve("abcdefgh", namespace=b"b") != pages


@pytest.mark.parametrize(
    ("text", "num_pages"), [("", 0), ("abc", 0), ("abcd", 1), ("abcdefg", 1), ("abcdefghi", 2)]
)
def test_only_whole_pages_are_matched(cache: Cache, text: str, num_pages: int) -> None:
    pages = cache.serve("abcdefghijkl")
    assert cache.match(text).page_ids.tolist() == pages[:num_pages]
    assert cache.cached(text) == (num_pages * PAGE_SIZE, 0)


def test_siblings_are_told_apart_by_all_tokens_of_their_first_page() -> None:
    cache = Cache(64)
    texts = [f"{a}{b}{c}{d}" for a in "xy" for b in "xy" for c in "xy" for d in "xyz"]
    pages = {text: cache.serve(text) for text in texts}
    assert len({page for (page,) in pages.values()}) == len(texts)
    for text in texts:
        assert cache.match(text).page_ids.tolist() == pages[text]


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_long_run_is_found_up_to_the_first_token_that_differs(page_size: int) -> None:
    pool = PagePool(256 // page_size, page_size)
    tree = PrefixTree(pool)
    tokens = np.arange(256, dtype=np.int32)
    tree.insert(tree.match(b"", tokens).receipt, tokens, pool.acquire(pool.num_pages), 0)
    for position in range(256):
        other = tokens.copy()
        other[position] = -1
        whole = position // page_size * page_size
        assert tree.peek(b"", other) == (whole,)


def test_any_int32_is_a_token(cache: Cache) -> None:
    tokens = int32(-(2**31), 2**31 - 1, -1, 0)
    match = cache.tree.match(b"", tokens)
    page = cache.pool.acquire(1)
    cache.tree.insert(match.receipt, tokens, page, 0)
    assert cache.tree.peek(b"", tokens) == (4,)
    assert cache.tree.peek(b"", tokens[::-1].copy()) == (0,)
    cache.check()


def test_asking_changes_nothing(cache: Cache) -> None:
    cache.serve("abcdefgh")
    cache.serve("pqrs")
    before = cache.tree.walk()
    assert cache.cached("abcdxxxx") == (4, 0)
    assert cache.tree.walk() == before


# A page in part.


def test_the_page_with_the_longest_common_prefix_is_offered(cache: Cache) -> None:
    for text in ("abcdefgh", "abcdexxx", "abcdefxx", "abcdzzzz"):
        cache.serve(text)
    cache.pool.complete(0)
    match = cache.match("abcdefgz", partial=True)
    assert match.tail_page == cache.match("abcdefgh").page_ids[1]
    assert match.tail_tokens == 3
    short = cache.match("abcdef", partial=True)  # two pages begin so
    assert short.tail_tokens == 2
    assert short.tail_page in {cache.match(f"abcdef{x}").page_ids[1] for x in ("gh", "xx")}


def test_the_tail_receipt_locks_one_page_more(cache: Cache) -> None:
    cache.serve("abcdefghijkl")
    cache.pool.complete(0)
    match = cache.match("abcdefxx", partial=True)
    assert (match.tail_tokens, cache.tree.num_locked) == (2, 2)
    cache.tree.release(match.receipt)
    assert cache.tree.num_locked == 2
    cache.tree.release(match.tail_receipt)
    assert cache.tree.num_locked == 0
    cache.check()


def test_a_page_that_is_not_written_yet_is_not_copied_from(cache: Cache) -> None:
    cache.serve("abcdefgh", step=3)
    cache.pool.complete(2)
    match = cache.match("abcdefxx", partial=True)
    assert (match.tail_page, match.tail_tokens, match.tail_receipt) == (-1, 0, NO_RECEIPT)
    assert len(match.page_ids) == 1  # but is shared: it will be written when it is read
    cache.pool.complete(3)
    assert cache.match("abcdefxx", partial=True).tail_tokens == 2


def test_a_written_page_is_found_behind_better_ones_that_are_not(cache: Cache) -> None:
    cache.serve("abxx", step=1)
    for text in ("abcd", "abce"):
        cache.serve(text, step=2)
    cache.pool.complete(1)
    assert cache.match("abcf", partial=True).tail_tokens == 2


def test_among_very_many_siblings_only_the_closest_are_looked_at() -> None:
    cache = Cache(32)
    cache.serve("abxx", step=1)
    for character in "ghijklmno":
        cache.serve(f"abc{character}", step=2)
    cache.pool.complete(1)
    assert cache.match("abca", partial=True).tail_page == -1


def test_no_page_in_part_without_asking_or_where_pages_have_one_token(cache: Cache) -> None:
    cache.serve("abcd")
    cache.pool.complete(0)
    assert cache.match("abxx", partial=False).tail_page == -1
    pool = PagePool(4, 1)
    tree = PrefixTree(pool)
    tree.insert(tree.match(b"", int32(1, 2)).receipt, int32(1, 2), pool.acquire(2), NO_STEP)
    assert tree.match(b"", int32(1, 3)).tail_page == -1


def test_no_page_in_part_behind_or_on_the_host() -> None:
    cache = Cache(host=4)
    cache.serve("abcdefgh")
    cache.pool.complete(0)
    cache.evict(1)
    match = cache.match("abcdefxx", partial=True)
    assert (len(match.page_ids), match.tail_page) == (1, -1)
    cache.tree.release(match.receipt)
    cache.evict(1)
    match = cache.match("abcdefxx", partial=True)
    assert (len(match.tiers[1]), match.tail_page) == (1, -1)


# The shape.


@pytest.mark.parametrize("strategy", EVICTION_STRATEGIES)
def test_chunks_of_one_sequence_are_one_node(strategy: str) -> None:
    cache = Cache(strategy=strategy)
    cache.serve("wxyz")
    match = cache.match("wxyz")
    for chunk in ("abcd", "efghijkl", "mnop"):
        pages = cache.pool.acquire(len(chunk) // PAGE_SIZE)
        cache.tree.insert(match.receipt, ids(chunk), pages, 0)
        cache.pool.release(pages, NO_STEP)
        cache.serve("cdefghij")  # others are younger
        cache.check()
    # Under "lru" even the prefix that was matched is part of it.
    assert cache.tree.num_nodes == (3 if strategy == "lru" else 4)
    assert cache.tree.cut(match.receipt, 5) == ()


@pytest.mark.parametrize("strategy", EVICTION_STRATEGIES)
def test_a_sequence_that_others_read_meanwhile_is_one_node_when_they_have_left(
    strategy: str,
) -> None:
    cache = Cache(strategy=strategy)
    receipt, table = cache.start("abcd")
    others = []
    for chunk in ("efgh", "ijkl", "mnop"):
        others.append(cache.tree.fork(receipt))
        page = cache.pool.acquire(1)
        cache.tree.insert(receipt, ids(chunk), page, 0)
        cache.pool.release(page, NO_STEP)
    assert cache.tree.num_nodes == 5
    for other in others:
        cache.tree.release(other)
    cache.finish(receipt, table)
    assert cache.tree.num_nodes == 2
    cache.check()


def test_under_fifo_a_sequence_is_as_old_as_its_first_page() -> None:
    cache = Cache(strategy="fifo")
    receipt, table = cache.start("abcd")
    fork = cache.tree.fork(receipt)
    cache.serve("pqrs")
    for owner, chunk in ((receipt, "efgh"), (fork, "ijkl")):
        page = cache.pool.acquire(1)
        cache.tree.insert(owner, ids(chunk), page, NO_STEP)
        cache.pool.release(page, NO_STEP)
    cache.tree.release(fork)
    cache.finish(receipt, table)
    gone = []
    for _ in range(4):
        cache.tree.evict(1, 1)
        gone.append([cache.cached(text)[0] for text in ("abcdefgh", "pqrs", "abcdijkl")])
    assert gone == [[4, 4, 8], [4, 0, 8], [4, 0, 4], [0, 0, 0]]


@pytest.mark.parametrize(("strategy", "num_nodes"), [("lru", 2), ("fifo", 2), ("lfu", 3)])
def test_a_split_is_undone_when_nothing_keeps_the_parts_apart(
    strategy: str, num_nodes: int
) -> None:
    cache = Cache(strategy=strategy)
    cache.serve("abcdefgh")
    half, whole = cache.match("abcd"), cache.match("abcdefgh")
    assert cache.tree.num_nodes == 3
    cache.tree.release(half.receipt)
    cache.tree.release(whole.receipt)
    assert cache.tree.num_nodes == num_nodes  # their numbers of hits differ
    assert cache.cached("abcdefgh") == (8, 0)
    cache.check()


def test_an_only_child_joins_its_parent_when_its_sibling_goes(cache: Cache) -> None:
    cache.serve("abcdefgh")
    cache.serve("abcdpqrs")
    assert cache.tree.num_nodes == 4
    cache.tree.evict(1, 1)
    assert cache.tree.num_nodes == 2
    assert cache.cached("abcdpqrs") == (8, 0)
    cache.check()


def test_a_branch_as_deep_as_memory_needs_no_deep_stack() -> None:
    num_pages = 30_000
    pool = PagePool(num_pages, 1)
    tree = PrefixTree(pool, strategy="lfu")  # which keeps chunks apart that a match told apart
    tokens = np.arange(num_pages, dtype=np.int32)
    receipt = tree.match(b"", tokens).receipt
    for start in range(0, num_pages, 10):
        pages = pool.acquire(10)
        tree.insert(receipt, tokens[start : start + 10], pages, 0)
        pool.release(pages, NO_STEP)
        tree.use(receipt)
    assert tree.num_nodes == num_pages // 10 + 1
    assert tree.num_exclusive(receipt) == num_pages
    tree.sanity_check()
    assert tree.cut(receipt, 1) == ((receipt, 1),)
    tree.release(receipt)
    tree.clear()
    assert (tree.num_nodes, pool.num_free) == (0, num_pages)


# The order of eviction.


@pytest.mark.parametrize(
    ("strategy", "order"),
    [("lru", "bdcae"), ("lfu", "bdeac"), ("fifo", "abcde"), ("slru", "bdeca")],
)
def test_pages_leave_in_the_order_of_the_strategy(strategy: str, order: str) -> None:
    cache = Cache(strategy=strategy)
    for name in "abcd":
        cache.serve(name * 4)
    for name in "cca":
        cache.tree.release(cache.match(name * 4).receipt)
    cache.serve("eeee")
    gone = ""
    while cache.tree.evict(1, 1).count:
        gone += "".join(
            name for name in order if name not in gone and cache.cached(name * 4) == (0, 0)
        )
    assert gone == order


@pytest.mark.parametrize("strategy", EVICTION_STRATEGIES)
def test_a_match_that_is_not_taken_is_no_use(strategy: str) -> None:
    cache = Cache(strategy=strategy)
    for name in "abc":
        cache.serve(f"{name}{name}{name}{name}xxxx")
    cache.pool.complete(0)
    before = cache.tree.walk()
    for _ in range(3):
        match = cache.match("aaaaxxyy", partial=True, use=False)
        assert (len(match.page_ids), match.tail_tokens) == (1, 2)
        cache.tree.release(match.receipt)
        cache.tree.release(match.tail_receipt)
    assert cache.tree.walk() == before
    cache.tree.release(cache.tree.fork(cache.match("aaaaxxxx", use=False).receipt))
    assert [node for node in cache.tree.walk() if node.last_used > before[-1].last_used] == []


@pytest.mark.parametrize("strategy", EVICTION_STRATEGIES)
def test_a_match_that_is_taken_later_is_the_same_use(strategy: str) -> None:
    at_once, later = Cache(strategy=strategy), Cache(strategy=strategy)
    for cache in (at_once, later):
        for name in "abc":
            cache.serve(f"{name}{name}{name}{name}xxxx")
        cache.pool.complete(0)
    first = at_once.match("aaaaxxyy", partial=True)
    second = later.match("aaaaxxyy", partial=True, use=False)
    assert later.tree.walk() != at_once.tree.walk()
    later.tree.use(second.receipt, second.tail_receipt)
    assert later.tree.walk() == at_once.tree.walk()
    for cache, match in ((at_once, first), (later, second)):
        cache.tree.release(match.tail_receipt)
        cache.tree.release(match.receipt)
    assert later.tree.walk() == at_once.tree.walk()


def test_a_branch_leaves_page_by_page_from_its_end(cache: Cache) -> None:
    cache.serve("abcdefghijkl")
    cache.serve("pqrs")
    for num_tokens in (8, 4, 0):
        assert cache.tree.evict(1, 1).count == 1
        assert cache.cached("abcdefghijkl") == (num_tokens, 0)
    assert cache.cached("pqrs") == (4, 0)


def test_a_page_that_a_step_may_still_touch_comes_back_fenced(cache: Cache) -> None:
    receipt, table = cache.start("abcd", step=5)
    cache.finish(receipt, table, last_step=5)
    evicted = cache.tree.evict(1, 6)
    assert (evicted.count, len(evicted.page_ids)) == (1, 0)
    assert cache.pool.state(table[0]) is PageState.FENCED


def test_pages_are_freed_at_once_up_to_the_first_that_a_step_may_still_touch(cache: Cache) -> None:
    cache.serve("abcdefgh")
    receipt, table = cache.start("pqrs", step=5)
    cache.finish(receipt, table, last_step=5)
    assert [cache.tree.frees_at_once(count) for count in range(5)] == [True] * 3 + [False] * 2
    cache.pool.complete(5)
    assert [cache.tree.frees_at_once(count) for count in range(5)] == [True] * 4 + [False]


def test_no_more_is_evicted_than_there_is(cache: Cache) -> None:
    cache.serve("abcdefgh")
    assert cache.tree.evict(0, 1).count == 0
    assert cache.tree.evict(9, 1).count == 2
    assert cache.tree.num_nodes == 0


def test_clearing_leaves_what_receipts_cover() -> None:
    cache = Cache(host=4)
    cache.serve("abcdefgh")
    cache.serve("pqrstuvw")
    cache.tree.evict(1, 1)
    cache.tree.match(b"", ids("pqrs"), partial=False)
    cache.tree.clear()
    assert (cache.cached("abcdefgh"), cache.cached("pqrstuvw")) == ((0, 0), (4, 0))
    assert (cache.tree.num_pages_in(1), cache.pool.num_held) == (0, 1)
    cache.check()


# The second tier.


def test_evicted_pages_go_to_the_host_and_come_back_on_a_hit() -> None:
    cache = Cache(host=4)
    pages = cache.serve("abcdefghijkl")
    evicted = cache.evict(2, 7)
    assert (evicted.count, evicted.page_ids.tolist()) == (2, pages[1:])
    assert [cache.pool.state(page) for page in pages[1:]] == [PageState.FREE] * 2
    assert cache.cached("abcdefghijkl") == (4, 8)

    match = cache.match("abcdefghijkl")
    assert match.page_ids.tolist() == pages[:1]
    assert match.tiers[1].tolist() == evicted.target_ids.tolist()
    new = cache.pool.acquire(2)
    cache.tree.promote(match.receipt, new, 8)
    assert cache.match("abcdefghijkl").page_ids.tolist() == [pages[0], *new]
    assert [cache.pool.ref_count(page) for page in new] == [2, 2]
    assert cache.host is not None
    assert (cache.host.num_free, cache.host.num_fenced) == (2, 2)  # step 8 reads them
    cache.host.complete(8)
    assert cache.host.num_free == 4
    assert cache.tree.num_pages_in(1) == 0


def test_a_full_host_drops_its_own_first_page_for_a_new_one() -> None:
    cache = Cache(host=2)
    for text in ("aaaa", "bbbb", "cccc"):
        cache.serve(text)
    for text in ("aaaa", "bbbb"):
        cache.evict(1)
        assert cache.cached(text) == (0, 4)
    evicted = cache.evict(1)
    assert len(evicted.target_ids) == 1
    assert [cache.cached(x * 4) for x in "abc"] == [(0, 0), (0, 4), (0, 4)]


def test_a_page_worth_more_on_the_host_makes_place_for_one_page_only() -> None:
    cache = Cache(host=3)
    cache.serve("abcdefghijkl")
    cache.serve("pqrsqrstrstu")
    cache.evict(3)
    cache.tree.release(cache.match("abcdefghijkl").receipt)  # used after what the device has
    evicted = cache.evict(3)
    assert (evicted.count, len(evicted.target_ids)) == (3, 1)
    assert cache.cached("abcdefghijkl") == (0, 8)
    assert cache.cached("pqrsqrstrstu") == (0, 4)
    cache.check()


def test_a_copy_whose_target_is_dropped_again_is_not_asked_for() -> None:
    cache = Cache(host=2)
    pages = cache.serve("abcdefghijklmnop")
    evicted = cache.evict(4)
    assert evicted.count == 4
    assert evicted.page_ids.tolist() == pages[:2]
    assert sorted(evicted.target_ids) == [0, 1]
    assert cache.cached("abcdefghijklmnop") == (0, 8)
    cache.check()


def test_what_the_host_cannot_hold_goes_nowhere() -> None:
    cache = Cache(host=1)
    cache.serve("abcd")
    cache.evict(1)
    locked = cache.match("abcd")
    cache.serve("pqrs")
    evicted = cache.evict(1)
    assert (evicted.count, len(evicted.target_ids)) == (1, 0)
    assert (cache.cached("abcd"), cache.cached("pqrs")) == ((0, 4), (0, 0))
    assert cache.tree.evict(1, 9, 1).count == 0
    cache.tree.release(locked.receipt)
    assert (cache.tree.num_evictable_in(1), cache.tree.evict(2, 9, 1).count) == (1, 1)
    assert cache.host is not None
    assert cache.host.num_free == 1


def test_a_run_on_the_host_takes_the_pages_of_who_computed_it_again() -> None:
    cache = Cache(host=4)
    cache.serve("abcdefghijkl")
    cache.evict(2)
    match = cache.match("abcd")
    pages = cache.pool.acquire(1)
    assert cache.tree.insert(match.receipt, ids("efgh"), pages, 3) == 1
    assert cache.cached("abcdefghijkl") == (8, 4)
    assert cache.pool.ref_count(pages[0]) == 2
    assert (cache.tree.num_pages_in(1), cache.tree.num_locked) == (1, 2)
    cache.check()


def test_nothing_is_published_behind_the_host() -> None:
    cache = Cache(host=4)
    cache.serve("abcd")
    cache.evict(1)
    match = cache.match("abcd")
    with pytest.raises(InvariantError, match="receipt 1 covers pages in tier 1; promote it first"):
        cache.tree.insert(match.receipt, ids("efgh"), cache.pool.acquire(1), 1)


# Steps that fail.


def test_what_a_failed_step_was_to_write_is_withdrawn_from_all_who_share_it(cache: Cache) -> None:
    cache.serve("abcd", step=1)
    first, first_table = cache.start("abcdefgh", step=2)
    second, second_table = cache.start("abcdefghijkl", step=2)
    third, third_table = cache.start("abcdpqrs", step=1)
    assert cache.tree.withdraw(2) == ((first, 1), (second, 1))
    assert cache.cached("abcdefghijkl") == (4, 0)
    assert cache.cached("abcdpqrs") == (8, 0)
    assert cache.tree.num_locked == 2
    cache.check()
    cache.finish(first, first_table)
    cache.finish(second, second_table)
    cache.finish(third, third_table)
    assert cache.pool.num_held == cache.tree.num_evictable == 2


def test_only_the_part_of_a_run_that_the_failed_step_was_to_write_is_withdrawn(
    cache: Cache,
) -> None:
    receipt, _ = cache.start("abcdefgh", step=1)
    cache.tree.insert(receipt, ids("ijkl"), cache.pool.acquire(1), 2)
    cache.tree.insert(receipt, ids("mnop"), cache.pool.acquire(1), 3)
    assert cache.tree.num_nodes == 2
    assert cache.tree.withdraw(2) == ((receipt, 2),)
    assert cache.cached("abcdefghijklmnop") == (8, 0)
    cache.check()


def test_every_branch_that_the_failed_step_was_to_write_is_withdrawn(cache: Cache) -> None:
    texts = {text: cache.start(text, step=2)[0] for text in ("abcdefgh", "abcdpqrs", "vwxy")}
    other, _ = cache.start("abcdefgh", step=2, namespace=b"a")
    assert cache.tree.withdraw(2) == tuple((receipt, 0) for receipt in (*texts.values(), other))
    assert cache.tree.num_pages == 0
    cache.check()


def test_what_is_behind_a_withdrawn_page_goes_too(cache: Cache) -> None:
    first, table = cache.start("abcdefgh", step=2)
    page = cache.pool.acquire(1)
    cache.tree.insert(first, ids("ijkl"), page, 3)
    assert cache.tree.withdraw(2) == ((first, 0),)
    assert cache.tree.num_pages == 0
    cache.finish(first, np.concatenate([table, page]))
    assert cache.pool.num_free == 16


def test_a_page_that_is_not_written_yet_is_not_copied_to_the_host() -> None:
    cache = Cache(host=4)
    receipt, table = cache.start("abcdefgh", step=1)
    page = cache.pool.acquire(1)
    cache.tree.insert(receipt, ids("ijkl"), page, 2)
    cache.finish(receipt, np.concatenate([table, page]), last_step=2)
    cache.pool.complete(1)
    evicted = cache.tree.evict(2, 3)
    assert (evicted.count, evicted.page_ids.tolist()) == (2, [table[1]])
    assert cache.cached("abcdefghijkl") == (4, 0)
    assert cache.pool.state(page[0]) is PageState.FENCED
    cache.check()


def test_what_is_on_the_host_behind_a_page_that_is_not_written_yet_goes_with_it() -> None:
    cache = Cache(host=4)
    cache.serve("abcdefgh")
    cache.tree.evict(2, 1)
    cache.pool.complete(1)
    match = cache.match("abcd")
    page = cache.pool.acquire(1)
    cache.tree.promote(match.receipt, page, 2)
    cache.finish(match.receipt, page, last_step=2)
    assert cache.cached("abcdefgh") == (4, 4)
    evicted = cache.tree.evict(1, 3)
    assert (evicted.count, len(evicted.page_ids)) == (1, 0)
    assert (cache.tree.num_pages, cache.tree.num_pages_in(1)) == (0, 0)
    cache.check()


def test_a_page_on_the_host_is_found_once_its_copy_is_made() -> None:
    cache = Cache(host=4)
    cache.serve("abcdefghijkl")
    cache.tree.evict(1, 4)
    cache.tree.evict(1, 3)
    for done, found in ((2, 0), (3, 4), (4, 8)):
        cache.pool.complete(done)
        assert cache.cached("abcdefghijkl") == (4, found)
        match = cache.match("abcdefghijkl", partial=True)
        assert len(match.tiers[1]) == found // PAGE_SIZE
        cache.tree.release(match.receipt)
    cache.check()


def test_copies_of_a_failed_step_are_withdrawn_on_both_tiers() -> None:
    cache = Cache(host=4)
    cache.serve("abcdefgh")
    cache.evict(1, 2)
    assert cache.tree.withdraw(2) == ()
    assert cache.cached("abcdefgh") == (4, 0)
    cache.evict(1, 3)
    match = cache.match("abcd")
    cache.tree.promote(match.receipt, cache.pool.acquire(1), 4)
    assert cache.tree.withdraw(4) == ((match.receipt, 0),)
    assert cache.tree.num_pages == cache.tree.num_pages_in(1) == 0
    cache.check()


def test_cutting_a_path_shortens_every_receipt_behind_the_cut(cache: Cache) -> None:
    first, _ = cache.start("abcdefghijkl")
    second, _ = cache.start("abcdefghpqrs")
    other, _ = cache.start("abcdvwxy")
    assert cache.tree.cut(first, 3) == ()
    assert cache.tree.cut(first, 1) == ((first, 1), (second, 1))
    assert cache.cached("abcdefgh") == (4, 0)
    assert cache.cached("abcdvwxy") == (8, 0)
    assert cache.tree.num_exclusive(other) == 1
    cache.check()


# Bad arguments.


def test_a_released_receipt_is_refused_and_named(cache: Cache) -> None:
    receipt = cache.match("abcd").receipt
    cache.tree.release(receipt)
    with pytest.raises(InvariantError, match="release: receipt 0 is not live"):
        cache.tree.release(receipt)
    with pytest.raises(InvariantError, match="fork: receipt -1 is not live"):
        cache.tree.fork(NO_RECEIPT)


@pytest.mark.parametrize(
    ("text", "pages", "message"),
    [
        ("abcde", [4], "insert: 5 tokens don't fill 1 pages of 4"),
        ("abcd", [], "insert: 4 tokens don't fill 0 pages of 4"),
        ("abcd", [16], "insert: page 16 is not of the pool"),
        ("abcd", [-1], "insert: page -1 is not of the pool"),
        ("abcdefgh", [4, 15], "insert: page 15 is not held"),
        ("abcdefgh", [4, 4], "insert: page 4 is in the tree already, or named twice"),
        ("abcdefgh", [4, 0], "insert: page 0 is in the tree already, or named twice"),
    ],
)
def test_pages_that_cannot_be_published_are_refused_and_nothing_is(
    cache: Cache, text: str, pages: list[int], message: str
) -> None:
    cache.serve("pqrsqrst")
    receipt, _ = cache.start("wxyz")
    cache.pool.acquire(4)
    before = cache.tree.walk()
    with pytest.raises(InvariantError, match=message):
        cache.tree.insert(receipt, ids(text), int32(*pages), 0)
    assert cache.tree.walk() == before
    assert cache.pool.ref_counts().tolist() == [1, 1, 2, 1, 1, 1, 1] + [0] * 9
    cache.check()


def test_a_duplicate_that_nobody_holds_is_refused(cache: Cache) -> None:
    pages = cache.serve("abcdefgh")
    match = cache.match("")
    for page, message in ((9, "not held"), (16, "not of the pool"), (-1, "not of the pool")):
        with pytest.raises(InvariantError, match=f"insert: page {page} is {message}"):
            cache.tree.insert(match.receipt, ids("abcdefgh"), int32(pages[0], page), 0)
    assert cache.tree.num_locked == 0
    assert cache.tree.insert(match.receipt, ids("abcdefgh"), int32(*pages), 0) == 0


def test_a_step_that_is_done_copies_nothing() -> None:
    cache = Cache(host=4)
    cache.serve("abcdefgh")
    cache.evict(1, 5)
    with pytest.raises(InvariantError, match="evict: step must be after the last that is done, 5"):
        cache.tree.evict(1, 5)
    match = cache.match("abcdefgh")
    page = cache.pool.acquire(1)
    with pytest.raises(InvariantError, match=r"promote: step must be after .* is done, 5, got 4"):
        cache.tree.promote(match.receipt, page, 4)
    assert cache.cached("abcdefgh") == (4, 4)
    cache.check()


def test_pages_that_somebody_else_holds_on_the_host_are_not_dropped_in_vain() -> None:
    cache = Cache(host=3)
    for text in ("aaaa", "bbbb", "cccc", "dddd"):
        cache.serve(text)
    assert cache.host is not None
    for _ in range(3):
        cache.host.retain(cache.evict(1).target_ids)
    assert cache.tree.evict(1, 9).count == 1
    assert [cache.cached(x * 4) for x in "abcd"] == [(0, 0), (0, 4), (0, 4), (0, 0)]


# Three tiers.


def test_pages_go_to_the_next_tier_and_from_there_to_the_one_behind_it() -> None:
    pools = PagePool(4, PAGE_SIZE), PagePool(2, PAGE_SIZE), PagePool(4, PAGE_SIZE)
    tree = PrefixTree(*pools)

    def evict(count: int, step: int) -> Evicted:
        evicted = tree.evict(count, step)
        tree.sanity_check()
        for pool in pools:
            pool.sanity_check()
            pool.complete(step)
        return evicted

    match = tree.match(b"", ids("aaaabbbbccccdddd"))
    pages = pools[0].acquire(4)
    tree.insert(match.receipt, ids("aaaabbbbccccdddd"), pages, NO_STEP)
    tree.release(match.receipt)
    pools[0].release(pages, NO_STEP)

    first = evict(2, 1)
    assert first.tiers.tolist() == [0, 0]
    assert first.page_ids.tolist() == pages[2:].tolist()
    assert tree.peek(b"", ids("aaaabbbbccccdddd")) == (8, 8, 0)

    second = evict(1, 2)
    assert second.count == 1
    assert second.tiers.tolist() == [1, 0], "the last page makes room before the copy to its place"
    assert second.page_ids.tolist() == [first.target_ids[1], pages[1]]
    assert second.target_ids[1] == first.target_ids[1]
    assert tree.peek(b"", ids("aaaabbbbccccdddd")) == (4, 8, 4)

    found = tree.match(b"", ids("aaaabbbbccccdddd"))
    assert [page_ids.tolist() for page_ids in found.tiers] == [
        [pages[0]],
        [first.target_ids[1], first.target_ids[0]],
        [second.target_ids[0]],
    ]
    tree.promote(found.receipt, pools[0].acquire(3), 3)
    tree.sanity_check()
    for pool in pools:
        pool.complete(3)
    assert tree.peek(b"", ids("aaaabbbbccccdddd")) == (16, 0, 0)
    assert [pool.num_held for pool in pools] == [4, 0, 0]


def test_a_page_that_was_moved_in_a_step_is_not_moved_again_in_it() -> None:
    pools = PagePool(4, PAGE_SIZE), PagePool(1, PAGE_SIZE), PagePool(4, PAGE_SIZE)
    tree = PrefixTree(*pools)
    match = tree.match(b"", ids("aaaabbbb"))
    pages = pools[0].acquire(2)
    tree.insert(match.receipt, ids("aaaabbbb"), pages, NO_STEP)
    tree.release(match.receipt)
    pools[0].release(pages, NO_STEP)
    evicted = tree.evict(2, 0)
    assert (evicted.tiers.tolist(), evicted.page_ids.tolist()) == ([0], [pages[0]])
    assert tree.peek(b"", ids("aaaabbbb"), whole=True) == (0, 0, 0), "its copy isn't made yet"
    tree.sanity_check()
    assert tree.num_pages_in(1) == 1
    assert tree.num_pages_in(2) == 0


# Group pages.


class Windowed:
    """A tree whose pages have one group page each, in steps that are done. No requests are
    served."""

    def __init__(self, num_host_pages: int) -> None:
        self.pool = PagePool(16, PAGE_SIZE, 1)
        self.host = PagePool(num_host_pages, PAGE_SIZE, 1)
        self.tree = PrefixTree(self.pool, self.host, needed_tokens=PAGE_SIZE)

    def publish(self, text: str, num_windows: int) -> None:
        """Publish `text`, with group pages for its last `num_windows` pages."""
        match = self.tree.match(b"", ids(text))
        pages = self.pool.acquire(len(text) // PAGE_SIZE)
        windows = self.pool.acquire(num_windows)
        given = windows if num_windows else None
        self.tree.insert(match.receipt, ids(text), pages, NO_STEP, given)
        self.tree.release(match.receipt)
        self.pool.release(np.concatenate((pages, windows)), NO_STEP)

    def complete(self, step: int) -> None:
        self.pool.complete(step)
        self.host.complete(step)

    def on_host(self, text: str) -> int:
        return self.tree.peek(b"", ids(text), whole=True)[1]


def test_idle_group_pages_of_a_locked_run_on_the_host_make_room_there() -> None:
    cache = Windowed(5)
    cache.publish("aaaabbbb", 2)
    cache.tree.evict(4, 0)
    cache.publish("cccc", 0)
    cache.tree.evict(1, 0)
    cache.publish("dddd", 1)
    cache.complete(0)
    assert [cache.on_host(text) for text in ("aaaabbbb", "cccc")] == [8, 4]
    assert cache.host.num_free == 0
    locked = cache.tree.match(b"", ids("aaaabbbb"), use=False, whole=True)

    evicted = cache.tree.evict(2, 1)

    cache.complete(1)
    assert len(evicted.target_ids) == 2
    assert [cache.on_host(text) for text in ("aaaabbbb", "cccc", "dddd")] == [8, 4, 4]
    cache.tree.release(locked.receipt)
    cache.tree.sanity_check()
    cache.host.sanity_check()


def test_a_page_goes_to_the_host_though_the_larger_one_behind_it_had_no_room_there() -> None:
    cache = Windowed(1)
    cache.publish("aaaabbbb", 1)
    evicted = cache.tree.evict(3, 0)
    cache.complete(0)
    assert (evicted.count, len(evicted.target_ids)) == (3, 1)
    assert cache.on_host("aaaabbbb") == 4
    cache.tree.sanity_check()


@pytest.mark.parametrize(
    ("text", "group_page", "message"),
    [
        ("bbbb", 1, "insert: page 1 is named twice"),
        ("bbbb", 15, "insert: page 15 is not held"),
        ("bbbb", 0, "insert: group page 0 is in the tree already"),
        ("aaaa", 1, "insert: page 1 is named twice"),
        ("aaaa", 15, "insert: page 15 is not held"),
    ],
)
def test_group_pages_that_the_tree_cannot_take_are_refused_and_nothing_is_published(
    text: str, group_page: int, message: str
) -> None:
    cache = Windowed(1)
    cache.publish("aaaa", 0)
    match = cache.tree.match(b"", ids(""))
    page = cache.pool.acquire(1)
    before = cache.tree.walk(), cache.pool.ref_counts().tolist()
    with pytest.raises(InvariantError, match=message):
        cache.tree.insert(match.receipt, ids(text), page, 0, int32(group_page))
    assert (cache.tree.walk(), cache.pool.ref_counts().tolist()) == before
    cache.tree.sanity_check()


def test_an_array_with_too_little_room_for_a_match_is_refused(cache: Cache) -> None:
    cache.serve("abcdefgh")
    with pytest.raises(ValueError, match="out must have room for 2 pages, got 1"):
        cache.tree._native.match(b"", ids("abcdefghi"), False, True, False, int32(0))
    assert cache.tree.num_receipts == 0


def test_a_promotion_takes_exactly_the_pages_on_the_host() -> None:
    cache = Cache(host=4)
    cache.serve("abcdefgh")
    cache.evict(1)
    match = cache.match("abcdefgh")
    pages = cache.pool.acquire(2)
    message = "promote: receipt 1 covers 1 pages in later tiers, got 2"
    with pytest.raises(InvariantError, match=message):
        cache.tree.promote(match.receipt, pages, 1)
    with pytest.raises(InvariantError, match="promote: page 9 is not held"):
        cache.tree.promote(match.receipt, int32(9), 1)
    assert cache.cached("abcdefgh") == (4, 4)
    cache.check()


def test_arrays_of_another_type_shape_or_order_are_refused(cache: Cache) -> None:
    receipt, _ = cache.start("abcd")
    page = cache.pool.acquire(1)
    message = "must be a one-dimensional int32 array"
    with pytest.raises(TypeError, match=f"token_ids {message}"):
        cache.tree.match(b"", np.zeros(4, np.int64))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=f"token_ids {message}"):
        cache.tree.peek(b"", np.zeros((2, 4), np.int32))
    with pytest.raises(TypeError, match=f"page_ids {message}"):
        cache.tree.insert(receipt, ids("efgh"), np.zeros(1, np.float32), 0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="token_ids must be contiguous"):
        cache.tree.insert(receipt, ids("eefgh")[::-1][::2], page, 0)
    with pytest.raises(TypeError):
        cache.tree.match("", ids("abcd"))  # pyright: ignore[reportArgumentType]
    assert cache.tree.num_receipts == 1
    cache.check()


def test_counts_below_zero_are_refused(cache: Cache) -> None:
    receipt, _ = cache.start("abcd")
    with pytest.raises(ValueError, match="count must be at least 0, got -1"):
        cache.tree.evict(-1, 0)
    with pytest.raises(ValueError, match="count must be at least 0, got -1"):
        cache.tree.frees_at_once(-1)
    with pytest.raises(ValueError, match="count must be at least 0, got -2"):
        Cache(host=4).tree.evict(-2, 0, 1)
    with pytest.raises(ValueError, match=r"tier must be in \[0, 1\), got 1"):
        cache.tree.evict(1, 0, 1)
    with pytest.raises(ValueError, match="num_pages must be at least 0, got -1"):
        cache.tree.cut(receipt, -1)


def test_pools_and_strategies_that_do_not_fit_are_refused() -> None:
    pool = PagePool(4, 4)
    with pytest.raises(ValueError, match="strategy must be lru, lfu, fifo or slru, got mru"):
        PrefixTree(pool, strategy="mru")
    with pytest.raises(ValueError, match="pools must have pages of 4 tokens like the first, got 2"):
        PrefixTree(pool, PagePool(4, 2))
    with pytest.raises(ValueError, match="pools must differ from each other"):
        PrefixTree(pool, pool)
    with pytest.raises(ValueError, match="pools must be 1 to 4, got 5"):
        PrefixTree(pool, *[PagePool(4, 4) for _ in range(4)])
    with pytest.raises(ValueError, match="needed_tokens must be at least 1, got 0"):
        PrefixTree(pool, needed_tokens=0)


def test_an_empty_tree_answers_everything(cache: Cache) -> None:
    assert cache.cached("abcd") == (0, 0)
    assert cache.tree.evict(3, 0).count == 0
    assert cache.tree.withdraw(0) == ()
    cache.tree.clear()
    cache.check()
    assert repr(cache.tree) == ("PrefixTree(pages=[0], evictable=0, nodes=0, receipts=0)")
