"""Contract of drafters, which propose the next tokens of sequences.

A step computes the draft tokens after the last token of a sequence, and keeps each one that it
would have drawn itself. So a drafter decides the speed of a completion and never its content. At
worst a draft token is computed in vain.

    start ──► extend ──► draft ──► extend ──► draft ──► .. ──► end
              the first            what the step drew,
              token                drafted or not
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
    """All data that a drafter gets of a sequence when it starts, or starts again."""

    known_ids: TokenIds
    """int32 `[known tokens]`, read-only: the prompt, and what was generated before."""
    prompt_tokens: int
    """Number of known tokens that belong to the prompt."""
    namespace: bytes = b""
    """Namespace of the sequence. Nothing learned from it may show in draft tokens for another
    namespace."""
    predicted_ids: TokenIds = NO_IDS
    """int32 `[predicted tokens]`: the completion that the caller expects; may be empty."""


class Drafter(ABC):
    """Proposes draft tokens for the sequences of one engine, each in a slot.

    All calls come one at a time, between two steps, and nothing is computed meanwhile. On a CPU
    they come from the thread of the steps. If a GPU computes, draft models and heads are called
    from that thread, too, and other drafters from the event loop's, which they hold up. After an
    exception the slots of that call get no more draft tokens; nothing else ends.
    """

    is_quick: bool = False
    """True if `extend` and `draft` take microseconds and asking twice does no harm.

    A quick drafter is also asked now and then when nothing is verified, to learn how often it is
    right without a verifying step. It then hears of several tokens at once, when it is asked.
    """

    @abstractmethod
    def start(self, slot: int, sequence: DraftedSequence) -> None:
        """Let a slot, which had ended or never started, belong to a sequence."""

    @abstractmethod
    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        """Append token ids, at least one, to the known tokens of a slot's sequence."""

    @abstractmethod
    def draft(self, slot: int, limit: int) -> Sequence[int]:
        """Propose at most `limit` tokens, at least 1, after the last one of a slot. Return none if
        nothing is worth the time of a row."""

    @abstractmethod
    def end(self, slot: int) -> None:
        """End a slot: its sequence has ended, or gave its memory back and will start again."""

    # A step asks about all its slots at once. A drafter that does this faster than one by one
    # overrides these.

    def extend_all(self, slots: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        """Call `extend` for each slot with its ids."""
        for slot, ids in zip(slots, token_ids, strict=True):
            self.extend(slot, ids)

    def draft_all(self, slots: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        """Call `draft` for each slot with its limit."""
        return [self.draft(slot, limit) for slot, limit in zip(slots, limits, strict=True)]

    # What follows is optional: alternatives to the first draft.

    def branches(self, slot: int, limit: int) -> Sequence[Sequence[int]]:
        """Propose other paths after the last token of a slot than `draft` just did, each of at
        least one token.

        All these tokens, and one more for each path, are at most `limit`. That is what `draft` left
        of its own limit, and at least 2. Asked only if an engine has `Speculation.max_branches`;
        paths beyond these are left out.
        """
        return ()
