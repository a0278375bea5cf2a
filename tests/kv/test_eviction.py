"""Eviction strategies written in Python: asked once a run, and harmless when they fail."""

from __future__ import annotations

import logging
import re
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aioserve.kv.eviction import PageUse
from aioserve.kv.page_pool import NO_STEP, PagePool
from aioserve.kv.prefix_tree import PrefixTree
from tests.plugin_system.hostile import ERRORS, TOUCHES, contained, hostile


class Strategy:
    """Notes what it was asked."""

    def __init__(self, answer: Callable[[PageUse], Any]) -> None:
        self.answer = answer
        self.asked: list[PageUse] = []

    def key(self, use: PageUse) -> float:
        self.asked.append(use)
        return self.answer(use)


class Cache:
    """A tree with one page for each token, and prompts of one family for each letter."""

    def __init__(self, strategy: Strategy | str, num_pages: int = 64, host: int | None = None):
        self.pool = PagePool(num_pages, 1)
        self.host = None if host is None else PagePool(host, 1)
        pools = [pool for pool in (self.pool, self.host) if pool is not None]
        self.tree = PrefixTree(*pools, strategy=strategy)

    def serve(self, text: str) -> None:
        """Serve a request for `text` from start to end."""
        ids = np.array([ord(letter) for letter in text], np.int32)
        match = self.tree.match(b"", ids)
        self.pool.retain(match.page_ids)
        new = self.pool.acquire(len(ids) - len(match.page_ids))
        self.tree.insert(match.receipt, ids[len(match.page_ids) :], new, NO_STEP)
        self.tree.release(match.receipt)
        self.pool.release(np.concatenate([match.page_ids, new]), NO_STEP)
        self.tree.sanity_check()

    def evicted(self, names: str) -> str:
        """First letters of `names` in the order of their eviction, a page at a time."""
        gone = ""
        while self.tree.evict(1, self.pool.done_step + 1).count:
            self.tree.sanity_check()
            for name in names:
                ids = np.array([ord(name)], np.int32)
                if name not in gone and not sum(self.tree.peek(b"", ids)):
                    gone += name
        return gone


@pytest.mark.parametrize(
    ("score", "order"),
    [
        (lambda use: use.last_used_tick, "bca"),
        (lambda use: -use.last_used_tick, "acb"),
        (lambda use: use.hits, "bca"),
        (lambda use: -use.hits, "abc"),
        (lambda use: use.created_tick, "abc"),
        (lambda use: 0, "bca"),
        (lambda use: -0.0 if use.hits else 0.0, "bca"),
        (lambda use: float("-inf") if use.hits else float("inf"), "abc"),
        (lambda use: -1.5 if use.hits else -1e300, "bca"),
        (lambda use: np.float32(-use.hits), "abc"),
        (lambda use: 2**62 + use.hits, "bca"),
    ],
)
def test_the_smallest_key_goes_first_and_of_equal_ones_the_least_recent(score, order) -> None:
    cache = Cache(Strategy(score))
    for name in "abca":
        cache.serve(name)
    assert cache.evicted("abc") == order


def test_a_strategy_is_asked_once_for_each_run_that_becomes_evictable() -> None:
    strategy = Strategy(lambda use: use.last_used_tick)
    cache = Cache(strategy, num_pages=256)
    ids = np.arange(200, dtype=np.int32)
    match = cache.tree.match(b"", ids)
    for start in range(0, 200, 4):
        pages = cache.pool.acquire(4)
        cache.tree.insert(match.receipt, ids[start : start + 4], pages, NO_STEP)
        cache.pool.release(pages, NO_STEP)
    assert strategy.asked == []
    cache.tree.release(match.receipt)
    assert len(strategy.asked) == 1
    cache.tree.sanity_check()
    assert cache.tree.evict(150, 0).count == 150
    assert len(strategy.asked) == 1


