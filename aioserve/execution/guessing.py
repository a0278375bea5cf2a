"""How far each slot has come, and what its drafter guesses: where a plan leaves both open, since
steps before it were in flight, this is what settles them.

    plan        VERIFY  start at most 13, at most 4 tokens: pending, draft, draft, draft
    settled     VERIFY  start 11, 3 tokens: pending, 7, 9     the drafter made two guesses
    noted       7 was right, 4 was drawn in place of 9        the slot's next item starts at 13

Knows plans, and neither tensors nor devices; called in the order of the steps, where each step's
tokens are known before the next is settled.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from aioserve.drafting.drafter import Drafter
from aioserve.errors import InvariantError
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.plan import DRAFT_TOKEN, ItemKind, StepPlan, WorkItem

__all__ = ["Guessing"]

VERIFY = ItemKind.VERIFY


class Guessing:
    """Progress of the slots whose sequences may have guesses verified. `drafter` makes them; None
    makes none."""

    def __init__(self, drafter: Drafter | None) -> None:
        self._drafter = drafter
        self._reached: dict[int, int] = {}
        """Known tokens by slot, the one sampled last included."""

    def take(self, plan: StepPlan) -> None:
        """Slots end and start, as a plan says."""
        for slot in plan.ended_slots:
            self._end(slot)
        for start in plan.started_slots:
            self._end(start.slot)
            if start.drafting is not None:
                self._reached[start.slot] = len(start.drafting.known_ids)
                if self._drafter is not None:
                    self._drafter.start(start.slot, start.drafting)

    def _end(self, slot: int) -> None:
        if self._reached.pop(slot, None) is not None and self._drafter is not None:
            self._drafter.end(slot)

    def settled(self, plan: StepPlan) -> StepPlan:
        """The plan with its guesses made and its items where they begin. Raises `InvariantError`
        for an item whose slot is further than the plan allows, or asks for guesses and started
        without saying so."""
        if not plan.num_verified:
            return plan
        asked = [item for item in plan.items if _asks(item)]
        guesses: dict[int, Sequence[int]] = {}
        if asked and self._drafter is not None:
            slots, limits = [item.slot for item in asked], [item.count - 1 for item in asked]
            made = self._drafter.draft_all(slots, limits)
            guesses = dict(zip(slots, made, strict=True))
        items = [
            self._settled(item, guesses.get(item.slot, ())) if item.kind is VERIFY else item
            for item in plan.items
        ]
        return msgspec.structs.replace(plan, items=tuple(items))

    def _settled(self, item: WorkItem, guesses: Sequence[int]) -> WorkItem:
        reached = self._reached.get(item.slot)
        if reached is None and not _asks(item):
            return item
        if reached is None or reached - 1 > item.start:
            raise InvariantError(
                f"sequence {item.sequence_id} goes on from position {item.start} at most, and slot "
                f"{item.slot} has {reached} known tokens"
            )
        token_ids = item.token_ids
        if _asks(item):
            token_ids = np.array([token_ids[0], *guesses], np.int32)
        return msgspec.structs.replace(
            item, start=reached - 1, count=len(token_ids), token_ids=token_ids
        )

    def note(self, plan: StepPlan, outcome: StepOutcome) -> None:
        """Take note of what a step, whose plan was settled, sampled row by row."""
        if not self._reached:
            return
        slots: list[int] = []
        sampled: list[Sequence[int]] = []
        at, counts, errors = 0, outcome.token_counts, outcome.row_errors
        rows = [row.slot for item in plan.items for row in item.rows]
        for index, slot in enumerate(rows):
            count = counts.get(index, 1)
            if count and slot in self._reached and index not in errors:
                slots.append(slot)
                sampled.append(outcome.token_ids[at : at + count])
                self._reached[slot] += count
            at += count
        if slots and self._drafter is not None:
            self._drafter.extend_all(slots, sampled)


def _asks(item: WorkItem) -> bool:
    """Whether an item has guesses, and the drafter is to make them."""
    return item.kind is VERIFY and item.count > 1 and item.token_ids[1] == DRAFT_TOKEN
