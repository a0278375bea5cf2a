"""Mistakes of the books' printed code, and that ours doesn't make them.

Each stands in a small model of the printed code, and the same question is put to ours."""

from __future__ import annotations

import numpy as np
import pytest

from aioserve.kv.page_pool import PagePool
from aioserve.kv.prefix_tree import PrefixTree
from aioserve.testing import expected_tokens
from tests.books.printed import PrintedBatcher, PrintedCache, PrintedPool, PrintedRotation
from tests.books.served import serve

PAGE_SIZE = 16


def test_a_page_holds_sixteen_tokens_for_the_tree_as_for_the_pool() -> None:
    """The printed tree wants a page per token, and the pool gives one per 16."""
    prompt = list(range(48))
    pool = PrintedPool(64, PAGE_SIZE)
    with pytest.raises(ValueError, match="a page for each token"):
        PrintedCache(pool).insert(prompt, pool.allocate(len(prompt)))

    ours = PagePool(64, PAGE_SIZE)
    tree = PrefixTree(ours)
    ids = np.array(prompt, np.int32)
    match = tree.match(b"", ids)
    pages = ours.acquire(3)
    assert tree.insert(match.receipt, ids, pages, 0) == 3
    tree.release(match.receipt)
    ours.release(pages, 0)
    ours.complete(0)
    assert tree.peek(b"", ids) == (48,)
    tree.sanity_check()


def test_no_page_is_free_that_the_tree_names() -> None:
    """The printed engine frees a request's pages when it ends, and the tree goes on naming them."""
    first, other = [1, 2, 3, 4], [5, 6, 7, 8]
    pool = PrintedPool(8, 1)
    cache = PrintedCache(pool)
    pages = pool.allocate(len(first))
    cache.insert(first, pages)
    pool.free(pages)
    assert set(cache.pages(first)) <= pool.free_pages
    assert cache.pages(first) == pool.allocate(len(other))  # given away, and found in the tree

    prompts = [first, other, first]
    served = serve(prompts, 3, later={1: 1.0, 2: 2.0}, num_pages=24, page_size=1)
    assert served.tokens == [
        tuple(expected_tokens(prompt, 3, number)) for number, prompt in enumerate(prompts)
    ]
    last = served.stats[-1]
    assert last.pages_cached > 0
    assert last.pages_free + last.pages_cached == last.pages_total
    assert served.usages[2].cached_tokens == len(first) - 1


def test_a_token_is_drawn_behind_the_last_chunk_alone() -> None:
    """The printed loop draws one behind each chunk: four tokens of a prompt that isn't read."""
    printed = PrintedBatcher(1000, 256)
    for _ in range(3):
        printed.step()
    assert printed.left > 0
    assert printed.drawn == 3

    prompt = [number % 200 for number in range(1000)]
    served = serve([prompt], 2, max_num_batched_tokens=256)
    assert [sum(counts.values()) for counts in served.counts] == [256, 256, 256, 232, 1]
    assert [len(plan.items[0].rows) for plan in served.plans] == [0, 0, 0, 1, 1]
    assert served.tokens == [tuple(expected_tokens(prompt, 2))]


def test_what_is_evicted_is_found_no_more() -> None:
    """The printed eviction empties nodes and leaves them in the tree, where they match."""
    prompt = list(range(32))
    pool = PrintedPool(64, 1)
    cache = PrintedCache(pool)
    cache.insert(prompt, pool.allocate(len(prompt)))
    cache.evict(len(prompt))
    assert cache.match(prompt) == len(prompt)
    assert cache.pages(prompt) == [None] * len(prompt)

    ours = PagePool(64, 1)
    tree = PrefixTree(ours)
    ids = np.array(prompt, np.int32)
    match = tree.match(b"", ids)
    pages = ours.acquire(len(ids))
    tree.insert(match.receipt, ids, pages, 0)
    tree.release(match.receipt)
    ours.release(pages, 0)
    ours.complete(0)
    assert tree.peek(b"", ids) == (32,)
    assert tree.evict(20, 1).count == 20
    assert tree.peek(b"", ids) == (12,)
    assert tree.evict(20, 1).count == 12
    assert tree.peek(b"", ids) == (0,)
    assert tree.num_nodes <= 1
    tree.sanity_check()


@pytest.mark.parametrize(
    ("policy", "first_step"),
    [("round_robin:chunk_size=256", {0: 256, 1: 256}), ("fcfs", {0: 512})],
)
def test_chunks_in_turn_keep_to_the_budget(policy: str, first_step: dict[int, int]) -> None:
    """The printed rotation chooses 512 tokens within 512, and its batch has 788."""
    prompts, budget = (1000, 300, 300), 512
    assert PrintedRotation(prompts, 256, budget).step() == 788

    served = serve(
        [[number] * count for number, count in enumerate(prompts)],
        2,
        max_num_batched_tokens=budget,
        policy=policy,
        prefix_caching=False,
    )
    assert all(sum(counts.values()) <= budget for counts in served.counts)
    assert served.counts[0] == first_step
    assert served.stats[-1].policy_faults_total == 0
    for number, count in enumerate(prompts):
        computed = sum(counts.get(number, 0) for counts in served.counts)
        assert computed == count + 1
