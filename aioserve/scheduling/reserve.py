"""How much memory to keep for output that doesn't exist yet."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from aioserve.scheduling.sequence import SequenceState

__all__ = ["OutputReserve"]


class OutputReserve:
    """Keeps pages for the next `horizon_tokens` of every running answer.

    Too small a reserve admits requests that are preempted soon after, and their prompts are
    computed twice; too large a one leaves pages empty. Answers end unpredictably, so nothing is
    reserved beyond the horizon.
    """

    def __init__(self, page_size: int, horizon_tokens: int) -> None:
        self.page_size = page_size
        self.horizon_tokens = horizon_tokens

    def pages_ahead(self, sequence: SequenceState) -> int:
        """Pages that the sequence may need within the horizon beyond those of its known tokens.

        Further samples of its prompt will share the full pages, and need their own after those.
        """
        size, known = self.page_size, sequence.num_known + sequence.pending
        ahead = -(-min(known + self.horizon_tokens, sequence.max_length) // size)
        own = ahead + -known // size + sequence.lease.shares_partial_page
        if sequence.unborn:
            own += len(sequence.unborn) * (ahead - known // size)
        return own

    def pages_ahead_of(
        self, known: npt.NDArray[np.int64], max_length: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """The same of sequences that share no page in part and have no unborn samples, by the
        tokens that they know, pending ones included, and may have."""
        ahead = np.minimum(known + self.horizon_tokens, max_length)
        return -(-ahead // self.page_size) + -known // self.page_size

    def total(self, sequences: Iterable[SequenceState]) -> int:
        return sum([self.pages_ahead(sequence) for sequence in sequences])
