"""A drafter for tests, which know what comes."""

from __future__ import annotations

from collections.abc import Sequence

from aioserve.drafting.drafter import DraftedSequence, Drafter

__all__ = ["PredictionDrafter"]


class PredictionDrafter(Drafter):
    """Drafts the predicted answer of a request, token by token, whatever the tokens before were."""

    def __init__(self) -> None:
        self._sequences: dict[int, DraftedSequence] = {}
        self._generated: dict[int, int] = {}

    def start(self, slot: int, sequence: DraftedSequence) -> None:
        self._sequences[slot] = sequence
        self._generated[slot] = len(sequence.known_ids) - sequence.prompt_tokens

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        self._generated[slot] += len(token_ids)

    def draft(self, slot: int, limit: int) -> Sequence[int]:
        first = self._generated[slot]
        return self._sequences[slot].predicted_ids[first : first + limit].tolist()

    def end(self, slot: int) -> None:
        del self._sequences[slot], self._generated[slot]
