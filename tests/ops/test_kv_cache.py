"""Page copies within a cache and between two: only the requested ones, in order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aioserve import _native
from aioserve.ops import Backend, KVCache
from tests.ops.contents import contents, fill
from tests.ops.scenarios import BACKENDS, DTYPES, NATIVE, allocate

Copies = list[tuple[int, int, int, int, int]]


def numbered(
    num_pages: int,
    page_size: int,
    *,
    start: int = 0,
    heads: int = 2,
    backend: Backend = NATIVE,
    dtype: torch.dtype = torch.float32,
) -> KVCache:
    """Allocate a cache of two layers with different bits in every number."""
    cache = allocate(backend, 2, num_pages, page_size, heads, 3, dtype)
    plain = contents(cache)
    numbers = torch.arange(start, start + plain.numel()).view_as(plain)
    bits = numbers.short().view(dtype) if dtype is torch.bfloat16 else numbers.to(dtype)
    fill(cache, bits)
    return cache


def bits_of(cache: KVCache) -> torch.Tensor:
    """Return the contents as integers, so that NaNs can be compared."""
    plain = contents(cache)
    return plain.view(torch.int32 if plain.dtype is torch.float32 else torch.int16)


def rows(copies: Copies) -> npt.NDArray[np.int32]:
    return np.array(copies, np.int32).reshape(-1, 5)


@st.composite
def lists_of_copies(draw: st.DrawFn) -> tuple[int, list[int], Copies]:
    """Draw a page size, pages of each cache, and copies. Few pages make copies overlap."""
    page_size = draw(st.sampled_from([1, 2, 3, 5, 16]))
    pages = [draw(st.integers(1, 4)) for _ in range(draw(st.integers(1, 2)))]
    one_end = st.integers(0, len(pages) - 1).flatmap(
        lambda cache: st.tuples(st.just(cache), st.integers(0, pages[cache] - 1))
    )
    copy = st.builds(
        lambda source, target, tokens: (*source, *target, tokens),
        one_end,
        one_end,
        st.integers(1, page_size),
    )
    return page_size, pages, draw(st.lists(copy, max_size=12))


def copied_by_hand(caches: list[KVCache], copies: Copies) -> list[torch.Tensor]:
    """Return the contents after the copies, done one token at a time."""
    after = [bits_of(cache) for cache in caches]
    for source_cache, source, target_cache, target, tokens in copies:
        for token in range(tokens):
            moved = after[source_cache][:, :, source, :, token].clone()
            after[target_cache][:, :, target, :, token] = moved
    return after


@given(lists_of_copies())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_copies_are_done_one_after_the_other(backend, dtype, drawn):
    page_size, pages, copies = drawn
    caches = [
        numbered(count, page_size, start=10_000 * i, backend=backend, dtype=dtype)
        for i, count in enumerate(pages)
    ]
    expected = copied_by_hand(caches, copies)

    backend.copy_pages(caches, rows(copies))

    for cache, storage in zip(caches, expected, strict=True):
        assert torch.equal(bits_of(cache), storage)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_large_pages_are_copied_in_order_by_any_number_of_threads(threads, dtype, num_threads):
    """Each page moves on by one, the last page first, and every third is copied in part."""
    _native.set_num_threads(num_threads)
    cache = allocate(NATIVE, 4, 100, 16, 2, 64, dtype)
    cache.storage.normal_()
    copies = [(0, page, 0, page + 1, 16 if page % 3 else 5) for page in reversed(range(99))]
    expected = copied_by_hand([cache], copies)

    NATIVE.copy_pages([cache], rows(copies))

    assert torch.equal(bits_of(cache), expected[0])


@pytest.mark.parametrize("page_size", [1, 2, 5, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [1, 3, 8])
def test_a_cache_gives_back_what_it_was_given_and_has_a_place_for_each_number(
    dtype, page_size, dim
):
    cache = allocate(NATIVE, 2, 3, page_size, 2, dim, dtype)
    shape = (2, 2, 3, 2, page_size, dim)
    given = torch.arange(1, 1 + torch.Size(shape).numel()).view(shape)
    given = given.short().view(dtype) if dtype is torch.bfloat16 else given.to(dtype)
    cache.storage.fill_(float("nan"))
    fill(cache, given)
    got = contents(cache)
    assert got.shape == shape
    assert got.dtype is dtype
    bits = torch.int16 if dtype is torch.bfloat16 else torch.int32
    assert torch.equal(got.view(bits), given.view(bits))
    assert set(given.view(bits).flatten().tolist()) <= set(
        cache.storage.view(bits).flatten().tolist()
    )


def test_bits_that_are_no_numbers_survive():
    cache = allocate(NATIVE, 1, 2, 1, 1, 2, torch.float32)
    bits = cache.storage.view(torch.int32)
    bits[0] = torch.tensor([0x7FC0_0001, -1], dtype=torch.int32)
    NATIVE.copy_pages([cache], rows([(0, 0, 0, 1, 1)]))
    assert torch.equal(bits[1], bits[0])


@pytest.mark.parametrize(
    ("copy", "message"),
    [
        ((0, 5, 0, 0, 1), r"copies\[1\] has source page 5 of 5"),
        ((0, -1, 0, 0, 1), r"copies\[1\] has source page -1 of 5"),
        ((0, 0, 1, 3, 1), r"copies\[1\] has target page 3 of 3"),
        ((1, 0, 0, -1, 1), r"copies\[1\] has target page -1 of 5"),
        ((2, 0, 0, 0, 1), r"copies\[1\] has source cache 2 of 2"),
        ((0, 0, -1, 0, 1), r"copies\[1\] has target cache -1 of 2"),
        ((0, 0, 0, 1, 0), r"copies\[1\] has 0 tokens; a page holds 1 to 4"),
        ((0, 0, 0, 1, 5), r"copies\[1\] has 5 tokens; a page holds 1 to 4"),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_a_copy_that_is_impossible_is_refused_before_any_is_done(backend, copy, message):
    caches = [numbered(5, 4, backend=backend), numbered(3, 4, backend=backend)]
    before = [bits_of(cache) for cache in caches]
    with pytest.raises(ValueError, match=message):
        backend.copy_pages(caches, rows([(0, 0, 1, 0, 4), copy]))
    assert all(torch.equal(bits_of(c), b) for c, b in zip(caches, before, strict=True))


def test_caches_and_tables_that_do_not_fit_are_refused_by_name():
    cache, one = numbered(5, 4), rows([(0, 0, 0, 1, 1)])
    with pytest.raises(ValueError, match=r"caches\[1\] must be like caches\[0\]"):
        NATIVE.copy_pages([cache, numbered(5, 4, heads=3)], one)
    other = allocate(NATIVE, 2, 5, 4, 2, 3, torch.bfloat16)
    with pytest.raises(ValueError, match=r"caches\[1\] must be like caches\[0\]"):
        NATIVE.copy_pages([cache, other], one)
    with pytest.raises(ValueError, match=r"copies must be int32 of shape .*, got int64"):
        NATIVE.copy_pages([cache], one.astype(np.int64))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"copies must be int32 of shape \[N, 5\], got .*\(1, 4\)"):
        NATIVE.copy_pages([cache], one[:, :4])
