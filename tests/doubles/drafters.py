"""Drafters of every character: one knows all completions, one is always wrong, one proposes
anything."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache

from aioserve import DrafterSpec, hookimpl
from aioserve.drafting.drafter import DraftedSequence, Drafter
from aioserve.testing.fake_device import VOCAB_SIZE, expected_tokens

__all__ = [
    "DraftRule",
    "FakeModelDrafters",
    "QuickFakeModelDrafter",
    "ScriptedDrafter",
    "anything",
    "nothing_right",
    "right_up_to",
]

DraftRule = Callable[[Sequence[int], Sequence[int], int], Sequence[int]]
"""Maps known ids of a sequence, the coming ids, and the most draft tokens to draft tokens."""


class ScriptedDrafter(Drafter):
    """Drafts by a function that knows the coming tokens: `answer` returns the tokens after known
    ids.

    Raises AssertionError for calls that the contract of drafters rules out.
    """

    def __init__(self, answer: Callable[[DraftedSequence, int], Sequence[int]], rule: DraftRule):
        self.known: dict[int, list[int]] = {}
        self.num_draft_tokens = 0
        self._answer, self._rule = answer, rule
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
        draft_tokens = list(self._rule(known, coming, limit))
        self.num_draft_tokens += len(draft_tokens)
        return draft_tokens

    def end(self, slot: int) -> None:
        del self.known[slot], self._sequences[slot]


class FakeModelDrafter(ScriptedDrafter):
    """Knows the completions of a `FakeModel` for prompts, with the seed that `seed_of` returns for
    their ids.

    They are those of the first of a request's samples. Raises AssertionError, which an engine
    counts as a fault, for tokens that occur in none of the first `MOST_SAMPLES`.
    """

    def __init__(self, rule: DraftRule, seed_of: Callable[[Sequence[int]], int]):
        super().__init__(lambda sequence, count: self._sample(sequence, 0)[:count], rule)
        self._seed_of = seed_of

    def draft(self, slot: int, limit: int) -> Sequence[int]:
        sequence, known = self._sequences[slot], self.known[slot]
        generated = known[sequence.prompt_tokens :]
        assert any(
            self._sample(sequence, sample)[: len(generated)] == generated
            for sample in range(MOST_SAMPLES)
        )
        return super().draft(slot, limit)

    def _sample(self, sequence: DraftedSequence, sample: int) -> list[int]:
        prompt = tuple(sequence.known_ids[: sequence.prompt_tokens].tolist())
        return _tokens(prompt, self._seed_of(prompt) + sample)


class QuickFakeModelDrafter(FakeModelDrafter):
    """A drafter that is watched while nothing is verified."""

    is_quick = True

    def __init__(self, rule: DraftRule, seed_of: Callable[[Sequence[int]], int]):
        super().__init__(rule, seed_of)
        self.limits: list[int] = []
        """Most draft tokens of each call."""

    def draft(self, slot: int, limit: int) -> Sequence[int]:
        self.limits.append(limit)
        return super().draft(slot, limit)


MOST_SAMPLES = 3
MOST_TOKENS = 256


@cache
def _tokens(prompt: tuple[int, ...], seed: int) -> list[int]:
    return expected_tokens(prompt, MOST_TOKENS, seed)


class FakeModelDrafters:
    """A plugin that offers `scripted`: a `FakeModelDrafter` with that function, or the `made`
    drafter."""

    def __init__(
        self,
        rule: DraftRule,
        seed_of: Callable[[Sequence[int]], int] = lambda ids: 0,
        *,
        made: Callable[[], Drafter] | None = None,
    ):
        self._made = made or (lambda: FakeModelDrafter(rule, seed_of))

    @hookimpl
    def aioserve_drafters(self) -> Sequence[DrafterSpec]:
        return [DrafterSpec("scripted", self._made)]


def right_up_to(count: int) -> DraftRule:
    """Right in the first `count` draft tokens, and wrong in all others."""

    def rule(known: Sequence[int], coming: Sequence[int], limit: int) -> Sequence[int]:
        return [(token + (place >= count)) % VOCAB_SIZE for place, token in enumerate(coming)]

    return rule


def nothing_right(known: Sequence[int], coming: Sequence[int], limit: int) -> Sequence[int]:
    return [(token + 1) % VOCAB_SIZE for token in coming]


def anything(source: random.Random) -> DraftRule:
    """A random number of draft tokens, about half of them right."""

    def rule(known: Sequence[int], coming: Sequence[int], limit: int) -> Sequence[int]:
        count = source.randint(0, limit)
        return [
            t if source.random() < 0.6 else source.randrange(VOCAB_SIZE) for t in coming[:count]
        ]

    return rule
