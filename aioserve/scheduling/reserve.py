"""Reserve of pages for output that doesn't exist yet."""

from __future__ import annotations

from collections.abc import Sequence

from aioserve.kv.groups.base import Group
from aioserve.paging.pages import full_pages, pages_for_each
from aioserve.scheduling.sequence import SequenceState

__all__ = ["OutputReserve"]


class OutputReserve:
    """Keeps pages for the next `horizon_tokens` tokens of every running sequence.

    Too small a reserve admits requests that are preempted soon after, so their prompts are computed
    twice. Too large a reserve leaves pages empty. The length of a completion can't be foreseen, so
    nothing is reserved beyond the horizon.
    """

    def __init__(self, page_size: int, horizon_tokens: int, groups: Sequence[Group]) -> None:
        self.page_size = page_size
        self.horizon_tokens = horizon_tokens
        self._beside = tuple(enumerate(groups))[1:]

    def pages_ahead(self, sequence: SequenceState) -> int:
        """Pages that the sequence may need within the horizon, beyond those of its known tokens.

        Counts the pages of further samples of its prompt: they share its full pages and need their
        own after those. Also counts pages that groups take later, with the rest of its prompt.
        """
        size, known = self.page_size, sequence.num_known + sequence.pending
        reach = min(known + self.horizon_tokens, sequence.max_length)
        ahead, now = pages_for_each(reach, size), pages_for_each(known, size)
        own = ahead - now + sequence.lease.shares_partial_page
        if sequence.pending_samples:
            own += len(sequence.pending_samples) * (ahead - full_pages(known, size))
        for at, group in self._beside:
            lease = sequence.lease
            table = lease.tables[at] if lease.tables else None
            own += group.num_ahead(table, now, ahead) + group.width * lease.shares_partial_page
            behind = group.width * (ahead - full_pages(known, size))
            own += len(sequence.pending_samples) * min(group.need(ahead), behind)
        return own
