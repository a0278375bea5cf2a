"""Verify tokens after the last one of a sequence, from any source."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from aioserve.scheduling.parts.base import RowPart
from aioserve.scheduling.sequence import SequenceState
from aioserve.steps.plan import DRAFT_TOKEN, PENDING_TOKEN, ItemKind, WorkItem

__all__ = ["VerifyingPart", "ids_to_verify"]


class VerifyingPart(RowPart):
    """Part of items of kind `VERIFY`."""

    def first_written(self, item: WorkItem, num_known: int) -> int:
        """Position of the first token that a failed item may have written. It may have begun
        earlier than its plan says."""
        return min(item.start, num_known - 1) if item.kind is ItemKind.VERIFY else item.start

    def is_beyond_a_token(self, item: WorkItem) -> bool:
        return item.kind is ItemKind.VERIFY


def ids_to_verify(sequence: SequenceState, start: int, count: int) -> npt.NDArray[np.int32]:
    """Last token of a sequence, at position `start`, and draft tokens: int32 `[count]`."""
    token_ids = np.full(count, DRAFT_TOKEN, np.int32)
    token_ids[0] = PENDING_TOKEN if sequence.pending else sequence.ids(start, 1)[0]
    return token_ids
