"""A device that computes no model and notices every wrong page.

In place of a token's keys and values, it keeps an entry. The entry depends on the token and on the
entry of the token before, which is read from its page. So two prefixes have equal entries exactly
if they are equal. Pages may then be shared, and a wrong page spoils everything that is computed
over it. The next token is a hash of all entries of the sequence, read through the page table of the
step. The right tokens are those of `expected_tokens`.

    entry[p]   = entry[p - 1] + scatter(token[p], p)      modulo 2**63
    next token = scatter(sum of entry[p] * (2 p + 1), seed)

Junk has bit 63 set, which no valid entry has, and results computed from junk are junk.

Each group of window layers keeps the entries in pages of its own, scrambled by its number. A token
reads those of its window again, and no others. If they differ from those of the first group, the
token is another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.drafting.drafter import Drafter
from aioserve.execution.speculation.resolver import Resolver
from aioserve.execution.speculation.verified_rows import VerifiedRows
from aioserve.paging.layout import first_seen
from aioserve.paging.pages import (
    capacity_tokens,
    full_pages,
    pages_for,
    token_location,
    tokens_in_part,
)
from aioserve.request import Logprobs, TopLogprob
from aioserve.sampling.masks import LateMasks, Mask
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.page_tables import SlotPageTables
from aioserve.steps.pages import PageCopy
from aioserve.steps.plan import PENDING_TOKEN, SampleRow, SlotStart, StepPlan, WorkItem

__all__ = [
    "HIDDEN_SIZE",
    "JUNK",
    "VOCAB_SIZE",
    "FakeDevice",
    "RowFailedError",
    "entries_of",
    "expected_hidden",
    "expected_logprobs",
    "expected_tokens",
    "hidden_of",
    "logprobs_of",
    "token_of",
    "weights_of",
]

VOCAB_SIZE = 256
"""Number of token ids: one per byte."""
HIDDEN_SIZE = 2

JUNK = 0xDEAD_DEAD_DEAD_DEAD
JUNK_BIT = 1 << 63
MULTIPLIER = 0xD6E8FEB86659FD93
TOKEN_STRIDE = 0x100000001B3
BITS_64 = (1 << 64) - 1
BITS_63 = (1 << 63) - 1
FIRST_WEIGHTS = 4096
NO_PAGES = np.zeros(1, np.int32)


def expected_tokens(prompt_ids: Sequence[int], count: int, seed: int = 0) -> list[int]:
    """Return the `count` tokens that follow `prompt_ids` on a `FakeDevice`, computed without
    pages.
    """
    entries = entries_of(np.array(prompt_ids, np.int64), 0, 0)
    position = len(entries)
    total = int((entries * weights_of(position)).sum(dtype=np.uint64))
    entry = int(entries[-1])
    tokens = []
    for _ in range(count):
        token_id = token_of(total, seed)
        tokens.append(token_id)
        entry = (entry + _scatter(token_id * TOKEN_STRIDE + position + 1)) & BITS_63
        total = (total + entry * (2 * position + 1)) & BITS_64
        position += 1
    return tokens


def expected_logprobs(token_ids: Sequence[int], start: int = 1, *, top: int = 0) -> list[Logprobs]:
    """Return the log-probabilities of the tokens from position `start`, at least 1, to the last.

    Each has the `top` most likely tokens.
    """
    entries = entries_of(np.array(token_ids, np.int64), 0, 0)
    totals = (entries * weights_of(len(entries))).cumsum(dtype=np.uint64).tolist()
    return [logprobs_of(totals[p - 1], token_ids[p], top) for p in range(start, len(token_ids))]


def expected_hidden(token_ids: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return stand-ins for the tokens' hidden states, float64 `[len(token_ids), HIDDEN_SIZE]`."""
    entries = entries_of(np.array(token_ids, np.int64), 0, 0)
    totals = (entries * weights_of(len(entries))).cumsum(dtype=np.uint64).tolist()
    return np.array([hidden_of(total, position) for position, total in enumerate(totals)])


class RowFailedError(Exception):
    """No token can be drawn for one row; its request ends with this message."""


