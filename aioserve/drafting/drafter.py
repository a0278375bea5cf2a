"""The contract of drafters: what guesses the next tokens of sequences.

A step computes the guesses behind the last token of a sequence, and keeps those that are what it
would have drawn itself. So a drafter decides how fast an answer comes and never what is in it: the
worst that a guess can do is to be computed in vain.

    start ──► extend ──► draft ──► extend ──► draft ──► .. ──► end
              the first            what the step drew,
              token                guessed or not
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.arguments import MadeByNames

__all__ = ["NO_IDS", "DraftedSequence", "Drafter"]

TokenIds = npt.NDArray[np.int32]

NO_IDS: TokenIds = np.empty(0, np.int32)
NO_IDS.flags.writeable = False


class DraftedSequence(msgspec.Struct, frozen=True, kw_only=True, eq=False, metaclass=MadeByNames):
    """All that a drafter hears of a sequence when it starts, or starts again."""

    known_ids: TokenIds
    """int32 `[known tokens]`, for reading alone: the prompt, and what was generated before."""
    prompt_tokens: int
    """How many of them are the prompt."""
    namespace: bytes = b""
    """Nothing that a drafter learns from a sequence may show in guesses for another namespace."""
    predicted_ids: TokenIds = NO_IDS
    """int32 `[predicted tokens]`: what the caller expects the answer to be; may be empty."""


class Drafter(ABC):
    """Guesses for the sequences of one engine, each in a slot.

    All calls come one at a time, between two steps: what they take is time in which nothing is
    computed. On a CPU they come from the thread of the steps; where a GPU computes, from that of
    the event loop, which they hold up too, unless what guesses is a draft model or head. An
    exception ends nothing but the guessing for the slots that it was called for.
    """

    is_quick: bool = False
    """Whether `extend` and `draft` take microseconds, and asking twice does no harm. Such a drafter
    is asked now and again where nothing is verified, which tells how often it is right without a
    step that verifies, and hears there of several tokens at once, when it is asked."""

    @abstractmethod
    def start(self, slot: int, sequence: DraftedSequence) -> None:
        """A slot, which had ended or never started, belongs to a sequence."""

    @abstractmethod
    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        """Append token ids, at least one, to what is known of a slot's sequence."""

    @abstractmethod
    def draft(self, slot: int, limit: int) -> Sequence[int]:
        """Guess at most `limit` tokens, at least 1, behind the last one of a slot; none where
        nothing is worth the time of a row."""

    @abstractmethod
    def end(self, slot: int) -> None:
        """A slot's sequence has ended, or gave its memory back and will start again."""

    # A step asks about all its slots at once. One that does this faster than one by one overrides
    # these.

    def extend_all(self, slots: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        """`extend` each slot with the ids beside it."""
        for slot, ids in zip(slots, token_ids, strict=True):
            self.extend(slot, ids)

    def draft_all(self, slots: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        """`draft` for each slot, by the limit beside it."""
        return [self.draft(slot, limit) for slot, limit in zip(slots, limits, strict=True)]

    # What follows is for drafters that have a second thought.

    def branches(self, slot: int, limit: int) -> Sequence[Sequence[int]]:
        """Guess otherwise behind the last token of a slot than `draft` just did: other paths from
        there on, each of at least one token. All these tokens, and one more for each path, are at
        most `limit`, at least 2: what `draft` left of its own. Asked only where an engine has
        `Speculation.max_branches`; paths beyond these are left out."""
        return ()
