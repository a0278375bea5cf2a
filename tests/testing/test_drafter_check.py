"""The check of drafters passes good ones, and finds each way to break the contract."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import pytest

from aioserve import ConfigError, Drafter
from aioserve.testing import check_drafter, drafter_check

ENOUGH_SMALLER = drafter_check.MAX_SMALLER


@pytest.fixture(autouse=True)
def _the_first_calls_that_show_a_fault_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of the time goes to the search for fewer."""
    monkeypatch.setattr(drafter_check, "MAX_SMALLER", 0)


class LastPair(Drafter):
    """Drafts what came behind the last token when a sequence of the namespace last had it."""

    def __init__(self, *, most: int = 3) -> None:
        self.most = most
        self.namespaces: dict[int, bytes] = {}
        self.last: dict[int, int] = {}
        self.next: dict[tuple[Any, int], int] = {}

    def key_of(self, slot: int) -> Any:
        return self.namespaces[slot]

    def start(self, slot, sequence):
        assert slot not in self.namespaces
        assert sequence.prompt_tokens <= len(sequence.known_ids)
        self.namespaces[slot] = sequence.namespace
        ids = [*sequence.predicted_ids.tolist(), *sequence.known_ids.tolist()]
        self.last[slot] = ids[0]
        self.extend(slot, ids[1:] or ids)

    def extend(self, slot, token_ids):
        for token_id in token_ids:
            self.next[self.key_of(slot), self.last[slot]] = token_id
            self.last[slot] = token_id

    def draft(self, slot, limit):
        draft_tokens = [self.last[slot]]
        while len(draft_tokens) <= min(limit, self.most):
            following = self.next.get((self.key_of(slot), draft_tokens[-1]))
            if following is None:
                break
            draft_tokens.append(following)
        return draft_tokens[1:]

    def end(self, slot):
        del self.namespaces[slot], self.last[slot]


class AtOnce(LastPair):
    def extend_all(self, slots, token_ids):
        for slot, ids in zip(slots, token_ids, strict=True):
            self.extend(slot, ids)

    def draft_all(self, slots, limits):
        return [
            np.array(self.draft(slot, limit), np.int32)
            for slot, limit in zip(slots, limits, strict=True)
        ]


class Branching(LastPair):
    def branches(self, slot, limit):
        return [[self.last[slot]] for _ in range(limit // 2)]


@pytest.mark.parametrize("make", [LastPair, AtOnce, lambda: LastPair(most=8), Branching])
def test_drafters_that_keep_the_contract_pass(make):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        times = check_drafter(make, max_examples=60)
    assert times.start_seconds > 0
    assert times.step_seconds > 0


class Leaking(LastPair):
    def key_of(self, slot):
        return None


class KeyedBySlot(LastPair):
    """Leaves what a slot's last sequence had to the next one."""

    def key_of(self, slot):
        return slot


class ByItsSlot(LastPair):
    def draft(self, slot, limit):
        return super().draft(slot, limit)[: slot + 1]


class Random(LastPair):
    def draft(self, slot, limit):
        return [random.randrange(1000)]


class TooMany(LastPair):
    def draft(self, slot, limit):
        return [1] * (limit + 1)


class TooManyBranches(LastPair):
    def branches(self, slot, limit):
        return [[1]] * (limit // 2 + 1)


class RandomBranches(LastPair):
    def branches(self, slot, limit):
        return [[random.randrange(1000)]]


class NoIds(LastPair):
    def draft(self, slot, limit):
        return [-1]


class Floats(LastPair):
    def draft(self, slot, limit):
        return np.array(super().draft(slot, limit), np.float32)


class TooLarge(LastPair):
    def draft(self, slot, limit):
        return [2**31]


class Forgetful(LastPair):
    """Forgets all slots where one ends."""

    def end(self, slot):
        self.namespaces.clear()


class Writing(LastPair):
    def start(self, slot, sequence):
        sequence.known_ids[0] = 0
        super().start(slot, sequence)


class OtherAtOnce(LastPair):
    def draft_all(self, slots, limits):
        return [self.draft(slot, 1) for slot in slots]


class DeafAtOnce(LastPair):
    def extend_all(self, slots, token_ids):
        pass


class OneMoreAtOnce(LastPair):
    def draft_all(self, slots, limits):
        return [*super().draft_all(slots, limits), []]


class UsedUp(LastPair):
    is_quick = True

    def draft(self, slot, limit):
        draft_tokens = super().draft(slot, limit)
        self.next.clear()
        return draft_tokens


class Quickly(LastPair):
    is_quick: Any = "yes"


class Misspelt(LastPair):
    def draf_all(self, slots, limits):
        return []


class Asynchronous(LastPair):
    async def extend(self, slot, token_ids):
        pass


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Leaking, r"elsewhere: the first is one that hears of namespace b'.*' alone"),
        (KeyedBySlot, "elsewhere: the first is one that hears of namespace"),
        (ByItsSlot, "elsewhere: the first is one that hears of namespace"),
        (Random, "elsewhere: the first is a new one that hears the same"),
        (TooMany, "which is more than [0-9] draft token"),
        (TooManyBranches, "with more ids, and one for each branch, than [0-9]"),
        (RandomBranches, "elsewhere: the first is a new one that hears the same"),
        (NoIds, r"answered \[-1\], with -1, no id in \[0, 2147483648\)"),
        (Floats, "no id in"),
        (TooLarge, "with 2147483648, no id in"),
        (Forgetful, "raised KeyError"),
        (Writing, "raised ValueError"),
        (OtherAtOnce, "elsewhere: the first is one that is asked about all slots at once"),
        (DeafAtOnce, "elsewhere: the first is one that is asked about all slots at once"),
        (OneMoreAtOnce, "which is no sequence with an entry for each of slots"),
        (UsedUp, "elsewhere: the first is one that is asked twice"),
        (Quickly, "Quickly.is_quick must be True or False, got 'yes'"),
        (Misspelt, r"draf_all is never called: did you mean draft_all\?"),
        (Asynchronous, "extend must be a plain function"),
        (object, "drafter must be a Drafter object"),
    ],
)
def test_each_way_to_break_it_is_found_and_told(make, said):
    with pytest.raises(AssertionError, match=said):
        check_drafter(make, max_examples=300)


def test_the_calls_that_show_it_are_told_and_few(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(drafter_check, "MAX_SMALLER", ENOUGH_SMALLER)
    with pytest.raises(AssertionError) as failed:
        check_drafter(TooMany, max_examples=100)
    said = str(failed.value).splitlines()
    assert said[0].startswith("the last of these calls answered [1, 1")
    assert said[1].startswith("  start(0, known_ids=[")
    assert said[2].startswith("  extend(0, (")
    assert said[-1].startswith("  draft(")
    assert len(said) < 20


def test_a_factory_that_gives_one_object_twice_is_told():
    drafter = LastPair()
    with pytest.raises(AssertionError, match="must make a new drafter with each call"):
        check_drafter(lambda: drafter)
    wrong: Any = 3
    with pytest.raises(ConfigError, match="make_drafter must be callable, got 3"):
        check_drafter(wrong)
