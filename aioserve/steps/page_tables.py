"""Page tables that a runner keeps for its slots, as plans change them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from aioserve.errors import InvariantError
from aioserve.paging.pages import pages_for
from aioserve.steps.pages import SlotPages
from aioserve.steps.plan import StepPlan

__all__ = ["SlotPageTables"]

FIRST_WIDTH = 16


class SlotPageTables:
    """Page tables of a runner's slots, updated by one plan after the other. There is one for each
    of `num_groups` groups of layers, all of the same length."""

    def __init__(self, num_slots: int, num_groups: int = 1) -> None:
        self._pages = [np.zeros((num_slots, FIRST_WIDTH), np.int32) for _ in range(num_groups)]
        self._lengths = np.zeros(num_slots, np.int64)

    def take(self, plan: StepPlan) -> None:
        """Apply the changes of a plan. Raises `InvariantError` for pages that leave a gap."""
        for slot in plan.ended_slots:
            self._lengths[slot] = 0
        for start in plan.started_slots:
            self._lengths[start.slot] = 0
        for change in plan.pages:
            self._change(change)

    def _change(self, change: SlotPages) -> None:
        slot, first, page_ids = change.slot, change.first, change.page_ids
        groups = len(self._pages)
        count, rest = divmod(len(page_ids), groups)
        end = first + count
        if rest:
            raise InvariantError(
                f"slot {slot} gets {len(page_ids)} pages, which are none of {groups} groups each"
            )
        if not 0 <= slot < len(self._lengths):
            raise InvariantError(f"slot {slot} gets pages, and there are {len(self._lengths)}")
        if first > self._lengths[slot]:
            raise InvariantError(
                f"slot {slot} has {self._lengths[slot]} pages, and gets more from {first} on"
            )
        width = self._pages[0].shape[1]
        if end > width:
            self._pages = [_widened(pages, max(end, 2 * width)) for pages in self._pages]
        for group, pages in enumerate(self._pages):
            pages[slot, first:end] = page_ids[group::groups]
        self._lengths[slot] = end

    def page_ids(self, slot: int, group: int = 0) -> npt.NDArray[np.int32]:
        """Pages of a slot in order of index: a view, int32 `[n]`, valid until the next plan."""
        return self._pages[group][slot, : self._lengths[slot]]

    def rows(
        self, slots: npt.NDArray[np.int64], num_entries: npt.NDArray[np.int64], page_size: int
    ) -> npt.NDArray[np.int32]:
        """Tables of these slots, int32 `[num_groups, len(slots), n]`, wide enough for the longest
        of them. Entries after a slot's pages are arbitrary.

        Raises `InvariantError` for a slot whose pages are too few for its `num_entries`.
        """
        lengths = self._lengths[slots]
        short = lengths * page_size < num_entries
        if short.any():
            row = int(short.argmax())
            entries = int(num_entries[row])
            raise InvariantError(
                f"slot {slots[row]} has {lengths[row]} pages, and its entries up to index "
                f"{entries - 1} need {pages_for(entries, page_size)}"
            )
        width = int(lengths.max())
        tables = [pages[slots, :width] for pages in self._pages]
        return tables[0][None] if len(tables) == 1 else np.stack(tables)


def _widened(pages: npt.NDArray[np.int32], width: int) -> npt.NDArray[np.int32]:
    wider = np.zeros((len(pages), width), np.int32)
    wider[:, : pages.shape[1]] = pages
    return wider
