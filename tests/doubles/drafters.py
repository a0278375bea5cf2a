"""Drafters of every character: one knows all answers, one is always wrong, one guesses anything."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from aioserve.drafting.drafter import DraftedSequence, Drafter

__all__ = ["Guess", "ScriptedDrafter", "anything", "nothing_right", "right_up_to"]

Guess = Callable[[Sequence[int], Sequence[int], int], Sequence[int]]
"""Known ids of a sequence, those that come next, and the most that may be guessed -> guesses."""


class ScriptedDrafter(Drafter):
    """Guesses by a function that is told what comes: `answer` gives the tokens behind known ids.

    Raises AssertionError for calls that the contract of drafters rules out.
    """

    def __init__(self, answer: Callable[[DraftedSequence, int], Sequence[int]], guess: Guess):
        self.known: dict[int, list[int]] = {}
        self.num_guesses = 0
        self._answer, self._guess = answer, guess
        self._sequences: dict[int, DraftedSequence] = {}

    def start(self, slot: int, sequence: DraftedSequence) -> None:
        assert slot not in self.known
        self.known[slot] = sequence.known_ids.tolist()
        self._sequences[slot] = sequence

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        assert len(token_ids)
        self.known[slot] += token_ids

    def draft(self, slot: int, limit: int) -> Sequence[int]:
        assert limit >= 1
        known, sequence = self.known[slot], self._sequences[slot]
        generated = len(known) - sequence.prompt_tokens
        coming = self._answer(sequence, generated + limit)[generated:]
        guesses = list(self._guess(known, coming, limit))
        self.num_guesses += len(guesses)
        return guesses

    def end(self, slot: int) -> None:
        del self.known[slot], self._sequences[slot]


def right_up_to(count: int) -> Guess:
    """Right in the first `count` guesses, and wrong in all others."""

    def guess(known: Sequence[int], coming: Sequence[int], limit: int) -> Sequence[int]:
        return [token + (place >= count) for place, token in enumerate(coming)]

    return guess


def nothing_right(known: Sequence[int], coming: Sequence[int], limit: int) -> Sequence[int]:
    return [token + 1 for token in coming]


def anything(source: random.Random) -> Guess:
    """As many guesses as chance has it, about half of them right."""

    def guess(known: Sequence[int], coming: Sequence[int], limit: int) -> Sequence[int]:
        count = source.randint(0, limit)
        return [t if source.random() < 0.6 else source.randrange(300) for t in coming[:count]]

    return guess
