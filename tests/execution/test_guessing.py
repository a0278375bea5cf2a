"""What a runner knows of the slots that it guesses for: no more than was drawn or forced."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from aioserve.drafting.drafter import DraftedSequence
from aioserve.errors import InvariantError
from aioserve.execution.guessing import Guessing
from aioserve.request import SamplingParams
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.plan import (
    DRAFT_TOKEN,
    PENDING_TOKEN,
    ItemKind,
    SampleRow,
    SlotStart,
    StepPlan,
    WorkItem,
)
from tests.doubles.drafters import ScriptedDrafter, right_up_to

PROMPT = [5, 6, 7]
COMING = [*range(20, 40)]


class Slot:
    """A slot of a runner, whose drafter knows what comes."""

    def __init__(self) -> None:
        self.drafter = ScriptedDrafter(lambda sequence, count: COMING[:count], right_up_to(99))
        self.guessing = Guessing(self.drafter)
        drafting = DraftedSequence(known_ids=np.array(PROMPT, np.int32), prompt_tokens=len(PROMPT))
        start = SlotStart(slot=0, params=SamplingParams(), seed=0, drafting=drafting)
        self.guessing.take(plan_of(started_slots=(start,)))
        self.step(ItemKind.PREFILL, 0, PROMPT, [20])

    @property
    def known(self) -> list[int]:
        return self.drafter.known[0]

    def step(
        self,
        kind: ItemKind,
        start: int,
        token_ids: Sequence[int],
        sampled: Sequence[int] = (),
        *,
        draws: bool = True,
    ) -> WorkItem:
        """A step with one item; as it was settled."""
        offset = 0 if kind is ItemKind.VERIFY else len(token_ids) - 1
        rows = (SampleRow(offset=offset, slot=0),)
        ids = np.array(token_ids, np.int32)
        item = WorkItem(kind, 0, 0, start, len(ids), ids, rows if draws else ())
        plan = self.guessing.settled(plan_of(items=(item,)))
        counts = {0: len(sampled)} if draws and len(sampled) != 1 else {}
        outcome = StepOutcome(step=1, token_ids=tuple(sampled), token_counts=counts)
        self.guessing.note(plan, outcome)
        return plan.items[0]


def plan_of(**parts: tuple[object, ...]) -> StepPlan:
    return StepPlan(step=1, num_verified=1, **{"items": (), **parts})


def test_an_item_begins_where_the_guesses_before_it_ended() -> None:
    slot = Slot()
    first = slot.step(ItemKind.VERIFY, 3, [20, DRAFT_TOKEN, DRAFT_TOKEN], [21, 9])
    assert (first.start, first.token_ids.tolist()) == (3, [20, 21, 22])
    second = slot.step(ItemKind.VERIFY, 6, [PENDING_TOKEN, DRAFT_TOKEN], [23])
    assert (second.start, second.count) == (5, 2)
    assert slot.known == [*PROMPT, 20, 21, 9, 23]


@pytest.mark.parametrize("sizes", [[4], [1, 1, 1, 1], [3, 1], [1, 3]])
def test_forced_tokens_are_known_however_many_steps_they_take(sizes: list[int]) -> None:
    """Items that draw nothing bring tokens as well."""
    slot, forced = Slot(), [20, 21, 22, 23, 24]
    start = 3
    for size in sizes:
        slot.step(ItemKind.PREFILL, start, forced[start - 3 : start - 3 + size], draws=False)
        start += size
    # The last one is computed by the item that verifies guesses behind it.
    item = slot.step(ItemKind.VERIFY, 7, [24, DRAFT_TOKEN], [25, 26])
    assert (item.start, item.token_ids.tolist()) == (7, [24, 25])
    assert slot.known == [*PROMPT, *forced, 25, 26]


def test_what_was_drawn_behind_a_mask_that_came_late_is_forgotten() -> None:
    slot = Slot()
    slot.step(ItemKind.DECODE, 3, [20], [21])
    slot.step(ItemKind.DECODE, 4, [PENDING_TOKEN], [22])
    slot.step(ItemKind.DECODE, 3, [20], [30])
    assert slot.known == [*PROMPT, 20, 30]


def test_an_item_with_guesses_goes_back_to_a_token_that_its_plan_knows() -> None:
    slot = Slot()
    slot.step(ItemKind.DECODE, 3, [20], [21])
    slot.step(ItemKind.DECODE, 4, [PENDING_TOKEN], [22])
    item = slot.step(ItemKind.VERIFY, 3, [20, DRAFT_TOKEN], [30])
    assert (item.start, item.token_ids[0]) == (3, 20)
    assert slot.known == [*PROMPT, 20, 30]


def test_an_item_whose_slot_is_further_than_its_plan_is_refused() -> None:
    slot = Slot()
    slot.step(ItemKind.VERIFY, 3, [20, DRAFT_TOKEN, DRAFT_TOKEN], [21, 22, 23])
    with pytest.raises(InvariantError, match="goes on from position 4 at most, and slot 0 has 7"):
        slot.step(ItemKind.VERIFY, 4, [PENDING_TOKEN, DRAFT_TOKEN])
