"""Arithmetic and memory traffic of attention, counted in tokens.

A chunk is `count` tokens of one sequence, behind `start` entries that are in its KV pages.
"""

from __future__ import annotations

from aioserve.paging.layout import first_seen

__all__ = ["attended_pairs", "kv_tokens_moved"]


def kv_tokens_moved(start: int, count: int, window: int) -> int:
    """Tokens whose keys and values a chunk reads, up to its end, and those that it writes.

    `window` is the number of last tokens that a layer sees; 0: all.
    """
    return start + count - first_seen(start, window) + count


def attended_pairs(start: int, count: int, window: int) -> int:
    """Pairs of a chunk's token and a token that it attends to; `window` as in
    `kv_tokens_moved`."""
    end = start + count
    if not window or end <= window:
        return count * (start + end + 1) // 2
    grows = max(0, window - start)
    return grows * (start + window + 1) // 2 + (count - grows) * window
