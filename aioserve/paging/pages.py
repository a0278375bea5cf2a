"""Page arithmetic, the only place for it: indices of a sequence's entries to pages and locations.

    index      0 1 2 3 | 4 5 6 7 | 8 9        page_size 4, 10 entries
    place         0         1       2         of the page in the sequence's page table
    location   page_ids[place] * page_size + index % page_size

Any page size from 1 works, and no length need be a multiple of it. Plain integers and numpy.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = [
    "capacity_tokens",
    "full_pages",
    "pages_for",
    "pages_for_each",
    "pages_of_engine",
    "pages_of_sequence",
    "token_location",
    "token_locations",
    "tokens_in_part",
    "tokens_of_sequence",
    "window_pages",
]


Count = TypeVar("Count", int, npt.NDArray[np.integer[Any]])


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that `num_tokens` tokens fill, the last one perhaps in part."""
    if num_tokens < 0 or page_size < 1:
        raise ValueError(
            "num_tokens must be at least 0 and page_size at least 1, "
            f"got {num_tokens} and {page_size}"
        )
    return -(-num_tokens // page_size)


def pages_for_each(counts: Count, page_size: int) -> Count:
    """`pages_for` of each of an array of numbers from 0 on, or of one, without a check."""
    return -(-counts // page_size)


def full_pages(num_tokens: Count, page_size: int) -> Count:
    """Pages that so many tokens fill to the end: the index of the page of the next token, for one
    count or each of an array."""
    return num_tokens // page_size


def tokens_in_part(num_tokens: Count, page_size: int) -> Count:
    """Tokens of `num_tokens` that are in a page which they don't fill: the offset of the next, for
    one count or each of an array."""
    return num_tokens % page_size


def capacity_tokens(num_pages: Count, page_size: int) -> Count:
    """Tokens that `num_pages` pages hold."""
    return num_pages * page_size


def window_pages(window: int, page_size: int) -> int:
    """The most pages of a group that hold the last `window` tokens, wherever the last one is."""
    return pages_for(window - 1, page_size) + 1 if window else 0


def pages_of_sequence(
    num_tokens: int, page_size: int, num_window_groups: int = 0, window: int = 0
) -> int:
    """The most pages, of all groups, that a sequence of `num_tokens` tokens has once they are
    computed: in each of `num_window_groups` groups those of the last `window` tokens alone."""
    whole = pages_for(num_tokens, page_size)
    return whole + num_window_groups * min(whole, window_pages(window, page_size))


def pages_of_engine(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    page_size: int,
    num_window_groups: int = 0,
    window: int = 0,
) -> int:
    """The most pages, of all groups, that an engine has a use for. Chunks of prompts have window
    pages for all their tokens until they are computed."""
    longest = pages_of_sequence(max_model_len, page_size, num_window_groups, window)
    chunk = pages_for(min(max_num_batched_tokens, max_model_len), page_size)
    return max_num_seqs * longest + num_window_groups * chunk


def tokens_of_sequence(
    num_pages: int, page_size: int, num_window_groups: int = 0, window: int = 0
) -> int:
    """The longest sequence whose `pages_of_sequence` are at most `num_pages`, in tokens."""
    short = num_pages // (num_window_groups + 1)
    whole = max(short, num_pages - num_window_groups * window_pages(window, page_size))
    return whole * page_size


def token_location(page_ids: npt.NDArray[np.int32], index: int, page_size: int) -> int:
    """Location of the entry at an index, as `token_locations` counts it. Raises `IndexError` for an
    index past the last of `page_ids`, int32 `[n]` in order of index."""
    return page_ids.item(index // page_size) * page_size + index % page_size


def token_locations(
    page_table: npt.NDArray[np.int32],
    rows: npt.NDArray[np.integer[Any]],
    indices: npt.NDArray[np.integer[Any]],
    page_size: int,
) -> npt.NDArray[np.int64]:
    """Locations of the entries of T tokens, counted in tokens from the start of the cache: int64
    `[G, T]`, contiguous.

    `page_table` is int32 `[G, B, P]`: of each of G groups of layers a row per sequence in order of
    index. The entry of token t is at `indices[t]`, at least 0, of the sequence in row `rows[t]`.
    Raises `IndexError` for an index past the end of the table.
    """
    pages = page_table[:, rows, indices // page_size].astype(np.int64, order="C")
    return pages * page_size + indices % page_size
