"""How much memory to keep for output that doesn't exist yet."""

from __future__ import annotations

from aioserve.kv.pages import full_pages, pages_for_each
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
        ahead = pages_for_each(min(known + self.horizon_tokens, sequence.max_length), size)
        own = ahead - pages_for_each(known, size) + sequence.lease.shares_partial_page
        if sequence.pending_samples:
            own += len(sequence.pending_samples) * (ahead - full_pages(known, size))
        return own
