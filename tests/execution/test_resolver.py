"""The resolver knows exactly the drawn and forced tokens of slots with draft tokens."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.drafting.drafter import DraftedSequence
from aioserve.errors import InvariantError
from aioserve.execution.speculation.resolver import LOOK_STEPS, Resolver
from aioserve.request import SamplingParams
from aioserve.steps.outcome import DryRun, StepOutcome
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
    """A slot of a runner, with a drafter that knows the coming tokens."""

    def __init__(self) -> None:
        self.drafter = ScriptedDrafter(lambda sequence, count: COMING[:count], right_up_to(99))
        ticks = itertools.count()
        self.resolver = Resolver(self.drafter, clock=lambda: float(next(ticks)))
        self.outcome = StepOutcome(step=0, token_ids=())
        """Outcome of the last step."""
        drafting = DraftedSequence(known_ids=np.array(PROMPT, np.int32), prompt_tokens=len(PROMPT))
        start = SlotStart(slot=0, params=SamplingParams(), seed=0, drafting=drafting)
        self.resolver.take(plan_of(started_slots=(start,)))
        self.step(ItemKind.PREFILL, 0, PROMPT, [20])

    @property
    def known(self) -> list[int]:
        """Tokens that the drafter would know if it were asked now."""
        self.resolver._read()
        self.resolver._tell(self.resolver._known)
        return self.drafter.known[0]

    def step(
        self,
        kind: ItemKind,
        start: int,
        token_ids: Sequence[int],
        sampled: Sequence[int] = (),
        *,
        draws: bool = True,
        dropped: int = 0,
    ) -> WorkItem:
        """Run a step with one item, before which `dropped` entries were dropped; return the
        resolved item."""
        offset = 0 if kind is ItemKind.VERIFY else len(token_ids) - 1
        rows = (SampleRow(offset=offset, slot=0),)
        ids = np.array(token_ids, np.int32)
        rows, places = rows if draws else (), (start, start - dropped, len(ids))
        item = WorkItem(kind, 0, 0, *places, ids, rows)
        plan = self.resolver.resolved(plan_of(items=(item,)))
        counts = {0: len(sampled)} if draws and len(sampled) != 1 else {}
        outcome = StepOutcome(step=1, token_ids=tuple(sampled), token_counts=counts)
        self.outcome = self.resolver.noted(plan, outcome)
        return plan.items[0]


def plan_of(**parts: tuple[object, ...]) -> StepPlan:
    return StepPlan(step=1, num_verified=1, **{"items": (), **parts})


def test_an_item_begins_where_the_drafts_before_it_ended() -> None:
    slot = Slot()
    first = slot.step(ItemKind.VERIFY, 3, [20, DRAFT_TOKEN, DRAFT_TOKEN], [21, 9])
    assert (first.start, first.token_ids.tolist()) == (3, [20, 21, 22])
    second = slot.step(ItemKind.VERIFY, 6, [PENDING_TOKEN, DRAFT_TOKEN], [23])
    assert (second.start, second.count) == (5, 2)
    assert slot.known == [*PROMPT, 20, 21, 9, 23]


def test_an_index_is_as_far_behind_as_the_position() -> None:
    slot = Slot()
    first = slot.step(ItemKind.VERIFY, 3, [20, DRAFT_TOKEN, DRAFT_TOKEN], [21, 9], dropped=2)
    assert (first.start, first.index) == (3, 1)
    second = slot.step(ItemKind.VERIFY, 6, [PENDING_TOKEN, DRAFT_TOKEN], [23], dropped=2)
    assert (second.start, second.index, second.count) == (5, 3, 2)


def test_only_a_step_that_asks_the_drafter_tells_what_it_takes() -> None:
    """The next step's position is unknown after draft tokens, even if it has none itself."""
    slot = Slot()
    slot.step(ItemKind.VERIFY, 3, [20, DRAFT_TOKEN], [21, 22])
    assert slot.outcome.drafting_seconds == 1.0
    slot.step(ItemKind.VERIFY, 5, [PENDING_TOKEN], [23])
    assert slot.outcome.drafting_seconds == 0.0


