"""The memory of KV pages is provided by the system before a step writes there, while no step runs.

Memory that is written for the first time has to be found and cleared on the spot, and in a virtual
machine the host may have to find it as well: a prompt waits for it. To ask for all of a pool at the
start would take seconds, and memory that is perhaps never used.
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
"""Bytes of a call, or one page of KV where that has more: a huge page, or two where it lies across
them; milliseconds on a slow host."""
LEAVE_BYTES = 2**29
"""Free memory that is left for other programs and for the steps. Where less is free, pages get
their memory when they are used, and not before."""


class Prefault:
    """Keeps the memory of `ahead` pages provided past the last that was written, since a pool hands
    out the pages that nobody had before in order. For one thread."""

    def __init__(
        self,
        cache: KVCache,
        ahead: int,
        *,
        num_pages: int | None = None,
        available_bytes: Callable[[], int] = available_memory_bytes,
    ) -> None:
        """The first `num_pages` of the cache are the pool; None: all."""
        self._cache = cache
        self._num_pages = cache.num_pages if num_pages is None else num_pages
        self._ahead = ahead
        self._available_bytes = available_bytes
        self._pages_per_piece = max(1, PIECE_BYTES // cache.bytes_per_page)
        self._written = 0  # every page that was is below this one
        self._provided = 0  # and those below this one are there

    def note_writes(self, token_locations: npt.NDArray[np.int64]) -> None:
        """Positions of a step: int64 `[G, T]`, as in `HostBatch`."""
        if self._provided < self._num_pages and token_locations.size:
            size = self._cache.page_size
            if self._num_pages < self._cache.num_pages:
                token_locations = token_locations[token_locations < self._num_pages * size]
            page = full_pages(int(token_locations.max(initial=0)), size)
            self._written = max(self._written, page + 1)

    def advance(self) -> bool:
        """Provide one piece. False if none was wanted, or memory is short."""
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
