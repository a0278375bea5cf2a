"""All page arithmetic: from indices of a sequence's entries to pages and locations.

    index      0 1 2 3 | 4 5 6 7 | 8 9        page_size 4, 10 entries
    place         0         1       2         of the page in the sequence's page table
    location   page_ids[place] * page_size + index % page_size

Page sizes start at 1, and lengths may be any number of tokens. Plain integers and numpy only.
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
    """Pages that hold `num_tokens` tokens; the last one may be partly filled."""
    if num_tokens < 0 or page_size < 1:
        raise ValueError(
            "num_tokens must be at least 0 and page_size at least 1, "
            f"got {num_tokens} and {page_size}"
        )
    return -(-num_tokens // page_size)


def pages_for_each(counts: Count, page_size: int) -> Count:
    """`pages_for` for one count or each of an array, without checks of the arguments."""
    return -(-counts // page_size)


def full_pages(num_tokens: Count, page_size: int) -> Count:
    """Pages that `num_tokens` tokens fill completely, for one count or each of an array.

    This is also the place of the next token's page."""
    return num_tokens // page_size


def tokens_in_part(num_tokens: Count, page_size: int) -> Count:
    """Tokens in the last, partly filled page, for one count or each of an array.

    This is also the offset of the next token in its page."""
    return num_tokens % page_size


def capacity_tokens(num_pages: Count, page_size: int) -> Count:
    """Tokens that `num_pages` pages hold."""
    return num_pages * page_size


def window_pages(window: int, page_size: int) -> int:
    """Most pages of a group that the last `window` tokens can touch, at any alignment."""
    return pages_for(window - 1, page_size) + 1 if window else 0


def pages_of_sequence(
    num_tokens: int, page_size: int, num_window_groups: int = 0, window: int = 0
) -> int:
    """Most pages, over all groups, of a sequence of `num_tokens` computed tokens.

    Each of `num_window_groups` groups keeps only the pages of the last `window` tokens."""
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
    """Most pages, over all groups, that an engine can use.

    A chunk of a prompt needs window pages for all its tokens until it is computed."""
    longest = pages_of_sequence(max_model_len, page_size, num_window_groups, window)
    chunk = pages_for(min(max_num_batched_tokens, max_model_len), page_size)
    return max_num_seqs * longest + num_window_groups * chunk


def tokens_of_sequence(
    num_pages: int, page_size: int, num_window_groups: int = 0, window: int = 0
) -> int:
    """Tokens of the longest sequence that needs at most `num_pages` by `pages_of_sequence`."""
    short = num_pages // (num_window_groups + 1)
    whole = max(short, num_pages - num_window_groups * window_pages(window, page_size))
    return whole * page_size


def token_location(page_ids: npt.NDArray[np.int32], index: int, page_size: int) -> int:
    """Location of the entry at `index`, counted as in `token_locations`.

    `page_ids` is int32 `[n]`, in order of index. Raises `IndexError` for an index past the last
    page."""
    return page_ids.item(index // page_size) * page_size + index % page_size


def token_locations(
    page_table: npt.NDArray[np.int32],
    rows: npt.NDArray[np.integer[Any]],
    indices: npt.NDArray[np.integer[Any]],
    page_size: int,
) -> npt.NDArray[np.int64]:
    """Locations of the entries of T tokens: int64 `[G, T]`, contiguous.

    A location counts tokens from the start of the cache.

    - `page_table`: int32 `[G, B, P]`, the P pages of each of B sequences, in order of index, for
      each of G groups of layers.
    - `rows`: the row of the sequence of each token in the table, `[T]`.
    - `indices`: the index of the entry of each token in its sequence, at least 0, `[T]`.

    Raises `IndexError` for an index past the end of the table.
    """
    pages = page_table[:, rows, indices // page_size].astype(np.int64, order="C")
    return pages * page_size + indices % page_size
