"""How much memory to keep for output that doesn't exist yet."""

from __future__ import annotations

from aioserve.kv.pages import full_pages, pages_for_each
from aioserve.kv.windows import Windows
from aioserve.scheduling.sequence import SequenceState

__all__ = ["OutputReserve"]


class OutputReserve:
    """Keeps pages for the next `horizon_tokens` of every running answer.

    Too small a reserve admits requests that are preempted soon after, and their prompts are
    computed twice; too large a one leaves pages empty. Answers end unpredictably, so nothing is
    reserved beyond the horizon.
    """

    def __init__(self, page_size: int, horizon_tokens: int, windows: Windows) -> None:
        self.page_size = page_size
        self.horizon_tokens = horizon_tokens
        self._windows = windows

    def pages_ahead(self, sequence: SequenceState) -> int:
        """Pages that the sequence may need within the horizon beyond those of its known tokens.

        Further samples of its prompt will share the full pages, and need their own after those.
        Window pages that the rest of its prompt needs are among them: they aren't taken yet.
        """
        size, known = self.page_size, sequence.num_known + sequence.pending
        reach = min(known + self.horizon_tokens, sequence.max_length)
        ahead = pages_for_each(reach, size)
        own = ahead - pages_for_each(known, size) + sequence.lease.shares_partial_page
        if sequence.pending_samples:
            own += len(sequence.pending_samples) * (ahead - full_pages(known, size))
        if self._windows.num_groups:
            own += self._windows_ahead(sequence, known, reach)
        return own

    def _windows_ahead(self, sequence: SequenceState, known: int, reach: int) -> int:
        """Window pages among these."""
        windows, lease = self._windows, sequence.lease
        most = windows.num_held(reach)
        # One that waits is about to take those of its known tokens.
        held = windows.num_held(known) if lease.windows is None else len(lease.windows.held)
        own = max(0, most - held) + windows.num_groups * lease.shares_partial_page
        behind = pages_for_each(reach, self.page_size) - full_pages(known, self.page_size)
        return own + len(sequence.pending_samples) * min(most, windows.num_groups * behind)
