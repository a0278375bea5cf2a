"""Guards of drafters raise nothing and give only draft tokens, whatever the drafter does. After a
fault they stop asking about its slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.drafting.drafter import NO_IDS, DraftedSequence, Drafter
from aioserve.drafting.guarded import GuardedDrafter
from tests.plugin_system.hostile import ERRORS, TOUCHES, contained, hostile

VOCAB_SIZE = 50
SLOTS = 4
HOSTILE = [hostile([touch], ValueError) for touch in TOUCHES]
NO_ANSWERS: list[Any] = [
    *(None, 7, "7", b"7", {7}, {7: 7}, iter([7]), object()),
    *([-1], [VOCAB_SIZE], [2**40], [True], [1.0], ["1"], [None], [[1]], [1, 2, 3, 4]),
    *(np.zeros((1, 1), np.int32), np.zeros(1), np.full(1, VOCAB_SIZE), np.array(3)),
    *HOSTILE,
    *([each] for each in HOSTILE),
]
LIMIT = 3
ANSWERS: list[Any] = [[], (), [0], [1, 2, 3], (49,), np.array([4, 5], np.int32), range(3)]
ANSWERS += [[np.int64(7)], np.empty(0, np.int64)]


def sequence_of(*token_ids: int) -> DraftedSequence:
    return DraftedSequence(known_ids=np.array(token_ids, np.int32), prompt_tokens=len(token_ids))


class Planned(Drafter):
    """Holds callers to the contract, and does in each call what `plan` says."""

    def __init__(self, plan: Any) -> None:
        self.plan = plan
        self.live: set[int] = set()
        self.failed: set[int] = set()
        self.faults = 0

    def start(self, slot, sequence):
        assert slot not in self.live | self.failed
        self.step([], "start")
        self.live.add(slot)

    def extend(self, slot, token_ids):
        assert slot in self.live
        assert token_ids
        self.step([slot], "extend")

    def draft(self, slot, limit):
        assert slot in self.live
        return self.answer(slot, limit)

    def end(self, slot):
        assert slot in self.live | self.failed
        self.live.discard(slot)
        self.failed.discard(slot)
        self.step([], "end")

    def step(self, slots: Sequence[int], what: str) -> None:
        if (error := self.plan(what)) is not None:
            self.fail(slots)
            raise error("planted")

    def fail(self, slots: Sequence[int]) -> None:
        self.faults += 1
        self.live.difference_update(slots)
        self.failed.update(slots)

    def answer(self, slot: int, limit: int) -> Any:
        self.step([slot], "draft")
        answer, good = self.plan("answer")
        if not good:
            self.fail([slot])
        self.answers[slot] = [int(each) for each in answer][:limit] if good else []
        return answer

    answers: dict[int, list[int]] = {}


class PlannedAtOnce(Planned):
    """Takes all slots of a step in one call."""

    def extend_all(self, slots, token_ids):
        assert slots
        assert self.live.issuperset(slots)
        assert all(token_ids)
        self.step(slots, "extend")

    def draft_all(self, slots, limits):
        assert slots
        assert self.live.issuperset(slots)
        self.step(slots, "draft")
        answers: list[Any] = []
        for slot in slots:
            answer, good = self.plan("answer")
            if not good:
                self.fail([slot])
            self.answers[slot] = [int(each) for each in answer] if good else []
            answers.append(answer)
        return answers


class Chance:
    """Draws what a `Planned` drafter does."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def __call__(self, what: str) -> Any:
        if what == "answer":
            good = self.draw(st.integers(0, 9)) < 8
            # By its number: hypothesis would look at what is drawn.
            place = self.draw(st.integers(0, len(ANSWERS if good else NO_ANSWERS) - 1))
            return (ANSWERS if good else NO_ANSWERS)[place], good
        if self.draw(st.integers(0, 19)) > 0:
            return None
        return ERRORS[self.draw(st.integers(0, len(ERRORS) - 1))]


@contained
@given(kind=st.sampled_from([Planned, PlannedAtOnce]), data=st.data())
def test_a_guard_never_raises_and_asks_only_about_slots_without_a_fault(kind, data):
    drafter = kind(Chance(data.draw))
    guard = GuardedDrafter(drafter, VOCAB_SIZE)
    started: set[int] = set()
    for _ in range(data.draw(st.integers(1, 40))):
        call = data.draw(st.sampled_from(["start", "extend", "draft", "draft", "end"]))
        if call == "start" and len(started) < SLOTS:
            slot = min(set(range(SLOTS)) - started)
            guard.start(slot, sequence_of(1, 2))
            started.add(slot)
        elif call == "end" and started:
            slot = data.draw(st.sampled_from(sorted(started)))
            guard.end(slot)
            started.discard(slot)
        elif call == "extend" and started:
            slots = sorted(started)
            guard.extend_all(slots, [[slot] for slot in slots])
        elif call == "draft" and started:
            slots = sorted(started)
            asked = drafter.live.copy()
            drafter.answers = {}
            draft_tokens = guard.draft_all(slots, [LIMIT] * len(slots))
            for slot, found in zip(slots, draft_tokens, strict=True):
                assert list(found) == drafter.answers.get(slot, [])
                assert all(type(token_id) is int for token_id in found)
                assert slot in asked or not found
        assert guard.faults_total == drafter.faults


