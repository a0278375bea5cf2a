"""Prompt lookup: propose what followed the last few tokens at their previous occurrence."""

from __future__ import annotations

from collections.abc import Sequence

from aioserve import _native
from aioserve.arguments import check, integer
from aioserve.drafting.at_once import AtOnce
from aioserve.drafting.drafter import DraftedSequence
from aioserve.errors import ConfigError

__all__ = ["MAX_NGRAM", "NgramDrafter"]

MAX_NGRAM = 8
"""Largest length of a run. Each length has an index, which takes its time."""


class NgramDrafter(AtOnce):
    """Proposes that a sequence goes on as it did at the previous occurrence of its last tokens.

    Prompt lookup decoding (Saxena 2023, "Prompt Lookup Decoding"), with an index in place of a
    search. It takes the longest run of last tokens that occurred before, of `min_ngram` to
    `max_ngram` tokens, and proposes what followed it there. A draft that gets to the end of the
    sequence goes on into itself, like a loop.

    The caller's prediction comes first. If it contains the last two tokens of the completion, or
    all of a shorter one, the prediction is followed.

    Memory is at most 8 bytes for each token of a sequence, and 16 more for each length from
    `min_ngram` to `max_ngram`. A prediction takes 264 bytes for each token. Not thread-safe.
    """

    is_quick = True

    def __init__(self, *, min_ngram: int = 2, max_ngram: int = 5) -> None:
        """Raises `ConfigError` unless `1 <= min_ngram <= max_ngram <= MAX_NGRAM`."""
        longest = check(ConfigError, "max_ngram", max_ngram, integer(1, MAX_NGRAM))
        shortest = check(ConfigError, "min_ngram", min_ngram, integer(1, longest))
        self._native = _native.NgramDrafter(shortest, longest)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory for all slots."""
        return self._native.num_bytes

    def start(self, slot: int, sequence: DraftedSequence) -> None:
        """Raises `InvariantError` if the slot has not ended, `ValueError` for ids below 0."""
        self._native.start(slot, sequence.known_ids, sequence.prompt_tokens, sequence.predicted_ids)

    def end(self, slot: int) -> None:
        self._native.end(slot)

    def extend_all(self, slots: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        self._native.extend(slots, token_ids)

    def draft_all(self, slots: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        return self._native.draft(slots, limits)
