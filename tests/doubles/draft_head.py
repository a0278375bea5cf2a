"""A head that predicts `FakeDevice` from its own pages and pages of states. If they hold other
data, it is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from aioserve.execution.speculation.drafts.computed_drafter import DraftOptions
from aioserve.execution.speculation.drafts.draft_head import DraftHead
from aioserve.execution.speculation.drafts.state_pages import StatePages
from aioserve.ops import Drawn, HostBatch, SampleRows
from aioserve.steps.plan import StepPlan
from aioserve.testing.fake_device import FakeDevice, entries_of, token_of, weights_of

__all__ = ["EntryHead", "HeadOfEntries"]

JUNK = 0xDEAD


class EntryPages:
    """The part of a KV cache that a head reads: pages of entries."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.entries: npt.NDArray[np.uint64] = np.full((num_pages, page_size), JUNK, np.uint64)
        self.drafted: npt.NDArray[np.bool_] = np.zeros((num_pages, page_size), np.bool_)
        """True for entries computed from the head's own state, and not from the target's."""
        self.taken_in: npt.NDArray[np.int64] = np.full((num_pages, page_size), -1, np.int64)
        """The token that came after each entry."""


class HeadOfEntries:
    """Head, target and backend in one.

    Hidden states are entries of `FakeDevice`, int64 `[T, 2]`, with the sums that the next tokens
    are drawn from. It reads all entries of its own pages. It is wrong about the tokens at the
    positions `wrong_at`.
    """

    kind = "eagle3"
    dtype = torch.int64

    def __init__(self, max_model_len: int = 10**6) -> None:
        self.max_model_len = max_model_len
        self.wrong_at: frozenset[int] = frozenset()
        self.kept_states = torch.empty(0, 1, dtype=torch.int64)
        self.most_at_once = 0

    @property
    def backend(self) -> Any:
        return self

    def allocate_slots(self, num_slots: int) -> torch.Tensor:
        return torch.zeros(num_slots, dtype=torch.int64)

    def prepare(self, host: HostBatch, kv: EntryPages, last_tokens: torch.Tensor) -> HostBatch:
        return host

    def copy_pages(self, caches: Sequence[EntryPages], copies: npt.NDArray[np.int32]) -> None:
        for source_cache, source, target_cache, target, count in copies.tolist():
            entries = caches[source_cache].entries[source, :count]
            caches[target_cache].entries[target, :count] = entries
            caches[target_cache].entries[target, count:] = JUNK
            drafted = caches[source_cache].drafted[source, :count]
            caches[target_cache].drafted[target, :count] = drafted
            taken_in = caches[source_cache].taken_in[source, :count]
            caches[target_cache].taken_in[target, :count] = taken_in

    def forward(
        self, hidden: torch.Tensor, host: HostBatch, kv: EntryPages, *, fuses: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert host.context_lens.max() <= self.max_model_len
        self.most_at_once = max(self.most_at_once, len(host.token_ids))
        own = hidden[:, 0].numpy().view(np.uint64)
        kv.entries.reshape(-1)[host.token_locations[0]] = own
        assert len(np.unique(host.token_locations[0])) == len(host.token_ids)
        kv.taken_in.reshape(-1)[host.token_locations[0]] = host.token_ids
        goes_on = not fuses
        assert hidden.shape[1] == 1 + goes_on
        kv.drafted.reshape(-1)[host.token_locations[0]] = goes_on
        found: list[list[int]] = []
        for row in host.logit_rows.tolist():
            sequence = int(np.searchsorted(host.query_start, row, side="right")) - 1
            position = int(host.positions[row])
            pages = host.page_table[0, sequence]
            known = kv.entries[pages].reshape(-1)[: position + 1]
            is_stale = not goes_on and kv.drafted[pages].reshape(-1)[: position + 1].any()
            is_stale |= self._has_others(kv, pages, known, int(host.token_ids[row]))
            entry = entries_of(host.token_ids[row : row + 1], position + 1, int(known[-1]))
            every = np.concatenate((known, entry)) * weights_of(position + 2)
            total = every.sum(dtype=np.uint64) + np.uint64(
                is_stale or position + 2 in self.wrong_at
            )
            found.append(np.array([entry[0], total]).view(np.int64).tolist())
        made = torch.tensor(found, dtype=torch.int64).view(-1, 2)
        return made, made

    def _has_others(
        self, kv: EntryPages, pages: npt.NDArray[np.int32], known: Any, token_id: int
    ) -> bool:
        """True if a token was taken in that comes in another sequence. The last one of a page may
        be shared and doesn't count."""
        taken_in = kv.taken_in[pages].reshape(-1)[: len(known)]
        assert taken_in[-1] == token_id
        for position in range(len(known) - 1):
            if position % kv.page_size == kv.page_size - 1:
                continue
            own = taken_in[position : position + 1]
            if entries_of(own, position + 1, int(known[position]))[0] != known[position + 1]:
                return True
        return False

    def draw(
        self,
        hidden: torch.Tensor,
        host: HostBatch,
        kv: EntryPages,
        rows: SampleRows,
        last_tokens: torch.Tensor,
        *,
        fuses: bool,
    ) -> tuple[Drawn, torch.Tensor]:
        made, _ = self.forward(hidden, host, kv, fuses=fuses)
        totals = made[:, 1].numpy().view(np.uint64).tolist()
        seeds = rows.seeds.tolist()
        drawn = [token_of(total, seed) for total, seed in zip(totals, seeds, strict=True)]
        return Drawn(torch.tensor(drawn), {}), made


class EntryHead(DraftHead):
    """Drafter by a `HeadOfEntries` beside a device, whose entries are the states that it reads."""

    def __init__(
        self, head: HeadOfEntries, device: FakeDevice, *, num_pages: int, most_tokens: int
    ) -> None:
        size, host_pages = device.page_size, len(device._tiers[1])
        states = torch.full((num_pages, size, 1), JUNK, dtype=torch.int64)
        host_states = torch.full((host_pages, size, 1), JUNK) if host_pages else None
        super().__init__(
            cast(Any, head),
            cast(Any, head),
            cast(Any, EntryPages(num_pages, size)),
            StatePages(states, host_states),
            DraftOptions(
                num_slots=device.num_slots,
                num_groups=device.num_groups,
                max_model_len=head.max_model_len,
                max_sequences=device.num_slots,
                max_draft_tokens=most_tokens,
                most_tokens=most_tokens,
            ),
        )
        self._device = device

    def computed(
        self,
        plan: StepPlan,
        rows: npt.NDArray[np.int64] | None = None,
        locations: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Find a plan's entries at its own places. What else was computed doesn't matter."""
        entries = self._device._entries[self._locations(plan, self._device.page_size)]
        cast(Any, self._target).kept_states = torch.from_numpy(entries.view(np.int64))[:, None]
        super().computed(plan)