def raising(error: BaseException) -> Callable[[PageUse], Any]:
    def answer(use: PageUse) -> Any:
        raise error

    return answer


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (raising(ZeroDivisionError("planted")), r"raised ZeroDivisionError\('planted'\)"),
        (raising(SystemExit(3)), r"raised SystemExit\(3\)"),
        (raising(GeneratorExit()), r"raised GeneratorExit\(\)"),
        (lambda use: None, "answered None, not a number"),
        (lambda use: "7", "answered '7', not a number"),
        (lambda use: float("nan"), "answered nan, not a number"),
        (lambda use: (1, 2), r"answered \(1, 2\), not a number"),
        (lambda use: 1j, "answered 1j, not a number"),
        (lambda use: 10**400, "raised OverflowError"),
        (lambda use: use.size, "raised AttributeE"),
        (lambda use: setattr(use, "hits", 9), "raised AttributeE"),
    ],
)
@pytest.mark.parametrize("host", [None, 2])
def test_a_strategy_that_fails_is_logged_once_and_the_order_is_lru_for_good(
    answer, what, host, caplog
) -> None:
    calls = 0

    def most_recent_first_and_then(use: PageUse) -> Any:
        nonlocal calls
        calls += 1
        return -use.last_used_tick if calls <= 3 else answer(use)

    strategy = Strategy(most_recent_first_and_then)
    cache = Cache(strategy, host=host)
    for name in "abc":
        cache.serve(name)
    with caplog.at_level(logging.ERROR):
        for name in "debf":
            cache.serve(name)
        assert cache.evicted("abcdef") == "acdebf"
    (record,) = caplog.records
    assert calls == 4
    assert re.match(f"eviction strategy Strategy: key {what}", record.getMessage())


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("touches", [["__class__"], ["__float__"], ["__repr__"], TOUCHES])
@pytest.mark.parametrize("base", [object, Exception])
@contained
def test_a_key_or_an_exception_that_raises_when_it_is_looked_at_is_a_failure(
    base, touches, error
) -> None:
    key = hostile(touches, error, base=base)
    strategy = Strategy(raising(key) if base is Exception else lambda use: key)
    cache = Cache(strategy)
    for name in "aba":
        cache.serve(name)
    assert cache.evicted("ab") == "ba"
    assert len(strategy.asked) == 1


def test_a_strategy_may_fail_in_the_middle_of_an_eviction() -> None:
    strategy = Strategy(lambda use: 1 // (len(strategy.asked) < 3) and -use.last_used_tick)
    cache = Cache(strategy)
    cache.serve("ab")
    cache.serve("ac")  # the first page becomes a leaf when both are gone
    assert cache.tree.evict(3, 0).count == 3
    assert len(strategy.asked) == 3
    cache.tree.sanity_check()
    cache.pool.complete(0)
    assert cache.pool.num_free == 64


def test_ctrl_c_in_a_strategy_comes_after_the_operation(caplog) -> None:
    """Holds only on the main thread, where Python runs signal handlers."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals are handled on the main thread")

    def answer(use: PageUse) -> float:
        signal.raise_signal(signal.SIGINT)
        return 0.0

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        cache = Cache(Strategy(answer))
        match = cache.tree.match(b"", np.array([1, 2], np.int32))
        pages = cache.pool.acquire(2)
        cache.tree.insert(match.receipt, np.array([1, 2], np.int32), pages, NO_STEP)
        cache.pool.release(pages, NO_STEP)
        with pytest.raises(KeyboardInterrupt):
            cache.tree.release(match.receipt)
    finally:
        signal.signal(signal.SIGINT, before)
    cache.tree.sanity_check()
    assert (cache.tree.num_receipts, cache.tree.num_evictable) == (0, 2)
    assert [record.getMessage() for record in caplog.records] == [
        "eviction strategy Strategy: key was interrupted; least recently used decides from now on "
        "(fault 1)"
    ]
