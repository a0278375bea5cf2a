"""Changes to pages before a step computes anything: copies of pages, and changes to page tables.

    plan 7   slot 3 starts, pages (3, from 0: 10, 11)     table of slot 3: 10 11
    plan 8   pages (3, from 2: 14)                        10 11 14
    plan 9   nothing                                      10 11 14
    plan 10  pages (3, from 1: 9, 14)                     10 9 14
    plan 11  slot 3 ends                                  none

If a model's layers belong to several groups (`aioserve.paging.layout`), each index of a page table
has a page of every group. Entries that a group's window has left are stale, and never read:

    plan 7   pages (3, from 0: 10, 20, 30, 11, 21, 31)    10 11    20 21    30 31
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

__all__ = ["PageCopy", "SlotPages"]


class PageCopy(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Copy of the KV of the first `num_tokens` tokens of page `source` to page `target`, all
    layers.

    Tiers are numbered, nearest first: 0 is the device, where steps compute. Each numbers its own
    pages. Copies within a tier serve a shared page before it is written, or the valid part of a
    cached one.
    """

    from_tier: int
    source: int
    to_tier: int
    target: int
    num_tokens: int


class SlotPages(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Pages of a slot from index `first` of its page table on. They replace what was there, and are
    the last of the table."""

    slot: int
    first: int
    page_ids: npt.NDArray[np.int32]
    """int32 `[n * G]`, in order of index, with one page of each of G groups per index."""
