"""Memory of KV pages is there before it is written, as far as is asked for and no further."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aioserve.config import EngineConfig
from aioserve.execution import assembling, loading, prefault
from aioserve.execution.prefault import Prefault
from aioserve.ops import KVCache
from aioserve.ops.native_kv_cache import NativeKVCache
from tests.ops.scenarios import NATIVE, allocate

PAGE_SIZE = 4
CACHE_PAGE_BYTES = 2**15


class AskedFor:
    """A cache that notes what of it was asked for."""

    def __init__(self, num_layers: int, num_pages: int, page_bytes: int, room: int) -> None:
        self.num_layers = num_layers
        self.num_pages = num_pages
        self.page_size = PAGE_SIZE
        self.page_bytes = page_bytes
        self.bytes_per_page = 2 * num_layers * page_bytes
        self.provided = np.zeros((2 * num_layers, num_pages), bool)
        self.room = room
        self.written = 0
        self.calls = 0

    def prefault(self, plane: int, first: int, end: int) -> bool:
        assert 0 <= first < end <= self.num_pages
        assert end - first <= max(
            1, prefault.PIECE_BYTES * 2 * self.num_layers // self.bytes_per_page
        )
        assert not self.provided[plane, first:end].any()
        assert plane > 0 or first >= self.written
        self.calls += 1
        if self.calls > self.room:
            return False
        self.provided[plane, first:end] = True
        return True


@st.composite
def scenes(draw: st.DrawFn) -> tuple[AskedFor, int, list[int | None]]:
    """A cache, how far ahead it is to be there, and what happens: a page written, or None, an idle
    thread."""
    num_pages = draw(st.integers(1, 40))
    page_bytes = prefault.PIECE_BYTES * 2 // draw(st.integers(1, 20))
    room = draw(st.sampled_from([10**6, 10**6, 3]))
    cache = AskedFor(draw(st.integers(1, 3)), num_pages, page_bytes, room)
    happens = st.one_of(st.integers(0, num_pages - 1), st.none(), st.none(), st.none())
    return cache, draw(st.integers(0, 50)), draw(st.lists(happens, max_size=60))


@given(scenes())
def test_pages_ahead_of_those_written_are_provided_once_and_no_others(scene):
    cache, ahead, events = scene
    keeps = Prefault(cast(KVCache, cache), ahead)
    wanted, more = ahead, True

    def check(idle: bool) -> None:
        whole = -(-prefault.PIECE_BYTES // cache.page_bytes)
        assert not cache.provided[:, wanted + whole :].any()
        if idle and cache.calls <= cache.room:
            assert cache.provided[:, cache.written : wanted].all()

    for event in events:
        if event is None:
            more = keeps.advance()
            check(idle=not more)
        else:
            locations = np.array([event * PAGE_SIZE + 1, 0], np.int64)
            keeps.note_writes(locations)
            cache.written = max(cache.written, event + 1)
            wanted = cache.written + ahead
    for _ in range(cache.provided.size + 1):
        more = keeps.advance()
    assert not more
    check(idle=True)
    calls = cache.calls
    keeps.note_writes(np.array([], np.int64))
    assert not keeps.advance()
    assert cache.calls == calls <= cache.room + 1


# -- the real thing


def resident(tensor: torch.Tensor) -> list[bool]:
    """Which of a tensor's pages of the system's are there."""
    address, size = tensor.data_ptr(), tensor.nbytes
    assert address % mmap.PAGESIZE == 0
    found = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), found) == 0
    return [bool(page & 1) for page in found]


def native_cache(num_pages: int) -> NativeKVCache:
    """Of `CACHE_PAGE_BYTES` a page in each of its four planes."""
    cache = allocate(NATIVE, 2, num_pages, 16, 4, 128, torch.float32)
    assert isinstance(cache, NativeKVCache)
    return cache


def test_memory_is_there_when_it_was_asked_for_and_not_before():
    cache = native_cache(400)  # 12 MiB a plane
    keys_of_second_layer = cache.storage[1, 0]
    assert not any(resident(keys_of_second_layer))
    if not cache.prefault(2, 64, 128):
        pytest.skip("the system provides no memory on demand")
    there = resident(keys_of_second_layer)
    first, end = (page * CACHE_PAGE_BYTES // mmap.PAGESIZE for page in (64, 128))
    assert all(there[first:end])
    assert not all(there)
    assert not any(resident(cache.storage[0, 0])[: -(2**21) // mmap.PAGESIZE])


def test_nothing_that_was_written_changes():
    cache = native_cache(70)
    plain = torch.rand(cache.plain().shape)
    cache.set_plain(plain)
    assert len({cache.prefault(plane, 0, 70) for plane in range(4)}) == 1
    assert torch.equal(cache.plain(), plain)


@pytest.mark.parametrize(
    ("plane", "first", "end", "message"),
    [
        (-1, 0, 1, r"plane must be in \[0, 4\), got -1"),
        (4, 0, 1, r"plane must be in \[0, 4\), got 4"),
        (0, -1, 1, r"must lie in \[0, 8\), got \[-1, 1\)"),
        (0, 2, 1, r"must lie in \[0, 8\), got \[2, 1\)"),
        (0, 0, 9, r"must lie in \[0, 8\), got \[0, 9\)"),
    ],
)
def test_what_lies_outside_is_refused(plane, first, end, message):
    with pytest.raises(ValueError, match=message):
        native_cache(8).prefault(plane, first, end)


@pytest.mark.parametrize(("most_bytes", "pages"), [(2**40, 8192), (3000 * 8192, None)])
@pytest.mark.asyncio
async def test_a_loaded_model_has_memory_for_four_steps_once_it_has_nothing_to_do(
    monkeypatch, most_bytes, pages
):
    asked: list[tuple[int, ...]] = []

    def note(self: Any, *piece: int) -> bool:
        asked.append(piece)
        return True

    monkeypatch.setattr(NativeKVCache, "prefault", note)
    monkeypatch.setattr(assembling, "PREFAULT_BYTES", most_bytes)
    monkeypatch.setattr(prefault, "PIECE_BYTES", 1)  # a page at a time
    config = EngineConfig(num_pages=100_000, page_size=16, max_num_batched_tokens=32768)
    loaded = await loading.load("pyhelp", config, num_slots=4)
    page_bytes = loaded.description["kv_cache_bytes"] // 100_000
    pages = pages or most_bytes // page_bytes
    planes = 2 * 6  # of pyhelp's layers
    await _until(lambda: len(asked) >= pages * planes)
    await asyncio.sleep(0.05)  # nothing more is asked for
    await loaded.runner.aclose()
    assert asked == [(plane, page, page + 1) for page in range(pages) for plane in range(planes)]


async def _until(done: Callable[[], bool]) -> None:
    for _ in range(2000):
        if done():
            return
        await asyncio.sleep(0.01)