@pytest.mark.parametrize("sizes", [[4], [1, 1, 1, 1], [3, 1], [1, 3]])
def test_forced_tokens_are_known_however_many_steps_they_take(sizes: list[int]) -> None:
    """Items that draw nothing bring tokens, too."""
    slot, forced = Slot(), [20, 21, 22, 23, 24]
    start = 3
    for size in sizes:
        slot.step(ItemKind.PREFILL, start, forced[start - 3 : start - 3 + size], draws=False)
        start += size
    # The last one is computed by an item that also verifies draft tokens.
    item = slot.step(ItemKind.VERIFY, 7, [24, DRAFT_TOKEN], [25, 26])
    assert (item.start, item.token_ids.tolist()) == (7, [24, 25])
    assert slot.known == [*PROMPT, *forced, 25, 26]


def test_what_was_drawn_behind_a_mask_that_came_late_is_forgotten() -> None:
    slot = Slot()
    slot.step(ItemKind.DECODE, 3, [20], [21])
    slot.step(ItemKind.DECODE, 4, [PENDING_TOKEN], [22])
    slot.step(ItemKind.DECODE, 3, [20], [30])
    assert slot.known == [*PROMPT, 20, 30]


def test_an_item_with_drafts_goes_back_to_a_token_that_its_plan_knows() -> None:
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


def test_an_item_behind_a_step_that_failed_begins_no_sooner_than_its_own_pages() -> None:
    slot = Slot()
    rows = (SampleRow(offset=0, slot=0),)
    ids = np.array([PENDING_TOKEN, DRAFT_TOKEN, DRAFT_TOKEN], np.int32)
    item = WorkItem(ItemKind.VERIFY, 0, 0, 6, 6, 3, ids, rows, least_start=4)
    plan = slot.resolver.resolved(plan_of(items=(item,)))  # the step for position 3 failed
    (lost,) = plan.items
    assert (lost.start, lost.index, lost.count) == (6, 6, 1)
    slot.resolver.noted(plan, StepOutcome(step=1, token_ids=(9,)))
    assert slot.known == [*PROMPT, 20]