class FakeDevice:
    """Pages, host pages and slots. Synchronous: one step at a time.

    A plan that no runner could compute raises `InvariantError`, as `StepPlan.check` does, or
    ValueError. The latter is for page tables that are too short, for pages or slots outside the
    device, and for slots that haven't started. It is also for a page that two items write, and for
    a mask without structured output. Masks don't affect the drawn token: one that forbids it is an
    error.

    Unlike other runners it verifies draft tokens, and computes items that have parents.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_slots: int,
        num_host_pages: int = 0,
        *,
        num_window_groups: int = 0,
        window: int = 0,
        drafter: Drafter | None = None,
    ) -> None:
        """Make a device.

        `num_window_groups` groups of layers keep the last `window` tokens, as in
        `aioserve.paging.layout`. The `drafter` makes the draft tokens that plans ask for; None:
        there are none.
        """
        self.page_size = page_size
        self.num_groups: int = 1 + num_window_groups
        self._windows = (0, *[window] * num_window_groups)
        self._kv = np.full((num_pages, page_size), JUNK, np.uint64)
        self._tiers = (self._kv, np.full((num_host_pages, page_size), JUNK, np.uint64))
        self._entries = self._kv.reshape(-1)
        self.num_slots = num_slots
        self._slots: list[SlotStart | None] = [None] * num_slots
        self.page_tables: SlotPageTables = SlotPageTables(num_slots, self.num_groups)
        self._last_tokens = [PENDING_TOKEN] * num_slots
        self._weights = weights_of(FIRST_WEIGHTS)
        self._resolver = Resolver(drafter)

    def take_drafter(self, drafter: Drafter) -> None:
        """Implement `LoadedModel.take_drafter`."""
        self._resolver = Resolver(drafter)

    def execute(self, plan: StepPlan, masks: LateMasks | None = None) -> StepOutcome:
        """End and start slots, do the copies in order, write the KV of every item, then sample.

        Sampling reads what the pages hold: an item may read what an earlier item of the same step
        writes.
        """
        self._change_slots(plan)
        plan = self._resolver.resolved(plan)
        self._check(plan)
        for copy in plan.copies:
            self._copy(copy)
        for item in plan.items:
            if item.count == 1:
                self._write_one(item)
            else:
                self._write(item)
        token_ids: list[int] = []
        counts: dict[int, int] = {}
        failures: dict[int, str] = {}
        logprobs: dict[int, Logprobs] = {}
        rows = [(item, row) for item in plan.items for row in item.rows]
        verified = VerifiedRows.of(plan)
        if masks is not None and plan.num_verified:
            masks.spread(verified.firsts, verified.draft_tokens)
        found = {} if masks is None else dict(masks.found(0))
        late = frozenset() if masks is None else masks.late or frozenset()
        for index, (item, row) in enumerate(rows):
            first, top = len(token_ids), self._start_of(row.slot).params.logprobs
            place = verified.firsts[index]
            drawn = range(place, place + verified.counts[index])
            own = [found.get(at) for at in drawn if at not in late]
            try:
                token_ids += self._sample(item, row, own)
            except RowFailedError as error:
                failures[index] = str(error)
                token_ids.append(0)  # which counts as nothing
            if len(token_ids) != first + 1:
                counts[index] = len(token_ids) - first
            for at in range(first, len(token_ids) if top is not None else first):
                total = self._total(item, row.offset + at - first)
                logprobs[at] = self._logprobs(total, token_ids[at], top or 0)
        outcome = StepOutcome(
            step=plan.step,
            token_ids=tuple(token_ids),
            token_counts=counts,
            drafted=verified.drafted,
            row_failures=failures,
            logprobs=logprobs,
            scored=tuple([score for item in plan.items for score in self._scored(item)]),
            pooled=tuple([self._pooled(i) for i in plan.items if i.pooled is not None]),
        )
        return self._resolver.noted(plan, outcome)

    def execute_in_part(self, plan: StepPlan, parts: int) -> None:
        """Do the first `parts` of the copies and writes of a step, as if it failed then."""
        copies, items = plan.copies[:parts], plan.items[: max(0, parts - len(plan.copies))]
        self.execute(msgspec.structs.replace(plan, copies=copies, items=items))

    def scribble(self, *page_ids: npt.NDArray[np.integer[Any]]) -> None:
        """Fill pages of each tier, nearest first, with junk.

        Give pages that nobody may read before they are written again.
        """
        for kv, pages in zip(self._tiers, page_ids, strict=False):
            kv[pages] = JUNK

    def holds_junk(self, token_locations: Sequence[int]) -> bool:
        """Return true if any of these places holds no valid entry.

        Places are counted in tokens from the start of the cache.
        """
        return bool(
            (self._entries[np.array(token_locations, np.int64)] & np.uint64(JUNK_BIT)).any()
        )

    def pages_of(
        self, item: WorkItem, tables: SlotPageTables | None = None
    ) -> list[npt.NDArray[np.int32]]:
        """Return the pages of each group that an item reads or writes, in order of index.

        `tables` replaces the device's own page tables.
        """
        tables, size = tables or self.page_tables, self.page_size
        end = pages_for(item.index_end, size)
        return [
            tables.page_ids(item.slot, group)[full_pages(seen, size) : end]
            for group, seen in enumerate(first_seen(item.index, one) for one in self._windows)
        ]

    def num_written(self, item: WorkItem) -> int:
        """Return the number of pages that an item writes: the last ones of each group."""
        return pages_for(item.index_end, self.page_size) - full_pages(item.index, self.page_size)

    def _change_slots(self, plan: StepPlan) -> None:
        self._resolver.take(plan)
        self.page_tables.take(plan)
        for slot in plan.ended_slots:
            self._slots[slot] = None
        for start in plan.started_slots:
            self._slots[start.slot] = start
            self._last_tokens[start.slot] = PENDING_TOKEN

    def _check(self, plan: StepPlan) -> None:
        plan.check()
        num_pages, page_size = self._kv.shape
        writers: dict[int, tuple[int, int]] = {}
        named = [NO_PAGES]
        for item in plan.items:
            end = item.index_end
            what = f"step {plan.step}: item of sequence {item.sequence_id}"
            for slot in (item.slot, *(row.slot for row in item.rows)):
                if not 0 <= slot < len(self._slots) or self._slots[slot] is None:
                    raise ValueError(f"{what} names slot {slot}, which hasn't started")
            used = self.page_tables.page_ids(item.slot)[: pages_for(end, page_size)]
            if len(used) * page_size < end:
                raise ValueError(f"{what} ends at {end} and has {len(used)} pages of {page_size}")
            for group, pages in enumerate(self.pages_of(item)):
                named.append(pages)
                for page in pages[-self.num_written(item) :].tolist():
                    other = writers.setdefault(page, (item.sequence_id, group))
                    if other != (item.sequence_id, group):
                        raise ValueError(f"{what} writes page {page}, as does sequence {other[0]}")
        page_ids = np.concatenate(named)
        if page_ids.min() < 0 or page_ids.max() >= num_pages:
            raise ValueError(f"step {plan.step} names pages {page_ids.tolist()} of {num_pages}")

    def _copy(self, copy: PageCopy) -> None:
        source, target = self._tiers[copy.from_tier], self._tiers[copy.to_tier]
        count = copy.num_tokens
        if not (
            0 <= copy.source < len(source)
            and 0 <= copy.target < len(target)
            and 0 < count <= self.page_size
        ):
            raise ValueError(
                f"{copy}: {[len(kv) for kv in self._tiers]} pages in each tier, of "
                f"{self.page_size} tokens"
            )
        target[copy.target, :count] = source[copy.source, :count]
        target[copy.target, count:] = JUNK

    def _write(self, item: WorkItem) -> None:
        ids = np.array(item.token_ids, np.int64)
        ids[ids == PENDING_TOKEN] = self._last_tokens[item.slot]
        indices = np.arange(item.index, item.index_end)
        entries = entries_of(ids, item.start, self._entry_before(item))
        for group in range(self.num_groups):
            table = self.page_tables.page_ids(item.slot, group)
            pages = table[full_pages(indices, self.page_size)]
            own = entries ^ np.uint64(_scramble(group))
            self._kv[pages, tokens_in_part(indices, self.page_size)] = own

    def _write_one(self, item: WorkItem) -> None:
        token_id, start = int(item.token_ids[0]), item.start
        if token_id == PENDING_TOKEN:
            token_id = self._last_tokens[item.slot]
        before = self._entry_before(item)
        entry = (before + _scatter(token_id * TOKEN_STRIDE + start + 1)) & BITS_63
        entry |= before & JUNK_BIT
        for group in range(self.num_groups):
            table = self.page_tables.page_ids(item.slot, group)
            at = token_location(table, item.index, self.page_size)
            self._entries[at] = entry ^ _scramble(group)

    def _entry_before(self, item: WorkItem) -> int:
        """Return the entry of the token before the item's first, from the page that holds it."""
        if item.index == 0:
            return 0
        place, offset = divmod(item.index - 1, self.page_size)
        page = int(self.page_tables.page_ids(item.slot)[place])
        return self._entries.item(page * self.page_size + offset)

    def _sample(self, item: WorkItem, row: SampleRow, masks: Sequence[Mask | None]) -> list[int]:
        """Draw one token; of draft tokens, as many as equal the drawn ones, and one after them.

        `masks` are those of each place in turn, up to one that is late.
        """
        start = self._start_of(row.slot)
        token_ids: list[int] = []
        for offset, mask in enumerate(masks, row.offset):
            if mask is not None and not start.params.is_guided:
                raise ValueError(f"a row of slot {row.slot} has a mask {mask}")
            token_id = self._drawn(self._total(item, offset), item, row, start)
            if mask is not None and not mask[token_id // 32] >> token_id % 32 & 1:
                self.stray(row, token_id)
            token_ids.append(token_id)
            if offset + 1 < item.count and item.token_ids[offset + 1] != token_id:
                break
        if token_ids:
            self._last_tokens[row.slot] = token_ids[-1]
        return token_ids

    def stray(self, row: SampleRow, token_id: int) -> None:
        """Report that a token is drawn that the row's mask forbids. Raises `ValueError`."""
        raise ValueError(f"slot {row.slot} draws {token_id}, which its mask doesn't allow")

    def _drawn(self, total: int, item: WorkItem, row: SampleRow, start: SlotStart) -> int:
        return token_of(total, start.seed)

    def _logprobs(self, total: int, token_id: int, count: int) -> Logprobs:
        return logprobs_of(total, token_id, count)

    def _total(self, item: WorkItem, offset: int) -> int:
        """Return the weighted sum of the entries up to the item's token at `offset`."""
        end = item.index + offset + 1
        if end > len(self._weights):
            self._weights = weights_of(2 * end)
        entries = self._entries_of(item, 0, end)
        total = int(np.dot(entries, self._weights[:end]))
        for group in range(1, self.num_groups):
            first = first_seen(end - 1, self._windows[group])
            own = self._entries_of(item, first, end, group)
            if not np.array_equal(own ^ np.uint64(_scramble(group)), entries[first:]):
                total = _scatter(total + group)
        return total

    def _entries_of(
        self, item: WorkItem, first: int, end: int, group: int = 0
    ) -> npt.NDArray[np.uint64]:
        """Return the entries at indices `[first, end)`, from the pages of one group."""
        size = self.page_size
        at = full_pages(first, size)
        pages = self.page_tables.page_ids(item.slot, group)[at : pages_for(end, size)]
        begin = capacity_tokens(at, size)
        return self._kv[pages].reshape(-1)[first - begin : end - begin]

    def _scored(self, item: WorkItem) -> list[Logprobs]:
        scored = item.scored
        if scored is None:
            return []
        count = self._start_of(item.slot).params.prompt_logprobs or 0
        return [
            logprobs_of(self._total(item, offset), token_id, count)
            for offset, token_id in enumerate(scored.target_ids.tolist(), scored.offset)
        ]

    def _pooled(self, item: WorkItem) -> npt.NDArray[np.float32]:
        pooled = item.pooled
        if pooled is None:
            return np.zeros(HIDDEN_SIZE, np.float32)
        offsets = range(pooled.offset, pooled.offset + pooled.count)
        states = [hidden_of(self._total(item, o), item.start + o) for o in offsets]
        return np.array(states, np.float32).sum(axis=0)

    def _start_of(self, slot: int) -> SlotStart:
        start = self._slots[slot]
        if start is None:  # checked before
            raise ValueError(f"slot {slot} hasn't started")
        return start


def entries_of(ids: npt.NDArray[np.int64], start: int, before: int) -> npt.NDArray[np.uint64]:
    """Return the entries of the tokens `ids` from position `start`, after an entry `before`."""
    count = len(ids)
    numbers = np.arange(start + 1, start + 1 + count, dtype=np.uint64)
    values = ids.astype(np.uint64) * np.uint64(TOKEN_STRIDE) + numbers
    for _ in range(2):
        values = (values ^ (values >> np.uint64(32))) * np.uint64(MULTIPLIER)
    values ^= values >> np.uint64(32)
    entries = np.cumsum(values, dtype=np.uint64) + np.full(1, before, np.uint64)
    return (entries & np.uint64(BITS_63)) | np.uint64(before & JUNK_BIT)


def token_of(total: int, seed: int) -> int:
    """Return the token drawn with a seed from the weighted sum of a sequence's entries."""
    return _scatter(total ^ seed) % VOCAB_SIZE


def logprobs_of(total: int, token_id: int, count: int = 0) -> Logprobs:
    """Return stand-ins for the log-probabilities of a token, and of the `count` most likely ones.

    They follow from the weighted sum `total`.
    """

    def logprob(token_id: int) -> float:
        return -token_of(total, token_id) / VOCAB_SIZE

    ids = sorted(range(VOCAB_SIZE), key=logprob, reverse=True)[:count] if count else ()
    return Logprobs(logprob(token_id), tuple([TopLogprob(id, logprob(id)) for id in ids]))


def hidden_of(total: int, position: int) -> list[float]:
    """Return a stand-in for the hidden state of the token at `position`.

    Its numbers are small and whole, so that sums are exact.
    """
    return [float(position + 1), float(token_of(total, 0))]


def _scramble(group: int) -> int:
    """Return the difference of entries in the pages of another group; 0 for the first."""
    return _scatter(group) & BITS_63


def _scatter(value: int) -> int:
    value &= BITS_64
    value = ((value ^ (value >> 32)) * MULTIPLIER) & BITS_64
    value = ((value ^ (value >> 32)) * MULTIPLIER) & BITS_64
    return value ^ (value >> 32)


def weights_of(count: int) -> npt.NDArray[np.uint64]:
    """Return the weights of the first `count` positions in the weighted sum."""
    return np.arange(1, 2 * count, 2, dtype=np.uint64)
