"""Traps that other engines' page pools fell into, one example each."""

from __future__ import annotations

import numpy as np
import pytest

from aioserve.errors import InvariantError
from aioserve.kv.page_pool import NO_STEP, OutOfPagesError, PagePool, PageState


@pytest.fixture
def pool() -> PagePool:
    return PagePool(num_pages=4, page_size=16)


def test_a_new_pool_hands_out_its_pages_from_the_lowest(pool: PagePool) -> None:
    assert pool.acquire(3).tolist() == [0, 1, 2]
    assert (pool.num_free, pool.num_fenced, pool.num_held) == (1, 0, 3)


def test_a_second_release_of_a_page_is_refused_and_names_it(pool: PagePool) -> None:
    pages = pool.acquire(2)
    pool.release(pages, NO_STEP)
    with pytest.raises(InvariantError, match="release: page 0 is not held, it is free"):
        pool.release(pages, NO_STEP)
    pool.sanity_check()
    assert pool.num_free == 4


def test_a_release_while_fenced_is_refused_and_names_the_step(pool: PagePool) -> None:
    pages = pool.acquire(1)
    pool.release(pages, last_step=3)
    with pytest.raises(InvariantError, match="page 0 is not held, it is fenced until step 3"):
        pool.release(pages, last_step=3)
    pool.sanity_check()
    assert pool.num_fenced == 1


def test_a_page_named_twice_in_one_release_needs_two_references(pool: PagePool) -> None:
    (page,) = pool.acquire(1)
    twice = np.array([page, page], np.int32)
    with pytest.raises(InvariantError, match="page 0 is named more often in one call than"):
        pool.release(twice, NO_STEP)
    assert pool.ref_count(page) == 1
    pool.retain(np.array([page], np.int32))
    pool.release(twice, NO_STEP)
    assert pool.state(page) is PageState.FREE
    pool.sanity_check()


def test_a_failed_release_gives_none_of_its_pages_back(pool: PagePool) -> None:
    pages = pool.acquire(2)
    with pytest.raises(
        InvariantError, match=r"page 4 is not of this pool, whose pages are \[0, 4\)"
    ):
        pool.release(np.array([*pages, 4], np.int32), NO_STEP)
    assert pool.ref_counts().tolist() == [1, 1, 0, 0]
    pool.sanity_check()


def test_a_page_is_not_handed_out_while_a_step_in_flight_may_touch_it(pool: PagePool) -> None:
    pool.complete(6)
    pages = pool.acquire(4)
    pool.release(pages, last_step=8)
    pool.complete(7)
    with pytest.raises(OutOfPagesError, match=r"1 pages requested, 0 free \(4 more are fenced\)"):
        pool.acquire(1)
    pool.complete(8)
    assert sorted(pool.acquire(4)) == sorted(pages)


def test_a_shared_page_waits_for_the_latest_step_of_any_holder(pool: PagePool) -> None:
    pages = pool.acquire(1)
    pool.retain(pages)
    pool.release(pages, last_step=5)  # this holder's step 5 is in flight
    pool.release(pages, last_step=2)  # the other let go last, but its step is older
    pool.complete(2)
    assert pool.state(pages[0]) is PageState.FENCED
    pool.complete(5)
    assert pool.state(pages[0]) is PageState.FREE


def test_a_page_forgets_the_steps_of_its_former_life(pool: PagePool) -> None:
    pages = pool.acquire(1)
    pool.release(pages, last_step=5)
    pool.complete(5)
    again = pool.acquire(1)
    assert again.tolist() == pages.tolist()
    pool.release(again, NO_STEP)
    assert pool.state(pages[0]) is PageState.FREE


def test_the_page_freed_last_is_reused_first(pool: PagePool) -> None:
    first, second = pool.acquire(2), pool.acquire(1)
    pool.release(first, NO_STEP)
    pool.release(second, NO_STEP)
    assert pool.acquire(3).tolist() == [*second, *first]


def test_an_acquire_that_does_not_fit_takes_nothing(pool: PagePool) -> None:
    with pytest.raises(OutOfPagesError) as caught:
        pool.acquire(5)
    assert (caught.value.requested, caught.value.free, caught.value.fenced) == (5, 4, 0)
    assert pool.num_free == 4


def test_a_step_is_not_done_after_a_later_one(pool: PagePool) -> None:
    pool.complete(3)
    pool.complete(3)
    with pytest.raises(InvariantError, match="complete: step 2 comes after step 3 was done"):
        pool.complete(2)
    assert pool.done_step == 3


@pytest.mark.parametrize("page", [-1, 4, 2**31])
def test_questions_about_a_foreign_page_are_refused(pool: PagePool, page: int) -> None:
    with pytest.raises(InvariantError, match=f"page {page} is not of this pool"):
        pool.ref_count(page)
    with pytest.raises(InvariantError, match=f"page {page} is not of this pool"):
        pool.state(page)


@pytest.mark.parametrize(
    ("num_pages", "page_size", "message"),
    [(-1, 16, "num_pages must be"), (2**31, 16, "num_pages must be"), (4, 0, "page_size must be")],
)
def test_sizes_outside_their_range_are_refused(
    num_pages: int, page_size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PagePool(num_pages, page_size)


@pytest.mark.parametrize(
    "pages",
    [
        np.zeros(2, np.int64),
        np.zeros(2, np.float32),
        np.zeros(2, np.uint32),
        np.zeros((2, 2), "i4"),
    ],
)
def test_pages_of_another_type_or_shape_are_refused(pool: PagePool, pages: np.ndarray) -> None:
    pool.acquire(1)
    with pytest.raises(TypeError, match="pages must be a one-dimensional int32 array"):
        pool.release(pages, NO_STEP)
    assert pool.num_held == 1


def test_an_empty_pool_and_empty_calls_are_fine() -> None:
    pool = PagePool(0, 1)
    nothing = pool.acquire(0)
    pool.retain(nothing)
    pool.release(nothing, last_step=9)
    pool.sanity_check()
    assert repr(pool) == (
        "PagePool(num_pages=0, page_size=1, free=0, fenced=0, held=0, done_step=-1)"
    )


def test_unshared_pages_are_those_with_one_reference():
    pool = PagePool(4, 16)
    pages = pool.acquire(3)
    pool.retain(pages[1:2])

    assert pool.num_unshared(pages) == 2
    with pytest.raises(InvariantError, match="page 9 is not of this pool"):
        pool.num_unshared(np.array([9], np.int32))