class QuickDrafter(ScriptedDrafter):
    """Always drafts the tokens of `COMING`, over and over."""

    is_quick = True

    def __init__(self) -> None:
        super().__init__(
            lambda sequence, count: (COMING * (1 + count // len(COMING)))[:count], _all
        )
        self.looks: list[tuple[int, list[int], list[int]]] = []
        """Slot, known tokens and draft tokens of each call."""
        self.ended: dict[int, list[int]] = {}

    def draft(self, slot: int, limit: int) -> Sequence[int]:
        draft_tokens = super().draft(slot, limit)
        self.looks.append((slot, list(self.known[slot]), list(draft_tokens)))
        return draft_tokens

    def end(self, slot: int) -> None:
        self.ended[slot] = self.known[slot]
        super().end(slot)


def _all(known: Sequence[int], coming: Sequence[int], limit: int) -> Sequence[int]:
    return coming[:limit]


class QuickSlots:
    """Slots of a runner with a quick drafter, with the true state of each."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.drafter = QuickDrafter()
        self.resolver = Resolver(self.drafter)
        self.known: dict[int, list[int]] = {}
        self.found: dict[int, list[DryRun]] = {}

    def start(self, slot: int) -> None:
        if slot in self.known:
            self.end(slot)
        drafting = DraftedSequence(known_ids=np.array(PROMPT, np.int32), prompt_tokens=len(PROMPT))
        start = SlotStart(slot=slot, params=SamplingParams(), seed=0, drafting=drafting)
        self.resolver.take(plan_of(started_slots=(start,)))
        self.known[slot], self.found[slot] = [*PROMPT], []
        self.run([(slot, ItemKind.PREFILL, 0, PROMPT)])

    def end(self, slot: int) -> None:
        self.resolver.take(plan_of(ended_slots=(slot,)))
        assert self.drafter.ended[slot] == self.known.pop(slot)

    def decode(self) -> None:
        self.run([(s, ItemKind.DECODE, len(k) - 1, [PENDING_TOKEN]) for s, k in self.known.items()])

    def verify(self, slot: int, count: int) -> None:
        ids = [PENDING_TOKEN, *[DRAFT_TOKEN] * count]
        self.run([(slot, ItemKind.VERIFY, len(self.known[slot]) - 1, ids)])
        asked, heard, _ = self.drafter.looks[-1]
        assert (asked, heard) == (slot, self.known[slot][: len(heard)])
        assert self.resolver._num_sent[slot] == len(heard)

    def run(self, parts: list[tuple[int, ItemKind, int, list[int]]]) -> None:
        items = tuple(
            WorkItem(
                kind,
                slot,
                slot,
                start,
                start,
                len(ids),
                np.array(ids, np.int32),
                (_row(slot, kind, ids),),
            )
            for slot, kind, start, ids in parts
        )
        verified = sum(item.kind is ItemKind.VERIFY for item in items)
        decodes = sum(item.kind is ItemKind.DECODE for item in items)
        plan = StepPlan(step=1, items=items, num_verified=verified, num_decodes=decodes)
        before = {slot: list(known) for slot, known in self.known.items()}
        resolved = self.resolver.resolved(plan)
        if verified:
            assert self.drafter.known[parts[0][0]] == before[parts[0][0]]
        token_ids, counts = [], {}
        for index, item in enumerate(resolved.items):
            count = 1
            while (
                count < item.count and item.kind is ItemKind.VERIFY and self.random.random() < 0.7
            ):
                count += 1
            drawn = [*item.token_ids[1:count].tolist(), self._next(item.slot)]
            if count != 1:
                counts[index] = count
            token_ids += drawn
            self.known[item.slot] += drawn
        outcome = StepOutcome(step=1, token_ids=tuple(token_ids), token_counts=counts)
        told = self.resolver.noted(resolved, outcome)
        for row, found in told.dry_runs.items():
            self.found[resolved.items[row].slot].append(found)

    def _next(self, slot: int) -> int:
        place = len(self.known[slot]) - len(PROMPT)
        return COMING[place % len(COMING)] if self.random.random() < 0.8 else 99


def _row(slot: int, kind: ItemKind, ids: list[int]) -> SampleRow:
    return SampleRow(offset=0 if kind is ItemKind.VERIFY else len(ids) - 1, slot=slot)


@given(
    st.integers(0, 2**32),
    st.lists(st.tuples(st.sampled_from(["start", "end", "verify", "decode"]), st.integers(0, 2))),
)
def test_a_quick_drafter_knows_all_when_it_is_asked_and_when_a_slot_ends(
    seed: int, events: list[tuple[str, int]]
) -> None:
    slots = QuickSlots(seed)
    for what, slot in events:
        if what == "start":
            slots.start(slot)
        elif slots.known and what == "decode":
            for _ in range(slots.random.choice([1, LOOK_STEPS // 2, 2 * LOOK_STEPS])):
                slots.decode()
        elif slot in slots.known:
            slots.end(slot) if what == "end" else slots.verify(slot, 1 + seed % 4)
        for found in slots.found.values():
            assert all(0 <= n.accepted <= n.drafted <= n.asked for n in found)
    for slot in list(slots.known):
        slots.end(slot)


def test_it_is_asked_however_often_others_start() -> None:
    slots = QuickSlots(0)
    slots.random.random = lambda: 0.0
    slots.start(0)
    for _ in range(4 * LOOK_STEPS):
        slots.start(1)
        slots.decode()
    assert len(slots.found[0]) > 1
    assert all(found.asked == found.accepted > 1 for found in slots.found[0])


def test_drafts_that_nothing_verifies_are_compared_with_what_was_drawn() -> None:
    slots = QuickSlots(0)
    slots.random.random = lambda: 0.0  # every draft token is right
    slots.start(0)
    for _ in range(2 * LOOK_STEPS):
        slots.decode()
    assert slots.found[0] == [DryRun(LOOK_STEPS, LOOK_STEPS, LOOK_STEPS)]
    slots.random.random = lambda: 1.0  # none is right
    for _ in range(LOOK_STEPS):
        slots.decode()
    assert slots.found[0][1:] == [DryRun(LOOK_STEPS, LOOK_STEPS, 1)]
    for _ in range(LOOK_STEPS):
        slots.decode()
    assert slots.found[0][2:] == [DryRun(LOOK_STEPS, LOOK_STEPS, 0)]
