"""Drafters that know the completions, and make the best and the worst of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle

from aioserve import hookimpl
from aioserve.drafting.drafter import DraftedSequence, Drafter
from aioserve.plugins import DrafterSpec
from tests.parity.tiny_models import VOCAB_SIZE

__all__ = ["Answers", "DrafterPlugin"]

EOS_TOKEN_ID = 2

Answers = Mapping[tuple[int, ...], Sequence[Sequence[int]]]
"""All samples of a prompt, by its ids."""


class Moody(Drafter):
    """Drafts for each sequence in another manner of `MANNERS`, in turn."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._known: dict[int, list[int]] = {}
        self._prompts: dict[int, tuple[int, ...]] = {}
        self._manners: dict[int, Manner] = {}
        self._turns: Iterator[Manner] = cycle(MANNERS)

    def start(self, slot: int, sequence: DraftedSequence) -> None:
        assert slot not in self._known, "nothing of a slot is left when another starts there"
        self._known[slot] = sequence.known_ids.tolist()
        self._prompts[slot] = tuple(self._known[slot][: sequence.prompt_tokens])
        self._manners[slot] = next(self._turns)

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        self._known[slot] += token_ids

    def draft(self, slot: int, limit: int) -> Sequence[int]:
        coming = self._coming(slot)[:limit]
        return self._manners[slot](coming, len(self._known[slot]), limit)

    def branches(self, slot: int, limit: int) -> Sequence[Sequence[int]]:
        right = self._coming(slot)[: limit - 1]
        place = len(self._known[slot])
        return [right] if right and place % 7 else []

    def end(self, slot: int) -> None:
        del self._known[slot], self._prompts[slot], self._manners[slot]

    def _coming(self, slot: int) -> list[int]:
        """Tokens that follow in the sample that begins with the tokens so far."""
        prompt = self._prompts[slot]
        generated = self._known[slot][len(prompt) :]
        for sample in self._answers.get(prompt, ()):
            if [*sample[: len(generated)]] == generated:
                return [*sample[len(generated) :]]
        return []


Manner = Callable[[list[int], int, int], Sequence[int]]
"""Draft tokens, made from the right ones, the number of known tokens, and the limit."""


def _right(coming: list[int], place: int, limit: int) -> Sequence[int]:
    return coming


def _right_at_first(coming: list[int], place: int, limit: int) -> Sequence[int]:
    return [*coming[: place % 3], *_wrong(coming[place % 3 :], place, limit)]


def _wrong(coming: list[int], place: int, limit: int) -> Sequence[int]:
    return [(token_id + 1) % VOCAB_SIZE for token_id in coming]


def _wrong_at_once(coming: list[int], place: int, limit: int) -> Sequence[int]:
    """Wrong at once, so that there is room for a branch."""
    return _wrong(coming[:1], place, limit)


def _anything(coming: list[int], place: int, limit: int) -> Sequence[int]:
    return [(7 * place + 3 * index * index) % VOCAB_SIZE for index in range(place % (limit + 1))]


def _an_end(coming: list[int], place: int, limit: int) -> Sequence[int]:
    """Ends the completion after one more token each time, and goes on."""
    right = coming[: place % limit]
    return [*right, EOS_TOKEN_ID, *coming[len(right) + 1 :]][:limit]


def _no_token(coming: list[int], place: int, limit: int) -> Sequence[int]:
    return coming if place % 5 else [-1 if place % 2 else 1 << 30]


def _raises(coming: list[int], place: int, limit: int) -> Sequence[int]:
    if place % 5 == 0:
        raise RuntimeError("planted")
    return coming


MANNERS: tuple[Manner, ...] = (
    _right,
    _wrong,
    _right_at_first,
    _wrong_at_once,
    _anything,
    _right,
    _an_end,
    _no_token,
    _raises,
)


class DrafterPlugin:
    """Offers `moody`, which knows these completions."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    @hookimpl
    def aioserve_drafters(self) -> Sequence[DrafterSpec]:
        return [DrafterSpec("moody", lambda: Moody(self._answers))]
