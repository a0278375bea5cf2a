"""What a scheduler knows of draft tokens: of each sequence, and of all together."""

from __future__ import annotations

from aioserve.scheduling.speculation.draft_lengths import DraftLengths, DraftRecord

__all__ = ["SequenceDrafts", "Speculation"]


class SequenceDrafts:
    """Draft tokens of one sequence."""

    __slots__ = ("record", "skipped_for_mask", "unverified_tokens")

    def __init__(self, record: DraftRecord) -> None:
        self.record: DraftRecord = record
        self.unverified_tokens: int = 0
        """Draft tokens in flight: some of the sequence's pending tokens, which may be wrong."""
        self.skipped_for_mask: bool = False
        """It sat the last step out, since it wasn't known what may come next in it."""


class Speculation:
    """Draft tokens of all sequences."""

    def __init__(self) -> None:
        self.is_on: bool = False
        """Some request has ever asked for draft tokens."""
        self.lengths: DraftLengths = DraftLengths()

    def drafts_of(self, limit: int) -> SequenceDrafts:
        """For a new sequence, of which a step may verify `limit` draft tokens."""
        self.is_on = True
        return SequenceDrafts(DraftRecord(limit, self.lengths.usual))
