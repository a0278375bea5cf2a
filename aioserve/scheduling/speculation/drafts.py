"""State of draft tokens in a scheduler, per sequence and of all together."""

from __future__ import annotations

from aioserve.scheduling.speculation.draft_lengths import DraftLengths, DraftRecord

__all__ = ["SequenceDrafts", "Speculation"]


class SequenceDrafts:
    """Draft tokens of one sequence."""

    __slots__ = ("record", "skipped_for_mask", "unverified_tokens")

    def __init__(self, record: DraftRecord) -> None:
        self.record: DraftRecord = record
        self.unverified_tokens: int = 0
        """Draft tokens in flight: pending tokens that may be wrong."""
        self.skipped_for_mask: bool = False
        """True if the sequence sat the last step out to wait for its mask."""


class Speculation:
    """Draft tokens of all sequences."""

    def __init__(self) -> None:
        self.is_on: bool = False
        """True once a request has asked for draft tokens."""
        self.lengths: DraftLengths = DraftLengths()

    def drafts_of(self, limit: int) -> SequenceDrafts:
        """State for a new sequence with at most `limit` draft tokens in a step."""
        self.is_on = True
        return SequenceDrafts(DraftRecord(limit, self.lengths.usual))