@contained
def test_each_answer_that_is_none_ends_the_drafts_of_its_slot_alone():
    class Wrong(Planned):
        def answer(self, slot, limit):
            return self.plan("answer") if slot == 0 else [slot]

    for answer in NO_ANSWERS:

        def plan(what: str, answer: Any = answer) -> Any:
            return answer if what == "answer" else None

        guard = GuardedDrafter(Wrong(plan), VOCAB_SIZE)
        for slot in (0, 1):
            guard.start(slot, sequence_of(1))
        assert [*map(list, guard.draft_all([0, 1], [LIMIT, LIMIT]))] == [[], [1]]
        assert [*map(list, guard.draft_all([0, 1], [LIMIT, LIMIT]))] == [[], [1]]
        assert guard.faults_total == 1


@pytest.mark.parametrize("answer", [[], [[1]], [[1]] * 3, None, 3, iter([[1], [1]]), "ab"])
def test_an_answer_for_all_slots_that_is_none_ends_the_drafts_of_all(answer):
    class Wrong(Planned):
        def draft_all(self, slots, limits):
            return answer

    guard = GuardedDrafter(Wrong(lambda what: None), VOCAB_SIZE)
    for slot in (0, 1):
        guard.start(slot, sequence_of(1))
    assert [*map(list, guard.draft_all([0, 1], [LIMIT, LIMIT]))] == [[], []]
    assert guard.faults_total == 1
    assert list(guard.draft(0, LIMIT)) == []
    assert guard.faults_total == 1


def test_a_slot_that_starts_again_is_drafted_for_again():
    plans = iter([None, ValueError, None, None, None])
    drafter = Planned(lambda what: ([4], True) if what == "answer" else next(plans))
    guard = GuardedDrafter(drafter, VOCAB_SIZE)
    guard.start(2, sequence_of(1))
    assert list(guard.draft(2, LIMIT)) == []
    guard.end(2)
    guard.start(2, sequence_of(1))
    assert list(guard.draft(2, LIMIT)) == [4]


def test_what_a_drafter_is_told_is_for_reading_alone():
    class Writing(Planned):
        def start(self, slot, sequence):
            sequence.known_ids[0] = 9

        def extend(self, slot, token_ids):
            token_ids.append(9)

    known, more = np.array([1, 2], np.int32), [3]
    guard = GuardedDrafter(Writing(lambda what: None), VOCAB_SIZE)
    guard.start(0, DraftedSequence(known_ids=known, prompt_tokens=2))
    guard.extend(0, more)
    assert (known.tolist(), more, NO_IDS.tolist()) == ([1, 2], [3], [])
    assert known.flags.writeable
    assert guard.faults_total == 1  # one that failed to start isn't told of more


def test_the_log_names_the_drafter_and_the_fault(caplog):
    guard = GuardedDrafter(Planned(lambda what: ValueError), VOCAB_SIZE, "mine (some-dist 1.2)")
    guard.start(0, sequence_of(1))
    (record,) = caplog.records
    said = "drafter mine (some-dist 1.2): start raised ValueError('planted'); it is no longer asked"
    assert record.getMessage().startswith(said)


@pytest.mark.parametrize("answer", [[], (), [[1]], [(1, 2), np.array([3], np.int32)], [range(4)]])
def test_branches_come_as_plain_ids(answer):
    guard = GuardedDrafter(branching(answer), VOCAB_SIZE)
    guard.start(0, sequence_of(1))
    assert guard.branches(0, 5) == [list(branch) for branch in answer]
    assert guard.faults_total == 0


NO_BRANCHES: list[Any] = [
    *(None, "1", iter([[1]]), [1], [[]], [[VOCAB_SIZE]], [[1, 2], [3, 4]], [[1] * 5]),
    *HOSTILE,
]


@pytest.mark.parametrize("index", range(len(NO_BRANCHES)))
def test_branches_that_are_none_end_the_drafts_of_their_slot_alone(index):
    guard = GuardedDrafter(branching(NO_BRANCHES[index]), VOCAB_SIZE)
    for slot in range(2):
        guard.start(slot, sequence_of(1))
    assert guard.branches(0, 5) == []
    assert guard.faults_total == 1
    assert guard.branches(0, 5) == []
    assert [*guard.draft_all((0, 1), (5, 5))] == [(), [7]]
    assert guard.faults_total == 1


def branching(answer: object) -> Drafter:
    class Branching(Drafter):
        def start(self, slot, sequence): ...

        def extend(self, slot, token_ids): ...

        def end(self, slot): ...

        def draft(self, slot, limit):
            return [7]

        def branches(self, slot, limit):
            return answer

    return Branching()
