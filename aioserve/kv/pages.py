"""Page arithmetic, the only place for it: positions in a sequence to pages, offsets and slots.

    position   0 1 2 3 | 4 5 6 7 | 8 9        page_size 4, 10 tokens
    index         0         1       2         of the page in the sequence's page table
    slot       page_ids[index] * page_size + position % page_size

Any page size from 1 works, and no length need be a multiple of it. Plain integers and numpy;
imports nothing else of the package, so every folder may use it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["capacity_tokens", "pages_for", "pages_missing", "slot_of", "slots_of"]


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that `num_tokens` tokens fill, the last one perhaps in part."""
    if num_tokens < 0 or page_size < 1:
        raise ValueError(
            "num_tokens must be at least 0 and page_size at least 1, "
            f"got {num_tokens} and {page_size}"
        )
    return -(-num_tokens // page_size)


def pages_missing(num_tokens: int, num_pages: int, page_size: int) -> int:
    """Pages that a table of `num_pages` pages lacks to hold `num_tokens` tokens; at least 0."""
    return max(0, pages_for(num_tokens, page_size) - num_pages)


def capacity_tokens(num_pages: int, page_size: int) -> int:
    """Tokens that `num_pages` pages hold."""
    return num_pages * page_size


def slot_of(page_ids: npt.NDArray[np.int32], position: int, page_size: int) -> int:
    """Where the KV of the token at `position` lies, counted in tokens from the start of the cache.

    `page_ids` is int32 `[n]`, in order of position. Raises `IndexError` if `position` is not in it.
    """
    if position < 0:
        raise IndexError(f"position must be at least 0, got {position}")
    return int(page_ids[position // page_size]) * page_size + position % page_size


def slots_of(
    page_ids: npt.NDArray[np.int32], start: int, count: int, page_size: int
) -> npt.NDArray[np.int64]:
    """Slots of positions `[start, start + count)`: int64 `[count]`, as `slot_of` gives for each."""
    if start < 0 or count < 0:
        raise IndexError(f"start and count must be at least 0, got {start} and {count}")
    positions = np.arange(start, start + count, dtype=np.int64)
    return page_ids[positions // page_size].astype(np.int64) * page_size + positions % page_size
