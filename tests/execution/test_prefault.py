"""Memory of KV pages is provided before they are written, as far ahead as asked and no further."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import resource
import threading
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aioserve.config import EngineConfig
from aioserve.execution import loading, prefault
from aioserve.execution.loading import cpu
from aioserve.execution.prefault import Prefault
from aioserve.execution.warm_up import PROMPT_TOKENS
from aioserve.ops import KVCache
from aioserve.ops.native_types import NativeKVCache
from aioserve.paging.pages import pages_for
from tests.ops.scenarios import NATIVE, allocate
from tests.waits import until

PAGE_SIZE = 4
CACHE_PAGE_BYTES = 2**17


class Spare(NamedTuple):
    """Event: this much memory is available, not counting what was provided already."""

    bytes: int


class RecordingCache:
    """A cache that notes which of its pages were provided."""

    def __init__(self, num_pages: int, page_bytes: int) -> None:
        self.num_pages = num_pages
        self.page_size = PAGE_SIZE
        self.bytes_per_page = page_bytes
        self.provided = np.zeros(num_pages, bool)
        self.spare_bytes = 2**40
        self.written = 0
        self.calls = 0

    def available_bytes(self) -> int:
        return self.spare_bytes - int(self.provided.sum()) * self.bytes_per_page

    def prefault(self, first: int, end: int) -> None:
        assert self.written <= first < end <= self.num_pages
        assert end - first <= max(1, prefault.PIECE_BYTES // self.bytes_per_page)
        assert not self.provided[first:end].any()
        left_bytes = self.available_bytes() - (end - first) * self.bytes_per_page
        assert left_bytes >= prefault.LEAVE_BYTES
        self.calls += 1
        self.provided[first:end] = True


@st.composite
def scenes(draw: st.DrawFn) -> tuple[RecordingCache, int, list[int | Spare | None]]:
    """Draw a cache, a distance to provide ahead, and events.

    An event is a written page, a change of available memory, or None for an idle thread.
    """
    num_pages = draw(st.integers(1, 40))
    page_bytes = prefault.PIECE_BYTES * 2 // draw(st.integers(1, 20))
    cache = RecordingCache(num_pages, page_bytes)
    pages = st.integers(0, num_pages - 1)
    spare = st.integers(0, 12).map(
        lambda pages: Spare(prefault.LEAVE_BYTES + pages * cache.bytes_per_page)
    )
    happens = st.one_of(pages, spare, st.none(), st.none(), st.none())
    return cache, draw(st.integers(0, 50)), draw(st.lists(happens, max_size=60))


@given(scenes())
def test_pages_ahead_of_those_written_are_provided_once_and_no_others(scene):
    cache, ahead, events = scene
    keeps = Prefault(cast(KVCache, cache), ahead, available_bytes=cache.available_bytes)
    wanted, more = ahead, True
    whole = -(-prefault.PIECE_BYTES // cache.bytes_per_page)

    def check(idle: bool) -> None:
        assert not cache.provided[wanted + whole :].any()
        if idle and cache.available_bytes() >= prefault.LEAVE_BYTES + whole * cache.bytes_per_page:
            assert cache.provided[cache.written : wanted].all()

    for event in events:
        if event is None:
            more = keeps.advance()
            check(idle=not more)
        elif isinstance(event, Spare):
            cache.spare_bytes = event.bytes
        else:
            locations = np.array([[0, 0], [event * PAGE_SIZE + 1, 0]], np.int64)
            keeps.note_writes(locations)
            cache.written = max(cache.written, event + 1)
            wanted = cache.written + ahead
    for _ in range(cache.provided.size + 1):
        more = keeps.advance()
    assert not more
    check(idle=True)
    calls = cache.calls
    keeps.note_writes(np.empty((1, 0), np.int64))
    assert not keeps.advance()
    assert cache.calls == calls


# -- real memory


def resident(tensor: torch.Tensor) -> list[bool]:
    """True for each system page of a tensor that is resident."""
    address, size = tensor.data_ptr(), tensor.nbytes
    assert address % mmap.PAGESIZE == 0
    found = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), found) == 0
    return [bool(page & 1) for page in found]


def in_small_pages(tensor: torch.Tensor) -> None:
    """Forbid huge pages, so that touched memory can be told from untouched."""
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        libc = ctypes.CDLL(None, use_errno=True)
        address, size = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)
        libc.madvise(address, size, mmap.MADV_NOHUGEPAGE)  # refused on systems without huge pages


def native_cache(num_pages: int) -> NativeKVCache:
    """Make a cache with pages of `CACHE_PAGE_BYTES`."""
    cache = allocate(NATIVE, 2, num_pages, 16, 4, 128, torch.float32)
    assert isinstance(cache, NativeKVCache)
    assert cache.bytes_per_page == CACHE_PAGE_BYTES
    return cache


def test_memory_is_there_when_it_was_asked_for_and_not_before():
    cache = native_cache(400)
    assert not any(resident(cache.storage))
    cache.prefault(64, 128)
    there = resident(cache.storage)
    first, end = (page * CACHE_PAGE_BYTES // mmap.PAGESIZE for page in (64, 128))
    huge = 2**21 // mmap.PAGESIZE
    assert all(there[first:end])
    assert not any(there[: first - huge])
    assert not any(there[end + huge :])


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """Draw sizes of a cache and pages [first, end), unaligned to pages of the system."""
    layers, pages, size = (
        draw(st.integers(1, 2)),
        draw(st.integers(1, 30)),
        2 ** draw(st.integers(0, 4)),
    )
    heads, dim = draw(st.integers(1, 3)), draw(st.integers(1, 256))
    first, end = sorted((draw(st.integers(0, pages)), draw(st.integers(0, pages))))
    return (layers, pages, size, heads, dim), first, end


@given(ranges())
def test_each_page_of_the_system_that_has_a_byte_of_the_range_is_there_and_no_other(scene):
    (layers, pages, size, heads, dim), first, end = scene
    cache = allocate(NATIVE, layers, pages, size, heads, dim, torch.float32)
    in_small_pages(cache.storage)
    begins, ends = (page * cache.bytes_per_page for page in (first, end))
    cache.prefault(first, end)
    there = [i for i, present in enumerate(resident(cache.storage)) if present]
    if first < end:
        assert there == list(range(begins // mmap.PAGESIZE, -(-ends // mmap.PAGESIZE)))
    else:
        assert not there


def test_writes_find_their_memory_there():
    """Memory that was only read would instead have a shared page of zeros."""
    cache = native_cache(100)
    in_small_pages(cache.storage)
    values = cache.storage
    cache.prefault(0, 100)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    values.fill_(1.0)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < values.nbytes // mmap.PAGESIZE / 4


def test_nothing_that_was_written_changes():
    cache = native_cache(70)
    held = cache.storage.view(torch.uint8)
    held.copy_(torch.randint(1, 256, held.shape, dtype=torch.uint8))
    before = held.clone()
    cache.prefault(0, 70)
    assert torch.equal(held, before)


def test_nothing_is_lost_that_another_thread_writes_meanwhile():
    """Touched bytes count their writes: a byte that was restored would fall behind."""
    cache = native_cache(64)
    counts = cache.storage[:16].view(torch.uint8).view(-1)[::4096]
    counts.zero_()
    ended = threading.Event()

    def touch() -> None:
        while not ended.is_set():
            cache.prefault(0, 16)

    touching = threading.Thread(target=touch)
    touching.start()
    for _ in range(5000):
        counts.add_(1)
    ended.set()
    touching.join()
    assert set(counts.tolist()) == {5000 % 256}


@pytest.mark.parametrize(("leave_bytes", "provides"), [(0, True), (2**60, False)])
def test_it_goes_by_the_memory_of_this_machine(leave_bytes, provides, monkeypatch):
    monkeypatch.setattr(prefault, "LEAVE_BYTES", leave_bytes)
    assert Prefault(native_cache(8), 8).advance() == provides


@pytest.mark.parametrize(
    ("first", "end", "message"),
    [
        (-1, 1, r"must lie in \[0, 8\), got \[-1, 1\)"),
        (2, 1, r"must lie in \[0, 8\), got \[2, 1\)"),
        (0, 9, r"must lie in \[0, 8\), got \[0, 9\)"),
    ],
)
def test_what_lies_outside_is_refused(first, end, message):
    with pytest.raises(ValueError, match=message):
        native_cache(8).prefault(first, end)


@pytest.mark.parametrize(("most_bytes", "pages"), [(2**40, 8192), (3000 * 8192, None)])
@pytest.mark.asyncio
async def test_a_loaded_model_has_memory_for_four_steps_once_it_has_nothing_to_do(
    monkeypatch, most_bytes, pages
):
    asked: list[tuple[int, ...]] = []

    def note(self: Any, *piece: int) -> None:
        asked.append(piece)

    monkeypatch.setattr(NativeKVCache, "prefault", note)
    monkeypatch.setattr(cpu, "PREFAULT_BYTES", most_bytes)
    monkeypatch.setattr(prefault, "PIECE_BYTES", 1)  # a page at a time
    config = EngineConfig(num_pages=100_000, page_size=16, max_num_batched_tokens=32768)
    loaded = await loading.load("pyhelp", config, num_slots=4)
    page_bytes = loaded.description["kv_cache_bytes"] // 100_000
    pages = pages or most_bytes // page_bytes
    warm = pages_for(PROMPT_TOKENS + 1, 16)  # written by the first steps
    await until(lambda: len(asked) >= pages)
    await asyncio.sleep(0.05)  # no more is provided
    await loaded.runner.aclose()
    wanted = range(warm, warm + pages)
    assert asked == [(page, page + 1) for page in wanted]
