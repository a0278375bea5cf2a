"""What happens to pages before a step computes anything: some are copied, and the page tables of
slots change.

    plan 7   slot 3 starts, pages (3, from 0: 10, 11)     table of slot 3: 10 11
    plan 8   pages (3, from 2: 14)                        10 11 14
    plan 9   nothing                                      10 11 14
    plan 10  pages (3, from 1: 9, 14)                     10 9 14
    plan 11  slot 3 ends                                  none

Where a model's layers are of several groups (`aioserve.paging.layout`), each index of a page table
has a page of every group. Entries that a group's window has left are stale, and never read:

    plan 7   pages (3, from 0: 10, 20, 30, 11, 21, 31)    10 11    20 21    30 31
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

__all__ = ["PageCopy", "SlotPages"]


class PageCopy(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The KV of the first `num_tokens` tokens of page `source` goes to page `target`, all layers.

    Tiers are numbered, nearest first: 0 is the device, where steps compute. Each numbers its own
    pages. Within a tier a shared page is copied before it is written, or the valid part of a cached
    one.
    """

    from_tier: int
    source: int
    to_tier: int
    target: int
    num_tokens: int


class SlotPages(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A slot's pages from one index of its page table on: they take the place of what was there,
    and nothing is behind them."""

    slot: int
    first: int
    page_ids: npt.NDArray[np.int32]
    """int32 `[n * G]`, in order of index, and for each place one of each of G groups."""
