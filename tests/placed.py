"""Plans by hand, of items that say where their pages are: each plan tells the runner anew."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from aioserve.steps.pages import SlotPages
from aioserve.steps.plan import ItemKind, SampleRow, StepPlan, WorkItem


class PlacedItem(WorkItem, frozen=True, kw_only=True, gc=False):
    page_ids: npt.NDArray[np.int32]
    """All pages of its slot."""


def placed_item(
    *, slot: int, count: int, rows: tuple[SampleRow, ...] = (), **fields: Any
) -> PlacedItem:
    """One that decodes, where it looks like that. No entry before it was dropped, unless `index`
    says so."""
    fields.setdefault("index", fields["start"])
    decodes = count == 1 and [(row.offset, row.slot) for row in rows] == [(0, slot)]
    kind = ItemKind.DECODE if decodes else ItemKind.PREFILL
    return PlacedItem(kind=kind, slot=slot, count=count, rows=rows, **fields)


def placed_plan(**fields: Any) -> StepPlan:
    """A plan with these fields, and what its items' pages are."""
    placed = [item for item in fields["items"] if isinstance(item, PlacedItem)]
    pages = tuple(SlotPages(item.slot, 0, item.page_ids) for item in placed)
    return StepPlan(pages=pages, **fields)
