"""Provides the memory of KV pages before a step writes there, while no step runs.

Memory that is written for the first time must be found and cleared on the spot. In a virtual
machine the host may have to find it, too. A prompt would wait for that. Providing a whole pool at
the start would take seconds, and memory that is perhaps never used.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from aioserve.execution.process_memory import available_memory_bytes
from aioserve.ops import KVCache
from aioserve.paging.pages import full_pages

__all__ = ["Prefault"]

PIECE_BYTES = 2**21
"""Bytes of a call, or one page of KV if that is larger. It covers one huge page, or two if
unaligned, and takes milliseconds on a slow host."""
LEAVE_BYTES = 2**29
"""Free memory that is left for other programs and for the steps. With less, pages get their
memory only when they are used."""


class Prefault:
    """Keeps memory provided for `ahead` pages past the last one written.

    A pool hands out unused pages in order. For one thread.
    """

    def __init__(
        self,
        cache: KVCache,
        ahead: int,
        *,
        num_pages: int | None = None,
        available_bytes: Callable[[], int] = available_memory_bytes,
    ) -> None:
        """The first `num_pages` of the cache are the pool; None means all."""
        self._cache = cache
        self._num_pages = cache.num_pages if num_pages is None else num_pages
        self._ahead = ahead
        self._available_bytes = available_bytes
        self._pages_per_piece = max(1, PIECE_BYTES // cache.bytes_per_page)
        self._written = 0  # all pages written so far are below this one
        self._provided = 0  # pages below this one have memory

    def note_writes(self, token_locations: npt.NDArray[np.int64]) -> None:
        """Note the positions that a step writes: int64 `[G, T]`, as in `HostBatch`."""
        if self._provided < self._num_pages and token_locations.size:
            size = self._cache.page_size
            if self._num_pages < self._cache.num_pages:
                token_locations = token_locations[token_locations < self._num_pages * size]
            page = full_pages(int(token_locations.max(initial=0)), size)
            self._written = max(self._written, page + 1)

    def advance(self) -> bool:
        """Provide one piece. False if none is needed, or memory is short."""
        cache = self._cache
        first = max(self._provided, self._written)
        if first >= min(self._written + self._ahead, self._num_pages):
            return False
        end = min(first + self._pages_per_piece, self._num_pages)
        if self._available_bytes() < (end - first) * cache.bytes_per_page + LEAVE_BYTES:
            return False
        cache.prefault(first, end)
        self._provided = end
        return True
